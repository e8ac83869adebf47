"""The headline and the plain report say the numbers of the frames."""

from __future__ import annotations

import polars as pl
import pytest

from nbmemprof import schema
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes
from nbmemprof.views import text
from nbmemprof.views._facts import Device, facts


def test_the_headline_of_a_cell_has_peak_reserved_kept_parts_cost_and_origin(training):
    line = text.headline(training(recording={"cost_fraction": 0.021}, device="NVIDIA H200"))
    assert line == (
        "peak 1010 MiB (reserved 1.7 GiB) · kept 540 MiB · activations 400, weights 300, optimizer state 240, gradients 50, … "
        "· recording cost ~2 % · measured here on NVIDIA H200"
    )


def test_a_range_across_units_shows_both():
    peaks = {"peak_allocated_bytes": 4 << 10, "peak_allocated_low_bytes": 3 << 10, "peak_allocated_high_bytes": 2 << 20}
    device = Device(None, 0, "device", peaks, pl.DataFrame(), pl.DataFrame(), None, "")
    assert text._peak(device) == "peak 4 KiB (between 3 KiB and 2 MiB)"


def test_parts_in_another_unit_than_what_was_kept_have_their_own(training):
    capture = training()
    capture.meta["counters"] = {"0": {"start_allocated_bytes": (540 << 20) - 512}}
    assert "kept 512 B · activations 400 MiB, weights 300, " in text.headline(capture)


def test_without_categories_the_lines_are_named(training):
    assert "at the peak model.py:20 400, model.py:8 300, train.py:61 240" in text.headline(training(categories=False))


def test_without_categories_and_stacks_it_says_unknown(training):
    assert "what it is for: unknown" in text.headline(training(categories=False, stacks=False))


def test_host_memory_is_named_cpu_and_has_no_reserved(training):
    line = text.headline(training(on="host"))
    assert line.startswith("CPU: peak 1010 MiB · kept 540 MiB")
    assert "reserved" not in line


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ("measured", "measured here"),
        ("recorded", "recorded elsewhere"),
        ("replayed", "replayed, not measured"),
        ("predicted", "predicted, not measured"),
        ("modelled", "modelled, not measured"),
    ],
)
def test_every_origin_is_said(training, origin, words):
    assert words in text.headline(training(origin=origin))
    assert words in text.report(training(origin=origin))


def test_a_snapshot_says_what_is_live_at_the_end_not_what_a_cell_kept(two_devices):
    assert "82.8 MiB live at the end" in text.headline(two_devices)
    assert "kept" not in text.headline(two_devices)


def test_several_devices_have_a_line_each_the_busiest_first(two_devices):
    lines = text.headline(two_devices).split("\n")
    assert [line.partition(":")[0] for line in lines] == ["GPU 1", "GPU 0"]


def test_released_memory_is_said_as_released(training):
    capture = training()
    capture.meta["counters"] = {"0": {"start_allocated_bytes": 600 << 20}}
    assert "released 60 MiB" in text.headline(capture)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({"source": "torch_history"}, "Profile a cell that creates tensors"),
        ({"source": "torch_snapshot"}, "_record_memory_history"),
        ({"source": "none", "warnings": ["empty: torch was not imported"]}, "torch was not imported"),
    ],
)
def test_an_empty_capture_says_why_and_what_to_do(meta, words):
    assert words in text.headline(Capture.build({}, **meta))


def test_an_empty_capture_runs_no_analysis():
    known = facts(Capture.build({}))
    assert known.is_empty and not known._answers


def test_the_report_has_headline_findings_and_aligned_tables(training):
    lines = text.report(training()).split("\n")
    assert lines[0].startswith("peak 1010 MiB")
    head = lines.index("What held memory at the peak") + 1
    assert lines[head].split() == ["for", "size", "requested", "share", "known", "by", "origin"]
    ends = {line.index("MiB", 10) for line in lines[head + 1 : head + 4]}
    assert len(ends) == 1, "sizes stand under each other"


def test_a_cut_table_says_n_of_m(training):
    assert "Lines that held most at the peak (2 of 5)" in text.report(training(), top=2)


def test_the_numbers_table_agrees_with_summary(two_devices):
    known = facts(two_devices)
    frame = summary(two_devices)
    for device in known.devices:
        row = frame.filter(pl.col("device") == device.device).row(0, named=True)
        shown = dict(text.tables(known, device, 10)[0][2])
        assert shown["peak allocated"] == format_bytes(row["peak_allocated_bytes"], 2)
        assert shown["reserved at the end"] == format_bytes(row["end_reserved_bytes"], 2)
        assert shown["events"] == str(row["events"])


def test_null_is_a_dash_and_never_a_zero():
    assert text.cell("size_bytes", None) == "–"
    assert text.cell("site", None) == "no stack"
    assert text.cell("size_bytes", 0) == "0 B"


def test_markup_and_control_characters_stay_harmless_in_text(markup):
    plain = text.report(markup)
    assert not any(ord(c) < 32 and c != "\n" for c in plain)


def test_a_failing_analysis_is_said_and_the_rest_stays(training, monkeypatch):
    from nbmemprof.analyses import leaks

    def broken(capture):
        raise ValueError("no such thing")

    monkeypatch.setattr(leaks, "leaks", broken)
    plain = text.report(training())
    assert "peak 1010 MiB" in plain
    assert "The analysis leaks failed (ValueError: no such thing)" in plain


def test_tables_of_an_empty_schema_are_no_trouble():
    assert text.headline(Capture.build({"events": schema.empty("events")}, source="torch_cpu")).startswith("peak 0 B")
