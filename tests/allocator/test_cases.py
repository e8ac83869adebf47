"""The numbered cases of the specification: bytes that PyTorch 2.11 reserved and allocated on an H200, or that its rules imply."""

from __future__ import annotations

import pytest

from nbmemprof.allocator import Device
from nbmemprof.errors import OutOfMemoryError

pytestmark = pytest.mark.cost(0.03)  # a few calls each

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def numbers(device: Device) -> dict[str, int]:
    """R reserved, A allocated, Q requested, I inactive_split bytes."""
    stats = device.stats()
    keys = {"R": "reserved_bytes", "A": "allocated_bytes", "Q": "requested_bytes", "I": "inactive_split_bytes"}
    return {short: stats[f"{key}.all.current"] for short, key in keys.items()}


def mib(device: Device, letter: str = "R") -> float:
    return numbers(device)[letter] / MIB


def test_01_one_byte_costs_two_mib():
    device = Device()
    device.malloc(1)
    assert numbers(device) == {"R": 2_097_152, "A": 512, "Q": 1, "I": 2_096_640}
    assert device.stats()["segment.all.current"] == 1


def test_02_the_border_of_one_mib_is_inclusive():
    device = Device()
    device.malloc(MIB)
    assert device.stats()["allocated_bytes.small_pool.current"] == 1_048_576
    device.malloc(MIB + 1)
    assert device.stats()["allocated_bytes.large_pool.current"] == 1_049_088
    assert mib(device) == 2 + 20


def test_03_below_ten_mib_a_segment_has_twenty_from_ten_on_it_fits():
    device = Device()
    device.malloc(10 * MIB - 512)
    assert mib(device) == 20
    fresh = Device()
    fresh.malloc(10 * MIB - 511)
    assert mib(fresh) == 10
    device.malloc(10 * MIB - 511)  # the rest of the first segment: 512 bytes more than asked, not split off
    assert numbers(device)["A"] == 20_971_520


