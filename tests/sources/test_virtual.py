"""The virtual device: a cell's CPU tensors on a modelled GPU, and errors where the GPU would have raised them."""

from __future__ import annotations

import copy
import sys

import pytest

import nbmemprof as mp
from nbmemprof.errors import FlagError, NbmemprofError
from nbmemprof.sources import virtual

torch = pytest.importorskip("torch")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _fresh():
    virtual._feeds.clear()
    yield
    virtual._feeds.clear()


def _summary(capture):
    return mp.summary(capture).row(0, named=True)


@pytest.mark.cost(0.6)  # the first pays for what torch imports
def test_sizes_are_those_of_the_allocator_and_not_of_the_cpu():
    """5 MiB take a 20 MiB segment, and 100 bytes a block of 512 in one of 2 MiB."""
    with mp.record(as_device="H200:1GiB") as rec:
        kept = [torch.empty(5 * MIB, dtype=torch.uint8), torch.empty(100, dtype=torch.uint8)]
    row = _summary(rec.capture)
    assert len(kept) == 2
    assert (row["device"], row["end_allocated_bytes"], row["peak_reserved_bytes"]) == (0, 5 * MIB + 512, 22 * MIB)
    assert rec.capture.meta["origin"] == "modelled"
    assert rec.capture.meta["device"] == "a virtual H200 (1 GiB)"
    assert "not a CUDA kernel's" in rec.capture.meta["warnings"][0]


def test_error_comes_out_of_the_call_that_asks_and_torch_s_except_catches_it():
    kept = []
    with mp.record(as_device="H200:64MiB") as rec:
        try:
            for _ in range(10):
                kept.append(torch.empty(20 * MIB, dtype=torch.uint8))
            reached = True
        except torch.OutOfMemoryError as error:
            reached, text = False, str(error)
        after = torch.ones(1)  # the cell goes on
    assert (len(kept), reached, float(after)) == (3, False, 1.0)
    assert "Tried to allocate 20.00 MiB" in text
    assert "64.00 MiB" in text
    frame = mp.oom(rec.capture)
    assert frame["requested_bytes"].to_list() == [20 * MIB]
    assert frame["site"][0].startswith("test_virtual.py:")
    assert _summary(rec.capture)["ooms"] == 1


def test_fragmentation_refuses_what_would_fit_in_one_piece():
    """Six pieces of 10 MiB, every other one freed: 30 MiB are free in halves of segments, and 20 MiB don't fit."""
    with mp.record(as_device="H200:60MiB") as rec:
        pieces = [torch.empty(9 * MIB, dtype=torch.uint8) for _ in range(6)]
        del pieces[::2]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20 * MIB, dtype=torch.uint8)
    row = mp.oom(rec.capture).row(0, named=True)
    assert row["free_bytes_in_list"] == 33 * MIB
    assert row["largest_free_bytes"] < 20 * MIB
    assert mp.replay(rec.capture).meta["verdict"]["exact"]


def scratchy(like):
    """A torch function written in Python, as torch's own are: it hands itself to the mode. Three requests of 16 MiB."""
    if torch.overrides.has_torch_function((like,)):
        return torch.overrides.handle_torch_function(scratchy, (like,), like)
    done = [torch.ones(4 * MIB)]
    done.append(torch.zeros(4 * MIB))  # refused
    done.append(torch.full((4 * MIB,), 2.0))
    return done


