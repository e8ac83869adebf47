"""Record what torch's CUDA allocator does, by its own history.

Our options when nobody records; when the user records already, his history is read and never touched.
Peak counters are never reset. While the cell runs a thread reads the counters every 50 ms and takes the
bounded history before it is written over (:mod:`nbmemprof.sources._cuda_ring`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from nbmemprof import heap, schema
from nbmemprof.capture import Capture
from nbmemprof.errors import NotRecording
from nbmemprof.flags import Flag
from nbmemprof.sources import _cuda_owned, _placing
from nbmemprof.sources._cuda_api import Cuda, unavailable
from nbmemprof.sources._cuda_ring import Ring, Track
from nbmemprof.sources._cuda_trace import COUNTS, Reading, Stacks, heap_frames
from nbmemprof.sources._cuda_windows import FINAL_ID, PEAK_ID, Peak, Window, best_of, event_table, no_totals, with_older_stacks, with_pools
from nbmemprof.sources._device_sampler import DeviceSampler
from nbmemprof.units import format_bytes, format_count

__all__ = ["FLAGS", "Mark", "TorchHistory", "picture", "source", "unavailable"]

FLAGS = [Flag("--experts", "read which expert of a mixture each router chose; waits for the device in each such layer", action="store_true", default=False)]

_POLL_SECONDS = 0.05
_FASTEST = 6e6  # entries a second, more than any thread can write: a short ring is looked at more often
# Bytes that an entry takes in the ring and, while it is read, as Python objects: 561 without, 1729 with a stack of 25 Python
# frames (H200, torch 2.11, tests/fixtures/h200/probe.json); C++ frames come on top.
_ENTRY_BYTES = {"none": 600, "python": 1800, "all": 3600}
_KEPT_BYTES = 64  # an event that is kept as columns
_BARE_EVENT_US = 0.4  # an entry without a stack (measured there too); one of three entries takes a stack
_STACKS_PER_EVENT = 1 / 3


def source() -> TorchHistory:
    """Return a fresh recorder."""
    return TorchHistory()


def picture() -> Capture:
    """Segments and blocks of torch's CUDA allocator now; needs no history.

    Raises
    ------
    NotRecording
        Where CUDA has not begun in this process, or the allocator has no picture to give.
    """
    reason = unavailable()
    cuda = Cuda() if reason is None else None
    if cuda is not None and not cuda.initialized():
        reason = "CUDA has not been used in this process"
    elif cuda is not None:
        reason = cuda.no_history()
    if cuda is None or reason is not None:
        raise NotRecording(f"There is no picture of CUDA memory: {reason}. Allocate something on the device first, or see mp.stats().")
    stacks, found = Stacks(), cuda.picture()
    segments, blocks = heap_frames(found, stacks, FINAL_ID)
    meta = _facts(cuda, {d: Reading.of(cuda.stats(d)) for d in cuda.devices()}, found.get("allocator_settings"))
    tables = {"segments": segments, "blocks": blocks, "stacks": stacks.frame(pl.concat([segments["stack_id"], blocks["stack_id"]]))}
    return heap.build(tables, **meta, warnings=["no events: a picture has only what is there now. Record with %%memprof or mp.record()."])


@dataclass
class Mark:
    """A position in the recording."""

    clock_us: float
    positions: dict[int, int] = field(default_factory=dict)
    readings: dict[int, Reading] = field(default_factory=dict)
    known: dict[int, bool] = field(default_factory=dict)  # whether a counter's peak can be told apart from here
    seconds: float = 0.0
    record: int = 0  # of the observer


class TorchHistory:
    """The source ``torch_history``; see :class:`nbmemprof.sources.Source`."""

    name = "torch_history"

    def __init__(self, cuda: Any = None, clock: Callable[[], float] = time.time) -> None:
        self._cuda, self._clock = cuda, clock
        self._ring: Ring | None = None
        self._made: Capture | None = None
        self._mode = "waiting"  # for CUDA to begin; then own, borrowed, or counters
        self._why = ""
        self._emptied: list[tuple[float, dict[int, int], float | None]] = []  # empty_cache: clock, positions before it, end
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stack_us: float | None = None
        self._notes: list[str] = []
        self._inside = threading.local()
        self._observer: Any = None
        self._sampler: DeviceSampler | None = None

    # ------------------------------------------------------------------ the protocol
    def start(self, *, stacks: str = "python", ring_bytes: int = 512 << 20, cell: int | None = None, experts: bool = False, **_: Any) -> None:
        """Begin recording, or wait for CUDA to begin: no context is made for a cell that uses none."""
        self._cuda, self._experts = self._cuda or Cuda(), experts
        self._stacks, self._cell = stacks, cell
        self._entries = max(ring_bytes // _ENTRY_BYTES.get(stacks, _ENTRY_BYTES["python"]), 1000)
        self._keep = min(max(ring_bytes // 4 // _KEPT_BYTES, 1000), 1_000_000)
        self._start = Mark(self._clock() * 1e6)
        outside = self._cuda.outside()
        if outside is not None:
            self._sampler = DeviceSampler(outside, self._cuda.stats, self._clock)
        if self._cuda.initialized():
            self._begin()
        else:
            if self._sampler is not None:
                self._sampler.before_cuda()
            self._cuda.on_init(self._begin_late)

    def mark(self) -> Mark:
        """The position now (well below a millisecond)."""
        mark = Mark(self._clock() * 1e6)
        if self._ring is not None:
            mark.positions = self._ring.read()
            mark.readings = {d: t.now for d, t in self._ring.tracks.items()}
            mark.seconds = self._ring.seconds
        if self._observer is not None:
            mark.record = self._observer.look()
        if self._sampler is not None:
            self._sampler.tick()
        return mark

    def cut(self, since: Mark) -> Capture:
        """What happened from a mark until now; recording goes on."""
        return self._capture(since)

    def stop(self) -> Capture:
        """Everything since the start; history, hooks and thread are as before. A second call gives the same."""
        if self._made is None:
            try:
                self._made = self._capture(self._start)
            finally:
                self._end()
        return self._made

    @property
    def event_us(self) -> float | None:
        """What an entry costs the CPU, with the call stack as it was timed here; None where that is not known."""
        if self._mode != "own" or (self._stacks != "none" and self._stack_us is None):
            return None
        return _BARE_EVENT_US + _STACKS_PER_EVENT * (self._stack_us or 0.0)

    # ------------------------------------------------------------------ begin and end
    def _begin_late(self) -> None:
        try:
            if not self._stop.is_set():
                self._begin()
        except Exception as error:  # called by torch while CUDA begins: must not stop it
            self._notes.append(f"recording was not possible: {error or type(error).__name__}")

    def _begin(self) -> None:
        cuda = self._cuda
        self._why = cuda.no_history() or ""
        self._mode = "counters" if self._why else "borrowed" if cuda.history_on() else "own"
        ring = Ring(cuda, self._entries, self._keep, own=self._mode == "own", rearm=self._rearm, clock=self._clock)
        ring.begin()
        if self._mode == "own":
            if self._stacks != "none":
                self._stack_us = cuda.stack_cost_us(self._stacks == "all")
            self._rearm(clear=False)
        self._ring = ring
        self._start.positions = dict.fromkeys(ring.tracks, 0)
        self._start.readings = {d: t.start for d, t in ring.tracks.items()}
        before, after = self._before_empty, self._after_empty
        cuda.watch(
            {
                "_cuda_emptyCache": before,
                "_accelerator_emptyCache": before,
                "_cuda_resetPeakMemoryStats": lambda *_: ring.before_reset(),
                "_accelerator_resetPeakStats": lambda *_: ring.before_reset(),
                "_cuda_resetAccumulatedMemoryStats": lambda *_: ring.before_reset(),
                "_accelerator_resetAccumulatedStats": lambda *_: ring.before_reset(),
                "_cuda_record_memory_history": self._before_user,
            },
            {
                "_cuda_emptyCache": after,
                "_accelerator_emptyCache": after,
                "_cuda_resetPeakMemoryStats": lambda *_: ring.after_peak_reset(),
                "_accelerator_resetPeakStats": lambda *_: ring.after_peak_reset(),
                "_cuda_resetAccumulatedMemoryStats": lambda *_: ring.after_count_reset(),
                "_accelerator_resetAccumulatedStats": lambda *_: ring.after_count_reset(),
                "_cuda_record_memory_history": self._after_user,
            },
        )
        self._observe()
        if self._sampler is not None:
            self._sampler.begin({d: cuda.device_facts(d)["uuid"] for d in ring.tracks})
            self._sampler.read(_in_use({d: t.now for d, t in ring.tracks.items()}), pinned=False)
        self._thread = threading.Thread(target=self._poll, name="nbmemprof-poll", daemon=True)
        self._thread.start()

    def _observe(self) -> None:
        """Watch phases, modules and owners too; notes are for a history of our own only."""
        if self._mode == "counters":
            return
        try:
            self._observer = self._cuda.observer(notes=self._mode == "own")
            if self._observer is not None:
                self._observer.ask_router = self._experts
                self._observer.open()
        except Exception as error:  # the recording goes on without it
            self._notes.append(f"unknown: what the memory is for could not be watched ({type(error).__name__}: {error})")
            if self._observer is not None:
                self._observer.close()
            self._observer = None

    def _rearm(self, *, clear: bool = True) -> None:
        self._inside.now = True
        try:
            self._cuda.record(self._stacks, self._entries, clear=clear)
        finally:
            self._inside.now = False

    def _end(self) -> None:
        self._stop.set()
        if self._observer is not None:
            self._observer.close()
        if self._thread is not None:
            self._thread.join()
        self._cuda.forget(self._begin_late)
        self._cuda.unwatch()
        if self._mode == "own":
            self._cuda.stop()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _poll(self) -> None:
        ring, pause = self._ring, min(_POLL_SECONDS, self._entries / _FASTEST)
        while ring is not None and not self._stop.wait(pause):
            if self._sampler is not None:
                self._sampler.tick(sparing=True)
            try:
                if self._mode == "counters":
                    ring.read()
                    ring.watch_counters()
                else:
                    ring.poll()
            except Exception as error:  # the cell goes on without it
                ring.trouble.append(f"inconsistent: the history could not be followed while the cell ran ({type(error).__name__}: {error})")
                return

    # ------------------------------------------------------------------ what the user's code does
    def _before_empty(self, *_: Any) -> None:
        if self._ring is not None:
            self._emptied.append((self._clock() * 1e6, self._ring.read(), None))

    def _after_empty(self, *_: Any) -> None:
        if self._ring is not None and self._emptied:
            self._emptied[-1] = (*self._emptied[-1][:2], self._clock() * 1e6)

    def _before_user(self, *_: Any) -> None:
        """The user switches the history on or off himself: take what there is before torch clears it."""
        if self._ring is not None and not getattr(self._inside, "now", False) and self._mode != "counters":
            self._ring.take()

    def _after_user(self, enabled: Any = None, *_: Any) -> None:
        ring = self._ring
        if ring is None or getattr(self._inside, "now", False) or self._mode == "counters":
            return
        with ring.lock:
            if enabled is None:  # his recording is over and so was ours: go on
                self._mode, ring.own = "own", True
                self._rearm(clear=False)
                ring.begin_anew(fresh=True)
            else:
                self._mode, ring.own = "borrowed", False
                if self._observer is not None:
                    self._observer.stop_notes()
                ring.begin_anew(fresh=False)
                self._notes.append(_borrowed("the cell switched torch's allocator history on itself"))

    # ------------------------------------------------------------------ the capture
    def _capture(self, since: Mark) -> Capture:
        ring, end_us = self._ring, self._clock() * 1e6
        if ring is None:
            note = "empty: CUDA was not used, so there is nothing of it to show"
            return Capture.build({}, source=self.name, origin="measured", torch=self._cuda.versions()["torch"], versions=self._cuda.versions(), warnings=[*self._notes, note])
        with ring.lock:
            for device, track in ring.tracks.items():  # a mark made before CUDA began stands at its beginning
                since.positions.setdefault(device, 0)
                since.readings.setdefault(device, track.start)
            if self._mode == "counters":
                return self._of_counters(ring, since, end_us)
            log = self._look(since, ring)
            window = ring.take(clear=True)
            if self._sampler is not None:
                self._sampler.read(_in_use({d: t.now for d, t in ring.tracks.items()}))
            ring.settle()
            return _Assembly(self, ring, since, end_us, window, log).capture()

    def _told(self, since: Mark) -> tuple[pl.DataFrame, dict[str, Any]]:
        """What the driver said, as ``samples`` and meta."""
        if self._sampler is None:
            return schema.empty("samples"), {}
        found: dict[str, Any] = {"libraries": self._sampler.facts(), "driver_trouble": self._sampler.trouble or None}
        return self._sampler.frame(since.clock_us), found

    def _look(self, since: Mark, ring: Ring) -> _placing.Log | None:
        """Note owners once more and take the log; others than the known are searched for where anything happened."""
        if self._observer is None:
            return None
        now = ring.read()
        self._observer.look(everywhere=any(position > since.positions[device] for device, position in now.items()))
        return _placing.Log.of(self._observer)

    def _of_counters(self, ring: Ring, since: Mark, end_us: float) -> Capture:
        ring.read()
        ring.watch_counters()
        samples = _poll_samples(ring, since.clock_us, end_us, ())
        peaks = {}
        for device, track in ring.tracks.items():
            known = track.known_peaks()
            seen = [r for r in ring.polls if r[1] == device and r[0] * 1e6 >= since.clock_us]
            highest = [max((r[i] for r in seen), default=None) for i in (2, 3, 4)]
            allocated, requested, reserved = (a if a is not None else b for a, b in zip(known, highest, strict=True))
            peaks[str(device)] = {
                "peak_allocated_bytes": allocated, "peak_requested_bytes": requested or None, "peak_reserved_bytes": reserved,  # cudaMallocAsync fills no requested
                "time_us": None, "seq": None, "snapshot_id": None,
            }  # fmt: skip
        if self._sampler is not None:
            self._sampler.read(_in_use({d: t.now for d, t in ring.tracks.items()}))
        told, more = self._told(since)
        samples = pl.concat([samples, told])
        note = f"no events: {self._why}; torch's counters were read every {_POLL_SECONDS * 1e3:.0f} ms instead"
        meta = more | _facts(self._cuda, {d: t.now for d, t in ring.tracks.items()}, None)
        return Capture.build({"samples": samples}, **meta, peaks=peaks, counters=_counters(ring, since), recording=None, warnings=[*self._notes, note])


class _Assembly:
    """One capture out of the windows that the ring holds."""

    def __init__(self, owner: TorchHistory, ring: Ring, since: Mark, end_us: float, last: Window, log: _placing.Log | None = None) -> None:
        self.owner, self.ring, self.since, self.end_us, self.last, self.log = owner, ring, since, end_us, last, log
        self.warnings = [*owner._notes, *dict.fromkeys(ring.trouble)]

    def capture(self) -> Capture:
        ring, since = self.ring, self.since
        events = pl.concat([w.events for w in ring.windows])
        first = pl.DataFrame({"device": list(since.positions), "_first": list(since.positions.values())}, schema={"device": pl.Int64, "_first": pl.Int64})
        if any(since.positions.values()):
            events = events.join(first, on="device", how="left", maintain_order="left").filter(pl.col("index") > pl.col("_first")).drop("_first")
        events = with_pools(events, self.last.segments)
        table = event_table(events, since.clock_us, self.owner._cell)
        tables = {"events": table, "segments": self.last.segments, "blocks": self.last.blocks}
        tables["marks"] = self._marks(events)
        tables |= self._seen(events, tables["marks"])
        written = sum(t.taken - since.positions[d] for d, t in ring.tracks.items())
        meta = _facts(self.owner._cuda, {d: t.now for d, t in ring.tracks.items()}, self.last.settings)
        samples, more = self.owner._told(since)
        meta |= {"counters": _counters(ring, since), "readings": _readings(ring, since), "recording": self._cost(written, meta["devices"]), "dropped": {}} | more
        tables["samples"] = samples
        thinned = written > events.filter(pl.col("counted")).height
        if thinned:
            self._say_what_is_missing(written, events.height, meta)
        if self.owner._mode == "borrowed" and not any("history" in n for n in self.owner._notes):
            self.warnings.append(_borrowed("torch's allocator history was on already"))
            if table.height and table["stack_id"].null_count() == table.height:
                self.warnings.append("no frames: that history is recorded without call stacks")
        made = heap.build(tables, **meta, warnings=self.warnings)
        _cuda_owned.remember(made)
        extra: dict[str, pl.DataFrame] = {}
        if thinned:
            if ring.thinned and ring.windows[0].exact:
                made.tables["allocations"] = with_older_stacks(made.tables["allocations"], ring.thinned[-1].blocks)
            extra = self._of_the_thinned(made)
            made.tables.update(extra)
        used = [made.tables[n][c] for n, c in (("events", "stack_id"), ("blocks", "stack_id"), ("segments", "stack_id"))]
        if "thinned" in extra:
            used.append(extra["thinned"]["stack_id"])
        made.tables["stacks"] = ring.stacks.frame(pl.concat(used))
        return made

    def _marks(self, events: pl.DataFrame) -> pl.DataFrame:
        ooms = events.filter(pl.col("action") == "oom")
        start = self.since.clock_us
        parts = [
            schema.fill("marks", {"device": ooms["device"], "time_us": ooms["clock_us"] - start, "seq": ooms["seq"], "kind": "oom", "name": "out of memory", "value": ooms["free"].cast(pl.Float64)}, ooms.height)
        ]
        for clock, before, end in self.owner._emptied:
            for device, position in before.items() if clock >= start else ():
                seen = events.filter((pl.col("device") == device) & (pl.col("index") <= position))
                columns = {"device": device, "time_us": clock - start, "end_us": end - start if end is not None else None, "kind": "empty_cache", "name": "torch.cuda.empty_cache()"}
                parts.append(schema.fill("marks", columns | {"seq": seen["seq"].max() if seen.height else None}, 1))
        return pl.concat(parts)

    def _seen(self, events: pl.DataFrame, marks: pl.DataFrame) -> dict[str, pl.DataFrame]:
        """Tables of what the observer saw."""
        if self.log is None:
            return {}
        told = events.filter(pl.col("action").cast(pl.String).is_in(["alloc", "free_requested"]))
        told = told.with_columns(pl.col("stack_id").is_in(self.ring.stacks.through("torch/utils/checkpoint.py")).alias("again"))
        placed = _placing.place(self.log, told, notes=self.owner._observer.noted)
        seen = _placing.contexts(self.log, placed)
        spans = _placing.marks(self.log, placed, seen, self.since.clock_us, self.end_us)
        found = {"contexts": seen, "owners": pl.concat([_placing.owners(self.log, placed, since=self.since.record), _cuda_owned.workspaces(self.last.blocks, events)]), "marks": pl.concat([marks, spans])}
        return found | _placing.tables(self.log, placed, self.since.record) | {"hints": _cuda_owned.buckets(events, self.ring.stacks)}

    # ------------------------------------------------------------------ thinned events
    def _say_what_is_missing(self, written: int, kept: int, meta: dict[str, Any]) -> None:
        ring = self.ring
        meta["dropped"] = {what: n for what, n in (("events", ring.lost), ("events_thinned", written - kept - ring.lost)) if n > 0}
        if not ring.own:
            self.warnings.append(f"history truncated: {format_count(kept)} of {format_count(written)} events are there; the user's recording keeps no more (its max_entries)")
            return
        self.warnings.append(
            f"history truncated: the last {format_count(kept)} of {format_count(written)} events are kept whole (max_entries {format_count(ring.max_entries)}, ring_bytes); "
            "of those before, the true peak with its blocks and a thin timeline"
        )
        if ring.lost:
            self.warnings.append(f"history truncated: {format_count(ring.lost)} events were written over before they could be read; a peak among them may be missing. Give a larger ring_bytes.")

    def _of_the_thinned(self, made: Capture) -> dict[str, pl.DataFrame]:
        ring, start = self.ring, self.since.clock_us
        older = [_from(w, start) for w in ring.thinned if _reaches(w, start)]
        best = best_of(older, {})
        self._compare_with_rest(made, best)
        peaks, pictures = {}, []
        for device, peak in best.items():
            track = ring.tracks[device]
            known = _since(track, self.since.readings[device])
            numbers = [max(own, counter) if counter is not None else own for own, counter in zip((peak.allocated, peak.requested, peak.reserved), known, strict=True)]
            if numbers[0] > peak.allocated:
                made.meta["warnings"].append(f"inconsistent: torch's counter says that device {device} reached {format_bytes(numbers[0])}, the events {format_bytes(peak.allocated)}; the blocks are those of the latter")
            peaks[str(device)] = {
                "peak_allocated_bytes": numbers[0], "peak_requested_bytes": numbers[1], "peak_reserved_bytes": numbers[2],
                "time_us": max(peak.clock_us - start, 0.0) if peak.clock_us is not None else None, "seq": peak.seq, "snapshot_id": PEAK_ID if peak.blocks is not None else None,
            }  # fmt: skip
            if peak.blocks is not None:
                pictures.append(_cuda_owned.named(peak.blocks, self.log, device, peak.clock_us))
        made.meta["peaks"] = peaks
        covered = [(w.samples["time_us"].min(), w.samples["time_us"].max()) for w in older if w.samples.height]
        kept_from = made.tables["events"]["time_us"].min() if made.tables["events"].height else self.end_us - start
        thin = [w.samples.with_columns(pl.col("time_us") - start) for w in older if w.samples.height]
        thin.append(_poll_samples(ring, start, start + float(kept_from), covered))  # type: ignore[arg-type]
        totals = pl.concat([no_totals(), *(w.totals for w in older)])
        return {
            "samples": pl.concat([*thin, made.tables["samples"]]).filter(pl.col("time_us") >= 0).sort("time_us", maintain_order=True),
            "blocks": pl.concat([*pictures, made.tables["blocks"]], how="diagonal"),
            "thinned": totals.group_by("device", "stack_id").agg(pl.col("count").sum(), pl.col("requested_bytes").sum()),
        }

    def _compare_with_rest(self, made: Capture, best: dict[int, Peak]) -> None:
        """Let the events that are kept whole take part: their peak has its place among them."""
        for curve in heap.curves(made):
            device, at = curve.key[1], curve.peak
            tops = [max(s, int(v.max(initial=0))) for v, s in zip((curve.live, curve.requested, curve.reserved), curve.start, strict=True)]
            when = float(curve.time_us[at]) + self.since.clock_us if at >= 0 else None
            own = Peak(tops[0], tops[1], tops[2], when, int(curve.seq[at]) if at >= 0 else None)
            old = best.get(device)
            if old is not None and old.allocated >= own.allocated:
                best[device] = Peak(old.allocated, max(old.requested, own.requested), max(old.reserved, own.reserved), old.clock_us, None, old.blocks)
                continue
            if at >= 0:
                own.blocks = heap.blocks_at(made, int(curve.seq[at])).filter((pl.col("device") == device) & (pl.col("state") == "active_allocated")).with_columns(pl.lit(PEAK_ID, pl.Int64).alias("snapshot_id"))
            old = old or own
            best[device] = Peak(own.allocated, max(old.requested, own.requested), max(old.reserved, own.reserved), own.clock_us, own.seq, own.blocks)

    def _cost(self, written: int, devices: dict[str, Any]) -> dict[str, Any]:
        """What recording cost at most: the work it made for the CPU, and no more than the time in which the device was idle."""
        owner, seconds = self.owner, (self.end_us - self.since.clock_us) / 1e6
        each = owner.event_us
        drains = (self.ring.seconds - self.since.seconds) * 1e6
        cost = written * each + drains if each is not None else None
        share = cost / (seconds * 1e6) if cost is not None and seconds > 0 else None
        told = [owner._cuda.busy_fraction(d["uuid"], self.since.clock_us) for d in devices.values()] if share is not None else []
        busy = min((b for b in told if b is not None), default=None)
        fraction = share if share is None or busy is None or None in told else min(share, 1 - busy)
        text = "the recording is the user's own; its cost is not known" if owner._mode == "borrowed" else ""
        if fraction is not None and share is not None:
            text = f"recording cost at most {fraction:.1%} of the time: {format_count(written)} events at {each:.1f} µs (a call stack was timed here)"
            text += f", {drains / 1e6:.1f} s to read the history in between" if drains else ""
            text += f"; that is {share:.1%} of the CPU's time, but the device was busy for {busy:.1%} of it" if fraction < share and busy is not None else ""
        return {
            "seconds": seconds, "events": written, "cost_us": cost, "cost_fraction": fraction, "at_most": True, "cost_text": text, "cpu_fraction": share, "busy_fraction": busy,
            "stacks": owner._stacks if owner._mode == "own" else None, "mode": owner._mode, "max_entries": self.ring.max_entries if self.ring.own else None, "drains": self.ring.drains,
        }  # fmt: skip


def _reaches(window: Window, start_us: float) -> bool:
    last = window.samples["time_us"].max()
    return last is not None and float(last) >= start_us  # type: ignore[arg-type]


def _from(window: Window, start_us: float) -> Window:
    """The window as seen from a start that may lie within it: a peak before the start does not count."""
    peaks = {}
    for device, peak in window.peaks.items():
        if peak.clock_us is None or peak.clock_us >= start_us:
            peaks[device] = peak
            continue
        later = window.samples.filter((pl.col("device") == device) & (pl.col("time_us") >= start_us))
        tops = [int(later.filter(pl.col("gauge") == g)["value"].max() or 0) for g in ("allocated_bytes", "requested_bytes", "reserved_bytes")]  # type: ignore[arg-type]
        peaks[device] = Peak(tops[0], tops[1], tops[2])
    return Window(window.events, window.segments, window.blocks, samples=window.samples, totals=window.totals, peaks=peaks)


def _poll_samples(ring: Ring, start_us: float, end_us: float, covered: Any) -> pl.DataFrame:
    """Readings of the counters for the time that no events cover."""
    rows = [
        (r[1], r[0] * 1e6 - start_us, gauge, float(r[i]))
        for r in ring.polls
        for gauge, i in (("allocated_bytes", 2), ("requested_bytes", 3), ("reserved_bytes", 4))
        if start_us <= r[0] * 1e6 <= end_us and not any(lo <= r[0] * 1e6 <= hi for lo, hi in covered)
    ]
    columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * 4
    names = {"device": pl.Int64, "time_us": pl.Float64, "gauge": pl.String, "value": pl.Float64}
    return schema.fill("samples", {"kind": "device", "source": "torch", "unit": "bytes"} | {n: pl.Series(n, columns[i], dtype=t) for i, (n, t) in enumerate(names.items())}, len(rows))


def _borrowed(how: str) -> str:
    return f"{how}: it is read, not changed, so stacks, number of entries and frees are as that recording has them"


def _counters(ring: Ring, since: Mark) -> dict[str, dict[str, int | None]]:
    found = {}
    for device, track in ring.tracks.items():
        begin, now = since.readings[device], track.now
        risen = _since(track, begin)
        found[str(device)] = {
            "peak_allocated_bytes": risen[0], "peak_reserved_bytes": risen[2],
            "start_allocated_bytes": begin.allocated, "start_reserved_bytes": begin.reserved,
            "end_allocated_bytes": now.allocated, "end_reserved_bytes": now.reserved,
        }  # fmt: skip
    return found


def _readings(ring: Ring, since: Mark) -> dict[str, list[dict[str, int]]]:
    """Torch's counts at the beginning, after each refused request and at the end: a verdict compares the trace with them. None of a device whose counters began anew meanwhile."""
    found = {}
    for device, track in ring.tracks.items():
        begin = since.readings[device]
        if track.recounted < since.positions[device] and begin.counts:
            rows = [begin, *(r for r in track.refusals if begin.events < r.events < track.now.events), track.now]
            found[str(device)] = [dict(zip(COUNTS, r.counts, strict=True)) for r in rows]
    return found


