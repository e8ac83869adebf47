"""Columns and keys that the parts of the heap share."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import schema
from nbmemprof.heap import _follow

__all__ = ["KEY", "Array", "absent", "action_codes", "groups", "int64", "last_picture", "matches", "part", "place_of", "rows_of"]

Array = npt.NDArray[Any]
KEY = ["rank", "device", "kind"]
_CODES = {
    "alloc": _follow.ALLOC, "free_requested": _follow.FREE, "free_completed": _follow.DONE,
    "segment_alloc": _follow.SEGMENT_ALLOC, "segment_free": _follow.SEGMENT_FREE, "segment_map": _follow.MAP, "segment_unmap": _follow.UNMAP,
}  # fmt: skip


def last_picture(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of the highest ``snapshot_id``."""
    return frame if frame.is_empty() or frame["snapshot_id"].n_unique() == 1 else frame.filter(pl.col("snapshot_id") == pl.col("snapshot_id").max())


def action_codes(action: pl.Series) -> npt.NDArray[np.int8]:
    """Actions as the small numbers of :mod:`nbmemprof.heap._follow`."""
    physical = action.to_physical()
    known = pl.DataFrame({"word": action.unique().drop_nulls()}).with_columns(pl.col("word").to_physical().alias("number"))
    table = np.full(int(known["number"].max() or 0) + 2, _follow.OTHER, np.int8)  # type: ignore[arg-type]
    for word, number in known.iter_rows():
        table[number] = _CODES.get(word, _follow.OTHER)
    codes: npt.NDArray[np.int8] = table[physical.fill_null(len(table) - 1).to_numpy()]
    return codes


def groups(*frames: pl.DataFrame) -> list[tuple[Any, ...]]:
    keys = pl.concat([f.select(KEY).unique() for f in frames]).unique().sort(KEY, nulls_last=False)
    return keys.rows()


def matches(key: tuple[Any, ...]) -> pl.Expr:
    """Rows of one (rank, device, kind)."""
    return pl.all_horizontal(pl.col(name).eq_missing(pl.lit(value, schema.dtypes("events")[name])) for name, value in zip(KEY, key, strict=True))


def part(frame: pl.DataFrame, key: tuple[Any, ...]) -> pl.DataFrame:
    return frame.filter(matches(key))


def rows_of(events: pl.DataFrame, key: tuple[Any, ...]) -> Array | None:
    """Positions of the group's events; None for all of them."""
    if all(events[name].n_unique() <= 1 for name in KEY):
        here = events.height > 0 and events.select(KEY).row(0) == key
        return None if here else np.zeros(0, np.int64)
    return events.select(pl.arg_where(matches(key))).to_series().to_numpy().astype(np.int64)


def int64(series: pl.Series) -> Array:
    filled = series.fill_null(0)
    return filled.to_numpy().view(np.int64) if filled.dtype == pl.UInt64 else filled.to_numpy().astype(np.int64, copy=False)


def absent(index: Array) -> pl.Series:
    """Positions as a Polars index; negative ones become null."""
    series = pl.Series(index)
    return series.set(series < 0, None) if len(series) else series.cast(pl.Int64)


def place_of(key: tuple[Any, ...]) -> str:
    """A device in words."""
    return f"device {key[1]}" if key[1] is not None else f"{key[2]} memory"
