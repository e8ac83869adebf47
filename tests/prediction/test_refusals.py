"""A prediction of what does not fit says so first, and what it would need."""

from __future__ import annotations

import polars as pl
import pytest

import nbmemprof as mp
from nbmemprof.prediction import feed
from nbmemprof.prediction.catalogue import CATALOGUE
from nbmemprof.prediction.recorder import Allocation, Record
from nbmemprof.views import findings, text

GIB = 1 << 30


def predicted(count: int, size: int = 4 * GIB, capacity_bytes: int | None = None, limit_bytes: int | None = None) -> mp.Capture:
    """``count`` tensors that live at once on an H200."""
    made = [Allocation(size, "empty", None, None, 0) for _ in range(count)]
    record = Record(events=[*range(count), *(~i for i in range(count))], made=made)
    return feed.capture_of(record, CATALOGUE["H200"], conf="", torch="2.11", limit_bytes=limit_bytes, capacity_bytes=capacity_bytes, meta={})


def fits(capture: mp.Capture, card: str) -> str:
    return str(mp.cards(capture).filter(pl.col("card") == card)["fits"].item())


@pytest.fixture(scope="module")
def too_much() -> mp.Capture:
    """240 GiB on 140."""
    return predicted(60)


def test_the_headline_begins_with_what_was_refused_and_what_it_needs(too_much: mp.Capture) -> None:
    assert text.headline(too_much).startswith("does not fit: first refused at empty (asked 4 GiB); it needs at least about 240 GiB ")
    assert text.report(too_much).startswith("does not fit: ")


def test_a_card_fits_by_the_need_and_not_by_what_was_served(too_much: mp.Capture) -> None:
    assert set(mp.cards(too_much)["fits"]) == {"no"}
    limited = predicted(5, limit_bytes=10 * GIB)  # 20 GiB with a limit of its own
    assert (fits(limited, "H200"), fits(limited, "RTX 4060 Ti")) == ("yes", "no")


def test_advice_does_not_say_to_leave_things_as_they_are(too_much: mp.Capture) -> None:
    rows = mp.advise(too_much)
    assert rows["rule"][0] == "does_not_fit" and not rows["action"].str.contains("Leave the setting").any()


def test_refusals_after_the_first_are_said_not_to_be_a_runs(too_much: mp.Capture) -> None:
    reasons = mp.oom(too_much)["reason"].str.starts_with("A real run").to_list()
    assert len(reasons) > 1 and reasons == [False] + [True] * (len(reasons) - 1)
    said = [one for one in findings.findings(too_much) if one.startswith("Out of memory")]
    assert len(said) == 1 and f"{len(reasons) - 1} more were refused" in said[0] and "lines" not in said[0]
    assert any("not raised inside the cell" in one["what"] and one["count"] == len(reasons) for one in too_much.meta["assumptions"])


def test_a_gpu_smaller_than_its_context_says_so() -> None:
    assert "the context and libraries alone take" in text.headline(predicted(1, 4 << 20, capacity_bytes=10 << 20))


def test_what_fits_is_not_said_not_to() -> None:
    whole = predicted(5)
    assert text.headline(whole).startswith("peak 20 GiB") and "needs" not in whole.meta and fits(whole, "H200") == "yes"


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [(1.7, 2.3, "peak 2 GiB (between 1.7 and 2.3) "), (1.997, 2.004, "peak 2 GiB (between 1.997 and 2.004) "), (2 - 1e-7, 2 + 1e-7, "peak 2 GiB (reserved 2)"), (0.994, 2.006, "peak 2 GiB (between 1017.9 MiB and 2 GiB) ")],
)
def test_a_range_is_printed_with_the_digits_that_it_takes_or_not_at_all(low: float, high: float, said: str) -> None:
    capture = predicted(2, GIB)
    capture.meta["counters"]["0"] |= {"peak_allocated_low_bytes": int(low * GIB), "peak_allocated_high_bytes": int(high * GIB)}
    assert text.headline(capture).startswith(said)


def test_the_peak_has_the_digits_of_its_range() -> None:
    capture = predicted(2, GIB + (8 << 20))
    capture.meta["counters"]["0"] |= {"peak_allocated_low_bytes": int(2.012 * GIB), "peak_allocated_high_bytes": int(2.019 * GIB)}
    assert text.headline(capture).startswith("peak 2.02 GiB (between 2.01 and 2.02) ")
