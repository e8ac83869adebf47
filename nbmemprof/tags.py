"""What the user says about memory: ``mp.tag`` names what an object's storages are for, ``mp.phase`` a part of the program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from nbmemprof import schema
from nbmemprof.errors import NbmemprofError

__all__ = ["Listener", "listeners", "phase", "tag", "tagged"]

_T = TypeVar("_T")
_objects: dict[int, tuple[Callable[[], Any], str, str]] = {}


class Listener(Protocol):
    """A recording under way."""

    def named_phase(self, name: str | None) -> str | None:
        """A named phase begins or, with the name of the one around it, ends; gives the name that held before."""

    def tagged_now(self, obj: Any, category: str, name: str) -> None:
        """An object was tagged."""


listeners: list[Listener] = []


def tag(obj: _T, category: str, name: str | None = None) -> _T:
    """Say what the memory of an object is for.

    Parameters
    ----------
    obj
        A tensor, a module, or anything that holds tensors: lists, dicts, objects (block tables, caches of your own).
        What it holds is looked up again at the end of each recording, so it may grow.
    category
        One of the categories: ``"kv_cache"``, ``"inputs"``, ``"buffers"``, …
    name
        How views call it; by default the name of its class.

    Returns
    -------
    ``obj`` itself. Only a weak reference is kept where its type allows one.

    Raises
    ------
    NbmemprofError
        For a category that does not exist.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     cache = mp.tag([torch.zeros(2, 128, 64) for _ in range(4)], "kv_cache")
    >>> mp.breakdown(recording.capture, at="end").filter(category="kv_cache")["requested_bytes"].item()
    262144
    """
    if category not in schema.CATEGORIES:
        raise NbmemprofError(f"There is no category {category!r}. Use one of: {', '.join(schema.CATEGORIES)}.")
    word = name or type(obj).__name__
    key = id(obj)
    try:
        ref: Callable[[], Any] = weakref.ref(obj, lambda _: _objects.pop(key, None))
    except TypeError:  # lists, dicts, tuples and classes with __slots__ know no weak references
        ref = _contents(obj)
    _objects[key] = (ref, category, word)
    for listener in listeners:
        listener.tagged_now(obj, category, word)
    return obj


def _contents(obj: Any) -> Callable[[], Any]:
    """Weak references to what a container holds now."""
    refs = []
    for item in obj.values() if isinstance(obj, dict) else obj if isinstance(obj, (list, tuple, set, frozenset)) else (getattr(obj, n, None) for n in getattr(type(obj), "__slots__", ())):
        try:
            refs.append(weakref.ref(item))
        except TypeError:
            if isinstance(item, (list, tuple, dict)):
                refs.append(_contents(item))  # type: ignore[arg-type]
    return lambda: [held for ref in refs if (held := ref()) is not None] or None


def tagged() -> Iterator[tuple[Any, str, str]]:
    """Tagged objects that are alive, with category and name."""
    for key, (ref, category, name) in list(_objects.items()):
        obj = ref()
        if obj is None:
            _objects.pop(key, None)
        else:
            yield obj, category, name


class phase:  # noqa: N801 - used as a function: with mp.phase("rollout"):
    """Name a part of the program: ``with mp.phase("rollout"): ...``; allocations in it carry the name as their phase. Ranges of NVTX (``torch.cuda.nvtx``) do the same.

    Parameters
    ----------
    name
        The phase, as ``timeline(by="phase")`` and the table of allocations then call it. Within another phase it stands in its place until it ends.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     with mp.phase("rollout"):
    ...         sample = torch.ones(1 << 18)
    >>> mp.timeline(recording.capture, by="phase").filter(series="rollout")["size_bytes"].max()
    1048576
    """

    def __init__(self, name: str) -> None:
        self.name = str(name)
        self._before: list[tuple[Listener, str | None]] = []

    def __enter__(self) -> Self:
        self._before = [(listener, listener.named_phase(self.name)) for listener in list(listeners)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for listener, name in self._before:
            listener.named_phase(name)
