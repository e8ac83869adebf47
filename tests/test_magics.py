"""In a real shell: the cell under the magic is a plain cell, its report comes once, and unloading leaves nothing."""

import asyncio
import re
import sys
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbmemprof as mp
from nbmemprof import magics, schema, sources
from nbmemprof.capture import Capture
from nbmemprof.recording import _recorders


class Tape:
    """Records the numbers appended to ``events`` as allocations of that many bytes on the host."""

    name = "tape"

    def __init__(self) -> None:
        self.events: list[int] = []
        self.starts: list[dict] = []
        self.running = False

    def start(self, **options) -> None:
        self.starts.append(options)
        self.running = True

    def mark(self) -> int:
        return len(self.events)

    def cut(self, since: int) -> Capture:
        sizes = self.events[since:]
        count, held = len(sizes), self.events[:since]
        same = {"kind": "host", "source": "torch", "pool_id": "0_0"}
        events = {"seq": range(count), "time_us": [float(i) for i in range(count)], "action": "alloc", "addr": range(count), "requested_bytes": sizes, "size_bytes": sizes}
        ends = {"alloc_seq": [None] * len(held) + list(range(count)), "time_us": [None] * len(held) + [float(i) for i in range(count)], "requested_bytes": held + sizes, "size_bytes": held + sizes}
        flags = {"category": "unknown", "evidence": "none", "at_start": [True] * len(held) + [False] * count, "size_exact": True}
        blocks = {"snapshot_id": 0, "addr": range(len(held) + count), "size_bytes": held + sizes, "requested_bytes": held + sizes, "state": "active_allocated"}
        return Capture.build(
            {
                "events": schema.fill("events", same | events, height=count),
                "allocations": schema.fill("allocations", same | ends | flags, height=len(held) + count),
                "blocks": schema.fill("blocks", same | blocks, height=len(held) + count),
            },
            source="torch_cpu",
        )

    def stop(self) -> Capture:
        self.running = False
        return self.cut(0)


@pytest.fixture
def tape(monkeypatch):
    """The only source, and a torch that is there."""
    tape = Tape()
    real = sources.recorders
    monkeypatch.setattr(sources, "recorders", lambda: {**real(), "torch_history": _module(tape, "no device"), "torch_cpu": _module(tape, None)})
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(__version__="0", cuda=SimpleNamespace(is_available=lambda: False), version=SimpleNamespace(cuda=None)))
    return tape


def _module(tape, reason):
    return SimpleNamespace(source=lambda: tape, unavailable=lambda: reason)


@pytest.fixture
def shell(tape):
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    config.InteractiveShell.colors = "nocolor"
    shell = InteractiveShell.instance(config=config)
    shell.user_ns["tape_"] = tape
    shell.run_line_magic("load_ext", "nbmemprof")
    yield shell
    magics.unload(shell)
    InteractiveShell.clear_instance()
    assert not _recorders
    assert not tape.running


def run(shell, text, **options):
    """Run a cell; its result and all that it showed."""
    with capture_output() as shown:
        result = shell.run_cell(text, store_history=True, **options)
    rich = "".join(str(o.data.get("text/plain", "")) for o in shown.outputs)
    return result, shown.stdout + shown.stderr + rich


def reports(text: str) -> int:
    return text.count("peak")


# ---------------------------------------------------------------------- the cell
def test_one_report_and_the_capture(shell, tape):
    result, shown = run(shell, "%%memprof\ntape_.events.append(1 << 20)\n40 + 2")
    assert result.result == 42
    assert "peak 1 MiB" in shown
    capture = shell.user_ns["_memprof"]
    assert capture.events["size_bytes"].to_list() == [1 << 20]
    assert (capture.meta["cell"], capture.marks["name"].to_list()) == (1, ["In[1]"])
    assert (tape.starts[0]["stacks"], tape.starts[0]["cell"]) == ("python", 1)


def test_history_keeps_what_was_typed(shell):
    run(shell, "%%memprof -q\nx = 1")
    assert shell.user_ns["_i1"] == "%%memprof -q\nx = 1"
    assert shell.user_ns["In"][-1] == "# %%memprof -q\nx = 1"


def test_lines_stay_where_they_are(shell):
    result, _ = run(shell, "%%memprof -q\n\nraise ValueError('at 3')")
    assert result.error_in_exec.__traceback__.tb_next.tb_lineno == 3


