"""Time of device calls, from the gaps of a trace whose times are known."""

from __future__ import annotations

import polars as pl
import pytest
from modelled import MIB, loaded
from strategies import Allocator, frames

import nbmemprof as mp
from nbmemprof import schema
from nbmemprof.allocator import Device
from nbmemprof.analyses.advise import advise
from nbmemprof.analyses.stalls import stalls
from nbmemprof.capture import Capture
from nbmemprof.views.findings import findings

SITE, OTHER = frames("train.py:5 step"), frames("data.py:3 batch")


def timed(snap: dict, gaps: list[int]) -> Capture:
    at = 1_700_000_000_000_000
    trace = snap["device_traces"][0]
    assert len(gaps) == len(trace)
    for entry, gap in zip(trace, gaps, strict=True):
        at += gap
        entry["time_us"] = at
    return mp.load(snap)


def plain() -> dict:
    """segment_alloc alloc alloc alloc segment_alloc alloc, all of one line."""
    a = Allocator()
    for size in (5, 5, 5, 30):
        a.malloc(size * MIB, SITE)
    assert [e["action"] for e in a.trace] == ["segment_alloc", "alloc", "alloc", "alloc", "segment_alloc", "alloc"]
    return a.snapshot()


def test_what_exceeds_the_usual_gap_of_the_line_is_the_drivers():
    row = stalls(timed(plain(), [0, 1, 10, 10, 510, 1])).row(0, named=True)
    assert (row["what"], row["count"], row["size_bytes"], row["site"]) == ("segment_alloc", 2, 50 * MIB, "train.py:5")
    assert (row["time_us"], row["least_us"], row["most_us"]) == (500.0, 0.0, 510.0)
    assert row["share"] == pytest.approx(500 / 532)


def test_a_call_no_slower_than_the_line_costs_nothing():
    assert stalls(timed(plain(), [0, 1, 10, 10, 8, 1]))["time_us"].to_list() == [0.0]


def test_a_gap_far_beyond_those_of_the_other_calls_is_not_the_drivers():
    """The first call comes after a library was loaded: only as much of its gap as calls of that kind take at most is counted."""
    a = Allocator()
    for _ in range(10):
        a.malloc(30 * MIB, SITE)
    assert [e["action"] for e in a.trace] == ["segment_alloc", "alloc"] * 10
    gaps = [0, 0] + [g for i in range(1, 9) for g in (100 + i, 0)] + [5_000_000, 0]
    row = stalls(timed(a.snapshot(), gaps)).row(0, named=True)
    usual = sum(range(101, 109))
    assert usual < row["time_us"] < usual + 200
    assert row["most_us"] == usual + 5_000_000


def test_few_calls_are_counted_as_they_are():
    assert stalls(timed(plain(), [0, 1, 10, 10, 5_000_010, 1]))["time_us"].to_list() == [5_000_000.0]


def test_memory_that_the_program_gives_back_itself_is_no_retry():
    """The mark of an ``empty_cache()`` stands right before the run."""
    snap = retried()
    cap = timed(snap, [0, 1, 5, 1, 5, 5, 300, 700, 1])
    before = int(cap.events.filter(pl.col("action") == "segment_free")["seq"][0]) - 1
    mark = schema.fill("marks", {"device": 0, "seq": [before], "kind": "empty_cache", "name": "torch.cuda.empty_cache()"}, 1)
    marked = Capture.build({**cap.tables, "marks": mark}, **cap.meta)
    assert "retry" in stalls(cap)["what"].to_list()
    assert "retry" not in stalls(marked)["what"].to_list()


def test_what_made_torch_give_memory_back_is_said_as_far_as_it_is_known():
    gaps = [0, 1, 5, 1, 5, 5, 300, 700, 1]
    told = {replay: advise(timed(retried(), gaps), replay=replay).filter(rule="device_calls")["action"][0] for replay in (False, True)}
    assert told[False].startswith("Either memory is tight")
    device = Device()
    device.malloc(60 * MIB)
    device.free(device.malloc(30 * MIB))
    device.empty_cache()
    device.malloc(40 * MIB)
    emptied = timed(device.snapshot(), gaps)
    assert advise(emptied, replay=True).filter(rule="device_calls")["action"][0].startswith("By the replay no request was retried")
    emptied = timed(device.snapshot(), gaps)
    emptied.meta["capacity_bytes"] = 1 << 37
    assert advise(emptied, replay=False).filter(rule="device_calls")["action"][0].startswith("There was room, so nothing was refused")


