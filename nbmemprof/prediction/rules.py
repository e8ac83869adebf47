"""The tables that the recorder consults for each operator: what to do before, after, and in which order outputs are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbmemprof.prediction.catalogue import GPU

__all__ = ["Rules"]


class Rules:
    """Handlers by operator.

    Attributes
    ----------
    before
        Called instead of the operator with ``(recorder, func, args, kwargs)``; ``NotImplemented`` lets it run as it is.
    after
        Called with ``(recorder, func, args, kwargs, out)`` when its outputs are written down.
    fix
        Called with ``(recorder, args, out)``: returns the outputs as the device would lay them out.
    emit
        Called with the same; writes the outputs down itself, among other requests.
    order
        From an output to the outputs in the order in which the device's kernel makes them.
    """

    def __init__(self, torch: Any, gpu: GPU, version: str, record: Any) -> None:
        self.torch, self.gpu, self.version, self.record = torch, gpu, version, record
        self.before: dict[Any, Callable[..., Any]] = {}
        self.after: dict[Any, Callable[..., Any]] = {}
        self.fix: dict[Any, Callable[..., Any]] = {}
        self.emit: dict[Any, Callable[..., Any]] = {}
        self.order: dict[Any, Callable[[Any], Any]] = {}
        self.handles: set[bool] = set()  # cuBLAS handles made so far: False the caller's thread, True backward's
        self.light = False  # cublasLt's workspace is there

        self._seen: set[str] = set()

    def seen(self, what: str) -> bool:
        """Whether something that happens once for a process has happened; from now on it has."""
        known = what in self._seen
        self._seen.add(what)
        return known
