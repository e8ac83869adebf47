"""A refusal is explained by the heap as it was, with the numbers."""

from __future__ import annotations

import pytest
from strategies import MIB, Allocator, capture, frames

import nbmemprof as mp
from nbmemprof.analyses.oom import oom
from nbmemprof.capture import Capture
from nbmemprof.views.findings import findings

SITE = frames("lib/python3.12/site-packages/torch/nn/functional.py:7 linear", "model.py:55 forward", "train.py:9 main")


def refused(a: Allocator, size: int, **where):
    assert a.malloc(size, SITE, **where) is None
    return oom(mp.load(a.snapshot())).row(-1, named=True)


def chequered(limit: int) -> Allocator:
    a = Allocator(limit=limit)
    a.free(a.malloc(512 * MIB, SITE))
    for block in [a.malloc(64 * MIB, SITE) for _ in range(8)][::2]:
        a.free(block)
    return a


def test_split_holes_are_named_with_their_sum_and_the_largest():
    row = refused(chequered(522 * MIB), 96 * MIB)
    assert (row["requested_bytes"], row["device_free_bytes"]) == (96 * MIB, 10 * MIB)
    assert (row["free_bytes_in_list"], row["largest_free_bytes"]) == (256 * MIB, 64 * MIB)
    assert "256 MiB lie free in 4 pieces, the largest 64 MiB: split by blocks in use" in row["reason"]
    assert row["would_help_bytes"] == 64 * MIB  # one block between two holes; new memory would take 86 MiB


def test_the_site_and_stack_are_those_of_the_request():
    row = refused(chequered(522 * MIB), 96 * MIB)
    assert row["site"] == "model.py:55"
    assert row["stack"][0].endswith("functional.py:7 linear")
    assert row["stack"][-1] == "train.py:9 main"


def test_the_block_between_two_holes_is_the_least_wherever_they_lie():
    """In use 64, 64, free 64, in use 8, free 64: giving back the 8 MiB makes 136 of them."""
    a = Allocator(limit=270 * MIB)
    a.free(a.malloc(264 * MIB, SITE))
    blocks = [a.malloc(n * MIB, SITE) for n in (64, 64, 64, 8, 64)]
    a.free(blocks[2])
    a.free(blocks[4])
    assert refused(a, 120 * MIB)["would_help_bytes"] == 8 * MIB


def test_a_little_more_from_the_device_is_told_where_it_is_the_least():
    row = refused(chequered(600 * MIB), 96 * MIB)
    assert (row["device_free_bytes"], row["would_help_bytes"]) == (88 * MIB, 8 * MIB)


def test_private_pools_and_waiting_blocks_are_named_and_not_counted_as_free():
    a = Allocator(limit=200 * MIB)
    pool = a.malloc(80 * MIB, SITE, pool=(0, 1))
    kept = a.malloc(10 * MIB, SITE, pool=(0, 1))
    a.free(pool)
    waiting = a.malloc(64 * MIB, SITE)
    a.free(waiting, pending=True)
    row = refused(a, 70 * MIB)
    assert kept is not None
    assert (row["free_bytes_in_list"], row["pending_bytes"], row["private_free_bytes"]) == (0, 64 * MIB, 80 * MIB)
    assert "80 MiB lie free in private pools, where this request may not go" in row["reason"]
    assert "64 MiB are freed but still wait for other streams" in row["reason"]


def test_a_full_device_is_said_to_be_full():
    a = Allocator(limit=100 * MIB)
    for _ in range(5):
        a.malloc(20 * MIB, SITE)
    row = refused(a, 20 * MIB)
    assert "truly full" in row["reason"]
    assert "nothing lies free" in row["reason"]
    assert row["would_help_bytes"] == 20 * MIB


def test_another_streams_memory_is_named():
    a = Allocator(limit=100 * MIB)
    a.free(a.malloc(80 * MIB, SITE, stream=7))
    row = refused(a, 40 * MIB)
    assert (row["free_bytes_in_list"], row["largest_free_bytes"]) == (0, 0)
    assert "80 MiB lie free in lists of other streams" in row["reason"]


