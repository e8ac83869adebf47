"""Churn of a line, and what a pool of its own would save."""

from __future__ import annotations

from modelled import MIB, fenced, loaded
from strategies import Allocator, frames

import nbmemprof as mp
from nbmemprof.allocator import Device
from nbmemprof.analyses.advise import advise
from nbmemprof.analyses.pools import pools
from nbmemprof.capture import Capture
from nbmemprof.views import advice

LOOP, KEEP, BATCH = frames("train.py:5 step"), frames("cache.py:9 keep"), frames("data.py:3 batch")


def lines(a: Allocator) -> dict[str, dict]:
    return {row["site"]: row for row in pools(mp.load(a.snapshot())).iter_rows(named=True)}


def test_one_tensor_at_a_time_wants_a_buffer_of_the_largest_size():
    a = Allocator()
    for size in (10, 12, 11, 12):
        a.free(a.malloc(size * MIB, LOOP))
        a.empty_cache()
    row = lines(a)["train.py:5"]
    assert (row["advice"], row["count"], row["peak_count"], row["returns"]) == ("buffer", 4, 1, 4)
    assert (row["size_bytes"], row["size_max_bytes"], row["peak_bytes"]) == (46 * MIB, 12 * MIB, 12 * MIB)  # 11 MiB take a whole segment of 12
    assert (row["device_calls"], row["device_calls_saved"], row["calls_saved"]) == (4, 7, 6)  # and three of the four times it is given back
    assert row["origin"] == "replayed"


def test_several_at_a_time_that_all_go_want_an_arena():
    a = Allocator()
    for _ in range(3):
        for block in [a.malloc(5 * MIB, BATCH) for _ in range(4)]:
            a.free(block)
    row = lines(a)["data.py:3"]
    assert (row["advice"], row["count"], row["peak_count"], row["peak_bytes"], row["returns"]) == ("arena", 12, 4, 20 * MIB, 3)
    assert row["saved_bytes"] == 0  # torch's cache did as well


def test_two_blocks_one_after_the_other_are_no_arena():
    a = Allocator()
    for _ in range(2):
        a.free(a.malloc(5 * MIB, BATCH))
    assert lines(a)["data.py:3"]["advice"] == "none"


def test_what_stays_wants_nothing():
    a = Allocator()
    for _ in range(5):
        a.malloc(5 * MIB, KEEP)
    row = lines(a)["cache.py:9"]
    assert (row["advice"], row["calls_saved"], row["device_calls_saved"], row["saved_bytes"]) == ("none", 0, 0, 0)


def test_blocks_that_wait_for_other_streams_are_told_with_what_waits_at_once():
    a = Allocator()
    waiting = []
    for _ in range(3):
        block = a.malloc(15 * MIB, LOOP)
        a.free(block, pending=True)
        waiting.append(block)
        a.malloc(512, KEEP)
    for block in waiting:
        a.complete(block)
    a.malloc(512, KEEP)  # whose search finds them done
    asked = {row["site"]: row for row in pools(mp.load(a.snapshot()), replay=False).iter_rows(named=True)}["train.py:5"]
    assert (asked["advice"], asked["pending_count"], asked["saved_bytes"]) == ("stream", 3, sum(b.size for b in waiting))
    row = lines(a)["train.py:5"]  # freed at once, the second and third use the first one's segment
    assert (row["saved_bytes"], row["device_calls_saved"], row["origin"]) == (2 * 16 * MIB, 2, "replayed")


def buffered(cycles: int) -> Device:
    """As :func:`modelled.fenced`, with the blocks of 91 MiB in one that stays."""
    device = Device("max_split_size_mb:128,expandable_segments:True")
    device.malloc(91 * MIB)
    for _ in range(cycles):
        b = device.malloc(int(45.5 * MIB))
        device.malloc(2 * MIB)
        device.free(b)
    return device


def test_the_saving_of_a_buffer_is_the_difference_of_two_models():
    row = {row["asked_bytes"]: row for row in pools(loaded(fenced(cycles=30))).iter_rows(named=True)}[91 * MIB]
    was, then = fenced(cycles=30).stats(), buffered(cycles=30).stats()
    peak, calls = "reserved_bytes.all.peak", ("num_device_alloc", "num_device_free")
    assert row["saved_bytes"] == row["saved_high_bytes"] == was[peak] - then[peak] > 0
    assert row["device_calls_saved"] == sum(was[c] for c in calls) - sum(then[c] for c in calls)


def test_a_buffer_that_takes_more_than_the_cache_did_is_no_advice():
    """Two lines use one segment in turns; a block of its own for either is memory on top."""
    a = Allocator()
    for _ in range(30):
        a.free(a.malloc(40 * MIB, LOOP))
        a.free(a.malloc(40 * MIB, BATCH))
    cap = mp.load(a.snapshot())
    assert [r["saved_bytes"] for r in lines(a).values()] == [-40 * MIB, -40 * MIB]
    assert advise(cap).filter(rule="pools").is_empty()
    assert "would spare nothing but the calls" in advice.pools(cap)


def test_what_is_asked_for_on_two_streams_is_not_replayed():
    a = Allocator()
    for stream in (0, 7, 0, 7):
        a.free(a.malloc(30 * MIB, LOOP, stream=stream))
    row = lines(a)["train.py:5"]
    assert (row["advice"], row["origin"], row["saved_high_bytes"]) == ("buffer", "measured", None)


def test_without_frames_requests_of_one_size_are_one_line():
    rows = {row["asked_bytes"]: row for row in pools(loaded(fenced())).iter_rows(named=True)}
    assert set(rows) == {91 * MIB, int(45.5 * MIB), 2 * MIB}
    row = rows[91 * MIB]
    assert (row["advice"], row["count"], row["device_calls"]) == ("buffer", 20, 20)
    assert row["saved_bytes"] > 1024 * MIB
    assert sum(r["device_calls"] for r in rows.values()) == 42


def test_advice_names_the_line_with_what_the_replay_saves():
    row = advise(loaded(fenced(cycles=30))).filter(rule="pools").row(0, named=True)
    assert "one buffer of 91 MiB would do" in row["finding"]
    assert row["evidence"].startswith("Replayed so, the peak of reserved memory is 3.9 GiB lower; it takes 58 device calls fewer and 58 allocs and frees.")
    assert row["origin"] == "replayed"


def test_an_empty_capture_has_no_lines_and_the_same_columns():
    a = Allocator()
    a.malloc(MIB, LOOP)
    assert pools(Capture.build({})).is_empty()
    assert pools(Capture.build({})).columns == pools(a.capture()).columns
