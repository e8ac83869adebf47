"""Lazy modules (``nn.LazyLinear``) in a fake run: a parameter without a shape is no fake; it becomes one where the first batch gives it its shape."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

__all__ = ["install", "like", "move", "placed", "wait"]

_PLACE = "_nbmemprof_place"  # the device on which a parameter is to get its shape
_WAITS = "_nbmemprof_waits"  # what is to be said of it then


def install(torch: Any, changes: Any) -> None:
    """Let parameters and buffers without a shape be made, and be fakes from their first batch on."""
    kinds = torch.nn.parameter

    def parameter(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        return _made(torch, cls, device, dtype, requires_grad=requires_grad)

    def buffer(cls: Any, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent: bool = True) -> Any:
        one = _made(torch, cls, device, dtype, requires_grad=requires_grad)
        one.persistent, one._is_buffer = persistent, True
        return one

    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        place, waits = self.__dict__.pop(_PLACE, None), self.__dict__.pop(_WAITS, None)
        made = torch.empty(shape, device=device or place or "cpu", dtype=dtype or self.dtype).detach()
        if isinstance(self, kinds.UninitializedParameter):
            made = torch.nn.Parameter(made, requires_grad=self.requires_grad)
        made.__dict__.update({name: value for name, value in self.__dict__.items() if name not in made.__dict__})
        _swap(torch, self, made)
        if waits is not None:
            waits(self)

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        kind, given = like(self)
        return memo.setdefault(id(self), kind(*given))

    for kind, new in ((kinds.UninitializedParameter, parameter), (kinds.UninitializedBuffer, buffer)):
        changes.put(kind, "__new__", staticmethod(new))
        changes.put(kind, "materialize", materialize)
        changes.put(kind, "__deepcopy__", copied)


def _swap(torch: Any, one: Any, made: Any) -> None:
    """Let a parameter be another one; torch refuses where weak references are about, which in a child are an earlier recording's, and go on to mean the parameter."""
    kept = torch.utils.weakref
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda _: [])
    try:
        torch.utils.swap_tensors(one, made)
    finally:
        torch.utils.weakref = kept


def like(one: Any) -> tuple[Any, tuple[Any, ...]]:
    """What makes another such parameter: its class and arguments."""
    return type(one), (one.requires_grad, str(one.__dict__.get(_PLACE) or "cpu"), one.dtype)


def _made(torch: Any, cls: Any, device: Any, dtype: Any, *, requires_grad: bool) -> Any:
    place = torch.empty(0, device=device).device  # with the default device, where none is given
    with torch.utils._python_dispatch._disable_current_modes():
        one = torch.Tensor._make_subclass(cls, torch.empty(0, dtype=dtype, device="cpu"), requires_grad)
    one.__dict__[_PLACE] = place
    return one


def move(torch: Any, one: Any, fn: Callable[[Any], Any]) -> bool:
    """``Module.to`` of what has no shape yet: its device and its kind of number change. Whether it is such a one."""
    if not torch.nn.parameter.is_lazy(one):
        return False
    like = fn(torch.empty(0, dtype=one.dtype, device=one.__dict__.get(_PLACE) or "cpu"))
    one.__dict__[_PLACE] = like.device
    if like.dtype != one.dtype:
        with torch.utils._python_dispatch._disable_current_modes():
            one.data = torch.empty(0, dtype=like.dtype, device="cpu")
    return True


def placed(torch: Any, one: Any) -> bool:
    """Let what has no shape yet get it on the device; whether it is such a one."""
    lazy = bool(torch.nn.parameter.is_lazy(one))
    if lazy:
        one.__dict__[_PLACE] = torch.device("cuda", 0)
    return lazy


def wait(torch: Any, one: Any, then: Callable[[Any], None]) -> bool:
    """Do something with a parameter when it gets its shape; whether it has none yet."""
    lazy = bool(torch.nn.parameter.is_lazy(one))
    if lazy:
        one.__dict__[_WAITS] = then
    return lazy
