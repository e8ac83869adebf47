"""What would have let a refused request through: numbers of known cases, on traces of the allocator's model."""

from __future__ import annotations

import pytest
from modelled import MIB, chequered, graphs, loaded, waited
from strategies import Allocator, frames

import nbmemprof as mp
from nbmemprof.allocator import Device
from nbmemprof.analyses.fragmentation import fragmentation
from nbmemprof.analyses.oom import oom

TRAIN, KEEP = frames("train.py:5 step"), frames("cache.py:9 keep")


def explained(device: Device, **options) -> dict:
    return oom(loaded(device), **options).row(-1, named=True)


def test_half_of_a_segment_lies_free_in_sixteen_holes_and_nothing_can_be_given_back():
    row = explained(chequered())
    assert (row["requested_bytes"], row["free_bytes_in_list"], row["free_blocks"], row["largest_free_bytes"]) == (256 * MIB, 1024 * MIB, 16, 64 * MIB)
    assert (row["ratio"], row["releasable_bytes"], row["fits_if_adjacent"]) == (0.9375, 0, True)
    assert "would fit if the free pieces were adjacent" in row["help"]
    assert "empty_cache() would not help" in row["help"]


@pytest.mark.cost(0.5)
def test_the_setting_that_would_have_served_it_is_replayed_and_really_serves_it():
    row = explained(chequered(), replay=True)
    assert row["setting"] == "expandable_segments:True"
    assert "would have served it (replayed)" in row["help"]
    assert chequered("expandable_segments:True").stats()["num_ooms"] == 0  # the model from scratch says so too
    assert chequered("roundup_power2_divisions:8").stats()["num_ooms"] == 1
    assert "roundup" not in row["help"]


@pytest.mark.cost(0.5)
def test_where_no_setting_helps_it_is_said():
    device = Device(limit_bytes=100 * MIB)
    device.malloc(90 * MIB)
    with pytest.raises(mp.OutOfMemoryError):
        device.malloc(50 * MIB)
    row = explained(device, replay=True)  # an expandable segment would not even have served the 90 MiB
    assert row["setting"] is None
    assert "None of the settings that were replayed would have served it" in row["help"]
    assert row["fits_if_adjacent"] is False


@pytest.mark.cost(0.5)
def test_a_trace_that_the_rules_do_not_follow_is_not_replayed():
    a = Allocator(limit=100 * MIB)
    blocks = [a.malloc(20 * MIB, TRAIN) for _ in range(3)]
    assert blocks[-1] is not None
    a.malloc(80 * MIB, TRAIN)
    snap = a.snapshot()
    snap["device_traces"][0][3]["addr"] += 512  # an address that no rule gives
    row = oom(mp.load(snap), replay=True).row(-1, named=True)
    assert row["setting"] is None
    assert "not replayed" in row["help"]


def test_a_fitting_block_that_came_back_too_late_is_told():
    """The flush completes the free, torch does not search again; the same request again is served."""
    device = waited()
    row = explained(device)
    assert row["largest_free_bytes"] >= row["requested_bytes"]
    assert "same request again would likely be served" in row["help"]
    assert device.malloc(50 * MIB)


def test_the_line_that_holds_least_of_those_that_would_make_room_is_named():
    """8 parts of 64 MiB; every other one is kept, by two lines. 64 + 64 + 64 MiB need one of the smaller line's blocks."""
    a = Allocator(limit=522 * MIB)
    a.free(a.malloc(512 * MIB, TRAIN))
    blocks = [a.malloc(64 * MIB, KEEP if i == 3 else TRAIN) for i in range(8)]
    for block in blocks[::2]:
        a.free(block)
    assert a.malloc(192 * MIB, TRAIN) is None
    row = oom(mp.load(a.snapshot())).row(-1, named=True)
    assert (row["free_site"], row["free_site_bytes"]) == ("cache.py:9", 64 * MIB)
    assert "Freeing what cache.py:9 holds (64 MiB in 1 block) would have made room." in row["help"]


def test_no_line_alone_is_named_where_none_is_enough():
    a = Allocator(limit=100 * MIB)
    for i in range(5):
        a.malloc(20 * MIB, frames(f"train.py:{i} step"))
    assert a.malloc(90 * MIB, TRAIN) is None
    assert oom(mp.load(a.snapshot()))["free_site"].to_list() == [None]


def test_the_pools_of_four_graphs_hold_960_mib_of_which_half_is_allocated():
    lists = fragmentation(loaded(graphs())).filter(private=True)
    assert lists["pool_id"].n_unique() == 4
    assert (lists["reserved_bytes"].sum(), lists["allocated_bytes"].sum()) == (1006632960, 503316480)
    assert lists["stranded_bytes"].sum() == 503316480
    assert fragmentation(loaded(graphs())).filter(private=False)["stranded_bytes"].sum() == 0
