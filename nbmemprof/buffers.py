"""Tensors that are used again and again instead of being allocated each step."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_bytes

__all__ = ["BufferPool"]


class BufferPool:
    """Tensors that are used again and again, by shape, dtype and device: no allocation a step, no fragmentation.

    ``with pool.buffer((32, 1024), device="cuda") as x: ...``, or ``get`` and ``put``. Contents are those of the last
    use. Threads may share a pool. On a GPU a buffer that another stream used must be synchronized before it is put back.

    Parameters
    ----------
    limit_bytes
        Most that waits in the pool; what is put back beyond it is let go. None: no bound.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> pool = mp.BufferPool()
    >>> for _ in range(3):
    ...     with pool.buffer((32, 1024)) as x:
    ...         total = x.fill_(1).sum()
    >>> pool.stats()["hits"], pool.stats()["misses"]
    (2, 1)
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._limit = limit_bytes
        self._lock = threading.RLock()  # a tensor may die, and tell so, while a thread is in here
        self._free: dict[tuple[Any, ...], list[Any]] = {}
        self._out: dict[int, tuple[tuple[Any, ...], weakref.ref[Any]]] = {}  # one that is lost, not put back, is not kept
        self._counts = {"hits": 0, "misses": 0, "dropped": 0}

    def get(self, shape: int | tuple[int, ...], dtype: Any = None, device: Any = None) -> Any:
        """Take a tensor of this shape; a new one only where none waits.

        ``dtype`` and ``device`` are torch's defaults where they are left out. What is in it is what the last user left.
        """
        torch = _optional.require("torch", feature="BufferPool")
        dtype = dtype or torch.get_default_dtype()
        where = torch.device(device) if device is not None else torch.get_default_device()
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device())
        key = ((shape,) if isinstance(shape, int) else tuple(shape), dtype, str(where))
        with self._lock:
            waiting = self._free.get(key)
            tensor = waiting.pop() if waiting else None
            self._counts["hits" if tensor is not None else "misses"] += 1
        if tensor is None:
            tensor = torch.empty(key[0], dtype=dtype, device=where)
        number, out = id(tensor), self._out

        def lost(ref: weakref.ref[Any]) -> None:
            if out.get(number, (None, None))[1] is ref:
                del out[number]

        with self._lock:
            out[number] = (key, weakref.ref(tensor, lost))
        return tensor

    def put(self, tensor: Any) -> None:
        """Give a tensor back.

        Raises
        ------
        NbmemprofError
            For a tensor that is not out of this pool: put back twice, or never taken.
        """
        with self._lock:
            found = self._out.pop(id(tensor), None)
            if found is None:
                raise NbmemprofError(f"This tensor (shape {tuple(tensor.shape)}) is not out of this pool. Put back what get() gave, once; a view of it is not it.")
            if self._limit is not None and self._waiting() + tensor.nbytes > self._limit:
                self._counts["dropped"] += 1
            else:
                self._free.setdefault(found[0], []).append(tensor)

    @contextmanager
    def buffer(self, shape: int | tuple[int, ...], dtype: Any = None, device: Any = None) -> Iterator[Any]:
        """Take a tensor for a ``with`` block, as :meth:`get` does, and put it back at its end."""
        tensor = self.get(shape, dtype, device)
        try:
            yield tensor
        finally:
            self.put(tensor)

    def clear(self) -> None:
        """Let go of all that wait; those in use stay in use."""
        with self._lock:
            self._free.clear()

    def stats(self) -> Mapping[str, int]:
        """``hits misses dropped`` so far; ``waiting waiting_bytes in_use in_use_bytes`` now."""
        with self._lock:
            return {
                **self._counts, "waiting": sum(map(len, self._free.values())), "waiting_bytes": self._waiting(),
                "in_use": len(self._out), "in_use_bytes": sum(tensor.nbytes for _, ref in list(self._out.values()) if (tensor := ref()) is not None),
            }  # fmt: skip

    def __repr__(self) -> str:
        now = self.stats()
        return f"<BufferPool: {now['in_use']} in use ({format_bytes(now['in_use_bytes'])}), {now['waiting']} waiting ({format_bytes(now['waiting_bytes'])}), {now['hits']} of {now['hits'] + now['misses']} requests served from it>"

    def _waiting(self) -> int:
        return sum(tensor.nbytes for tensors in self._free.values() for tensor in tensors)
