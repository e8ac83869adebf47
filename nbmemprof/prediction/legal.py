"""Fake CUDA tensors on a machine without a GPU: what torch's C++ asks of a device is answered in place, verified, and undone.

PyTorch keeps one device guard for each kind of device in an exported array, and has a function of its own that puts a no-op
guard in CUDA's place where one is registered that reports no devices. It is lent such a guard: an object whose virtual
functions all return 0. The hooks object, exported too, gets a copied table of virtual functions in which ``isBuilt`` says
true and ``hasPrimaryContext`` false. Both hold for the whole process: a child process is the right place.

A wheel for CUDA says ``isBuilt`` by itself, so that a right answer proves nothing: each of the two functions is put in place
alone and must have been called by what is known to ask it, else the table has another order.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError

__all__ = ["CantFake", "cant_fake", "fake_cuda"]

# itanium C++ ABI; c10/core/impl/DeviceGuardImplInterface.h, aten/src/ATen/Context.h (torch 2.11 to 2.14)
_REGISTRY = "_ZN3c104impl26device_guard_impl_registryE"
_ENSURE = "_ZN3c104impl24ensureCUDADeviceGuardSetEv"
_HOOKS = "_ZN2at6detail12getCUDAHooksEv"
_CUDA = 1  # c10::DeviceType::CUDA
_BUILT, _CONTEXT = 2, 4  # slots of AcceleratorHooksInterface after its two destructors: isBuilt, isAvailable, hasPrimaryContext
_SLOTS = 64  # more than the hooks have; what lies behind a table is read, never called
_ANSWER = ctypes.CFUNCTYPE(ctypes.c_uint64)


class CantFake(NbmemprofError):
    """A torch can't be made to hold fake CUDA tensors: its internals are not those that are known."""


def cant_fake(torch: Any, what: str) -> CantFake:
    """The error that says why this torch can't."""
    return CantFake(
        f"Fake CUDA tensors can't be set up with torch {torch.__version__}: {what}. Nothing was changed. Use torch 2.11, 2.13 or 2.14, or predict on a machine with a GPU."
    )


def _library(torch: Any, name: str) -> ctypes.CDLL:
    path = Path(torch.__file__).parent / "lib" / name
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise cant_fake(torch, f"{name} can't be opened ({error})") from error


class _Patch:
    """Pointers in the process that were changed, newest last, and what keeps the new ones alive."""

    def __init__(self) -> None:
        self.old: list[tuple[int, int]] = []
        self.alive: list[Any] = []

    def write(self, at: int, value: int) -> None:
        cell = ctypes.c_uint64.from_address(at)
        self.old.append((at, cell.value))
        cell.value = value

    def undo(self) -> None:
        while self.old:
            at, value = self.old.pop()
            ctypes.c_uint64.from_address(at).value = value


def _symbol(torch: Any, library: ctypes.CDLL, name: str) -> int:
    try:
        found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    except AttributeError as error:
        raise cant_fake(torch, f"the symbol {name} is not exported") from error
    return int(found or 0)


def _guard(torch: Any, patch: _Patch) -> None:
    c10 = _library(torch, "libc10.so")
    place = _symbol(torch, c10, _REGISTRY) + 8 * _CUDA
    ensure = ctypes.CFUNCTYPE(None)(_symbol(torch, c10, _ENSURE))
    zero = _ANSWER(lambda: 0)
    table = (ctypes.c_uint64 * _SLOTS)(*[ctypes.cast(zero, ctypes.c_void_p).value or 0] * _SLOTS)
    lent = ctypes.c_uint64(ctypes.addressof(table))
    patch.alive += [zero, table, lent, ensure]
    patch.write(place, ctypes.addressof(lent))
    ensure()
    if ctypes.c_uint64.from_address(place).value == ctypes.addressof(lent):
        raise cant_fake(torch, "the device guard that was lent was not replaced by a no-op guard")


class _Hooks:
    """The hooks object with a copied table of virtual functions; what was put there counts its calls."""

    def __init__(self, torch: Any, patch: _Patch) -> None:
        get = ctypes.CFUNCTYPE(ctypes.c_uint64)(_symbol(torch, _library(torch, "libtorch_cpu.so"), _HOOKS))
        hooks = get()
        if not hooks:
            raise cant_fake(torch, "there is no object of CUDA hooks")
        # two words before the first function belong to the table: offset to top, type information
        self.table = (ctypes.c_uint64 * (_SLOTS + 2))()
        ctypes.memmove(self.table, ctypes.c_uint64.from_address(hooks).value - 16, 8 * (_SLOTS + 2))
        self.calls: dict[int, int] = {}
        self._patch = patch
        patch.alive += [get, self.table]
        patch.write(hooks, ctypes.addressof(self.table) + 16)

    def put(self, slot: int, value: int) -> None:
        """Let the function at ``slot`` return ``value``."""

        def answer() -> int:
            self.calls[slot] = self.calls.get(slot, 0) + 1
            return value

        function = _ANSWER(answer)
        self._patch.alive.append(function)
        self.table[2 + slot] = ctypes.cast(function, ctypes.c_void_p).value or 0


def _built(torch: Any, hooks: _Hooks) -> None:
    """An accelerator is named, and by our word."""
    hooks.put(_BUILT, 1)
    named = torch._C._accelerator_getAccelerator() if hasattr(torch._C, "_accelerator_getAccelerator") else torch.accelerator.current_accelerator()
    if str(named) != "cuda" or not hooks.calls.get(_BUILT):
        raise cant_fake(torch, f"the accelerator is {named}, and isBuilt was asked {hooks.calls.get(_BUILT, 0)} times for it where it was: the table of hooks has another order")


def _step(torch: Any, hooks: _Hooks) -> None:
    """Everything that a step needs, on one number: a fake is made, filled in place and sent backward, which asks for a context."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    hooks.put(_CONTEXT, 0)
    try:
        with torch.autograd.set_multithreading_enabled(False), FakeTensorMode(allow_non_fake_inputs=True):
            number = torch.empty(2, device="cuda").fill_(1.0).requires_grad_()
            (number * 2.0).sum().backward()
            made = number.grad is not None and number.grad.device.type == "cuda"
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise cant_fake(torch, f"a fake step fails with {str(error).splitlines()[0]!r}") from error
    if not made:
        raise cant_fake(torch, "a fake step leaves no gradient on cuda")
    if not hooks.calls.get(_CONTEXT):
        raise cant_fake(torch, "a backward pass does not ask hasPrimaryContext where it was: the table of hooks has another order")


@contextlib.contextmanager
def fake_cuda() -> Iterator[None]:
    """Let fake CUDA tensors be made, computed with and sent backward in this process; what was changed is put back at the end.

    Raises
    ------
    CantFake
        A symbol is missing or a table has another order; nothing is left changed.
    """
    torch = _optional.require("torch", feature="a prediction")
    patch = _Patch()
    try:
        _guard(torch, patch)
        hooks = _Hooks(torch, patch)
        _built(torch, hooks)
        _step(torch, hooks)
        yield
    finally:
        patch.undo()
