"""Live bytes by line, from the blocks that are there at the end of a capture."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._sites import with_site
from nbmemprof.capture import Capture
from nbmemprof.heap import last_picture

__all__ = ["live_sites"]


def live_sites(capture: Capture) -> list[tuple[str, str, float, int]]:
    """Device ("host", "0"), line, bytes and blocks now, the most bytes first; blocks of an unknown line are "(not known)"."""
    live = last_picture(capture.tables["blocks"]).filter(pl.col("state") == "active_allocated").select("device", "stack_id", "size_bytes")
    rows = with_site(live, capture.tables["stacks"])
    summed = rows.group_by("device", "site").agg(pl.col("size_bytes").sum(), count=pl.len()).sort("size_bytes", "site", descending=[True, False], nulls_last=True)
    return [("host" if d is None else str(d), s or "(not known)", float(b or 0), int(n)) for d, s, b, n in summed.iter_rows()]