def test_the_report_comes_after_the_error(shell):
    result, shown = run(shell, "%%memprof\ntape_.events.append(2048)\nraise ValueError('broken')")
    assert isinstance(result.error_in_exec, ValueError)
    assert 0 < shown.index("broken") < shown.index("peak 2 KiB")


def test_an_interrupt_is_one_and_has_its_report(shell):
    result, shown = run(shell, "%%memprof\nraise KeyboardInterrupt")
    assert isinstance(result.error_in_exec, KeyboardInterrupt)
    assert reports(shown)


def test_a_syntax_error_is_one_without_report(shell):
    result, shown = run(shell, "%%memprof\ndef f(:\n    pass")
    assert isinstance(result.error_before_exec, SyntaxError)
    assert not reports(shown)
    assert "_memprof" not in shell.user_ns


def test_quiet_shows_nothing_and_binds(shell):
    _, shown = run(shell, "%%memprof --quiet --out mine\npass")
    assert shown == ""
    assert shell.user_ns["mine"] is shell.user_ns["_memprof"]


def test_flags_reach_the_source_and_names_are_filled_in(shell, tape):
    run(shell, "wish = 'all'")
    run(shell, "%%memprof -q --stacks {wish} --source torch_cpu\npass")
    assert tape.starts[0]["stacks"] == "all"


@pytest.mark.parametrize("line", ["--no-such-flag", "--stacks pyton", "--out 1x", "surplus", "--save 'open", "--save x.pkl", "--source nothing", "--as B9000"])
@pytest.mark.parametrize("body", ["ran = 1", "%%timeit -n1 -r1\nran = 1", ""])
def test_a_bad_line_is_an_error_and_the_cell_does_not_run(shell, tape, line, body):
    result, shown = run(shell, f"%%memprof {line}\n{body}")
    assert type(result.error_before_exec).__name__ == "FlagError"
    assert "FlagError: %%memprof: " in shown
    assert "Traceback" not in shown
    assert "ran" not in shell.user_ns
    assert tape.starts == []
    assert run(shell, "ran = 2")[0].success


def test_another_cell_magic_below_runs(shell):
    _, shown = run(shell, "%%memprof\n\n%%timeit -n1 -r1\ntape_.events.append(1024)")
    assert "per loop" in shown
    assert reports(shown) == reports(run(shell, "%%memprof\npass")[1])


@pytest.mark.parametrize("above", ["%%time", "%%timeit -n1 -r1", "%%capture kept_"])
def test_a_cell_magic_above_gives_one_report(shell, tape, above):
    _, shown = run(shell, f"{above}\n%%memprof\ntape_.events.append(3 << 20)")
    if "capture" in above:
        assert shown == ""
        shown = "".join(o.data["text/plain"] for o in shell.user_ns["kept_"].outputs) + shell.user_ns["kept_"].stdout
    assert shown.count("peak 3 MiB") == 1
    assert len(tape.starts) == (2 if "capture" in above else 1)


def test_a_cell_magic_above_that_runs_no_python_gives_no_report(shell, tmp_path):
    _, shown = run(shell, f"%%writefile '{tmp_path}/x.py'\n%%memprof\npass")
    assert not reports(shown)
    assert (tmp_path / "x.py").read_text() == "%%memprof\npass\n"
    assert "_memprof" not in shell.user_ns


@pytest.mark.parametrize("text", ["%%memprofx\npass", "x = 1\n%%memprof\npass", "s = '''\n%%memprof\n'''", "%%memprof?"])
def test_what_is_not_our_line_is_left_alone(shell, tape, text):
    run(shell, text)
    assert tape.starts == []


@pytest.mark.parametrize("text", ["\n\n%%memprof\nx = 1", "    %%memprof\n    x = 1", "In [3]: %%memprof\n   ...: x = 1", "%%memprof   \nx = 1", "%%memprof\r\nx = 1"])
def test_our_line_is_found_as_the_shell_finds_magics(shell, tape, text):
    assert reports(run(shell, text)[1])
    assert shell.user_ns["x"] == 1
    assert len(tape.starts) == 1


def test_asking_whether_a_cell_is_complete_starts_nothing(shell, tape):
    for text in ("%%memprof", "%%memprof --no-such", "%%memprof\nfor i in x:"):
        shell.input_transformer_manager.check_complete(text)
    assert tape.starts == []


