"""What held memory at one moment, as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from nbmemprof.views import _theme
from nbmemprof.views.charts import _common

if TYPE_CHECKING:
    import altair as alt

__all__ = ["breakdown"]


def breakdown(frame: pl.DataFrame) -> alt.Chart:
    """Draw a breakdown, a panel a device.

    Parameters
    ----------
    frame
        What ``mp.breakdown(cap)`` returns.
    """
    alt = _common.altair()
    data = _common.checked(frame, ("device", "category", "size_bytes"), "breakdown")
    data = data.group_by(_common.device_name(data).alias("where"), pl.col("category").cast(pl.String), maintain_order=True).agg(pl.col("size_bytes").sum())
    names = sorted(data["category"].unique(), key=_theme.rank_of)
    return (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X("size_bytes:Q", axis=_common.bytes_axis(data["size_bytes"], "bytes at the peak")),
            y=alt.Y("category:N", sort="-x", title=None),
            color=alt.Color("category:N", scale=_common.scale(names), legend=None),
            tooltip=["category:N", "size_bytes:Q"],
            row=alt.Row("where:N", title=None),
        )
        .properties(width=600)
    )
