"""Suggestions: what is said is what the model finds when it is done."""

from __future__ import annotations

import patterns
import pytest
from hypothesis import given, settings
from modelled_access import access, count

import nbmemprof as mp
from nbmemprof.access import suggest


def kinds(made) -> list[str]:
    return [one.kind for one in made.suggestions()]


@given(patterns.patterns())
@settings(max_examples=150, deadline=None)
@pytest.mark.cost(0.6)
def test_each_suggestion_is_better_by_the_model_and_moves_as_many_lanes(pattern):
    made = access(pattern)
    for one in made.suggestions():
        assert count(one.access) == one.after < one.before
        assert one.access.active_lanes == made.active_lanes
        assert str(one.after) in one.text
        if one.kind != "vector width":
            assert one.before == count(made)


@pytest.mark.parametrize("made", [mp.access.global_load(lambda t: t), mp.access.global_load(lambda t: 0), mp.access.shared_load(lambda t: t, 16), mp.access.shared_load(lambda t: 33 * t), mp.access.global_load([])])
def test_what_is_as_good_as_can_be_gets_no_advice(made):
    assert made.suggestions() == []


def test_a_field_of_a_structure_asks_for_a_structure_of_arrays_or_one_wide_load():
    made = mp.access.global_load(lambda t: 4 * t)
    arrays, wide = made.suggestions()
    assert (arrays.kind, arrays.before, arrays.after) == ("structure of arrays", 16, 4)
    assert (wide.kind, wide.before, wide.after, wide.access.width) == ("vector width", 64, 16, 16)
    assert "If the other 3 fields of each 16 B are read too" in wide.text


def test_a_column_asks_for_a_tile_in_shared_memory_with_a_padded_row():
    (tile,) = [one for one in mp.access.global_load(lambda t: 1024 * t).suggestions() if one.kind == "shared tile"]
    assert (tile.before, tile.after) == (32, 4)
    assert "take the tile by columns, declared with 32 + 1 of them (1 wavefront)" in tile.text


def test_a_shifted_start_asks_for_a_boundary():
    (one,) = mp.access.global_load(lambda t: t + 1).suggestions()
    assert (one.kind, one.before, one.after) == ("alignment", 5, 4)


@pytest.mark.parametrize("width", [4, 8, 16])
def test_a_column_of_a_tile_is_cured_by_padding_and_by_a_swizzle(width):
    made = mp.access.shared_load(lambda t: t * (128 // width), width)
    assert made.ways == min(32, 128 // width)
    pad, swizzle = suggest.padded(made), suggest.swizzled(made)
    assert pad.pitch == 128 + width
    for one in (pad, swizzle):
        assert one.access.conflicts == 0


def test_a_swizzle_keeps_every_element_of_a_tile_at_a_place_of_its_own():
    places = set()
    for row in range(32):
        for column in range(32):
            column_of_tile = mp.access.shared_load([128 * r + 4 * column for r in range(32)])
            places.add(suggest.swizzled(column_of_tile).access.addresses[row])
    assert len(places) == 32 * 32


def test_words_in_pairs_ask_for_one_wide_access():
    assert "vector width" in kinds(mp.access.shared_load(lambda t: 2 * t))


def test_a_pattern_without_a_stride_is_padded_by_rows_of_a_power_of_two():
    made = mp.access.shared_load(lambda t: (t % 4) * 32 + t // 4)
    one = suggest.padded(made)
    assert made.ways == 4
    assert "Pad each row of 128 B by 32 B" in one.text
