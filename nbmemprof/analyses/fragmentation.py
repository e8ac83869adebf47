"""Free memory that can't be used, list by list."""

from __future__ import annotations

import numpy as np
import polars as pl

from nbmemprof import heap
from nbmemprof.allocator import rounding
from nbmemprof.analyses._lists import LIST, free_lists, pool_of, settings_of
from nbmemprof.analyses._moment import peak_of
from nbmemprof.analyses._pinning import by_list, pinning
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import parse_bytes

__all__ = ["fragmentation"]

_COLUMNS = [
    *LIST, "private", "reserved_bytes", "active_bytes", "allocated_bytes", "pending_bytes", "free_bytes", "free_blocks", "largest_free_bytes",
    "pinned_bytes", "releasable_bytes", "stranded_bytes", "rounding_bytes", "slack_bytes", "ratio", "largest_fit_bytes", "segments", "pinned_by",
]  # fmt: skip

_LARGEST = 1 << 62  # of a request: what is larger fits as little


def fragmentation(capture: Capture | None = None, request_bytes: int | str | None = None, at: str | float = "end") -> pl.DataFrame:
    """How much memory lies free, in which pieces, and would a request fit?

    The allocator serves a request from one free list: that of its pool (small: up to 1 MiB after rounding), private or not,
    and of its stream. What is free in another list doesn't help.

    Parameters
    ----------
    capture
        A capture with segments and blocks; None takes a picture of this process's heap now and leaves the allocator alone.
    request_bytes
        A request, as ``"96MiB"`` or a number: rounded as the allocator rounds, looked for in the default pool's lists.
    at
        ``"end"``, ``"peak"`` (each device at its own), or a time in µs from the start.

    Returns
    -------
    One row a free list (``device rank kind pool_id pool stream``, ``private``), by ``free_bytes`` descending within the device:
    ``reserved_bytes``; ``active_bytes`` = ``allocated_bytes`` + ``pending_bytes``; ``free_bytes`` in ``free_blocks`` pieces, the
    largest ``largest_free_bytes``; ``releasable_bytes``: what ``empty_cache()`` would return (free segments; whole free pages of
    expandable ones; for a private pool: once nobody uses it), ``pinned_bytes``: the rest of the free bytes, held by blocks beside
    them; ``stranded_bytes``: the free bytes where the pool is private, as nobody else may have them; ``rounding_bytes``: given beyond
    what was asked, in live blocks, of which ``slack_bytes`` are ends of blocks that were not split off; ``ratio``: 1 − largest / free,
    external fragmentation, null where nothing is free; ``largest_fit_bytes``: the largest request that this list serves now without new
    memory (0: none); ``segments``; ``pinned_by``: the lines whose blocks hold most of the pinned bytes, in words (null: nothing pinned); with a request also ``rounded_bytes``, ``would_fit`` and ``unusable_bytes`` (free
    bytes in pieces too small for it, or in a list that may not serve it); ``origin``. Empty for host memory: it has no lists.

    Raises
    ------
    NbmemprofError
        For an ``at`` that is no moment, or a time outside the recording; for a request that is no size.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.fragmentation(capture, "2MiB").select("free_bytes", "largest_free_bytes", "would_fit").rows()
    [(10485760, 1048576, False)]
    """
    if capture is None:
        from nbmemprof.recording import snapshot  # the one analysis that may look at the process itself

        capture = snapshot()
    conf, divisions = settings_of(capture)
    segments, blocks = _picture(capture, at)
    pins = by_list(pinning(segments, blocks, conf), capture.tables["stacks"])
    lists = free_lists(segments, blocks, conf, divisions).join(pins, on=LIST, how="left", nulls_equal=True)
    columns = list(_COLUMNS)
    if request_bytes is not None:
        asked = min(parse_bytes(request_bytes), _LARGEST)
        rounded = int(rounding.round_sizes(np.array([asked], dtype=np.int64), divisions)[0])
        serves = (pl.col("pool").cast(pl.String) == pool_of(rounded)).fill_null(value=True) & ~pl.col("private")
        small = pl.col("pieces").list.eval(pl.element().filter(pl.element() < rounded)).list.sum()
        lists = lists.with_columns(
            rounded_bytes=pl.lit(rounded, dtype=pl.Int64),
            would_fit=serves & (pl.col("largest_free_bytes") >= rounded),
            unusable_bytes=pl.when(serves).then(small).otherwise("free_bytes"),
        )
        columns += ["rounded_bytes", "would_fit", "unusable_bytes"]
    made = lists.select(*columns, origin=pl.lit(capture.meta["origin"]))
    return made.sort("rank", "device", "free_bytes", "pool_id", "pool", "stream", descending=[False, False, True, False, False, False], nulls_last=True)


def _picture(capture: Capture, at: str | float) -> tuple[pl.DataFrame, pl.DataFrame]:
    if at == "end":
        return heap.last_picture(capture.tables["segments"]), heap.last_picture(capture.tables["blocks"])
    if at != "peak" and (isinstance(at, (bool, str)) or not isinstance(at, (int, float))):
        raise NbmemprofError(f"at={at!r} is not a moment. Use 'end', 'peak', or a time in µs from the start.")
    segments, blocks = [], []
    for curve in heap.curves(capture):
        mine = heap.matches(curve.key)
        if at == "peak":
            peak = peak_of(capture, curve)
            seq = peak["seq"]
            if peak["snapshot_id"] is not None:  # the source thinned its events and kept this picture
                kept = mine & (pl.col("snapshot_id") == peak["snapshot_id"])
                segments.append(capture.tables["segments"].filter(kept))
                blocks.append(capture.tables["blocks"].filter(kept))
                continue
        else:
            place = int(np.searchsorted(curve.time_us, at, side="right")) - 1
            seq = int(curve.seq[place]) if place >= 0 else None
        if seq is None:
            seq = int(curve.seq[0]) - 1 if len(curve.seq) else -1
        segments.append(heap.segments_at(capture, seq).filter(mine))
        blocks.append(heap.blocks_at(capture, seq).filter(mine))
    if not segments:
        return capture.tables["segments"].head(0), capture.tables["blocks"].head(0)
    return pl.concat(segments), pl.concat(blocks)
