"""What tests share: where the checkout is, what this machine has, and what `make test` costs by declaration."""

from __future__ import annotations

import os
import shutil
import tomllib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
COSTS = pytest.StashKey[list[tuple[str, float]]]()
DEFAULT_S = 0.05


@lru_cache
def has_gpu() -> bool:
    """Whether torch can use a CUDA device; torch is loaded only where a driver is there."""
    if not (Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()):
        return False
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def chromium_path() -> str | None:
    """Path of the system's Chromium."""
    return os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def budget() -> dict[str, Any]:
    """``budget.toml``: seconds of the set-up and of the notebooks, and the limit."""
    return tomllib.loads((Path(__file__).parent / "budget.toml").read_text())


def counts(item: pytest.Item) -> bool:
    """Whether a test belongs to `make test` on a machine without a GPU; notebooks are declared whole in budget.toml."""
    return item.get_closest_marker("soak") is None and item.get_closest_marker("gpu") is None and ".ipynb" not in item.nodeid


def cost_of(item: pytest.Item) -> float:
    """Seconds that a test declares."""
    mark = item.get_closest_marker("cost")
    return float(mark.args[0]) if mark else DEFAULT_S


def total_s(costs: Iterable[tuple[str, float]], declared: dict[str, Any]) -> float:
    """Seconds of the set-up, and of all tests and notebooks in as many processes as `make test` takes."""
    run = sum(cost for _, cost in costs) + sum(declared["notebooks"].values())
    return sum(declared["setup"].values()) + run / declared.get("speedup", 1.0)
