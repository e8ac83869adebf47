"""Tensors as memory: which storage each has, and what autograd keeps without a Python object.

Read through C attributes of the base class, with the overrides of subclasses switched off: a tensor's own code is not run.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from types import GetSetDescriptorType
from typing import Any

from nbmemprof import _optional
from nbmemprof.holding._parts import bases, class_dict, describe_type

__all__ = ["Graphs", "Memory", "Reader", "Saved"]

_NOT_READABLE = (RuntimeError, NotImplementedError, ReferenceError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Memory:
    """One storage as seen through one tensor (or the storage object itself: then shape, dtype and tensor_bytes are None)."""

    key: int
    device: str
    ordinal: int | None
    addr: int
    size_bytes: int
    tensor_bytes: int | None
    part: tuple[int, int] | None  # offset and bytes in the storage
    shape: str | None
    dtype: str | None


class Reader:
    """Reads tensors of one torch."""

    def __init__(self, torch: Any) -> None:
        self.torch, self.base = torch, torch._C.TensorBase
        self.storage = torch.UntypedStorage
        self._kinds: dict[type, int] = {}
        self._address: Callable[[Any], int] | None = getattr(torch._C, "_data_address", None)  # reads without making a copy-on-write storage its own
        self._untyped, self._numel, self._offset, self._size = self.base.untyped_storage, self.base.numel, self.base.storage_offset, self.base.size
        self._element = self.base.element_size
        self._strided, self._module = torch.strided, torch.nn.Module
        self._optimizer = getattr(_optional.loaded("torch.optim.optimizer"), "Optimizer", None)

    def plainly(self) -> AbstractContextManager[Any]:
        """While this is open no ``__torch_function__`` or ``__torch_dispatch__`` is called, a user's mode neither."""
        stack = ExitStack()
        stack.enter_context(self.torch._C.DisableTorchFunctionSubclass())
        stack.enter_context(self.torch._C._DisableTorchDispatch())
        return stack

    def kind(self, cls: type) -> int:
        """1 a tensor, 2 a storage, 3 a tensor whose class takes part in dispatch, 4 a module of torch.nn, 5 an optimizer, 0 anything else."""
        found = self._kinds.get(cls)
        if found is None:
            order = bases(cls)
            plain = getattr(self.torch._C, "_disabled_torch_dispatch_impl", None)
            if any(c is self.base for c in order):
                own = next((d["__torch_dispatch__"] for c in order if "__torch_dispatch__" in (d := class_dict(c))), plain)
                found = 1 if own is plain else 3
            else:
                found = next((number for number, base in ((2, self.storage), (4, self._module), (5, self._optimizer)) if any(c is base for c in order)), 0)
            self._kinds[cls] = found
        return found

    def beside(self, tensor: Any) -> Iterator[tuple[str, Any]]:
        """What C++ keeps for a tensor: its gradient, and the tensor that it is a view of."""
        try:
            if self.base.is_leaf.__get__(tensor) and (grad := self.base.grad.__get__(tensor)) is not None:
                yield "grad", grad
            if (base := self.base._base.__get__(tensor)) is not None:
                yield "_base", base
        except _NOT_READABLE:
            return

    def memory(self, thing: Any) -> Iterator[Memory]:
        """The storages of a tensor (sparse ones have several), or the one of a storage object; nothing where there is none."""
        try:
            kind = self.kind(type(thing))
            if kind == 2:
                yield from self._of_storage(thing, None)
            elif kind == 3:
                yield from self._of_storage(self._untyped(thing), thing, whole=True)
            elif thing.layout is self._strided:
                yield from self._of_storage(self._untyped(thing), thing)
            else:
                for part in self._parts(thing):
                    yield from self._of_storage(self._untyped(part), part)
        except _NOT_READABLE:  # fake, functional and half-dead tensors have no storage to show
            return

    def _of_storage(self, storage: Any, tensor: Any, *, whole: bool = False) -> Iterator[Memory]:
        size = storage.nbytes()
        device = storage.device
        if not size or device.type == "meta" or type(size) is not int:
            return
        addr = self._address(tensor) if tensor is not None and self._address is not None and not whole else storage.data_ptr()
        seen, part, shape, dtype = None, None, None, None
        if tensor is not None and not whole:
            each = self._element(tensor)
            seen, part = self._numel(tensor) * each, (self._offset(tensor) * each, self._numel(tensor) * each)
            shape, dtype = "×".join(map(str, self._size(tensor))) or "scalar", str(tensor.dtype).removeprefix("torch.")
        elif whole:
            seen = size
        yield Memory(storage._cdata, device.type, device.index if device.type != "cpu" else None, addr, size, seen, part, shape, dtype)

    def blocks(self, known: list[int]) -> Iterator[Memory]:
        """Blocks of CUDA's allocator that are in use and in which no known storage lies: libraries' workspaces, C++ code."""
        cuda = self.torch.cuda
        if not cuda.is_available() or not cuda.is_initialized() or cuda.get_allocator_backend() != "native":
            return
        try:
            segments = cuda.memory_snapshot(include_traces=False)
        except TypeError:  # torch before 2.11
            segments = cuda.memory_snapshot()
        starts = set(known)
        for segment in segments:
            at = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated" and at not in starts:
                    size = block.get("requested_size", block["size"])
                    yield Memory(-at, "cuda", segment["device"], at, size, None, None, None, None)
                at += block["size"]

    def _parts(self, tensor: Any) -> list[Any]:
        layout = str(tensor.layout)
        if "coo" in layout:
            return [self.base._indices(tensor), self.base._values(tensor)]
        inner = ("crow_indices", "col_indices") if layout.endswith(("csr", "bsr")) else ("ccol_indices", "row_indices")
        return [getattr(self.base, name)(tensor) for name in (*inner, "values")]


