"""How long memory lives, and what that makes of it."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._growth import HEAP, Clock, behaviour, keyed
from nbmemprof.analyses._orphans import orphans
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture

__all__ = ["CLASSES", "lifetimes"]

CLASSES = ("growing", "orphaned", "cached", "first-step", "persistent", "temporary")
_CLASS = pl.Enum(CLASSES)
_ORDER = [
    "device", "rank", "kind", "site", "function", "class", "count", "live_count", "live_bytes", "size_min_bytes", "size_median_bytes", "size_max_bytes",
    "life_us_median", "life_us_p90", "life_us_max", "life_events_median", "life_events_p90", "life_events_max", "stack_id", "origin",
]  # fmt: skip


def lifetimes(capture: Capture, held: pl.DataFrame | None = None) -> pl.DataFrame:
    """How long do the blocks of each stack live, and why are those alive that are?

    Parameters
    ----------
    capture
        Any capture.
    held
        ``mp.holders(device="all")``, taken in this process after the recording: with it, what is alive and held by nobody is told.

    Returns
    -------
    One row a full stack (without frames: a requested size) and heap, by ``live_bytes`` descending: ``device rank kind site
    function``; ``class``; ``count`` of blocks; ``live_count live_bytes`` at the end; ``size_min_bytes size_median_bytes
    size_max_bytes``; median, 90th percentile and highest of the lifetimes of those given up, in µs and in events (null: none
    was, or its beginning was not seen); ``stack_id``; ``origin``. ``class`` is

    * ``growing``: a leak, as ``leaks`` says;
    * ``temporary``: none is alive, or only those of the iteration that the trace ends in;
    * ``first-step``: made once in the first iteration and kept (optimizer state, workspaces);
    * ``persistent``: made before the iterations, or where none were seen, and kept (weights);
    * ``cached``: kept, made over several iterations, and growing no more: a cache, a window that moves, a list that is emptied;
    * ``orphaned``: all that is alive is garbage in reference cycles until the collector runs, or grows and nothing but C++ code has it; told with ``held``,
      a trace alone can't tell it.

    Raises
    ------
    NbmemprofError
        For ``held`` that is not a frame of ``mp.holders``.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     kept = []
    ...     for _ in range(20):
    ...         kept.append(torch.ones(1 << 18))
    >>> mp.lifetimes(recording.capture).select("class", "live_count").rows()[0]
    ('growing', 20)
    """
    parts = [_classes(rows, clock, grown) for _, rows, clock, grown in behaviour(capture) if rows.height]
    keys = [*HEAP, "stack_id", "key"]
    if not parts:
        parts = [_classes(capture.tables["allocations"].head(0).with_columns(key=pl.lit(0, dtype=pl.Int64)), None, pl.DataFrame(schema={"key": pl.Int64}))]
    classes = _orphaned(pl.concat(parts), orphans(capture, held), keys)
    rows = keyed(capture.tables["allocations"])
    life_us, life_events = pl.col("end_us") - pl.col("time_us"), pl.col("free_seq") - pl.col("alloc_seq")
    size, live = pl.col("size_bytes"), pl.col("free_seq").is_null()
    spans = [
        made
        for name, life in (("life_us", life_us), ("life_events", life_events.cast(pl.Float64)))
        for made in (life.median().alias(f"{name}_median"), life.quantile(0.9, "nearest").alias(f"{name}_p90"), life.max().alias(f"{name}_max"))
    ]
    made = rows.group_by(keys).agg(
        count=pl.len().cast(pl.Int64), live_count=live.sum().cast(pl.Int64), live_bytes=size.filter(live).sum(),
        size_min_bytes=size.min(), size_median_bytes=size.median().cast(pl.Int64), size_max_bytes=size.max(), *spans,
    )  # fmt: skip
    named = made.join(classes, on=keys, how="left", nulls_equal=True).join(
        site_of_stacks(capture.tables["stacks"]).select("stack_id", "site", "function"), on="stack_id", how="left"
    )
    return (
        named.with_columns(origin=pl.lit(capture.meta["origin"]))
        .sort("live_bytes", "size_max_bytes", "count", *HEAP, "key", descending=[True, True, True, False, False, False, False], nulls_last=True)
        .select(*_ORDER)
    )


def _orphaned(classes: pl.DataFrame, lost: pl.DataFrame, keys: list[str]) -> pl.DataFrame:
    """What nobody holds, told by its name."""
    all_cycles, nobody = pl.col("cycle_count") == pl.col("live_count"), pl.col("cycle_count") + pl.col("native_count") == pl.col("live_count")
    grows = pl.col("class") == "growing"
    marked = classes.join(lost.drop("stack_id"), on=[key for key in keys if key != "stack_id"], how="left", nulls_equal=True)
    mine = (all_cycles | (grows & nobody)).fill_null(value=False)
    return marked.with_columns(pl.when(mine).then(pl.lit("orphaned").cast(_CLASS)).otherwise("class").alias("class")).select(classes.columns)


def _classes(rows: pl.DataFrame, clock: Clock | None, grown: pl.DataFrame) -> pl.DataFrame:
    """``class`` of each key of one heap."""
    live = pl.col("free_seq").is_null()
    made = pl.col("alloc_seq").filter(live & pl.col("alloc_seq").is_not_null())
    per = rows.group_by(*HEAP, "stack_id", "key").agg(
        n=pl.len(), live=live.sum(), older=(live & pl.col("alloc_seq").is_null()).any(), first=made.min(), last=made.max()
    )
    grows = pl.col("key").is_in(grown.get_column("key").implode())
    if clock is None or clock.over_layers:
        kept = pl.lit("persistent")
    else:
        begins, period, end = clock.bounds[0], clock.period, clock.bounds[-1]
        second = clock.bounds[min(1, clock.count - 1)] + 0.5 * period
        kept = (
            pl.when(~pl.col("older") & (pl.col("first") >= end - 0.5 * period))
            .then(pl.lit("temporary"))
            .when(pl.col("older") | (pl.col("last") < begins))
            .then(pl.lit("persistent"))
            .when(pl.col("last") <= second)
            .then(pl.lit("first-step"))
            .otherwise(pl.lit("cached"))
        )
    name = pl.when(grows).then(pl.lit("growing")).when(pl.col("live") == 0).then(pl.lit("temporary")).otherwise(kept)
    return per.select(*HEAP, "stack_id", "key", name.cast(_CLASS).alias("class"))
