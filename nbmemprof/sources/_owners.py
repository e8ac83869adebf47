"""Which storages belong to what: parameters, gradients, buffers, optimizer state, caches, inputs, tagged objects; by address."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from nbmemprof._kv_caches import is_cache

__all__ = ["addresses", "find", "host_storages", "of_module", "of_optimizer", "tensors_in"]

_DEPTH, _MOST = 5, 20_000  # how deep containers are looked into, and how many tensors are taken
_PLAIN = (str, bytes, int, float, bool, type(None))


def addresses(tensor: Any, device_type: str, depth: int = 0) -> list[tuple[int | None, int]]:
    """Device and address of the storage of a tensor; of a wrapper's inner tensors. Nothing is synchronised, no storage object is made."""
    try:
        if hasattr(tensor, "__tensor_flatten__") and depth < 3:
            names, _ = tensor.__tensor_flatten__()
            return [found for name in names for found in addresses(getattr(tensor, name), device_type, depth + 1)]
        if device_type == "cuda" and not tensor.is_cuda:
            return []
        device = tensor.device
        if device.type != device_type or type(tensor).__name__ == "FakeTensor":  # torch warns where its address is asked for
            return []
        # a gradient's storage is left alone: with a Python object it would count as shared
        at = tensor.data_ptr()
        if offset := tensor.storage_offset():
            at -= offset * tensor.element_size()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError, ValueError):  # fake, lazy, functional and sparse tensors have no address
        return []
    return [(device.index if device_type != "cpu" else None, at)] if at > 0 else []


def of_module(root: Any, paths: dict[int, str]) -> Iterator[tuple[Any, str, str, str]]:
    """Parameters and buffers below a module: tensor, category, layer, name."""
    for module in list(root.modules()):
        layer = paths[id(module)]
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                yield parameter, "weights", layer, name
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                yield buffer, "buffers", layer, name


def of_optimizer(optimizer: Any, torch: Any) -> Iterator[tuple[Any, Any, str]]:
    """State of an optimizer: parameter, tensor, name (``exp_avg``)."""
    for parameter, state in list(optimizer.state.items()):
        if isinstance(state, dict):
            for name, value in list(state.items()):
                for tensor in tensors_in(value, torch, 2):
                    yield parameter, tensor, str(name)
        else:
            for tensor in tensors_in(state, torch, 2):
                yield parameter, tensor, "state"


def tensors_in(obj: Any, torch: Any, depth: int = _DEPTH) -> list[Any]:
    """Tensors in a value: itself, items of containers, attributes of objects, a few levels down."""
    found: list[Any] = []
    seen: set[int] = set()
    tensor, module = torch.Tensor, torch.nn.Module
    waiting = [(obj, depth)]  # a loop: a function that calls itself is a cycle, and would keep what it found until garbage is collected
    while waiting and len(found) < _MOST:
        value, left = waiting.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, tensor):
            found.append(value)
        elif isinstance(value, module):
            found.extend(value.parameters())
            found.extend(value.buffers())
        elif left > 0:
            waiting.extend((item, left - 1) for item in reversed(list(_items(value))))
    return found


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    kind = type(value)
    if kind.__module__ in ("builtins", "types", "functools") or callable(value) or isinstance(value, type):
        return ()
    held = list(getattr(value, "__dict__", {}).values())
    for name in getattr(kind, "__slots__", ()) or ():
        if isinstance(name, str):
            try:
                held.append(object.__getattribute__(value, name))
            except (AttributeError, TypeError):
                continue
    return held


def host_storages(torch: Any, *, pinned: bool = False) -> dict[int, int]:
    """Address and bytes of each storage of CPU tensors that Python knows; ``pinned``: of page-locked ones alone. Empty ones are none."""
    objects = gc.get_objects()
    kinds = list(map(type, objects))
    wanted = {kind for kind in set(kinds) if issubclass(kind, torch.Tensor) and kind.__name__ != "FakeTensor"}
    tensors = [item for item, kind in zip(objects, kinds, strict=True) if kind in wanted] if wanted else []
    del objects, kinds
    sizes: dict[int, int] = {}
    for item in tensors:
        try:
            if item.device.type == "cpu" and item.layout == torch.strided and (not pinned or item.is_pinned()):
                storage = item.untyped_storage()
                if size := storage.nbytes():
                    sizes[storage.data_ptr()] = size
        except (RuntimeError, NotImplementedError, ReferenceError, ValueError):  # functional, half-dead and lazy tensors have no storage to show
            continue
    return sizes


def find(torch: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Outermost modules, optimizers and KV caches that are alive in this process. About 15 ms for half a million objects."""
    objects = gc.get_objects()
    kinds = list(map(type, objects))
    different = set(kinds)
    modules, optimizers = ({k for k in different if issubclass(k, base)} for base in (torch.nn.Module, torch.optim.Optimizer))
    caches = {k for k in different if is_cache(k)}
    wanted = modules | optimizers | caches
    chosen = [(o, k) for o, k in zip(objects, kinds, strict=True) if k in wanted] if wanted else []
    del objects, kinds
    children: set[int] = set()
    nets = [o for o, k in chosen if k in modules and "_modules" in getattr(o, "__dict__", {})]
    for net in nets:
        children.update(id(child) for child in net.__dict__["_modules"].values() if child is not None)
    return [n for n in nets if id(n) not in children], [o for o, k in chosen if k in optimizers], [o for o, k in chosen if k in caches]
