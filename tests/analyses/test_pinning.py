"""Free memory that can't go back names the blocks that hold it; what fits is what the list would serve."""

from __future__ import annotations

import polars as pl
from modelled import loaded
from strategies import MIB, Allocator, frames

from nbmemprof.allocator import Device
from nbmemprof.analyses._pinning import by_site, pinning
from nbmemprof.analyses.fragmentation import fragmentation

TRAIN, KEEP = frames("train.py:12 step"), frames("cache.py:9 keep")


def survivor() -> Allocator:
    """4 KiB in blocks of 512; one stays and holds the whole segment."""
    a = Allocator()
    blocks = [a.malloc(512, KEEP if i == 3 else TRAIN) for i in range(8)]
    for i, block in enumerate(blocks):
        if i != 3:
            a.free(block)
    return a


def test_a_block_of_512_bytes_holds_two_mib():
    row = fragmentation(survivor().capture()).row(0, named=True)
    assert row["pinned_bytes"] == 2 * MIB - 512
    assert row["pinned_by"] == "cache.py:9 (512 B in 1 block) holds 2 MiB"


def test_the_first_and_last_of_4097_small_blocks_pin_two_segments():
    device = Device()
    blocks = [device.malloc(512) for _ in range(4097)]
    for addr in blocks[1:-1]:
        device.free(addr)
    row = fragmentation(loaded(device)).row(0, named=True)
    assert (row["allocated_bytes"], row["reserved_bytes"], row["pinned_bytes"], row["releasable_bytes"]) == (1024, 4 * MIB, 4193280, 0)
    assert "1 KiB in 2 blocks" in row["pinned_by"]


def test_two_blocks_of_one_line_in_a_segment_hold_it_once():
    a = Allocator()
    blocks = [a.malloc(512, KEEP) for _ in range(3)]
    a.free(blocks[1])
    cap = a.capture()
    sites = by_site(pinning(cap.segments, cap.blocks), cap.stacks)
    assert sites.select("site", "count", "pinned_bytes").rows() == [("cache.py:9", 2, 2 * MIB - 1024)]


def test_holes_of_expandable_ranges_are_held_once_and_add_up():
    a = Allocator(expandable=True)
    blocks = [a.malloc(n * MIB, KEEP) for n in (15, 50, 15, 7, 13)]
    a.free(blocks[0])
    a.free(blocks[2])
    cap = a.capture()
    pinned = fragmentation(cap)["pinned_bytes"].sum()
    assert pinned > 0
    assert pinning(cap.segments, cap.blocks)["pinned_bytes"].sum() == pinned


def test_where_nothing_is_pinned_nobody_is_named():
    a = Allocator()
    a.free(a.malloc(20 * MIB, TRAIN))
    assert fragmentation(a.capture())["pinned_by"].to_list() == [None]


def test_ends_that_were_not_split_off_are_slack_and_count_as_rounding_too():
    """11 MiB + 1 B get a segment of 12 MiB whole: less than 1 MiB is left, so it is not split."""
    device = Device()
    device.malloc(11 * MIB + 1)
    row = fragmentation(loaded(device)).row(0, named=True)
    assert (row["rounding_bytes"], row["slack_bytes"]) == (MIB - 1, MIB - 512)
    device = Device("roundup_power2_divisions:4")
    device.malloc(100 * MIB)
    row = fragmentation(loaded(device)).row(0, named=True)
    assert (row["rounding_bytes"], row["slack_bytes"]) == (12 * MIB, 0)  # rounded to 112 MiB, and split there


def test_what_fits_is_what_the_model_serves_without_new_memory():
    device = Device()
    device.free(device.malloc(30 * MIB))
    device.malloc(5 * MIB)
    device.free(device.malloc(1024))
    lists = dict(fragmentation(loaded(device)).select(pl.col("pool").cast(pl.String), "largest_fit_bytes").iter_rows())
    assert lists == {"large": 25 * MIB, "small": MIB}
    before = device.stats()["reserved_bytes.all.current"]
    device.malloc(25 * MIB)
    device.malloc(MIB)
    assert device.stats()["reserved_bytes.all.current"] == before
    device.malloc(MIB + 1)
    assert device.stats()["reserved_bytes.all.current"] > before
