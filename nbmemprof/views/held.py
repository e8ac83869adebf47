"""Who holds the memory, as a sentence and a table; and what a release would do or did."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import polars as pl

from nbmemprof.units import format_bytes, format_count
from nbmemprof.views._display import put
from nbmemprof.views.first import Mount
from nbmemprof.views.svg import clean, middle
from nbmemprof.views.text import aligned

__all__ = ["bundle", "display", "plan", "released"]

_KINDS = {
    "variable": "your variables", "local": "running functions", "thread": "other threads", "module": "modules", "closure": "closures", "generator": "generators", "hook": "hooks",
    "lru_cache": "caches", "graph": "autograd graphs", "output": "the output history", "result": "the notebook's last result", "traceback": "the last traceback",
    "handled": "the exception being handled", "cycle": "garbage in cycles", "native": "C++ and running expressions",
}  # fmt: skip
_CHAIN = 300


def bundle(frame: pl.DataFrame, notes: Sequence[str] = (), top: int = 20) -> dict[str, str]:
    """``text/html`` and ``text/plain`` of the frame of ``holders``, by tensor or by holder."""
    said, head, rows = [headline(frame), *notes], *_table(frame, top)
    cut = [f"{top} of {format_count(frame.height)} rows are shown; mp.holders() has them all."] if frame.height > top else []
    plain = [*map(clean, said), *(aligned(head, rows, 100) if rows else []), *cut]
    body = "".join(f"<p>{escape(clean(s))}</p>" for s in said)
    if rows:
        body += "<table><thead><tr>" + "".join(f"<th>{escape(h)}</th>" for h in head) + "</tr></thead><tbody>"
        body += "".join("<tr>" + "".join(f"<td>{escape(middle(c, _CHAIN))}</td>" for c in row) + "</tr>" for row in rows) + "</tbody></table>"
    body += "".join(f"<p>{escape(c)}</p>" for c in cut)
    return {"text/html": Mount.of(body).wrap(body), "text/plain": "\n".join(plain)}


def display(frame: pl.DataFrame, notes: Sequence[str] = (), top: int = 20) -> None:
    """Display it in IPython, print it elsewhere."""
    put(bundle(frame, notes, top))


def headline(frame: pl.DataFrame) -> str:
    """All bytes, and by whom they are held, largest first."""
    if frame.is_empty():
        return "No tensor memory is alive in this process."
    size = "counted_bytes" if "counted_bytes" in frame.columns else "size_bytes"
    parts = frame.group_by("kind").agg(pl.col(size).sum()).sort(size, descending=True)
    tensors = frame.height if "count" not in frame.columns else int(frame["count"].sum())
    shares = ", ".join(f"{format_bytes(bytes_)} by {_KINDS.get(kind, kind)}" for kind, bytes_ in parts.iter_rows() if bytes_)
    free = int(frame.filter(pl.col("releasable"))[size].sum())
    more = f" %memprof release would give {format_bytes(free)} back." if free else ""
    return f"{format_bytes(int(frame[size].sum()))} alive in {format_count(tensors)} tensor{'' if tensors == 1 else 's'}: {shares}.{more}"


def _table(frame: pl.DataFrame, top: int) -> tuple[list[str], list[list[str]]]:
    several = frame["device"].n_unique() > 1
    head = ["size", *(["device"] if several else []), "tensors" if "count" in frame.columns else "shape", "held by", "what to do"]
    rows = []
    for row in frame.head(top).iter_rows(named=True):
        where = ["CPU" if row["device"] is None else f"GPU {row['device']}"] if several else []
        count = format_count(row["count"]) if "count" in row else row["shape"] or "–"
        rows.append([format_bytes(row["size_bytes"], 2), *where, count, clean(row["holder"]), clean(row["advice"] or "–")])
    return head, rows


# ---------------------------------------------------------------------- release
def plan(found: Any) -> str:
    """What a release would do."""
    if not found.size_bytes:
        return f"Nothing to let go of: none of the {format_bytes(found.alive_bytes)} of tensors alive is held by the notebook alone. %memprof who says who holds them."
    return "\n".join([
        f"{format_bytes(found.size_bytes)} of the {format_bytes(found.alive_bytes)} of tensors alive are held by the notebook alone:",
        *aligned(["size", "kept by"], _keeps(found), 120),
        "Your variables are not touched. %memprof release --yes lets go; then these outputs and %tb, %debug of that error are gone.",
    ])  # fmt: skip


def released(done: Any, *, emptied: bool = False) -> str:
    """What a release did."""
    lines = [f"{format_bytes(done.size_bytes)} came back: {format_bytes(done.before_bytes)} of tensors were alive, {format_bytes(done.after_bytes)} are now."]
    if done.plan.size_bytes:
        lines += aligned(["size", "was kept by"], _keeps(done.plan), 120)
    rest = done.plan.size_bytes - done.size_bytes
    if rest > 0:
        lines.append(f"{format_bytes(rest)} more were found, but something else holds them too: %memprof who names it.")
    if done.on_gpu and done.size_bytes and not emptied:
        lines.append("torch keeps it for later tensors; torch.cuda.empty_cache() (or --empty-cache) gives it back to the driver, for other processes.")
    return "\n".join(lines)


def _keeps(found: Any) -> list[list[str]]:
    rows = [[format_bytes(keep.size_bytes, 2), ", ".join(keep.labels)] for keep in found.keeps]
    return [*rows, [format_bytes(found.cycle_bytes, 2), "reference cycles that gc.collect() frees"]] if found.cycle_bytes else rows
