"""Names, grids and call stacks of the kernels that a process launches, by a CUPTI callback on the driver's launch functions.

A callback runs inside a CUDA call: it calls neither CUDA nor CUPTI, raises nothing, and appends to a list.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbmemprof.gpu import _structs
from nbmemprof.gpu._cupti import Cupti, CuptiRefused

__all__ = ["Launch", "LaunchNames", "demangle"]

_DRIVER_API = 1  # CUpti_CallbackDomain
# cupti_driver_cbid.h
_PLAIN = {307, 442, 477, 478}  # cuLaunchKernel, _ptsz, cuLaunchCooperativeKernel, _ptsz
_CONFIGURED = {652, 653}  # cuLaunchKernelEx, _ptsz
_GRAPHS = {514, 515}  # cuGraphLaunch, _ptsz
_ENTER = 0
_OURS = str(Path(__file__).parents[1])
_DEPTH = 48

Frame = tuple[Any, int]  # code object, line
Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Launch:
    """One call that started a kernel, or a graph of them (then grid and block are None)."""

    name: str
    grid: Triple | None
    block: Triple | None
    shared_bytes: int | None
    stream: int | None
    stack: tuple[Frame, ...]  # innermost first; empty on threads without Python
    graph: bool = False
    time_s: float | None = None  # time.perf_counter() at the call


def _stack() -> tuple[Frame, ...]:
    try:
        frame: Any = sys._getframe(2)
    except ValueError:
        return ()
    found: list[Frame] = []
    while frame is not None and len(found) < _DEPTH and frame.f_code.co_name != "run_code":  # IPython's own frames are below that one
        if not frame.f_code.co_filename.startswith(_OURS):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


def demangle(symbol: str) -> str:
    """``void scale<float>(float*)`` of ``_Z5scale…``; the symbol itself where it isn't mangled or no demangler is there."""
    if not symbol.startswith("_Z"):
        return symbol
    function = _demangler()
    if function is None:
        return symbol
    status = ctypes.c_int()
    text = function(symbol.encode(), None, None, ctypes.byref(status))
    if status.value or not text:
        return symbol
    name = ctypes.cast(text, ctypes.c_char_p).value
    ctypes.CDLL(None).free(ctypes.c_void_p(text))
    return name.decode(errors="replace") if name else symbol


def _demangler() -> Callable[..., Any] | None:
    try:
        function = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):
        return None
    function.restype = ctypes.c_void_p
    return function


class LaunchNames:
    """A CUPTI subscriber that notes every launch between ``start`` and ``stop``.

    Only one subscriber may exist in a process: where another is there, ``refused`` says so and kernels stay without names.

    Parameters
    ----------
    context
        ``CUcontext`` whose launches are noted; None notes those of all devices.
    limit, on_limit
        Before launch number ``limit`` (from 0) ``on_limit`` is called, inside the launch.
    """

    def __init__(self, cupti: Cupti, context: int | None = None, limit: int | None = None, on_limit: Callable[[], None] | None = None) -> None:
        self.cupti, self.launches = cupti, list[Launch]()
        self._context = context
        self._limit, self._on_limit = limit, on_limit
        self.refused: CuptiRefused | None = None
        self._handle = ctypes.c_void_p()
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
        self._callback = kind(self._launched)  # kept: CUPTI calls it as long as it is subscribed

    def start(self) -> None:
        """Subscribe."""
        try:
            self._check("cuptiSubscribe", ctypes.byref(self._handle), self._callback, None)
            for cbid in sorted(_PLAIN | _CONFIGURED | _GRAPHS):
                self._check("cuptiEnableCallback", 1, self._handle, _DRIVER_API, cbid)
        except CuptiRefused as error:
            self.refused = error
            self.stop()

    def stop(self) -> None:
        """Unsubscribe; a second call does nothing."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle.value:
            with contextlib.suppress(CuptiRefused):
                self._check("cuptiUnsubscribe", handle)

    def _check(self, function: str, *arguments: Any) -> None:
        code = int(getattr(self.cupti.library, function)(*arguments))
        if code:
            raise CuptiRefused(function, code, self.cupti.word(code))

    def _launched(self, user: Any, domain: int, cbid: int, data: int) -> None:
        try:
            told = ctypes.cast(data, ctypes.POINTER(_structs.LaunchData)).contents
            if told.site == _ENTER and self._context in (None, told.context):
                if len(self.launches) == self._limit and self._on_limit is not None:
                    self._on_limit()
                self.launches.append(_read(cbid, told))
        except Exception:  # noqa: S110 - nothing may leave a callback; the row stays without a name
            pass


def _read(cbid: int, told: Any) -> Launch:
    name = (told.symbol or b"").decode(errors="replace")
    if cbid in _GRAPHS:
        return Launch("graph", None, None, None, None, _stack(), graph=True, time_s=time.perf_counter())
    config: Any
    if cbid in _CONFIGURED:
        config = ctypes.cast(told.params, ctypes.POINTER(ctypes.POINTER(_structs.LaunchConfig))).contents.contents
    else:
        config = ctypes.cast(told.params, ctypes.POINTER(_structs.LaunchParams)).contents
    return Launch(name, tuple(config.grid), tuple(config.block), int(config.shared_bytes), int(config.stream or 0), _stack(), time_s=time.perf_counter())
