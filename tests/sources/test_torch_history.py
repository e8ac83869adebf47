"""The CUDA recording, against an allocator that knows the truth about itself."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import polars as pl
import pytest
from fake_cuda import FakeCuda
from strategies import MIB, frames

import nbmemprof as mp
from nbmemprof import heap
from nbmemprof.capture import Capture
from nbmemprof.sources import _placing, torch_history

SMALL_RING = 1000 * 1800  # the smallest: 1000 entries
LINES = [frames(f"train.py:{n} step", "train.py:99 main") for n in range(5)]


def begin(cuda: FakeCuda, **options: Any) -> torch_history.TorchHistory:
    source = torch_history.TorchHistory(cuda, clock=cuda.clock)
    source.start(**options)
    return source


def churn(cuda: FakeCuda, steps: int, seed: int = 0, most: int = 40, poll: Any = None) -> list[Any]:
    rng, held = random.Random(seed), []
    for step in range(steps):
        if held and (len(held) >= most or rng.random() < 0.5):
            cuda.free(held.pop(rng.randrange(len(held))))
        else:
            held.append(cuda.malloc(rng.choice([700, 5000, MIB, 3 * MIB, 12 * MIB]), stack=rng.choice(LINES)))
        if poll is not None and step % 50 == 0:
            poll()
    return held


def peak(capture: Capture) -> int:
    (curve,) = heap.curves(capture)
    return max(curve.start[0], int(curve.live.max(initial=0)))


def test_a_recording_has_every_event_and_torch_own_peaks() -> None:
    cuda = FakeCuda()
    source = begin(cuda, cell=7)
    churn(cuda, 300)
    capture = source.stop()
    assert capture.events.height == len(cuda.heap.trace)
    assert capture.events["action"].to_list() == [e["action"] for e in cuda.heap.trace]
    assert peak(capture) == cuda.heap.peak == capture.meta["counters"]["0"]["peak_allocated_bytes"]
    assert capture.meta["counters"]["0"]["peak_reserved_bytes"] == cuda.peaks["reserved_bytes"]
    assert capture.meta["warnings"] == []
    assert capture.meta["outside_bytes"] == {"0": 1000}
    assert capture.events["cell"].unique().to_list() == [7]
    assert capture.meta["recording"]["events"] == capture.events.height
    assert capture.meta["recording"]["cost_us"] == pytest.approx(capture.events.height * 1.4)


def test_a_busy_device_hides_what_recording_costs_the_cpu() -> None:
    cuda = FakeCuda()
    source = begin(cuda)
    churn(cuda, 300)
    cuda.busy = 0.99
    cost = source.stop().meta["recording"]
    assert cost["cost_fraction"] == pytest.approx(0.01)
    assert cost["cpu_fraction"] > 0.4  # an event each 3 µs
    assert "busy for 99.0%" in cost["cost_text"]


def test_stopping_twice_gives_the_same_and_switches_off_once() -> None:
    cuda = FakeCuda()
    source = begin(cuda)
    cuda.malloc(MIB)
    assert source.stop() is source.stop()
    assert cuda.calls == ["record", "stop"]
    assert cuda.hooks == ({}, {})


def test_what_was_there_before_is_known_by_size_but_not_by_event() -> None:
    cuda = FakeCuda()
    cuda.malloc(5 * MIB)
    cuda.free(cuda.malloc(50 * MIB))  # a peak of before, which hides the counter's
    source = begin(cuda)
    cuda.malloc(3 * MIB, stack=LINES[1])
    capture = source.stop()
    old = capture.allocations.filter("at_start")
    assert old["size_bytes"].to_list() == [5 * MIB]
    assert peak(capture) == 8 * MIB
    counters = capture.meta["counters"]["0"]
    assert counters["peak_allocated_bytes"] is None
    assert (counters["start_allocated_bytes"], counters["end_allocated_bytes"]) == (5 * MIB, 8 * MIB)


def test_a_cut_has_the_events_since_its_mark_and_no_other() -> None:
    cuda = FakeCuda()
    source = begin(cuda)
    churn(cuda, 100, seed=1)
    mark, before = source.mark(), len(cuda.heap.trace)
    churn(cuda, 60, seed=2)
    inner = source.cut(mark)
    assert inner.events["action"].to_list() == [e["action"] for e in cuda.heap.trace[before:]]
    assert inner.events["time_us"].min() >= 0
    churn(cuda, 10, seed=3)
    assert source.stop().events.height == len(cuda.heap.trace)


def test_the_users_own_recording_is_read_and_never_touched() -> None:
    cuda = FakeCuda()
    cuda.user_records("all")
    churn(cuda, 50, seed=1)
    before = len(cuda.heap.trace)
    source = begin(cuda)
    churn(cuda, 50, seed=2)
    capture = source.stop()
    assert cuda.calls == []
    assert cuda.recording is not None
    assert capture.events.height == len(cuda.heap.trace) - before
    assert any("not changed" in w for w in capture.meta["warnings"])
    assert capture.meta["recording"]["cost_fraction"] is None


def test_a_users_ring_that_is_too_short_is_told_with_both_numbers() -> None:
    cuda = FakeCuda()
    cuda.user_records("all", max_entries=100)
    source = begin(cuda)
    churn(cuda, 300)
    capture = source.stop()
    written = len(cuda.heap.trace)
    assert capture.events.height <= 100
    assert any(w.startswith("history truncated") and str(capture.events.height) in w for w in capture.meta["warnings"])
    assert capture.meta["dropped"]["events"] == written - capture.events.height
    assert capture.meta["peaks"]["0"]["peak_allocated_bytes"] == cuda.heap.peak  # from torch's own counter


@pytest.mark.parametrize("switch_off", [False, True])
def test_a_user_who_records_in_the_cell_loses_nothing_and_neither_do_we(switch_off: bool) -> None:
    cuda = FakeCuda()
    source = begin(cuda)
    churn(cuda, 50, seed=1)
    cuda.user_records("all")
    churn(cuda, 50, seed=2)
    if switch_off:
        cuda.user_records(None)
        churn(cuda, 50, seed=3)
    capture = source.stop()
    assert capture.events.height == len(cuda.heap.trace)
    assert ("stop" in cuda.calls) == switch_off  # his recording goes on if he left it on


def test_cuda_that_begins_in_the_cell_is_recorded_from_its_first_allocation() -> None:
    cuda = FakeCuda(initialized=False)
    source = begin(cuda)
    assert cuda.calls == []
    cuda.init()
    cuda.malloc(MIB)
    assert source.stop().events["action"].to_list() == ["segment_alloc", "alloc"]


def test_a_cell_without_cuda_makes_no_context_and_leaves_nothing_behind() -> None:
    cuda = FakeCuda(initialized=False)
    source = begin(cuda)
    mark = source.mark()
    assert source.cut(mark).events.is_empty()
    assert "empty" in source.stop().meta["warnings"][0]
    assert cuda.queue == []
    assert cuda.calls == []


def test_empty_cache_leaves_a_mark_before_the_segments_go() -> None:
    cuda = FakeCuda()
    source = begin(cuda)
    cuda.free(cuda.malloc(12 * MIB))
    cuda.empty_cache()
    capture = source.stop()
    (mark,) = capture.marks.filter(pl.col("kind") == "empty_cache").to_dicts()
    assert capture.events.filter(pl.col("seq") == mark["seq"] + 1)["action"].to_list() == ["segment_free"]


def test_an_oom_is_an_event_and_a_mark_with_what_was_free() -> None:
    cuda = FakeCuda(limit=20 * MIB)
    source = begin(cuda)
    cuda.malloc(12 * MIB)
    assert cuda.malloc(30 * MIB) is None
    capture = source.stop()
    (mark,) = capture.marks.filter(pl.col("kind") == "oom").to_dicts()
    assert mark["value"] == 8 * MIB
    assert capture.meta["limit_bytes"] == 20 * MIB


def test_counters_that_the_user_resets_are_still_followed() -> None:
    cuda = FakeCuda()
    source = begin(cuda)
    churn(cuda, 100, seed=1)
    cuda.reset_counts()
    cuda.reset_peaks()
    mark, before = source.mark(), len(cuda.heap.trace)
    churn(cuda, 50, seed=2, most=3)
    assert source.cut(mark).events.height == len(cuda.heap.trace) - before
    capture = source.stop()
    assert capture.meta["counters"]["0"]["peak_allocated_bytes"] == cuda.heap.peak


# ---------------------------------------------------------------------- longer than the ring
def pyramid(cuda: FakeCuda, poll: Any, noise: int) -> int:
    """Noise, one high peak, noise: returns the highest live bytes since the call."""
    cuda.heap.peak = cuda.heap.live
    for held in (churn(cuda, noise, seed=1, poll=poll), [cuda.malloc(40 * MIB, stack=LINES[4]) for _ in range(5)], churn(cuda, noise, seed=2, poll=poll)):
        for block in held:
            cuda.free(block)
        poll()
    return cuda.heap.peak


@pytest.mark.cost(0.6)
@pytest.mark.parametrize("older_peak", [False, True])
def test_a_long_cell_keeps_the_true_peak_and_what_it_was_made_of(older_peak: bool) -> None:
    """Without an older peak torch's counter vouches for what is passed over; with one every event is looked at."""
    cuda = FakeCuda()
    kept = cuda.malloc(2 * MIB, stack=LINES[0])
    if older_peak:
        cuda.free(cuda.malloc(900 * MIB))
    source = begin(cuda, ring_bytes=SMALL_RING)
    source._stop.set()  # polled by hand below
    source._keep = source._ring.keep_events = 1500
    truth = pyramid(cuda, source._ring.poll, 3000)
    capture = source.stop()
    written = len(cuda.heap.trace)
    found = capture.meta["peaks"]["0"]
    assert found["peak_allocated_bytes"] == truth
    blocks = capture.blocks.filter(pl.col("snapshot_id") == found["snapshot_id"])
    assert blocks["size_bytes"].sum() == truth
    assert kept.addr in blocks["addr"].to_list()
    top = blocks.sort("size_bytes", descending=True).row(0, named=True)
    assert capture.stacks.filter((pl.col("stack_id") == top["stack_id"]) & (pl.col("depth") == 0))["line"].to_list() == [4]
    assert capture.events.height < written
    assert capture.meta["dropped"] == {"events_thinned": capture.meta["recording"]["events"] - capture.events.height}
    assert any(w.startswith("history truncated") for w in capture.meta["warnings"])
    assert heap.last_picture(capture.blocks).filter(pl.col("state") == "active_allocated")["size_bytes"].sum() == 2 * MIB
    if older_peak:  # each window was thinned, so the timeline has the peak as well
        assert capture.samples.filter(pl.col("gauge") == "allocated_bytes")["value"].max() == truth


