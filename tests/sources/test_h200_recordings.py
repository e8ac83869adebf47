"""Recordings from an H200, played again: what was measured there is what comes out here.

Made by ``tests/gpu/record_h200.py``; each JSON says with what. ``torch`` in it are torch's own counters.
"""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_cuda import FakeCuda

import nbmemprof as mp
from nbmemprof.capture import Capture
from nbmemprof.sources import torch_history

FOLDER = Path(__file__).parent.parent / "fixtures" / "h200"
NAMES = sorted(p.name.removesuffix(".pickle.gz") for p in FOLDER.glob("*.pickle.gz"))


class Played(FakeCuda):
    """Torch as it answered then: counters at the start, counters and snapshot at the end."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.told = numbers(name)["stats"]["start"], numbers(name)["stats"]["end"]
        self.picture_then = pickle.loads(gzip.decompress((FOLDER / f"{name}.pickle.gz").read_bytes()))
        self.at = 0

    def stats(self, device: int) -> dict[str, Any]:
        found: dict[str, Any] = self.told[self.at]
        return found

    def snapshot(self, devices: range) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.at = 1
        return [self.told[1]], self.picture_then


def numbers(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())["numbers"]
    return found


def play(name: str) -> Capture:
    cuda = Played(name)
    source = torch_history.TorchHistory(cuda)
    source.start()
    return source.stop()


@pytest.mark.cost(0.6)
@pytest.mark.parametrize("name", NAMES)
def test_peaks_and_end_equal_torchs_own_counters(name: str) -> None:
    capture = play(name)
    row = mp.summary(capture).row(0, named=True)
    truth = numbers(name)["torch"]
    assert {n: row[n] for n in truth} == truth
    assert capture.meta["warnings"] == []
    assert row["peak_requested_bytes"] == numbers(name)["stats"]["end"]["requested_bytes"]["all"]["peak"]


@pytest.mark.cost(0.6)
@pytest.mark.parametrize("name", NAMES)
def test_the_file_tells_the_same_as_the_live_recording(name: str) -> None:
    live, file = mp.summary(play(name)), mp.summary(mp.load(FOLDER / f"{name}.pickle.gz"))
    same = ["peak_allocated_bytes", "peak_reserved_bytes", "peak_requested_bytes", "end_allocated_bytes", "live_blocks", "segments"]
    assert live.select(same).equals(file.select(same))


def test_what_was_there_before_the_window_is_the_counter_at_its_start() -> None:
    capture = play("midrun")
    old = capture.allocations.filter("at_start")
    assert old["size_bytes"].sum() == numbers("midrun")["stats"]["start"]["allocated_bytes"]["all"]["current"]
    assert capture.meta["counters"]["0"]["start_allocated_bytes"] == old["size_bytes"].sum()


def test_a_recorded_training_step_names_the_lines_of_the_model() -> None:
    frame = mp.sites(play("gpt2_b8"), top=5)
    assert frame["size_bytes"].sum() > 0
    assert frame.filter(pl.col("site").is_not_null()).height > 0
