"""Field cases, small and on the CPU: the expected line, bytes an iteration and holder; and as an H200 gave them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import field_cases
import polars as pl
import pytest
from field_cases import CASES, Where, by_line, kept

import nbmemprof as mp


@pytest.mark.cost(1.3)
@pytest.mark.parametrize("number", CASES)
def test_a_field_case_is_told_as_it_is(number):
    seen = CASES[number](Where("cpu", 1 / 64))
    assert seen.found == seen.expected
    assert field_cases.ACTS == field_cases.BEST == []


FOLDER = Path(__file__).parent / "fixtures" / "h200" / "cases"


def test_200_profiled_cells_on_an_h200_left_nothing():
    """Recorded by ``tests/gpu/record_flat.py``: what the device has is the same to the byte, objects are those that the shell keeps of plain cells too."""
    told = json.loads((FOLDER.parent / "flat.json").read_text())
    plain, profiled = (pl.DataFrame(told[name]["rows"]) for name in ("plain", "profiled"))
    assert told["device"] == "NVIDIA H200"
    assert (profiled["cells"][-1], told["profiled"]["views"], told["plain"]["views"]) == (200, 200, 0)
    for column in ("allocated_bytes", "reserved_bytes", "used_bytes"):
        assert profiled[column].unique().to_list() == plain[column].unique().to_list()
        assert profiled[column].n_unique() == 1
    assert profiled["objects"][-1] - profiled["objects"][0] <= plain["objects"][-1] - plain["objects"][0]
    assert (profiled["rss_bytes"][-1] - profiled["rss_bytes"][0]) / 180 < 50 << 10


ASKED = {
    "01": lambda found, c: (found["lines"], by_line(c[0])),
    "03": lambda found, c: ([run["lines"] for run in found["runs"]], list(map(by_line, c))),
    "04": lambda found, c: ([found["lines"], found["leaks"]], [kept(c[0]), by_line(c[0])]),
    "06": lambda found, c: (found["lines"], by_line(c[0])),
    "08": lambda found, c: (found["lines"], by_line(c[0])),
    "12": lambda found, c: ([found["leaks"], list(found["classes"])], [by_line(c[0]), ["first-step"]]),
    "22": lambda found, c: ([found["leaks"], sum(found["lines"].values())], [by_line(c[0]), sum(kept(c[0]).values())]),
    "27": lambda found, c: (found["leaks"], list(map(by_line, c))),
}


@pytest.mark.parametrize("number", CASES)
def test_a_case_as_an_h200_ran_it(number):
    """Whole, recorded by ``tests/gpu/record_cases.py``: all was as expected there, and its captures still say so."""
    told = json.loads((FOLDER / f"{number}.json").read_text())
    assert told["device"] == "NVIDIA H200"
    assert told["scale"] == 1
    assert told["found"] == told["expected"]
    captures = [mp.load(gzip.decompress((FOLDER / name).read_bytes())) for name in told["captures"]]
    recorded, now = ASKED[number](told["found"], captures)
    assert now == recorded