class _Found:
    """An observer that found one thing, before and after all that happened in between, and another before it only."""

    noted = False

    def __init__(self, stays: int, goes: int, clock_us: list[float]) -> None:
        owners = [(0, int(clock_us[0] * 1e3), 0, stays, "weights", "storage", "M.h", "weight"), (0, int(clock_us[0] * 1e3), 0, goes, "inputs", "storage", None, None)]
        owners.append((1, int(clock_us[1] * 1e3), 0, stays, "weights", "storage", "M.h", "weight"))
        zeros = np.zeros(2, np.int64)
        self.log = _placing.Log(0, np.array(clock_us), zeros, zeros, zeros - 1, zeros, zeros, zeros, [], [None], [None], owners)

    def look(self, **_: Any) -> int:
        return 0

    def open(self) -> None: ...
    def close(self) -> None: ...


def test_a_thinned_peak_tells_what_was_found_at_its_addresses_before_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(limit=1 << 36)
    kept, gone = cuda.malloc(2 * MIB, stack=LINES[0]), cuda.malloc(3 * MIB, stack=LINES[0])
    source = begin(cuda, ring_bytes=SMALL_RING)
    source._stop.set()
    source._keep = source._ring.keep_events = 1500
    truth = pyramid(cuda, source._ring.poll, 3000)
    cuda.free(gone)
    seen = _Found(kept.addr, gone.addr, [source._start.clock_us, cuda.clock() * 1e6])
    source._observer = seen
    monkeypatch.setattr(source, "_look", lambda since, ring: seen.log)
    found = mp.breakdown(source.stop())
    by = dict(zip(found["category"].cast(pl.String), found["size_bytes"], strict=True))
    assert by == {"weights": 2 * MIB, "unknown": truth - 2 * MIB}
    assert "storage" in found.filter(pl.col("category").cast(pl.String) == "weights")["evidence"].item()


