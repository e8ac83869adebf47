"""The dispatch mode that sees every operator of a fake run and writes down what its storages take and give back."""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

from nbmemprof._kv_caches import Shape

__all__ = ["Allocation", "Record", "recorder_class"]

EMPTY_CACHE = 1 << 62  # in the stream of events: torch.cuda.empty_cache()


@dataclass(slots=True)
class Allocation:
    """One request of the fake run: bytes, operator, where in the step, and for what, where that is known."""

    nbytes: int
    op: str
    layer: str | None
    phase: str | None
    step: int
    category: str | None = None
    evidence: str | None = None
    ended: str | None = None  # phase in which it went; "" outside of phases, None: it did not
    stack: int = 0  # in ``Record.stacks``; 0: not recorded
    name: str | None = None  # as its owner calls it: weight, exp_avg, DynamicCache


@dataclass
class Record:
    """Everything that a fake run leaves.

    ``events`` in order: index of an allocation when it is made, its complement (``~index``) when it goes, :data:`EMPTY_CACHE`. ``assumptions``
    counts what had to be assumed, by its text. ``slack`` are bytes of allocations that a rule only bounds: (index, low, high).
    ``stacks``: call stacks by their number, each frame ``(function, file, line)``, innermost first. ``rooms``: what there was from an event on, as
    (number of the event, capacity, torch's own limit); empty where nothing was refused while it ran. ``refused``: requests that were refused, ``spared``:
    those of them that met no error, since their operator goes on without;
    ``needs``: for the first of a run, (number of its event, what a copy found that nothing was refused in). ``caches``: what a KV cache held at the end of
    a forward, as (number of events so far, shape, tokens of it that are padding); ``parameters``: of each weight layer, name, dtype, elements, rows of a
    matrix (0: none) and bytes.
    """

    events: list[int] = field(default_factory=list)
    made: list[Allocation] = field(default_factory=list)
    assumptions: dict[str, int] = field(default_factory=dict)
    slack: list[tuple[int, int, int]] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # libraries that were met: blas, second_blas, cudnn, fft, solver
    kernels: dict[str, int] = field(default_factory=dict)  # attention kernels that were chosen, with how often
    marks: list[tuple[int, str, str]] = field(default_factory=list)  # (number of events so far, kind, name)
    stacks: list[tuple[tuple[str, str, int | None], ...]] = field(default_factory=lambda: [()])
    rooms: list[tuple[int, int, int | None]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    spared: list[int] = field(default_factory=list)
    needs: list[tuple[int, dict[str, Any] | None]] = field(default_factory=list)
    elsewhere: int = 0  # outputs on another device
    caught: bool = False  # the code went on after the error
    caches: list[tuple[int, Shape, int | None]] = field(default_factory=list)
    parameters: list[tuple[str, str, str, int, int, int]] = field(default_factory=list)

    def assume(self, what: str) -> None:
        """Count an assumption."""
        self.assumptions[what] = self.assumptions.get(what, 0) + 1


class _Gone(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to a storage that knows which allocation it is."""

    __slots__ = ("index", "key")
    index: int
    key: int


def recorder_class(torch: Any) -> type:
    """Return the mode's class; torch is there only now."""
    from torch.utils._python_dispatch import TorchDispatchMode

    tensor_class, fake, meta = torch.Tensor, torch._subclasses.fake_tensor.FakeTensor, torch.device("meta")
    device_of = torch.ops.prim.device.default
    implicit, cuda, cpu = torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.CUDA, torch._C.DispatchKey.CPU

    class Recorder(TorchDispatchMode):  # type: ignore[misc]
        """Calls the operator, then looks at what is new."""

        def __init__(self, record: Record, where: Any, shadows: Any, rules: Any, kind: str = "cuda", lines: Any = None, room: Any = None) -> None:
            super().__init__()
            self.lines = lines  # None: no lines are recorded
            self.room = room  # None: nothing is refused
            self.kind = kind  # of device whose storages are written down
            self.record, self.where, self.shadows, self.rules = record, where, shadows, rules
            self.live: dict[int, _Gone] = {}
            self.sizes: dict[int, int] = {}
            self.lock = threading.RLock()
            self.node_of: dict[int, int | None] = {}  # allocation -> number of the node of the graph that made it
            self.summed: tuple[int, int] | None = None  # a sum of gradients that was just made: (its allocation, that of the first)
            self._plans: dict[Any, int] = {}
            self.device = torch.device("cuda", 0)

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # nothing is compiled in a fake run; the wrapper that torch would put around each call costs more than the call

        # -------------------------------------------------------------- the operator
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is device_of and isinstance(args[0], fake):  # C++ asks this more often than all else
                return meta if args[0].fake_mode.in_kernel_invocation else args[0].fake_device
            kwargs = kwargs or {}
            plan = self._plans.get(func)
            if plan is None:
                plan = self._plans[func] = self._plan(func)
            if plan == _VIEW:
                out = func(*args, **kwargs)
                if type(out) is tensor_class or isinstance(out, tensor_class):
                    self.shadows.follow_view(func, args, kwargs, out)
                else:
                    self.shadows.follow(func, args, kwargs, out)
                return out
            if plan == _WRITES:  # what it writes is there already
                out = args[0] if func._schema.returns else None
                self.shadows.follow(func, args, kwargs, out)
                return out
            if plan == _DECOMPOSE:
                with self:
                    return func.decompose(*args, **kwargs)
            special = self.rules.before.get(func)
            if special is not None:
                out = special(self, func, args, kwargs)
                if out is not NotImplemented:
                    return out
            answered, out = self.shadows.answer(func, args, kwargs)
            if not answered:
                out = func(*args, **kwargs)
                fix = self.rules.fix.get(func)
                if fix is not None:
                    out = fix(self, args, out)
                self.shadows.follow(func, args, kwargs, out)
            emit = self.rules.emit.get(func)
            if emit is not None:
                emit(self, func, args, kwargs, out)
                return out
            order = self.rules.order.get(func)
            self.note(func, out if order is None else order(out))
            after = self.rules.after.get(func)
            if after is not None:
                after(self, func, args, kwargs, out)
            return out

        def _plan(self, func: Any) -> int:
            schema = func._schema
            returns = schema.returns
            if func.namespace == "prim" or func is torch.ops.aten.lift_fresh.default:  # the latter brings a new tensor in
                return _PLAIN
            if func not in self.rules.before and func not in self.rules.after and func not in self.rules.emit and _only_writes(func):
                return _WRITES
            has = torch._C._dispatch_has_kernel_for_dispatch_key
            if has(func.name(), implicit) and not has(func.name(), cuda if self.kind == "cuda" else cpu) and func not in self.rules.before:
                return _DECOMPOSE
            if returns and all(r.alias_info is not None and not r.alias_info.is_write for r in returns):
                return _VIEW
            return _PLAIN

        # -------------------------------------------------------------- storages
        def note(self, func: Any, out: Any) -> None:
            """Write down the storages of an output that are new, or have another size."""
            if isinstance(out, tensor_class):
                self._one(func, out)
            elif isinstance(out, (tuple, list)):
                for item in out:
                    if isinstance(item, tensor_class):
                        self._one(func, item)
                    elif isinstance(item, (tuple, list)):
                        self.note(func, item)

        def _one(self, func: Any, tensor: Any) -> None:
            if tensor.device.type != self.kind:
                self.record.elsewhere += 1
                return
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):  # a sparse tensor has none: its parts do
                self.record.assume("no rule for sparse tensors: they are counted by their parts, what their kernels need beside is not")
                for part in _parts(tensor):
                    self._one(func, part)
                return
            key = storage._cdata
            nbytes = storage.nbytes()
            known = self.live.get(key)
            if known is not None:
                if self.sizes[known.index] != nbytes:
                    self._resized(func, storage, known, nbytes)
                return
            if nbytes:
                self._new(func, storage, key, nbytes)

        def _new(self, func: Any, storage: Any, key: int, nbytes: int) -> None:
            with self.lock:
                index = self.begin(nbytes, func._schema.name if func is not None else "opening")
                ref = _Gone(storage, self._gone)
                ref.index, ref.key = index, key
                self.live[key] = ref

        def begin(self, nbytes: int, op: str, category: str | None = None, evidence: str | None = None, *, spared: bool = False) -> int:
            """Write down a request; returns its index. ``spared``: where it is refused, its operator goes on without."""
            record = self.record
            index = len(record.made)
            layer, phase, step = self.where.now()
            self.node_of[index] = self.where.node
            stack = 0 if self.lines is None else self.lines.of(sys._getframe(1))
            record.made.append(Allocation(nbytes, op.removeprefix("aten::"), layer, phase, step, category, evidence, stack=stack))
            self.sizes[index] = nbytes
            record.events.append(index)
            if self.room is not None:
                self.room.asks(index, nbytes, may_be_undone=self.where.node is not None and op == "aten::add", spared=spared)
            return index

        def end(self, index: int) -> None:
            """Write down that a request was given back."""
            self.record.events.append(~index)
            self.record.made[index].ended = self.where.now()[1] or ""

        def temporary(self, nbytes: int, op: str, category: str = "workspace") -> None:
            """A request that ends within its operator."""
            if nbytes > 0:
                self.end(self.begin(nbytes, op, category, "operator"))

        def ranged(self, guess: int, low: int, high: int, op: str) -> None:
            """A request that ends within its operator and of which only a range is known: cuDNN takes another plan where a convolution's workspace is refused."""
            if high <= 0:
                return
            index = self.begin(guess, op, "workspace", "operator", spared="convolution" in op)
            self.end(index)
            if low != high:
                self.record.slack.append((index, low, high))

        def loosely(self, index: int, low: float, high: float) -> None:
            """Note that a request's size is only known within these parts of it."""
            size = self.record.made[index].nbytes
            self.record.slack.append((index, int(low * size), int(high * size)))

        def made_in_this_node(self, tensor: Any) -> bool:
            """Whether the node of the graph that is running made this storage itself."""
            index = self.index_of(tensor)
            return index is not None and self.node_of.get(index) == self.where.number()

        def sum_in_place(self, new: int, old: int) -> None:
            """A sum of two gradients: the engine does it in place where nobody else holds the first, which is then given back at once."""
            self.summed = (new, old)

        def _took_over(self, ref: _Gone) -> bool:
            summed, self.summed = self.summed, None
            events = self.record.events
            if summed is None or summed[1] != ref.index or not events or events[-1] != summed[0] or (self.room is not None and self.room.seen(len(events))):
                return False
            for other in reversed(self.live.values()):
                if other.index == summed[0]:
                    events.pop()
                    other.index = ref.index
                    return True
            return False

        def _gone(self, ref: _Gone) -> None:
            with self.lock:
                if self.summed is not None and self._took_over(ref):
                    if self.live.get(ref.key) is ref:
                        del self.live[ref.key]
                    return
                if self.live.get(ref.key) is ref:
                    del self.live[ref.key]
                self.end(ref.index)

        def _resized(self, func: Any, storage: Any, known: _Gone, nbytes: int) -> None:
            """``resize_`` on a device makes a new block, copies, and gives the old one back."""
            with self.lock:
                if nbytes:
                    index = self.begin(nbytes, func._schema.name)
                    self.end(known.index)
                    known.index = index
                else:
                    self.end(known.index)
                    del self.live[known.key]
                    known.key = -1

        def adopt(self, storage: Any, index: int) -> None:
            """Let a request that was written down already live as long as ``storage``."""
            with self.lock:
                ref = _Gone(storage, self._gone)
                ref.index, ref.key = index, storage._cdata
                self.live[ref.key] = ref

        def index_of(self, tensor: Any) -> int | None:
            """Which request a tensor's storage is; None for none."""
            try:
                known = self.live.get(tensor.untyped_storage()._cdata)
            except (NotImplementedError, RuntimeError, ValueError):  # the last: a lazy module's, without a shape yet
                return None
            return None if known is None else known.index

    return Recorder


_PLAIN, _VIEW, _DECOMPOSE, _WRITES = 0, 1, 2, 3
_FILLING = frozenset(("aten::zero_", "aten::normal_", "aten::uniform_", "aten::random_", "aten::bernoulli_", "aten::exponential_", "aten::trunc_normal_"))


def _only_writes(func: Any) -> bool:
    """Whether an operator does nothing but write to what it is given: it needs no fake kernel. Those that check shapes are left to theirs."""
    name, returns = func._schema.name, func._schema.returns
    if name in _FILLING or (name == "aten::fill_" and func._overloadname == "Scalar"):
        return True
    return not returns and name.startswith("aten::_foreach_") and name.endswith("_") and name != "aten::_foreach_copy_"


def _parts(tensor: Any) -> list[Any]:
    """The tensors that a sparse tensor is made of."""
    names = ("_indices", "_values") if str(tensor.layout) == "torch.sparse_coo" else ()
    found = []
    for name in names:
        try:
            found.append(getattr(tensor, name)())
        except (NotImplementedError, RuntimeError, TypeError):
            continue
    return found
