"""The heap through time: allocations paired from the trace, block sizes recovered, any moment rebuilt.

A trace tells the bytes asked for, a final picture of the heap the bytes given. :func:`build` joins the two:
it walks the segments back from the end to the beginning, follows the trace forwards from there
(:mod:`nbmemprof.heap._follow`), and so knows the size that every block had. With one row a use of an address,
the heap after any event is a filter of ``allocations`` (about 2 ms a million events), not a walk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import schema
from nbmemprof.attribution import attribute
from nbmemprof.capture import Capture
from nbmemprof.heap import _follow
from nbmemprof.heap._columns import Array, action_codes, groups, last_picture, matches, part, place_of, rows_of
from nbmemprof.heap._curves import Curve, curves
from nbmemprof.heap._group import Group
from nbmemprof.heap._moments import blocks_at, segments_at

__all__ = ["Curve", "allocations", "blocks_at", "build", "curves", "last_picture", "matches", "place_of", "segments_at"]


def build(tables: Mapping[str, pl.DataFrame], **meta: Any) -> Capture:
    """Complete the tables of a source: sizes of events, ``allocations``, and warnings about what doesn't fit.

    Parameters
    ----------
    tables
        ``events`` with ``requested_bytes`` as the source tells them (of segment events: the segment's bytes),
        final ``segments`` and ``blocks`` (those of the highest ``snapshot_id``), ``stacks`` and others.
    meta
        As for :meth:`Capture.build`; ``settings`` may hold the allocator's settings, ``start_snapshot_id`` names
        a picture of the heap before the first event, which makes every size exact. For ``source``
        ``torch_snapshot`` the beginning of the trace is searched for signs of a ring that overflowed.
    """
    events = tables.get("events", schema.empty("events"))
    start = meta.get("start_snapshot_id")
    opening = (
        tables["blocks"].filter(pl.col("snapshot_id") == start, pl.col("state") != "inactive")
        if start is not None and "blocks" in tables
        else schema.empty("blocks")
    )
    blocks = last_picture(tables.get("blocks", schema.empty("blocks")))
    segments = last_picture(tables.get("segments", schema.empty("segments")))
    warnings = list(meta.pop("warnings", None) or [])
    codes = action_codes(events["action"])
    sizes = np.full(events.height, -1, np.int64)
    parts = []
    for key in groups(events, blocks, segments):
        rows = rows_of(events, key)
        group = Group(key, events, rows, codes, part(blocks, key), part(segments, key), meta)
        group.opening = part(opening, key)
        parts.append(group.allocations(sizes))
        warnings += group.warnings
    made = pl.concat(parts) if parts else schema.empty("allocations")
    watched = [tables.get(name) for name in ("hints", "contexts", "owners", "stacks")]
    complete = dict(tables) | {"events": _sized(events, codes, sizes), "allocations": attribute(made, *watched)}
    return Capture.build(complete, warnings=warnings, **meta)


def allocations(capture: Capture) -> pl.DataFrame:
    """One row a use of an address, derived from events and the final picture; what ``capture.allocations`` calls once."""
    others = {name: capture.tables[name] for name in capture.tables if name != "allocations"}
    return build(others, **capture.meta).tables["allocations"]


def _sized(events: pl.DataFrame, codes: Array, sizes: Array) -> pl.DataFrame:
    segment = pl.Series(codes >= _follow.SEGMENT_ALLOC) & pl.Series(codes != _follow.OTHER)
    known = pl.Series("size_bytes", sizes)
    size = pl.when(segment).then(pl.coalesce("requested_bytes", "size_bytes")).when(known >= 0).then(known).otherwise(pl.col("size_bytes"))
    return events.with_columns(size.alias("size_bytes"), pl.when(~segment).then(pl.col("requested_bytes")))