@pytest.mark.cost(0.6)
def test_a_cell_that_fits_its_budget_is_kept_whole_though_the_ring_is_short() -> None:
    cuda = FakeCuda()
    cuda.free(cuda.malloc(900 * MIB))
    before = len(cuda.heap.trace)
    source = begin(cuda, ring_bytes=SMALL_RING)
    source._stop.set()
    source._ring.keep_events = 100_000
    churn(cuda, 3000, poll=source._ring.poll)
    capture = source.stop()
    assert [e["addr"] for e in cuda.heap.trace[before:]] == capture.events["addr"].to_list()
    assert "peaks" not in capture.meta
    assert capture.meta["recording"]["drains"] > 3


def test_a_ring_that_overflows_unseen_is_told() -> None:
    cuda = FakeCuda()
    cuda.free(cuda.malloc(900 * MIB))
    source = begin(cuda, ring_bytes=SMALL_RING)
    source._stop.set()
    churn(cuda, 2000)
    capture = source.stop()
    assert capture.meta["dropped"]["events"] > 0
    assert any("written over" in w for w in capture.meta["warnings"])


def test_threads_that_slip_in_between_counters_and_trace_shift_nothing() -> None:
    """The place in the trace is where the last entries match, not where the counters point."""
    from nbmemprof.sources._cuda_trace import unseen_from

    trace = [{"action": "alloc", "addr": n, "size": 512, "stream": 0} for n in range(100)]
    tail = [("alloc", n, 512, 0) for n in range(52, 60)]
    assert [unseen_from(trace, tail, expected) for expected in (40, 38, 45, 0)] == [60, 60, 60, 60]
    assert unseen_from(trace, [("oom", 0, 0, 0)] * 8, 40) is None


