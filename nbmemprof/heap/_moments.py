"""The heap as it was after any event."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof import schema
from nbmemprof.allocator import rounding
from nbmemprof.capture import Capture
from nbmemprof.heap import _follow
from nbmemprof.heap._columns import KEY, absent, action_codes, groups, int64, last_picture, part
from nbmemprof.heap._layout import walk_back

__all__ = ["blocks_at", "segments_at"]


def segments_at(capture: Capture, seq: int) -> pl.DataFrame:
    """Segments as they were after the event ``seq`` (schema ``segments``); walked back from the final ones."""
    final = last_picture(capture.tables["segments"])
    events = capture.tables["events"]
    codes = action_codes(events["action"])
    later = np.flatnonzero((codes >= _follow.SEGMENT_ALLOC) & (codes <= _follow.UNMAP) & (events["seq"].to_numpy() > seq))
    if not len(later):
        return final
    parts = []
    subset = events[later]
    known = final.select(*KEY, "addr", "source", "pool_id", "pool", "stack_id")
    for key in groups(final, subset):
        mine, picture = part(subset, key), part(final, key)
        size = mine.with_columns(requested_bytes=pl.coalesce("requested_bytes", "size_bytes"))["requested_bytes"]
        made = walk_back(picture, action_codes(mine["action"]), int64(mine["addr"]), int64(size), int64(mine["stream"]))
        frame = schema.fill(
            "segments",
            {
                "rank": key[0], "device": key[1], "kind": key[2], "source": "torch", "snapshot_id": 0,
                "addr": pl.Series([m[0] % (1 << 64) for m in made], dtype=pl.UInt64), "size_bytes": pl.Series([m[1] for m in made], dtype=pl.Int64),
                "stream": pl.Series([m[3] for m in made], dtype=pl.Int64), "is_expandable": pl.Series([m[2] for m in made], dtype=pl.Boolean),
            },
            len(made),
        )  # fmt: skip
        # A segment that is gone at the end tells its pool by the requests that it served, or not at all.
        born = (
            mine.filter(pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_map", "segment_free"]))
            .select("addr", pool_then="pool_id", stack_then="stack_id")
            .unique("addr", keep="first")
        )
        mates = part(known, key).drop(KEY)
        frame = frame.drop("pool_id", "pool", "stack_id").join(mates.drop("source"), on="addr", how="left").join(born, on="addr", how="left")
        small = pl.when(pl.col("size_bytes") <= rounding.SMALL_BUFFER).then(pl.lit("small")).otherwise(pl.lit("large")).cast(schema.dtypes("segments")["pool"])
        frame = frame.with_columns(
            pl.coalesce("pool_id", "pool_then").alias("pool_id"),
            pl.coalesce("pool", pl.when(~pl.col("is_expandable")).then(small)).alias("pool"),
            pl.coalesce("stack_id", "stack_then").alias("stack_id"),
        )
        parts.append(frame.select(*schema.TABLES["segments"]))
    return pl.concat(parts)


def blocks_at(capture: Capture, seq: int) -> pl.DataFrame:
    """Blocks as they were after the event ``seq`` (schema ``blocks``): live, pending, and the free gaps between them."""
    before = (pl.col("alloc_seq") <= seq) | pl.col("alloc_seq").is_null()
    held = capture.tables["allocations"].filter(before & ((pl.col("done_seq") > seq) | pl.col("done_seq").is_null()))
    pending = (pl.col("free_seq") <= seq).fill_null(value=False)
    state = pl.when(pending).then(pl.lit("active_pending_free")).otherwise(pl.lit("active_allocated")).cast(schema.dtypes("blocks")["state"])
    held = held.with_columns(state.alias("state"))
    segments = segments_at(capture, seq)
    parts = [_tile(part(held, key), part(segments, key), key) for key in groups(held, segments)]
    return pl.concat(parts) if parts else schema.empty("blocks")


def _tile(held: pl.DataFrame, segments: pl.DataFrame, key: tuple[Any, ...]) -> pl.DataFrame:
    held = held.sort("addr")
    columns = {name: held[name] for name in ("addr", "size_bytes", "requested_bytes", "state", "stream", "pool_id", "stack_id", "source")}
    used = schema.fill("blocks", {"rank": key[0], "device": key[1], "kind": key[2], "snapshot_id": 0} | columns, held.height)
    if segments.is_empty():
        return used
    segments = segments.sort("addr")
    starts, lengths = int64(segments["addr"]), int64(segments["size_bytes"])
    at, size = int64(used["addr"]), int64(used["size_bytes"])
    owner = np.searchsorted(starts, at, side="right") - 1
    inside = (owner >= 0) & (at < starts[np.maximum(owner, 0)] + lengths[np.maximum(owner, 0)])
    place = absent(np.where(inside, owner, -1))
    used = used.with_columns(
        segments["addr"].gather(place).alias("segment_addr"),
        segments["pool"].gather(place).alias("pool"),
        pl.coalesce("pool_id", segments["pool_id"].gather(place)).alias("pool_id"),
    )
    # gaps: from the end of a block (or the segment's beginning) to the next block (or the segment's end)
    begin = np.concatenate([starts, (at + size)[inside]])
    finish = np.concatenate([starts + lengths, at[inside]])
    mine = np.concatenate([np.arange(len(starts)), owner[inside]])
    begin, finish = begin[np.lexsort((begin, mine))], finish[np.lexsort((finish, mine))]
    mine = np.sort(mine)
    gap = np.flatnonzero(finish > begin)
    free = schema.fill(
        "blocks",
        {
            "rank": key[0], "device": key[1], "kind": key[2], "snapshot_id": 0, "state": "inactive", "source": "torch",
            "addr": pl.Series(begin[gap].view(np.uint64)), "size_bytes": pl.Series((finish - begin)[gap]), "segment_addr": segments["addr"].gather(mine[gap]),
            "stream": segments["stream"].gather(mine[gap]), "pool_id": segments["pool_id"].gather(mine[gap]), "pool": segments["pool"].gather(mine[gap]),
        },
        len(gap),
    )  # fmt: skip
    return pl.concat([used, free]).sort("addr")
