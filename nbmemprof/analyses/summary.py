"""Peaks, what is held at the end, and how sure that is."""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof import heap, schema
from nbmemprof.analyses._moment import peak_of
from nbmemprof.capture import Capture

__all__ = ["summary"]

COLUMNS: dict[str, Any] = {
    "device": pl.Int64, "rank": pl.Int64, "kind": schema.TABLES["events"]["kind"].dtype,
    "peak_allocated_bytes": pl.Int64, "peak_reserved_bytes": pl.Int64, "peak_requested_bytes": pl.Int64,
    "start_allocated_bytes": pl.Int64, "end_allocated_bytes": pl.Int64, "end_reserved_bytes": pl.Int64, "end_pending_bytes": pl.Int64,
    "live_blocks": pl.Int64, "segments": pl.Int64, "events": pl.Int64, "largest_free_bytes": pl.Int64, "unrecorded_bytes": pl.Int64,
    "unknown_events": pl.Int64, "unknown_state_bytes": pl.Int64, "ooms": pl.Int64, "retries": pl.Int64, "capacity_bytes": pl.Int64, "outside_bytes": pl.Int64,
    "inexact_bytes": pl.Int64, "origin": pl.String,
    "peak_allocated_low_bytes": pl.Int64, "peak_allocated_high_bytes": pl.Int64, "peak_reserved_low_bytes": pl.Int64, "peak_reserved_high_bytes": pl.Int64,
}  # fmt: skip


_RANGE = tuple(name for name in COLUMNS if name.endswith(("_low_bytes", "_high_bytes")))


def summary(capture: Capture) -> pl.DataFrame:
    """How much was used at most, how much is held at the end, on each device?

    Parameters
    ----------
    capture
        Any capture.

    Returns
    -------
    One row a device: ``device rank kind peak_allocated_bytes`` (highest sum of live block bytes; null where no
    event tells) ``peak_reserved_bytes peak_requested_bytes`` (pending counted) ``start_allocated_bytes
    end_allocated_bytes end_reserved_bytes end_pending_bytes live_blocks segments events largest_free_bytes``
    (largest inactive block outside private pools) ``unrecorded_bytes`` (live without an alloc event)
    ``unknown_events unknown_state_bytes ooms retries capacity_bytes outside_bytes inexact_bytes`` (block bytes whose
    size is a bound) ``origin``, and for a prediction the range of its peaks: ``peak_allocated_low_bytes peak_allocated_high_bytes
    peak_reserved_low_bytes peak_reserved_high_bytes`` (null elsewhere). Host memory has a null device and no reserved.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.summary(capture).select("peak_allocated_bytes", "end_allocated_bytes", "end_reserved_bytes").rows()
    [(20971520, 10485760, 20971520)]
    """
    rows = [_row(capture, curve) for curve in heap.curves(capture)]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row").sort("rank", "device", nulls_last=True)


def _row(capture: Capture, curve: heap.Curve) -> dict[str, Any]:
    mine = heap.matches(curve.key)
    blocks = heap.last_picture(capture.tables["blocks"]).filter(mine)
    segments = heap.last_picture(capture.tables["segments"]).filter(mine)
    rows = capture.tables["allocations"]
    if len(heap.curves(capture)) > 1:
        rows = rows.filter(mine)
    live = rows.filter(pl.col("free_seq").is_null())
    on_device = curve.key[2] == "device"
    by_state = dict(blocks.group_by("state").agg(pl.col("size_bytes").sum()).iter_rows())
    end = int(by_state.get("active_allocated", 0)) if curve.has_picture or blocks.height else int(live["size_bytes"].sum())
    outside_pools = pl.col("pool_id").is_null() | (pl.col("pool_id").cast(pl.String) == "0_0")
    peak = peak_of(capture, curve)
    words = _words(capture, curve)
    # a recording in which nothing happened knows its peak: what was held all along
    told = len(curve.seq) > 0 or peak["kept"] or bool(capture.meta.get("recording"))
    counters = (capture.meta.get("counters") or {}).get(str(curve.key[1])) or {}
    bare = on_device and not (curve.has_picture or blocks.height or len(curve.seq))  # torch's counters are all there is
    reserved = int(segments["size_bytes"].sum()) if not bare else counters.get("end_reserved_bytes")
    # what was held before the first event that was kept is not what was held at the beginning
    start = counters.get("start_allocated_bytes") if peak["kept"] else None
    return {
        "device": curve.key[1], "rank": curve.key[0], "kind": curve.key[2],
        "peak_allocated_bytes": peak["size_bytes"] if told else None,
        "peak_reserved_bytes": peak["reserved_bytes"] if told and on_device else None,
        "peak_requested_bytes": peak["requested_bytes"] if told else None,
        "start_allocated_bytes": (curve.start[0] if start is None else start) if told else None,
        "end_allocated_bytes": counters.get("end_allocated_bytes", end) if bare else end,
        "end_reserved_bytes": reserved if on_device else None,
        "end_pending_bytes": int(by_state.get("active_pending_free", 0)),
        "live_blocks": int((blocks["state"] == "active_allocated").sum()) if blocks.height else live.height,
        "segments": segments.height,
        "events": len(curve.seq),
        "largest_free_bytes": _largest(blocks.filter((pl.col("state") == "inactive") & outside_pools)) if on_device else None,
        "unrecorded_bytes": int(live.filter(pl.col("alloc_seq").is_null())["size_bytes"].sum()),
        "unknown_events": sum(n for word, n in words.items() if word not in schema.ACTIONS),
        "unknown_state_bytes": int(by_state.get("unknown", 0)),
        "ooms": words.get("oom", 0),
        "retries": counters.get("retries"),
        "capacity_bytes": _of_device(capture.meta.get("capacity_bytes"), curve) if on_device else None,
        "outside_bytes": _of_device(capture.meta.get("outside_bytes"), curve) if on_device else None,
        "inexact_bytes": int(rows.filter(~pl.col("size_exact"))["size_bytes"].sum()),
        "origin": capture.meta["origin"],
        **{name: counters.get(name) for name in _RANGE},
    }  # fmt: skip


def _largest(blocks: pl.DataFrame) -> int:
    return int(blocks["size_bytes"].to_numpy().max(initial=0))


def _words(capture: Capture, curve: heap.Curve) -> dict[Any, int]:
    events = capture.tables["events"]
    mine = events if events.height == len(curve.seq) else events.filter(heap.matches(curve.key))
    return dict(mine.group_by("action").len().with_columns(pl.col("action").cast(pl.String)).iter_rows())


def _of_device(value: Any, curve: heap.Curve) -> int | None:
    """Meta values are one number, or one a device (keys as text)."""
    found = value.get(str(curve.key[1])) if isinstance(value, dict) else value
    return int(found) if isinstance(found, (int, float)) else None
