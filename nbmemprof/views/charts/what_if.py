"""What each allocator setting would have reserved, as bars with their ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from nbmemprof.views.charts import _common

if TYPE_CHECKING:
    import altair as alt

__all__ = ["what_if"]


def what_if(frame: pl.DataFrame) -> alt.FacetChart:
    """Draw peak reserved by configuration; a line over the bar is the range where addresses are unknown.

    Parameters
    ----------
    frame
        What ``mp.what_if(cap)`` returns.
    """
    alt = _common.altair()
    low, high = "peak_reserved_low_bytes", "peak_reserved_high_bytes"
    data = _common.checked(frame, ("device", "conf", low, high, "ooms", "recorded"), "what_if")
    kind = pl.when("recorded").then(pl.lit("as recorded")).otherwise(pl.lit("replayed"))
    refused = pl.when(pl.col("ooms") > 0).then(pl.format("{} refused", "ooms"))
    data = data.select(_common.device_name(data).alias("where"), pl.col("conf").replace({"": "torch's defaults"}), low, high, "ooms", kind.alias("kind"), refused.alias("refused"))
    x = alt.X(f"{high}:Q", axis=_common.bytes_axis(data[high], "peak reserved"))
    y = alt.Y("conf:N", sort=None, title=None, axis=alt.Axis(labelLimit=320))
    colour = alt.Color("kind:N", title=None, scale=alt.Scale(domain=["as recorded", "replayed"], range=["#0072b2", "#7fa8c9"]))
    bars = alt.Chart().mark_bar().encode(x=x, y=y, color=colour, tooltip=["conf:N", f"{low}:Q", f"{high}:Q", "ooms:Q"])
    ranges = alt.Chart().mark_rule(strokeWidth=2, color="#1d2025").encode(x=f"{low}:Q", x2=f"{high}:Q", y=y)
    words = alt.Chart().mark_text(align="right", dx=-6, color="#1d2025").encode(x=f"{high}:Q", y=y, text="refused:N")
    return alt.layer(bars, ranges, words, data=data).properties(width=520).facet(row=alt.Row("where:N", title=None))
