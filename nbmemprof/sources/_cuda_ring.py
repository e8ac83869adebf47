"""Follow torch's bounded trace while a cell runs: take what is new before the ring writes over it, or know that nothing is lost by it."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from nbmemprof.sources._cuda_trace import Reading, Stacks, events_frame, heap_frames, tail_of, unseen_from
from nbmemprof.sources._cuda_windows import FINAL_ID, Window, reduce_window

__all__ = ["Ring", "Track"]

_FULL = 0.7  # of the ring may be new before it is taken
_LUXURY = 0.03  # of the time may go into taking events of which no peak depends
_CLEAR_FROM = 50_000  # entries in the ring from which a cut empties it, so that the next one is quick
_MAX_SAMPLES = 20_000
_MOST_REFUSALS = 1000


@dataclass
class Track:
    """Where one device stands; positions count the trace's entries from the beginning of the recording."""

    start: Reading
    now: Reading
    base: int  # counter at position 0
    taken: int = 0  # entries up to here were looked at
    tail: list[tuple[Any, ...]] = field(default_factory=list)
    polled: int = 0  # position at the last poll
    needed: int | None = None  # from here on the entries must be seen: a new peak lies there
    calls_taken: int = 0
    bars: list[int] = field(default_factory=list)  # heights above which torch's peak counters are this recording's
    tops: list[int] = field(default_factory=list)  # highest counters before a reset
    armed: list[bool] = field(default_factory=list)  # whether the recording's peak is what the counter says
    reset: bool = False
    missed: int = 0
    refusals: list[Reading] = field(default_factory=list)  # the first reading after each request that was refused
    recounted: int = -1  # position at which the counters began anew

    @classmethod
    def begin(cls, reading: Reading) -> Track:
        """At the start of a recording. The counter's peak is ours if nothing was ever higher than now."""
        now = (reading.allocated, reading.requested, reading.reserved)
        peaks = _peaks(reading)
        return cls(reading, reading, reading.events, calls_taken=reading.calls, bars=list(peaks), tops=list(peaks), armed=[p == n for p, n in zip(peaks, now, strict=True)])

    @property
    def position(self) -> int:
        """Entries written since the recording began."""
        return self.now.events - self.base

    def read(self, reading: Reading) -> bool:
        """Take a reading in; tells whether a higher peak than any known has come since the last."""
        if reading.ooms > self.now.ooms and len(self.refusals) < _MOST_REFUSALS:
            self.refusals.append(reading)
        self.now = reading
        peaks = _peaks(reading)
        self.armed = [a or p > bar for a, p, bar in zip(self.armed, peaks, self.bars, strict=True)]
        rising = any(a and p > top for a, p, top in zip(self.armed, peaks, self.tops, strict=True))
        self.tops = [max(p, top) for p, top in zip(peaks, self.tops, strict=True)]
        return rising

    @property
    def free_to_pass(self) -> bool:
        """Whether entries may be lost without losing a peak: each would show in a counter."""
        return self.armed[0] and self.armed[1] and (self.armed[2] or self.now.calls == self.calls_taken)

    def known_peaks(self) -> list[int | None]:
        """Peak of allocated, requested and reserved bytes by torch's own counters; None where an older peak hides it."""
        return [top if armed else None for top, armed in zip(self.tops, self.armed, strict=True)]


def _peaks(reading: Reading) -> tuple[int, int, int]:
    return reading.peak_allocated, reading.peak_requested, reading.peak_reserved


