"""Torch's own counters, read while it recorded, against the events of the trace.

A refused request that gave nothing back leaves no event but its ``oom``; where that is lost the rules can't miss it, but torch has
counted it. ``meta["readings"]`` has, by device, torch's counters under the names of ``torch.cuda.memory_stats``: the first before the
first event, each of the others at some later place, in their order. The place of a reading is the first at which all of it agrees.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._attempt import ACTIONS, mismatch_at
from nbmemprof.allocator._model import Words
from nbmemprof.allocator._recording import Recording
from nbmemprof.units import format_count

__all__ = ["has_readings", "miscounted"]

# what an event adds to a counter (allocator rules 1.12)
_ADDS: dict[str, dict[int, int]] = {
    "allocation.all.allocated": {M.ALLOC: 1},
    "allocation.all.freed": {M.FREE_REQUESTED: 1},
    "allocation.all.current": {M.ALLOC: 1, M.FREE_REQUESTED: -1},
    "active.all.allocated": {M.ALLOC: 1},
    "active.all.freed": {M.FREE_COMPLETED: 1},
    "active.all.current": {M.ALLOC: 1, M.FREE_COMPLETED: -1},
    "num_device_alloc": {M.SEGMENT_ALLOC: 1, M.SEGMENT_MAP: 1},
    "num_device_free": {M.SEGMENT_FREE: 1, M.SEGMENT_UNMAP: 1},
    "num_ooms": {M.OOM: 1},
}
_BYTES = {"requested_bytes.all.current": {M.ALLOC: 1, M.FREE_COMPLETED: -1}, "reserved_bytes.all.current": _ADDS["num_device_alloc"] | {M.SEGMENT_FREE: -1, M.SEGMENT_UNMAP: -1}}  # times the event's bytes
_NAMES = {
    "num_ooms": (M.OOM,), "allocation.all.allocated": (M.ALLOC,), "allocation.all.freed": (M.FREE_REQUESTED,), "active.all.freed": (M.FREE_COMPLETED,),
    "num_device_alloc": (M.SEGMENT_ALLOC, M.SEGMENT_MAP), "num_device_free": (M.SEGMENT_FREE, M.SEGMENT_UNMAP),
}  # fmt: skip
_CHUNK = 256


def has_readings(recording: Recording) -> bool:
    """Whether torch's count of refused requests stands beside the trace."""
    return any("num_ooms" in reading for reading in _readings(recording)[1:])


def miscounted(recording: Recording) -> dict[str, Any] | None:
    """Find an event that torch counted and the trace lacks, or has once too often; None where they agree, or where nothing was counted.

    Where events were dropped the capture says so itself, and nothing is compared.
    """
    readings = _readings(recording)
    if len(readings) < 2 or recording.capture.meta.get("dropped"):
        return None
    counts = _Counts(recording, readings)
    return counts.compare() if len(counts.names) else None


def _readings(recording: Recording) -> Sequence[Mapping[str, Any]]:
    by_device = recording.capture.meta.get("readings") or {}
    found: Sequence[Mapping[str, Any]] = by_device.get(str(recording.key[1])) or []
    return found


