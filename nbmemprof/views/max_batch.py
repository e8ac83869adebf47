"""The answer of ``mp.max_batch``: a sentence, the tries drawn against the limit, a table."""

from __future__ import annotations

from html import escape
from typing import Any

from nbmemprof.units import format_bytes
from nbmemprof.views import _theme, pictures, text
from nbmemprof.views.first import Mount, image, rows_of
from nbmemprof.views.svg import Svg, clean, nice_step, shorten, text_width

__all__ = ["bundle", "picture", "table"]

_WIDTH, _HEIGHT = 740, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 24, 42, 212
_FITS, _LINE = "#0072b2", "#9ec3dd"


def bundle(result: Any) -> dict[str, str]:
    """Return ``text/html`` and ``text/plain`` of a search's result."""
    said = [line for line in (result.sentence, result.cost, *result.notes) if line]
    title, head, rows = table(result)
    drawn = picture(result)
    body = f"<p><strong>{escape(clean(said[0]))}</strong></p>" + "".join(f"<p>{escape(clean(s))}</p>" for s in said[1:])
    body += image(*drawn) if drawn else ""
    body += f"<details><summary>{escape(clean(title))}</summary>{rows_of(title, head, rows)}</details>"
    return {"text/html": Mount.of(body).wrap(body), "text/plain": "\n".join([*map(clean, said), "", title, *text.aligned(head, rows, 100)])}


def table(result: Any) -> tuple[str, list[str], list[list[str]]]:
    """The tries as title, head and rows."""
    rows = [
        [str(row["number"]), str(row["batch"]), "fits" if row["fits"] else "out of memory", row["purpose"], format_bytes(row["peak_allocated_bytes"]), format_bytes(row["peak_reserved_bytes"]),
         "–" if row["retries"] is None else str(row["retries"]), f"{row['seconds']:.2f} s"]
        for row in result.tries.iter_rows(named=True)
    ]  # fmt: skip
    return (
        f"The tries, two full steps each ({result.origin})",
        ["try", "batch", "ended", "why tried", "peak allocated", "peak reserved", "retries", "took"],
        rows,
    )


def picture(result: Any) -> tuple[Svg, str] | None:
    """Draw peak allocated against the batch, with the limit; None where no peak was measured."""
    rows = [row for row in result.tries.iter_rows(named=True) if row["peak_allocated_bytes"] is not None]
    if not rows:
        return None
    size = result.room.bytes
    right = 1.06 * max(row["batch"] for row in rows)
    top = 1.12 * max([*(row["peak_allocated_bytes"] for row in rows), size if size and size < 3 * max(r["peak_allocated_bytes"] for r in rows) else 0])
    words = [
        f"try {row['number']} at {row['batch']} " + (f"fits with {format_bytes(row['peak_allocated_bytes'])}" if row["fits"] else "runs out of memory")
        for row in rows
    ]
    sentence = f"Peak allocated by batch{f', limit {format_bytes(size)}' if size else ''}: {'; '.join(words)}."
    svg = Svg(_WIDTH, _HEIGHT, sentence)
    plot = _Plot(svg, right, top)
    plot.frame("Peak of allocated memory by batch", result.origin)
    if size and size <= top:
        plot.level(
            size, f"limit {format_bytes(size)}" if result.room.limit_bytes is not None and size == result.room.limit_bytes else f"capacity {format_bytes(size)}"
        )
    plot.cost(result)
    for row in rows:
        plot.tried(row, result.batch, result.peak_bytes(row["batch"]))
    return svg, sentence


class _Plot:
    """Scales and marks of the picture."""

    def __init__(self, svg: Svg, right: float, top: float) -> None:
        self.svg, self.right, self.top = svg, right, top

    def x(self, batch: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * batch / self.right

    def y(self, size: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * size / self.top

    def frame(self, title: str, origin: str) -> None:
        svg = self.svg
        svg.text(12, 20, title, size=13, bold=True)
        svg.text(12 + text_width(title, 14) + 10, 20, f"{origin}; two full steps each, numbered in the order of the tries", fill=_theme.MUTED)
        for size in pictures.ticks(self.top, 4):
            svg.line(_LEFT, self.y(size), _WIDTH - _RIGHT, self.y(size), _theme.GRID)
            svg.text(_LEFT - 6, self.y(size) + 4, format_bytes(size), anchor="end", fill=_theme.MUTED)
        step = max(nice_step(self.right, 6), 1)
        at = 0.0
        while at <= self.right:
            svg.text(self.x(at), _BOTTOM + 16, f"{at:g}", anchor="middle", fill=_theme.MUTED)
            at += step
        svg.text(_WIDTH - _RIGHT, _BOTTOM + 31, "batch", anchor="end", fill=_theme.MUTED)

    def level(self, size: int, words: str) -> None:
        y = self.y(size)
        self.svg.line(_LEFT, y, _WIDTH - _RIGHT, y, _theme.MARK, 1.4, "5 3")
        self.svg.text(_LEFT + 6, y - 5, words, fill=_theme.MARK, bold=True, halo=True)

    def cost(self, result: Any) -> None:
        if result.per_sample_bytes is None:
            return
        start, end = max(result.fixed_bytes, 0), result.fixed_bytes + result.per_sample_bytes * self.right
        last = self.right if end <= self.top else (self.top - result.fixed_bytes) / max(result.per_sample_bytes, 1)
        self.svg.line(self.x(0), self.y(start), self.x(last), self.y(min(end, self.top)), _LINE, 1.6)

    def tried(self, row: dict[str, Any], answer: int, wanted: int | None) -> None:
        """A dot where it fitted; a cross where it did not, at the height that it would have needed."""
        x, number = self.x(row["batch"]), str(row["number"])
        if row["fits"]:
            y = self.y(row["peak_allocated_bytes"])
            self.svg.circle(x, y, 5 if row["batch"] == answer else 4, _FITS)
            self.svg.text(x - 8, y - 6, number, anchor="end", size=10, fill=_theme.MUTED, halo=True)
            if row["batch"] == answer:
                words = shorten(f"{answer} fits: {format_bytes(row['peak_allocated_bytes'])}", 260, 11)
                self.svg.text(x - 10, y + 16, words, anchor="end", bold=True, halo=True)
            return
        y = max(self.y(max(wanted or 0, row["peak_allocated_bytes"])), _TOP)
        for dx in (-4, 4):
            self.svg.line(x - dx, y - 4, x + dx, y + 4, _theme.MARK, 2)
        self.svg.text(x + 8, y - 6, number, size=10, fill=_theme.MARK, halo=True)
