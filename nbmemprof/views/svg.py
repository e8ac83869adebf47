"""A small SVG writer: shapes, text that fits, step lines in few bytes.

Altair through vl-convert draws the same pictures, but its first one takes 0.4 s and 85 MB (see
``tests/benchmarks/bench_views.py``); a first view has to be there at once and stay below 80 kB.
"""

from __future__ import annotations

import base64
import unicodedata
from collections.abc import Sequence
from html import escape

from nbmemprof.views import _theme

__all__ = ["Svg", "clean", "middle", "nice_step", "shorten", "text_width"]

_FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,'DejaVu Sans',sans-serif"
_BIDI = {*range(0x202A, 0x202F), *range(0x2066, 0x206A)}


def clean(text: object) -> str:
    """Return text without what XML forbids or what would reorder its surroundings; names stay whole."""
    return "".join(_kept(c) for c in str(text)).strip()


def _kept(char: str) -> str:
    code = ord(char)
    if char in "\t\n\r\u2028\u2029":
        return " "
    if code < 0x20 or 0x7F <= code < 0xA0 or code in _BIDI or code & 0xFFFE == 0xFFFE:
        return ""
    return "\ufffd" if 0xD800 <= code <= 0xDFFF else char


def text_width(text: str, size: float) -> float:
    """Estimate the width of text in pixels in the widest of the fonts; wide East Asian characters count as one em."""
    return size * 1.06 * sum(_advance(c) for c in text)


def _advance(char: str) -> float:
    if char in "ijl.,:;|!'()[]/ tfrI":
        return 0.36
    if char in "mwMW%@…":
        return 0.92
    if unicodedata.combining(char):
        return 0.0
    if unicodedata.east_asian_width(char) in "WF":
        return 1.05
    return 0.68 if char.isupper() else 0.6


def shorten(text: str, width: float, size: float) -> str:
    """Cut the middle out of text that is wider than ``width`` pixels; both ends are kept."""
    text = middle(text, 400)
    if text_width(text, size) <= width:
        return text
    head, tail = len(text) * 2 // 5, len(text) - len(text) * 3 // 5
    while head + tail > 2 and text_width(text[:head] + "…" + text[len(text) - tail :], size) > width:
        head, tail = (head - 1, tail) if head * 3 > tail * 2 else (head, tail - 1)
    return text[:head] + "…" + text[len(text) - tail :]


def middle(text: object, length: int = 48) -> str:
    """Cut the middle out of text of more than ``length`` characters, for sentences; tables have it whole."""
    whole = clean(text)
    return whole if len(whole) <= length else whole[: length * 2 // 5] + "…" + whole[len(whole) - (length - length * 2 // 5 - 1) :]


def nice_step(span: float, ticks: int) -> float:
    """Return the step of 1, 2 or 5 times a power of ten that gives about ``ticks`` steps in ``span``."""
    raw = max(span, 1e-12) / max(ticks, 1)
    power = 1.0
    while power * 10 <= raw:
        power *= 10
    while power > raw:
        power /= 10
    return next(step * power for step in (1, 2, 5, 10) if step * power >= raw * 0.8)


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


class Svg:
    """One picture on its own light card.

    Parameters
    ----------
    width, height
        Size in pixels.
    label
        The sentence that the picture shows; it becomes the title element.
    """

    def __init__(self, width: int, height: int, label: str) -> None:
        self.width, self.height = width, height
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" font-family="{_FONT}" font-size="11">'
            f"<title>{escape(clean(label))}</title>"
            f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="5" fill="{_theme.CARD}" stroke="{_theme.GRID}"/>'
        )
        self._parts = [head]

    def rect(self, x: float, y: float, width: float, height: float, fill: str, stroke: str = "") -> None:
        """Add a filled box."""
        line = f' stroke="{stroke}"' if stroke else ""
        self._parts.append(f'<rect x="{_number(x)}" y="{_number(y)}" width="{_number(max(width, 0))}" height="{_number(max(height, 0))}" fill="{fill}"{line}/>')

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str, width: float = 1, dash: str = "") -> None:
        """Add a straight line."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        ends = f'x1="{_number(x1)}" y1="{_number(y1)}" x2="{_number(x2)}" y2="{_number(y2)}"'
        self._parts.append(f'<line {ends} stroke="{stroke}" stroke-width="{_number(width)}"{dashes}/>')

    def circle(self, x: float, y: float, radius: float, fill: str) -> None:
        """Add a dot with a light rim."""
        self._parts.append(f'<circle cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}" fill="{fill}" stroke="{_theme.CARD}" stroke-width="1.5"/>')

    def path(self, d: str, fill: str) -> None:
        """Add a closed shape."""
        self._parts.append(f'<path d="{d}" fill="{fill}"/>')

    def text(
        self, x: float, y: float, text: str, *, size: float = 11, fill: str = _theme.INK, anchor: str = "start", bold: bool = False, halo: bool = False
    ) -> None:
        """Add text; ``halo`` keeps it readable on any colour."""
        more = "" if anchor == "start" else f' text-anchor="{anchor}"'
        more += "" if size == 11 else f' font-size="{_number(size)}"'
        more += ' font-weight="600"' if bold else ""
        more += f' stroke="{_theme.CARD}" stroke-width="3" stroke-linejoin="round" paint-order="stroke"' if halo else ""
        self._parts.append(f'<text x="{_number(x)}" y="{_number(y)}" fill="{fill}"{more}>{escape(clean(text))}</text>')

    def steps(
        self, xs: Sequence[float], ys: Sequence[float], x_end: float, *, base: float | None = None, fill: str = "none", stroke: str = "", dash: str = ""
    ) -> None:
        """Add a step line through the points, held until ``x_end``; with ``base`` it is an area down to there.

        Coordinates are whole tenths of a pixel and relative: about six bytes a step.
        """
        if not xs:
            return
        x, y = round(xs[0] * 10), round(ys[0] * 10)
        moves = [f"M{x} {y}" if base is None else f"M{x} {round(base * 10)}V{y}"]
        for next_x, next_y in zip(xs[1:], ys[1:], strict=True):
            wide, high = round(next_x * 10), round(next_y * 10)
            if high != y:  # a level that stays is drawn by the next change
                moves.append(f"h{wide - x}v{high - y}" if wide != x else f"v{high - y}")
                x, y = wide, high
        moves.append(f"H{round(x_end * 10)}" + ("" if base is None else f"V{round(base * 10)}z"))
        line = f' stroke="{stroke}" stroke-width="14"' + (f' stroke-dasharray="{dash}"' if dash else "") if stroke else ""
        self._parts.append(f'<path transform="scale(.1)" d="{"".join(moves)}" fill="{fill}"{line}/>')

    def markup(self) -> str:
        """Return the whole document."""
        return "".join(self._parts) + "</svg>"

    def data_uri(self) -> str:
        """Return the document as an image source that survives a notebook's sanitizer."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.markup().encode("utf-8", "replace")).decode()
