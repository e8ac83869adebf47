"""Churn of a line, and what a pool of its own would save."""

from __future__ import annotations

from modelled import MIB, fenced, loaded
from strategies import Allocator, frames

import nbmemprof as mp
from nbmemprof.analyses.advise import advise
from nbmemprof.analyses.pools import pools
from nbmemprof.capture import Capture

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
    assert (row["device_calls"], row["device_calls_saved"], row["calls_saved"]) == (4, 3, 6)


def test_several_at_a_time_that_all_go_want_an_arena():
    a = Allocator()
    for _ in range(3):
        for block in [a.malloc(5 * MIB, BATCH) for _ in range(4)]:
            a.free(block)
    row = lines(a)["data.py:3"]
    assert (row["advice"], row["count"], row["peak_count"], row["peak_bytes"], row["returns"]) == ("arena", 12, 4, 20 * MIB, 3)
    assert row["saved_bytes"] == 0  # torch's cache did as well


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
    row = lines(a)["train.py:5"]
    assert (row["advice"], row["pending_count"], row["saved_bytes"]) == ("stream", 3, sum(b.size for b in waiting))


def test_without_frames_requests_of_one_size_are_one_line():
    rows = {row["asked_bytes"]: row for row in pools(loaded(fenced())).iter_rows(named=True)}
    assert set(rows) == {91 * MIB, int(45.5 * MIB), 2 * MIB}
    row = rows[91 * MIB]
    assert (row["advice"], row["count"], row["device_calls"]) == ("buffer", 20, 20)
    assert row["saved_bytes"] > 1024 * MIB
    assert sum(r["device_calls"] for r in rows.values()) == 42


def test_advice_names_the_line_only_where_it_spares_device_calls():
    found = advise(loaded(fenced())).filter(rule="pools")
    assert found.height == 0  # 19 calls each are not worth a line
    found = advise(loaded(fenced(cycles=30))).filter(rule="pools")
    assert "one buffer of 91 MiB would do" in found["finding"][0]


def test_an_empty_capture_has_no_lines_and_the_same_columns():
    a = Allocator()
    a.malloc(MIB, LOOP)
    assert pools(Capture.build({})).is_empty()
    assert pools(Capture.build({})).columns == pools(a.capture()).columns
