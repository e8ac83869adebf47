"""A device call by call: errors, pools, streams, settings, and the edges of the numbers."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest

import nbmemprof as mp
from nbmemprof.allocator import Device
from nbmemprof.errors import NbmemprofError, OutOfMemoryError

pytestmark = pytest.mark.cost(0.03)  # a few calls each

MIB, GIB = 1 << 20, 1 << 30


def reserved(device: Device) -> float:
    return device.stats()["reserved_bytes.all.current"] / MIB


# ---------------------------------------------------------------------------------------------- refusals
def test_an_error_tells_what_was_asked_and_what_there_was():
    device = Device(capacity_bytes="8GiB", limit_bytes="4GiB")
    device.malloc("3GiB")
    with pytest.raises(OutOfMemoryError, match=r"Tried to allocate 2\.00 GiB.*total capacity of 8\.00 GiB of which 5\.00 GiB is free.*4\.00 GiB allowed.*3\.00 GiB is allocated"):
        device.malloc("2GiB")
    assert device.stats()["num_ooms"] == 1


def test_code_that_catches_torchs_error_catches_this_one():
    torch = pytest.importorskip("torch")
    with pytest.raises(torch.OutOfMemoryError):
        Device(capacity_bytes="1GiB").malloc("2GiB")
    with pytest.raises(OutOfMemoryError):
        Device(capacity_bytes="1GiB").malloc("2GiB")


@pytest.mark.cost(0.6)
def test_a_device_needs_no_torch():
    code = """
import sys
import nbmemprof as mp
device = mp.allocator.Device(capacity_bytes="1GiB")
try:
    device.malloc("2GiB")
