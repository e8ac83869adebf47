"""Requests of two runs matched: the longest common order, and None where two runs are of two kinds."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from nbmemprof.searching.align import partners
from nbmemprof.searching.scaling import grown

pytestmark = pytest.mark.cost(0.05)
TOKENS = st.lists(st.integers(0, 3), max_size=24)


def longest(a: list[int], b: list[int]) -> int:
    """Length of the longest common subsequence, by the table."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@pytest.mark.cost(0.6)
@settings(max_examples=150, deadline=None)
@given(TOKENS, TOKENS)
def test_as_many_as_possible_are_matched_in_order(a, b):
    found = partners(np.asarray(a, np.int64), np.asarray(b, np.int64))
    assert found is not None
    pairs = [(i, j) for i, j in enumerate(found.tolist()) if j >= 0]
    assert all(a[i] == b[j] for i, j in pairs)
    assert all(p[1] < q[1] for p, q in itertools.pairwise(pairs))
    assert len(pairs) == longest(a, b)


def test_runs_of_two_kinds_are_not_matched():
    assert partners(np.zeros(2000, np.int64), np.ones(2000, np.int64)) is None


def one(value: float) -> np.ndarray:
    return np.asarray([float(value)])


def test_a_fixed_part_and_a_part_a_sample():
    assert grown(10, (4, one(1000 + 4 * 300)), [(2, one(1000 + 2 * 300))])[0] == 4000


def test_what_begins_below_zero_grows_with_the_square():
    assert grown(100, (2, one(4 * 70_000)), [(1, one(70_000))])[0] == 70_000 * 100**2


def test_three_sizes_tell_a_square_with_a_line():
    def size(n):
        return 3000 * n * n + 50_000 * n

    assert grown(64, (20, one(size(20))), [(10, one(size(10))), (2, one(size(2)))])[0] == pytest.approx(size(64))


def test_a_request_without_a_partner_goes_with_the_batch_where_it_divides_it():
    nothing = np.asarray([np.nan])
    assert grown(20, (10, one(50_000)), [(5, nothing)])[0] == 100_000
    assert grown(20, (10, one(50_001)), [(5, nothing)])[0] == 50_001
