"""A probe as bars: achieved, with what it is held against."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from nbmemprof.views import probes as view
from nbmemprof.views.charts import _common

if TYPE_CHECKING:
    import altair as alt

    from nbmemprof.gpu.probes import ProbeFrame

__all__ = ["probes"]

_RATE = "datum.value >= 1e12 ? format(datum.value / 1e12, '.3~r') + ' TB/s' : datum.value >= 1e9 ? format(datum.value / 1e9, '.3~r') + ' GB/s' : format(datum.value / 1e6, '.3~r') + ' MB/s'"


def probes(frame: ProbeFrame) -> alt.LayerChart:
    """Draw a probe.

    Parameters
    ----------
    frame
        What a function of ``mp.probes`` returns: its ``origin`` and ``device`` are in the title. Dashed lines are the measured ceiling and
        the data sheet; a black tick is what the model says of a row.
    """
    alt = _common.altair()
    shown = view.bars(frame)
    data = pl.DataFrame([(row.label, row.value, row.words, row.mark) for row in shown.rows], schema={"label": pl.String, "value": pl.Float64, "words": pl.String, "mark": pl.Float64}, orient="row")
    axis = alt.Axis(labelExpr=_RATE, title="bytes per second", tickCount=5) if shown.unit == "bytes/s" else alt.Axis(title=shown.unit)
    y = alt.Y("label:N", sort=None, title=None, axis=alt.Axis(labelLimit=320))
    bars = alt.Chart(data).mark_bar(color="#0072b2" if frame.origin == "measured" else "#7fa8c9").encode(x=alt.X("value:Q", axis=axis), y=y, tooltip=["label:N", "words:N"])
    layers = [bars]
    if shown.mark:
        layers.append(alt.Chart(data).mark_tick(color="#1d2025", thickness=2).encode(x="mark:Q", y=y))
    if shown.lines:
        held = pl.DataFrame(shown.lines, schema={"against": pl.String, "value": pl.Float64}, orient="row")
        layers.append(alt.Chart(held).mark_rule(strokeWidth=1.5, strokeDash=[4, 3]).encode(x="value:Q", color=alt.Color("against:N", title=None, scale=alt.Scale(range=["#b3261e", "#555b66"]))))
    return alt.layer(*layers).properties(width=480, title=alt.Title(shown.title, subtitle=frame.said()))