@dataclass(frozen=True, slots=True)
class Saved:
    """What a node of an autograd graph keeps."""

    root: int  # number of the tensor whose grad_fn leads here
    node: str
    name: str
    thing: Any
    is_object: bool  # a Python object that a hook packed, or that hangs on the node


@dataclass
class _Doors:
    """The C attributes of one class of nodes."""

    next: Any = None
    variable: Any = None
    saved: list[tuple[str, Any]] = field(default_factory=list)


class Graphs:
    """Walks autograd graphs; each node is met once, from the first tensor that leads to it."""

    def __init__(self, reader: Reader) -> None:
        self._grad_fn = class_dict(reader.base)["grad_fn"]
        self._seen: set[int] = set()
        self._nodes: list[Any] = []  # kept while the walk lasts, so that an address means one node
        self._doors: dict[type, _Doors] = {}
        self.unread = 0

    def from_tensor(self, tensor: Any, number: int) -> Iterator[Saved]:
        """What the graph behind a tensor keeps, and was not met before."""
        try:
            first = self._grad_fn.__get__(tensor)
        except _NOT_READABLE:
            return
        waiting = [first] if first is not None and id(first) not in self._seen else []
        while waiting:
            node = waiting.pop()
            if id(node) in self._seen:
                continue
            self._seen.add(id(node))
            self._nodes.append(node)
            doors = self._of(type(node))
            word = describe_type(node)
            yield from (Saved(number, word, "", thing, True) for thing in (node, *gc.get_referents(node)))
            for name, door in doors.saved:
                yield from self._saved(number, word, name, node, door)
            if doors.variable is not None and (leaf := doors.variable.__get__(node)) is not None:
                yield Saved(number, word, "variable", leaf, False)
            if doors.next is not None:
                waiting += [after for after, _ in doors.next.__get__(node) or () if after is not None]

    def _saved(self, number: int, word: str, name: str, node: Any, door: Any) -> Iterator[Saved]:
        try:
            found = door.__get__(node)
        except _NOT_READABLE:  # given back after backward
            return
        for raw in found if type(found) in (tuple, list) else (found,):
            if not hasattr(raw, "unpack_hook"):
                self.unread += raw is not None  # torch before 2.9: reading it may run a hook of the user's
                continue
            try:
                data = raw.data
                if data is not None:
                    yield Saved(number, word, name.replace("_raw", "", 1), data, raw.unpack_hook is not None)
            except _NOT_READABLE:
                continue

    def _of(self, cls: type) -> _Doors:
        found = self._doors.get(cls)
        if found is None:
            found = self._doors[cls] = _Doors()
            for base in bases(cls):
                for name, door in list(class_dict(base).items()):
                    if type(door) is not GetSetDescriptorType:
                        continue
                    if name.startswith("_raw_saved_"):
                        found.saved.append((name, door))
                    elif name == "next_functions":
                        found.next = found.next or door
                    elif name == "variable":
                        found.variable = door
        return found
