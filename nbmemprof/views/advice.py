"""What to change, as text: the answers of ``%memprof advise`` and ``%memprof pools``."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses.advise import advise
from nbmemprof.analyses.holes import holes
from nbmemprof.analyses.pools import pools as lines_of
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes
from nbmemprof.views import text
from nbmemprof.views.svg import clean

__all__ = ["POOLS", "findings", "pools"]

_MOST = 20
_STORIES = 2
POOLS = {
    "site": "line", "advice": "advice", "count": "blocks", "size_bytes": "size in all", "peak_bytes": "at once", "device_calls": "device calls",
    "calls_saved": "calls saved", "saved_bytes": "saved",
}  # fmt: skip


def findings(capture: Capture, *, replay: bool = True) -> str:
    """Each finding with its evidence and what to do, then how the largest holes came about."""
    rows = advise(capture, replay)
    said = []
    for row in rows.head(_MOST).iter_rows(named=True):
        saving = f" [{format_bytes(row['saving_bytes'])}]" if row["saving_bytes"] else ""
        place = f"device {row['device']}: " if rows["device"].drop_nulls().n_unique() > 1 and row["device"] is not None else ""
        said += [f"• {place}{row['finding']}{saving} ({row['origin']})", f"    {row['evidence']}", f"    {row['action']}"]
    if rows.height > _MOST:
        said.append(f"{_MOST} of {rows.height} findings; mp.advise(cap) has them all.")
    stories = holes(capture)["story"].unique(maintain_order=True).head(_STORIES).to_list()
    said += ["", "How the largest holes came about", *(f"  {story}" for story in stories)] if stories else []
    return "\n".join(clean(line) if line else line for line in said) or "Nothing to advise: no finding, and no setting would have saved anything."


def pools(capture: Capture) -> str:
    """Lines that would gain from memory of their own, as a table."""
    rows = lines_of(capture)
    wanted = rows.filter(pl.col("advice") != "none")
    if wanted.is_empty():
        return f"No line would gain from a pool of its own ({rows.height} lines looked at): what is asked for stays, or is asked for once."
    title, head, cells = text.table("Lines that would gain from memory of their own", wanted, POOLS, _MOST)
    return "\n".join([title, *text.aligned(head, cells)])
