"""The tries of a search for the largest batch, against the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from nbmemprof.views import _theme
from nbmemprof.views.charts import _common

if TYPE_CHECKING:
    import altair as alt

__all__ = ["max_batch"]


def max_batch(tries: pl.DataFrame, limit_bytes: int | None = None) -> alt.LayerChart:
    """Draw peak allocated by batch, what fitted and what did not.

    Parameters
    ----------
    tries
        ``mp.max_batch(...).tries``.
    limit_bytes
        Where the limit is drawn; None: nowhere.
    """
    alt = _common.altair()
    data = _common.checked(tries, ("number", "batch", "fits", "purpose", "peak_allocated_bytes"), "max_batch")
    ended = pl.when("fits").then(pl.lit("fits")).otherwise(pl.lit("out of memory")).alias("ended")
    data = data.filter(pl.col("peak_allocated_bytes").is_not_null()).select("number", "batch", "purpose", "peak_allocated_bytes", ended)
    x = alt.X("batch:Q", title="batch")
    sizes = pl.Series([*data["peak_allocated_bytes"].to_list(), limit_bytes or 0])
    y = alt.Y("peak_allocated_bytes:Q", axis=_common.bytes_axis(sizes, "peak allocated"))
    ends: dict[str, Any] = {"domain": ["fits", "out of memory"]}
    colour = alt.Color("ended:N", title=None, scale=alt.Scale(**ends, range=["#0072b2", _theme.MARK]))
    shape = alt.Shape("ended:N", title=None, scale=alt.Scale(**ends, range=["circle", "cross"]))
    dots = (
        alt.Chart(data)
        .mark_point(filled=True, size=90)
        .encode(x=x, y=y, color=colour, shape=shape, tooltip=["number:Q", "batch:Q", "purpose:N", "ended:N", "peak_allocated_bytes:Q"])
    )
    names = alt.Chart(data).mark_text(dx=-9, dy=-9, color=_theme.MUTED).encode(x=x, y=y, text="number:Q")
    layers = [dots, names]
    if limit_bytes is not None:
        layers.insert(0, alt.Chart(alt.Data(values=[{"limit": limit_bytes}])).mark_rule(color=_theme.MARK, strokeDash=[5, 3]).encode(y="limit:Q"))
    return alt.layer(*layers).properties(width=520, height=220)