# ---------------------------------------------------------------------- other ways
@pytest.mark.parametrize("reason", ["the allocator's backend is cudaMallocAsync, which keeps no history"])
def test_an_allocator_without_history_is_sampled_by_its_counters(reason: str) -> None:
    cuda = FakeCuda(history=reason)
    source = begin(cuda)
    cuda.free(cuda.malloc(12 * MIB))
    capture = source.stop()
    assert cuda.calls == []
    assert capture.meta["peaks"]["0"]["peak_allocated_bytes"] == 12 * MIB
    assert capture.samples.height > 0
    assert any(w.startswith("no events") and "cudaMallocAsync" in w for w in capture.meta["warnings"])


def test_unavailable_says_why_without_importing_torch() -> None:
    assert isinstance(torch_history.unavailable(), str)  # no CUDA on the machine that runs this


def test_the_driver_tells_this_process_or_the_only_one() -> None:
    from nbmemprof.sources._nvml import _mine

    assert _mine([(1, 10), (2, 20)], 2) == 20
    assert _mine([(1, 10)], 2) == 10
    assert _mine([(1, 10), (3, 20)], 2) is None
    assert _mine([(2, (1 << 64) - 1)], 2) is None
    assert _mine([], 2) is None


def test_the_drivers_samples_count_from_the_first_that_began_after() -> None:
    from nbmemprof.sources._nvml import _mean

    samples = [(100, 0), (200, 0), (300, 90), (400, 100), (500, 80), (600, 90), (700, 90), (800, 90)]
    assert _mean(samples, 150) == pytest.approx(0.9)
    assert _mean(samples, 250) is None  # five are too few


def test_waiting_for_cuda_is_given_up_with_the_recording() -> None:
    """A method bound anew is equal to, but not the same as, the one that was put into torch's queue."""
    from types import SimpleNamespace

    from nbmemprof.sources._cuda_api import Cuda

    cuda, source = object.__new__(Cuda), torch_history.TorchHistory(FakeCuda())
    cuda._torch = SimpleNamespace(cuda=SimpleNamespace(_queued_calls=[(print, [])]))
    cuda.on_init(source._begin_late)
    cuda.forget(source._begin_late)
    assert cuda._torch.cuda._queued_calls == [(print, [])]


def test_a_frame_without_a_line_is_told_without_one() -> None:
    """Torch writes 2**64 - 1 for it: seen on a frame that an exception was leaving."""
    from nbmemprof.sources._cuda_trace import Stacks

    stacks = Stacks()
    (number,) = stacks.ids([[{"filename": "a.py", "name": "f", "line": 2**64 - 1}]])
    assert stacks.frame(pl.Series([number], dtype=pl.UInt32)).row(0, named=True)["line"] is None


def test_functions_that_are_watched_tell_and_are_put_back() -> None:
    from types import SimpleNamespace

    from nbmemprof.sources._cuda_api import Cuda

    def empty() -> str:
        return "emptied"

    heard: list[str] = []
    cuda = object.__new__(Cuda)
    cuda._torch, cuda._patched = SimpleNamespace(_C=SimpleNamespace(_cuda_emptyCache=empty)), []
    cuda.watch({"_cuda_emptyCache": lambda: heard.append("before"), "not there": print}, {"_cuda_emptyCache": lambda: heard.append("after")})
    assert cuda._torch._C._cuda_emptyCache() == "emptied"
    assert heard == ["before", "after"]
    cuda.unwatch()
    assert cuda._torch._C._cuda_emptyCache is empty


def test_the_lines_of_a_peak_that_was_thinned_are_told() -> None:
    import nbmemprof as mp

    cuda = FakeCuda()
    source = begin(cuda, ring_bytes=SMALL_RING)
    source._stop.set()
    source._ring.keep_events = 500
    pyramid(cuda, source._ring.poll, 1500)
    first = mp.sites(source.stop()).row(0, named=True)
    assert first["site"] == "train.py:4"
    assert first["size_bytes"] >= 200 * MIB
