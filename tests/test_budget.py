"""The only test on time: what the tests declare must fit."""

from __future__ import annotations

import pytest
from support import COSTS, ROOT, budget, total_s


def test_declared_costs_fit_into_the_limit(request):
    declared = budget()
    costs = request.config.stash[COSTS]
    seconds = total_s(costs, declared)
    dearest = ", ".join(f"{name} {cost:g} s" for name, cost in sorted(costs, key=lambda row: -row[1])[:5])
    assert seconds <= declared["limit"], (
        f"make test is declared at {seconds:.0f} s, the limit is {declared['limit']} s. Make tests cheaper, or move some to soak. Dearest: {dearest}"
    )


def test_too_much_is_noticed():
    declared = {"setup": {"install": 50.0}, "notebooks": {"01.ipynb": 30.0}}
    assert total_s([("a", 0.05), ("b", 20.0)], declared) == pytest.approx(100.05)


def test_every_notebook_declares_its_cost():
    assert {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} == set(budget()["notebooks"])
