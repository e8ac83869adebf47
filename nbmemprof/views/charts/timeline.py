"""Memory over time as a stacked area."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from nbmemprof.views import _theme
from nbmemprof.views.charts import _common

if TYPE_CHECKING:
    import altair as alt

__all__ = ["timeline"]


def timeline(frame: pl.DataFrame) -> alt.Chart:
    """Draw a timeline, a panel a device.

    Parameters
    ----------
    frame
        What ``mp.timeline(cap, max_points=...)`` returns, at most 5,000 rows; a series ``reserved`` is
        left out of the stack (give it alone to see it).
    """
    alt = _common.altair()
    timed = frame.height > 0 and "time_us" in frame.columns and frame["time_us"].null_count() == 0
    data = _common.checked(frame, ("device", "time_us", "seq", "series", "size_bytes"), "timeline").with_columns(
        pl.col("series").cast(pl.String), _common.device_name(frame).alias("where"), (pl.col("time_us") / 1e3).round(4).alias("time_ms")
    )
    if data["series"].n_unique() > 1:
        data = data.filter(pl.col("series") != "reserved")
    names = sorted(data["series"].unique(), key=lambda n: (_theme.rank_of(n), n))
    data = data.with_columns(pl.col("series").replace_strict({n: i for i, n in enumerate(names)}, return_dtype=pl.Int64).alias("place"))
    sums = data.group_by("where", "seq").agg(pl.col("size_bytes").sum())["size_bytes"]
    x = alt.X("time_ms:Q", title="time since the capture's start (ms)") if timed else alt.X("seq:Q", title="events, in order")
    return (
        alt.Chart(data.select("where", "time_ms" if timed else "seq", "series", "place", "size_bytes"))
        .mark_area(interpolate="step-after")
        .encode(
            x=x,
            y=alt.Y("size_bytes:Q", stack="zero", axis=_common.bytes_axis(sums, "allocated")),
            color=alt.Color("series:N", scale=_common.scale(names), title=None),
            order=alt.Order("place:O"),
            tooltip=["series:N", "size_bytes:Q"],
            row=alt.Row("where:N", title=None),
        )
        .properties(width=600, height=200)
    )