def _since(track: Track, begin: Reading) -> list[int | None]:
    """Peaks of allocated, requested and reserved bytes since a reading, by torch's counters; None where an older peak hides it."""
    if begin is track.start:
        return track.known_peaks()
    if track.reset:
        return [None, None, None]
    now, then = track.now, Track.begin(begin)
    then.read(now)
    return then.known_peaks()


def _in_use(readings: dict[int, Reading]) -> list[int]:
    """Devices that torch has used; the first where it has used none."""
    return [d for d, r in readings.items() if r.reserved or r.events] or list(readings)[:1]


def _facts(cuda: Any, readings: dict[int, Reading], settings: dict[str, Any] | None) -> dict[str, Any]:
    """What is known about devices, limits, configuration and versions."""
    facts = {d: cuda.device_facts(d) for d in readings}
    used = _in_use(readings)
    outside = {str(d): _outside(facts[d]["uuid"], readings[d].reserved, cuda) for d in used}
    main = used[0] if used else None

    def same(name: str) -> Any:
        values = {facts[d][name] for d in used}
        return values.pop() if len(values) == 1 else None

    versions = cuda.versions()
    return {
        "source": "torch_history",
        "origin": "measured",
        "device": facts[main]["name"] if main is not None else None,
        "capacity_bytes": same("capacity_bytes"),
        "limit_bytes": same("limit_bytes"),
        "devices": {str(d): facts[d] for d in used},
        "conf": (settings or {}).get("PYTORCH_CUDA_ALLOC_CONF") or cuda.conf(),
        "settings": settings,
        "torch": versions["torch"],
        "versions": versions,
        "outside_bytes": outside if any(v is not None for v in outside.values()) else None,
    }


def _outside(uuid: str | None, reserved: int, cuda: Any) -> int | None:
    held = cuda.process_bytes(uuid)
    return held - reserved if held is not None and held >= reserved else None
