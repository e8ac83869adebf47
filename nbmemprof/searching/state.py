"""What a step changes, put back after each try: models, optimizers, scalers and schedulers that it refers to, plain names, random numbers."""

from __future__ import annotations

import copy
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from nbmemprof import _optional

__all__ = ["Keeper", "convolves"]

_DEEPEST = 4
_PLAIN = (list, dict, set, deque, bytearray)
_LOOSE_BYTES = 256 << 20  # tensors outside of models that are copied


class Keeper:
    """A picture of what ``step`` refers to, and :meth:`put_back`.

    Looked at: the function's closure, defaults, bound object and the globals that it names, through functions of the user's own
    that it calls. Models: parameters, buffers, gradients, training flags. Optimizers: state and settings. Others with
    ``state_dict``: that. Lists, dicts, sets and attributes of a bound object: their items, not what is inside them.
    Values are copied to host memory, where the GPU has no part in it.
    """

    def __init__(self, *functions: Callable[..., Any] | None) -> None:
        self._torch: Any = _optional.loaded("torch")
        self._undo: list[Callable[[], None]] = []
        self._seen: dict[int, Any] = {}
        self._tensors: set[int] = set()
        self._rng()
        for function in functions:
            self._look(function, 0)

    def put_back(self) -> None:
        """Put everything back as it was."""
        for undo in reversed(self._undo):
            undo()

    def convolves(self) -> bool:
        """Whether convolutions are among the modules that were found."""
        return any(_is_convolution(thing) for thing in self._seen.values())

    # ------------------------------------------------------------------ random numbers
    def _rng(self) -> None:
        state = random.getstate()
        self._undo.append(lambda: random.setstate(state))
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None:
            before = numpy.random.get_state()
            self._undo.append(lambda: numpy.random.set_state(before))
        torch = self._torch
        if torch is None:
            return
        host = torch.get_rng_state()
        self._undo.append(lambda: torch.set_rng_state(host))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.cuda.get_rng_state()
            self._undo.append(lambda: torch.cuda.set_rng_state(device))

    # ------------------------------------------------------------------ what the step refers to
    def _look(self, thing: Any, depth: int) -> None:
        if depth > _DEEPEST or id(thing) in self._seen or thing is None or isinstance(thing, (str, bytes, int, float, complex, types.ModuleType, type)):
            return
        self._seen[id(thing)] = thing
        torch = self._torch
        if isinstance(thing, functools.partial):
            for part in (thing.func, *thing.args, *thing.keywords.values()):
                self._look(part, depth)
        elif isinstance(thing, types.MethodType):
            self._look(thing.__func__, depth)
            self._look(thing.__self__, depth)
        elif isinstance(thing, types.FunctionType):
            self._function(thing, depth)
        elif torch is not None and isinstance(thing, torch.nn.Module):
            self._module(thing)
        elif torch is not None and isinstance(thing, torch.optim.Optimizer):
            self._optimizer(thing)
        elif torch is not None and isinstance(thing, torch.Tensor):
            self._tensor(thing, loose=True)
        elif torch is not None and isinstance(thing, torch.Generator):
            state = thing.get_state()
            self._undo.append(lambda: thing.set_state(state) and None)
        elif isinstance(thing, _PLAIN):
            self._plain(thing, depth)
        elif isinstance(thing, tuple):
            for part in thing[:100]:
                self._look(part, depth + 1)
        elif callable(getattr(thing, "load_state_dict", None)) and callable(getattr(thing, "state_dict", None)):
            with suppress(Exception):  # one that can't tell its state now is left alone
                state = copy.deepcopy(thing.state_dict())
                self._undo.append(lambda: thing.load_state_dict(state))
        elif _users(type(thing).__module__):
            self._object(thing, depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if not _users(function.__module__):
            return
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # a name that is not bound yet
                value = cell.cell_contents
                self._undo.append(functools.partial(setattr, cell, "cell_contents", value))
                self._look(value, depth + 1)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._look(value, depth + 1)
        space = function.__globals__
        for name in _names(function.__code__):
            if name in space:
                value = space[name]
                if not isinstance(value, (types.ModuleType, types.FunctionType, type)):
                    self._undo.append(functools.partial(space.__setitem__, name, value))
                self._look(value, depth + 1)

    def _object(self, thing: Any, depth: int) -> None:
        space = getattr(thing, "__dict__", None)
        if isinstance(space, dict):
            self._contents(space)
            for value in list(space.values()):
                self._look(value, depth + 1)
        call = vars(type(thing)).get("__call__")
        if isinstance(call, types.FunctionType):
            self._look(call, depth + 1)

    def _plain(self, thing: Any, depth: int) -> None:
        self._contents(thing)
        for part in list(thing.values() if isinstance(thing, dict) else thing)[:100] if not isinstance(thing, bytearray) else ():
            self._look(part, depth + 1)

    def _contents(self, thing: Any) -> None:
        kept = copy.copy(thing)

        def undo() -> None:
            if isinstance(thing, (dict, set, deque)):
                thing.clear()
                thing.extend(kept) if isinstance(thing, deque) else thing.update(kept)
            else:
                thing[:] = kept

        self._undo.append(undo)

    # ------------------------------------------------------------------ torch
    def _tensor(self, tensor: Any, *, loose: bool = False) -> None:
        torch = self._torch
        if (
            id(tensor) in self._tensors
            or type(tensor).__name__ == "FakeTensor"
            or tensor.layout != torch.strided
            or tensor.device.type == "meta"
            or tensor.is_inference()
        ):
            return
        self._tensors.add(id(tensor))
        self._seen[id(tensor)] = tensor
        if loose and tensor.untyped_storage().nbytes() > _LOOSE_BYTES:
            return
        grad = tensor.grad if tensor.is_leaf else None
        frozen = not (tensor.requires_grad or loose) and isinstance(tensor, torch.nn.Parameter)
        kept, version, held = _copy(torch, tensor), tensor._version, None if grad is None else _copy(torch, grad)

        def undo() -> None:
            with torch.no_grad():
                if not frozen or tensor._version != version:
                    tensor.data.copy_(kept)
                if tensor.is_leaf:
                    tensor.grad = grad
                    if grad is not None and held is not None:
                        grad.data.copy_(held)

        self._undo.append(undo)

    def _module(self, module: Any) -> None:
        for part in module.modules():
            self._seen[id(part)] = part
            self._contents(part._parameters)
            self._contents(part._buffers)
            training = part.training
            self._undo.append(functools.partial(setattr, part, "training", training))
        for tensor in (*module.parameters(), *module.buffers()):
            self._tensor(tensor)

    def _optimizer(self, optimizer: Any) -> None:
        torch = self._torch
        for group in optimizer.param_groups:
            settings = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            self._undo.append(functools.partial(group.update, settings))
            for tensor in group["params"]:
                self._tensor(tensor)
        for state in optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    self._tensor(value)
            self._contents(state)
        self._contents(optimizer.state)


def convolves(thing: Any, depth: int = 0) -> bool:
    """Whether a model with convolutions is in this: itself, in a container, or an attribute."""
    torch: Any = _optional.loaded("torch")
    if torch is None or depth > _DEEPEST:
        return False
    if isinstance(thing, torch.nn.Module):
        return any(_is_convolution(part) for part in thing.modules())
    inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else vars(thing).values() if hasattr(thing, "__dict__") and not callable(thing) else ()
    return any(convolves(part, depth + 1) for part in list(inside)[:100])


def _is_convolution(thing: Any) -> bool:
    torch: Any = _optional.loaded("torch")
    return torch is not None and isinstance(thing, torch.nn.modules.conv._ConvNd)


def _copy(torch: Any, tensor: Any) -> Any:
    with torch.no_grad():
        return tensor.detach().to("cpu", copy=True)


def _users(module: str | None) -> bool:
    """Whether a module is the user's own: not installed, not the library's."""
    if module is None or module == "__main__":
        return True
    if module.partition(".")[0] in ("nbmemprof", "torch", "numpy", "builtins"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    return not ("site-packages" in file or "dist-packages" in file or file.startswith(sys.base_prefix + "/lib/python"))


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names of a function and of those written in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
