"""A refused request that gave nothing back leaves no event but its oom: torch's own counters, where they were read, tell that one is missing."""

from __future__ import annotations

import pytest
from attribution_played import play
from fake_cuda import FakeCuda
from recorded import of_requests, of_script, requests, script, with_readings
from strategies import MIB

import nbmemprof as mp
from nbmemprof import heap
from nbmemprof.allocator import _counted, verdict
from nbmemprof.allocator._recording import recordings
from nbmemprof.sources import torch_history

pytestmark = pytest.mark.cost(0.05)
SCRIPTS = ("driver_oom", "driver_oom_exp", "streams_limit", "streams_limit_gc")


def recorded(name: str) -> tuple[dict, dict]:
    return (script(name), of_script(name)) if name in SCRIPTS else (requests(name), of_requests(requests(name)))


def changed(whole: dict, trace: list) -> mp.Capture:
    return mp.load(whole | {"device_traces": [trace]})


@pytest.mark.cost(0.2)
@pytest.mark.parametrize(("name", "every"), [*((name, 1) for name in SCRIPTS), ("streams_limit", 50), ("default_lim", 1)])
def test_a_lost_oom_is_told_between_two_readings(name, every):
    """With sparse readings the places lie further apart, and still hold it."""
    found, whole = recorded(name)
    trace = whole["device_traces"][0]
    ooms = [i for i, e in enumerate(trace) if e["action"] == "oom"]
    assert ooms
    for at in (ooms[0], ooms[len(ooms) // 2], ooms[-1]):
        (lost,) = recordings(with_readings(changed(whole, trace[:at] + trace[at + 1 :]), found, every))
        mismatch = _counted.miscounted(lost)
        low, high = mismatch["between"]
        assert low <= at <= high == mismatch["index"]
        assert mismatch["missing"]["action"] == "oom"
        if every == 1:
            assert high - low <= 12


@pytest.mark.parametrize("name", ["driver_oom", "streams_limit_gc"])
def test_a_recording_agrees_with_its_own_counters(name):
    found, whole = recorded(name)
    (whole_trace,) = recordings(with_readings(mp.load(whole), found, 7))
    assert _counted.miscounted(whole_trace) is None


def test_the_verdict_says_what_torch_counted():
    found, whole = recorded("streams_limit")
    trace = whole["device_traces"][0]
    at = [i for i, e in enumerate(trace) if e["action"] == "oom"][1]
    without = changed(whole, trace[:at] + trace[at + 1 :])
    silent = verdict(without)
    assert silent["exact"]
    assert any("were one lost, nothing here would show it" in text for text in silent["inferred"])
    told = verdict(with_readings(without, found))
    assert not told["exact"]
    assert "torch counted 2 up to here (num_ooms), the trace has 1: an oom (a request that was refused) is missing" in told["text"]
    assert not any("num_ooms" in text for text in told["inferred"])


def test_an_oom_recorded_twice_is_one_too_many():
    found, whole = recorded("streams_limit")
    trace = whole["device_traces"][0]
    at = [i for i, e in enumerate(trace) if e["action"] == "oom"][1]
    twice = changed(whole, [*trace[: at + 1], *trace[at:]])
    assert verdict(twice)["exact"]  # a program may well ask twice
    told = verdict(with_readings(twice, found))
    assert not told["exact"]
    low, high = told["first_mismatch"]["between"]
    assert low - 1 <= at <= high
    assert "recorded once too often" in told["text"]


def test_a_live_recording_has_the_counters_and_a_lost_oom_is_told():
    cuda = FakeCuda(limit=20 * MIB)
    source = torch_history.TorchHistory(cuda, clock=cuda.clock)
    source.start()
    held = cuda.malloc(12 * MIB)
    assert cuda.malloc(30 * MIB) is None
    source.mark()
    cuda.free(held)
    assert cuda.malloc(40 * MIB) is None
    capture = source.stop()
    readings = capture.meta["readings"]["0"]
    assert [r["num_ooms"] for r in readings] == [0, 1, 2]
    (whole,) = recordings(capture)
    assert _counted.miscounted(whole) is None
    seqs = capture.events.filter(capture.events["action"] == "oom")["seq"].to_list()
    for nth, seq in enumerate(seqs):
        tables = {n: capture.tables[n] for n in ("segments", "blocks", "stacks")}
        (less,) = recordings(heap.build({"events": capture.events.filter(capture.events["seq"] != seq), **tables}, **capture.meta))
        mismatch = _counted.miscounted(less)
        at = capture.events["seq"].to_list().index(seq)
        assert mismatch["between"][0] <= at <= mismatch["between"][1]
        assert f"torch counted {nth + 1} up to here" in mismatch["reason"]


def test_counters_that_began_anew_are_not_compared():
    cuda = FakeCuda(limit=20 * MIB)
    source = torch_history.TorchHistory(cuda, clock=cuda.clock)
    source.start()
    cuda.malloc(12 * MIB)
    cuda.reset_counts()
    assert cuda.malloc(30 * MIB) is None
    assert source.stop().meta["readings"] == {}


@pytest.mark.cost(0.2)
@pytest.mark.parametrize("name", ["graphed", "gpt2_midrun"])
def test_real_recordings_have_as_many_events_as_torch_counted(name):
    """On an H200, as recorded: counters read at the beginning and at the end."""
    capture = play(name)
    (recording,) = recordings(capture)
    assert len(capture.meta["readings"]["0"]) == 2
    counts = _counted._Counts(recording, capture.meta["readings"]["0"])
    assert counts.wanted[-1].tolist() == counts.total.tolist()
