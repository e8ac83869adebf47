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
_NAMED = 3  # lines that gain nothing
POOLS = {
    "site": "line", "asked_bytes": "requests of", "advice": "advice", "count": "blocks", "size_bytes": "size in all", "peak_bytes": "at once", "life_us_median": "median life",
    "device_calls": "device calls", "device_calls_saved": "fewer with it", "calls_saved": "allocs and frees spared", "saved_bytes": "reserved less", "origin": "how it is known",
}  # fmt: skip
_WORTH = 0.01  # share of all that is asked for from which a line is worth a row


def findings(capture: Capture, *, replay: bool = True) -> str:
    """Each finding with its evidence and what to do, then how the largest holes came about."""
    rows = advise(capture, replay)
    said = []
    for row in rows.head(_MOST).iter_rows(named=True):
        saving = f" [{format_bytes(row['saving_bytes'])}]" if row["saving_bytes"] else ""
        place = f"device {row['device']}: " if rows["device"].drop_nulls().n_unique() > 1 and row["device"] is not None else ""
        said += [clean(f"• {place}{row['finding']}{saving} ({row['origin']})"), f"    {clean(row['evidence'])}", f"    {clean(row['action'])}"]
    if rows.height > _MOST:
        said.append(f"{_MOST} of {rows.height} findings; mp.advise(cap) has them all.")
    stories = holes(capture)["story"].unique(maintain_order=True).head(_STORIES).to_list()
    said += ["", "How the largest holes came about", *(f"    {clean(story)}" for story in stories)] if stories else []
    return "\n".join(said) or "Nothing to advise: no finding, and no setting would have saved anything."


def pools(capture: Capture) -> str:
    """Lines that would gain from memory of their own, as a table; those that a replay shows to gain nothing are counted."""
    rows = lines_of(capture)
    busy = rows.filter((pl.col("advice") != "none") & ((pl.col("size_bytes") >= _WORTH * int(rows["size_bytes"].sum())) | (pl.col("device_calls") > 1)))
    if busy.is_empty():
        return f"No line would gain from a pool of its own ({rows.height} line{'' if rows.height == 1 else 's'} looked at): what is asked for stays, or is asked for once."
    replayed, gains = pl.col("origin") == "replayed", (pl.col("saved_bytes") > 0) | ((pl.col("saved_bytes") == 0) & (pl.col("device_calls_saved") > 0))
    wanted, vain = busy.filter(gains), busy.filter(~gains)
    said = []
    if wanted.height:
        shown = wanted.with_columns(pl.when(replayed).then(pl.lit("replayed")).otherwise(pl.lit("at most")).alias("origin"))
        title, head, cells = text.table("Lines that would gain from memory of their own", shown.sort("saved_bytes", "device_calls_saved", descending=True, maintain_order=True), POOLS, _MOST)
        said += [title, *text.aligned(head, cells)]
    if vain.height:
        which = ", ".join(row["site"] or f"requests of {format_bytes(row['asked_bytes'])}" for row in vain.head(_NAMED).iter_rows(named=True)) + (", …" if vain.height > _NAMED else "")
        what = f"{vain.height} {'more lines ask' if wanted.height else 'line asks' if vain.height == 1 else 'lines ask'}"
        said.append(f"{what} again and again ({which}), and memory of {'its' if vain.height == 1 and not wanted.height else 'their'} own would spare nothing but the calls: torch's cache, which all lines share, does as well.")
    return "\n".join(said)
