"""``%%memprof --predict``: the cell runs elsewhere, unchanged; what it prints, shows and raises comes back, and nothing here changes."""

from __future__ import annotations

import importlib
import time

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbmemprof as mp
from nbmemprof import magics
from nbmemprof.capture import Capture
from nbmemprof.prediction import legal
from nbmemprof.prediction import notebook as notebook_module
from nbmemprof.prediction.child import PredictionFailed

torch = pytest.importorskip("torch")
importlib.import_module("torch._dynamo")  # what every fake run imports: forks of this process have it already
MIB = 1 << 20


@pytest.fixture(scope="module")
def shell():
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell(config=config)
    shell.colors = "nocolor"
    mp.load_ipython_extension(shell)
    yield shell
    mp.unload_ipython_extension(shell)


@pytest.fixture
def run(shell):
    def run(text):
        with capture_output() as seen:
            result = shell.run_cell(text, store_history=True)
        return result, seen.stdout + seen.stderr

    return run


@pytest.fixture
def notebook(run):
    """The early cells of a real notebook, on a machine without a GPU."""
    run("import torch\nfrom torch import nn\ndevice = 'cuda' if torch.cuda.is_available() else 'cpu'")
    run("model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)\noptimizer = torch.optim.AdamW(model.parameters())")
    failed, _ = run("x = torch.randn(64, 1024)\ny = x.cuda()")
    assert not failed.success
    return run


STEP = "for i in range(2):\n    loss = model(y).pow(2).mean()\n    loss.backward(); optimizer.step(); optimizer.zero_grad()\n    print(i, loss.item(), loss.device)\ndevice"


def frozen(shell):
    return {name: id(value) for name, value in shell.user_ns.items() if not name.startswith("_") and name not in ("In", "Out")}


@pytest.mark.cost(0.6)
def test_early_cells_are_decided_again_and_nothing_here_changes(notebook, shell):
    before = frozen(shell)
    result, text = notebook("%%memprof --predict H200\n" + STEP)
    assert result.success
    assert text.startswith("0 1.0 cuda:0\n1 1.0 cuda:0\n")
    assert f"Out[{shell.execution_count - 1}]: " in text
    assert "'cuda'" in text
    assert frozen(shell) == before
    assert shell.user_ns["device"] == "cpu"
    assert {p.device.type for p in shell.user_ns["model"].parameters()} == {"cpu"}
    assert not shell.user_ns["optimizer"].state
    capture = shell.user_ns["_memprof"]
    assert capture.meta["origin"] == "predicted"
    assert "predicted, not measured on NVIDIA H200" in text
    parameters = sum(p.nbytes for p in shell.user_ns["model"].parameters())
    held = dict(mp.breakdown(capture).select("category", "requested_bytes").iter_rows())
    assert held["weights"] == held["gradients"] == parameters
    assert held["optimizer_state"] >= 2 * parameters  # two moments, made in the cell
    assert mp.summary(capture)["start_allocated_bytes"].item() >= parameters  # the model is an opening balance
    assert any("device = 'cuda'" in said for said in capture.meta["warnings"])
    lines = dict(mp.sites(capture).select("site", "size_bytes").iter_rows())
    cell = shell.execution_count - 1
    assert set(lines) == {f"In[{cell - 2}]:1", f"In[{cell - 1}]:2", f"In[{cell}]:3", f"In[{cell}]:4"}  # the model of an earlier cell, y, and the step's
    assert parameters <= lines[f"In[{cell - 2}]:1"] < parameters + 4 * 512


CHOICES = """import torch
def get_device(): return torch.device("cuda" if torch.cuda.is_available() else "cpu")
def slow(ok):
    with open(__import__("os").devnull): return torch.float16 if ok else torch.float32
class Holder:
    def __init__(self, device): self.device = device
    def __repr__(self): return "holder"
half = torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32
kind = slow(torch.cuda.is_available())
where = get_device()
held = Holder(where)
options = {"device": where, "rate": 1}
options["net"] = torch.nn.Linear(2, 2).to(where)
same = options
by_hand = "cuda" if torch.cuda.is_available() else "cpu"
by_hand = "cpu"
def uses(): return kind
"""