def retried() -> dict:
    """60 MiB live, 30 cached, limit 100: 40 MiB more give the 30 back first."""
    device = Device(limit_bytes=100 * MIB)
    device.malloc(60 * MIB)
    device.free(device.malloc(30 * MIB))
    device.malloc(40 * MIB)
    assert device.stats()["num_alloc_retries"] == 1
    return device.snapshot()


def test_a_flush_and_its_new_memory_are_a_retry_with_the_time_between_them():
    snap = retried()
    words = [e["action"] for e in snap["device_traces"][0]]
    assert words[-3:] == ["segment_free", "segment_alloc", "alloc"]
    rows = {r["what"]: r for r in stalls(timed(snap, [0, 1, 5, 1, 5, 5, 300, 700, 1])).iter_rows(named=True)}
    assert (rows["retry"]["count"], rows["retry"]["size_bytes"]) == (1, 30 * MIB)
    assert rows["retry"]["least_us"] == 700.0
    assert rows["segment_free"]["most_us"] == 300.0
    assert rows["segment_alloc"]["least_us"] == 700.0


def test_a_flush_that_is_followed_by_nothing_is_no_retry():
    device = Device()
    device.free(device.malloc(30 * MIB))
    device.empty_cache()
    device.malloc(512)
    device.free(device.malloc(30 * MIB))
    device.empty_cache()
    rows = dict(stalls(loaded(device)).select("what", "count").iter_rows())
    assert rows["segment_free"] == 2
    assert rows["retry"] == 1  # only the first is followed by new memory


def test_without_a_clock_the_calls_are_counted_and_the_times_are_null():
    snap = plain()
    for entry in snap["device_traces"][0]:
        del entry["time_us"]
    row = stalls(mp.load(snap)).row(0, named=True)
    assert (row["count"], row["time_us"], row["share"]) == (2, None, None)


def test_no_device_calls_no_rows():
    assert stalls(Capture.build({})).is_empty()


def test_stalls_are_said_with_their_share():
    found = advise(timed(plain(), [0, 1, 10, 10, 510, 1]), replay=False)
    row = found.filter(rule="device_calls").row(0, named=True)
    assert row["finding"] == "Allocator stalls took 94 % of this time: about 500 µs in 2 device calls, most of it at train.py:5."
    assert "between 0 µs and 510 µs" in row["evidence"]
    assert advise(timed(plain(), [0, 1, 10, 10, 8, 1]), replay=False).filter(rule="device_calls").is_empty()


def test_a_retry_of_a_live_recording_is_said_with_its_time_even_where_it_took_little():
    cap = timed(retried(), [0, 1, 5, 1, 5, 5, 300, 700, 10_000_000])
    assert not any("ask again" in said for said in findings(cap)), "a file may mean the program's own empty_cache()"
    cap = timed(retried(), [0, 1, 5, 1, 5, 5, 300, 700, 10_000_000])
    cap.meta["source"] = "torch_history"
    assert "Torch had to free its cache and ask again once, 1 ms in all" in " ".join(findings(cap))
    cap = timed(retried(), [0, 1, 5, 1, 5, 5, 300, 700, 10_000_000])
    cap.meta.update(source="torch_history", capacity_bytes=1 << 37)
    assert not any("ask again" in said for said in findings(cap)), "with so much room nothing was refused"


@pytest.mark.parametrize("origin", ["modelled", "predicted", "replayed"])
def test_calls_that_no_device_made_have_no_time_and_no_finding(origin):
    """What passes between a model's device calls is the program's time."""
    cap = timed(plain(), [0, 1, 10, 10, 5_000_010, 1])
    assert any("Allocator stalls took" in text for text in advise(cap, replay=False)["finding"])
    made = Capture.build(dict(cap.tables.items()), **(cap.meta | {"origin": origin}))
    rows = stalls(made)
    assert rows.select("what", "count", "size_bytes", "origin").rows() == [("segment_alloc", 2, 50 * MIB, origin)]
    assert rows.select("time_us", "least_us", "most_us", "share").row(0) == (None, None, None, None)
    assert "device_calls" not in advise(made, replay=False)["rule"].to_list()
    assert not any("stall" in text.lower() for text in findings(made))