def test_an_empty_body(shell):
    result, shown = run(shell, "%%memprof")
    assert result.success
    assert reports(shown)


def test_a_silent_run_has_no_events_and_its_report_all_the_same(shell, tape):
    with capture_output() as shown:
        shell.run_cell("%%memprof\nx = 5\n1 / 0", silent=True)
    assert shell.user_ns["x"] == 5
    assert reports(shown.stdout + "".join(o.data["text/plain"] for o in shown.outputs)) >= 1
    assert len(tape.starts) == 1


def test_future_imports_stay_first(shell):
    assert run(shell, "%%memprof -q\nfrom __future__ import annotations\nx = 1")[0].success


def test_top_level_await(shell):
    assert run(shell, "%%memprof -q\nimport asyncio\nawait asyncio.sleep(0)\n6 * 7")[0].result == 42


def test_a_cell_in_a_cell_has_its_own_report_and_number(shell, tape):
    _, shown = run(shell, "%%memprof\ntape_.events.append(1024)\nget_ipython().run_cell('%%memprof --out inner\\ntape_.events.append(1 << 20)')\n")
    assert len(tape.starts) == 1
    assert shell.user_ns["inner"].events.height == 1
    assert shell.user_ns["_memprof"].events.height == 2
    assert shown.index("peak 1 MiB") >= 0
    assert shell.user_ns["inner"].meta["cell"] == shell.user_ns["_memprof"].meta["cell"] == 1


def test_a_lost_end_does_not_outlive_the_next_outer_one(shell, tape):
    text = "%%memprof\nx = 1"

    async def lost():
        await shell.run_cell_async(text, transformed_cell=shell.transform_cell(text))

    run(shell, "pass")
    shell.user_ns["lost"] = lost
    run(shell, "import asyncio\nawait lost()")
    assert not tape.running
    asyncio.set_event_loop(None)


def test_a_script_with_magics(shell, tmp_path):
    (tmp_path / "cells.ipy").write_text("%%memprof\ny = 3\n")
    _, shown = run(shell, f"%run '{tmp_path}/cells.ipy'")
    assert shell.user_ns["y"] == 3
    assert reports(shown)


def test_the_same_flags_save(shell, tmp_path):
    _, shown = run(shell, f"%%memprof -q --save '{tmp_path}/my run.nbmem'\ntape_.events.append(7)")
    assert "saved to" in shown
    run(shell, f"%memprof load '{tmp_path}/my run.nbmem' --out again -q")
    assert shell.user_ns["again"].events["size_bytes"].to_list() == [7]
    _, shown = run(shell, f"%memprof save '{tmp_path}/my run.nbmem'")
    assert "replaced" in shown
    run(shell, f"%memprof save {tmp_path}/tables")
    assert (tmp_path / "tables" / "events.parquet").exists()


def test_a_cell_adds_itself_to_a_history(shell, tmp_path):
    _, shown = run(shell, f"%%memprof -q --history '{tmp_path}/my runs'\ntape_.events.append(7)")
    assert "added to the history" in shown
    rows = mp.open_run(tmp_path / "my runs").runs
    assert rows.select("kind", "end", "peak_bytes").rows() == [("capture", "whole", 7)]
    assert re.search(r"-In\d+$", rows["name"][0])
    (tmp_path / "file").write_text("")
    _, shown = run(shell, f"%%memprof -q --history {tmp_path}/file\n1")
    assert "is a file. Name a folder" in shown


def test_a_save_that_fails_keeps_the_report(shell, tmp_path, monkeypatch):
    monkeypatch.setattr(Capture, "save", lambda self, path: (_ for _ in ()).throw(OSError("disk full")))
    result, shown = run(shell, f"%%memprof --save '{tmp_path}/x.nbmem'\n1")
    assert result.success
    assert "disk full" in shown
    assert reports(shown)


def test_a_view_that_fails_is_told_and_keeps_the_result(shell, monkeypatch):
    from nbmemprof.views import first

    monkeypatch.setattr(first, "show", lambda capture: 1 / 0)
    result, shown = run(shell, "%%memprof\n5")
    assert result.result == 5
    assert "could not be drawn: ZeroDivisionError" in shown


def test_plain_text_view(shell):
    _, shown = run(shell, "%%memprof --view text\ntape_.events.append(4096)")
    assert "peak 4 KiB" in shown


