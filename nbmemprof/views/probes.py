"""A probe as a sentence, a picture and a table: achieved, measured ceiling, data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import polars as pl

from nbmemprof.units import format_bytes, format_time_us
from nbmemprof.views import _theme, text
from nbmemprof.views.first import Mount, image, rows_of
from nbmemprof.views.svg import Svg, clean, shorten

if TYPE_CHECKING:
    from nbmemprof.gpu.probes import ProbeFrame

__all__ = ["Bars", "bars", "bundle", "format_rate", "picture"]

WIDTH, LABEL = 760, 236
MEASURED, RECORDED = "#0072b2", "#7fa8c9"


@dataclass(frozen=True)
class Bar:
    """One row: what, how much, in words; ``mark`` is what the model or ceiling says of this row."""

    label: str
    value: float
    words: str
    mark: float | None = None


@dataclass(frozen=True)
class Bars:
    """What a probe's picture shows. ``lines``: name and value of what all rows are held against; ``mark``: what a row's own mark means."""

    title: str
    unit: str
    rows: list[Bar]
    lines: list[tuple[str, float]]
    mark: str = ""


def format_rate(bytes_per_s: float | None) -> str:
    """Print a rate in powers of 1000, as data sheets do."""
    if bytes_per_s is None:
        return "unknown"
    for factor, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= factor or unit == "MB/s":
            return f"{bytes_per_s / factor:.3g} {unit}"
    raise AssertionError(bytes_per_s)


def bars(frame: ProbeFrame) -> Bars:
    """Choose the rows that are drawn and the words beside them."""
    shown: Bars = _BARS[frame.probe](frame)
    return shown


def _lines(frame: pl.DataFrame, *names: tuple[str, str]) -> list[tuple[str, float]]:
    found = [(words, frame[name].max()) for words, name in names if name in frame.columns]
    return [(words, float(value)) for words, value in found if isinstance(value, (int, float))]


def _bandwidth(frame: pl.DataFrame) -> Bars:
    rows = []
    best = {row["what"]: row for row in frame.filter("best").iter_rows(named=True)}
    for row in (best[what] for what in frame["what"].unique(maintain_order=True) if what in best):
        sheet = f", {100 * row['achieved_bytes_per_s'] / row['datasheet_bytes_per_s']:.3g} % of data sheet" if row["datasheet_bytes_per_s"] else ""
        rows.append(Bar(f"{row['what']}, {row['width']} B a lane, {row['form']}", row["achieved_bytes_per_s"], format_rate(row["achieved_bytes_per_s"]) + sheet))
    return Bars("Memory bandwidth", "bytes/s", rows, _lines(frame, ("measured ceiling", "ceiling_bytes_per_s"), ("data sheet", "datasheet_bytes_per_s")))


def _coalescing(frame: pl.DataFrame) -> Bars:
    rows = [
        Bar(row["what"], row["achieved_bytes_per_s"], f"{format_rate(row['achieved_bytes_per_s'])}, model {row['modelled_share']:.3g}", row["ceiling_bytes_per_s"] * row["modelled_share"])
        for row in frame.iter_rows(named=True)
    ]
    return Bars("Useful bytes per second, by access pattern", "bytes/s", rows, _lines(frame, ("measured ceiling", "ceiling_bytes_per_s"), ("data sheet", "datasheet_bytes_per_s")), "the model's share of the ceiling")


def _banks(frame: pl.DataFrame) -> Bars:
    rows = [
        Bar(f"{row['what']}, {row['width']} B", row["cycles_per_load"], f"{row['cycles_per_load']:.3g} cycles, model {row['wavefronts']}", float(row["wavefronts"]))
        for row in frame.filter(pl.col("cycles_per_load").is_not_null() & ((pl.col("width") == 4) | ~pl.col("what").str.starts_with("stride"))).iter_rows(named=True)
    ]
    return Bars("Cycles of a multiprocessor for one warp's shared load", "cycles", rows, [], "the model's wavefronts")


def _latency(frame: pl.DataFrame) -> Bars:
    rows = []
    for row in frame.iter_rows(named=True):
        ns = "" if row["ns"] is None else f", {row['ns']:.0f} ns"
        rows.append(Bar(f"{row['what']}, {format_bytes(row['size_bytes'])}", row["cycles"], f"{row['cycles']:.0f} cycles{ns}"))
    return Bars("Latency of one load", "cycles", rows, [])


def _sets(frame: pl.DataFrame) -> Bars:
    rows = [Bar(f"{format_bytes(row['size_bytes'])}, again and again", row["achieved_bytes_per_s"], format_rate(row["achieved_bytes_per_s"])) for row in frame.iter_rows(named=True)]
    return Bars("Reading a set again and again, past the L1", "bytes/s", rows, _lines(frame, ("memory alone", "ceiling_bytes_per_s"), ("data sheet of the memory", "datasheet_bytes_per_s")))


def _transfers(frame: pl.DataFrame) -> Bars:
    kept = frame.filter(pl.col("direction") != "–")
    rows = [Bar(f"{row['what']} {row['direction']}, {format_bytes(row['size_bytes'])}", row["achieved_bytes_per_s"], format_rate(row["achieved_bytes_per_s"])) for row in kept.iter_rows(named=True)]
    return Bars("Copies between host and device", "bytes/s", rows, _lines(frame, ("measured ceiling", "ceiling_bytes_per_s")))


def _allocators(frame: pl.DataFrame) -> Bars:
    rows = [
        Bar(f"{row['what']}: {act}, {format_bytes(row['size_bytes'])}", row[f"{name}_us"], format_time_us(row[f"{name}_us"]))
        for row in frame.iter_rows(named=True)
        for act, name in (("allocate", "alloc"), ("free", "free"))
    ]
    return Bars("Time of a call", "µs", rows, [])


def _unified(frame: pl.DataFrame) -> Bars:
    rows = [Bar(row["what"], row["achieved_bytes_per_s"], f"{format_rate(row['achieved_bytes_per_s'])}, {format_time_us(row['median_us'])}") for row in frame.iter_rows(named=True)]
    return Bars(f"Touching {format_bytes(frame['size_bytes'].max())} of managed memory", "bytes/s", rows, [])  # type: ignore[arg-type]


_BARS: dict[str, Any] = {
    "bandwidth": _bandwidth, "coalescing": _coalescing, "bank_conflicts": _banks, "latency": _latency, "working_set": _sets, "transfers": _transfers,
    "allocators": _allocators, "unified_memory": _unified,
}  # fmt: skip


def picture(frame: ProbeFrame) -> tuple[Svg, str]:
    """Draw the bars; recorded ones are paler."""
    shown = bars(frame)
    origin = f"{frame.origin} on {frame.device}"
    sentence = f"{shown.title}, {origin}: {'; '.join(f'{row.label}: {row.words}' for row in shown.rows)}."
    most = max([row.value for row in shown.rows] + [value for _, value in shown.lines] + [row.mark or 0 for row in shown.rows], default=1.0) or 1.0
    svg = Svg(WIDTH, 62 + 22 * len(shown.rows) + 14 * (len(shown.lines) + bool(shown.mark)), sentence)
    svg.text(12, 20, shown.title, size=13, bold=True)
    svg.text(WIDTH - 12, 20, origin, anchor="end", fill=_theme.MUTED)
    wide = WIDTH - LABEL - 204
    bottom = 34 + 22 * len(shown.rows)
    for i, row in enumerate(shown.rows):
        y = 34 + 22 * i
        svg.text(LABEL - 8, y + 13, shorten(row.label, LABEL - 20, 11), anchor="end")
        svg.rect(LABEL, y + 2, max(wide * row.value / most, 1), 15, MEASURED if frame.origin == "measured" else RECORDED)
        if row.mark is not None:
            svg.line(LABEL + wide * row.mark / most, y, LABEL + wide * row.mark / most, y + 19, _theme.INK, 2)
        svg.text(LABEL + wide + 8, y + 13, shorten(row.words, 190, 11), fill=_theme.MUTED)
    for i, (name, value) in enumerate(shown.lines):
        x = LABEL + wide * value / most
        svg.line(x, 32, x, bottom, _theme.MARK, 1, "" if i else "4 3")
        svg.text(LABEL, bottom + 16 + 14 * i, f"{'dashed' if not i else 'red'} line: {name}, {format_rate(value)}", size=10, fill=_theme.MUTED)
    if shown.mark:
        svg.text(LABEL, bottom + 16 + 14 * len(shown.lines), f"black mark: {shown.mark}", size=10, fill=_theme.MUTED)
    return svg, sentence


def bundle(frame: ProbeFrame, most_rows: int = 40) -> dict[str, str]:
    """``text/html`` and ``text/plain``: where the numbers come from, the picture, the table."""
    said = frame.said()
    wrong = frame.filter(~pl.col("verified")).height if "verified" in frame.columns else 0
    notes = [said, *([f"{wrong} of {frame.height} rows gave a wrong result; their times mean nothing."] if wrong else [])]
    head = list(frame.columns)
    rows = [[_cell(name, value) for name, value in row.items()] for row in frame.head(most_rows).iter_rows(named=True)]
    cut = f" ({most_rows} of {frame.height} rows)" if frame.height > most_rows else ""
    body = "".join(f"<p>{escape(clean(note))}</p>" for note in notes) + image(*picture(frame)) + f"<details><summary>table{cut}</summary>{rows_of(said, head, rows)}</details>"
    shown = bars(frame)
    plain = [*notes, *text.aligned(["", shown.unit], [[row.label, row.words] for row in shown.rows], 100)]
    return {"text/html": Mount.of(body).wrap(body), "text/plain": "\n".join(plain)}


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name.endswith("_bytes_per_s"):
        return format_rate(value)
    if name.endswith("_us"):
        return format_time_us(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
