"""Whoever asks a question with something that is no capture hears what to give instead."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from strategies import MIB, Allocator, capture, frames

import nbmemprof as mp

QUESTIONS = [
    name for name, module in mp._NAMES.items()
    if module.startswith(("analyses.", "allocator.")) and next(iter(inspect.signature(getattr(mp, name)).parameters), "") == "capture"
]  # fmt: skip


def made():
    a = Allocator()
    a.malloc(3 * MIB, frames("model.py:5 build"))
    return capture([a])


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ("run.nbmem", r"'run.nbmem' is a path. Open it first: mp.{name}\(mp.load\('run.nbmem'\)\)"),
        (Path("a") / "b", "is a path"),
        (3, "got an object of type int. Give what mp.record"),
        (mp.Capture, "got an object of type type"),
    ],
)
def test_what_is_no_capture_is_named_with_the_way_to_one(name, given, text):
    for call in (lambda: getattr(mp, name)(given), lambda: getattr(mp, name)(capture=given)):
        with pytest.raises(mp.NbmemprofError, match=text.format(name=name)):
            call()


def test_there_are_questions_and_none_is_refused():
    assert {"summary", "leaks", "lifetimes", "breakdown", "oom", "advise", "timeline", "replay", "what_if"} <= set(QUESTIONS)
    with pytest.raises(mp.NbmemprofError, match=r"mp.leaks asks a capture, and got None"):
        mp.leaks(None)
    assert "capture" in inspect.signature(mp.leaks).parameters
    assert mp.leaks.__doc__.startswith("Which lines keep something")


def test_a_recording_stands_for_its_capture_once_it_has_ended(tmp_path):
    window = mp.record("torch_cpu")
    with pytest.raises(mp.NbmemprofError, match="this Recording has none yet. Ask after its with block"):
        mp.summary(window)
    window.capture = made()
    assert mp.summary(window).equals(mp.summary(capture=made()))
    run = mp.open_run(tmp_path)
    run.add(made())
    assert mp.summary(mp.open_run(tmp_path))["end_allocated_bytes"].to_list() == [3 * MIB]
