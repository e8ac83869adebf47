"""One look at the process: every tensor's storage, and the shortest chain to it from what a person can name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from nbmemprof import _optional
from nbmemprof.errors import NotRecording
from nbmemprof.holding import _objects, _roots
from nbmemprof.holding._names import Link, Namer, describe_function, short
from nbmemprof.holding._objects import Ints, Objects
from nbmemprof.holding._parts import has_base, own_dict
from nbmemprof.holding._roots import Root, Slot
from nbmemprof.holding._tensors import Graphs, Memory, Reader, Saved

__all__ = ["GARBAGE", "NOTEBOOK", "Place", "Row", "Scan", "look", "shell_here"]

# tiers: what an earlier one holds is its own, however short a later one's chain is
USER, RUNNING, NOTEBOOK, OUTSIDE, GARBAGE = range(5)
_BASE = "_base"
_CONTAINERS = (dict, list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor (or storage that only C++ refers to) and how it is reached; ``number`` is that of the object, or of the root of its graph."""

    memory: Memory
    link: Link
    tier: int
    number: int
    references: int
    is_object: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """A place of the notebook's machinery, the bytes that it alone keeps from going, and what empties it."""

    labels: tuple[str, ...]
    kind: str
    size_bytes: int
    keys: frozenset[int]
    clears: tuple[Callable[[], None], ...]


@dataclass(frozen=True)
class Scan:
    """What was found. ``places`` can let go of things; the rest is numbers and text, and keeps no object alive."""

    rows: list[Row]
    places: list[Place]
    hooks: list[tuple[str, str, str, int]]
    notes: list[str]
    objects: int = 0

    def tiers(self) -> dict[int, int]:
        """For each storage the first tier that holds it."""
        found: dict[int, int] = {}
        for row in self.rows:
            found[row.memory.key] = min(row.tier, found.get(row.memory.key, row.tier))
        return found


def shell_here() -> Any:
    """The IPython shell of this process; None outside of one."""
    ipython = _optional.loaded("IPython")
    return ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None