@pytest.mark.cost(0.5)
def test_within_a_torch_function_written_in_python_the_error_comes_from_the_call_that_asks():
    before = sys.getprofile()
    with mp.record(as_device="H200:40MiB") as rec:
        like = torch.empty(4 * MIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            scratchy(like)
        inner = [frame for frame in caught.traceback if frame.name == "scratchy"][-1]
    assert str(inner.statement).endswith("# refused")
    assert mp.oom(rec.capture).height == 1
    assert not any("were not asked" in w for w in rec.capture.meta["warnings"])
    assert sys.getprofile() is before


@pytest.mark.cost(0.5)
def test_attention_written_in_python_is_refused_inside_and_can_be_caught():
    x = torch.ones(512, 16, 64)
    layer = torch.nn.MultiheadAttention(64, 4)
    with mp.record(as_device="H200:60MiB") as rec:
        x = x + 1
        with pytest.raises(torch.OutOfMemoryError) as caught:
            layer(x, x, x, need_weights=True)
        again = x + 1  # the cell goes on
    assert again.numel()
    assert caught.traceback[-1].path.name != "test_virtual.py"
    assert "multi_head_attention_forward" in {frame.name for frame in caught.traceback}
    assert mp.oom(rec.capture).height == 1


def test_operators_after_a_refusal_inside_one_call_are_not_asked():
    with mp.record(as_device="H200:40MiB") as rec, pytest.raises(torch.OutOfMemoryError):
        torch.nn.functional.pairwise_distance(torch.empty(4, 1 << 20), torch.empty(4, 1 << 20))
    assert _summary(rec.capture)["ooms"] == 1


@pytest.mark.cost(0.6)
def test_backward_stops_at_a_node_after_the_one_that_asked():
    """Four layers of 16 MiB gradients each; the device has room for two of them."""
    with mp.record(as_device="H200:260MiB") as rec:
        weights = [torch.ones(2048, 2048, requires_grad=True) for _ in range(6)]
        x = torch.ones(1, 2048)
        for weight in weights:
            x = x @ weight * 1e-3
        x.sum().backward()
        for weight in weights:
            weight.grad = None
        kept = torch.empty(132 * MIB, dtype=torch.uint8)
        x = torch.ones(1, 2048)
        for weight in weights:
            x = x @ weight * 1e-3
        with pytest.raises(torch.OutOfMemoryError):
            x.sum().backward()
        made = [weight.grad is not None for weight in weights]
    assert kept.numel()
    assert made[-1]
    assert not made[0], "backward went on to its end after the refusal"
    assert mp.oom(rec.capture).height == 1


def test_what_is_computed_and_allocated_is_as_without():
    """Gradients are summed in place, as on a device without any mode; a dispatch mode would make new ones."""

    def step():
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 64)
        for _ in range(2):
            layer(torch.randn(8, 64)).square().mean().backward()
        return layer.weight.grad

    plain = step()
    with mp.record("torch_cpu") as host:
        step()
    with mp.record(as_device="H200:1GiB") as rec:
        modelled = step()
    assert torch.equal(plain, modelled)
    asked = rec.capture.events.filter(rec.capture.events["action"] == "alloc")["requested_bytes"].to_list()
    assert asked == host.capture.events.filter(host.capture.events["action"] == "alloc")["requested_bytes"].to_list()


@pytest.mark.cost(0.6)
def test_categories_and_lines_are_the_cpu_recording_s():
    with mp.record(as_device="H200:1GiB") as rec:
        layer = torch.nn.Linear(512, 512)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.randn(64, 512)).sum().backward()
        optimizer.step()
    parts = dict(mp.breakdown(rec.capture, at="end").select("category", "requested_bytes").iter_rows())
    weights = 4 * (512 * 512 + 512)
    assert parts["weights"] == weights
    assert parts["gradients"] == weights
    assert parts["optimizer_state"] == pytest.approx(2 * weights, abs=64)


def test_tensors_stay_on_the_device_for_the_next_window_and_go_when_they_are_freed():
    with mp.record(as_device="H200:64MiB") as first:
        kept = torch.empty(40 * MIB, dtype=torch.uint8)
    with mp.record(as_device="H200:64MiB") as second, pytest.raises(torch.OutOfMemoryError):
        torch.empty(40 * MIB, dtype=torch.uint8)
    del kept
    with mp.record(as_device="H200:64MiB") as third:
        kept = torch.empty(40 * MIB, dtype=torch.uint8)
    assert kept.numel()
    rows = [_summary(rec.capture) for rec in (first, second, third)]
    assert [row["start_allocated_bytes"] for row in rows] == [0, 40 * MIB, 0]
    assert [row["ooms"] for row in rows] == [0, 1, 0]
    assert not [w for rec in (first, second, third) for w in rec.capture.meta["warnings"] if w.startswith("inconsistent")]


