"""Field cases, small and on the CPU: the expected line, bytes an iteration and holder; and as an H200 gave them."""

from __future__ import annotations

import field_cases
import pytest
from field_cases import CASES, Where


@pytest.mark.cost(0.8)
@pytest.mark.parametrize("number", CASES)
def test_a_field_case_is_told_as_it_is(number):
    seen = CASES[number](Where("cpu", 1 / 64))
    assert seen.found == seen.expected
    assert field_cases.ACTS == field_cases.BEST == []