class _Counts:
    def __init__(self, recording: Recording, readings: Sequence[Mapping[str, Any]]) -> None:
        self.recording = recording
        self.names, self.bytes = ([n for n in names if all(isinstance(r.get(n), int) for r in readings)] for names in (_ADDS, _BYTES))
        self.wanted, self.wanted_bytes = (_risen(readings, names) for names in (self.names, self.bytes))
        many = np.bincount(recording.kind, minlength=16)
        self.total = np.asarray([sum(amount * many[code] for code, amount in _ADDS[name].items()) for name in self.names], np.int64)

    def _values(self, code: int) -> tuple[Words, Words]:
        """Counters before each event and at the end, and what was read of them: shape (events + 1 or readings, counters). Bytes are among them where they don't hang on the missing event."""
        kind, size = self.recording.kind, self.recording.size
        sums: dict[str, tuple[dict[int, int], Any]] = {name: (adds, 1) for name, adds in _ADDS.items() if name in self.names}
        wanted = [self.wanted]
        if code == M.OOM:
            sums |= {name: (_BYTES[name], size) for name in self.bytes}
            wanted.append(self.wanted_bytes)
        found = np.zeros((len(kind) + 1, len(sums)), np.int64)
        for column, (adds, each) in enumerate(sums.values()):
            for action, amount in adds.items():
                found[1:, column] += (kind == action) * amount * each
        return np.cumsum(found, axis=0), np.hstack(wanted)

    def compare(self) -> dict[str, Any] | None:
        """Compare the last reading with the whole trace; only where they differ look for the place."""
        short = self.wanted[-1] - self.total
        for name, codes in _NAMES.items():
            if name not in self.names:
                continue
            code = max(codes, key=lambda code: int((self.recording.kind == code).sum()))
            sign = np.asarray([_ADDS[n].get(code, 0) for n in self.names])
            times = int(short[self.names.index(name)])
            if times and (times > 0 or code == M.OOM) and np.array_equal(short, times * sign):
                return self._placed(name, code, sign, times)
        at = self.names.index("num_ooms") if "num_ooms" in self.names else -1
        if at >= 0 and short[at] > 0:
            return self._told("num_ooms", M.OOM, int(self.wanted[-1, at]), int(self.total[at]), 0, len(self.recording.kind))
        return None

    def _placed(self, name: str, code: int, sign: Words, times: int) -> dict[str, Any]:
        """Say where it was: readings before it agree with the trace, those after it with one event more, or less; where several divide that way, between the outermost."""
        values, readings = self._values(code)
        column, end, last = self.names.index(name), len(self.recording.kind), len(readings) - 1
        one = np.append(sign if times > 0 else -sign, np.zeros(values.shape[1] - len(sign), np.int64))
        early: list[int] = []  # places of the readings that agree, as early as they can be
        for wanted in readings:
            place = _first(values, early[-1] if early else 0, wanted)
            if place is None:
                break
            early.append(place)
        after = len(early)  # at the latest, the first reading after the event
        first, high, late = after, end, end
        for r in range(last, -1, -1) if abs(times) == 1 else ():
            late = _latest(values, late, readings[r] - one)
            if late < 0:
                break
            if r <= after:
                first, high = r, late if r == after else high
        low = early[first - 1] if first and abs(times) == 1 else 0
        return self._told(name, code, int(readings[min(after, last), column]), int(readings[min(after, last), column] - one[column]), low, max(low, high))

    def _told(self, name: str, code: int, counted: int, recorded: int, low: int, high: int) -> dict[str, Any]:
        action = ACTIONS[code]
        what = f"{'an' if action[0] in 'ao' else 'a'} {action}{' (a request that was refused)' if code == M.OOM else ''}"
        where = f"between events {format_count(low)} and {format_count(high)}" if low < high else f"right before event {format_count(high)}"
        said = f"torch counted {format_count(counted)} up to here ({name}), the trace has {format_count(recorded)}"
        missing = {"action": action, "addr": None, "bytes": None, "stream": None}
        if counted < recorded:
            return mismatch_at(self.recording, high, f"{said}: {what} is recorded once too often, {where}", None) | {"between": [low, high]}
        return mismatch_at(self.recording, high, f"{said}: {what} is missing {where}", None) | {"missing": missing, "between": [low, high], "noticed": high}


def _risen(readings: Sequence[Mapping[str, Any]], names: list[str]) -> Words:
    """What was counted since the first reading: shape (readings - 1, counters)."""
    return np.asarray([[r[name] - readings[0][name] for name in names] for r in readings[1:]], np.int64).reshape(len(readings) - 1, len(names))


def _latest(values: Words, before: int, wanted: Words) -> int:
    """Return the last place up to ``before`` at which every counter is as given; -1 for none."""
    for at in range(before + 1, 0, -_CHUNK):
        low = max(at - _CHUNK, 0)
        same = np.flatnonzero((values[low:at] == wanted).all(axis=1))
        if len(same):
            return low + int(same[-1])
    return -1


def _first(values: Words, begin: int, wanted: Words) -> int | None:
    """First place from ``begin`` on at which every counter is the one that was read."""
    for at in range(begin, len(values), _CHUNK):
        same = np.flatnonzero((values[at : at + _CHUNK] == wanted).all(axis=1))
        if len(same):
            return at + int(same[0])
    return None
