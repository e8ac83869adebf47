"""The model of a warp: worked examples, what an H200 counted, and laws that hold for every pattern."""

from __future__ import annotations

import math

import numpy as np
import patterns
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from modelled_access import access, count
from patterns import Example

import nbmemprof as mp
from nbmemprof.errors import NbmemprofError


# ---------------------------------------------------------------------- numbers
@pytest.mark.parametrize("example", patterns.WORKED, ids=lambda e: f"{e.pattern.space} {e.name}")
def test_worked_examples(example: Example):
    made = access(example.pattern)
    assert count(made) == example.count
    if isinstance(made, mp.access.GlobalAccess):
        assert (made.lines, made.ideal_sectors) == (example.lines, example.ideal)
        assert made.efficiency == pytest.approx(example.share)
        assert made.requests == 1
    else:
        assert (made.ideal_wavefronts, made.ways) == (example.ideal, example.share)
        assert made.efficiency == pytest.approx(1 / example.share)
        assert made.conflicts == example.count - example.ideal


def test_what_an_h200_counted_for_patterns_chosen_by_hand():
    modelled = {(e.pattern.space, e.name): count(access(e.pattern)) for e in patterns.COUNTED}
    assert modelled == {(e.pattern.space, e.name): e.count for e in patterns.COUNTED}
    assert len(modelled) == 43


def test_a_broadcast_needs_one_sector_though_its_lanes_would_fill_four():
    made = mp.access.global_load(lambda t: 0)
    assert (made.ideal_sectors, made.ideal_unique_sectors, made.bytes_per_sector) == (4, 1, 128)


# ---------------------------------------------------------------------- laws
ANY = patterns.patterns()
GLOBAL = patterns.patterns(("global load", "global store"))
SHARED = patterns.patterns(("shared load", "shared store"))


@given(GLOBAL)
@settings(max_examples=70, deadline=None)
@pytest.mark.cost(0.3)
def test_sectors_hold_all_bytes_and_no_more_than_one_a_lane(pattern):
    made = access(pattern)
    touched = {(p + k) // 32 for p in pattern.places if p is not None for k in range(pattern.width)}
    assert made.sectors == len(touched)
    assert made.lines == len({sector // 4 for sector in touched}) <= made.sectors <= 4 * made.lines
    assert made.ideal_unique_sectors <= min(made.sectors, made.ideal_sectors)
    assert 0 < made.efficiency <= 1


@given(SHARED)
@settings(max_examples=70, deadline=None)
@pytest.mark.cost(0.3)
def test_wavefronts_move_every_word_and_never_two_of_a_bank_at_once(pattern):
    made = access(pattern)
    assert made.ideal_wavefronts <= made.wavefronts <= sum(phase.wavefronts for phase in made.phases)
    assert made.ways == max(phase.wavefronts for phase in made.phases) if made.phases else made.ways == 0
    lanes = sorted(lane for phase in made.phases for lane in phase.lanes)
    assert lanes == [lane for lane, _ in made.active]
    for phase in made.phases:
        wanted = {(p + k) // 4 for lane in phase.lanes for k in range(pattern.width) if (p := pattern.places[lane]) is not None}
        assert {word for words in phase.words.values() for word in words} == wanted
        assert len(wanted) <= 32 * phase.wavefronts
    assert 0 < made.efficiency <= 1


@given(ANY, st.integers(0, 200))
@settings(max_examples=70, deadline=None)
@pytest.mark.cost(0.3)
def test_moving_all_lanes_by_whole_lines_changes_nothing(pattern, lines):
    moved = pattern._replace(places=tuple(None if p is None else p + 128 * lines for p in pattern.places))
    assert count(access(moved)) == count(access(pattern))


@given(GLOBAL, st.permutations(range(32)))
@settings(max_examples=70, deadline=None)
@pytest.mark.cost(0.3)
def test_which_lane_wants_which_address_does_not_matter_in_global_memory(pattern, order):
    assert access(pattern._replace(places=tuple(pattern.places[i] for i in order))).sectors == access(pattern).sectors


@given(ANY, st.integers(0, 31))
@settings(max_examples=70, deadline=None)
@pytest.mark.cost(0.3)
def test_a_lane_that_is_switched_off_costs_nothing_in_global_memory_or_narrow_shared_accesses(pattern, lane):
    fewer = pattern._replace(places=tuple(None if i == lane else p for i, p in enumerate(pattern.places)))
    assert count(access(fewer)) <= count(access(pattern))


@given(st.integers(0, 300), st.sampled_from([4, 8, 16]))
@settings(max_examples=100, deadline=None)
@pytest.mark.cost(0.3)
def test_closed_forms_of_strides(stride, width):
    words = mp.access.shared_load(lambda t: t * stride, width)
    if stride:
        phases = width // 4
        assert words.wavefronts == phases * math.gcd(stride, 32 // phases)
        assert mp.access.shared_store(lambda t: t * stride, width).wavefronts == words.wavefronts
        assert mp.access.global_load(lambda t: t * stride).sectors == min(32, 4 * stride)


# ---------------------------------------------------------------------- what may be passed
def test_an_index_expression_counts_elements_and_a_list_counts_bytes():
    assert mp.access.global_load(lambda t: t * 32).addresses == mp.access.global_load([128 * t for t in range(32)]).addresses
    wide = mp.access.global_load(lambda t: 4 * t, 16, element_bytes=4)  # a float4 whose index counts floats
    assert wide.addresses[31] == 31 * 16
    assert mp.access.global_load(lambda t: t if t < 16 else None).sectors == 2
    assert mp.access.global_load([0, None, 64]).active_lanes == 2
    assert mp.access.global_load(np.arange(32) * 4, base=4).sectors == 5
    assert mp.access.shared_load([], 4).wavefronts == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: mp.access.global_load([0], 3), "No instruction moves 3 bytes a lane"),
        (lambda: mp.access.global_load(range(0, 132, 4)), "A warp has 32 lanes, 33 addresses were given"),
        (lambda: mp.access.global_load([2], 4), "Lane 0: address 2 is not a multiple of its width, 4 bytes"),
        (lambda: mp.access.global_load(5), "5 is neither addresses nor an index expression"),
        (lambda: mp.access.shared_load([0, -4]), "Lane 1: address -4 is negative"),
        (lambda: mp.access.shared_load(lambda t: t / 2), "Lane 0: 0.0 is no whole number, so it is no address. Use //"),
    ],
)
def test_what_can_be_no_access_is_refused_with_the_lane_and_what_to_do(make, said):
    with pytest.raises(NbmemprofError, match=said):
        make()


def test_an_access_says_what_it_costs():
    assert mp.access.global_load(lambda t: 32 * t).explain() == "global load, 4 B a lane, 128 B apart: 32 sectors in 32 lines where 4 would do, 12.5 % of the bytes used"
    assert mp.access.shared_store(lambda t: 2 * t).explain() == "shared store, 4 B a lane, 8 B apart: 2 wavefronts where 1 would do, a 2-way bank conflict"
    assert mp.access.shared_load(lambda t: t, 16).explain() == "shared load, 16 B a lane, side by side: 4 wavefronts, no bank conflict"
    assert mp.access.global_load([None]).explain() == "global load, 4 B a lane: no lane is active, nothing is moved"
    assert mp.access.global_load([8]).explain() == "global load, 4 B a lane by 1 lane: 1 sector in 1 line, 12.5 % of the bytes used"
