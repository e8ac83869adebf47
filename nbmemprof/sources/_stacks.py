"""Python stacks, captured fast and kept once each; module paths from the frames that they pass through."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

import polars as pl

from nbmemprof import schema
from nbmemprof._cells import cell_names

__all__ = ["CHECKPOINT", "MODULE", "OPTIMIZER", "Layers", "Stacks"]

# what a stack tells: it runs an optimizer's step, passes through torch.utils.checkpoint, ends where a module of torch.nn makes its parameters
OPTIMIZER, CHECKPOINT, MODULE = 1, 2, 4
_OURS = __file__.rpartition("_stacks")[0]
_LIMIT = 30_000  # distinct paths; one takes about 3 kB

Row = tuple[CodeType, int]


class Stacks:
    """Interns Python stacks: the same frames at the same lines have one number, from 1; 0 means not recorded."""

    def __init__(self) -> None:
        self._ids: dict[tuple[int, ...], tuple[int, int]] = {}
        self._numbers: dict[tuple[Row, ...], tuple[int, int]] = {}
        self._rows: list[tuple[Row, ...]] = [()]
        self._held: dict[int, CodeType] = {}  # keeps the id of a code object its own
        self.lost = 0
        self._root: CodeType | None = None
        self._call: CodeType | None = None

    def look(self) -> None:
        """Find the code objects that end a walk (IPython's) and that tell of a module (torch's)."""
        shell = sys.modules.get("IPython.core.interactiveshell")
        modules = sys.modules.get("torch.nn.modules.module")
        self._root = getattr(getattr(getattr(shell, "InteractiveShell", None), "run_code", None), "__code__", None)
        self._call = getattr(getattr(getattr(modules, "Module", None), "_wrapped_call_impl", None), "__code__", None)

    def of(self, frame: FrameType | None) -> tuple[int, int, FrameType | None, FrameType | None]:
        """Number of the stack that ends in ``frame``, what it tells, and the innermost and outermost module call in it.

        In a notebook it begins with the cell: IPython's own frames are left out.
        """
        root, call = self._root, self._call
        inner = outer = None
        start = frame
        path: list[Any] = []
        push = path.append
        while frame is not None:
            code = frame.f_code
            if code is call:
                outer = frame
                if inner is None:
                    inner = frame
            elif code is root:
                break
            push(id(code))
            push(frame.f_lasti)
            frame = frame.f_back
        found = self._ids.get(tuple(path))
        if found is None:
            found = self._learn(tuple(path), start)
        return found[0], found[1], inner, outer

    def _learn(self, path: tuple[int, ...], frame: FrameType | None) -> tuple[int, int]:
        if len(self._ids) >= _LIMIT:
            self.lost += 1
            return 0, 0
        rows: list[Row] = []
        told = 0
        in_module = False
        while frame is not None and frame.f_code is not self._root:
            code = frame.f_code
            self._held[id(code)] = code
            name = code.co_filename
            if not name.startswith(_OURS):
                rows.append((code, frame.f_lineno))
                if len(rows) == 1 and code.co_name == "__init__" and "/torch/nn/modules/" in name:
                    told |= MODULE
            in_module |= code is self._call
            if name.endswith("torch/optim/optimizer.py") and not in_module:  # a module that a step's closure calls is in its forward
                told |= OPTIMIZER
            elif name.endswith("torch/utils/checkpoint.py"):
                told |= CHECKPOINT
            frame = frame.f_back
        key = tuple(rows)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = (len(self._rows), told)
            self._rows.append(key)
        self._ids[path] = found
        return found

    def keep(self, numbers: Iterable[int]) -> dict[int, int]:
        """Forget all stacks but these; gives old number → new number."""
        rows = {number: self._rows[number] for number in sorted(set(numbers)) if number}
        told = self.told()
        self._ids, self._held, self.lost, self._rows = {}, {}, 0, [(), *rows.values()]
        renumbered = {old: new for new, old in enumerate(rows, 1)}
        self._numbers = {row: (renumbered[old], told.get(old, 0)) for old, row in rows.items()}
        return renumbered | {0: 0}

    def told(self) -> dict[int, int]:
        """What each stack tells, by its number."""
        return dict(self._numbers.values())

    def ending_in(self, place: str) -> list[int]:
        """Numbers of the stacks whose innermost frame is in a file."""
        return [number for number, row in enumerate(self._rows) if row and row[0][0].co_filename.endswith(place)]

    def table(self, numbers: Iterable[int]) -> pl.DataFrame:
        """The table ``stacks`` of these numbers, cells named as ``In[7]``."""
        cells = cell_names()
        columns: dict[str, list[Any]] = {"stack_id": [], "depth": [], "function": [], "filename": [], "line": []}
        for number in numbers:
            for depth, (code, line) in enumerate(self._rows[number]):
                values = (number, depth, code.co_name, cells.get(code.co_filename, code.co_filename), line)
                for column, value in zip(columns.values(), values, strict=True):
                    column.append(value)
        return schema.fill("stacks", columns, len(columns["line"]))


class Layers:
    """Interns module paths: ``BertModel.encoder.layer.0.output``, by the outermost module that is being called."""

    def __init__(self) -> None:
        self.names: list[str | None] = [None]
        self._numbers: dict[str, int] = {}
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._roots: dict[int, weakref.ref[Any]] = {}
        self._titles: dict[str, list[weakref.ref[Any]]] = {}

    def _title(self, root: Any) -> str:
        """Class of a root (of the module inside where the compiler wraps it), with a number where several of it live."""
        inner = root.__dict__.get("_modules", {}).get("_orig_mod")
        root = inner if inner is not None else root
        name = type(root).__name__
        places = self._titles.setdefault(name, [])
        held = [ref() for ref in places]
        at = next((i for i, other in enumerate(held) if other is root), None)
        if at is None:
            at = next((i for i, other in enumerate(held) if other is None), len(places))
            places[at : at + 1] = [weakref.ref(root)]
        return name if at == 0 else f"{name}#{at + 1}"

    def roots(self) -> list[Any]:
        """Outermost modules that were called and are alive."""
        self._roots = {key: ref for key, ref in self._roots.items() if ref() is not None}
        return [module for ref in self._roots.values() if (module := ref()) is not None]

    def of(self, inner: FrameType, outer: FrameType) -> int:
        """Number of the path of the module called in ``inner``; ``outer`` calls the root.

        Only frames of ``Module._wrapped_call_impl`` are looked into: their locals never change, so reading
        them (which copies references into the frame on Python 3.11 and 3.12) lets nothing live longer.
        """
        module = inner.f_locals["self"]
        known = self._known.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        root = outer.f_locals["self"]
        self._roots[id(root)] = weakref.ref(root)
        return self._learn(module, root)

    def place(self, module: Any, root: Any) -> int:
        """Number of a module's path below a root."""
        known = self._known.get(id(module))
        return known[1] if known is not None and known[0]() is module else self._learn(module, root)

    def name(self, module: Any) -> str | None:
        """Path of a module that is known."""
        known = self._known.get(id(module))
        return self.names[known[1]] if known is not None and known[0]() is module else None

    def learn_all(self, root: Any) -> dict[int, str]:
        """Paths of a root and of all below it, by the modules' ids; those that are known already keep theirs."""
        name = self._title(root)
        paths = {}
        for path, child in root.named_modules():
            known = self.name(child)
            paths[id(child)] = known = known or (f"{name}.{path}" if path else name).replace("._orig_mod", "")
            self._known[id(child)] = (weakref.ref(child), self._number(known))
        return paths

    def _learn(self, module: Any, root: Any) -> int:
        name = self._title(root)
        paths = {id(child): (f"{name}.{path}" if path else name).replace("._orig_mod", "") for path, child in root.named_modules()}
        paths.setdefault(id(module), type(module).__name__)
        self._known[id(module)] = (weakref.ref(module), self._number(paths[id(module)]))
        if len(self._known) > 100_000:
            for key in [key for key, value in self._known.items() if value[0]() is None]:
                del self._known[key]
        return self._known[id(module)][1]

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            self._numbers[name] = len(self.names)
            self.names.append(name)
        return self._numbers[name]
