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

_EACH, _ALL = 1500, 5000  # objects looked at, of one variable and in all
_WIDE = 300  # of one container


def names_now(namespace: Mapping[str, Any], shell: Any = None) -> dict[int, str]:
    """Address of each storage that a variable of the user's reaches in a few steps → the variable; a few milliseconds at most."""
    torch = _optional.loaded("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return {}
    reader, kinds = Reader(torch), dict[type, int]()
    found: dict[int, str] = {}
    seen = {id(namespace)}
    with reader.plainly():
        for root in names(namespace, shell):
            waiting, left = [root.thing], min(_EACH, _ALL - len(seen))
            for thing in waiting:  # grows while it is walked: nearest first
                kind = _kind(type(thing), kinds, reader)
                if kind < 0 or id(thing) in seen or not gc.is_tracked(thing):
                    continue
                if left <= 0:
                    break
                seen.add(id(thing))
                left -= 1
                if kind in (1, 3):
                    for memory in reader.memory(thing):
                        found.setdefault(memory.addr, root.label)
                else:
                    waiting += gc.get_referents(thing)[:_WIDE]
    return found


def _kind(cls: type, known: dict[type, int], reader: Reader) -> int:
    """As ``Reader.kind``; -1 for what leads away from the variable: functions, modules, classes."""
    kind = known.get(cls)
    if kind is None:
        kind = known[cls] = -1 if _leads_away(cls) else reader.kind(cls)
    return kind


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

    new = capture.allocations.filter(~pl.col("at_start") & pl.col("free_seq").is_null() & pl.col("addr").is_in(list(after)))
    made: dict[str, int] = {}  # when a name's new value began
    for addr, seq in new.select("addr", "alloc_seq").iter_rows():
        made[after[addr]] = min(seq, made.get(after[addr], seq))
    old = live_at(capture, "peak").filter(pl.col("at_start") & pl.col("free_seq").is_not_null() & pl.col("addr").is_in(list(before)))
    sizes: dict[str, int] = {}
    for addr, size, freed in old.select("addr", "size_bytes", "free_seq").iter_rows():
        name = before[addr]
        if name in made and made[name] < freed:
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