except mp.OutOfMemoryError as error:
    print(type(error).__mro__[1].__name__, "torch" in sys.modules, "numba" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == ["NbmemprofError", "False", "False"]


def test_the_drivers_refusal_is_by_what_is_asked_of_it():
    device = Device(capacity_bytes=100 * MIB)
    device.free(device.malloc(60 * MIB))
    assert device.malloc(70 * MIB) > 0  # after a flush
    assert (reserved(device), device.stats()["num_alloc_retries"]) == (70, 1)


def test_maps_that_were_made_for_a_refused_request_stay():
    device = Device("expandable_segments:True", capacity_bytes=100 * MIB)
    a, b, c = (device.malloc(20 * MIB) for _ in range(3))
    device.free(b)
    device.empty_cache()  # a hole of a page between a and c
    device.malloc(20 * MIB)
    device.free(a)
    with pytest.raises(OutOfMemoryError):
        device.malloc(90 * MIB)
    assert reserved(device) % 20 == 0
    assert c


def test_nothing_costs_nothing_and_too_much_is_refused_at_once():
    device = Device()
    assert device.malloc(0) == 0
    device.free(0)
    with pytest.raises(OutOfMemoryError):
        device.malloc(1 << 60)
    assert device.stats()["num_ooms"] == 0
    assert device.snapshot()["device_traces"] == [[]]
    with pytest.raises(NbmemprofError, match="zero or more"):
        device.malloc(-1)


def test_a_second_free_is_named():
    device = Device()
    addr = device.malloc(10)
    device.free(addr)
    with pytest.raises(NbmemprofError, match="freed before"):
        device.free(addr)


def test_a_rejection_before_the_driver_skips_the_chain():
    device = Device("throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5", torch="2.13", capacity_bytes=200 * MIB)
    device.free(device.malloc(60 * MIB))
    with pytest.raises(OutOfMemoryError):
        device.malloc(80 * MIB)
    stats = device.stats()
    assert (stats["num_oom_rejections"], stats["num_ooms"], stats["num_alloc_retries"], reserved(device)) == (1, 0, 0, 60)


# ---------------------------------------------------------------------------------------------- streams
def test_a_streams_own_use_is_ignored():
    device = Device()
    addr = device.malloc(30 * MIB, stream=3)
    device.record_stream(addr, 3)
    device.free(addr)
    assert device.stats()["active_bytes.all.current"] == 0


def test_a_block_waits_for_each_of_its_streams_and_queues_go_in_order():
    device = Device()
    first, second = device.malloc(30 * MIB), device.malloc(40 * MIB)
    device.busy(1)
    device.busy(2)
    device.record_stream(first, 1)
    device.record_stream(first, 2)
    device.record_stream(second, 2)
    device.free(first)
    device.free(second)
    device.synchronize(1)
    device.malloc(1)
    assert device.stats()["active_bytes.all.current"] == 70 * MIB + 512
    device.synchronize(2)
    device.malloc(1)
    assert device.stats()["active_bytes.all.current"] == 2 * 512


def test_a_flush_waits_for_every_stream():
    device = Device()
    addr = device.malloc(30 * MIB)
    device.busy(1)
    device.record_stream(addr, 1)
    device.free(addr)
    device.empty_cache()
    assert reserved(device) == 0
    device.malloc(1)  # the queue knows that nothing waits any more


# ---------------------------------------------------------------------------------------------- pools
def test_a_pool_that_may_help_out_does_so_before_the_flush():
    device = Device(limit_bytes=100 * MIB)
    pool = device.mem_pool(use_on_oom=True)
    addr = device.malloc(60 * MIB, pool=pool)
    device.free(addr)
    kept = device.malloc(30 * MIB)
    device.free(kept)
    assert device.malloc(50 * MIB) == addr
    assert (device.stats()["num_alloc_retries"], reserved(device)) == (0, 90)
    old = Device(limit_bytes=100 * MIB, torch="2.7")
    addr = old.malloc(60 * MIB, pool=old.mem_pool(use_on_oom=True))
    old.free(addr)
    with pytest.raises(OutOfMemoryError):
        old.malloc(50 * MIB)


def test_a_pool_without_splits_hands_out_whole_blocks():
    device = Device()
    pool = device.mem_pool(no_split=True)
    device.free(device.malloc(40 * MIB, pool=pool))
    device.malloc(3 * MIB, pool=pool)
    assert device.stats()["allocated_bytes.all.current"] == 40 * MIB


def test_a_pool_with_its_own_allocator_is_never_expandable():
    device = Device("expandable_segments:True")
    device.malloc(3 * MIB, pool=device.mem_pool(custom=True))
    assert device.stats()["segment.all.current"] == 1


@pytest.mark.parametrize(("torch", "works"), [("2.11", False), ("2.13", True)])
def test_inside_use_mem_pool_up_to_211_there_is_no_flush(torch, works):
    device = Device(limit_bytes=100 * MIB, torch=torch)
    device.free(device.malloc(60 * MIB))
    with device.use_pool(device.mem_pool()):
        if works:
            device.malloc(80 * MIB)
        else:
            with pytest.raises(OutOfMemoryError):
                device.malloc(80 * MIB)
    assert device.stats()["num_alloc_retries"] == works


def test_a_graphs_memory_returns_at_the_flush_after_its_last_user_went():
    device = Device()
    with device.capture() as pool:
        addr = device.malloc(30 * MIB)
        device.empty_cache()  # leaves the pools alone
        device.free(addr)
    assert pool == (1, 0)
    device.empty_cache()
    assert reserved(device) == 30
    device.drop_pool(pool)
    assert reserved(device) == 30
    device.empty_cache()
    assert reserved(device) == 0


def test_frees_of_blocks_that_other_streams_used_wait_for_the_end_of_a_capture():
    device = Device()
    with device.capture():
        addr = device.malloc(30 * MIB)
        device.record_stream(addr, 5)
        device.free(addr)
        device.malloc(30 * MIB)
        assert device.stats()["active_bytes.all.current"] == 60 * MIB
    device.malloc(1)
    assert device.stats()["active_bytes.all.current"] == 30 * MIB + 512


def test_a_captured_chain_keeps_its_high_water_mark():
    """A 16 MiB input and a chain of three 16 MiB temporaries, one kept: two segments, or two pages of 20 MiB."""
    for conf, size in (("", 32), ("expandable_segments:True", 40)):
        device = Device(conf)
        device.malloc(16 * MIB)
        before = reserved(device)
        with device.capture():
            a = device.malloc(16 * MIB)
            b = device.malloc(16 * MIB)
            device.free(a)
            device.malloc(16 * MIB)
            device.free(b)
        assert reserved(device) - before == size


def test_an_unknown_pool_is_named():
    with pytest.raises(NbmemprofError, match=r"There is no pool \(0, 9\)"):
        Device().malloc(1, pool=(0, 9))


# ---------------------------------------------------------------------------------------------- settings
def test_a_fraction_is_a_limit_of_a_known_card():
    device = Device("per_process_memory_fraction:0.5", capacity_bytes=100 * MIB)
    assert device.limit_bytes == 50 * MIB
    assert Device("per_process_memory_fraction:1.0", capacity_bytes=100 * MIB).limit_bytes is None


def test_expandable_blocks_are_left_alone_once_the_option_is_off():
    device = Device("expandable_segments:True")
    device.free(device.malloc(30 * MIB))
    device.set_conf("expandable_segments:False")
    device.malloc(30 * MIB)
    assert reserved(device) == 40 + 30
    assert device.conf == "expandable_segments:False"


def test_a_limit_can_come_and_go():
    device = Device()
    device.malloc(60 * MIB)
    device.set_limit("64MiB")
    with pytest.raises(OutOfMemoryError):
        device.malloc(60 * MIB)
    device.set_limit(None)
    device.malloc(60 * MIB)


def test_segments_of_another_size():
    device = Device("large_segment_size_mb:40")
    device.malloc(2 * MIB)
    assert reserved(device) == 40


def test_peaks_can_be_reset():
    device = Device()
    device.free(device.malloc(30 * MIB))
    device.reset_peak_stats()
    stats = device.stats()
    assert (stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]) == (0, 30 * MIB)
    assert stats["allocation.all.allocated"] == 1


