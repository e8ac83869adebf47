"""A profiled cell behaves like a plain cell, in a real kernel: every case runs in one notebook, with and without the magic.

The plain twin runs first; the profiled one must give the same outputs (but for the numbers that change from run
to run), with one report after them.
"""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
ANSI = re.compile(r"\x1b\[[0-9;]*m")

# name: (body, whether a report is to follow)
TWINS = {
    "value": ("40 + 2", True),
    "semicolon": ("40 + 3;", True),
    "semicolon in text": ("'a;'", True),
    "print and value": ("print('out')\n'value'", True),
    "stderr": ("import sys\nprint('err', file=sys.stderr)", True),
    "rich output": ("from IPython.display import HTML\nHTML('<b>x</b>')", True),
    "names": ("kept = 7\ndef later():\n    return kept", True),
    "quoted text": ('s = """a\n%%memprof\n  b"""\ns', True),
    "await": ("import asyncio\nawait asyncio.sleep(0)\n'awaited'", True),
    "async for": ("async def g():\n    yield 1\nasync for i in g():\n    print(i)", True),
    "line magic": ("%pwd", True),
    "magic with value": ("here = %pwd\ntype(here)", True),
    "shell": ("!echo shell", True),
    "cell magic below": ("%%capture caught\nprint('inside')", True),
    "html below": ("%%html\n<i>x</i>", True),
    "error": ("q = 1\n\nraise ValueError('at 4')", True),
    "error in function": ("def f():\n    return 1 / 0\n\nf()", True),
    "exit": ("import warnings; warnings.simplefilter('always')\nraise SystemExit('left')", True),
    "interrupt": ("import signal, os\nos.kill(os.getpid(), signal.SIGINT)\nimport time; time.sleep(5)\nnever = 1", True),
    "interrupt in await": ("import asyncio, signal, os\nos.kill(os.getpid(), signal.SIGINT)\nawait asyncio.sleep(5)\nnever = 1", True),
    "syntax error": ("def f(:\n    pass", False),
    "indentation error": ("if 1:\npass", False),
    "future": ("from __future__ import annotations\n1", True),
    "comment only": ("# nothing", True),
    "help": ("len?", True),
    "threads": ("import threading\nt = threading.Thread(target=print, args=('thread',)); t.start(); t.join()", True),
    "display update": ("from IPython.display import display\nh = display('a', display_id='d1'); h.update('b')", True),
    "last value again": ("_", True),
}