def look(namespace: Mapping[str, Any] | None = None, shell: Any = None) -> Scan:
    """Search the whole process once. No method of the user's objects is called; garbage is not collected meanwhile."""
    torch = _optional.loaded("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return Scan([], [], [], ["torch is not imported in this process: there are no tensors"])
    serving = _optional.loaded("nbmemprof.prediction.serving")
    if serving is not None and serving.current is not None:
        raise NotRecording("Tensors of a fake session hold no memory, so nobody holds any. See what the cells would take with %%memprof, or %memprof predict off and look again.")
    if shell is None:
        shell = shell_here()
    if namespace is None:
        namespace = shell.user_ns if shell is not None else own_dict(sys.modules["__main__"]) or {}
    collecting = gc.isenabled()
    gc.disable()
    try:
        reader = Reader(torch)
        with reader.plainly():
            return _Search(reader, namespace, shell, _objects.take(lambda: [namespace, *(root.thing for root in _roots.running())])).run()
    finally:
        if collecting:
            gc.enable()


class _Search:
    """The walk through the tiers; lives for one look."""

    def __init__(self, reader: Reader, namespace: Mapping[str, Any], shell: Any, objects: Objects) -> None:
        self.reader, self.namespace, self.shell, self.objects = reader, namespace, shell, objects
        of_class = {cls: reader.kind(cls) for cls in set(map(type, objects.items))}
        kinds = np.fromiter(map(of_class.__getitem__, map(type, objects.items)), np.int8, len(objects))
        self.tensors, self.modules, self.optimizers = (kinds > 0) & (kinds < 4), np.flatnonzero(kinds == 4), np.flatnonzero(kinds == 5)
        self.is_storage = kinds == 2
        self.roots: list[Root] = []
        self.namer = Namer(objects, self.roots)
        self.graphs = Graphs(reader)
        self.saved: list[tuple[Saved, list[Memory], int]] = []
        self.beyond: dict[int, list[int]] = {}
        self.order: list[tuple[int, Ints]] = []
        self.behind: set[int] = set()  # tensors that only a view of theirs keeps: C++ refers to them, no name does

    def run(self) -> Scan:
        slots = _roots.machinery(self.shell)
        self._fence(slots)
        self._reach(USER, list(_roots.names(self.namespace, self.shell)))
        self._open_modules(slots)
        modules = list(_roots.modules(self.namespace))
        self.objects.close(own_dict(root.thing) for root in modules)  # a module's names are its own, not those of a function that runs in it
        self._reach(RUNNING, [*_roots.running(), *_roots.handled()])
        self._open_modules(slots)
        self._reach(RUNNING, modules)
        self.objects.closed[:] = False
        self._reach(NOTEBOOK, [Root(slot.thing, slot.label, slot.kind) for slot in sorted(slots, key=lambda s: s.kind != "output")])
        self._rest()
        rows = list(self._rows())
        rows += self._blocks(rows)
        scan = Scan(rows, [], list(self._repeated_hooks()), list(self._notes()), len(self.objects))
        scan.places.extend(self._places(slots, rows, scan.tiers()))
        return scan

    # ------------------------------------------------------------------ the tiers
    def _fence(self, slots: list[Slot]) -> None:
        """Cut what the machinery keeps off from its keepers; from the user's names, leave modules and the shell alone."""
        by_owner: dict[int, tuple[Any, list[Any]]] = {}
        for slot in slots:
            for owner in slot.owners:
                by_owner.setdefault(id(owner), (owner, []))[1].append(slot.thing)
        for owner, things in by_owner.values():
            self.objects.cut(owner, things)
        modules = [m for m in list(sys.modules.values()) if m is not None and has_base(type(m), ModuleType)]
        self.objects.close([*modules, *(own_dict(m) for m in modules), self.namespace, self.shell, getattr(self.shell, "kernel", None)])

    def _open_modules(self, slots: list[Slot]) -> None:
        """From here on modules are entered, the machinery's own errors and results are not, wherever running code names them."""
        self.objects.closed[:] = False
        current = {id(root.thing) for root in _roots.handled()}
        self.objects.close(slot.thing for slot in slots if slot.kind != "output" and id(slot.thing) not in current)

    def _reach(self, tier: int, roots: list[Root]) -> None:
        first = len(self.roots)
        self.roots += roots
        numbers = self.objects.numbers(root.thing for root in roots).tolist()
        late = [int(n) for n in self.optimizers if not self.objects.closed[n]]  # an optimizer has its model's weights: the model comes first
        self.objects.closed[late] = True
        self._walk([n for k, n in enumerate(numbers) if self.objects.enter(n, -2 - first - k, tier)], tier)
        self.objects.closed[late] = False
        start = [n for k, n in enumerate(numbers) if self.objects.enter(n, -2 - first - k, tier)]
        self._walk([*start, *(n for n, source in self.objects.sources(late, tier) if self.objects.enter(n, source, tier))], tier)

    def _walk(self, start: list[int], tier: int) -> None:
        """Spread, and go on through what autograd keeps, until nothing is new."""
        while start:
            reached = self.objects.spread(np.array(start, np.int64), tier)
            self.order.append((tier, reached[self.tensors[reached]]))
            found = [saved for n in self.order[-1][1].tolist() if not self.is_storage[n] for saved in self._kept_by(n)]
            numbers = self.objects.numbers(saved.thing for saved in found).tolist()
            start = []
            for saved, number in zip(found, numbers, strict=True):
                if number >= 0:
                    if self.objects.enter(number, saved.root, tier):
                        if saved.name == _BASE:
                            self.behind.add(number)
                        self.namer.across[number] = _steps(saved)
                        self.beyond.setdefault(saved.root, []).append(number)
                        start.append(number)
                elif self.reader.kind(type(saved.thing)):
                    self.saved.append((Saved(saved.root, saved.node, saved.name, None, saved.is_object), list(self.reader.memory(saved.thing)), tier))

    def _kept_by(self, number: int) -> Iterator[Saved]:
        tensor = self.objects.items[number]
        yield from self.graphs.from_tensor(tensor, number)
        yield from (Saved(number, "", name, thing, False) for name, thing in self.reader.beside(tensor))

    def _rest(self) -> None:
        """What no name leads to: held by C++ or a running expression, or garbage in cycles."""
        if not (self.tensors & (self.objects.tier < 0)).any():
            return
        left = np.flatnonzero(self.objects.tier < 0)
        self._enter_all(self.objects.held_from_outside(left), OUTSIDE, "native")
        left = np.flatnonzero(self.objects.tier < 0)
        named = np.fromiter((not self.tensors[n] and type(self.objects.items[n]) not in _CONTAINERS for n in left.tolist()), bool, len(left))
        self._enter_all(left[named], GARBAGE, "cycle")
        self._enter_all(left[~named], GARBAGE, "cycle")

    def _enter_all(self, numbers: Ints, tier: int, kind: str) -> None:
        self.roots.append(Root(None, "", kind))
        self._walk([n for n in numbers.tolist() if self.objects.enter(n, -1 - len(self.roots), tier)], tier)

    # ------------------------------------------------------------------ what was found
    def _rows(self) -> Iterator[Row]:
        references = np.bincount(self.objects.targets, minlength=len(self.objects))
        known: dict[int, int] = {}
        storages: list[Row] = []
        for tier, numbers in self.order:
            for number in numbers.tolist():
                if number in self.behind:
                    continue
                for memory in self.reader.memory(self.objects.items[number]):
                    row = Row(memory, self.namer.link(number), tier, number, int(references[number]))
                    if self.is_storage[number]:
                        storages.append(row)
                        continue
                    known[memory.key] = min(tier, known.get(memory.key, tier))
                    yield row
        for saved, memories, tier in self.saved:
            for memory in memories:
                if tier < known.get(memory.key, GARBAGE + 1):
                    known[memory.key] = tier
                    yield Row(memory, self.namer.beyond(self.namer.link(saved.root), _steps(saved)), tier, saved.root, 0, is_object=False)
        yield from self._storages(storages, known)

    def _blocks(self, rows: list[Row]) -> list[Row]:
        link = Link(("device memory",), "device memory", "native", "", "", "native")
        known = [row.memory.addr for row in rows if row.memory.device == "cuda"]
        return [Row(memory, link, OUTSIDE, -1, 0, is_object=False) for memory in self.reader.blocks(known)]

    @staticmethod
    def _storages(storages: list[Row], known: dict[int, int]) -> Iterator[Row]:
        """Storage objects whose tensors are gone."""
        for row in storages:
            if row.tier < known.get(row.memory.key, GARBAGE + 1):
                known[row.memory.key] = row.tier
                yield row

    def _repeated_hooks(self) -> Iterator[tuple[str, str, str, int]]:
        """Modules on which one function, defined anew each time, is registered more than once."""
        for number in self.modules.tolist():
            if self.objects.tier[number] < 0:
                continue
            for name, hooks in list((own_dict(self.objects.items[number]) or {}).items()):
                if type(name) is not str or not name.endswith("_hooks") or not has_base(type(hooks), dict) or len(hooks) < 2:
                    continue
                counts: dict[tuple[str, str, int], int] = {}
                for hook in list(dict.values(hooks)):
                    if type(hook) is FunctionType:
                        code = hook.__code__
                        key = (describe_function(hook), code.co_filename, code.co_firstlineno)
                        counts[key] = counts.get(key, 0) + 1
                for (function, _, _), count in counts.items():
                    if count > 1:
                        yield short(self.namer.link(number).text), name.strip("_").removesuffix("s").replace("_", " "), function, count

    def _notes(self) -> Iterator[str]:
        if self.graphs.unread:
            yield f"{self.graphs.unread} tensors that autograd saved could not be read: this torch ({self.reader.torch.__version__}) can't give them without running hooks"

    def _places(self, slots: list[Slot], rows: list[Row], tiers: Mapping[int, int]) -> Iterator[Place]:
        """For each thing that the machinery keeps: its places, and the storages that only the machinery keeps alive through it."""
        at: dict[int, dict[int, int]] = {}
        for row in rows:
            if tiers[row.memory.key] == NOTEBOOK:
                at.setdefault(row.number, {})[row.memory.key] = row.memory.size_bytes
        groups: dict[int, list[Slot]] = {}
        for slot in slots:
            groups.setdefault(id(slot.thing), []).append(slot)
        for group in groups.values():
            found: dict[int, int] = {}
            for number in self._below(self.objects.index.one(group[0].thing)):
                found |= at.get(number, {})
            if found:
                labels, clears = tuple(slot.label for slot in group), tuple(slot.clear for slot in group)
                yield Place(labels, group[0].kind, sum(found.values()), frozenset(found), clears)

    def _below(self, number: int) -> Iterable[int]:
        """What hangs on an object and on nothing of the user's."""
        seen = {number} if number >= 0 and self.objects.tier[number] == NOTEBOOK else set()
        waiting = list(seen)
        while waiting:
            at = waiting.pop()
            for after in (*self.objects.after(at), *self.beyond.get(at, ())):
                if after not in seen and self.objects.tier[after] == NOTEBOOK:
                    seen.add(after)
                    waiting.append(after)
        return seen


def _steps(saved: Saved) -> tuple[str, ...]:
    if not saved.node:
        return (f".{saved.name}",)
    return (".grad_fn", f"{saved.node}.{saved.name}" if saved.name else saved.node)