def test_no_mode_is_left_behind_also_where_another_stands_above_it():
    from torch import overrides

    class Other(overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    rec, other = mp.record(as_device="H200:64MiB"), Other()
    rec.start()
    other.__enter__()
    rec.stop()
    assert overrides._get_current_function_mode_stack() == [other]
    other.__exit__(None, None, None)


@pytest.mark.cost(4)
def test_compiled_functions_checkpoints_and_fake_tensors_go_on_working():
    from torch._dynamo import eval_frame
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.checkpoint import checkpoint

    compiled = torch.compile(lambda x: (x @ x).relu().sum(), backend="eager")
    x = torch.randn(64, 64, requires_grad=True)
    expected = compiled(x).detach()
    stance = eval_frame._stance.stance
    with mp.record(as_device="H200:256MiB") as rec:
        value = compiled(x)
        value.backward()
        checkpoint(torch.nn.Linear(64, 64), x, use_reentrant=False).sum().backward()
        with FakeTensorMode():
            torch.empty(1 << 30)  # no memory, and so no refusal
        torch.func.grad(lambda t: (t**2).sum())(x.detach())
    assert torch.equal(value.detach(), expected)
    assert eval_frame._stance.stance == stance
    assert torch.equal(compiled(x).detach(), expected)
    row = _summary(rec.capture)
    assert row["ooms"] == 0
    assert mp.replay(rec.capture).meta["verdict"]["exact"]


def test_a_second_window_on_the_same_device_is_told_so():
    with mp.record(as_device="H200:64MiB") as outer, mp.record(as_device="H200:64MiB") as inner:
        kept = torch.empty(MIB)
    assert kept.numel()
    assert outer.capture.events.height
    assert "in use by a cell around this one" in inner.capture.meta["warnings"][0]


@pytest.mark.parametrize(("words", "says"), [("B9000", "Say how much it has"), ("H200:", "size"), ("H200:1KiB", "smallest segment"), (":8GiB", "names no device")])
def test_words_that_name_no_device_are_refused_before_anything_runs(words, says):
    with pytest.raises(FlagError, match=says):
        mp.record(as_device=words)


def test_a_known_card_needs_no_size_and_another_source_is_refused():
    assert virtual.device_words("H200") == ("H200", 150_109_880_320)
    with pytest.raises(NbmemprofError, match="can't be combined"):
        mp.record("torch_history", as_device="H200:8GiB")


@pytest.mark.cost(0.7)
def test_a_cell_under_the_magic_meets_the_error_and_its_report_says_modelled(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    from nbmemprof import magics

    shell = InteractiveShell()
    magics.load(shell)
    try:
        result = shell.run_cell("%%memprof --as H200:32MiB --view text\nimport torch\nkept = [torch.empty(10 << 20, dtype=torch.uint8) for _ in range(9)]")
        said = capsys.readouterr().out
        bad = shell.run_cell("%%memprof --as B9000\nran = True")
    finally:
        magics.unload(shell)
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError)
    assert "modelled, not measured on a virtual H200 (32 MiB)" in said
    assert "Out of memory at In[" in said
    assert bad.error_in_exec is not None or bad.error_before_exec is not None
    assert "ran" not in shell.user_ns


def test_a_python_number_takes_nothing_on_the_card():
    """Torch wraps it into a CPU tensor without a dimension; a tensor without a dimension of the cell's own is on the card, and so is its copy."""
    weight = torch.ones(1000, requires_grad=True)
    with mp.record(as_device="H200:64MiB") as rec:
        kept = [torch.zeros(1000) + 1, weight * 2.5, 2**weight]
        kept[0] += 1
        kept[0][3] = 1.0
    assert set(rec.capture.allocations["requested_bytes"].to_list()) == {4000}
    assert _summary(rec.capture)["end_allocated_bytes"] == 3 * 4096
    with mp.record(as_device="H200:32MiB") as rec:
        counter = torch.tensor(3)
        pair = [counter, copy.deepcopy(counter), counter.clone()]
    assert len(pair) == 3
    assert _summary(rec.capture)["end_allocated_bytes"] == 3 * 512