class Ring:
    """The trace of all devices, followed from ``begin`` on. ``lock`` guards everything."""

    def __init__(self, cuda: Any, max_entries: int, keep_events: int, *, own: bool, rearm: Callable[[], None] | None = None, clock: Callable[[], float] = time.time) -> None:
        self.cuda, self.max_entries, self.keep_events, self.own, self.rearm, self.clock = cuda, max_entries, keep_events, own, rearm, clock
        self.lock = threading.RLock()
        self.stacks = Stacks()
        self.windows: list[Window] = []
        self.thinned: list[Window] = []
        self.tracks: dict[int, Track] = {}
        self.polls: list[tuple[float, int, int, int, int]] = []
        self.passed = 0  # entries let go because no peak can hide in them
        self.lost = 0  # entries written over before they could be taken
        self.seconds = 0.0  # spent taking and thinning, while the cell ran
        self.drains = 0
        self.seq = 0
        self.began = clock()
        self.trouble: list[str] = []
        self._fresh = own  # the trace holds nothing but what is new
        self._last_take = 0.0
        self._worker: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    def begin(self) -> None:
        """Note where the counters stand."""
        self.devices = self.cuda.devices()
        self.tracks = {d: Track.begin(Reading.of(self.cuda.stats(d))) for d in self.devices}

    def read(self) -> dict[int, int]:
        """Read the counters; position of each device."""
        with self.lock:
            for device, track in self.tracks.items():
                track.read(Reading.of(self.cuda.stats(device)))
            return {d: t.position for d, t in self.tracks.items()}

    # ------------------------------------------------------------------ while the cell runs
    def poll(self) -> None:
        """Look at the counters; take the new entries if they have to be taken."""
        with self.lock:
            now, wanted = self.clock(), False
            for device, track in self.tracks.items():
                rising = track.read(Reading.of(self.cuda.stats(device)))
                position, before = track.position, track.polled
                track.polled = position
                if position == before and not rising:
                    continue
                reading = track.now
                self._sample((now, device, reading.allocated, reading.requested, reading.reserved))
                if track.needed is None and (rising or not track.free_to_pass):
                    track.needed = max(before, track.taken)
                full = _FULL * self.max_entries
                if position - track.taken >= full:
                    late = position - track.taken >= self.max_entries
                    wanted |= (track.needed is not None and position - track.needed >= full) or (not late and self._affordable(now))
            if wanted:
                began = time.perf_counter()
                self.take()
                self.drains += 1
                self._thin()
                self._last_take = time.perf_counter() - began
                self.seconds += self._last_take

    def watch_counters(self) -> None:
        """Keep a reading of each device where there is no history to follow."""
        with self.lock:
            for device, track in self.tracks.items():
                self._sample((self.clock(), device, track.now.allocated, track.now.requested, track.now.reserved))

    def _affordable(self, now: float) -> bool:
        expected = max(self._last_take, 3e-6 * self.max_entries)
        return self.seconds + expected <= _LUXURY * (now - self.began)

    def _sample(self, row: tuple[float, int, int, int, int]) -> None:
        self.polls.append(row)
        if len(self.polls) > _MAX_SAMPLES:
            del self.polls[1::2]

    # ------------------------------------------------------------------ taking
    def take(self, *, clear: bool = False) -> Window:
        """Everything new as a window, with the heap as it is now; it is appended to ``windows``."""
        with self.lock, _no_collection():
            stats, snapshot = self.cuda.snapshot(self.devices)
            traces = snapshot.get("device_traces") or []
            frames, exact = [], True
            for device, stat in zip(self.devices, stats, strict=True):
                trace = traces[device] if device < len(traces) else []
                frame, whole = self._new_of(device, Reading.of(stat), trace)
                frames.append(frame)
                exact &= whole
            events = self._numbered(pl.concat(frames) if frames else events_frame([], 0, self.stacks))
            segments, blocks = heap_frames(snapshot, self.stacks, FINAL_ID)
            window = Window(events, segments, blocks, snapshot.get("allocator_settings"), exact)
            self._fresh = False
            longest = max((len(t) for t in traces), default=0)
            del snapshot, traces
            if clear and self.own and self.rearm is not None and longest >= _CLEAR_FROM and self.cuda.can_clear():
                self._empty(self.rearm)
            return self._append(window)

    def _new_of(self, device: int, reading: Reading, trace: list[dict[str, Any]]) -> tuple[pl.DataFrame, bool]:
        track = self.tracks[device]
        rising = track.read(reading)
        if track.needed is None and (rising or not track.free_to_pass):
            track.needed = max(track.polled, track.taken)
        expected = track.position - track.taken
        seen: int | None = 0 if self._fresh else unseen_from(trace, track.tail, expected)
        if seen is None:
            seen = max(len(trace) - expected, 0)
            self.trouble.append(f"inconsistent: the new events of device {device} could not be told from the old ones for certain; torch's counters say {expected}")
        frame = events_frame(trace, device, self.stacks, seen)
        counted = int(frame["counted"].sum())
        gone = max(expected - counted, 0) if seen == 0 and (not self.own or len(trace) >= self.max_entries) else 0
        if gone and self.own and (track.needed is None or track.position - track.needed <= counted):
            self.passed += gone
        else:
            self.lost += gone
            track.missed += gone
        frame = frame.with_columns((pl.col("counted").cum_sum().cast(pl.Int64) + track.taken + gone).alias("index"))
        track.taken += gone + counted
        track.base = reading.events - track.taken  # what the trace says holds
        track.polled, track.needed, track.calls_taken = track.taken, None, reading.calls
        if frame.height:
            track.tail = tail_of(frame)
        return frame, gone == 0

    def _numbered(self, events: pl.DataFrame) -> pl.DataFrame:
        """Order the devices' entries by time, each device's own order kept, and number them."""
        if events["device"].n_unique() > 1:
            steady = pl.col("clock_us").cum_max().over("device")
            events = events.with_columns(steady.alias("_at")).sort("_at", maintain_order=True).drop("_at")
        numbered = events.with_columns(pl.int_range(self.seq, self.seq + events.height, dtype=pl.Int64).alias("seq"))
        self.seq += events.height
        return numbered

    def _empty(self, rearm: Callable[[], None]) -> None:
        """Empty the ring; what another thread wrote since the snapshot is counted as lost."""
        rearm()
        for device, track in self.tracks.items():
            reading = Reading.of(self.cuda.stats(device))
            slipped = reading.events - track.base - track.taken
            self.lost += slipped
            track.missed += slipped
            track.taken += slipped
            track.polled = track.taken
            track.tail = []
        self._fresh = True

    def _append(self, window: Window) -> Window:
        last = self.windows[-1] if self.windows else None
        if not window.exact:
            self._give_up(len(self.windows))
        elif last is not None and last.events.height + window.events.height <= self.max_entries // 2:
            window = Window(pl.concat([last.events, window.events]), window.segments, window.blocks, window.settings, last.exact)
            self.windows.pop()
        self.windows.append(window)
        return window

    # ------------------------------------------------------------------ thinning
    def _thin(self) -> None:
        count, height = 0, sum(w.events.height for w in self.windows)
        while height > self.keep_events and count < len(self.windows) - 1:
            height -= self.windows[count].events.height
            count += 1
        self._give_up(count)

    def _give_up(self, count: int) -> None:
        """Keep of the oldest ``count`` windows their peaks and a thin timeline, worked out on another thread."""
        self._worker = worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="nbmemprof-thin")  # no thread until there is work
        for window in self.windows[:count]:
            before = self.thinned[-1] if self.thinned else None
            self.thinned.append(window)
            self._jobs.append(worker.submit(self._reduce, window, before))
        del self.windows[:count]
        self._jobs = [job for job in self._jobs if not job.done()]
        if len(self._jobs) > 4:  # bounded memory: wait for the oldest
            self._jobs[0].result()

    def _reduce(self, window: Window, before: Window | None) -> None:
        try:
            reduce_window(window, before.blocks if before is not None and window.exact else None)
        except Exception as error:  # the cell goes on; its report says what is missing
            self.trouble.append(f"inconsistent: events between two drains could not be worked out ({type(error).__name__}: {error})")
        window.events = window.events.clear()
        window.segments = window.segments.clear()
        if before is not None:
            before.blocks = before.blocks.clear()

    def settle(self) -> None:
        """Wait until everything that was given up is worked out."""
        for job in self._jobs:
            job.result()
        self._jobs.clear()

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None

    def begin_anew(self, *, fresh: bool) -> None:
        """The history was switched on or off by somebody: what was there is gone, what comes now is new."""
        with self.lock:
            for device, track in self.tracks.items():
                track.read(Reading.of(self.cuda.stats(device)))
                slipped = max(track.position - track.taken, 0)
                self.lost += slipped
                track.taken = track.polled = track.taken + slipped
                track.tail, track.needed = [], None
            self._fresh = fresh

    # ------------------------------------------------------------------ what the user does to the counters
    def before_reset(self) -> None:
        """The user is about to reset counters: read them for the last time."""
        self.read()

    def after_peak_reset(self) -> None:
        """Peaks begin anew at what is allocated now; the highest so far is remembered."""
        with self.lock:
            for track in self.tracks.values():
                track.reset = True

    def after_count_reset(self) -> None:
        """Counts begin anew at 0; positions go on."""
        with self.lock:
            for device, track in self.tracks.items():
                position = track.position
                track.now = Reading.of(self.cuda.stats(device))
                track.base = track.now.events - position
                track.calls_taken = -1
                track.recounted, track.refusals = position, []


@contextmanager
def _no_collection() -> Iterator[None]:
    """Hundreds of thousands of short-lived dicts would start the collector again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
