"""The objects of this process as a graph of numbers: who refers to whom, as the garbage collector sees it.

Only the collector's own functions are called, no method of any object. References are held while a
graph lives and go with it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmemprof.holding._parts import has_base, own_dict

__all__ = ["Index", "Objects", "take"]

Ints = npt.NDArray[np.int64]
_CHUNK = 1 << 16
_SMALL, _LARGE = 64, 2048  # a frontier below is walked by hand, above by columns


class Index:
    """Number of an object by its address: pages of 64 KiB, a slot every 16 bytes (objects are aligned so)."""

    def __init__(self, ids: Ints) -> None:
        self._pages = np.unique(ids >> 16)
        self._slots = np.full(len(self._pages) << 12, -1, np.int32)
        self._slots[(np.searchsorted(self._pages, ids >> 16) << 12) + ((ids & 0xFFFF) >> 4)] = np.arange(len(ids), dtype=np.int32)

    def of(self, ids: Ints) -> npt.NDArray[np.int32]:
        """Numbers, -1 where an address is none of ours."""
        if not len(self._pages):
            return np.full(len(ids), -1, np.int32)
        page = np.minimum(np.searchsorted(self._pages, ids >> 16), len(self._pages) - 1)
        found = self._slots[(page << 12) + ((ids & 0xFFFF) >> 4)]
        return np.where(self._pages[page] == ids >> 16, found, np.int32(-1))

    def one(self, thing: object) -> int:
        """Number of one object, -1 where it is none of ours."""
        return int(self.of(np.array([id(thing)], np.int64))[0])


class Objects:
    """Every container of this process, and the walk over them in tiers: what an earlier tier reached stays its own.

    Attributes
    ----------
    items
        The objects, by number.
    tier
        In which tier an object was reached; -1 where in none.
    parent
        From which object; ``-2 - k`` for the k-th root.
    """

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.index = Index(np.fromiter(map(id, self.items), np.int64, len(self.items)))
        counts, targets = [np.zeros(1, np.int64)], []
        for begin in range(0, len(self.items), _CHUNK):
            found = _referents(self.items[begin : begin + _CHUNK])
            many = np.fromiter(map(len, found), np.int64, len(found))
            numbers = self.index.of(np.fromiter(map(id, chain.from_iterable(found)), np.int64, int(many.sum())))
            rows = np.repeat(np.arange(len(found)), many)[numbers >= 0]
            counts.append(np.bincount(rows, minlength=len(found)))
            targets.append(numbers[numbers >= 0])
            del found
        self.first = np.cumsum(np.concatenate(counts))
        self.targets = np.concatenate(targets) if targets else np.zeros(0, np.int32)
        self.tier = np.full(len(self.items), -1, np.int8)
        self.parent = np.full(len(self.items), -1, np.int32)
        self.closed = np.zeros(len(self.items), bool)  # not entered for now

    def __len__(self) -> int:
        return len(self.items)

    def after(self, number: int) -> list[int]:
        """What one object refers to."""
        return [int(n) for n in self.targets[self.first[number] : self.first[number + 1]]]

    def cut(self, source: object, targets: Iterable[object] | None = None) -> None:
        """Forget references of one object: those to ``targets``, or all. A reference to itself stands in their place."""
        number = self.index.one(source)
        if number < 0:
            return
        row = self.targets[self.first[number] : self.first[number + 1]]
        gone = {self.index.one(t) for t in targets} - {-1} if targets is not None else None
        row[np.isin(row, list(gone)) if gone is not None else slice(None)] = number

    def close(self, things: Iterable[object]) -> None:
        """Let the walk not enter these."""
        numbers = self.numbers(things)
        self.closed[numbers[numbers >= 0]] = True

    def numbers(self, things: Iterable[object]) -> npt.NDArray[np.int32]:
        """Numbers of things that are alive all the while; -1 where one is none of ours."""
        return self.index.of(np.fromiter(map(id, list(things)), np.int64))

    # ------------------------------------------------------------------ the walk
    def enter(self, number: int, parent: int, tier: int) -> bool:
        """Reach one object; whether that is new."""
        if number < 0 or self.tier[number] >= 0 or self.closed[number]:
            return False
        self.tier[number], self.parent[number] = tier, parent
        return True

    def spread(self, start: Ints, tier: int) -> Ints:
        """Reach all that can be reached from ``start`` (reached already), nearest first; gives what was reached, in order."""
        reached, front = [start], start
        while len(front):
            new, front = self._by_hand(front, tier) if len(front) < _SMALL else self._by_column(front, tier)
            reached.append(new)
        return np.concatenate(reached)

    def _by_column(self, front: Ints, tier: int) -> tuple[Ints, Ints]:
        sources, targets = self._edges(front)
        new = (self.tier[targets] < 0) & ~self.closed[targets]
        targets, sources = targets[new], sources[new]
        order = np.arange(len(targets), dtype=np.int32)
        self.parent[targets[::-1]] = order[::-1]  # the first of several wins
        once = self.parent[targets] == order
        targets, sources = targets[once], sources[once]
        self.parent[targets], self.tier[targets] = sources, tier
        return targets, targets

    def _edges(self, sources: Ints) -> tuple[Ints, Ints]:
        """Every reference of these, as a column of sources and one of targets."""
        begin, many = self.first[sources], self.first[sources + 1] - self.first[sources]
        at = np.arange(int(many.sum())) - np.repeat(np.cumsum(many) - many - begin, many)
        return np.repeat(sources, many), self.targets[at].astype(np.int64)

    def _by_hand(self, front: Ints, tier: int) -> tuple[Ints, Ints]:
        """Go on one by one while the front stays narrow: a long chain has a level for each link."""
        first, targets, tiers, parent, closed = self.first.data, self.targets.data, self.tier.data, self.parent.data, self.closed.data
        queue: list[int] = front.tolist()
        done, known = 0, len(queue)
        while done < len(queue) and len(queue) - done < _LARGE:
            number = queue[done]
            done += 1
            for target in targets[first[number] : first[number + 1]]:
                if tiers[target] < 0 and not closed[target]:
                    tiers[target], parent[target] = tier, number
                    queue.append(target)
        return np.array(queue[known:], np.int64), np.array(queue[done:], np.int64)

    def sources(self, numbers: list[int], tier: int) -> list[tuple[int, int]]:
        """For each of these objects that something in the tier refers to: its number and the first such source."""
        wanted = np.zeros(len(self), bool)
        wanted[numbers] = True
        at = np.flatnonzero(wanted[self.targets]) if numbers else np.zeros(0, np.int64)
        found: dict[int, int] = {}
        for source, target in zip((np.searchsorted(self.first, at, "right") - 1).tolist(), self.targets[at].tolist(), strict=True):
            if self.tier[source] == tier:
                found.setdefault(target, source)
        return list(found.items())

    # ------------------------------------------------------------------ what is left
    def held_from_outside(self, among: Ints) -> Ints:
        """Objects with more references than those among them explain: C++ code or a running expression holds them.

        The rule of the garbage collector itself: references that come from among the objects are subtracted.
        """
        inside = np.zeros(len(self), bool)
        inside[among] = True
        targets = self._edges(among)[1]
        explained = np.bincount(targets[inside[targets]], minlength=len(self))[among]
        items = self.items
        counts = np.fromiter((sys.getrefcount(items[n]) for n in among.tolist()), np.int64, len(among))
        probe = [object()]
        own = sys.getrefcount(probe[0])   # the list and the call
        return among[counts - own > explained]


def take(begin: Callable[[], Iterable[Any]] = tuple) -> Objects:
    """The graph as it is now; collect no garbage while it is used (``gc.disable``).

    Parameters
    ----------
    begin
        Things from which frozen objects (``gc.freeze``) are looked for, besides modules and all that is not frozen.
    """
    items = gc.get_objects()  # before the graph exists: it must not be among its own objects, or it would live on as a cycle
    if gc.get_freeze_count():
        items += _frozen(items, begin())
    return Objects(items)


def _frozen(known: list[Any], more: Iterable[Any]) -> list[Any]:
    """Objects of the permanent generation (``gc.freeze``), which the collector does not list: found from those it lists."""
    seen = Index(np.fromiter(map(id, known), np.int64, len(known)))
    more_seen: set[int] = set()
    found: list[Any] = []
    front: list[Any] = [*known, list(more), list(sys.modules.values())]
    while front:
        new = []
        for begin in range(0, len(front), _CHUNK):
            things = list(chain.from_iterable(_referents(front[begin : begin + _CHUNK])))
            ids = np.fromiter(map(id, things), np.int64, len(things))
            odd = np.flatnonzero(seen.of(ids) < 0)
            odd = odd[np.unique(ids[odd], return_index=True)[1]]
            for thing in map(things.__getitem__, odd.tolist()):
                if gc.is_tracked(thing) and id(thing) not in more_seen:
                    more_seen.add(id(thing))
                    new.append(thing)
            del things
        found += new
        front = new
    return found


def _referents(things: list[Any]) -> list[list[Any]]:
    """What each refers to; of a module its names alone.

    The collector's way into a module's C state is not safe to walk: Python 3.12's ``_asyncio`` shows objects of its free
    list, which come to life and die again by being looked at; the list is then a ring, and the next look never ends.
    """
    modules = {cls for cls in set(map(type, things)) if has_base(cls, ModuleType)}
    if modules.isdisjoint(map(type, things)):
        return list(map(gc.get_referents, things))
    return [gc.get_referents(thing) if type(thing) not in modules else [space] if (space := own_dict(thing)) is not None else [] for thing in things]
