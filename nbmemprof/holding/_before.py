"""Which names had which memory when a cell began: the old value of a name lives until the name is bound anew."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

import polars as pl

from nbmemprof import _optional
from nbmemprof.capture import Capture
from nbmemprof.holding._parts import has_base
from nbmemprof.holding._roots import names
from nbmemprof.holding._tensors import Reader

__all__ = ["leads_to_tensors", "names_now", "replaced"]

_MOST = 3000  # objects looked at


def names_now(namespace: Mapping[str, Any], shell: Any = None, most: int = _MOST) -> dict[int, str]:
    """Address of each storage that a variable of the user's reaches in a few steps → the variable; a few milliseconds at most."""
    torch = _optional.loaded("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return {}
    reader = Reader(torch)
    found: dict[int, str] = {}
    with reader.plainly():
        waiting = [(root.thing, root.label) for root in names(namespace, shell)]
        seen: set[int] = {id(namespace)}
        for thing, name in waiting:  # grows while it is walked: nearest first
            if len(seen) > most:
                break
            if id(thing) in seen or not gc.is_tracked(thing) or _leads_away(type(thing)):
                continue
            seen.add(id(thing))
            if reader.kind(type(thing)) in (1, 3):
                for memory in reader.memory(thing):
                    found.setdefault(memory.addr, name)
            else:
                waiting.extend((inner, name) for inner in gc.get_referents(thing))
    return found


def _leads_away(cls: type) -> bool:
    return cls is FunctionType or has_base(cls, ModuleType) or has_base(cls, type)


def replaced(capture: Capture, before: Mapping[int, str], after: Mapping[int, str]) -> list[dict[str, Any]]:
    """Names whose value from before the cell was alive at the cell's peak, and was let go only when the cell bound them anew.

    Returns
    -------
    ``name`` and ``size_bytes`` for each, largest first.
    """
    if not before or not capture.events.height:
        return []
    from nbmemprof.analyses._moment import live_at

    still = set(after.values())
    old = live_at(capture, "peak").filter(pl.col("at_start") & pl.col("free_seq").is_not_null() & pl.col("addr").is_in(list(before)))
    sizes: dict[str, int] = {}
    for addr, size in old.select("addr", "size_bytes").iter_rows():
        name = before[addr]
        if name in still and after.get(addr) != name:
            sizes[name] = sizes.get(name, 0) + size
    return [{"name": name, "size_bytes": size} for name, size in sorted(sizes.items(), key=lambda row: -row[1])]


def leads_to_tensors(error: BaseException | None, apart: Any = None, most: int = 20_000) -> bool:
    """Whether a tensor may hang on an error's frames: a quick look that lets a cell without tensors end at once."""
    torch = _optional.loaded("torch")
    if torch is None or error is None or not hasattr(torch, "UntypedStorage"):
        return False
    reader = Reader(torch)
    waiting: list[Any] = [error]
    seen = {id(apart)}
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or _leads_away(type(thing)):
            continue
        if reader.kind(type(thing)) in (1, 2, 3) or len(seen) > most:
            return True
        seen.add(id(thing))
        waiting += [inner for inner in gc.get_referents(thing) if gc.is_tracked(inner)]
    return False
