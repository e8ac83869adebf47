"""Follow CPU tensor storages: where each is born, and the moment that it dies, whoever held it last.

Births are seen by a dispatch mode: every operator of the thread passes through it, those of backward too (autograd
carries the modes to its threads). Deaths are seen by a weak reference on the storage's Python object: PyTorch
keeps that object for as long as the C++ storage lives (checked at the first start), so what autograd saved is
released when autograd lets go of it, not when its Python tensor goes.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
import threading
import time
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmemprof import _optional
from nbmemprof.errors import NotRecording
from nbmemprof.sources._stacks import CHECKPOINT, OPTIMIZER, Layers, Stacks

__all__ = ["ALLOC", "BACKWARD", "FORWARD", "FREE", "GRADIENT", "NUMBER", "OOM", "PHASES", "RECORD", "RECOMPUTE", "STEP", "WEIGHT", "Mark", "Ref", "Tracker", "tracker"]

ALLOC, FREE, OOM = 0, 1, 2
PHASES = (None, "forward", "backward", "recompute", "optimizer")
FORWARD, BACKWARD, RECOMPUTE, STEP = 1, 2, 3, 4
WEIGHT, GRADIENT = 1, 2  # what a storage was seen to be
NUMBER = 1 << 63  # addresses from here stand for Python numbers that an operator took as a tensor
# time in ns, address, bytes, number of the allocation (-1: it was there before), stack, layer, operator, action, phase, seen
_PACK = struct.Struct("=qQqqIIHBBB")
RECORD = np.dtype([("time", "i8"), ("addr", "u8"), ("bytes", "i8"), ("n", "i8"), ("stack", "u4"), ("layer", "u4"), ("op", "u2"), ("action", "u1"), ("phase", "u1"), ("seen", "u1")])
_CHUNK = 16384
_NUMBERS = {float: 8, int: 8, complex: 16, bool: 1}
_FIRST_OF_SYSTEM = "DefaultCPUAllocator: can't allocate memory: you tried to allocate "

Records = npt.NDArray[Any]


class Ref(weakref.ref):  # type: ignore[type-arg] - a subclass with slots can't be generic
    """A living storage: bytes is 0 where it is empty or not torch's own memory."""

    __slots__ = ("addr", "bytes", "borrowed", "key", "n", "phase", "seen", "stack")
    key: int
    addr: int
    bytes: int
    n: int
    stack: int
    phase: int
    seen: int
    borrowed: bool


class Mark:
    """A position in the record; stays right when older events are thinned out."""

    __slots__ = ("__weakref__", "first", "ops", "position", "spent", "time")

    def __init__(self, position: int, first: int, spent: int, ops: int) -> None:
        self.position, self.first, self.spent, self.ops = position, first, spent, ops
        self.time = time.perf_counter_ns()


class _Plan:
    """What an operator can do to storages, read once from its schema."""

    __slots__ = ("call", "func", "gradient", "lifts", "looks", "numbers", "op", "resizes", "sets", "name")

    def __init__(self, func: Any, op: int) -> None:
        self.func, self.op = func, op
        schema = getattr(func, "_schema", None)
        self.name = schema.name if schema is not None else str(func)
        self.call = func._op if type(func).__name__ == "OpOverload" else func
        self.lifts = self.name == "aten::lift_fresh"
        self.gradient = self.name == "aten::detach"
        self.numbers: tuple[tuple[int, str], ...] = ()
        self.looks = self.resizes = self.sets = True
        if schema is None:
            return
        short = self.name.partition("::")[2]
        written = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        self.sets = short.startswith("set_")
        self.resizes = written and (self.sets or "resize" in short or any(a.is_out for a in schema.arguments))
        fresh = any(r.alias_info is None for r in schema.returns)
        self.looks = (fresh or self.resizes or self.lifts) and short != "_lazy_clone"
        self.numbers = tuple((i, f"_saved_{a.name}") for i, a in enumerate(schema.arguments) if str(a.type) == "Tensor" and not a.is_out)


