"""What a long recording keeps: the newest events whole, of older ones the true peak, its blocks and a thin timeline."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import heap, schema

__all__ = ["FINAL_ID", "PEAK_ID", "Peak", "Window", "best_of", "event_table", "no_totals", "reduce_window", "with_older_stacks", "with_pools"]

PEAK_ID, FINAL_ID = 0, 1
_BUCKETS = 100  # of the timeline kept of a window that is thinned
_GAUGES = ("allocated_bytes", "requested_bytes", "reserved_bytes")


def no_totals() -> pl.DataFrame:
    """Allocations by stack, none."""
    return pl.DataFrame(schema={"device": pl.Int64, "stack_id": pl.UInt32, "count": pl.UInt32, "requested_bytes": pl.Int64})


@dataclass
class Peak:
    """The highest state of one device: bytes (each at its own moment), when, at which event, and the live blocks."""

    allocated: int
    requested: int
    reserved: int
    clock_us: float | None = None
    seq: int | None = None
    blocks: pl.DataFrame | None = None


@dataclass
class Window:
    """Events between two looks at the ring, and the heap at the second."""

    events: pl.DataFrame  # columns of _cuda_trace.events_frame, and seq and index
    segments: pl.DataFrame
    blocks: pl.DataFrame
    settings: dict[str, Any] | None = None
    exact: bool = True  # nothing is missing before it
    peaks: dict[int, Peak] = field(default_factory=dict)
    samples: pl.DataFrame = field(default_factory=lambda: schema.empty("samples"))
    totals: pl.DataFrame = field(default_factory=no_totals)


def event_table(events: pl.DataFrame, start_us: float, cell: int | None = None) -> pl.DataFrame:
    """The schema's table of these entries; times from ``start_us``, and never before it."""
    return schema.fill(
        "events",
        {
            "kind": "device",
            "source": "torch",
            "cell": cell,
            "time_us": (events["clock_us"] - start_us).clip(lower_bound=0.0),
            "requested_bytes": events["size"],
            **{name: events[name] for name in ("device", "seq", "action", "addr", "stream", "pool_id", "stack_id")},
        },
        events.height,
    )


def reduce_window(window: Window, before: pl.DataFrame | None) -> None:
    """Find the window's peaks with their blocks, its thin timeline, and the totals by stack.

    ``before`` are the blocks at the window's beginning, if nothing is missing in between: they know the stacks of
    what was allocated earlier.
    """
    capture = heap.build(
        {"events": event_table(window.events, 0.0), "segments": window.segments, "blocks": window.blocks}, source="torch_history", settings=window.settings
    )
    samples = []
    for curve in heap.curves(capture):
        device = curve.key[1]
        at = curve.peak
        values = (curve.live, curve.requested, curve.reserved)
        tops = [max(start, int(v.max(initial=0))) for v, start in zip(values, curve.start, strict=True)]
        has_events = len(curve.seq) > 0
        peak = Peak(tops[0], tops[1], tops[2], clock_us=float(curve.time_us[max(at, 0)]) if has_events else None, seq=int(curve.seq[at]) if at >= 0 else None)
        moment = peak.seq if peak.seq is not None else (int(curve.seq[0]) - 1 if has_events else -1)
        peak.blocks = _live_at(capture.tables["allocations"], device, moment, before)
        window.peaks[device] = peak
        if has_events:
            samples.append(_thin(device, curve.time_us, values))
    if samples:
        window.samples = pl.concat(samples)
    made = window.events.filter(pl.col("action") == "alloc")
    window.totals = made.group_by("device", "stack_id").agg(pl.len().cast(pl.UInt32).alias("count"), pl.col("size").sum().alias("requested_bytes"))


def best_of(windows: list[Window], best: dict[int, Peak]) -> dict[int, Peak]:
    """Per device the highest of the windows' peaks; each of its three numbers is the highest of its kind."""
    for window in windows:
        for device, peak in window.peaks.items():
            old = best.get(device)
            if old is None:
                best[device] = peak
                continue
            top = peak if peak.allocated > old.allocated else old
            best[device] = Peak(top.allocated, max(peak.requested, old.requested), max(peak.reserved, old.reserved), top.clock_us, top.seq, top.blocks)
    return best


def with_older_stacks(allocations: pl.DataFrame, before: pl.DataFrame) -> pl.DataFrame:
    """Give allocations that were there at the beginning the stacks that the picture of that moment knows."""
    older = before.filter(pl.col("state") != "inactive").select("device", "addr", older="stack_id").unique(["device", "addr"])
    there = pl.when(pl.col("at_start")).then(pl.coalesce("stack_id", "older")).otherwise(pl.col("stack_id"))
    return allocations.join(older, on=["device", "addr"], how="left", maintain_order="left").with_columns(there.alias("stack_id")).drop("older")


def with_pools(events: pl.DataFrame, segments: pl.DataFrame) -> pl.DataFrame:
    """Pool of entries whose trace tells none (torch before 2.12), where they lie in a private pool's segment that is still there."""
    private = segments.filter(pl.col("pool_id").cast(pl.String) != "0_0")
    if private.is_empty() or events["pool_id"].null_count() < events.height:
        return events
    made = events.filter(pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_map"])).group_by("device", "addr").agg(pl.col("seq").max().alias("since"))
    rows = private.select("device", "addr", "size_bytes", pl.col("pool_id").cast(pl.String)).join(made, on=["device", "addr"], how="left").rows()
    pool = pl.lit(None, pl.String)
    for device, addr, size, name, since in rows:
        lies = (pl.col("device") == device) & (pl.col("addr") >= addr) & (pl.col("addr") < addr + size) & (pl.col("seq") >= (since if since is not None else -1))
        pool = pl.when(lies).then(pl.lit(name)).otherwise(pool)
    return events.with_columns(pool.alias("pool_id"))


def _live_at(allocations: pl.DataFrame, device: int, seq: int, before: pl.DataFrame | None) -> pl.DataFrame:
    rows = allocations.filter(
        (pl.col("device") == device)
        & (pl.col("alloc_seq").is_null() | (pl.col("alloc_seq") <= seq))
        & (pl.col("free_seq").is_null() | (pl.col("free_seq") > seq))
    )
    if before is not None:
        rows = with_older_stacks(rows, before)
    names = ("device", "addr", "size_bytes", "requested_bytes", "stream", "pool_id", "stack_id")
    columns = {"kind": "device", "source": "torch", "snapshot_id": PEAK_ID, "state": "active_allocated"}
    return schema.fill("blocks", columns | {name: rows[name] for name in names}, rows.height)


def _thin(device: int, time_us: Any, values: tuple[Any, ...]) -> pl.DataFrame:
    """The highest and the lowest reading of each bucket, at their own times."""
    cuts = np.unique(np.linspace(0, len(time_us), _BUCKETS + 1).astype(np.int64))
    picked = []
    for gauge, value in zip(_GAUGES, values, strict=True):
        at = np.unique([lo + int(f(value[lo:hi])) for lo, hi in pairwise(cuts) for f in (np.argmax, np.argmin)])
        columns = {"device": device, "kind": "device", "source": "torch", "gauge": gauge, "unit": "bytes"}
        picked.append(schema.fill("samples", columns | {"time_us": pl.Series(time_us[at]), "value": pl.Series(value[at].astype(np.float64))}, len(at)))
    return pl.concat(picked)
