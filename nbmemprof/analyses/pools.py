"""What a reusable buffer, an arena or a stream-ordered pool would save."""

from __future__ import annotations

import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture

__all__ = ["pools"]

_KEY = ["device", "rank", "kind", "site", "function", "asked_bytes"]
_WAITS = 0.1  # share of a line's blocks that wait for other streams
_ORDER = [
    *_KEY, "count", "size_bytes", "peak_bytes", "peak_count", "size_min_bytes", "size_max_bytes", "life_us_median", "life_events_median", "returns", "pending_count",
    "device_calls", "advice", "calls_saved", "device_calls_saved", "saved_bytes", "origin",
]  # fmt: skip


def pools(capture: Capture) -> pl.DataFrame:
    """Which lines ask for memory again and again, and what would a pool of their own save?

    Parameters
    ----------
    capture
        Any capture with a trace.

    Returns
    -------
    One row a line (without frames: ``asked_bytes``, a requested size), by ``size_bytes`` descending: ``device rank kind site
    function``; ``count`` of blocks made and their ``size_bytes`` in all (churn); ``peak_bytes`` and ``peak_count`` alive at once;
    ``size_min_bytes size_max_bytes``; median life in µs and in events; ``returns``: how often none was left; ``pending_count``: blocks
    that waited for another stream after they were given up; ``device_calls`` for new memory. ``advice`` is

    * ``buffer``: never more than one at a time: a tensor made once, of the largest size;
    * ``arena``: several at a time, all given up again and again: one block of ``peak_bytes`` to cut them from;
    * ``stream``: a tenth or more waited for other streams: a pool of that stream, or an event before the free;
    * ``none``: the blocks stay, or were made once.

    ``calls_saved`` (allocs and frees), ``device_calls_saved`` and ``saved_bytes``: what it would save at most: the new memory that was
    got for the line beyond what the buffer or arena takes, for ``stream`` what waited at once. ``origin``.
    """
    events, rows = capture.tables["events"], capture.tables["allocations"]
    names = site_of_stacks(capture.tables["stacks"]).select("stack_id", "site", "function")
    made = rows.filter(pl.col("alloc_seq").is_not_null()).join(names, on="stack_id", how="left")
    late = pl.col("done_seq").is_null() | (pl.col("done_seq") > pl.col("free_seq") + 1)
    made = made.with_columns(asked_bytes=pl.when(pl.col("site").is_null()).then("requested_bytes"), waits=pl.col("free_seq").is_not_null() & late)
    return _advised(made.group_by(_KEY).agg(**_sums()).join(_alive(made), on=_KEY, how="left", nulls_equal=True), _new(events, names), capture)


def _sums() -> dict[str, pl.Expr]:
    size = pl.col("size_bytes")
    return {
        "count": pl.len().cast(pl.Int64), "size_bytes": size.sum(), "size_min_bytes": size.min(), "size_max_bytes": size.max(),
        "life_us_median": (pl.col("end_us") - pl.col("time_us")).median(), "life_events_median": (pl.col("free_seq") - pl.col("alloc_seq")).median(),
        "pending_count": pl.col("waits").sum().cast(pl.Int64),
    }  # fmt: skip


def _alive(made: pl.DataFrame) -> pl.DataFrame:
    """Most bytes and blocks alive at once, by line, and how often none was left; likewise what waited."""
    size = pl.col("size_bytes")
    steps = pl.concat(
        [
            made.select(*_KEY, seq=pl.col("alloc_seq"), step=size, one=pl.lit(1), waiting=pl.lit(0, dtype=pl.Int64)),
            made.filter(pl.col("free_seq").is_not_null()).select(
                *_KEY, seq=pl.col("free_seq"), step=-size, one=pl.lit(-1), waiting=pl.when("waits").then(size).otherwise(0)
            ),
            made.filter("waits", pl.col("done_seq").is_not_null()).select(
                *_KEY, seq=pl.col("done_seq"), step=pl.lit(0, dtype=pl.Int64), one=pl.lit(0), waiting=-size
            ),
        ]
    ).sort("seq")
    return steps.group_by(_KEY).agg(
        peak_bytes=pl.col("step").cum_sum().max(),
        peak_count=pl.col("one").cum_sum().max().cast(pl.Int64),
        returns=((pl.col("one").cum_sum() == 0) & (pl.col("one") < 0)).sum().cast(pl.Int64),
        pending_bytes=pl.col("waiting").cum_sum().max(),
    )


def _new(events: pl.DataFrame, names: pl.DataFrame) -> pl.DataFrame:
    """Device calls for new memory, and their bytes: of the line that asked, which without frames is the size of the alloc after it."""
    action = pl.col("action").cast(pl.String)
    wanted = events.filter(action.is_in(["segment_alloc", "segment_map", "alloc"])).with_columns(new=action != "alloc")
    asked = pl.when(~pl.col("new")).then("requested_bytes").backward_fill().over("rank", "device", "kind")
    calls = wanted.with_columns(asked_bytes=asked).filter("new").join(names, on="stack_id", how="left")
    return (
        calls.with_columns(asked_bytes=pl.when(pl.col("site").is_null()).then("asked_bytes"))
        .group_by(_KEY)
        .agg(device_calls=pl.len().cast(pl.Int64), new_bytes=pl.col("size_bytes").sum())
    )


def _advised(lines: pl.DataFrame, new: pl.DataFrame, capture: Capture) -> pl.DataFrame:
    advice = (
        pl.when(pl.col("pending_count") >= (_WAITS * pl.col("count")).clip(lower_bound=2))
        .then(pl.lit("stream"))
        .when((pl.col("peak_count") <= 1) & (pl.col("count") >= 3))
        .then(pl.lit("buffer"))
        .when((pl.col("returns") >= 2) & (pl.col("count") >= 2 * pl.col("peak_count")))
        .then(pl.lit("arena"))
        .otherwise(pl.lit("none"))
    )
    need = pl.when(pl.col("advice") == "buffer").then("size_max_bytes").otherwise("peak_bytes")
    kept, pooled = pl.col("advice") == "none", pl.col("advice").is_in(["buffer", "arena"])
    reserved = max((int(c.reserved.max(initial=0)) for c in heap.curves(capture)), default=0)
    return (
        lines.join(new, on=_KEY, how="left", nulls_equal=True)
        .with_columns(pl.col("device_calls", "new_bytes").fill_null(0), advice=advice)
        .with_columns(
            calls_saved=pl.when(pooled).then(2 * pl.col("count") - 2).otherwise(0),
            device_calls_saved=pl.when(pooled).then((pl.col("device_calls") - 1).clip(lower_bound=0)).otherwise(0),
            saved_bytes=pl.when(kept)
            .then(0)
            .when(pooled)
            .then((pl.col("new_bytes").clip(upper_bound=reserved) - need).clip(lower_bound=0))
            .otherwise("pending_bytes"),
            origin=pl.lit(capture.meta["origin"]),
        )
        .sort("size_bytes", "count", *_KEY[3:], descending=[True, True, False, False, False], nulls_last=True)
        .select(_ORDER)
    )
