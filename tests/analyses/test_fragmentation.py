"""What lies free is told list by list, and never called usable where it is not."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from fake_cuda import FakeCuda
from strategies import MIB, Allocator, capture, frames

import nbmemprof as mp
from nbmemprof.analyses.fragmentation import fragmentation
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.sources import torch_history

SITE = frames("train.py:5 step")
PRIVATE = (0, 1)


def held(a: Allocator, *sizes: int, **where):
    return [a.malloc(s, SITE, **where) for s in sizes]


def chequered() -> Allocator:
    """One segment of 1 GiB of which every other 64 MiB are in use."""
    a = Allocator()
    a.free(a.malloc(1024 * MIB, SITE))
    for block in held(a, *[64 * MIB] * 16)[::2]:
        a.free(block)
    return a


def test_sixteen_parts_of_which_every_other_is_free():
    """Half is free, a quarter of it would be enough, and none of it serves: nothing can be released either."""
    row = fragmentation(chequered().capture(), "256MiB").row(0, named=True)
    assert (row["free_bytes"], row["free_blocks"], row["largest_free_bytes"]) == (512 * MIB, 8, 64 * MIB)
    assert (row["pinned_bytes"], row["releasable_bytes"], row["ratio"]) == (512 * MIB, 0, 0.875)
    assert (row["would_fit"], row["unusable_bytes"], row["rounded_bytes"]) == (False, 512 * MIB, 256 * MIB)


def test_a_request_that_fits_says_what_it_could_not_use():
    a = Allocator()
    a.free(held(a, 30 * MIB, 12 * MIB)[0])
    small = held(a, 5 * MIB)[0]  # in a corner of the 30 MiB
    assert small is not None
    row = fragmentation(a.capture(), 20 * MIB).row(0, named=True)
    assert (row["would_fit"], row["largest_free_bytes"], row["unusable_bytes"]) == (True, 25 * MIB, 0)
    row = fragmentation(a.capture(), 26 * MIB).row(0, named=True)
    assert (row["would_fit"], row["unusable_bytes"]) == (False, 25 * MIB)


def test_a_request_is_rounded_before_it_is_looked_for():
    a = Allocator()
    blocks = held(a, 1024, 512)
    a.free(blocks[0])
    lists = fragmentation(a.capture(), 1 * MIB + 1)
    assert lists["rounded_bytes"].to_list() == [MIB + 512]
    assert lists["would_fit"].to_list() == [False]  # small pool: not for it
    assert lists["unusable_bytes"].to_list() == lists["free_bytes"].to_list()


def test_free_memory_of_a_private_pool_serves_nobody_else():
    a = Allocator()
    pool = held(a, 40 * MIB, 20 * MIB, pool=PRIVATE)
    a.free(pool[0])
    a.free(held(a, 12 * MIB, 12 * MIB)[0])
    lists = fragmentation(a.capture(), 32 * MIB)
    private, default = (lists.filter(private=p).row(0, named=True) for p in (True, False))
    assert (private["free_bytes"], private["would_fit"], private["unusable_bytes"]) == (40 * MIB, False, 40 * MIB)
    assert (default["free_bytes"], default["would_fit"], default["unusable_bytes"]) == (12 * MIB, False, 12 * MIB)


def test_each_stream_and_pool_is_a_list_of_its_own():
    a = Allocator()
    for stream in (0, 7):
        held(a, 1024, 12 * MIB, stream=stream)
    assert sorted(fragmentation(a.capture()).select("stream", "pool").rows()) == [(0, "large"), (0, "small"), (7, "large"), (7, "small")]


def test_a_wholly_free_segment_can_be_released_and_a_shared_one_can_not():
    a = Allocator()
    blocks = held(a, 30 * MIB, 5 * MIB, 5 * MIB)
    a.free(blocks[0])
    a.free(blocks[1])
    row = fragmentation(a.capture()).row(0, named=True)
    assert (row["releasable_bytes"], row["pinned_bytes"], row["free_bytes"]) == (30 * MIB, 15 * MIB, 45 * MIB)


def test_whole_free_pages_of_an_expandable_range_can_be_released():
    """The allocator unmaps pages of 20 MiB; what is left of a hole at its ends stays."""
    a = Allocator(expandable=True)
    blocks = held(a, 15 * MIB, 50 * MIB, 15 * MIB)
    a.free(blocks[1])
    row = fragmentation(a.capture()).row(0, named=True)
    assert (row["free_bytes"], row["releasable_bytes"], row["pinned_bytes"]) == (50 * MIB, 40 * MIB, 10 * MIB)
    assert row["reserved_bytes"] == 80 * MIB


def test_holes_of_ranges_with_a_gap_between_them_are_not_joined():
    """Three mapped ranges, each with 8 MiB in use and 12 MiB free; two of them lie 6 MiB apart."""
    ranges = []
    for at in (0x7F0000000000, 0x7F0001A00000, 0x7F0009200000):
        common = {"device": 0, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": True, "frames": []}
        blocks = [{"address": at, "size": 8 * MIB, "requested_size": 8 * MIB, "state": "active_allocated", "frames": []}, {"address": at + 8 * MIB, "size": 12 * MIB, "requested_size": 0, "state": "inactive", "frames": []}]
        ranges.append(common | {"address": at, "total_size": 20 * MIB, "allocated_size": 8 * MIB, "active_size": 8 * MIB, "requested_size": 8 * MIB, "blocks": blocks})
    row = fragmentation(mp.load({"segments": ranges, "device_traces": [[]]}), "13MiB").row(0, named=True)
    assert (row["reserved_bytes"], row["free_bytes"], row["largest_free_bytes"], row["would_fit"]) == (60 * MIB, 36 * MIB, 12 * MIB, False)


def test_what_waits_for_a_stream_is_neither_live_nor_free():
    a = Allocator()
    blocks = held(a, 20 * MIB, 20 * MIB)
    a.free(blocks[0], pending=True)
    row = fragmentation(a.capture()).row(0, named=True)
    assert (row["allocated_bytes"], row["pending_bytes"], row["active_bytes"], row["free_bytes"], row["ratio"]) == (20 * MIB, 20 * MIB, 40 * MIB, 0, None)


def test_rounding_is_what_live_blocks_have_beyond_their_request():
    a = Allocator()
    held(a, 1, 513, 19 * MIB + 1)  # the last gets a whole segment of 20 MiB
    lists = fragmentation(a.capture())
    assert dict(lists.select("pool", "rounding_bytes").iter_rows()) == {"small": 511 + 511, "large": MIB - 1}


def test_at_the_peak_and_at_a_time_it_is_the_heap_of_that_moment():
    a = Allocator()
    blocks = held(a, 20 * MIB, 20 * MIB)
    a.free(blocks[0])
    cap = mp.load(a.snapshot())
    assert fragmentation(cap, at="peak")["free_bytes"].to_list() == [0]
    assert fragmentation(cap, at="end")["free_bytes"].to_list() == [20 * MIB]
    assert fragmentation(cap, at=3.0)["reserved_bytes"].to_list() == [20 * MIB]
    with pytest.raises(NbmemprofError, match="not a moment"):
        fragmentation(cap, at="later")


def test_two_devices_with_the_same_addresses_stay_apart():
    a, b = Allocator(device=0), Allocator(device=1)
    held(a, 12 * MIB)
    b.free(held(b, 12 * MIB)[0])
    assert fragmentation(capture([a, b])).select("device", "free_bytes").rows() == [(0, 0), (1, 12 * MIB)]


def test_host_memory_and_an_empty_capture_have_no_lists():
    a = Allocator()
    held(a, 12 * MIB)
    assert fragmentation(Capture.build({})).is_empty()
    assert fragmentation(Capture.build({"allocations": a.capture().allocations})).columns == fragmentation(a.capture()).columns


def test_the_request_may_be_text_and_nonsense_is_refused():
    a = chequered()
    assert fragmentation(a.capture(), "64MiB")["would_fit"].to_list() == [True]
    assert fragmentation(a.capture(), 1 << 70)["would_fit"].to_list() == [False]
    with pytest.raises(NbmemprofError, match="not a size"):
        fragmentation(a.capture(), "much")


def test_a_look_at_this_process_moves_no_counter_and_calls_nothing_of_the_allocator(monkeypatch):
    """The picture is read beside the counters; nothing is allocated, given back, recorded or cleared for it."""
    fake = FakeCuda()
    kept = [fake.malloc(9 * MIB) for _ in range(6)]
    for block in kept[::2]:
        fake.free(block)
    monkeypatch.setattr(torch_history, "Cuda", lambda: fake)
    monkeypatch.setattr(torch_history, "unavailable", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch") or ModuleType("torch"))
    trace, before = list(fake.heap.trace), fake.stats(0)
    free = mp.fragmentation(request_bytes="20MiB")
    assert (fake.stats(0), fake.heap.trace, fake.calls, fake.marks, fake.recording) == (before, trace, [], [], None)
    assert free["reserved_bytes"].sum() == before["reserved_bytes"]["all"]["current"]
    assert free["free_bytes"].sum() == before["reserved_bytes"]["all"]["current"] - before["allocated_bytes"]["all"]["current"]