def test_04_a_slack_of_exactly_one_mib_is_not_split():
    device = Device()
    device.malloc(11 * MIB)
    assert (mib(device), mib(device, "A")) == (12, 12)
    device = Device()
    device.malloc(21 * MIB // 2)
    assert (mib(device), mib(device, "A"), mib(device, "I")) == (12, 10.5, 1.5)


def test_05_reuse_inflates_allocated():
    device = Device()
    device.free(device.malloc(20 * MIB))
    device.free(device.malloc(19 * MIB))
    assert device.stats()["allocated_bytes.all.peak"] == 20 * MIB
    device.malloc(int(18.9 * MIB))
    assert numbers(device)["A"] == 19_818_496
    assert numbers(device)["I"] == 20 * MIB - 19_818_496


def test_06_ties_go_to_the_lowest_address():
    a, b, c, d = places = (0x7F0036600000, 0x7F0037200000, 0x7F0034000000, 0x7F0034C00000)
    device = Device(addresses=places)
    assert [device.malloc(12 * MIB) for _ in places] == [a, b, c, d]
    device.free(c)
    device.free(a)
    assert [device.malloc(12 * MIB), device.malloc(12 * MIB)] == [c, a]


def test_07_touching_classic_segments_do_not_merge():
    device = Device()
    for addr in [device.malloc(20 * MIB), device.malloc(20 * MIB)]:
        device.free(addr)
    device.malloc(30 * MIB)
    assert mib(device) == 70
    for conf, reserved in (("", 256), ("expandable_segments:True", 140)):
        device = Device(conf)
        for addr in [device.malloc(16 * MIB) for _ in range(8)]:
            device.free(addr)
        for _ in range(4):
            device.malloc(32 * MIB)
        assert mib(device) == reserved


def test_08_streams_do_not_share():
    device = Device()
    device.free(device.malloc(20 * MIB, stream=0))
    device.malloc(20 * MIB, stream=1)
    assert mib(device) == 40


def test_09_the_small_pool_splits_down_to_512():
    device = Device()
    both = device.malloc(1024)
    device.free(both)
    assert device.malloc(512) == both
    assert device.malloc(512) == both + 512


@pytest.mark.parametrize(
    ("asked", "given"), [(1200, 1536), (2048, 2048), (2049, 2560), (5000, 5120), (MIB + 1, 5 * MIB // 4), (100 * MIB, 112 * MIB)]
)
def test_10_divisions_only_apply_above_512_d(asked, given):
    device = Device("roundup_power2_divisions:4")
    device.malloc(asked)
    device.malloc(asked)  # the second lies right behind the first where the segment has room
    first = device.snapshot()["segments"][0]["blocks"][0]
    assert first["size"] == given


@pytest.mark.parametrize(
    ("torch", "asked", "given"),
    [
        ("2.11", 300 * MIB + 1, 300 * MIB + 512),  # 1 means no rounding to powers of two
        ("2.11", 600 * MIB + 1, 768 * MIB),
        ("2.11", 1100 * MIB + 1, 1280 * MIB),
        ("2.8", 1100 * MIB + 1, 1152 * MIB),  # there ">" overwrites the last listed bucket
        ("2.11", 2100 * MIB + 1, 2304 * MIB),
    ],
)
def test_11_the_list_form_of_divisions(torch, asked, given):
    device = Device("max_split_size_mb:21,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", torch=torch)
    device.malloc(asked)
    assert device.stats()["reserved_bytes.all.current"] == -(-given // (2 * MIB)) * 2 * MIB
    assert Device("expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", torch=torch).malloc(asked) > 0
    split = Device("expandable_segments:True,roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", torch=torch)
    split.malloc(asked)
    assert numbers(split)["A"] == given


def test_12_oversize_blocks_are_fenced_off():
    def with_cached(size: int) -> Device:
        device = Device("max_split_size_mb:21")
        device.free(device.malloc(size * MIB))
        return device

    for small in (19, 20):
        device = with_cached(40)
        device.malloc(small * MIB)
        assert mib(device) == 60
    for large in (22, 21):
        device = with_cached(40)
        device.malloc(large * MIB)
        assert (mib(device), mib(device, "A")) == (40, 40)
    device = with_cached(60)
    device.malloc(41 * MIB)
    assert mib(device) == 60


def test_13_partial_release_frees_the_largest_first():
    device = Device("max_split_size_mb:40", limit_bytes=200 * MIB)
    for addr in [device.malloc(n * MIB) for n in (50, 60, 70)]:
        device.free(addr)
    device.malloc(110 * MIB)
    stats = device.stats()
    assert (mib(device), stats["num_alloc_retries"], stats["num_device_free"]) == (160, 0, 2)


def test_14_a_limit_failure_is_a_retry():
    device = Device(limit_bytes=100 * MIB)
    held = device.malloc(60 * MIB)
    device.free(device.malloc(30 * MIB))
    device.malloc(40 * MIB)
    assert (mib(device), device.stats()["num_alloc_retries"], device.stats()["num_ooms"]) == (100, 1, 0)
    with pytest.raises(OutOfMemoryError):
        device.malloc(50 * MIB)
    assert (device.stats()["num_alloc_retries"], device.stats()["num_ooms"]) == (2, 1)
    device.free(held)
    with pytest.raises(OutOfMemoryError):
        device.malloc(70 * MIB)
    assert mib(device) == 40  # the failed call has emptied the cache


def test_15_expandable_counts_in_pages():
    device = Device("expandable_segments:True")
    reserved = []
    for size in (1, 3 * MIB, 18 * MIB, 21 * MIB):
        device.malloc(size)
        reserved.append(mib(device))
    stats = device.stats()
    assert reserved == [2, 22, 42, 62]
    assert (stats["segment.all.current"], stats["inactive_split.all.current"], stats["num_device_alloc"]) == (0, 0, 4)


def test_16_only_whole_pages_return():
    device = Device("expandable_segments:True")
    a = device.malloc(30 * MIB)
    device.malloc(5 * MIB)
    assert mib(device) == 40
    device.free(a)
    device.empty_cache()
    assert mib(device) == 20
    assert device.malloc(25 * MIB) == a
    assert mib(device) == 40


def test_17_the_limit_is_tested_with_the_nominal_size():
    device = Device("expandable_segments:True", limit_bytes=30 * MIB)
    device.malloc(21 * MIB)
    assert mib(device) == 40  # above the limit
    device.malloc(15 * MIB)
    with pytest.raises(OutOfMemoryError, match=r"Tried to allocate 20\.00 MiB"):
        device.malloc(5 * MIB)


def test_18_and_so_it_can_flush_needlessly():
    device = Device("expandable_segments:True", limit_bytes=45 * MIB)
    device.free(device.malloc(3 * MIB))
    assert mib(device) == 20
    device.malloc(25 * MIB)
    assert (mib(device), device.stats()["num_alloc_retries"]) == (40, 1)


def test_19_garbage_collection_takes_what_was_unused_longest():
    device = Device("garbage_collection_threshold:0.5", limit_bytes=100 * MIB)
    a, b = device.malloc(20 * MIB), device.malloc(14 * MIB)
    device.malloc(24 * MIB)
    device.free(a)
    device.free(b)
    device.free(device.malloc(16 * MIB))  # takes a
    device.malloc(30 * MIB)
    assert mib(device) == 74
    assert a in {s["address"] for s in device.snapshot()["segments"]}
    assert b not in {s["address"] for s in device.snapshot()["segments"]}


def test_19_without_a_limit_there_is_no_garbage_collection():
    device = Device("garbage_collection_threshold:0.5", capacity_bytes=140 * GIB)
    for addr in [device.malloc(30 * MIB), device.malloc(20 * GIB)]:
        device.free(addr)
    device.malloc(40 * GIB)
    assert mib(device) == 61_470


def test_20_a_block_used_by_a_busy_stream_waits_and_comes_back_within_a_later_malloc():
    device = Device()
    device.busy(7)
    block = device.malloc(30 * MIB)
    device.record_stream(block, 7)
    device.free(block)
    stats = device.stats()
    assert (stats["allocated_bytes.all.current"], stats["active_bytes.all.current"], stats["requested_bytes.all.current"]) == (0, 30 * MIB, 30 * MIB)
    assert device.snapshot()["segments"][0]["blocks"][0]["state"] == "active_pending_free"
    device.synchronize()
    assert device.stats() == stats  # waiting alone changes nothing in the books
    device.malloc(1)
    assert [e["action"] for e in device.snapshot()["device_traces"][0]][-3:] == ["free_completed", "segment_alloc", "alloc"]


def test_21_a_spurious_out_of_memory_error_behind_record_stream():
    device = Device(limit_bytes=100 * MIB)
    device.free(device.malloc(100 * MIB))
    device.malloc(20 * MIB)
    waiting = device.malloc(80 * MIB)
    device.busy(7)
    device.record_stream(waiting, 7)
    device.free(waiting)
    with pytest.raises(OutOfMemoryError):
        device.malloc(50 * MIB)  # the flush completes the free, and does not search again
    assert device.malloc(50 * MIB) == waiting


def test_22_max_split_with_expandable_segments_leaks():
    def cycles(conf: str) -> Device:
        device = Device(conf)
        for _ in range(20):
            first, second = device.malloc(91 * MIB), device.malloc(91 * MIB // 2)
            device.malloc(2 * MIB)
            device.free(first)
            device.free(second)
        return device

    both = cycles("max_split_size_mb:128,expandable_segments:True")
    assert (mib(both), mib(both, "A")) == (2780, 40)
    assert 178 <= mib(cycles("expandable_segments:True")) <= 180
    assert 178 <= mib(cycles("max_split_size_mb:128")) <= 180


@pytest.mark.parametrize(("conf", "reserved"), [("", 426), ("expandable_segments:True", 220), ("roundup_power2_divisions:8", 272)])
def test_23_growing_batches(conf, reserved):
    device = Device(conf)
    for n in range(32, 36):
        for addr in [device.malloc(k * n * MIB // 4) for k in (3, 5, 7, 9)]:
            device.free(addr)
    assert mib(device) == reserved


def test_24_one_survivor_pins_a_segment():
    device = Device()
    blocks = [device.malloc(512) for _ in range(4097)]
    for addr in blocks[1:-1]:
        device.free(addr)
    device.empty_cache()
    assert numbers(device) == {"R": 4 * MIB, "A": 1024, "Q": 1024, "I": 4_193_280}


def test_25_private_pools_are_apart_and_return_when_they_go():
    device = Device()
    pool = device.mem_pool()
    with device.use_pool(pool):
        device.free(device.malloc(30 * MIB))
    device.malloc(30 * MIB)
    assert mib(device) == 60
    device.empty_cache()
    assert mib(device) == 60
    device.drop_pool(pool)
    assert mib(device) == 30


def test_26_a_trace_has_requested_sizes():
    device = Device()
    device.malloc(12345)
    snapshot = device.snapshot()
    assert snapshot["device_traces"][0][-1]["size"] == 12345
    assert snapshot["segments"][0]["blocks"][0]["size"] == 12800
