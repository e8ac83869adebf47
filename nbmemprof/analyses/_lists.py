"""The allocator's free lists in one picture of the heap: what is free in each, in which pieces, and what holds it."""

from __future__ import annotations

import re

import polars as pl

from nbmemprof.allocator import rounding
from nbmemprof.capture import Capture

__all__ = ["LIST", "free_lists", "is_private", "large_page", "nominal_bytes", "pool_of"]

LIST = ["device", "rank", "kind", "pool_id", "pool", "stream"]
_ON = ["rank", "device", "kind"]


def large_page(conf: str | None) -> int:
    """Size of a large segment, and of a page of a large expandable one (``large_segment_size_mb``)."""
    found = re.search(r"large_segment_size_mb\s*:\s*(\d{1,6})", conf or "")
    return int(found[1]) << 20 if found else rounding.LARGE_BUFFER


def pool_of(rounded: int) -> str:
    """The pool that serves a rounded request."""
    return "small" if rounded <= rounding.SMALL_SIZE else "large"


def nominal_bytes(rounded: int, conf: str | None = None) -> int:
    """What the allocator asks the driver for when no free block serves a request (CUDACachingAllocator.cpp, get_allocation_size)."""
    if rounded <= rounding.SMALL_SIZE:
        return rounding.SMALL_BUFFER
    if rounded < rounding.MIN_LARGE_ALLOC:
        return large_page(conf)
    return -(-rounded // rounding.ROUND_LARGE) * rounding.ROUND_LARGE


def is_private() -> pl.Expr:
    """Whether a row's pool is private; one that is not told counts as the default pool."""
    return (pl.col("pool_id").cast(pl.String) != "0_0").fill_null(value=False)


def free_lists(segments: pl.DataFrame, blocks: pl.DataFrame, conf: str | None = None, divisions: list[int] | None = None) -> pl.DataFrame:
    """What lies in each free list?

    A hole never reaches over the end of its segment: mapped ranges of an expandable segment with a gap between them, and
    classic segments that touch, stay apart, as in the allocator.

    Returns
    -------
    One row a free list (``device rank kind pool_id pool stream``): the byte columns of ``fragmentation``.
    """
    where = segments.select(*_ON, pl.col("addr").alias("segment_addr"), pl.col("is_expandable").fill_null(value=False))
    where = where.unique([*_ON, "segment_addr"], keep="first", maintain_order=True)  # a damaged file may list a segment twice
    state, size = pl.col("state").cast(pl.String), pl.col("size_bytes")
    free, used = state == "inactive", state.is_in(["active_allocated", "active_pending_free", "unknown"])
    page = pl.when(pl.col("pool").cast(pl.String) == "small").then(rounding.SMALL_BUFFER).otherwise(large_page(conf))
    offset = (pl.col("addr") - pl.col("segment_addr")).cast(pl.Int64, strict=False)  # a damaged file may have blocks below their segment
    pages = ((offset + size) // page - (offset + page - 1) // page).clip(lower_bound=0) * page
    held = used.any().over(*_ON, "segment_addr")
    rows = (
        blocks.join(where, on=[*_ON, "segment_addr"], how="left", nulls_equal=True, maintain_order="left")
        .with_columns(
            free=free,
            live=state == "active_allocated",
            waits=state == "active_pending_free",
            held=held,
            extra=(size - pl.col("requested_bytes")).clip(lower_bound=0),
            slack=(size - _rounded(blocks, divisions)).clip(lower_bound=0),
        )
        .with_columns(back=pl.when(pl.col("is_expandable")).then(pages).when(pl.col("held")).then(0).otherwise(size))
    )

    def total(column: str, which: str) -> pl.Expr:
        return pl.col(column).filter(pl.col(which)).sum()

    made = rows.group_by(LIST).agg(
        allocated_bytes=total("size_bytes", "live"),
        pending_bytes=total("size_bytes", "waits"),
        free_bytes=total("size_bytes", "free"),
        free_blocks=pl.col("free").sum().cast(pl.Int64),
        largest_free_bytes=pl.col("size_bytes").filter("free").max().fill_null(0),
        releasable_bytes=total("back", "free"),
        rounding_bytes=total("extra", "live"),
        slack_bytes=total("slack", "live"),
        pieces=pl.col("size_bytes").filter("free"),
    )
    reserved = segments.group_by(LIST).agg(reserved_bytes=size.sum(), segments=pl.len().cast(pl.Int64))
    return (
        reserved.join(made, on=LIST, how="full", coalesce=True, nulls_equal=True)
        .with_columns(
            active_bytes=pl.col("allocated_bytes") + pl.col("pending_bytes"),
            pinned_bytes=pl.col("free_bytes") - pl.col("releasable_bytes"),
            ratio=pl.when(pl.col("free_bytes") > 0).then(1 - pl.col("largest_free_bytes") / pl.col("free_bytes")),
            private=is_private(),
        )
        .with_columns(
            stranded_bytes=pl.when("private").then("free_bytes").otherwise(0),
            largest_fit_bytes=_serves(pl.col("largest_free_bytes")),
        )
    )


def _rounded(blocks: pl.DataFrame, divisions: list[int] | None) -> pl.Series:
    asked = blocks["requested_bytes"]
    return pl.Series(rounding.round_sizes(asked.fill_null(0).to_numpy(), divisions)).set(asked.is_null(), None)


def _serves(largest: pl.Expr) -> pl.Expr:
    """The largest request that a list serves from its largest hole: the small pool serves up to 1 MiB, the large one more than that."""
    small = pl.col("pool").cast(pl.String) == "small"
    return pl.when(small).then(largest.clip(upper_bound=rounding.SMALL_SIZE)).when(largest > rounding.SMALL_SIZE).then(largest).otherwise(0)


def settings_of(capture: Capture) -> tuple[str | None, list[int]]:
    """The configuration's text, and its ``roundup_power2_divisions``."""
    conf, settings = capture.meta.get("conf"), capture.meta.get("settings")
    return (conf if isinstance(conf, str) else None), rounding.divisions_of(settings if isinstance(settings, dict) else None)
