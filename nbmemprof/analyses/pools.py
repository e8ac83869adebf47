"""What a reusable buffer, an arena or a stream-ordered pool would save."""

from __future__ import annotations

import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._pooled import Line, spared
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture

__all__ = ["pools"]

_KEY = ["device", "rank", "kind", "site", "function", "asked_bytes"]
_WAITS = 0.1  # share of a line's blocks that wait for other streams
_ORDER = [
    *_KEY, "count", "size_bytes", "peak_bytes", "peak_count", "size_min_bytes", "size_max_bytes", "life_us_median", "life_events_median", "returns", "pending_count",
    "device_calls", "advice", "calls_saved", "device_calls_saved", "saved_bytes", "saved_high_bytes", "origin",
]  # fmt: skip
_REPLAYED, _AT_LEAST, _WORK = 24, 4, 600_000  # lines that are replayed: as many as take a second, by their events


def pools(capture: Capture, replay: bool = True) -> pl.DataFrame:
    """Which lines ask for memory again and again, and what would a pool of their own save?

    Parameters
    ----------
    capture
        Any capture with a trace.
    replay
        Whether the lines that would gain most are put through the allocator's model with memory of their own: about a second for 100,000
        events, none beyond 300,000.

    Returns
    -------
    One row a line (without frames: ``asked_bytes``, a requested size), by ``size_bytes`` descending: ``device rank kind site
    function``; ``count`` of blocks made and their ``size_bytes`` in all (churn); ``peak_bytes`` and ``peak_count`` alive at once;
    ``size_min_bytes size_max_bytes``; median life in µs and in events; ``returns``: how often none was left; ``pending_count``: blocks
    that waited for another stream after they were given up; ``device_calls`` for new memory. ``advice`` is

    * ``buffer``: never more than one at a time: a tensor made once, of the largest size;
    * ``arena``: two or more at a time, all given up again and again: one block of ``peak_bytes`` to cut them from;
    * ``stream``: a tenth or more waited for other streams: a pool of that stream, or an event before the free;
    * ``none``: the blocks stay, or were made once.

    ``calls_saved``: allocs and frees. ``saved_bytes saved_high_bytes device_calls_saved``: where ``origin`` is ``replayed``, how much lower the peak of reserved
    memory would have been with it, least and most over three orders of segment addresses, and the device calls spared, for new memory and to give it back: all requests put through the
    allocator's model, the line's own taken out and served from its buffer or arena, which is held to the end (below 0: it takes more than torch's cache
    did), or for ``stream`` freed at once. Elsewhere what it would save at most: the new memory that was got for the line beyond what the buffer or arena
    takes, for ``stream`` what waited at once; ``saved_high_bytes`` is then null.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.pools(capture).select("size_bytes", "count", "returns", "advice").rows()
    [(20971520, 20, 0, 'none')]
    """
    events, rows = capture.tables["events"], capture.tables["allocations"]
    names = site_of_stacks(capture.tables["stacks"]).select("stack_id", "site", "function")
    made = rows.filter(pl.col("alloc_seq").is_not_null()).join(names, on="stack_id", how="left")
    late = pl.col("done_seq").is_null() | (pl.col("done_seq") > pl.col("free_seq") + 1)
    made = made.with_columns(asked_bytes=pl.when(pl.col("site").is_null()).then("requested_bytes"), waits=pl.col("free_seq").is_not_null() & late)
    lines = _advised(made.group_by(_KEY).agg(**_sums()).join(_alive(made), on=_KEY, how="left", nulls_equal=True), _new(events, names), capture)
    return _replayed(capture, lines, names, replay=replay)


def _replayed(capture: Capture, lines: pl.DataFrame, names: pl.DataFrame, *, replay: bool) -> pl.DataFrame:
    """Add what a replay says of the lines that would gain most."""
    numbered = lines.with_row_index("_row")
    wanted = numbered.filter((pl.col("advice") != "none") & (pl.col("kind").cast(pl.String) == "device")).sort("device_calls", "size_bytes", descending=True)
    wanted = wanted.head(min(max(_WORK // max(capture.tables["events"].height, 1), _AT_LEAST), _REPLAYED) if replay else 0)
    tried = []
    for row in wanted.iter_rows(named=True):
        stacks = names.filter(pl.col("site").eq_missing(pl.lit(row["site"])), pl.col("function").eq_missing(pl.lit(row["function"])))["stack_id"]
        rows = pl.col("stack_id").is_in(stacks.implode()) if row["site"] is not None else pl.col("stack_id").is_null() & (pl.col("requested_bytes") == row["asked_bytes"])
        need = row["size_max_bytes"] if row["advice"] == "buffer" else row["peak_bytes"]
        tried.append(Line(row["device"], row["rank"], row["advice"], int(need), rows & pl.col("alloc_seq").is_not_null()))
    found = [(row, one.low_bytes, one.high_bytes, one.device_calls) for row, one in zip(wanted["_row"], spared(capture, tried), strict=True) if one is not None]
    told = pl.DataFrame(found, schema={"_row": pl.UInt32, "_low": pl.Int64, "saved_high_bytes": pl.Int64, "_calls": pl.Int64}, orient="row")
    known = pl.col("_low").is_not_null()
    return numbered.join(told, on="_row", how="left", maintain_order="left").with_columns(
        saved_bytes=pl.coalesce("_low", "saved_bytes"), device_calls_saved=pl.coalesce("_calls", "device_calls_saved"), origin=pl.when(known).then(pl.lit("replayed")).otherwise("origin"),
    ).select(_ORDER)  # fmt: skip


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
        .when((pl.col("peak_count") >= 2) & (pl.col("returns") >= 2) & (pl.col("count") >= 2 * pl.col("peak_count")))
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
    )