def test_a_source_that_can_not_record_lets_the_cell_run(shell, tape, monkeypatch):
    monkeypatch.setattr(tape, "start", lambda **options: (_ for _ in ()).throw(RuntimeError("busy")))
    result, shown = run(shell, "%%memprof\n5")
    assert result.result == 5
    assert "recording was not possible: busy" in shown


# ---------------------------------------------------------------------- called from code
def test_called_from_code_the_value_comes_back(shell):
    shell.user_ns["value"] = None
    _, shown = run(shell, "value = get_ipython().run_cell_magic('memprof', '', 'tape_.events.append(5 << 20)\\n6 * 7')")
    assert shell.user_ns["value"] == 42
    assert "peak 5 MiB" in shown


def test_called_from_code_an_error_is_raised_and_the_report_follows_it(shell):
    result, shown = run(shell, "get_ipython().run_cell_magic('memprof', '', '\\nraise ValueError(\"deep\")')")
    assert isinstance(result.error_in_exec, ValueError)
    assert shown.count("ValueError: deep") == 1
    assert shown.index("ValueError: deep") < shown.index("peak")
    result, _ = run(shell, "get_ipython().run_cell_magic('memprof', '--bad', 'never = 1')")
    assert type(result.error_in_exec).__name__ == "FlagError"
    assert "never" not in shell.user_ns


# ---------------------------------------------------------------------- verbs
def test_auto_prints_only_where_something_changed(shell, tape):
    run(shell, "%memprof auto")
    assert run(shell, "x = 1")[1] == ""
    assert "_memprof" not in shell.user_ns
    _, shown = run(shell, "tape_.events.append(100 << 20)")
    assert shown.startswith("memprof In[3]: CPU: peak 100 MiB (+100 MiB) · kept +100 MiB")
    kept = shell.user_ns["_memprof"]
    assert kept.events.height == 1
    tape.stop, tape.start = lambda: tape.cut(1), lambda **options: None  # from here on 100 MiB are there at the start
    assert run(shell, "tape_.events.append(1 << 20)")[1] == ""
    assert shell.user_ns["_memprof"] is kept
    assert "kept +3 MiB" in run(shell, "tape_.events[1:] = [3 << 20]")[1]
    run(shell, "%memprof auto off")
    assert run(shell, "tape_.events.append(900 << 20)")[1] == ""
    tape.running = False


def test_auto_and_the_magic_give_one_report(shell):
    run(shell, "%memprof auto on")
    for above in ("", "%%capture kept_\n"):
        _, shown = run(shell, f"{above}%%memprof\ntape_.events.append(8 << 20)")
        assert "memprof In[" not in shown


def test_auto_says_nothing_of_a_cell_with_a_syntax_error(shell):
    run(shell, "%memprof auto on")
    assert "memprof In" not in run(shell, "tape_.events.append(5); def")[1]


def test_last_shows_again_and_asks_for_a_capture_first(shell):
    result, _ = run(shell, "%memprof last")
    assert "There is no capture yet" in str(result.error_in_exec)
    run(shell, "%%memprof -q\ntape_.events.append(6 << 20)")
    assert "peak 6 MiB" in run(shell, "%memprof last")[1]
    assert "peak 6 MiB" in run(shell, "%memprof last --view text")[1]


def test_alone_it_says_what_there_is(shell):
    _, shown = run(shell, "%memprof")
    assert "auto is off" in shown
    assert "doctor" in shown


def test_auto_tells_its_state(shell):
    assert "memprof: auto is on: every following cell is recorded" in run(shell, "%memprof auto")[1]
    assert "auto is on already" in run(shell, "%memprof auto on")[1]
    assert "auto is off" in run(shell, "%memprof auto off")[1]


@pytest.mark.parametrize("line", ["%memprof load nowhere.pickle", "%memprof last", "%memprof diff a b", "%memprof who --top x", "%memprof lost"])
def test_what_a_person_got_wrong_in_a_verb_is_one_line(shell, line):
    result, shown = run(shell, line)
    assert result.error_in_exec is not None
    assert "Traceback" not in shown
    assert len(shown.strip().splitlines()) == 1
    assert shown.startswith(type(result.error_in_exec).__name__)


def test_a_fault_in_a_verb_keeps_its_traceback(shell, monkeypatch):
    from nbmemprof.verbs import doctor

    monkeypatch.setattr(doctor, "run", lambda args, shell: 1 / 0)
    assert "Traceback" in run(shell, "%memprof doctor")[1]


