"""How the free pieces between blocks in use came about."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._lists import is_private
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes

__all__ = ["holes"]

_SEGMENT = ["rank", "device", "kind", "segment_addr"]
_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "rank": pl.Int64, "segment_addr": pl.UInt64, "segment_bytes": pl.Int64, "free_bytes": pl.Int64, "free_blocks": pl.Int64, "step": pl.Int64,
    "site": pl.String, "count": pl.Int64, "size_bytes": pl.Int64, "stays_count": pl.Int64, "stays_bytes": pl.Int64, "pending_count": pl.Int64, "pending_bytes": pl.Int64, "first_seq": pl.Int64, "last_seq": pl.Int64,
    "freed_first_seq": pl.Int64, "freed_last_seq": pl.Int64, "story": pl.String, "origin": pl.String,
}  # fmt: skip
_SEGMENTS = 8  # segments that are told of, those with most bytes in holes
_STEPS = 6  # lines of a segment, those whose blocks took most of it
_NOBODY = "an unrecorded line"


def holes(capture: Capture, at: str | int = "end") -> pl.DataFrame:
    """Which allocations, in which order, left the holes?

    A hole is free memory in a segment that blocks in use hold: it can't be given back, and serves only what fits in it. In each
    segment the blocks that lay where the holes are now, and those that stay, tell how it came about.

    Parameters
    ----------
    capture
        A capture with a trace and a picture of the heap.
    at
        ``"end"``, or the ``seq`` of an event such as a refusal.

    Returns
    -------
    One row a segment and line, segments by ``free_bytes`` in holes descending, lines in the order in which they came (``step``):
    ``device rank segment_addr segment_bytes free_bytes free_blocks``; ``site`` and its ``count size_bytes`` of blocks made in that segment,
    of which ``stays_count stays_bytes`` are in use and ``pending_count pending_bytes`` were given up but still wait for another stream; ``first_seq last_seq`` of their allocs (null: before the first event),
    ``freed_first_seq freed_last_seq``; ``story``: all of the segment in a sentence; ``origin``. The eight segments with most in holes, six lines each.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.holes(capture).select("segment_bytes", "free_blocks", "free_bytes").rows()[0]
    (2097152, 1, 1048576)
    """
    segments, blocks = _picture(capture, at)
    rows = [row for segment in _holed(segments, blocks).iter_rows(named=True) for row in _steps(capture, segment, at)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _picture(capture: Capture, at: str | int) -> tuple[pl.DataFrame, pl.DataFrame]:
    if at == "end":
        return heap.last_picture(capture.tables["segments"]), heap.last_picture(capture.tables["blocks"])
    return heap.segments_at(capture, int(at)), heap.blocks_at(capture, int(at))


def _holed(segments: pl.DataFrame, blocks: pl.DataFrame) -> pl.DataFrame:
    """Segments of the default pools that have both free blocks and blocks in use."""
    free = pl.col("state").cast(pl.String) == "inactive"
    sums = (
        blocks.filter(~is_private())
        .group_by(_SEGMENT)
        .agg(free_bytes=pl.col("size_bytes").filter(free).sum(), free_blocks=free.sum().cast(pl.Int64), used=(~free).sum(), segment_bytes=pl.col("size_bytes").sum())
        .filter(pl.col("free_bytes") > 0, pl.col("used") > 0)
    )
    known = segments.select("rank", "device", "kind", pl.col("addr").alias("segment_addr"))
    return sums.join(known, on=_SEGMENT, how="semi", nulls_equal=True).sort("free_bytes", "segment_addr", descending=[True, False]).head(_SEGMENTS)


def _steps(capture: Capture, segment: dict[str, Any], at: str | int) -> list[dict[str, Any]]:
    begin, size = int(segment["segment_addr"]), int(segment["segment_bytes"])
    last = np.iinfo(np.int64).max if at == "end" else int(at)
    rows = capture.tables["allocations"].filter(
        heap.matches((segment["rank"], segment["device"], segment["kind"])), pl.col("addr").is_between(begin, begin + size - 1), pl.col("alloc_seq").fill_null(-1) <= last
    )
    rows = rows.filter(pl.col("alloc_seq").fill_null(-1) >= _made(capture, segment, begin, last))
    names = site_of_stacks(capture.tables["stacks"].filter(pl.col("stack_id").is_in(rows["stack_id"].drop_nulls().unique().implode()))).select("stack_id", "site")
    stays = pl.col("free_seq").is_null() | (pl.col("free_seq") > last)
    lines = (
        rows.join(names, on="stack_id", how="left")
        .with_columns(pl.col("site").fill_null(_NOBODY), stays=stays, waits=~stays & (pl.col("done_seq").is_null() | (pl.col("done_seq") > last)))
        .group_by("site")
        .agg(
            count=pl.len().cast(pl.Int64), size_bytes=pl.col("size_bytes").sum(), stays_count=pl.col("stays").sum().cast(pl.Int64),
            stays_bytes=pl.col("size_bytes").filter("stays").sum(), pending_count=pl.col("waits").sum().cast(pl.Int64), pending_bytes=pl.col("size_bytes").filter("waits").sum(),
            first_seq=pl.col("alloc_seq").min(), last_seq=pl.col("alloc_seq").max(),
            freed_first_seq=pl.col("free_seq").filter(~pl.col("stays")).min(), freed_last_seq=pl.col("free_seq").filter(~pl.col("stays")).max(),
        )
    )  # fmt: skip
    kept = lines.sort(pl.col("stays_bytes") + pl.col("pending_bytes"), "size_bytes", "site", descending=[True, True, False]).head(_STEPS).sort(pl.col("first_seq").fill_null(-1), "site")
    common = {name: segment[name] for name in ("device", "rank", "segment_addr", "segment_bytes", "free_bytes", "free_blocks")}
    story = _story(segment, list(kept.iter_rows(named=True)))
    return [common | line | {"step": step, "story": story, "origin": capture.meta["origin"]} for step, line in enumerate(kept.iter_rows(named=True))]


def _made(capture: Capture, segment: dict[str, Any], begin: int, last: int) -> int:
    """Return the event with which a classic segment came, -1 where it was there before or grows by pages."""
    made = capture.tables["events"].filter(
        heap.matches((segment["rank"], segment["device"], segment["kind"])), pl.col("action") == "segment_alloc", pl.col("addr") == begin, pl.col("seq") <= last
    )
    return int(made["seq"].to_numpy()[-1]) if made.height else -1


def _story(segment: dict[str, Any], lines: list[dict[str, Any]]) -> str:
    """Tell the lines in their order, and what is left of them."""
    say, told = format_bytes, []
    for line in lines:
        made = f"{line['site']} made {_blocks(line['count'])} ({say(line['size_bytes'])} in all)"
        parts = [f"{gone} {'was' if gone == 1 else 'were'} freed"] if (gone := line["count"] - line["stays_count"] - line["pending_count"]) else []
        parts += [f"{_blocks(line['pending_count'])} ({say(line['pending_bytes'])}) freed but waiting for another stream"] if line["pending_count"] else []
        parts += [f"{_blocks(line['stays_count'])} ({say(line['stays_bytes'])}) stay"] if line["stays_count"] else []
        told.append(f"{made}, all freed again" if gone == line["count"] else f"{made}, of which {' and '.join(parts)}")
    pieces = f"{segment['free_blocks']} hole{'' if segment['free_blocks'] == 1 else 's'}"
    return f"A segment of {say(segment['segment_bytes'])}: " + "; then ".join(told) + f". {say(segment['free_bytes'])} lie in {pieces} between what stays."


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"
