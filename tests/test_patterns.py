"""The patterns against leaks: what stays is told by size and line, first-step memory is no leak, buffers come back."""

from __future__ import annotations

import gc
import threading
import warnings

import leaky
import polars as pl
import pytest
import torch

import nbmemprof as mp
from nbmemprof.errors import MemoryKept, NbmemprofError
from nbmemprof.patterns import MemoryKeptWarning
from nbmemprof.recording import _recorders

KIB = 1 << 10


@pytest.fixture(autouse=True)
def nothing_is_left_recording():
    yield
    assert not _recorders


# ---------------------------------------------------------------------- temporary
def test_temporary_is_silent_where_all_comes_back():
    with mp.temporary() as window:
        torch.empty(100 * KIB, dtype=torch.uint8)
    assert window.capture.allocations.filter(~pl.col("at_start")).height == 1


def test_temporary_tells_what_stayed_by_size_and_line():
    kept = []
    with pytest.raises(MemoryKept, match=r"300 KiB allocated in this block .*: 300 KiB in 2 blocks from .*test_patterns\.py:\d+"), mp.temporary():
        for _ in range(2):
            kept.append(torch.empty(150 * KIB, dtype=torch.uint8))
        torch.empty(64 * KIB, dtype=torch.uint8)


@pytest.mark.cost(0.5)
def test_temporary_can_allow_and_can_warn():
    kept = []
    with mp.temporary(tolerance_bytes=8 * KIB):
        kept.append(torch.empty(8 * KIB, dtype=torch.uint8))
    with pytest.warns(MemoryKeptWarning, match="9 KiB") as caught, mp.temporary(action="warn"):
        kept.append(torch.empty(9 * KIB, dtype=torch.uint8))
    assert caught[0].filename == __file__
    with pytest.raises(NbmemprofError, match="'raise' or 'warn'"), mp.temporary(action="shout"):
        pass


def test_temporary_leaves_the_blocks_own_error_alone():
    kept = []
    with pytest.raises(KeyError), mp.temporary():
        kept.append(torch.empty(8 * KIB, dtype=torch.uint8))
        raise KeyError("mine")


@pytest.mark.cost(0.5)
def test_temporary_collects_cycles_first():
    gc.disable()
    try:
        with mp.temporary():
            ring = [torch.empty(8 * KIB, dtype=torch.uint8)]
            ring.append(ring)
            del ring
        with pytest.raises(MemoryKept), mp.temporary(collect=False):
            ring = [torch.empty(8 * KIB, dtype=torch.uint8)]
            ring.append(ring)
            del ring
    finally:
        gc.enable()


# ---------------------------------------------------------------------- growth
@pytest.mark.cost(0.5)
def test_growth_fails_with_bytes_a_call_and_the_line():
    kept = []

    def leak():
        kept.append(torch.empty(70 * KIB, dtype=torch.uint8))

    with pytest.raises(AssertionError, match=r"Memory grew by 210 KiB, 70 KiB a call over 3 calls \(allowed: 0 B\)\. Allocated by: 210 KiB in 3 blocks from .*test_patterns\.py:\d+"):
        mp.assert_no_growth(leak, repeats=3, warmup=1)
    assert len(kept) == 4
    mp.assert_no_growth(leak, repeats=2, warmup=0, tolerance_bytes=140 * KIB)


@pytest.mark.cost(0.5)
def test_a_graph_without_python_objects_is_growth_too():
    total = torch.zeros(())
    weight = torch.ones(256, 256, requires_grad=True)

    def step():
        nonlocal total
        total = total + (torch.ones(128, 256) @ weight).relu().mean()

    with pytest.raises(MemoryKept, match="a call"):
        mp.assert_no_growth(step)


@pytest.mark.cost(0.5)
def test_first_step_memory_and_replaced_values_are_no_growth():
    net = torch.nn.Linear(64, 64)
    opt = torch.optim.Adam(net.parameters())
    last = {}

    def step():
        last["loss"] = net(torch.ones(32, 64)).square().mean()
        last["big"] = torch.empty(1 << 20, dtype=torch.uint8)
        opt.zero_grad(set_to_none=False)
        last["loss"].backward()
        opt.step()

    mp.assert_no_growth(step, repeats=3, warmup=2)


@pytest.mark.cost(0.5)
def test_it_decorates_a_test_and_wraps_a_block():
    kept, calls = [], []

    @mp.assert_no_growth(repeats=2, warmup=1)
    def steady(value, *, more):
        calls.append((value, more))

    @mp.assert_no_growth(repeats=2, warmup=1)
    def leaking():
        kept.append(torch.empty(5 * KIB, dtype=torch.uint8))

    steady(1, more=2)
    assert calls == [(1, 2)] * 3
    assert steady.__name__ == "steady"
    with pytest.raises(MemoryKept, match="10 KiB"):
        leaking()
    with pytest.raises(MemoryKept, match="grew by 6 KiB"), mp.assert_no_growth():
        kept.append(torch.empty(6 * KIB, dtype=torch.uint8))
    with pytest.raises(KeyError), mp.assert_no_growth():
        kept.append(torch.empty(6 * KIB, dtype=torch.uint8))
        raise KeyError("mine")


@pytest.mark.parametrize("given", [3, "step"])
def test_what_is_no_function_is_refused(given):
    with pytest.raises(NbmemprofError, match=rf"{given!r} can't be called. Use @mp.assert_no_growth\(repeats=3\)"):
        mp.assert_no_growth(given)