def test_stats_have_torchs_122_keys():
    keys = Device().stats()
    assert len(keys) == 122
    assert keys["max_split_size"] == -1
    assert {"num_alloc_retries", "oversize_segments.peak", "inactive_split_bytes.large_pool.freed"} <= set(keys)


# ---------------------------------------------------------------------------------------------- addresses and pictures
@pytest.mark.parametrize("addresses", ["ascending", "descending", "windows", 3])
def test_segments_never_overlap_whatever_the_order(addresses):
    device = Device(addresses=addresses)
    for n in (1, 3, 12, 40, 100, 7, 33):
        device.malloc(n * MIB)
    places = sorted((s["address"], s["total_size"]) for s in device.snapshot()["segments"])
    assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(places))


def test_a_snapshot_loads_and_says_the_same():
    device = Device("expandable_segments:True", device=1)
    kept = [device.malloc(n * MIB, stream=n % 2) for n in (1, 5, 30, 70)]
    device.free(kept[2])
    device.empty_cache()
    capture = mp.load(device.snapshot())
    row = mp.summary(capture).row(0, named=True)
    stats = device.stats()
    assert row["device"] == 1
    assert row["peak_allocated_bytes"] == stats["allocated_bytes.all.peak"]
    assert row["peak_reserved_bytes"] == stats["reserved_bytes.all.peak"]
    assert row["end_allocated_bytes"] == stats["allocated_bytes.all.current"]
    assert row["end_reserved_bytes"] == stats["reserved_bytes.all.current"]
    assert capture.meta["warnings"] == [w for w in capture.meta["warnings"] if w.startswith("no frames")]


def test_without_history_there_is_no_trace():
    device = Device(history=False)
    device.malloc(1)
    assert device.snapshot()["device_traces"] == [[]]
    assert len(device.snapshot()["segments"]) == 1
