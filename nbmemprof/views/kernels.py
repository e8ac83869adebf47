"""Counted kernels: a sentence, what deserves attention, a picture of bandwidth against the card's best, the tables behind it."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import polars as pl

from nbmemprof.analyses._kernel_rules import short
from nbmemprof.analyses.kernel_findings import kernel_findings
from nbmemprof.analyses.kernel_lines import kernel_lines
from nbmemprof.analyses.kernels import alike, kernels
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_count, format_time_us
from nbmemprof.views import _theme, text
from nbmemprof.views._display import put
from nbmemprof.views.svg import Svg, clean, middle, shorten

__all__ = ["bundle", "has", "headline", "line_table", "picture", "plain", "section", "sentences", "show", "table"]

_SAID = 6
_WIDTH, _ROW, _LEFT, _RIGHT = 740, 24, 190, 190
Table = tuple[str, list[str], list[list[str]]]


def has(capture: Capture) -> bool:
    """Whether kernels were counted."""
    return capture.tables["kernels"].height > 0 and capture.tables["metrics"].height > 0


# ---------------------------------------------------------------------- what is said
def headline(capture: Capture) -> str:
    """How many kernels, how long, how they were counted, what that cost."""
    told, frame = capture.meta.get("counters") or {}, kernels(capture)
    took, count = float(frame["duration_us"].sum() or 0.0), frame.height
    parts = [f"{format_count(count)} kernel{'' if count == 1 else 's'} counted, {format_time_us(took)} on the GPU"]
    passes, seconds = told.get("passes"), told.get("total_s")
    by = "by ncu in a child process" if told.get("how") == "ncu" else "by CUPTI, what it wrote put back in between"
    if passes:
        parts.append(f"each run {passes} times {by}")
    elif told.get("how") == "ncu":
        parts.append(by)
    if seconds:
        parts.append(f"counting took {format_time_us(seconds * 1e6)}")
    parts.append(text.origin(capture.meta))
    return " · ".join(parts)


def sentences(capture: Capture, limit: int = _SAID) -> list[str]:
    """Findings, the greatest saving first, "N of M" where some are left out; then what went less well in counting."""
    frame = kernel_findings(capture)
    said = [f"{row['finding']} {row['action']}" for row in frame.head(limit).iter_rows(named=True)]
    if frame.height > limit:
        said.append(f"{limit} of {frame.height} findings about kernels are shown; mp.counters(capture).findings has all.")
    if capture.meta.get("source") == "counters":  # a cell's report tells its warnings itself
        said += [f"{warning[:1].upper()}{warning[1:]}." for warning in capture.meta.get("warnings") or []]
    return [clean(one) for one in said]


def _groups(capture: Capture) -> pl.DataFrame:
    """Launches of one kernel from one line with one grid, together; the longest first."""
    frame = alike(kernels(capture))
    numbers = [name for name, dtype in frame.schema.items() if dtype == pl.Float64 and name != "duration_us"]
    made = frame.group_by("alike", maintain_order=True).agg(pl.col("kernel_id", "name", "site", "grid", "block").first(), pl.len().alias("launches"), pl.col("duration_us").sum(), pl.col(numbers).mean())
    return made.sort("duration_us", descending=True, nulls_last=True, maintain_order=True)


def table(capture: Capture, rows: int) -> Table:
    """Return (title, head, rows): a row a kernel and line, the longest first."""
    frame = _groups(capture)
    cut = f" ({rows} of {format_count(frame.height)})" if frame.height > rows else ""
    head = ["kernel", "line", "launches", "time", "DRAM a launch", "TB/s", "of the best", "sectors a load (ideal)", "sectors a store (ideal)", "bank ways", "L1 hit", "L2 hit", "local memory"]
    cells = [_cells(row) for row in frame.head(rows).iter_rows(named=True)]
    told = [i for i in range(len(head)) if any(row[i] != "–" for row in cells)]  # a column that says nothing is left out
    return f"Kernels, longest first{cut}", [head[i] for i in told], [[row[i] for i in told] for row in cells]


def _cells(row: Mapping[str, Any]) -> list[str]:
    moved = None if row["dram_read_bytes"] is None else row["dram_read_bytes"] + row["dram_write_bytes"]
    ways = max((row[f"shared_{what}_ways"] for what in ("load", "store") if row[f"shared_{what}_ways"] is not None), default=None)
    return [
        short(row["name"]) or "–", row["site"] or "–", format_count(row["launches"]), format_time_us(row["duration_us"]), "–" if moved is None else format_bytes(moved),
        _fixed(row["bandwidth_bytes_per_s"], 1e12, 2), _percent(row["ceiling_share"]),
        _of(row["load_sectors_per_request"], row["load_ideal_per_request"]), _of(row["store_sectors_per_request"], row["store_ideal_per_request"]),
        _fixed(ways, 1, 1), _percent(row["l1_hit_share"]), _percent(row["l2_hit_share"]), format_bytes(row["local_bytes"]) if row["local_bytes"] else "–",
    ]  # fmt: skip


def line_table(capture: Capture, rows: int) -> Table | None:
    """Source lines with sectors or wavefronts beyond the ideal, beside their code; None where there are none."""
    frame = kernel_lines(capture).filter(pl.col("excess") > 0)
    if frame.is_empty():
        return None
    cut = f" ({rows} of {format_count(frame.height)})" if frame.height > rows else ""
    head = ["kernel", "line", "code", "access", "stride", "a warp", "would do", "excess"]
    cells = []
    for row in frame.head(rows).iter_rows(named=True):
        unit = "wavefronts" if row["space"] == "shared" else "sectors"
        each, least = ((row[name] or 0) / max(row["instructions"], 1) for name in (unit, f"ideal_{unit}"))
        access = f"{row['space']} {row['operation']}, {row['width_bytes']} B"
        cells.append([short(row["name"]), str(row["line"]), row["text"] or "–", access, row["stride"] or "–", f"{each:.1f} {unit}", f"{least:.1f}", format_count(row["excess"])])
    return f"Source lines that touch more than they need{cut}", head, cells


def _fixed(value: float | None, unit: float, digits: int) -> str:
    return "–" if value is None else f"{value / unit:.{digits}f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.0%}".replace("%", " %")


def _of(actual: float | None, ideal: float | None) -> str:
    if actual is None:
        return "–"
    return f"{actual:.1f}" if ideal is None else f"{actual:.1f} ({ideal:.1f})"


# ---------------------------------------------------------------------- how it looks
def picture(capture: Capture, rows: int = 8) -> tuple[Svg, str] | None:
    """Bars: each kernel's DRAM bandwidth, and the best measured for its mix as a line; None where no bandwidth is known."""
    frame = _groups(capture).filter(pl.col("bandwidth_bytes_per_s").is_not_null()).head(rows)
    if frame.is_empty():
        return None
    best = frame["ceiling_bytes_per_s"].max()
    top = max(float(frame["bandwidth_bytes_per_s"].max() or 0.0), float(best or 0.0)) or 1.0  # type: ignore[arg-type]
    words = [f"{short(row['name']) or 'a kernel'} {row['bandwidth_bytes_per_s'] / 1e12:.2f}" for row in frame.iter_rows(named=True)]
    sentence = f"DRAM bandwidth of the longest kernels in TB/s: {', '.join(words)}" + (f"; the best measured on such a card is {best / 1e12:.2f}." if best else ".")  # type: ignore[operator]
    svg = Svg(_WIDTH, 44 + _ROW * frame.height, sentence)
    svg.text(12, 20, "DRAM bandwidth of the longest kernels", size=13, bold=True)
    svg.text(_WIDTH - 12, 20, "line: the best measured for its mix of reads and writes" if best else "the best of this card is not known here", fill=_theme.MUTED, anchor="end")
    for i, row in enumerate(frame.iter_rows(named=True)):
        _bar(svg, 34 + _ROW * i, row, (_WIDTH - _LEFT - _RIGHT) / top)
    return svg, sentence


