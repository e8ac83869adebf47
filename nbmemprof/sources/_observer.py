"""Watch a training or serving loop from outside: which phase, which module, which step, and whose storages are where.

Global hooks of ``torch.nn`` and ``torch.optim``, two functions of ``torch._C``, ``zero_grad`` and NVTX's push and pop are
used, all taken away by ``close``. Nothing of a module, tensor or graph is touched, and what PyTorch computes or saves stays the same. Where torch
lets a thread attach a note to its allocations (2.10 and later), each allocator event carries where it happened;
otherwise clocks tell. Backward's threads carry no note and need none: what has none, between two that have one, is theirs.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from typing import Any

from nbmemprof import tags
from nbmemprof.sources import _routing
from nbmemprof.sources._module_hooks import ModuleHooks
from nbmemprof.sources._owned import Owned
from nbmemprof.sources._stacks import Layers

__all__ = ["BACKWARD", "FORWARD", "NONE", "OPTIMIZER", "PHASES", "RECOMPUTE", "ZERO_GRAD", "Observer"]

PHASES = (None, "forward", "backward", "recompute", "optimizer", "zero_grad")
NONE, FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER, ZERO_GRAD = range(6)
_MOST = 1 << 21  # records that are kept; older ones are let go
_FIRST_STEPS, _EVERY = 3, 32  # steps whose gradients are noted one by one
_MOST_CALLS = 200_000  # of experts

_Place = tuple[weakref.ref[Any], int, str]  # a module, its layer, and the layer as notes end


class _Thread:
    """Where one thread is."""

    __slots__ = ("before", "depth", "group", "notes", "phase", "prefix", "record", "stack")

    def __init__(self) -> None:
        self.notes = False  # whether its events carry a note outside modules too
        self.record = 0  # the newest record that it made
        self.prefix = "0."  # and as its notes begin
        self.phase = NONE
        self.group = 0
        self.depth = 0  # backward calls under way
        self.before: list[tuple[int, int]] = []  # phase and group around it
        self.stack: list[_Place] = []  # modules being called

    @property
    def layer(self) -> int:
        return self.stack[-1][1] if self.stack else 0


class _Asked:
    """Of a torch that keeps no flag: whether it compiles."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask

    @property
    def _is_compiling_flag(self) -> bool:
        return self._ask()


