"""In the child: what was there before the predicted code takes its place on the fake device, as an opening balance with categories."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from nbmemprof._kv_caches import is_cache, tensors
from nbmemprof.prediction import lazies

__all__ = ["Adopted", "adopt", "name_lines", "name_owners"]

DEPTH = 4  # lists of dicts of tensors, and objects that hold modules


@dataclasses.dataclass
class Adopted:
    """What was moved: names with their bytes, and those that could not be."""

    moved: dict[str, int] = dataclasses.field(default_factory=dict)
    left: dict[str, str] = dataclasses.field(default_factory=dict)


def adopt(torch: Any, session: Any, names: dict[str, Any]) -> Adopted:
    """Move the real CPU tensors of these objects to the fake device, in place: what else refers to them sees it too."""
    mover, done = _Mover(torch, session), Adopted()
    for name, value in names.items():
        before = mover.nbytes
        try:
            mover.visit(value, DEPTH)
        except torch.OutOfMemoryError as error:
            error.add_note(f"memprof: {name} has no room any more on the device, where code before this would have put it.")
            raise
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            done.left[name] = str(error).splitlines()[0]
        if mover.nbytes > before:
            done.moved[name] = mover.nbytes - before
    name_owners(torch, session, names.values())
    return done


def name_owners(torch: Any, session: Any, values: Iterable[Any]) -> None:
    """Say of parameters, buffers, gradients and optimizer state that are there what they are."""
    where = session.where
    for value in values:
        if isinstance(value, torch.nn.Module):
            if value not in where._names:
                where._add_root(value)
            for parameter in value.parameters():
                if parameter.grad is not None:
                    where._own(parameter.grad, "gradients", where._owners.get(parameter))
    for value in values:
        if isinstance(value, torch.optim.Optimizer):
            for parameter, state in value.state.items():
                for name, one in state.items() if isinstance(state, dict) else ():
                    if isinstance(one, torch.Tensor):
                        where._own(one, "optimizer_state", where._owners.get(parameter) if isinstance(parameter, torch.Tensor) else None, str(name))
        elif is_cache(type(value)):
            where.cache(value)


def name_lines(torch: Any, session: Any, names: dict[str, Any], lines: dict[str, tuple[str, int]], before: int) -> None:
    """Say of what is on the device from before which line bound the name that holds it.

    Parameters
    ----------
    lines
        File and line by name.
    before
        The stack that stands for lines that are not known.
    """
    made, index_of = session.record.made, session.recorder.index_of
    for name in sorted(lines.keys() & names.keys()):
        for tensor in _held(torch, names[name], DEPTH, set()):
            index = index_of(tensor)
            if index is not None and made[index].stack == before:
                made[index].stack = session.lines.number(((name, *lines[name]),))


def _held(torch: Any, value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """Tensors that a value holds, a few containers deep."""
    if id(value) in seen or depth < 0:
        return
    seen.add(id(value))
    inner: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield value
        inner = [value.grad] if value.is_leaf and value.grad is not None else ()
    elif isinstance(value, torch.nn.Module):
        inner, depth = [*value.parameters(), *value.buffers()], 2
    elif isinstance(value, torch.optim.Optimizer):
        inner = list(value.state.values())
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    elif is_cache(type(value)):
        inner = list(tensors(value, torch))
    elif type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
        inner = list(vars(value).values())
    for one in inner:
        yield from _held(torch, one, depth - 1, seen)


class _Mover:
    """Visits objects and moves each tensor once; views of one storage stay views of one storage."""

    def __init__(self, torch: Any, session: Any) -> None:
        self.torch, self.shadows = torch, session.recorder.shadows
        self.fake = torch._subclasses.fake_tensor.FakeTensor
        self.nbytes = 0
        self._seen: dict[int, Any] = {}
        self._storages: dict[int, Any] = {}

    def visit(self, value: Any, depth: int) -> None:
        """Move what is in a value."""
        if id(value) in self._seen or depth < 0:
            return
        torch = self.torch
        if isinstance(value, torch.Tensor):
            self._seen[id(value)] = value
            self._move(value)
        elif isinstance(value, torch.nn.Module):
            self._seen[id(value)] = value
            for one in [*value.parameters(), *value.buffers()]:
                self.visit(one, 0)
        elif isinstance(value, torch.optim.Optimizer):
            self._seen[id(value)] = value
            self._optimizer(value)
        elif isinstance(value, dict):
            self._all(value, value.values(), depth)
        elif isinstance(value, (list, tuple, set, frozenset)):
            self._all(value, value, depth)
        elif is_cache(type(value)):
            self._seen[id(value)] = value
            for one in tensors(value, torch):
                self.visit(one, 0)
        elif type(value).__module__ == "__main__" and hasattr(value, "__dict__"):
            self._all(value, vars(value).values(), depth)

    def _all(self, holder: Any, values: Iterable[Any], depth: int) -> None:
        self._seen[id(holder)] = holder
        for one in list(values):
            self.visit(one, depth - 1)

    def _optimizer(self, optimizer: Any) -> None:
        on_device = {id(p) for group in optimizer.param_groups if group.get("capturable") or group.get("fused") for p in group["params"]}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self.visit(parameter, 0)
        for parameter, state in optimizer.state.items():
            for key, one in state.items() if isinstance(state, dict) else ():
                if key != "step" or id(parameter) in on_device:  # step counters stay on the host (torch/optim/adam.py)
                    self.visit(one, 1)

    def _move(self, tensor: Any) -> None:
        torch = self.torch
        if lazies.placed(torch, tensor):
            return
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or not tensor.is_leaf:
            return
        if tensor.grad is not None:
            grad = tensor.grad
            self.visit(grad, 0)
            tensor.grad = None
        else:
            grad = None
        made = self._like(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        else:
            made = next((one for one in (made, made.detach()) if not weakref.getweakrefs(one)), made)  # the fake mode keeps one of some views, which then can't be swapped
            made.requires_grad_(tensor.requires_grad)
        made.__dict__.update({k: v for k, v in tensor.__dict__.items() if k not in made.__dict__})
        torch.utils.swap_tensors(tensor, made)
        if grad is not None:
            tensor.grad = grad

    def _like(self, tensor: Any) -> Any:
        """A fake tensor on the device with the same place in the same kind of storage."""
        torch = self.torch
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata if isinstance(tensor, self.fake) else storage.data_ptr(), storage.nbytes()  # a fresh process has fakes of the CPU's
        with torch.no_grad():
            whole = self._storages.get(key) if nbytes else None
            if whole is None:
                whole = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
                self._storages[key] = whole
                self.nbytes += nbytes
            size = tensor.element_size()
            made = whole[: nbytes // size * size].view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        made = made.detach()
        if self.shadows._wanted(tensor) and (known := self.shadows.of(tensor)) is not None:
            with contextlib.suppress(RuntimeError), self.shadows._outside():
                self.shadows.put(made, known.detach().clone())
        return made
