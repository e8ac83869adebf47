"""A step under fake tensors against what GPUs and CPUs measured, and what happens where torch is not as it should be."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parent))
from known_workloads import KNOWN

import nbmemprof as mp
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction import feed, legal
from nbmemprof.prediction.catalogue import find
from nbmemprof.prediction.engine import Session, fake_run
from nbmemprof.prediction.kernels.reduction import buffer_bytes
from nbmemprof.prediction.recorder import Record
from nbmemprof.views import findings, text

FIXTURES = Path(__file__).parents[1] / "fixtures" / "prediction"
H200 = find("H200")
PEAKS = json.loads((FIXTURES / "ground_truth.json").read_text())["peaks"]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def captured(record: Record) -> Any:
    return feed.capture_of(record, H200, conf="", torch="2.11", limit_bytes=None, capacity_bytes=None, meta={})


# ---------------------------------------------------------------------- against an H200
ALWAYS = ("mlp_sgdm", "lstm_b64", "resnet50_bf16_cl_b64", "gpt2_bf16ac_b8")  # the others take the same rules


@pytest.mark.cost(3)
@pytest.mark.parametrize("name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.soak) for name in KNOWN])
def test_both_peaks_of_known_workloads_are_those_of_the_h200(name):
    if not {"gpt2", "llam", "bert"}.isdisjoint({name[:4]}):
        pytest.importorskip("transformers")
    row = mp.summary(captured(fake_run(KNOWN[name], device_row=H200))).row(0, named=True)
    assert row["peak_reserved_bytes"] == PEAKS[name]["reserved"]
    assert row["peak_allocated_bytes"] == pytest.approx(PEAKS[name]["allocated"], rel=1e-4)  # the rest: which free block a request found
    for what in ("allocated", "reserved"):
        assert row[f"peak_{what}_low_bytes"] <= PEAKS[name][what] <= row[f"peak_{what}_high_bytes"]


def tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def requests(session: Session, since: int) -> list[int]:
    made = session.record.made
    return [made[e].nbytes if e >= 0 else -made[~e].nbytes for e in session.record.events[since:] if made[e if e >= 0 else ~e].nbytes]


@pytest.mark.cost(2.9)
def test_operators_ask_for_what_they_asked_for_on_the_h200():
    sys.path.insert(0, str(Path(__file__).parents[1] / "gpu"))
    from operator_cases import attention, norms, reductions

    rows = {row["name"]: row for row in json.loads(gzip.open(FIXTURES / "operators.json.gz").read())["rows"]}
    same: dict[str, list[int]] = {}
    with Session(H200) as session:
        torch.nn.Linear(64, 64, device="cuda")(torch.randn(64, 64, device="cuda")).sum().backward()  # handles come with the first products
        for part in (attention, reductions, norms):
            for section, name, build in part(torch):
                if name not in rows or "bfloat16" not in name:  # half of them: the other types take the same kernels or simpler ones
                    continue
                inputs, fn = build("cuda")
                grad = "_ng" not in name
                inputs = tuple(x.requires_grad_() if grad and x.is_floating_point() else x for x in inputs)
                since = len(session.record.events)
                with torch.set_grad_enabled(grad):
                    out = fn(*inputs)
                wanted = rows[name].get("again", rows[name])
                same.setdefault(section, []).append(requests(session, since) == wanted["fwd"])
                results = [t for t in tensors(out) if t.requires_grad]
                if grad and results:
                    grads = [torch.ones_like(t) for t in results]
                    since = len(session.record.events)
                    torch.autograd.backward(results, grads)
                    same[section].append(requests(session, since) == wanted["bwd"])
                    del grads
                del out, results, inputs, fn
    shares = {section: sum(hits) / len(hits) for section, hits in same.items()}
    assert shares["reduce"] == 1.0
    assert shares["attention"] > 0.9
    assert shares["norm"] > 0.85
    assert shares["pointwise"] > 0.9


def test_the_buffer_of_a_reduction_is_the_launch_rules():
    assert buffer_bytes((1024, 1024), (1024, 1), (0,), sms=132, acc_bytes=4) == (8388608, 32)  # a bias' gradient; recorded on an H200
    assert buffer_bytes((1024, 1024), (1024, 1), (0, 1), sms=132, acc_bytes=4) == (512, 4)
    assert buffer_bytes((16, 10), (10, 1), (0,), sms=132, acc_bytes=4) == (0, 0)
    assert buffer_bytes((2048, 4096), (4096, 1), (0, 1), sms=108, acc_bytes=4)[0] < buffer_bytes((2048, 4096), (4096, 1), (0, 1), sms=132, acc_bytes=4)[0]


# ---------------------------------------------------------------------- what a capture says
def step() -> None:
    """A net with attention, trained twice."""
    net = torch.nn.Sequential(torch.nn.Embedding(100, 64), torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), torch.nn.Linear(64, 100)).to("cuda")
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        ids = torch.randint(0, 100, (8, 32), device="cuda")
        torch.nn.functional.cross_entropy(net(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.cost(0.6)
def test_every_analysis_and_the_page_work_on_a_prediction(tmp_path):
    made = captured(fake_run(step, device_row=H200))
    assert made.meta["origin"] == "predicted"
    assert made.meta["torch"] == "2.11"
    words = dict(mp.breakdown(made, at="peak").select("category", "size_bytes").iter_rows())
    parameters = 100 * 64 + 64 * 64 * 4 + 64 * 4 + 2 * 64 * 128 + 128 + 64 + 4 * 64 + 64 * 100 + 100
    assert words["weights"] >= 4 * parameters
    assert words["optimizer_state"] >= 8 * parameters
    assert {"activations", "gradients", "workspace"} & set(words)
    layers = mp.layers(made)["layer"].to_list()
    assert "Sequential.1.self_attn" in layers
    for analysis in (mp.timeline, mp.sites, mp.lifetimes, mp.fragmentation, mp.leaks, mp.advise, mp.oom, mp.pools):
        analysis(made)
    assert made.to_html(tmp_path / "page.html").stat().st_size > 10_000
    steps = made.marks.filter(made.marks["kind"] == "step")
    assert steps.height == 2


@pytest.mark.cost(0.6)
def test_a_value_that_nobody_knows_is_counted_as_an_assumption_and_widens_the_range():
    def routed() -> None:
        x = torch.randn(64, 32, device="cuda")
        chosen = x.softmax(-1).topk(2, -1).indices
        for expert in range(4):
            rows, _ = torch.where(chosen == expert)
            x[rows].sum()

    record = fake_run(routed, device_row=H200)
    assert any(what.startswith("an unknown order") for what in record.assumptions)
    assert any(what.startswith("sizes hang on") for what in record.assumptions)
    row = mp.summary(captured(record)).row(0, named=True)
    assert row["peak_allocated_high_bytes"] > 1.02 * row["peak_allocated_bytes"]


@pytest.mark.cost(0.6)
def test_known_masks_select_what_they_select():
    def masked() -> None:
        lengths = torch.tensor([3, 5], device="cuda")
        mask = torch.arange(8, device="cuda")[None] < lengths[:, None]
        kept = torch.randn(2, 8, 1024, device="cuda")[mask]
        assert kept.shape == (8, 1024)
        assert mask.sum().item() == 8

    assert not fake_run(masked, device_row=H200).assumptions


@pytest.mark.parametrize(("shape", "dtype", "chosen"), [((4, 8, 6, 6), "float32", "cudnn_batch_norm"), ((4, 8, 6), "float16", "cudnn_batch_norm"), ((4, 8, 6, 6), "bfloat16", "native_batch_norm"), ((4, 8), "float32", "native_batch_norm")])
def test_a_batch_norm_is_the_one_that_a_wheel_for_cuda_takes_whichever_is_installed(shape, dtype, chosen):
    def run() -> None:
        norm = (torch.nn.BatchNorm2d if len(shape) == 4 else torch.nn.BatchNorm1d)(8).cuda()
        norm(torch.zeros(shape, device="cuda", dtype=getattr(torch, dtype)))

    assert {made.op for made in fake_run(run, device_row=H200).made if "batch_norm" in made.op} == {chosen}


@pytest.mark.cost(0.6)
def test_benchmark_mode_is_answered_with_a_range():
    def run() -> None:
        torch.backends.cudnn.benchmark = True
        torch.nn.Conv2d(16, 32, 3, padding=1).to("cuda")(torch.randn(8, 16, 64, 64, device="cuda")).sum().backward()

    record = fake_run(run, device_row=H200)
    assert not torch.backends.cudnn.benchmark
    row = mp.summary(captured(record)).row(0, named=True)
    assert row["peak_allocated_high_bytes"] > 3 * row["peak_allocated_bytes"]


# ---------------------------------------------------------------------- what a GPU would say
@pytest.mark.cost(0.5)
@pytest.mark.parametrize(("made", "shape", "words"), [
    (lambda: torch.nn.Conv2d(3, 8, 3).cuda(), (1, 3, 8, 8), r"Input type \(torch.FloatTensor\) and weight type \(torch.cuda.FloatTensor\) should be the same"),
    (lambda: torch.nn.LSTM(3, 3).cuda(), (1, 3, 3), "found input tensor at cpu and parameter tensor at cuda:0"),
])  # fmt: skip
def test_an_input_that_was_left_on_the_cpu_is_refused_in_torchs_words(made, shape, words):
    with pytest.raises(RuntimeError, match=words):
        fake_run(lambda: made()(torch.randn(*shape)), device_row=H200)


@pytest.mark.cost(0.5)
@pytest.mark.parametrize("learns", [True, False])
def test_what_one_block_hands_to_the_next_is_no_input(learns):
    def step() -> None:
        blocks = [torch.nn.Linear(512, 512, bias=False).cuda() for _ in range(3)]
        y, kept = torch.randn(4096, 512, device="cuda"), []
        with torch.set_grad_enabled(learns):
            for block in blocks:
                kept.append(y)
                y = block(y)
        if learns:
            y.sum().backward()

    rows = captured(fake_run(step, device_row=H200)).tables["allocations"]
    assert (rows["category"].cast(str) == "inputs").sum() == 1


@pytest.mark.cost(0.5)
def test_nothing_of_a_prediction_is_called_measured():
    made = captured(fake_run(lambda: torch.zeros(1 << 20, device="cuda"), device_row=H200))
    tried, held = mp.what_if(made, ["", "expandable_segments:True"]), mp.ledger(made)
    assert tried["origin"].to_list() == ["predicted", "replayed"]
    assert "measured" not in held["origin"].to_list() and held["reported_bytes"].null_count() == held.height
    last = held.row(-1, named=True)
    assert (last["line"], last["size_bytes"]) == ("unexplained", None) and "no driver" in last["reason"]


@pytest.mark.cost(0.8)
def test_the_layers_of_one_training_step_are_no_iterations_of_a_leak():
    kept: list[Any] = []

    def step() -> None:
        net = torch.nn.Sequential(*(m for _ in range(12) for m in (torch.nn.Linear(170, 170), torch.nn.ReLU()))).cuda()
        optimizer = torch.optim.AdamW(net.parameters())
        net(torch.randn(64, 170, device="cuda")).sum().backward()
        optimizer.step()
        kept.append((net, optimizer))

    def grows() -> None:
        for _ in range(20):
            kept.append(torch.randn(1 << 18, device="cuda") + torch.ones(1 << 16, device="cuda").repeat(4))

    assert mp.leaks(captured(fake_run(step, device_row=H200))).is_empty()
    record = fake_run(grows, device_row=H200)
    line = f"test_engine.py:{grows.__code__.co_firstlineno + 2}"
    for subject in (line, "Judged by sizes alone (no lines were recorded), something"):
        grown = captured(record)
        assert mp.leaks(grown)["leak_bytes"].to_list() == [20 << 20]
        said = next(one for one in findings.findings(grown) if "more every iteration" in one)
        assert said.startswith(f"{subject} keeps 1 MiB more every iteration")
        for made in record.made:
            made.stack = 0


@pytest.mark.cost(0.2)
def test_every_view_of_a_prediction_speaks_of_the_lines_that_asked():
    held: list[Any] = []

    def step() -> None:
        for number in range(40):
            made = torch.zeros(3 << 18, device="cuda")
            if number % 2:
                held.append(made)  # the others leave holes

    made = captured(fake_run(step, device_row=H200))
    line = f"test_engine.py:{step.__code__.co_firstlineno + 2}"
    assert set(mp.holes(made)["site"]) == {line} and "unrecorded" not in text.report(made)
    assert mp.fragmentation(made)["pinned_by"].drop_nulls().str.contains(f"{line} (", literal=True).all()
    assert mp.sites(made)["site"].to_list() == [line]
    in_use = made.blocks.filter(made.blocks["state"] != "inactive")
    assert made.allocations["stack_id"].null_count() == in_use["stack_id"].null_count() == made.segments["stack_id"].null_count() == 0
    assert made.stacks.filter(made.stacks["depth"] == 0)["filename"].str.ends_with("test_engine.py").all()  # nothing of the fake run itself


def test_backward_has_the_line_that_called_it_and_a_module_the_users_call():
    def step() -> None:
        net = torch.nn.Linear(512, 512, device="cuda")
        loss = net(torch.ones(64, 512, device="cuda")).sum()
        loss.backward()

    first = step.__code__.co_firstlineno
    made = captured(fake_run(step, device_row=H200))
    rows = made.allocations
    sites = dict(zip(*[mp.sites(made)[name].to_list() for name in ("site", "function")], strict=True))
    assert set(sites) == {f"test_engine.py:{first + n}" for n in (1, 2, 3)} and set(sites.values()) == {"step"}
    gradients = rows.filter(rows["phase"].cast(str) == "backward")["stack_id"].unique()
    top = made.stacks.filter(made.stacks["stack_id"].is_in(gradients.implode()), made.stacks["function"] == "step")
    assert set(top["line"]) == {first + 3}


# ---------------------------------------------------------------------- nothing stays behind, nothing crashes
def untouched() -> tuple[Any, ...]:
    return torch.cuda.is_available, torch.nn.Module._apply, torch.Generator, torch.Tensor.pin_memory, tuple(sys.meta_path), torch.accelerator.current_accelerator()


@pytest.mark.cost(0.6)
def test_a_users_error_is_the_users_and_everything_is_put_back():
    before = untouched()

    def fails() -> None:
        torch.zeros(3, device="cuda")
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fake_run(fails, device_row=H200)
    with pytest.raises(RuntimeError, match="reduction dim"):
        fake_run(lambda: torch.randn(2, 3, device="cuda") @ torch.randn(2, 3, device="cuda"), device_row=H200)
    assert untouched() == before


@pytest.mark.cost(0.6)
@pytest.mark.parametrize(("name", "value", "words"), [
    ("_REGISTRY", "_ZN3c104impl5nowhereE", "not exported"), ("_ENSURE", "_ZN3c104impl5nowhereEv", "not exported"), ("_HOOKS", "_nowhere", "not exported"),
    ("_BUILT", 3, "another order"), ("_BUILT", 9, "another order"), ("_CONTEXT", 3, "another order|a fake step fails"), ("_CONTEXT", 5, "another order|a fake step fails"),
])  # fmt: skip
def test_a_torch_with_other_internals_is_refused_with_a_word(monkeypatch, name, value, words):
    before = untouched()
    monkeypatch.setattr(legal, name, value)
    with pytest.raises(legal.CantFake, match=words) as error:
        fake_run(lambda: None, device_row=H200)
    assert isinstance(error.value, NbmemprofError)
    assert torch.__version__ in str(error.value)
    assert untouched() == before
    monkeypatch.undo()
    fake_run(lambda: torch.zeros(2, device="cuda"), device_row=H200)  # and it works where they are as they should be


@pytest.mark.parametrize(("owner", "name"), [
    ("torch.optim.optimizer", "_foreach_supported_types"), ("torch._C", "_dispatch_has_kernel_for_dispatch_key"), ("torch._subclasses.fake_tensor", "FakeTensorMode"), ("torch.library", "Library"),
])  # fmt: skip
def test_what_python_lacks_of_torchs_internals_is_refused_with_its_name(monkeypatch, owner, name):
    before = untouched()
    with monkeypatch.context() as context:
        context.delattr(importlib.import_module(owner), name)
        with pytest.raises(legal.CantFake, match=name):
            fake_run(lambda: None, device_row=H200)
    assert untouched() == before


@pytest.mark.cost(0.3)
def test_what_a_steps_closure_runs_is_a_forward_and_a_backward():
    def step():
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).cuda()
        x, optimizer = torch.ones(16, 64, device="cuda"), torch.optim.SGD(model.parameters(), lr=0.1)

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    record = fake_run(step, device_row=H200)
    gradients = [made for made in record.made if made.op == "mm" and made.nbytes == 64 * 64 * 4]
    assert [(made.phase, feed._category(made)[0]) for made in gradients] == [("backward", "gradients")] * 4
    assert {made.phase for made in record.made if made.op in ("tanh", "addmm")} == {"forward"}
    assert {feed._category(made)[0] for made in record.made if made.op == "tanh"} == {"activations"}


def test_an_optimizer_that_steps_within_backward_is_in_its_step():
    def step():
        weight = torch.nn.Parameter(torch.ones(64, 64, device="cuda"))
        optimizer = torch.optim.Adam([weight], foreach=False)
        weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        (weight @ weight).sum().backward()

    made = [one for one in fake_run(step, device_row=H200).made if one.phase == "optimizer"]
    assert [feed._category(one)[0] for one in made if one.nbytes == 64 * 64 * 4].count("optimizer_state") == 2
