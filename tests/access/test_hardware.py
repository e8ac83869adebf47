"""Model = hardware: every pattern that an H200 counted, recorded in tests/fixtures/h200/patterns, with no difference."""

from __future__ import annotations

import json
from collections import Counter

import patterns
import pytest
from modelled_access import access, count
from patterns import Pattern
from support import ROOT

SINGLE = [e.pattern for e in (*patterns.WORKED, *patterns.COUNTED)] + [p for _, p in patterns.joining()]
FOUND = {"single": SINGLE, "random": patterns.stored()}


def recorded(name: str) -> dict:
    return json.loads((patterns.FOLDER / f"patterns_{name}.json").read_text())


def differences(found: list[Pattern], counts: list[int | None]) -> list[tuple[Pattern, int, int]]:
    return [(p, count(access(p)), n) for p, n in zip(found, counts, strict=True) if n is not None and count(access(p)) != n]


@pytest.mark.cost(0.2)
@pytest.mark.parametrize("name", ["single", "random"])
def test_the_model_counts_what_the_hardware_counted(name):
    for way, kept in recorded(name)["ways"].items():
        assert kept["about"]["wrong"] == [], way  # what the launches computed was checked there
        assert differences(FOUND[name], kept["counts"]) == [], way


def test_all_patterns_were_counted_twice_and_in_two_ways_alike():
    random, single = recorded("random")["ways"], recorded("single")["ways"]
    assert len(random["packed"]["counts"]) == 500
    assert random["packed"]["counts"] == random["packed again"]["counts"]
    assert None not in random["packed"]["counts"] + single["packed"]["counts"]
    alone = [(a, b) for a, b in zip(single["alone"]["counts"], single["packed"]["counts"], strict=True) if a is not None]
    assert len(alone) >= 40
    assert all(a == b for a, b in alone)


def test_the_notebook_opens_the_same_recording():
    rows = json.loads((ROOT / "notebooks" / "data" / "h200_access_patterns.json").read_text())
    assert [row[:3] for row in rows] == [p.row() for p in FOUND["random"]]
    assert [row[3] for row in rows] == recorded("random")["ways"]["packed"]["counts"]


def test_a_difference_of_one_is_seen():
    counts = list(recorded("random")["ways"]["packed"]["counts"])
    counts[123] += 1
    assert [d[0] for d in differences(FOUND["random"], counts)] == [FOUND["random"][123]]


def test_random_patterns_reach_every_corner():
    found = FOUND["random"]
    assert len(set(found)) == 500
    assert set(Counter((p.space, p.width) for p in found)) == {(s, w) for s in patterns.SPACES for w in (1, 2, 4, 8, 16)}
    assert set(Counter(p.space for p in found).values()) == {125}
    inactive = sum(None in p.places for p in found)
    assert 100 < inactive < 400
    assert len({count(access(p)) for p in found}) > 25
    wide = [access(p) for p in found if p.space == "shared load" and p.width >= 8]
    joined = [a for a in wide if a.ideal_wavefronts < len({lane // (128 // a.width) for lane, _ in a.active})]
    assert len(joined) > 10  # loads whose groups go together
