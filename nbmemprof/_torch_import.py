"""Tell when the cell imports torch: recording can begin only then, and we never import it ourselves."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from nbmemprof import _optional

__all__ = ["cancel", "is_here", "when_imported"]

_lock = threading.RLock()
_calls: list[Callable[[], None]] = []


def is_here() -> bool:
    """Whether torch is imported, to its end."""
    torch = _optional.loaded("torch")
    return torch is not None and not getattr(getattr(torch, "__spec__", None), "_initializing", False)


def when_imported(call: Callable[[], None]) -> None:
    """Have ``call`` called once, in the importing thread, right after ``import torch`` is done."""
    with _lock:
        _calls.append(call)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)


def cancel(call: Callable[[], None]) -> bool:
    """Forget a call; tells whether it was still waited for. With the last one the finder goes."""
    with _lock:
        found = call in _calls
        if found:
            _calls.remove(call)
        if not _calls and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
        return found


def _torch_has_come() -> None:
    with _lock:
        calls = _calls.copy()
        for call in calls:
            cancel(call)
    for call in calls:
        call()


class _Finder(MetaPathFinder):
    """Finds nothing itself: wraps the loader that another finder gives."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        for finder in sys.meta_path:
            spec = None if finder is self or not hasattr(finder, "find_spec") else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(Loader):
    """The found loader in all but this: its module's end is told."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _torch_has_come()


_finder = _Finder()
