"""Let go of what only the notebook's machinery holds: its output history, its stores of the last error, and garbage."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from nbmemprof import _optional
from nbmemprof.holding._scan import GARBAGE, Scan, look

__all__ = ["Keep", "Plan", "Released", "allocated", "let_go", "plan"]


@dataclass(frozen=True)
class Keep:
    """Bytes that one thing keeps, and every place where the notebook has that thing."""

    labels: tuple[str, ...]
    kind: str
    size_bytes: int


@dataclass(frozen=True)
class Plan:
    """What a release would do. A storage that two things keep counts in both, in ``size_bytes`` once."""

    keeps: list[Keep]
    cycle_bytes: int
    size_bytes: int
    alive_bytes: int


@dataclass(frozen=True)
class Released:
    """What a release did, by the counters."""

    plan: Plan
    before_bytes: int
    after_bytes: int
    on_gpu: bool

    @property
    def size_bytes(self) -> int:
        """Bytes that came back."""
        return self.before_bytes - self.after_bytes


def plan(shell: Any = None) -> Plan:
    """What would a release give back? Nothing is changed."""
    return _plan(look(shell=shell))


def let_go(shell: Any = None, *, empty_cache: bool = False) -> Released:
    """Do it: empty the places that :func:`plan` names, collect garbage, and count what came back.

    No name of the user's is unbound, and no object of the user's is changed. Outputs that hold no tensor memory of their
    own stay in ``Out``.

    Parameters
    ----------
    empty_cache
        Also call ``torch.cuda.empty_cache()``: torch gives free segments back to the driver.
    """
    planned, before = _empty(shell)
    gc.collect()
    torch = _optional.loaded("torch")
    if empty_cache and torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return Released(planned, before, allocated(shell), _counter() is not None)


def _empty(shell: Any) -> tuple[Plan, int]:
    """In a function of its own: the look's way back to the things must be gone before anything is counted."""
    scan = look(shell=shell)
    before = _counter()
    for place in scan.places:
        for clear in place.clears:
            clear()
    return _plan(scan), _alive(scan) if before is None else before


def allocated(shell: Any = None) -> int:
    """Bytes of tensors alive: torch's counters of all GPUs, or every CPU storage where no GPU is in use."""
    counter = _counter()
    return _alive(look(shell=shell)) if counter is None else counter


def _counter() -> int | None:
    torch = _optional.loaded("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.memory_allocated(i)) for i in range(torch.cuda.device_count()))


def _alive(scan: Scan) -> int:
    return sum({row.memory.key: row.memory.size_bytes for row in scan.rows}.values())


def _plan(scan: Scan) -> Plan:
    sizes = {row.memory.key: row.memory.size_bytes for row in scan.rows}
    merged: dict[frozenset[int], list[str]] = {}
    kinds: dict[frozenset[int], str] = {}
    for place in scan.places:
        merged.setdefault(place.keys, []).extend(place.labels)
        kinds.setdefault(place.keys, place.kind)
    keeps = [Keep(tuple(dict.fromkeys(labels)), kinds[keys], sum(sizes[key] for key in keys)) for keys, labels in merged.items()]
    cycles = sum(sizes[key] for key, tier in scan.tiers().items() if tier == GARBAGE)
    kept = sum(sizes[key] for key in frozenset().union(*merged))
    return Plan(sorted(keeps, key=lambda k: -k.size_bytes), cycles, kept + cycles, sum(sizes.values()))