class Observer:
    """From ``open`` to ``close``: a log of spans and owners; see :mod:`nbmemprof.sources._placing` for what is made of it."""

    def __init__(self, torch: Any, device_type: str = "cuda", note: Callable[[str], None] | None = None, clock_ns: Callable[[], int] = time.time_ns, peak: Callable[[], int] | None = None) -> None:
        self.torch, self.device_type, self.clock_ns, self.peak = torch, device_type, clock_ns, peak
        self._is_compiling = torch.compiler.is_compiling
        self._compiler: Any = torch.compiler if hasattr(torch.compiler, "_is_compiling_flag") else _Asked(torch.compiler.is_compiling)  # a flag is quicker than a call
        self.note = note
        self.noted = note is not None  # the events carry notes
        self.first = 0  # number of the oldest record kept
        self.times, self.phases, self.groups, self.backs, self.layer_of, self.name_of, self.grads = array("q"), array("b"), array("q"), array("q"), array("i"), array("i"), array("b")
        self.names: list[str | None] = [None]
        self.layers = Layers()
        self.owned = Owned(torch, device_type, clock_ns, self.layers, self._guard)
        self._places: dict[int, _Place] = {}  # by the modules' ids: those that are no part of a mixture of experts
        self.steps: list[tuple[int, int]] = []  # record after an optimizer's step, the optimizer
        self.routing: list[_routing.Call] = []
        self.ask_router = False  # whether the choice of a router may be read off the device
        self._mixtures: dict[int, tuple[str, str, int] | None] = {}  # what a layer is to a mixture of experts
        self.spent_ns = 0
        self.faults: dict[str, int] = {}
        self._name = 0
        self._ranges: list[str | None] = []  # names around the ranges of NVTX that are open
        self._group = 0
        self._backward = -1  # group of the backward under way
        self._local = threading.local()
        self._steps_seen = 0
        self._peak_seen: int | None = None
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._hooks = ModuleHooks(self._entering, self._leaving)
        self._put_back: list[tuple[Any, str, Any, Any]] = []
        self._open = False

    # ------------------------------------------------------------------ begin and end
    def open(self) -> None:
        """Put the hooks in place."""
        here = self._meet()
        here.notes = self.note is not None
        self._open = True
        self._push(here)
        self._tell(here)
        self._hooks.open()
        optim: Any = sys.modules["torch.optim.optimizer"]
        self._handles += [optim.register_optimizer_step_pre_hook(self._before_step), optim.register_optimizer_step_post_hook(self._after_step)]
        core = self.torch._C
        self._patch(core, "_stash_obj_in_tls", self._stashing)
        self._patch(core, "_remove_obj_from_tls", self._removing)
        graph = sys.modules["torch.autograd.graph"]
        run = getattr(getattr(graph, "_engine_run_backward", None), "__code__", None)
        if self.device_type == "cpu" and run is not None and "_stash_obj_in_tls" not in run.co_names:  # before 2.13; CUDA's events of backward's threads tell by themselves
            for owner in (self.torch.autograd, graph):
                self._patch(owner, "_engine_run_backward", self._running)
        if self.note is not None:
            self._patch(core, "_cuda_setMemoryMetadata", self._users_note)
        for owner in (self.torch.optim.Optimizer, self.torch.nn.Module):
            self._patch(owner, "zero_grad", self._zeroing)
        for name, make in (("range_push", self._pushing), ("range_pop", self._popping)):
            self._patch(sys.modules.get("torch.cuda.nvtx"), name, make)
        for name in ("torch.nn.modules.module", "torch._dynamo.eval_frame"):
            self._patch(sys.modules.get(name), "_has_any_global_hook", lambda _: self._hooks.others)
        if not self._hooks.told:
            self._patch(self.torch, "compile", self._hooks.compiling)
        tags.listeners.append(self)
        self.look()

    def close(self) -> None:
        """Take everything away; the thread's note is empty again."""
        if not self._open:
            return
        self._open = False
        if self in tags.listeners:
            tags.listeners.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooks.close()
        for owner, name, original, made in reversed(self._put_back):
            if getattr(owner, name, None) is made:
                setattr(owner, name, original)
        self._put_back.clear()
        self.stop_notes()

    def stop_notes(self) -> None:
        """Attach no more notes: the user attaches his own, or the history is his. From here on clocks tell."""
        note, self.note = self.note, None
        if note is not None:
            note("")

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        original = getattr(owner, name, None)
        if original is not None:
            made = make(original)
            setattr(owner, name, made)
            self._put_back.append((owner, name, original, made))

    # ------------------------------------------------------------------ records
    def _meet(self) -> _Thread:
        here: _Thread | None = getattr(self._local, "here", None)
        if here is None:
            here = self._local.here = _Thread()
            if self.torch._C._current_graph_task_id() != -1:
                here.phase, here.group = BACKWARD, self._backward
        return here

    def _push(self, here: _Thread) -> int:
        """A new record of where a thread is; its number."""
        with self._lock:
            self.times.append(self.clock_ns())
            self.phases.append(here.phase)
            self.groups.append(here.group)
            self.backs.append(self._backward)
            self.layer_of.append(here.layer)
            self.name_of.append(self._name)
            self.grads.append(here.phase == FORWARD and self.torch.is_grad_enabled())
            if len(self.times) > _MOST:
                for column in (self.times, self.phases, self.groups, self.backs, self.layer_of, self.name_of, self.grads):
                    del column[: _MOST // 2]
                self.first += _MOST // 2
            record = self.first + len(self.times) - 1
        here.record = record
        if self.note is not None:
            here.prefix = f"{record}."
        return record

    def _tell(self, here: _Thread) -> None:
        if self.note is not None:
            self.note(f"{here.record}.{here.layer}" if here.notes or here.stack else "")

    def _move(self, here: _Thread, phase: int, group: int | None = None) -> None:
        """Into another phase; ``group`` None: a new one."""
        if group is None:
            self._group += 1
            group = self._group
        here.phase, here.group = phase, group
        self._push(here)
        self._tell(here)

    def _guard(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"[:200]
        self.faults[text] = self.faults.get(text, 0) + 1

    # ------------------------------------------------------------------ modules
    def _entering(self) -> Callable[..., None]:
        """Before each call of a module. What is met again takes a third of a microsecond: a program calls thousands a second."""
        compiler, local, places = self._compiler, self._local, self._places

        def entering(module: Any, args: Any) -> None:
            if compiler._is_compiling_flag:
                return
            try:
                here, place = local.here, places[id(module)]
            except (AttributeError, KeyError):
                here = None
            if here is None or not here.stack or place[0]() is not module:
                self._enter(module, args)
                return
            here.stack.append(place)
            note = self.note
            if note is not None:
                note(here.prefix + place[2])
            else:
                self._push(here)

        return entering

    def _leaving(self) -> Callable[..., None]:
        """After each; with an exception, called without the result."""
        compiler, local = self._compiler, self._local

        def leaving(module: Any, args: Any, kwargs: Any = None, result: Any = None) -> None:
            if compiler._is_compiling_flag:
                return
            here = getattr(local, "here", None)
            stack: list[_Place] = here.stack if here is not None else []
            if here is None or len(stack) < 2 or stack[-1][0]() is not module:
                self._leave(module, args, kwargs, result)
                return
            del stack[-1]
            note = self.note
            if note is not None:
                note(here.prefix + stack[-1][2])
            else:
                self._push(here)

        return leaving

    def _enter(self, module: Any, args: Any) -> None:
        """The outermost module, one that is met for the first time, or a part of a mixture of experts."""
        try:
            here = self._meet()
            if not here.stack:
                self._enter_root(here, module)
            layer = self.layers.place(module, self._root(module, here))
            place = (weakref.ref(module), layer, str(layer))
            here.stack.append(place)
            if layer not in self._mixtures:
                self._mixtures[layer] = _routing.kind_of(self.layers.names[layer])
            part = self._mixtures[layer]
            if part is None:
                self._places[id(module)] = place
            else:
                self._note_call(here, part, module, args)
            if self.note is not None:
                self.note(here.prefix + place[2])
            else:
                self._push(here)
        except Exception as error:  # the user's forward goes on
            self._guard(error)

    def _note_call(self, here: _Thread, part: tuple[str, str, int], module: Any, args: Any) -> None:
        """A mixture's expert is called: with how many tokens."""
        if here.phase != FORWARD or not args or not getattr(args[0], "ndim", 0) or len(self.routing) > _MOST_CALLS:
            return
        what, path, expert = part
        record = self.first + len(self.times) - 1
        if what != "whole":
            shape = args[0].shape
            tokens = args[0].numel() // max(int(shape[-1]), 1)
            self.routing.append(_routing.Call(record, self.clock_ns(), here.group, path, expert, tokens, 0))
        elif self.ask_router:
            begin = time.perf_counter_ns()
            counts = _routing.choice(module, args) or []
            now = self.clock_ns()
            self.routing += [_routing.Call(record, now, here.group, path, at, tokens, len(counts)) for at, tokens in enumerate(counts)]
            self.spent_ns += time.perf_counter_ns() - begin

    def _root(self, module: Any, here: _Thread) -> Any:
        root = here.stack[0][0]() if here.stack else None
        return module if root is None else root

    def _enter_root(self, here: _Thread, module: Any) -> None:
        self._settle(here)
        here.before.append((here.phase, here.group))
        in_backward = self.torch._C._current_graph_task_id() != -1
        if in_backward:
            self._move(here, RECOMPUTE, self._backward)
        else:
            self._move(here, FORWARD)
        begin = time.perf_counter_ns()
        if self.owned.meet_root(module, self._latest):
            self.spent_ns += time.perf_counter_ns() - begin
        if self.owned.fresh_grads and not in_backward:
            self.owned.gradients(here.record)

    def _leave(self, module: Any, args: Any, kwargs: Any, result: Any) -> None:
        """The outermost module; or one below raised, and was not told."""
        try:
            here: _Thread | None = getattr(self._local, "here", None)
            if here is None or all(ref() is not module for ref, *_ in here.stack):
                return
            while here.stack.pop()[0]() is not module:
                pass
            if not here.stack:
                self._leave_root(here, args, kwargs, result)
            elif self.note is not None:
                self.note(here.prefix + here.stack[-1][2])
            else:
                self._push(here)
        except Exception as error:
            self._guard(error)

    def _leave_root(self, here: _Thread, args: Any, kwargs: Any, result: Any) -> None:
        phase, group = here.before.pop() if here.before else (NONE, 0)
        self._move(here, phase, None if phase == NONE else group)
        if phase in (BACKWARD, RECOMPUTE):
            return
        self.owned.fresh_grads |= self.torch.is_grad_enabled()  # a backward may come, and not every torch tells
        begin = time.perf_counter_ns()
        self.owned.forward(here.record, args, kwargs, result)
        self.spent_ns += time.perf_counter_ns() - begin

    # ------------------------------------------------------------------ backward
    def _stashing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.autograd`` calls this just before it runs the engine (and, in some versions, with None just after)."""

        def _stash_obj_in_tls(key: str, value: Any) -> Any:
            result = original(key, value)
            if key == "context" and self._open:
                (self._backward_begins if value is not None else self._backward_ends)()
            return result

        return _stash_obj_in_tls

    def _removing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def _remove_obj_from_tls(key: str) -> Any:
            result = original(key)
            if key == "context" and self._open:
                self._backward_ends()
            return result

        return _remove_obj_from_tls

    def _running(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What runs the engine, where nothing is stashed before it."""

        @functools.wraps(original)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            if not self._open:
                return original(*args, **kwargs)
            self._backward_begins()
            try:
                return original(*args, **kwargs)
            finally:
                self._backward_ends()

        return _engine_run_backward

    def _backward_begins(self) -> None:
        try:
            here = self._meet()
            if self.torch._C._current_graph_task_id() != -1:  # a backward within a backward
                here.depth += 1
                return
            self._settle(here)
            here.before.append((here.phase, here.group))
            here.depth = 1
            self._group += 1
            self._backward = self._group
            self._move(here, BACKWARD, self._group)
        except Exception as error:
            self._guard(error)

    def _backward_ends(self) -> None:
        try:
            here = self._meet()
            here.depth -= 1
            if here.depth == 0 and here.phase == BACKWARD and self.torch._C._current_graph_task_id() == -1:
                self._end_backward(here)
            here.depth = max(here.depth, 0)
        except Exception as error:
            self._guard(error)

    def _end_backward(self, here: _Thread) -> None:
        phase, group = here.before.pop() if here.before else (NONE, 0)
        self._backward = -1
        self.owned.fresh_grads = True
        here.depth = 0
        self._move(here, phase, None if phase == NONE else group)

    def _settle(self, here: _Thread) -> None:
        """End what must be over: a backward whose end was not told, a step that raised."""
        if here.stack:
            return
        if here.phase == BACKWARD and here.depth and self.torch._C._current_graph_task_id() == -1:
            self._end_backward(here)

    # ------------------------------------------------------------------ optimizers
    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.torch.compiler.is_compiling():
            return
        try:
            here = self._meet()
            self._settle(here)
            if here.phase == OPTIMIZER and here.before and not here.stack:  # the last step raised, or this one wraps another
                here.phase, here.group = here.before.pop()
            here.before.append((here.phase, here.group))
            self._move(here, OPTIMIZER)
            begin = time.perf_counter_ns()
            self.owned.meet_optimizer(optimizer)
            if self._grads_matter():
                self.owned.gradients(here.record, optimizer)
            self.spent_ns += time.perf_counter_ns() - begin
        except Exception as error:
            self._guard(error)

    def _grads_matter(self) -> bool:
        """Whether a step's gradients are looked for one by one: in the first steps, in one that took more memory than any before, and now and then.

        Where they are not, backward's phase still tells that they are gradients; their layers are not known there.
        """
        self._steps_seen += 1
        highest = self.peak() if self.peak is not None else None
        higher, self._peak_seen = highest != self._peak_seen, highest
        if highest is None or higher or self._steps_seen <= _FIRST_STEPS or self._steps_seen % _EVERY == 0:
            return True
        self.owned.fresh_grads = False
        return False

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.torch.compiler.is_compiling():
            return
        try:
            here = self._meet()
            if here.phase != OPTIMIZER or not here.before:
                return
            phase, group = here.before.pop()
            self._move(here, phase, None if phase == NONE else group)
            self.steps.append((here.record, id(optimizer)))
            begin = time.perf_counter_ns()
            self.owned.optimizer(optimizer, here.record, grown=True)
            self.spent_ns += time.perf_counter_ns() - begin
        except Exception as error:
            self._guard(error)

    def _zeroing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``zero_grad`` of optimizers and modules is a phase of its own."""
        compiling = self._is_compiling

        @functools.wraps(original)
        def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if compiling() or not self._open:
                return original(owner, *args, **kwargs)
            here = self._meet()
            if here.stack or here.phase != NONE:  # within a step or a forward it is part of that
                return original(owner, *args, **kwargs)
            try:
                self._move(here, ZERO_GRAD)
                return original(owner, *args, **kwargs)
            finally:
                if here.phase == ZERO_GRAD:
                    self._move(here, NONE)

        return zero_grad

    # ------------------------------------------------------------------ what the user says
    def _pushing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A range of NVTX is a named phase."""

        @functools.wraps(original)
        def range_push(msg: Any) -> Any:
            result = original(msg)
            self._ranges.append(self.named_phase(str(msg)))
            return result

        return range_push

    def _popping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def range_pop() -> Any:
            result = original()
            if self._ranges:
                self.named_phase(self._ranges.pop())
            return result

        return range_pop

    def named_phase(self, name: str | None) -> str | None:
        """``mp.phase`` begins or ends."""
        before = self.names[self._name]
        if name not in self.names:
            self.names.append(name)
        self._name = self.names.index(name)
        here = self._meet()
        self._push(here)
        self._tell(here)
        return before

    def tagged_now(self, obj: Any, category: str, name: str) -> None:
        """``mp.tag`` was called."""
        self.owned.tagged(obj, category, name, self._latest(fresh=True))

    def _users_note(self, original: Callable[[str], None]) -> Callable[[str], None]:
        def _cuda_setMemoryMetadata(metadata: str) -> None:  # noqa: N802 - torch's name
            self.note = None
            original(metadata)

        return _cuda_setMemoryMetadata

    def look(self, *, everywhere: bool = False) -> int:
        """Note every owner that is known now; ``everywhere``: search for others first. Gives the moment."""
        begin = time.perf_counter_ns()
        moment = self._latest(fresh=True)
        self.owned.look(moment, everywhere=everywhere)
        self.spent_ns += time.perf_counter_ns() - begin
        return moment

    def _latest(self, *, fresh: bool = False) -> int:
        here = self._meet()
        if fresh:
            self._settle(here)
            self._push(here)
            self._tell(here)
        return self.first + len(self.times) - 1
