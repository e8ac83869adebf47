"""Memory that is alive though nothing that can be named holds it."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._growth import HEAP, keyed
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["orphans"]

_SCHEMA = {"key": pl.Int64, "stack_id": pl.UInt32, "live_count": pl.Int64, "cycle_count": pl.Int64, "cycle_bytes": pl.Int64, "native_count": pl.Int64}


def orphans(capture: Capture, held: pl.DataFrame | None) -> pl.DataFrame:
    """Of each stack: how many of its live blocks only garbage in cycles holds, and how many only C++ code.

    A block that is not among ``held`` is not told: it may have gone since the capture. One whose address was given
    out again meanwhile is told apart by its size.

    Parameters
    ----------
    held
        What ``mp.holders(device="all")`` gave, in the process and soon after the end of the capture. None: nothing is known, no row.

    Returns
    -------
    A row a heap and stack with such blocks: ``rank device kind key stack_id live_count cycle_count cycle_bytes native_count``.
    """
    rows = keyed(capture.tables["allocations"].select(*HEAP, "alloc_seq", "free_seq", "stack_id", "requested_bytes", "size_bytes", "addr"))
    empty = rows.head(0).select(HEAP).with_columns(pl.lit(None, dtype=kind).alias(name) for name, kind in _SCHEMA.items())
    if held is None:
        return empty
    lacking = {"device", "addr", "size_bytes", "kind"} - set(getattr(held, "columns", ()))
    if lacking:
        raise NbmemprofError(f"held has no column {min(lacking)!r}: it is not what mp.holders() gives. Use held=mp.holders(device='all'), a row a tensor.")
    word = pl.col("kind").cast(pl.String)
    by_block = held.group_by("device", "addr").agg(
        pl.col("size_bytes").max().alias("held_bytes"), cycle=(word == "cycle").all(), nobody=word.is_in(["cycle", "native"]).all()
    )
    live = rows.filter(pl.col("free_seq").is_null() & pl.col("addr").is_not_null())
    same = pl.col("held_bytes").is_between(pl.coalesce("requested_bytes", "size_bytes"), pl.col("size_bytes"))
    found = live.join(by_block, on=["device", "addr"], how="left", nulls_equal=True).with_columns(pl.col("cycle", "nobody") & same)
    cycle, native = pl.col("cycle").fill_null(value=False), (pl.col("nobody") & ~pl.col("cycle")).fill_null(value=False)
    per = found.group_by(*HEAP, "key", "stack_id", maintain_order=True).agg(
        live_count=pl.len().cast(pl.Int64), cycle_count=cycle.sum().cast(pl.Int64), cycle_bytes=pl.col("size_bytes").filter(cycle).sum(), native_count=native.sum().cast(pl.Int64)
    )
    return per.filter(pl.col("cycle_count") + pl.col("native_count") > 0)
