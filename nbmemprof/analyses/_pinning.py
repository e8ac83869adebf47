"""Which blocks in use hold free memory that could go back otherwise."""

from __future__ import annotations

import polars as pl

from nbmemprof.allocator import rounding
from nbmemprof.analyses._lists import LIST, large_page
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.units import format_bytes

__all__ = ["NOWHERE", "by_list", "by_site", "pinning"]

_SEGMENT = ["rank", "device", "kind", "segment_addr"]
_NAMED = 3  # sites in the words of one list
NOWHERE = "an unrecorded line"


def pinning(segments: pl.DataFrame, blocks: pl.DataFrame, conf: str | None = None) -> pl.DataFrame:
    """Which used blocks share a segment, or a page, with free memory?

    A classic segment goes back to the device only whole, so each of its used blocks holds all that is free in it. An expandable
    one goes back page by page: what a hole has outside of whole pages is held by the block before it (by the one behind it where it
    begins its range).

    Returns
    -------
    One row a used block that holds something: ``device rank kind pool_id pool stream segment_addr addr size_bytes requested_bytes
    stack_id``, ``pinned_bytes``, and of its segment ``segment_bytes used_blocks used_bytes is_expandable``.
    """
    where = segments.select("rank", "device", "kind", pl.col("addr").alias("segment_addr"), pl.col("is_expandable").fill_null(value=False))
    size, free = pl.col("size_bytes"), pl.col("state").cast(pl.String) == "inactive"
    page = pl.when(pl.col("pool").cast(pl.String) == "small").then(rounding.SMALL_BUFFER).otherwise(large_page(conf))
    offset = (pl.col("addr") - pl.col("segment_addr")).cast(pl.Int64, strict=False)
    pages = ((offset + size) // page - (offset + page - 1) // page).clip(lower_bound=0) * page
    rest = pl.when(free).then(size - pages).otherwise(0)
    rows = (
        blocks.join(where, on=_SEGMENT, how="left", nulls_equal=True)
        .sort("segment_addr", "addr")
        .with_columns(free=free, rest=rest)
        .with_columns(
            behind=pl.col("rest").shift(-1).over(_SEGMENT).fill_null(0),
            first=pl.when(pl.int_range(pl.len()).over(_SEGMENT) == 1).then(pl.col("rest").shift(1).over(_SEGMENT)).otherwise(0),
            within=size.filter(pl.col("free")).sum().over(_SEGMENT),
            segment_bytes=size.sum().over(_SEGMENT),
            used_blocks=(~pl.col("free")).sum().over(_SEGMENT).cast(pl.Int64),
            used_bytes=size.filter(~pl.col("free")).sum().over(_SEGMENT),
        )
    )
    held = rows.filter(~pl.col("free")).with_columns(pinned_bytes=pl.when("is_expandable").then(pl.col("behind") + pl.col("first")).otherwise("within"))
    return held.filter(pl.col("pinned_bytes") > 0).select(
        *LIST, "segment_addr", "addr", "size_bytes", "requested_bytes", "stack_id", "pinned_bytes", "segment_bytes", "used_blocks", "used_bytes", "is_expandable",
    )  # fmt: skip


def by_site(pins: pl.DataFrame, stacks: pl.DataFrame) -> pl.DataFrame:
    """Sum over the blocks of a line: what is free in a classic segment counts once, however many of its blocks lie there.

    Returns
    -------
    One row a list and line, by ``pinned_bytes`` descending: ``device rank kind pool_id pool stream site count size_bytes smallest_bytes
    pinned_bytes``. Two lines may hold the same segment: the sum over lines can exceed what is free.
    """
    sites = site_of_stacks(stacks.filter(pl.col("stack_id").is_in(pins["stack_id"].drop_nulls().unique().implode()))).select("stack_id", "site")
    named = pins.join(sites, on="stack_id", how="left").with_columns(pl.col("site").fill_null(NOWHERE))
    once = pl.when(pl.col("is_expandable").first()).then(pl.col("pinned_bytes").sum()).otherwise(pl.col("pinned_bytes").first())
    inside = named.group_by(*LIST, "site", "segment_addr").agg(
        count=pl.len().cast(pl.Int64), size_bytes=pl.col("size_bytes").sum(), smallest_bytes=pl.col("size_bytes").min(), pinned_bytes=once
    )
    return (
        inside.group_by(*LIST, "site")
        .agg(pl.col("count", "size_bytes").sum(), pl.col("smallest_bytes").min(), pl.col("pinned_bytes").sum())
        .sort("pinned_bytes", "size_bytes", "site", descending=[True, False, False])
    )


def by_list(pins: pl.DataFrame, stacks: pl.DataFrame) -> pl.DataFrame:
    """Put the lines that hold most into words, a row a list: ``pinned_by`` as ``train.py:12 (512 B in 1 block) holds 2 MiB; …``."""
    rows: dict[tuple[object, ...], list[str]] = {}
    lines = by_site(pins, stacks).group_by(LIST, maintain_order=True).head(_NAMED)
    for row in lines.iter_rows(named=True):
        count = f"{row['count']} block{'' if row['count'] == 1 else 's'}"
        rows.setdefault(tuple(row[name] for name in LIST), []).append(
            f"{row['site']} ({format_bytes(row['size_bytes'])} in {count}) holds {format_bytes(row['pinned_bytes'])}"
        )
    named = {name: pl.Series(name, [key[i] for key in rows], dtype=pins.schema[name]) for i, name in enumerate(LIST)}
    return pl.DataFrame(named | {"pinned_by": pl.Series("pinned_by", ["; ".join(texts) for texts in rows.values()], dtype=pl.String)})