@pytest.mark.cost(0.5)
def test_choices_that_hang_on_a_gpu_are_made_again_and_those_that_are_not_are_named(run, shell):
    run(CHOICES)
    cell = shell.execution_count - 1
    _, text = run("%%memprof --predict H200\nprint(half, where, by_hand, options['device'], options['net'].weight.device, same is options, uses())\nx = torch.zeros(1 << 20, device=where, dtype=half), held")
    assert text.startswith("torch.bfloat16 cuda cpu cuda cuda:0 True torch.float32\n")
    said = f"not decided again: held.device (In[{cell}]), kind (In[{cell}]); %memprof predict on H200 runs the cells again as on a GPU"
    assert said in shell.user_ns["_memprof"].meta["warnings"]
    assert any(one["what"] == said for one in shell.user_ns["_memprof"].meta["assumptions"])
    assert f"Not {said[4:]}" in text
    assert shell.user_ns["_memprof"].events["requested_bytes"].max() == 2 << 20
    _, text = run("%%memprof --predict H200\nx = torch.zeros(1 << 20, device=by_hand)")
    assert "No events on the device: the cell asked for no memory of a CUDA device, its tensors were on the CPU (by_hand='cpu'). Write device='cuda'" in text
    assert "not decided again" not in text.lower()
    assert text.count("its tensors were on the CPU") == 1


@pytest.mark.cost(0.5)
def test_the_flags_of_a_plain_cell_work(notebook, shell, tmp_path):
    result, text = notebook(f"%%memprof --predict H200:80GiB --limit 60GiB --out kept --save {tmp_path}/a.nbmem -q\nz = torch.zeros(1 << 20, device='cuda')")
    assert result.success
    assert "saved" in text.lower()
    assert "peak" not in text
    assert shell.user_ns["kept"] is shell.user_ns["_memprof"]
    assert mp.load(tmp_path / "a.nbmem").meta["origin"] == "predicted"
    assert shell.user_ns["kept"].meta["capacity_bytes"] == 80 << 30
    assert shell.user_ns["kept"].meta["limit_bytes"] == 60 << 30
    assert "z" not in shell.user_ns


@pytest.mark.cost(0.5)
def test_an_error_is_the_users_own_with_its_line(run, shell):
    run("class Own(Exception): pass\ndef fails(n):\n    raise Own(n)")
    result, text = run("%%memprof --predict H200\nimport torch\nq = torch.zeros(4, device='cuda')\nfails(7)")
    assert type(result.error_in_exec) is shell.user_ns["Own"]
    assert "----> 4 fails(7)" in text
    assert "nbmemprof" not in text.split("Own: 7")[0].replace("%%memprof", "")
    assert "predicted" in text.split("Own: 7")[1]  # the report comes after the error


@pytest.mark.cost(0.5)
def test_a_cell_that_finds_no_room_has_torchs_error_at_its_line_and_one_that_catches_it_goes_on(run, shell):
    run("import torch")
    result, text = run("%%memprof --predict H200:8GiB\n\nheld = []\nfor _ in range(9):\n    held.append(torch.zeros(1 << 30, dtype=torch.uint8, device='cuda'))\nprint('not here')")
    assert type(result.error_in_exec) is torch.OutOfMemoryError and "Tried to allocate 1.00 GiB" in str(result.error_in_exec)
    assert "----> 5     held.append(" in text and "/prediction/" not in text and "not here" not in text.split("OutOfMemoryError: ")[-1] and "this machine's memory" not in text
    assert "does not fit: first refused at zeros (asked 1 GiB); it needs at least about 9 GiB" in text.split("OutOfMemoryError: ")[-1]
    result, text = run("%%memprof --predict H200:8GiB -q\ntry:\n    torch.zeros(9 << 30, dtype=torch.uint8, device='cuda')\nexcept RuntimeError as error:\n    print('caught', str(error)[:18])")
    assert result.success and "caught CUDA out of memory" in text
    assert shell.user_ns["_memprof"].meta["needs"]["caught"]
    run("device = 'cuda' if torch.cuda.is_available() else 'cpu'\nbig = torch.zeros(1 << 20).to(device)")
    result, text = run("%%memprof --predict H200:620MiB\nbig + 1")
    assert type(result.error_in_exec) is torch.OutOfMemoryError and " has no room any more on the device" in text and "adopting.py" not in text


@pytest.mark.cost(0.5)
def test_frames_of_the_fake_run_are_not_shown(run):
    _, text = run("%%memprof --predict H200 -q\nimport torch\ntorch.zeros(2, 3, device='cuda') @ torch.zeros(2, 3, device='cuda')")
    assert "----> 3 torch.zeros(2, 3" in text
    assert "_subclasses" not in text
    assert "prediction/" not in text