def kernel(sources: list[str], folder: Path) -> list[nbformat.NotebookNode]:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    NotebookClient(notebook, timeout=120, allow_errors=True, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return notebook.cells


def text_of(output: nbformat.NotebookNode) -> str:
    if output.output_type == "error":
        return ANSI.sub("", "\n".join(output.traceback))
    return output.get("text", "") or output.get("data", {}).get("text/plain", "")


def is_report(output: nbformat.NotebookNode) -> bool:
    return output.output_type == "display_data" and output.data["text/plain"].startswith("peak ")


def same(output: nbformat.NotebookNode) -> tuple:
    """An output without what differs between two runs of one cell: its number and its first line."""
    text = re.sub(r"In\[\d+\]|Cell In\[\d+\]|<ipython-input-\S+>|0x[0-9a-f]+|/ipykernel_\S+", "", text_of(output))
    text = re.sub(r"(-*>? *)(\d+)( .*)", lambda m: m.group(1) + "N" + m.group(3), text) if output.output_type == "error" else text
    kind = output.get("name") or output.output_type
    return kind, re.sub(r"line \d+", "line N", text).replace("# %%memprof", "")


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    sources = ["%load_ext nbmemprof"]
    for body, _ in TWINS.values():
        sources += ["'before'", body, "'before'", f"%%memprof\n{body}"]
    sources += ["print('never' in globals(), kept, later())", "print(sorted(n for n in globals() if 'memprof' in n or 'nbm' in n))", "import os; print(os.listdir('.'))"]
    return kernel(sources, tmp_path_factory.mktemp("twins"))


@pytest.mark.cost(4)
def test_loading_prints_nothing(twins):
    assert twins[0].outputs == []


@pytest.mark.parametrize("name", TWINS)
def test_the_profiled_cell_gives_what_the_plain_one_gives(twins, name):
    at = 1 + 4 * list(TWINS).index(name)
    plain, profiled = twins[at + 1].outputs, twins[at + 3].outputs
    reports = [output for output in profiled if is_report(output)]
    assert len(reports) == TWINS[name][1]
    shown = [output for output in profiled if not is_report(output)]
    kinds = [(o.output_type, o.get("ename")) for o in plain]
    assert [(o.output_type, o.get("ename")) for o in shown] == kinds
    if name not in ("interrupt", "interrupt in await"):  # where it was when it was interrupted differs from run to run
        assert [same(o)[0] for o in shown] == [same(o)[0] for o in plain]
    if not any(kind == "error" for kind, _ in kinds):
        assert [same(o) for o in shown] == [same(o) for o in plain]
    if reports:
        assert profiled[-1] is reports[0]


def test_names_are_the_users_and_the_captures_only(twins):
    assert text_of(twins[-3].outputs[0]) == "False 7 7\n"
    assert text_of(twins[-2].outputs[0]) == "['_memprof']\n"
    assert text_of(twins[-1].outputs[0]) == "[]\n"


def test_an_error_points_to_the_line_that_is_seen(twins):
    cell = twins[1 + 4 * list(TWINS).index("error") + 3]
    assert re.search(r"(line 4\b|-+> 4 )", text_of(cell.outputs[0]))
    cell = twins[1 + 4 * list(TWINS).index("syntax error") + 3]
    assert re.search(r"line 2\b", text_of(cell.outputs[0]))


STORY = [
    "%load_ext nbmemprof",
    "%%memprof\n111 + 1",
    "print(_, 112 in Out.values(), hasattr(_memprof, 'events'), _memprof.meta['cell'])",
    "%reload_ext nbmemprof",
    "%%memprof\ntwice = 1",
    "%%capture caught\n%%memprof\ncaptured = 1",
    "print(captured, sum('peak' in str(o.data) for o in caught.outputs))",
    "%%time\n%%memprof\ntimed = 1",
    "%%memprof --no-such-flag\nran = 1",
    "print('ran' in globals())",
    "get_ipython().run_cell('%%memprof -q --out inner\\nnested = 1'); print(nested, inner is _memprof)",
    "%rerun 2",
    "%%memprof\n%load_ext autoreload\n%autoreload 2",
    "%%memprof -q\nnone_shown = 1",
    "%%memprof\n%unload_ext nbmemprof\nunloaded = 1",
    "%%memprof\nx = 1",
    "%load_ext nbmemprof",
    "%%memprof\nagain = 1",
]


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    return dict(zip(STORY, kernel(STORY, tmp_path_factory.mktemp("story")), strict=True))


def outputs(story, start: str, nth: int = 0) -> list:
    return [cell for source, cell in story.items() if source.startswith(start)][nth].outputs


@pytest.mark.cost(2.3)
def test_value_and_capture_are_there(story):
    assert text_of(outputs(story, "print(_,")[0]) == "112 True True 2\n"


def test_loading_twice_gives_one_report(story):
    assert [is_report(o) for o in outputs(story, "%%memprof\ntwice")] == [True]


def test_a_capturing_magic_above_takes_the_report(story):
    assert outputs(story, "%%capture") == []
    assert text_of(outputs(story, "print(captured")[0]) == "1 1\n"


def test_a_timing_magic_above_has_its_text_and_one_report(story):
    shown = outputs(story, "%%time")
    assert "Wall time" in "".join(map(text_of, shown))
    assert sum(map(is_report, shown)) == 1


def test_a_bad_flag_is_a_real_error_and_the_cell_does_not_run(story):
    (output,) = outputs(story, "%%memprof --no-such-flag")
    assert (output.output_type, output.ename) == ("error", "FlagError")
    assert "--no-such-flag" in output.evalue
    assert len(output.traceback) == 1
    assert text_of(outputs(story, "print('ran'")[0]) == "False\n"


def test_nested_again_and_quiet_cells(story):
    assert text_of(outputs(story, "get_ipython().run_cell")[0]) == "1 True\n"
    assert sum(map(is_report, outputs(story, "%rerun"))) == 1
    assert [is_report(o) for o in outputs(story, "%%memprof\n%load_ext autoreload")] == [True]
    assert outputs(story, "%%memprof -q\nnone_shown") == []


def test_unloading_in_a_cell_and_loading_again(story):
    assert outputs(story, "%%memprof\n%unload_ext") == []
    assert any("not found" in text_of(o) for o in outputs(story, "%%memprof\nx = 1"))
    assert [is_report(o) for o in outputs(story, "%%memprof\nagain")] == [True]


@pytest.mark.cost(2.3)
def test_an_empty_cell_costs_less_than_20_ms():
    import sys

    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    import bench_magic

    assert bench_magic.measure(20)["median_ms"] <= 20


TORCH = [
    "%load_ext nbmemprof",
    "%%memprof\nimport torch\nx = torch.zeros(1 << 20)",
    "%%memprof\nnothing = 1",
    "%memprof auto on",
    "y = torch.zeros(1 << 20)",
    "1 + 1",
    "small = torch.zeros(10)",
    "import nbmemprof as mp\nwith mp.record(title='inner') as rec:\n    z = torch.zeros(1 << 18)\nprint(rec.capture.events.height, rec.capture.marks['name'].to_list())",
    "%memprof auto off",
    "%%memprof\ntorch.zeros(-1)",
    "print(mp.snapshot().blocks['size_bytes'].sum(), 'nbmemprof' in str(type(torch.__loader__)))",
    "mp.snapshot()",
]


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory):
    pytest.importorskip("torch")
    return dict(zip(TORCH, kernel(TORCH, tmp_path_factory.mktemp("torch")), strict=True))


