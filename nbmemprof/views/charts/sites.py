"""The lines that held most, as bars."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from nbmemprof.views.charts import _common

if TYPE_CHECKING:
    import altair as alt

__all__ = ["sites"]


def sites(frame: pl.DataFrame, top: int = 20) -> alt.Chart:
    """Draw the largest sites, a panel a device.

    Parameters
    ----------
    frame
        What ``mp.sites(cap)`` returns.
    top
        How many lines a device are drawn; the title says of how many.
    """
    alt = _common.altair()
    data = _common.checked(frame.head(_common.MAX_ROWS), ("device", "site", "size_bytes"), "sites")
    data = data.with_columns(_common.device_name(data).alias("where"), pl.col("site").fill_null("no stack"))
    data = data.group_by("where", "site", maintain_order=True).agg(pl.col("size_bytes").sum()).sort("size_bytes", descending=True)
    shown = data.group_by("where", maintain_order=True).head(top)
    title = f"{shown.height} of {data.height} lines" if shown.height < data.height else f"{data.height} lines"
    return (
        alt.Chart(shown, title=title)
        .mark_bar()
        .encode(
            x=alt.X("size_bytes:Q", axis=_common.bytes_axis(shown["size_bytes"], "bytes at the peak")),
            y=alt.Y("site:N", sort="-x", title=None, axis=alt.Axis(labelLimit=260)),
            tooltip=["site:N", "size_bytes:Q"],
            row=alt.Row("where:N", title=None),
        )
        .properties(width=600)
    )
