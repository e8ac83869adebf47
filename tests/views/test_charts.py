"""Altair charts of the frames: valid, drawn offline, refused with a reason."""

from __future__ import annotations

import polars as pl
import pytest

from nbmemprof.analyses.breakdown import breakdown as breakdown_frame
from nbmemprof.analyses.sites import sites as sites_frame
from nbmemprof.analyses.timeline import timeline as timeline_frame
from nbmemprof.errors import NbmemprofError
from nbmemprof.views.charts.breakdown import breakdown
from nbmemprof.views.charts.sites import sites
from nbmemprof.views.charts.timeline import timeline

pytest.importorskip("altair")


@pytest.mark.cost(1.1)
def test_charts_are_drawn_without_a_network(training, two_devices):
    vl_convert = pytest.importorskip("vl_convert")
    for chart, words in (
        (timeline(timeline_frame(training(), max_points=400)), ["optimizer_state", "MiB", "time since the capture"]),
        (timeline(timeline_frame(two_devices, by="site", max_points=200)), ["GPU 0", "GPU 1", "train_demo.py:19"]),
        (breakdown(breakdown_frame(training())), ["activations", "384 MiB"]),
        (sites(sites_frame(training()), top=3), ["3 of 5 lines", "model.py:20"]),
    ):
        svg = vl_convert.vegalite_to_svg(chart.to_dict())
        assert all(word in svg for word in words), [w for w in words if w not in svg]


@pytest.mark.cost(0.6)
def test_series_have_the_colours_of_the_first_view(training):
    scale = timeline(timeline_frame(training())).to_dict()["encoding"]["color"]["scale"]
    assert dict(zip(scale["domain"], scale["range"], strict=True))["weights"] == "#0072b2"


def test_too_many_rows_are_refused_with_what_to_do():
    frame = pl.DataFrame({"device": [0] * 5001, "category": ["weights"] * 5001, "size_bytes": [1] * 5001})
    with pytest.raises(NbmemprofError, match=r"5\s001 rows .* max_points=300"):
        breakdown(frame)


def test_a_frame_of_another_kind_is_refused_with_the_missing_column():
    with pytest.raises(NbmemprofError, match="needs the column 'category'"):
        breakdown(pl.DataFrame({"device": [0], "size_bytes": [1]}))