@pytest.mark.parametrize(("line", "words"), [("%memprof --help", ("%memprof release", "--yes", "doctor")), ("%memprof help", ("%memprof who",)), ("%memprof who --help", ("%memprof who", "--top"))])
def test_help_is_there_by_its_usual_names(shell, line, words):
    result, shown = run(shell, line)
    assert result.success
    assert all(word in shown for word in words)


def test_help_for_a_cell_runs_nothing(shell):
    result, shown = run(shell, "%%memprof --help\nx_ = 1")
    assert "nothing was run" in shown
    assert "--history FOLDER" in shown
    assert "x_" not in shell.user_ns
    assert not result.success


@pytest.mark.parametrize(("second", "count"), [("%%memprof", 1), ("\n%%memprof", 1), ("%%memprof -q", 0)])
def test_written_twice_it_reports_once_with_the_flags_of_both(shell, second, count):
    result, shown = run(shell, f"%%memprof --out first_\n{second}\ntape_.events.append(9 << 20)")
    assert result.success
    assert shown.count("CPU: peak 9 MiB") == count
    assert shell.user_ns["first_"].events["size_bytes"].to_list() == [9 << 20]
    assert shell.user_ns["_memprof"] is shell.user_ns["first_"]


def test_a_wrong_verb_or_word_is_refused(shell):
    result, _ = run(shell, "%memprof lats")
    assert "no verb 'lats'. Did you mean 'last'" in str(result.error_in_exec)
    result, _ = run(shell, "%memprof auto maybe")
    assert "STATE can't be 'maybe'" in str(result.error_in_exec)
    result, _ = run(shell, "%memprof load nowhere.pickle")
    assert "does not exist" in str(result.error_in_exec)


def test_doctor_says_what_to_do(shell):
    _, shown = run(shell, "%memprof doctor")
    for word in ("nbmemprof", "torch", "--source torch_cpu", "ready", "--source torch_history", "no device", "magics", "auto"):
        assert word in shown


def test_help_names_every_flag_and_verb(shell):
    known = shell.magics_manager.magics
    for text in (known["cell"]["memprof"].__doc__, known["line"]["memprof"].__doc__):
        for word in ("--source", "--stacks", "--out", "--save", "--view", "-q", "last", "load", "save", "auto", "stats", "doctor", ".nbmem"):
            assert word in text


# ---------------------------------------------------------------------- coming and going
def hooks(shell):
    events = [c for found in shell.events.callbacks.values() for c in found]
    return [f for f in [*shell.input_transformers_cleanup, *shell.ast_transformers, *events] if (getattr(f, "__module__", "") or "").startswith("nbmemprof")]


def test_loading_twice_hooks_once(shell):
    before = len(hooks(shell))
    magics.load(shell)
    run(shell, "%reload_ext nbmemprof")
    assert len(hooks(shell)) == before == 3


def test_unloading_leaves_nothing(shell):
    run(shell, "%unload_ext nbmemprof")
    assert hooks(shell) == []
    assert "memprof" not in shell.magics_manager.magics["cell"]
    assert "memprof" not in shell.magics_manager.magics["line"]
    assert not hasattr(shell, "_nbmemprof")


@pytest.mark.parametrize("text", ["%%memprof\n%unload_ext nbmemprof\nx = 1", "%%memprof\n%reload_ext nbmemprof\nx = 1"])
def test_unloading_in_a_recorded_cell_stops_the_recording(shell, tape, text):
    assert run(shell, text)[0].success
    assert shell.user_ns["x"] == 1
    assert len(tape.starts) == 1
    assert not tape.running


def test_a_magic_of_this_name_comes_back(shell):
    magics.unload(shell)
    shell.register_magic_function(lambda line: "theirs", "line", "memprof")
    magics.load(shell)
    magics.unload(shell)
    assert shell.run_line_magic("memprof", "") == "theirs"
    del shell.magics_manager.magics["line"]["memprof"]


def test_other_extensions_stay(shell):
    seen = []
    shell.events.register("pre_run_cell", seen.append)
    shell.input_transformers_cleanup.append(list)
    run(shell, "%%memprof -q\nx = 1")
    run(shell, "%unload_ext nbmemprof")
    assert len(seen) == 2
    assert list in shell.input_transformers_cleanup
