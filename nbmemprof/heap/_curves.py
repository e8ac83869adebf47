"""Bytes after each event of a device."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmemprof.capture import Capture
from nbmemprof.heap import _follow
from nbmemprof.heap._columns import Array, action_codes, groups, int64, last_picture, part, rows_of

__all__ = ["Curve", "curves"]


@dataclass(frozen=True)
class Curve:
    """Bytes of one device after each of its events: live blocks, requested (pending counted), reserved; and before the first."""

    key: tuple[Any, ...]
    seq: Array
    time_us: Array
    live: Array
    requested: Array
    reserved: Array
    start: tuple[int, int, int]
    has_picture: bool

    @property
    def peak(self) -> int:
        """Position of the highest live bytes; -1 is before the first event."""
        if not len(self.live):
            return -1
        top = int(self.live.argmax())
        return top if self.live[top] > self.start[0] else -1


_CURVES: weakref.WeakKeyDictionary[Capture, list[Curve]] = weakref.WeakKeyDictionary()


def curves(capture: Capture) -> list[Curve]:
    """Bytes after each event, a curve a device; anchored at the final state. Kept with the capture."""
    if capture not in _CURVES:
        _CURVES[capture] = _make_curves(capture)
    return _CURVES[capture]


def _make_curves(capture: Capture) -> list[Curve]:
    events, rows = capture.tables["events"], capture.tables["allocations"]
    blocks, segments = last_picture(capture.tables["blocks"]), last_picture(capture.tables["segments"])
    codes = action_codes(events["action"])
    made = []
    keys = groups(events, blocks, segments)
    # a source that had counters only (no events, no picture) still tells of its devices
    counted = [(None, int(d), "device") for d in capture.meta.get("peaks") or {} if d.isdigit()]
    for key in keys + [key for key in counted if key[1] not in {k[1] for k in keys}]:
        index = rows_of(events, key)
        mine = events if index is None else events[index]
        act = codes if index is None else codes[index]
        seq = mine["seq"].to_numpy()
        own = rows if groups(rows) == [key] else part(rows, key)
        size, requested = int64(own["size_bytes"]), int64(own["requested_bytes"])
        live, asked = np.zeros(len(seq), np.int64), np.zeros(len(seq), np.int64)
        start_live = start_asked = 0
        for column, sign in (("alloc_seq", 1), ("free_seq", -1), ("done_seq", -1)):
            known = own[column].is_not_null().to_numpy()
            at = _position(seq, own[column].drop_nulls().to_numpy())
            inside = at < len(seq)
            if column != "done_seq":
                np.add.at(live, at[inside], sign * size[known][inside])
            if column != "free_seq":
                np.add.at(asked, at[inside], sign * requested[known][inside])
            if column == "alloc_seq":
                start_live, start_asked = int(size[~known].sum()), int(requested[~known].sum())
        step = np.where(
            (act == _follow.SEGMENT_ALLOC) | (act == _follow.MAP), 1, np.where((act == _follow.SEGMENT_FREE) | (act == _follow.UNMAP), -1, 0)
        ) * int64(mine["size_bytes"])
        reserved = np.cumsum(step)
        picture = part(segments, key)
        start_reserved = (
            int(picture["size_bytes"].sum()) - (int(reserved[-1]) if len(reserved) else 0) if picture.height else max(0, -int(reserved.min(initial=0)))
        )
        time = mine["time_us"].to_numpy()
        made.append(
            Curve(
                key,
                seq,
                time,
                np.cumsum(live) + start_live,
                np.cumsum(asked) + start_asked,
                reserved + start_reserved,
                (start_live, start_asked, start_reserved),
                picture.height > 0,
            )
        )
    return made


def _position(seq: Array, wanted: Array) -> Array:
    """Where each wanted number stands in the ascending ``seq``; most captures number their events without gaps."""
    if len(seq) and seq[-1] - seq[0] == len(seq) - 1:
        shifted: Array = wanted - seq[0]
        return shifted
    return np.searchsorted(seq, wanted)
