"""Ordinary workloads of many kinds with random weights: what the predictor says of them, and what a GPU measured.

``sweep.workloads(names)`` returns name -> function without arguments. ``first`` were there when rules were mended, ``second`` only afterwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

SETS = {"first": ("images", "texts", "graphs", "signals", "learning", "operators"), "second": ("unseen",)}


def workloads(which: str = "first") -> dict[str, Callable[[], None]]:
    """All workloads of a set, in order."""
    found: dict[str, Callable[[], None]] = {}
    for name in SETS[which]:
        found |= {run.__name__: run for run in importlib.import_module(f"sweep.{name}").WORKLOADS}
    return found
