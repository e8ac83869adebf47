"""What the allocator's rules prove is said at a first look, the rest of the advice is not."""

from __future__ import annotations

import pytest
from modelled import MIB, fenced, graphs, loaded, waited
from strategies import Allocator, frames

import nbmemprof as mp
from nbmemprof.allocator import Device
from nbmemprof.views.findings import findings

SITE = frames("train.py:5 step")


@pytest.mark.cost(0.6)
def test_a_leak_of_two_options_is_said_with_what_to_do():
    said = " ".join(findings(loaded(fenced())))
    assert "max_split_size_mb together with expandable_segments leaks" in said
    assert "Set one of the two options, not both" in said
    assert "leaks" not in " ".join(findings(loaded(fenced("expandable_segments:True"))))


def test_pools_of_graphs_and_late_frees_are_said():
    assert "4 private pools of CUDA graphs reserve 960 MiB" in " ".join(findings(loaded(graphs())))
    assert "asked again, it would be served" in " ".join(findings(loaded(waited())))


def test_a_survivor_is_said_only_where_it_holds_much():
    def survivor(size: int) -> str:
        device = Device()
        device.free(device.malloc(size))
        device.malloc(2 * MIB)
        return " ".join(findings(loaded(device)))

    assert "holds 198 MiB that empty_cache() can't give back" in survivor(200 * MIB)
    assert "holds" not in survivor(40 * MIB)


def timed(gap: int) -> str:
    a = Allocator()
    for size in (5, 5, 5, 30):
        a.malloc(size * MIB, SITE)
    snap = a.snapshot()
    for entry in snap["device_traces"][0][4:]:  # the second segment_alloc and what comes after
        entry["time_us"] += gap
    return " ".join(findings(mp.load(snap)))


def test_stalls_are_said_where_they_take_a_part_of_the_time_that_one_feels():
    assert "Allocator stalls took 100 % of this time: about 50 ms in 2 device calls" in timed(50_000)
    assert "stalls" not in timed(5_000)


def test_nothing_is_said_of_a_heap_in_order_and_two_devices_keep_their_own():
    a = Allocator()
    a.malloc(20 * MIB, SITE)
    assert not any("stalls" in s or "holds" in s for s in findings(mp.load(a.snapshot())))
    one = fenced().snapshot()
    b = Allocator(device=1)
    b.malloc(20 * MIB, SITE)
    other = b.snapshot()
    one["segments"] += other["segments"]
    one["device_traces"] = [one["device_traces"][0], other["device_traces"][1]]
    said = [s for s in findings(mp.load(one)) if "leaks" in s]
    assert len(said) == 1
    assert said[0].startswith("GPU 0: ")
