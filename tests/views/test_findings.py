"""Findings: a number and a next step each, the most urgent first."""

from __future__ import annotations

import dataclasses

import polars as pl

from nbmemprof import heap, schema
from nbmemprof.views._facts import facts
from nbmemprof.views.findings import _gap, findings, sentences

GIB = 1 << 30


def one(capture, words: str) -> str:
    found = [s for s in findings(capture) if words in s]
    assert len(found) == 1, findings(capture)
    return found[0]


def test_an_out_of_memory_error_comes_first_with_its_sizes(training):
    said = findings(training(oom=True))
    assert said[0].startswith("Out of memory")
    assert "4 GiB" in said[0] and "1 GiB" in said[0]


def test_the_line_that_held_most_is_named_with_its_share(training):
    assert one(training(), "held the most") == "At the peak model.py:20 held the most: 400 MiB in 4 blocks, 40 % of all."


def test_a_leak_is_named_with_line_and_bytes_an_iteration(two_devices):
    said = one(two_devices, "every iteration")
    assert said.startswith("GPU 1: train_demo.py:19 keeps 640 KiB more every iteration: ")
    assert "detach()" in said


def test_what_a_cell_keeps_is_named_with_its_line(training):
    assert "540 MiB stay allocated after this cell, most of it from model.py:8 (300 MiB)" in one(training(), "stay allocated")


def test_reserved_far_above_allocated_is_said_in_plain_words(training):
    said = one(training(), "more than the tensors needed")
    assert said.startswith("Torch reserved ")
    assert "expandable_segments" in said
    assert "expandable_segments" not in one(training(conf="expandable_segments:True"), "more than the tensors needed")


def test_many_times_as_much_is_said_as_times_and_not_in_percent(training):
    capture = training()
    device = dataclasses.replace(facts(capture).devices[0], row={"peak_allocated_bytes": 4 << 20, "peak_reserved_bytes": 256 << 20})
    (said,) = _gap(facts(capture), device)
    assert said.startswith("Torch reserved 252 MiB more than the tensors needed at their peak, 64 times as much in all.")
    assert "%" not in said


def test_a_peak_near_the_limit_warns_of_the_next_batch(training):
    assert "of the 1.6 GiB limit" in one(training(limit_bytes=int(1.6 * GIB)), "next larger batch")
    assert not [s for s in findings(training(limit_bytes=80 * GIB)) if "next larger batch" in s]


def test_dropped_events_are_said_as_n_of_m(training):
    capture = training(dropped={"events": 1000})
    assert f"1\u202f000 of {1000 + capture.events.height:,}".replace(",", "\u202f") in one(capture, "dropped")


def test_warnings_are_said_as_the_source_says_them(training):
    assert one(training(warnings=["history truncated: the ring kept 100 events"]), "ring kept").startswith("History truncated: the ring")


def test_an_expensive_recording_is_said(training):
    assert "Recording took 12 % of this cell's time" in one(training(recording={"cost_fraction": 0.12}), "Recording took")
    assert not [s for s in findings(training(recording={"cost_fraction": 0.01})) if "Recording took" in s]


def test_silent_devices_are_named_and_not_drawn(training):
    capture = training()
    note = schema.fill("events", {"seq": [capture.events.height], "time_us": [1.0], "action": "annotate", "kind": "device", "source": "torch", "device": 5})
    both = heap.build({"events": pl.concat([capture.events, note]), "stacks": capture.stacks}, source="torch_history")
    assert one(both, "Nothing happened on") == "Nothing happened on GPU 5."
    assert [d.device for d in facts(both).devices] == [0]


def test_many_findings_are_cut_with_n_of_m_and_whole_in_the_report(training):
    capture = training(warnings=[f"malformed row {i}" for i in range(40)])
    assert findings(capture)[-1].startswith("12 of ")
    assert len(sentences(facts(capture), limit=None)) > 40


def test_a_calm_capture_has_no_alarms(training):
    said = findings(training(on="host"))
    assert not [s for s in said if "failed" in s or "memory:" in s or "Out of" in s], said