@pytest.mark.cost(0.4)
@pytest.mark.parametrize(
    ("line", "body", "said"),
    [
        ("", "import os\nos.kill(os.getpid(), 11)", "SIGSEGV"),
        ("", "import os\nos._exit(3)", "code 3"),
        ("", "import os\nos.kill(os.getpid(), 9)", "want of memory"),
        ("--predict-seconds 1", "import time\ntime.sleep(60)", "longer than 1 s"),
    ],
)
def test_a_child_that_ends_early_is_one_sentence(run, line, body, said):
    result, text = run(f"%%memprof --predict H200 {line}\n{body}")
    assert isinstance(result.error_in_exec, PredictionFailed)
    assert said in text
    assert "Traceback" not in text
    assert run("1 + 1")[0].result == 2


@pytest.mark.cost(0.5)
def test_memory_of_this_machine_is_bounded(run):
    _, text = run("%%memprof --predict H200 --predict-host 256MiB -q\nheap = bytearray(1 << 30)")
    assert "----> 2 heap = bytearray(1 << 30)" in text
    assert "--predict-host allows more" in text


@pytest.mark.cost(1.5)
def test_an_interrupt_stops_the_child_where_it_is(run):
    begun = time.monotonic()
    result, text = run("%%memprof --predict H200 -q\nimport os, signal, time\ntime.sleep(1); os.kill(os.getppid(), signal.SIGINT)  # this kernel's, once it listens\ntime.sleep(60)")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert "----> 4 time.sleep(60)" in text or "----> 3 time.sleep(1); os.kill(" in text  # where the signal found it
    assert time.monotonic() - begun < 60


@pytest.mark.cost(0.5)
@pytest.mark.parametrize(("name", "value"), [("_ENSURE", "_ZN3c107nothingEv"), ("_BUILT", 9)])
def test_a_torch_with_other_internals_is_refused_in_words(run, monkeypatch, name, value):
    monkeypatch.setattr(legal, name, value)
    result, text = run("%%memprof --predict H200\nimport torch\ntorch.zeros(3, device='cuda')")
    assert isinstance(result.error_in_exec, PredictionFailed)
    assert f"can't be set up with torch {torch.__version__}" in text
    assert "Traceback" not in text


def test_a_wrong_device_is_refused_before_anything_runs(run):
    result, text = run("%%memprof --predict H999\nraise SystemExit")
    assert not result.success
    assert "H999" in text
    assert "H200" in text


@pytest.mark.cost(0.5)
def test_other_magics_and_awaiting_work_in_the_child(run):
    _, text = run("%%memprof --predict H200 -q\n%%time\nprint('timed')")
    assert "timed" in text
    assert "Wall time" in text
    _, text = run("%%memprof --predict H200 -q\nimport asyncio\nawait asyncio.sleep(0)\n'awaited'")
    assert "'awaited'" in text


@pytest.mark.cost(3.4)
def test_names_are_carried_where_a_fork_would_hang(notebook, run, shell, monkeypatch):
    """Polars' threads don't live on in a fork, whether the cell uses it or an earlier one that runs first: a fresh process gets the names, a model of any size as its shapes."""
    monkeypatch.setattr(notebook_module, "forked", None)  # it would be called
    router = magics.of(shell).router
    again = "import polars\nlength = polars.DataFrame({'a': [1, 2]}).lazy().collect().height"
    monkeypatch.setitem(router._failed, again, None)
    run("import polars as pl\nimport torch\nfrom torch import nn\nwide = nn.Linear(2048, 2048)\nview = wide.weight[:4]\ndef area(m):\n    return m.weight.numel()\nlock = __import__('threading').Lock()")
    assert "of polars" in notebook_module.fork_hurts(shell, "pl.DataFrame({'a': [1, 2]})") and notebook_module.fork_hurts(shell, "area(wide)") is None
    before = frozen(shell)
    result, text = run("%%memprof --predict H200\nwide.cuda()(torch.zeros(2, 2048, device='cuda'))\nprint(area(wide), 'pl' in globals(), wide.weight.device, length, {p.device.type for p in model.parameters()}, optimizer.param_groups[0]['params'][0] is model[0].weight)")
    assert result.success, text
    assert f"{2048 * 2048} True cuda:0 2 {{'cuda'}} True" in text  # the model of an earlier cell too, where that would have put it
    assert frozen(shell) == before
    assert any("lock" in one["what"] for one in shell.user_ns["_memprof"].meta["assumptions"])


