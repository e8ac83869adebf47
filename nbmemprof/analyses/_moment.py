"""Which allocations are live at a moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof import heap
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["live_at", "peak_of"]


def peak_of(capture: Capture, curve: heap.Curve) -> dict[str, Any]:
    """Read the device's peak: of the events held, or the one that the source kept when it thinned them.

    Returns
    -------
    ``size_bytes requested_bytes reserved_bytes`` (None: can't be known), ``kept`` (the source kept it), ``seq`` (None: kept as the picture
    ``snapshot_id``, or before the first event) and ``time_us``.
    """
    live, asked, reserved = (
        max(start, int(values.max(initial=0))) for start, values in zip(curve.start, (curve.live, curve.requested, curve.reserved), strict=True)
    )
    at = curve.peak
    found: dict[str, Any] = {
        "size_bytes": live, "requested_bytes": asked, "reserved_bytes": reserved, "seq": int(curve.seq[at]) if at >= 0 else None, "position": at,
        "time_us": float(curve.time_us[at]) if at >= 0 and np.isfinite(curve.time_us[at]) else None, "snapshot_id": None, "kept": False,
    }  # fmt: skip
    if curve.key[2] != "device":
        found["reserved_bytes"] = None
    kept = (capture.meta.get("peaks") or {}).get(str(curve.key[1]))
    if isinstance(kept, dict) and kept.get("peak_allocated_bytes") is not None:
        found["kept"] = True
        for name, key in (("requested_bytes", "peak_requested_bytes"), ("reserved_bytes", "peak_reserved_bytes")):
            if kept.get(key) is not None:
                found[name] = max(int(kept[key]), found[name] or 0)
        if int(kept["peak_allocated_bytes"]) > live:
            found |= {
                "size_bytes": int(kept["peak_allocated_bytes"]),
                "seq": kept.get("seq"),
                "time_us": kept.get("time_us"),
                "snapshot_id": kept.get("snapshot_id"),
                "position": None,
            }
    return found


def live_at(capture: Capture, at: str | float, rows: pl.DataFrame | None = None) -> pl.DataFrame:
    """Allocations live at a moment, each device at its own.

    Parameters
    ----------
    at
        ``"peak"``, ``"end"``, or a time in µs from the capture's start.
    rows
        ``allocations`` with further columns; as they are in the capture by default.

    Raises
    ------
    NbmemprofError
        For a word that is no moment, or a time at which nothing was recorded.
    """
    if not (at in ("peak", "end") or (isinstance(at, (int, float)) and not isinstance(at, bool))):
        raise NbmemprofError(f"at={at!r} is not a moment. Use 'peak', 'end', or a time in µs from the start.")
    rows = capture.tables["allocations"] if rows is None else rows
    curves = heap.curves(capture)
    if not isinstance(at, str):
        _within(capture, curves, float(at))
    if not curves:
        return rows
    parts = []
    for curve in curves:
        mine = rows if len(curves) == 1 else rows.filter(heap.matches(curve.key))
        if at == "end":
            parts.append(mine.filter(pl.col("free_seq").is_null()))
            continue
        if at == "peak":
            peak = peak_of(capture, curve)
            if peak["snapshot_id"] is not None:
                parts.append(_picture(capture, curve, peak["snapshot_id"], mine))
                continue
            seq = peak["seq"]
        else:
            place = int(np.searchsorted(curve.time_us, at, side="right")) - 1
            seq = int(curve.seq[place]) if place >= 0 else None
        if seq is None and len(curve.seq):
            seq = int(curve.seq[0]) - 1
        alive = pl.col("free_seq").is_null()
        if seq is not None:
            alive = (pl.col("alloc_seq").is_null() | (pl.col("alloc_seq") <= seq)) & (alive | (pl.col("free_seq") > seq))
        parts.append(mine.filter(alive))
    return pl.concat(parts)


def _within(capture: Capture, curves: list[heap.Curve], at: float) -> None:
    """Refuse a time that lies outside the recording, or in one without a clock."""
    times = [curve.time_us[np.isfinite(curve.time_us)] for curve in curves]
    known = np.concatenate([*times, np.zeros(0)])
    duration = capture.meta.get("duration_us")
    end = max([float(known.max(initial=0.0)), *([float(duration)] if isinstance(duration, (int, float)) else [])])
    if not len(known) and duration is None:
        raise NbmemprofError(f"at={at:g}: this capture has no clock. Use 'peak' or 'end'.")
    if not min(0.0, float(known.min(initial=0.0))) <= at <= end:
        raise NbmemprofError(f"at={at:g} µs is outside the recording, which goes from 0 to {end:.0f} µs. Give a time in it, 'peak' or 'end'.")


def _picture(capture: Capture, curve: heap.Curve, snapshot_id: int, like: pl.DataFrame) -> pl.DataFrame:
    """Live blocks of a kept picture in the shape of allocations."""
    blocks = capture.tables["blocks"].filter(heap.matches(curve.key), pl.col("snapshot_id") == snapshot_id, pl.col("state") == "active_allocated")
    shared = [name for name in blocks.columns if name in like.columns]
    made = pl.concat([like.head(0), blocks.select(shared)], how="diagonal")
    words = {"category": "unknown", "evidence": "none"}
    return made.with_columns(pl.col(name).fill_null(word) for name, word in words.items() if name in made.columns)