def _bar(svg: Svg, y: float, row: Mapping[str, Any], scale: float) -> None:
    rate, ceiling = row["bandwidth_bytes_per_s"], row["ceiling_bytes_per_s"]
    svg.text(12, y + 15, shorten(short(row["name"]) or "–", _LEFT - 24, 11))
    svg.rect(_LEFT, y + 4, rate * scale, _ROW - 9, _theme.colour("kernel", 0))
    if ceiling:
        svg.line(_LEFT + ceiling * scale, y + 2, _LEFT + ceiling * scale, y + _ROW - 3, _theme.INK, 1.5)
    share = f", {_percent(row['ceiling_share'])}" if ceiling else ""
    svg.text(_WIDTH - 12, y + 15, f"{rate / 1e12:.2f} TB/s{share} · {format_time_us(row['duration_us'])}", fill=_theme.MUTED, anchor="end")


def section(capture: Capture, rows: int) -> str:
    """HTML of it all: for the first view."""
    from nbmemprof.views.first import image, rows_of

    said = "".join(f"<li>{escape(one)}</li>" for one in sentences(capture))
    drawn = picture(capture)
    tables = [made for made in (table(capture, rows), line_table(capture, rows)) if made is not None]
    return (
        f"<p><strong>Kernels</strong>: {escape(clean(headline(capture)))}</p>"
        + (f"<ul>{said}</ul>" if said else "")
        + (image(*drawn) if drawn else "")
        + f"<details><summary>kernels: tables</summary>{''.join(rows_of(*made) for made in tables)}</details>"
    )


def plain(capture: Capture, rows: int = 8) -> str:
    """The same as text."""
    lines = [f"Kernels: {headline(capture)}", *(f"  • {one}" for one in sentences(capture))]
    for made in (table(capture, rows), line_table(capture, rows)):
        if made is not None:
            title, head, cells = made
            lines += ["", title, *text.aligned(head, [[middle(cell, 60) for cell in row] for row in cells])]
    return "\n".join(lines)


def bundle(capture: Capture) -> dict[str, str]:
    """Return ``text/html`` and ``text/plain`` of the kernels alone."""
    from nbmemprof.views.first import Mount

    if not has(capture):
        said = "No kernels were counted in this capture. Count them with %%memprof --counters or mp.counters(function)."
        return {"text/html": f"<p>{escape(said)}</p>", "text/plain": said}
    body = section(capture, 12)
    return {"text/html": Mount.of(body).wrap(body), "text/plain": plain(capture)}


def show(capture: Capture) -> None:
    """Display it in IPython, print it elsewhere: the view ``kernels``."""
    put(bundle(capture))