@pytest.mark.cost(4.3)
def test_a_session_keeps_what_its_cells_make(notebook, shell):
    before = frozen(shell)
    _, text = notebook("%memprof predict on H200")
    try:
        assert "on for H200" in text
        assert "failed here" not in text
        result, text = notebook("made = [p.device.type for p in model.parameters()]\nprint(made, y.device)\nlen(made)")
        assert result.success, text
        assert "['cuda', 'cuda', 'cuda', 'cuda'] cuda:0" in text
        result, text = notebook("%%memprof --out named\n" + STEP)
        assert "predicted, not measured on NVIDIA H200" in text
        assert isinstance(shell.user_ns["named"], Capture)
        assert shell.user_ns["named"] is shell.user_ns["_memprof"]
        assert mp.summary(shell.user_ns["named"])["start_allocated_bytes"].item() > 32 * MIB
        result, text = notebook("made[9]")
        assert isinstance(result.error_in_exec, IndexError)
        assert "----> 1 made[9]" in text
        _, text = notebook("import nbmemprof as mp\nwith mp.record('torch_cpu') as rec:\n    kept = torch.zeros(1 << 20)\nprint(mp.summary(rec.capture)['peak_allocated_bytes'].item() >= 4 << 20, torch.cuda.max_memory_allocated() > 1 << 20)")
        assert "True True" in text
        result, text = notebook("%%memprof --out full\nfirst = torch.zeros(9 << 30, dtype=torch.uint8, device='cuda')\nsecond = torch.zeros(140 << 30, dtype=torch.uint8, device='cuda')")
        assert type(result.error_in_exec) is torch.OutOfMemoryError and "----> 3 second = torch.zeros(" in text
        assert "does not fit: first refused at zeros (asked 140 GiB); it needs at least about 149" in text
        assert mp.oom(shell.user_ns["full"])["site"].to_list() == [f"In[{shell.execution_count - 1}]:3"]
        assert notebook("first.numel() >> 30, 'second' in globals()")[0].success  # what was there before the error still is
        _, text = notebook("%memprof who")
        assert "nobody holds any" in text
        assert "_cuda_getAllocatorBackend" not in text
        _, text = notebook("%memprof doctor")
        assert text.count("cells are predicted here, for NVIDIA H200") == 2 and "could not be asked" not in text  # CUDA, and its allocator's history
        result, text = notebook("%memprof stats")
        assert result.success
        assert "derived.live_blocks" in text
    finally:
        _, text = notebook("%memprof predict off")
    assert "prediction is off: names made in the fake session are gone (made, i, loss, rec, " in text
    assert magics.of(shell).router.session is None
    assert {name: value for name, value in frozen(shell).items() if name not in ("named", "full")} == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%%memprof --predict\nx = 1", "--predict needs a value: --predict DEVICE[:SIZE]. Which GPU? Known are: H200"),
        ("%%memprof --predict H200 --limit\nx = 1", "--limit needs a value: --limit SIZE. '' is not a size"),
        ("%memprof predict on H200 --seconds -1", "'-1' is no time to run"),
        ("%%memprof --as H200:8GiB --predict RTX4090\nx = 1", "a cell runs on one GPU. Leave one out, or give the prediction its size: --predict RTX4090:8GiB. Nothing was run."),
        ("%memprof predict status", "prediction is off"),
        ("%memprof probe", "which one? There are: bandwidth"),
    ],
)
def test_a_value_that_is_missing_or_wrong_is_asked_for_with_what_there_is(run, line, said):
    result, text = run(line)
    assert said in text + str(result.error_in_exec or result.error_before_exec or "")


def test_a_step_that_needs_a_setup_is_told_so(run):
    run("def needs_state(state, batch):\n    pass")
    _, text = run("%memprof max-batch needs_state")
    assert "can't be called as needs_state(batch)" in text
    assert "--setup NAME" in text
    assert "Traceback" not in text


@pytest.mark.cost(1)
def test_a_time_limit_names_the_earlier_cell_that_ran(run, shell):
    router = magics.of(shell).router
    slow = "import time\ntime.sleep(20)"
    router._failed[slow] = None
    try:
        result, _ = run("%%memprof --predict H200 --predict-seconds 0.8\n1 + 1")
    finally:
        del router._failed[slow]
    assert isinstance(result.error_in_exec, PredictionFailed)
    assert "It was running an earlier cell that failed for want of a GPU ('import time') again" in str(result.error_in_exec)


@pytest.mark.cost(0.4)
def test_a_cell_that_a_virtual_gpu_refused_did_not_fail_for_want_of_one(run, shell):
    result, _ = run("%%memprof --as H200:8MiB -q\nrefused = torch.zeros(4 << 20)")
    assert isinstance(result.error_in_exec, torch.OutOfMemoryError) and "CUDA" in str(result.error_in_exec)
    assert not any("refused" in text for text in magics.of(shell).router._failed)


def test_an_interrupted_cell_does_not_run_again(run, shell):
    run("stopped = 1\nraise KeyboardInterrupt")
    run("gone_on = 1")
    texts = [text for _, text in magics.of(shell).router.history()]
    assert not any("stopped = 1" in text for text in texts)