class Tracker:
    """The one follower of this process; ``acquire`` and ``release`` are counted."""

    def __init__(self) -> None:
        self.live: dict[int, Ref] = {}
        self.stacks, self.layers = Stacks(), Layers()
        self.ops: list[str] = [""]
        self.marks: weakref.WeakSet[Mark] = weakref.WeakSet()
        self.active = False
        self.with_stacks = self.with_free_stacks = True
        self.spent = [0, 0]  # ns in our handlers, operators seen
        self.op_ns = 0.0  # what the mode costs an operator outside our handler
        self.faults: dict[str, int] = {}
        self.threads_before = 0
        self.ring_bytes = 512 << 20
        self.dropped = 0
        self._users = 0
        self._events: list[bytes] = []
        self._chunks: list[bytes] = []
        self._thinned: Records = np.zeros(0, RECORD)
        self._count = itertools.count()
        self._lock = threading.RLock()
        self._mode: Any = None
        self._make_mode: Callable[[], Any] | None = None
        self._restore: list[Callable[[], None]] = []
        self._plans: dict[int, _Plan] = {}
        self._next_thinning = 0
        self.note: Callable[..., Any] = lambda *_: None
        self.changed: Callable[..., Any] = lambda *_: None
        self._settle: Callable[[], None] = lambda: None

    # ------------------------------------------------------------------ begin and end
    def acquire(self, stacks: str, ring_bytes: int) -> Mark:
        """Begin to follow on this thread and on the threads that it starts, or join."""
        torch = _optional.require("torch", feature="Recording CPU tensors")
        with self._lock:
            if self._users == 0:
                if self._make_mode is None:
                    self._prepare(torch)
                self.with_stacks, self.with_free_stacks = stacks != "none", stacks == "all"
                self.ring_bytes, self.dropped, self.faults, self.threads_before = ring_bytes, 0, {}, threading.active_count() - 1
                self._next_thinning = ring_bytes // 3  # the work of thinning needs as much again
                self._events.clear()
                self._chunks, self._thinned = [], np.zeros(0, RECORD)
                self.stacks.look()
                for ref in list(self.live.values()):  # an earlier recording's numbers mean nothing here
                    ref.n = -1
                self._count = itertools.count()
                self.active = True
                self._enter(torch)
                self._restore = _patches(torch, self)
            self._users += 1
            return self.mark()

    def release(self) -> None:
        """Stop following with the last user. Living storages stay known, so that the next recording knows who made them."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self.active = False
            torch = _optional.require("torch", feature="Recording CPU tensors")
            for restore in reversed(self._restore):
                restore()
            self._restore = []
            self._leave(torch, self._mode)
            self._mode = None
            self._events.clear()
            self._chunks, self._thinned = [], np.zeros(0, RECORD)
            refs = list(self.live.values())
            renumbered = self.stacks.keep(ref.stack for ref in refs)
            for ref in refs:
                ref.stack = renumbered[ref.stack]

    def _enter(self, torch: Any) -> None:
        assert self._make_mode is not None  # noqa: S101 - acquire prepares first
        stack = [torch._C._get_dispatch_stack_at(i) for i in range(torch._C._len_torch_dispatch_stack())]
        for stale in stack:
            if isinstance(stale, self._make_mode):  # type: ignore[arg-type] - it is a class; its recording was stopped on another thread
                self._leave(torch, stale)
        self._mode = self._make_mode()
        torch._C._push_on_torch_dispatch_stack(self._mode)

    @staticmethod
    def _leave(torch: Any, mode: Any) -> None:
        """Take our mode off this thread's stack, wherever in it the user's modes have left it; others stay in order."""
        c = torch._C
        if not any(c._get_dispatch_stack_at(i) is mode for i in range(c._len_torch_dispatch_stack())):
            return
        above = []
        while (top := c._pop_torch_dispatch_stack(None)) is not mode:
            above.append(top)
        for other in reversed(above):
            c._push_on_torch_dispatch_stack(other)

    def _prepare(self, torch: Any) -> None:
        """Make the mode's class; see that storages keep their Python object; measure what a mode costs an operator."""
        x = torch.ones(1)
        died: list[int] = []
        ref = weakref.ref(x.untyped_storage(), lambda _: died.append(1))
        holder = x.view(1)
        del x
        if died or ref() is None:
            raise NotRecording(f"PyTorch {torch.__version__} drops a storage's Python object while its memory lives, so releases can't be seen. Use PyTorch 2.4 or newer.")
        self._make_mode = _mode_class(torch, self)
        mode, add, clock = self._make_mode(), torch.neg, time.perf_counter_ns

        def once() -> int:
            begin = clock()
            for _ in range(40):
                add(holder)
            return clock() - begin

        plain = min(once() for _ in range(3))
        torch._C._push_on_torch_dispatch_stack(mode)
        try:
            moded = min(once() for _ in range(3))
        finally:
            self._leave(torch, mode)
        self.op_ns = max(0.0, (moded - plain) / 40)
        os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """A child's memory is not this process's: its inherited mode only passes on."""
        self.active = False

    # ------------------------------------------------------------------ the record
    def mark(self) -> Mark:
        """The position now."""
        self._settle()
        with self._lock:
            mark = Mark(self._size(), len(self.live), *self.spent)
            self.marks.add(mark)
        return mark

    def _size(self) -> int:
        return len(self._thinned) + sum(map(len, self._chunks)) // RECORD.itemsize + len(self._events)

    def emit(self, record: bytes) -> None:
        """Add a record; now and then pack the loose ones, and thin the oldest when the bound is reached."""
        events = self._events
        events.append(record)
        if len(events) >= _CHUNK and self._lock.acquire(blocking=False):
            try:
                self._pack()
                if len(self._chunks) * _CHUNK * RECORD.itemsize + self._thinned.nbytes > self._next_thinning:
                    self._thin()
            finally:
                self._lock.release()

    def _pack(self) -> None:
        count = len(self._events)
        self._chunks.append(b"".join(self._events[:count]))
        del self._events[:count]

    def records(self) -> Records:
        """Every record that is kept, in order."""
        with self._lock:
            self._settle()
            self._pack()
            new = np.frombuffer(b"".join(self._chunks), RECORD)
            return np.concatenate([self._thinned, new]) if len(self._thinned) else new

    def _thin(self) -> None:
        """Drop finished pairs from all but the newest quarter, save those alive at a peak that an open window can ask for."""
        everything = self.records_packed()
        old = everything[: len(everything) * 3 // 4]
        keep = np.ones(len(everything), bool)
        frees = np.flatnonzero((old["action"] == FREE) & (old["n"] >= 0))
        births = np.flatnonzero(old["action"] == ALLOC)
        births = births[np.argsort(old["n"][births], kind="stable")]
        where = np.searchsorted(old["n"][births], old["n"][frees])
        where = np.minimum(where, max(len(births) - 1, 0))
        fits = old["n"][births][where] == old["n"][frees] if len(births) else np.zeros(len(frees), bool)
        born, died = births[where[fits]] if len(births) else frees[:0], frees[fits]
        needed = np.zeros(len(born), bool)
        change = np.where(everything["action"] == ALLOC, everything["bytes"], np.where(everything["action"] == FREE, -everything["bytes"], 0))
        for start in {0, *(mark.position for mark in self.marks)}:
            if start < len(everything):
                peak = start + int(np.argmax(np.cumsum(change[start:])))
                needed |= (born <= peak) & (died > peak)
        keep[born[~needed]] = keep[died[~needed]] = False
        self.dropped += 2 * int((~needed).sum())
        before = np.concatenate([[0], np.cumsum(keep)])
        for mark in self.marks:
            mark.position = int(before[mark.position]) if mark.position <= len(everything) else mark.position - len(everything) + int(before[-1])
        self._thinned = everything[keep]
        self._chunks = []
        self._next_thinning = max(self.ring_bytes // 3, 2 * self._thinned.nbytes)

    def records_packed(self) -> Records:
        """As ``records``, without the loose ones."""
        new = np.frombuffer(b"".join(self._chunks), RECORD)
        return np.concatenate([self._thinned, new]) if len(self._thinned) else new

    def fault(self, error: BaseException) -> None:
        """Count an error of our own; the user's operator has run, and must not fail for it."""
        text = f"{type(error).__name__}: {error}"[:200]
        self.faults[text] = self.faults.get(text, 0) + 1


def _mode_class(torch: Any, self: Tracker) -> Callable[[], Any]:  # noqa: C901
    """The dispatch mode, written as one closure: a name looked up here costs every operator."""
    tensor, parameter, storage_type = torch.Tensor, torch.nn.Parameter, torch.UntypedStorage
    live, clock, pack = self.live, time.perf_counter_ns, _PACK.pack
    current_task, current_node, sequence = torch._C._current_graph_task_id, torch._C._current_autograd_node, torch.autograd._get_sequence_nr
    saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    get_frame, grad_enabled, spent, plans = sys._getframe, torch.is_grad_enabled, self.spent, self._plans
    fresh_count = torch._C._storage_Use_Count(torch.UntypedStorage(1)._cdata)
    last_phase = [0]
    base = torch.utils._python_dispatch.TorchDispatchMode
    waiting: list[tuple[Any, str, int, int]] = []  # numbers that autograd may have saved
    foreign: dict[type, bool] = {}

    def gone(ref: Ref) -> None:
        begin = clock()
        if live.get(ref.key) is ref:
            del live[ref.key]
        if ref.bytes and self.active:
            phase = BACKWARD if current_task() != -1 else last_phase[0]
            stack = self.stacks.of(get_frame(1))[0] if self.with_free_stacks else 0
            self.emit(pack(begin, ref.addr, ref.bytes, ref.n, stack, 0, 0, FREE, phase, ref.seen))
            spent[0] += clock() - begin

    def follow(storage: Any, n: int, stack: int, phase: int, own: bool = False) -> Ref:
        """Begin to follow a storage; its bytes count where the memory is torch's own."""
        ref = Ref(storage, gone)
        ref.key, ref.n, ref.stack, ref.phase, ref.seen = storage._cdata, n, stack, phase, 0
        ref.addr = ref.bytes = 0
        ref.borrowed = storage.device.type != "cpu" or not (own or storage.resizable())
        if not ref.borrowed:
            ref.bytes = storage.nbytes()
            ref.addr = storage.data_ptr() if ref.bytes else 0
        live[ref.key] = ref
        return ref

    def where() -> tuple[int, int, int, int]:
        """Stack, layer, phase and what the storage is seen to be, of the operator that runs now."""
        stack = told = layer = seen = 0
        inner = outer = None
        if self.with_stacks:
            stack, told, inner, outer = self.stacks.of(get_frame(1))
            if inner is not None and outer is not None:
                layer = self.layers.of(inner, outer)
        if current_task() != -1:
            phase = RECOMPUTE if told & CHECKPOINT else BACKWARD
            node = current_node()
            if node is not None and phase == BACKWARD:
                name = node.name()
                seen = GRADIENT if name == "torch::autograd::AccumulateGrad" else 0
                layer = layer_of(node._sequence_nr()) or layer
        elif told & OPTIMIZER:
            phase = STEP
        else:
            phase = FORWARD if layer else 0
        if phase != BACKWARD and phase != STEP and grad_enabled():
            sequences.append(sequence() - 1)
            sequence_layers.append(layer)
            if len(sequences) > 1 << 20:
                del sequences[: 1 << 19], sequence_layers[: 1 << 19]
        last_phase[0] = phase
        return stack, layer, phase, seen

    sequences, sequence_layers = array("q"), array("q")

    def layer_of(number: int) -> int:
        """The layer whose forward made this node of the graph, by autograd's sequence numbers."""
        at = bisect_right(sequences, number) - 1
        return sequence_layers[at] if at >= 0 else 0

    def note(storage: Any, op: int, now: int, place: tuple[int, int, int, int], own: bool = False) -> None:
        """Record the birth of a storage that nobody knows."""
        n = next(self._count)
        stack, layer, phase, seen = place
        ref = follow(storage, n, stack, phase, own)
        ref.seen = seen
        if ref.bytes:
            self.emit(pack(now, ref.addr, ref.bytes, n, stack, layer, op, ALLOC, phase, seen))

    def changed(storage: Any, ref: Ref, op: int, now: int, place: tuple[int, int, int, int] | None) -> None:
        """A known storage may have got other memory: the new is there before the old goes."""
        size = storage.nbytes()
        addr = storage.data_ptr() if size else 0
        if ref.borrowed or (size == ref.bytes and addr == ref.addr):
            return
        stack, layer, phase, _ = place or where()
        n = next(self._count)
        if size:
            self.emit(pack(now, addr, size, n, stack, layer, op, ALLOC, phase, ref.seen))
        if ref.bytes:
            self.emit(pack(now, ref.addr, ref.bytes, ref.n, 0, 0, op, FREE, phase, ref.seen))
        ref.addr, ref.bytes, ref.n, ref.stack, ref.phase = addr, size, n, stack, phase

    def storages(item: Any) -> list[Any]:
        """Storages behind a value; of sparse and nested tensors those of their parts, of subclasses none."""
        if isinstance(item, (list, tuple)):
            return [s for part in item for s in storages(part)]
        if isinstance(item, dict):
            return storages(list(item.values()))
        if isinstance(item, storage_type):
            return [item]
        if not isinstance(item, tensor):
            return []
        if item.layout == torch.strided and not item.is_nested:
            try:
                return [item.untyped_storage()] if type(item) in {tensor, parameter} or item.data_ptr() else []
            except (RuntimeError, NotImplementedError):
                return []
        if item.layout == torch.sparse_coo:
            return storages([item._indices(), item._values()])
        if item.layout in {torch.sparse_csr, torch.sparse_bsr}:
            return storages([item.crow_indices(), item.col_indices(), item.values()])
        if item.layout in {torch.sparse_csc, torch.sparse_bsc}:
            return storages([item.ccol_indices(), item.row_indices(), item.values()])
        return storages(item._values) if item.is_nested and hasattr(item, "_values") and item._values is not None else []

    def discover(item: Any, plan: _Plan) -> None:
        """Meet arguments that are not known yet: they were there before, or come from where no operator is seen (torch.load)."""
        for storage in storages(item):
            ref = live.get(storage._cdata)
            if ref is None:
                if plan.sets and isinstance(item, storage_type) and torch._C._storage_Use_Count(storage._cdata) <= fresh_count:
                    note(storage, plan.op, clock(), where(), own=True)
                else:
                    follow(storage, -1, 0, 0)

    def settle() -> None:
        """Decide about the number that the last operator took as a tensor: autograd saved it, or it is gone."""
        while waiting:
            held, name, n, size = waiting.pop()
            out = held()
            node = out.grad_fn if out is not None else None
            saved = getattr(node, name, None) if node is not None else None
            if isinstance(saved, tensor) and saved.dim() == 0 and (storage := saved.untyped_storage())._cdata not in live:
                ref = follow(storage, n, 0, 0)
                ref.addr, ref.bytes, ref.borrowed = NUMBER | n, size, True
            else:
                self.emit(pack(clock(), NUMBER | n, size, n, 0, 0, 0, FREE, last_phase[0], 0))

    def numbers(plan: _Plan, args: tuple[Any, ...], out: Any, now: int) -> tuple[int, int, int, int]:
        """A Python number given for a tensor is wrapped into one before the operator; autograd may keep that. In backward it is scratch."""
        place = stack, layer, phase, _ = where()
        for at, name in plan.numbers:
            if at >= len(args) or (size := _NUMBERS.get(type(args[at]), 0)) == 0:
                continue
            n = next(self._count)
            self.emit(pack(now, NUMBER | n, size, n, stack, layer, plan.op, ALLOC, phase, 0))
            keeps = isinstance(out, tensor) and grad_enabled() and saved_hooks(False) is None
            waiting.append((weakref.ref(out) if keeps else _nobody, name, n, size))
        return place

    def plan_of(func: Any) -> _Plan:
        name = getattr(getattr(func, "_schema", None), "name", None) or str(func)
        if name not in self.ops and len(self.ops) < 65_535:
            self.ops.append(name)
        plan = plans[id(func)] = _Plan(func, self.ops.index(name) if name in self.ops else 0)
        return plan

    def is_foreign(kind: type) -> bool:
        found = foreign.get(kind)
        if found is None:
            found = foreign[kind] = kind not in {tensor, parameter} and not kind.__module__.startswith("torch._subclasses")
        return found

    def before(plan: _Plan, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if waiting:
            settle()
        for item in args:
            kind = type(item)
            if kind is tensor or kind is parameter:
                try:
                    ref = live.get(item.untyped_storage()._cdata)
                except (RuntimeError, NotImplementedError):  # sparse and the like have no storage of their own
                    discover(item, plan)
                    continue
                if ref is None:
                    if not plan.lifts:
                        discover(item, plan)
                elif kind is parameter:
                    ref.seen = WEIGHT
            elif kind is list:
                if item and isinstance(item[0], tensor):
                    before(plan, item, None)  # type: ignore[arg-type]
            elif kind is storage_type:
                discover(item, plan)
        if kwargs:
            for item in kwargs.values():
                if isinstance(item, (tensor, list)):
                    before(plan, (item,), None)

    def after(plan: _Plan, args: tuple[Any, ...], out: Any) -> None:
        place = None
        now = clock()
        if plan.gradient and current_task() != -1:
            node = current_node()
            if node is not None and node.name() == "torch::autograd::AccumulateGrad" and (ref := live.get(args[0].untyped_storage()._cdata)) is not None:
                ref.seen = GRADIENT
        for at, _ in plan.numbers:
            if at < len(args) and type(args[at]) in _NUMBERS:
                if current_task() == -1:
                    place = numbers(plan, args, out, now)
                break
        if plan.looks:
            if type(out) is tensor:
                try:
                    storage = out.untyped_storage()
                except (RuntimeError, NotImplementedError):
                    found = storages(out)
                else:
                    ref = live.get(storage._cdata)
                    if ref is None:
                        note(storage, plan.op, now, place or where())
                    elif plan.resizes:
                        changed(storage, ref, plan.op, now, place)
                    if waiting:
                        settle_scratch()
                    return
            else:
                found = storages(out)
            for storage in found:
                ref = live.get(storage._cdata)
                if ref is None:
                    place = place or where()
                    note(storage, plan.op, now, place)
                elif plan.resizes:
                    changed(storage, ref, plan.op, now, place)
        if waiting:
            settle_scratch()

    def settle_scratch() -> None:
        """What nobody can keep is gone with the operator."""
        if waiting[-1][0] is _nobody:
            settle()

    def failed(plan: _Plan, error: BaseException) -> None:
        text = str(error)
        if _FIRST_OF_SYSTEM in text:
            size = text.partition(_FIRST_OF_SYSTEM)[2].split(" ", 1)[0]
            stack, layer, phase, _ = where()
            self.emit(pack(clock(), 0, int(size) if size.isdigit() else 0, -1, stack, layer, plan.op, OOM, phase, 0))

    class StorageMode(base):  # type: ignore[misc] - torch is not followed by the type checker
        """Sees every operator of its thread."""

        supports_higher_order_operators = True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # its wrapper costs every operator 1 µs; skip_code below does the same

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            begin = clock()
            plan = plans.get(id(func)) or plan_of(func)
            if types and any(map(is_foreign, types)):
                return NotImplemented  # the subclass first; its inner operators come back here
            if not tracker.active:
                return plan.call(*args, **kwargs) if kwargs else plan.call(*args)
            try:
                before(plan, args, kwargs)
            except Exception as error:
                tracker.fault(error)
            middle = clock()
            try:
                out = plan.call(*args, **kwargs) if kwargs else plan.call(*args)
            except BaseException as error:
                __tracebackhide__ = True
                failed(plan, error)
                raise
            end = clock()
            try:
                after(plan, args, out)
            except Exception as error:
                tracker.fault(error)
            spent[0] += clock() - end + middle - begin
            spent[1] += 1
            return out

    _skip_in_dynamo(StorageMode.__torch_dispatch__, gone, before, after, follow, where, note, changed, storages, discover, settle, numbers, plan_of, is_foreign, settle_scratch, failed, layer_of)
    _skip_in_dynamo(Stacks.of, Stacks._learn, Layers.of, Layers._number, Tracker.emit, Tracker._pack, Tracker._thin, Tracker.fault)

    def made(storage: Any) -> None:
        """A storage that Python code made or was given outside any operator."""
        if storage._cdata not in live:
            note(storage, 0, clock(), where())

    self.note, self.changed, self._settle = made, lambda s, r: changed(s, r, 0, clock(), None), settle
    return StorageMode


def _nobody() -> None:
    """In place of a weak reference to an output: nobody can keep the number."""


def _skip_in_dynamo(*functions: Any) -> None:
    """torch.compile must not trace our functions when it meets them in a frame that it does not compile."""
    try:
        from torch._C._dynamo.eval_frame import skip_code
    except ImportError:
        return
    for function in functions:
        skip_code(function.__code__)


def _patches(torch: Any, self: Tracker) -> list[Callable[[], None]]:
    """Wrap the few doors to memory that no operator passes through; gives what undoes it.

    ``UntypedStorage(n)`` and its ``resize_``, the generator's state (checkpointing keeps one a segment), and threads
    that the cell starts: a dispatch mode belongs to one thread.
    """
    undo: list[Callable[[], None]] = []

    def put(owner: Any, name: str, made: Any) -> None:
        old = owner.__dict__.get(name)

        def back() -> None:
            if owner.__dict__.get(name) is made:
                if old is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, old)

        setattr(owner, name, made)
        undo.append(back)

    storage, generator_state = torch.UntypedStorage, torch.random.get_rng_state
    resize, boot, init = storage.resize_, threading.Thread._bootstrap_inner, storage.__init__  # type: ignore[attr-defined]

    def safely(call: Callable[..., Any], *args: Any) -> None:
        if self.active:
            try:
                call(*args)
            except Exception as error:
                self.fault(error)

    def resize_(own: Any, size: int) -> Any:
        out = resize(own, size)
        ref = self.live.get(own._cdata)
        safely(self.changed, own, ref) if ref is not None else safely(self.note, own)
        return out

    def __init__(own: Any, *args: Any, **kwargs: Any) -> None:
        init(own)
        if args and isinstance(args[0], int) and str(kwargs.get("device", "cpu")) == "cpu":
            safely(self.note, own)

    def get_rng_state() -> Any:
        state = generator_state()
        safely(lambda: self.note(state.untyped_storage()))
        return state

    def _bootstrap_inner(own: Any) -> None:
        if self._make_mode is None or not self.active:
            boot(own)
            return
        mode = self._make_mode()
        torch._C._push_on_torch_dispatch_stack(mode)
        try:
            boot(own)
        finally:
            self._leave(torch, mode)

    put(storage, "resize_", resize_)
    put(storage, "__init__", __init__)
    put(torch.random, "get_rng_state", get_rng_state)
    put(torch, "get_rng_state", get_rng_state)
    put(threading.Thread, "_bootstrap_inner", _bootstrap_inner)
    return undo


tracker = Tracker()