@pytest.mark.parametrize("options", [{"repeats": 0}, {"warmup": -1}, {"tolerance_bytes": -1}])
def test_numbers_that_make_no_sense_are_refused(options):
    with pytest.raises(NbmemprofError, match="Use repeats >= 1"):
        mp.assert_no_growth(**options)


def test_an_error_in_the_function_is_the_functions():
    def broken():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        mp.assert_no_growth(broken, warmup=0)
    with pytest.raises(KeyError):
        mp.assert_no_growth(broken)


@pytest.mark.cost(0.5)
def test_the_tracker_knows_growth_by_label_and_leaves_the_first_steps_out():
    kept, cache = [], {}
    with mp.LeakTracker() as tracker:
        for number in range(6):
            with tracker.batch("train"):
                cache.setdefault("state", torch.empty(90 * KIB, dtype=torch.uint8))
            with tracker.batch("eval"):
                kept.append(torch.empty(7 * KIB, dtype=torch.uint8))
                cache[number % 3] = torch.empty(80 * KIB, dtype=torch.uint8)
    growth = tracker.growth()
    assert growth.select("label", "steps", "bytes_per_step").rows() == [("eval", 4, 7 * KIB), ("train", 4, 0)]
    assert growth["total_bytes"].to_list() == [4 * 7 * KIB + 80 * KIB, 0]
    assert tracker.frame["change_bytes"].to_list()[:4] == [90 * KIB, 87 * KIB, 0, 87 * KIB]
    assert tracker.frame["above_bytes"][-1] == 6 * 7 * KIB + 90 * KIB + 3 * 80 * KIB
    assert "12 steps" in repr(tracker)


def test_the_tracker_counts_what_a_step_gave_back_and_survives_an_error():
    with mp.LeakTracker(warmup=0) as tracker:
        held = torch.empty(100 * KIB, dtype=torch.uint8)
        assert tracker.step() == 100 * KIB
        del held
        with pytest.raises(KeyError), tracker.batch():
            raise KeyError
        assert tracker.frame["above_bytes"].to_list() == [100 * KIB, 0]
        tracker.baseline()
        assert tracker.frame.is_empty()
    with pytest.raises(NbmemprofError, match="warmup is -1"):
        mp.LeakTracker(warmup=-1)


def test_state_of_the_first_step_is_told_from_a_leak():
    step = leaky.make_trainer()
    with mp.LeakTracker(warmup=1) as tracker:
        for _ in range(3):
            with tracker.batch():
                step(4)
    assert tracker.frame["change_bytes"].to_list() == [600 << 10, 0, 0]
    assert tracker.growth()["bytes_per_step"].to_list() == [0]


# ---------------------------------------------------------------------- buffers
def test_a_buffer_is_used_again_by_shape_and_dtype():
    pool = mp.BufferPool()
    first = pool.get((4, 8))
    address = first.data_ptr()
    pool.put(first)
    del first
    with pool.buffer((4, 8), torch.float32, "cpu") as again:
        assert again.data_ptr() == address
    assert (pool.get(4).shape, pool.get((4, 8), torch.int8).dtype) == ((4,), torch.int8)
    assert pool.stats() == {"hits": 1, "misses": 3, "dropped": 0, "waiting": 1, "waiting_bytes": 128, "in_use": 0, "in_use_bytes": 0}
    assert "1 of 4 requests" in repr(pool)


def test_a_loop_with_a_pool_does_not_allocate():
    pool = mp.BufferPool()

    def step():
        with pool.buffer(100 * KIB, torch.uint8) as x:
            x.zero_()

    step()
    with mp.record("torch_cpu") as rec:
        for _ in range(5):
            step()
    assert rec.capture.events.filter(rec.capture.events["action"] == "alloc")["size_bytes"].to_list() == []


def test_a_pool_keeps_no_more_than_its_limit_and_nothing_that_was_lost():
    pool = mp.BufferPool(limit_bytes=100)
    small, large = pool.get(20, torch.uint8), pool.get(200, torch.uint8)
    pool.put(small)
    pool.put(large)
    assert (pool.stats()["waiting_bytes"], pool.stats()["dropped"]) == (20, 1)
    lost = pool.get(20, torch.uint8)
    assert pool.stats()["in_use_bytes"] == 20
    del lost, small, large
    assert pool.stats()["in_use"] == 0
    pool.clear()
    assert pool.stats()["waiting"] == 0


def test_what_is_not_out_of_the_pool_can_not_be_put_back():
    pool = mp.BufferPool()
    x = pool.get(4)
    pool.put(x)
    for wrong in (x, torch.ones(4), pool.get(5)[:2]):
        with pytest.raises(NbmemprofError, match="not out of this pool"):
            pool.put(wrong)


def test_threads_share_a_pool_and_never_a_buffer():
    pool, seen, clashes = mp.BufferPool(), threading.local(), []

    def work(number):
        seen.number = number
        for _ in range(200):
            with pool.buffer(64, torch.int64) as x:
                x.fill_(number)
                if int(x.sum()) != 64 * number:
                    clashes.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clashes == []
    now = pool.stats()
    assert now["hits"] + now["misses"] == 800
    assert now["waiting"] == now["misses"] <= 4
    assert now["in_use"] == 0


def test_no_warning_is_left_over():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mp.temporary(action="warn"):
            pass