def test_a_limit_below_the_card_is_told_from_a_full_card():
    """The device has plenty: only a limit can have refused it, and where it is known it is named."""
    a = Allocator(limit=100 * MIB)
    a.malloc(80 * MIB, SITE)
    a.malloc(40 * MIB, SITE)
    snap = a.snapshot()
    snap["device_traces"][0][-1]["device_free"] = 8192 * MIB
    cap = mp.load(snap)
    assert "a limit below 120 MiB must have refused it" in oom(cap)["reason"][0]
    known = Capture.build(dict(cap.tables.items()), **(cap.meta | {"limit_bytes": 100 * MIB}))
    assert "the limit of 100 MiB leaves 20 MiB" in oom(known)["reason"][0]
    assert oom(known)["would_help_bytes"][0] == 20 * MIB


def test_the_heap_is_that_of_the_refusal_not_of_the_end():
    a = Allocator(limit=100 * MIB)
    blocks = [a.malloc(20 * MIB, SITE) for _ in range(5)]
    assert a.malloc(30 * MIB, SITE) is None
    for block in blocks:
        a.free(block)
    a.empty_cache()
    row = oom(mp.load(a.snapshot())).row(0, named=True)
    assert (row["reserved_bytes"], row["live_bytes"], row["free_bytes_in_list"]) == (100 * MIB, 100 * MIB, 0)


def test_each_device_is_looked_at_alone():
    a, b = Allocator(device=0, limit=50 * MIB), Allocator(device=1, limit=50 * MIB)
    a.malloc(40 * MIB, SITE)
    b.malloc(20 * MIB, SITE)
    assert b.malloc(40 * MIB, SITE) is None
    rows = oom(capture([a, b]))
    assert rows.select("device", "reserved_bytes", "live_bytes").rows() == [(1, 20 * MIB, 20 * MIB)]


@pytest.mark.cost(1.4)
def test_of_very_many_refusals_the_first_and_last_are_explained_and_all_are_listed():
    a = Allocator(limit=100 * MIB)
    a.malloc(80 * MIB, SITE)
    for _ in range(150):
        a.malloc(40 * MIB, SITE)
    rows = oom(a.capture())
    assert rows.height == 150
    assert rows["would_help_bytes"].null_count() == 50
    assert "one of 150 refusals" in rows["reason"][75]


def test_without_a_refusal_there_is_no_row_and_the_columns_are_the_same():
    a = Allocator()
    a.malloc(MIB, SITE)
    b = Allocator(limit=MIB)
    b.malloc(MIB, SITE)
    assert oom(a.capture()).is_empty()
    assert oom(a.capture()).schema == oom(b.capture()).schema


def test_a_request_larger_than_the_card_is_helped_by_nothing():
    a = Allocator(limit=100 * MIB)
    for _ in range(4):
        a.malloc(20 * MIB, SITE)
    row = refused(a, 300 * MIB)
    assert row["fits_if_all_freed"] is False
    assert (row["would_help_bytes"], row["free_site"]) == (None, None)
    assert "300 MiB is more than all that the device has for torch (100 MiB), and nothing that could be freed would help" in row["reason"]
    assert row["help"].startswith("Nothing that could be freed would help")
    said = " ".join(findings(mp.load(a.snapshot())))
    assert "nothing that could be freed would help" in said
    assert "would have made room" not in said and "smaller batch" not in said and "ask again" not in said


def test_a_limit_that_is_smaller_than_the_request_is_named():
    a = Allocator(limit=100 * MIB)
    a.malloc(80 * MIB, SITE)
    a.malloc(300 * MIB, SITE)
    snap = a.snapshot()
    snap["device_traces"][0][-1]["device_free"] = 8192 * MIB
    cap = mp.load(snap)
    assert oom(cap)["fits_if_all_freed"].to_list() == [True]
    limited = Capture.build(dict(cap.tables.items()), **(cap.meta | {"limit_bytes": 200 * MIB}))
    row = oom(limited).row(0, named=True)
    assert (row["fits_if_all_freed"], row["would_help_bytes"]) == (False, None)
    assert "more than the limit (200 MiB)" in row["reason"]


def test_one_that_fits_an_empty_card_can_be_helped():
    a = Allocator(limit=100 * MIB)
    for _ in range(4):
        a.malloc(20 * MIB, SITE)
    row = refused(a, 100 * MIB)
    assert (row["fits_if_all_freed"], row["would_help_bytes"]) == (True, 80 * MIB)
