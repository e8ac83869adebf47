"""What the charts share: the door to Altair, its row limit, an axis in binary units."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import polars as pl

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_count
from nbmemprof.views import _theme, pictures

__all__ = ["MAX_ROWS", "altair", "bytes_axis", "checked", "device_name", "scale"]

MAX_ROWS = 5000  # Altair's own limit
_LABEL = (
    "datum.value >= 1099511627776 ? format(datum.value / 1099511627776, '~r') + ' TiB' : "
    "datum.value >= 1073741824 ? format(datum.value / 1073741824, '.3~r') + ' GiB' : "
    "datum.value >= 1048576 ? format(datum.value / 1048576, '.4~r') + ' MiB' : "
    "datum.value >= 1024 ? format(datum.value / 1024, '.4~r') + ' KiB' : datum.value + ' B'"
)


def altair() -> ModuleType:
    """Return Altair, or say what to install."""
    return _optional.require("altair", feature="A chart")


def checked(frame: pl.DataFrame, columns: tuple[str, ...], what: str) -> pl.DataFrame:
    """Return the frame if it can be drawn.

    Raises
    ------
    NbmemprofError
        Names the missing column, or the number of rows and how to get fewer.
    """
    for name in columns:
        if name not in frame.columns:
            raise NbmemprofError(f"A chart of {what} needs the column {name!r}; the frame has: {', '.join(frame.columns)}. Pass what mp.{what}(cap) returns.")
    if frame.height > MAX_ROWS:
        raise NbmemprofError(
            f"{format_count(frame.height)} rows are more than Altair draws ({MAX_ROWS}). Ask the analysis for fewer: max_points=300 or top=20."
        )
    return frame


def bytes_axis(sizes: pl.Series, title: str) -> Any:
    """Return an axis up to the largest of the sizes, with round binary ticks and labels in KiB, MiB, GiB."""
    return altair().Axis(labelExpr=_LABEL, values=pictures.ticks(1.05 * max(sizes.to_list(), default=0), 5), title=title)


def scale(names: list[str]) -> Any:
    """Return the colours of the first view for these series."""
    return altair().Scale(domain=names, range=[_theme.colour(n, i) for i, n in enumerate(names)])


def device_name(frame: pl.DataFrame) -> pl.Expr:
    """Name the device (and rank) of each row as the first view does."""
    device = pl.when(pl.col("device").is_null()).then(pl.lit("CPU")).otherwise(pl.format("GPU {}", pl.col("device")))
    return pl.when(pl.col("rank").is_null()).then(device).otherwise(pl.format("rank {}, {}", pl.col("rank"), device)) if "rank" in frame.columns else device
