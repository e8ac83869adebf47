"""``%%memprof --counters`` and ``mp.counters`` in a real shell, over a libcupti that answers."""

from __future__ import annotations

import polars as pl
import pytest
from counters.fake_cupti import FakeCupti, machine
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbmemprof as mp
from nbmemprof import magics
from nbmemprof.analyses._counters import COUNTERS
from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _ceilings, _context, _cupti

NAMES = {name: counter.metric for name, counter in COUNTERS.items()}
STRIDED = {
    NAMES[name]: value
    for name, value in {
        "duration": 400_000.0, "dram_read": 1e9, "dram_write": 1e6, "load_requests": 1e6, "load_sectors": 32e6, "load_bytes": 128e6, "l2_sectors": 32e6, "l2_misses": 30e6, "l1_hit": 0.0,
    }.items()
}  # fmt: skip


@pytest.fixture
def fake(monkeypatch):
    made = FakeCupti([STRIDED] * 3)
    parts = machine(made)
    monkeypatch.setattr(_cupti, "open_library", lambda: parts["cupti"])
    monkeypatch.setattr(_context, "current", lambda: parts["context"])
    return made


@pytest.fixture
def shell(fake):
    InteractiveShell.clear_instance()
    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell.instance(config=config)
    made.run_line_magic("load_ext", "nbmemprof")
    made.user_ns["launch"] = fake.launch
    yield made
    magics.unload(made)
    InteractiveShell.clear_instance()


@pytest.mark.cost(0.7)
def test_the_cells_kernels_are_in_its_capture_and_its_report(shell):
    with capture_output() as said:
        result = shell.run_cell("%%memprof --counters\nlaunch('strided')\nlaunch('strided')\n40 + 2")
    assert result.result == 42
    capture = shell.user_ns["_memprof"]
    assert capture.kernels["name"].to_list() == ["strided", "strided"]
    assert capture.meta["counters"]["passes"] == 6
    report = said.outputs[-1].data["text/plain"] if said.outputs else said.stdout
    assert "strided" in report
    assert "32 sectors where 4 would do" in report


def test_a_cell_that_fails_gives_the_counters_back_and_has_its_capture(shell, fake):
    with capture_output():
        result = shell.run_cell("%%memprof --counters\nlaunch('k')\nraise ValueError('in the cell')")
    assert isinstance(result.error_in_exec, ValueError)
    assert shell.user_ns["_memprof"].kernels.height == 1
    assert fake.callback is None
    assert not fake.counting


def test_where_counters_are_refused_the_cell_runs_and_its_report_says_why(shell, fake):
    fake.refusals["cuptiProfilerGetCounterAvailability"] = 35
    with capture_output():
        result = shell.run_cell("%%memprof --counters\nvalue = 5\nvalue")
    assert result.result == 5
    assert any("administrators only" in warning for warning in shell.user_ns["_memprof"].meta["warnings"])


def test_without_the_flag_nothing_is_counted(shell, fake):
    with capture_output():
        shell.run_cell("%%memprof\nlaunch('k')")
    assert fake.calls == []
    assert shell.user_ns["_memprof"].kernels.height == 0


def test_a_capture_with_counters_saves_and_reloads(shell, tmp_path):
    with capture_output():
        shell.run_cell("%%memprof --counters\nlaunch('strided')")
    capture = shell.user_ns["_memprof"]
    again = mp.load(capture.save(tmp_path / "counted.nbmem"))
    assert again == capture
    assert mp.counters(again).equals(mp.counters(capture))
    assert again._repr_mimebundle_() == capture._repr_mimebundle_()


def test_a_recording_of_a_script_counts_too(fake):
    with mp.record(counters=True) as recording:
        fake.launch("strided")
    assert recording.capture.kernels["name"].to_list() == ["strided"]
    assert recording.capture.kernels["time_us"][0] > 0


def test_windows_that_nest_count_in_the_outer_one_and_say_so_in_the_inner(fake):
    with mp.record(counters=True) as outer:
        with mp.record(counters=True) as inner:
            fake.launch("strided")
        fake.launch("strided")
    assert inner.capture.kernels.height == 0
    assert any("being counted in this process already" in warning for warning in inner.capture.meta["warnings"])
    assert outer.capture.kernels.height == 2


def test_the_frame_of_a_call_has_its_value_passes_and_findings(fake):
    def work(count):
        for _ in range(count):
            fake.launch("strided")
        return "made"

    counted = mp.counters(work, 2)
    assert counted.height == 2
    assert counted.value == "made"
    assert counted.passes == 6
    assert counted.origin == "measured"
    (finding,) = counted.findings.filter(counted.findings["rule"] == "scattered_loads").iter_rows(named=True)
    assert finding["launches"] == 2
    assert finding["predicted_us"] < finding["duration_us"] == 800.0
    assert "32 sectors where 4 would do" in counted._repr_mimebundle_()["text/plain"]


def test_a_probe_of_this_card_gives_the_ceilings(fake):
    probe = pl.DataFrame({"what": ["read", "read", "write"], "achieved_bytes_per_s": [1e12, 5e12, 4e12]})
    counted = mp.counters(fake.launch, "strided", ceilings=probe)
    assert counted.capture.meta["ceilings"]["read"] == 5e12
    assert counted["ceiling_bytes_per_s"][0] == pytest.approx(5e12, rel=0.01)
    with pytest.raises(NbmemprofError, match="mp.probes.bandwidth"):
        mp.counters(fake.launch, "strided", ceilings=pl.DataFrame({"a": [1]}))


def test_the_shipped_recording_of_such_a_card_gives_the_ceilings_otherwise(fake):
    ceilings = mp.counters(fake.launch, "strided").capture.meta["ceilings"]
    assert (ceilings["origin"], ceilings["device"]) == ("recorded", "NVIDIA H200")
    assert 3.5e12 < ceilings["copy"] < ceilings["read"] < ceilings["l2"]
    assert _ceilings.of("NVIDIA GeForce RTX 4090") == {}


def test_the_function_is_called_once_and_warm_up_calls_are_not_counted(fake):
    calls = []

    def work():
        calls.append(fake.counting)
        fake.launch("k")

    assert mp.counters(work).height == 1
    assert calls == [True]
    counted = mp.counters(work, warmup=2)
    assert calls == [True, False, False, True]
    assert counted.capture.meta["counters"]["plain_s"] is not None


def test_a_function_that_fails_gives_the_counters_back(fake):
    with pytest.raises(ZeroDivisionError):
        mp.counters(lambda: 1 / 0)
    assert fake.callback is None
    assert mp.counters(fake.launch, "k").height == 1


def test_counting_inside_counting_is_told(fake):
    with pytest.raises(NbmemprofError, match="being counted in this process already"):
        mp.counters(lambda: mp.counters(fake.launch, "k"))


@pytest.mark.parametrize(("target", "options", "words"), [(3, {}, "can't be called"), (len, {"how": "nvprof"}, "how can't be 'nvprof'")])
def test_what_can_not_be_counted_is_told(target, options, words):
    with pytest.raises(NbmemprofError, match=words):
        mp.counters(target, **options)