@pytest.mark.cost(4.8)
def test_a_cell_that_imports_torch_is_recorded_from_there(with_torch):
    (report,) = outputs(with_torch, "%%memprof\nimport torch")
    assert report.data["text/plain"].startswith("CPU: peak 4 MiB")
    assert "In[2]:3" in report.data["text/plain"]


def test_a_cell_in_which_nothing_happens_knows_its_peak(with_torch):
    (report,) = outputs(with_torch, "%%memprof\nnothing")
    assert report.data["text/plain"].startswith("CPU: peak 4 MiB · nothing was allocated or freed in this cell · kept 0 B")


def test_auto_prints_only_where_memory_changed(with_torch):
    assert text_of(outputs(with_torch, "y = torch")[0]) == "memprof In[5]: CPU: peak 8 MiB (+4 MiB) · kept +4 MiB\n"
    assert [o.output_type for o in outputs(with_torch, "1 + 1")] == ["execute_result"]
    assert outputs(with_torch, "small") == []


def test_a_block_inside_a_recorded_cell_has_its_own_window(with_torch):
    shown = "".join(map(text_of, outputs(with_torch, "import nbmemprof")))
    assert "1 ['inner']" in shown
    assert "kept +1 MiB" in shown


def test_an_error_of_torch_has_its_report(with_torch):
    error, report = outputs(with_torch, "%%memprof\ntorch.zeros(-1)")
    assert (error.output_type, error.ename) == ("error", "RuntimeError")
    assert "peak 9 MiB" in report.data["text/plain"]


def test_a_picture_needs_no_recording(with_torch):
    size, _, wrapped = text_of(outputs(with_torch, "print(mp.snapshot")[0]).strip().partition(" ")
    assert int(size) >= 9 << 20
    assert wrapped == "False"
    assert "9 MiB live, peak unknown" in outputs(with_torch, "mp.snapshot()")[0].data["text/plain"]
