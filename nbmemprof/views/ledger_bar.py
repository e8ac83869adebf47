"""The ledger as one bar: who holds the device's memory, up to what the driver reports."""

from __future__ import annotations

import polars as pl

from nbmemprof.units import format_bytes
from nbmemprof.views import _theme
from nbmemprof.views.svg import Svg, shorten, text_width

__all__ = ["head", "picture", "rows"]

_COLOURS = {
    "torch in use": "#0072b2", "torch rounding": "#7fb2d6", "torch cached": "#cfe3f1", "CuPy's pool in use": "#cc79a7", "CuPy's pool cached": "#ecd3e0", "cudaMallocAsync's pool in use": "#8a5fa8",
    "cudaMallocAsync's pool cached": "#d9c9e4", "CUDA context": "#542c1a", "kernel images": "#a8795e", "cuBLAS": "#e69f00", "cuDNN": "#f0c35c", "cuFFT": "#f0e442", "cuSOLVER": "#d9d38a", "NCCL": "#009e73",
    "other processes": "#55606e", "unexplained": "#c4c7cc",
}  # fmt: skip
_LINE = 19


def picture(frame: pl.DataFrame, width: int = 740) -> tuple[Svg, str] | None:
    """Draw the ledger of one device; None where the driver's number is not known."""
    lines = frame.filter((pl.col("kind") == "device") & pl.col("reported_bytes").is_not_null())
    if lines.is_empty():
        return None
    reported = int(lines["reported_bytes"][0])
    kept = [row for row in lines.iter_rows(named=True) if row["size_bytes"] is None or abs(row["size_bytes"]) > reported / 2000]
    title = f"The device's {format_bytes(reported)}, as the driver reports them"
    sentence = f"{title}: " + ", ".join(_said(row) for row in kept) + "."
    columns = 2
    height = 66 + _LINE * -(-len(kept) // columns)
    svg = Svg(width, height, sentence)
    svg.text(12, 20, title, size=13, bold=True)
    at, scale = 12.0, (width - 24) / max(sum(max(row["size_bytes"] or 0, 0) for row in kept), reported, 1)
    svg.rect(12, 30, width - 24, 18, "#eeeff1")
    for row in kept:
        wide = max(row["size_bytes"] or 0, 0) * scale
        svg.rect(at, 30, wide, 18, _COLOURS.get(row["line"], _theme.OTHER))
        at += wide
    for n, row in enumerate(kept):
        x, y = 12 + (width / columns) * (n % columns), 66 + _LINE * (n // columns)
        svg.rect(x, y - 9, 10, 10, _COLOURS.get(row["line"], _theme.OTHER), "#00000033")
        value = _value(row)
        svg.text(x + width / columns - 30, y, value, anchor="end", fill=_theme.MUTED)
        svg.text(x + 15, y, shorten(row["line"], width / columns - 60 - text_width(value, 11), 11))
    return svg, sentence


def _said(row: dict[str, object]) -> str:
    return f"{row['line']} {_value(row)}"


def _value(row: dict[str, object]) -> str:
    """Size, and the error where it is not measured; a range where there is no size."""
    size, low, high = row["size_bytes"], row["low_bytes"], row["high_bytes"]
    if not isinstance(size, int):
        return f"{format_bytes(low) if isinstance(low, int) else '?'} to {format_bytes(high) if isinstance(high, int) else '?'}"
    text = format_bytes(size)
    if isinstance(low, int) and isinstance(high, int) and low != high:
        text += f" (± {format_bytes(max(high - size, size - low))})"
    return text


def head() -> list[str]:
    """Column names of the table."""
    return ["line", "size", "from", "to", "how it is known"]


def rows(frame: pl.DataFrame) -> list[list[str]]:
    """The ledger as a table, pinned host memory at its end."""
    made = []
    for row in frame.iter_rows(named=True):
        sizes = [format_bytes(row[name], 2) if row[name] is not None else "not known" for name in ("size_bytes", "low_bytes", "high_bytes")]
        made.append([row["line"], *sizes, "; ".join(word for word in (row["evidence"], row["origin"], row["reason"]) if word and word != "none")])
    return made
