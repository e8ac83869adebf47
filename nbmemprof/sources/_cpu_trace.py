"""The one follower of this process's CPU allocations: native events, and where Python was when they were made."""

from __future__ import annotations

import importlib
import os
import struct
import subprocess
import sys
import threading
import time
import weakref
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmemprof import _optional
from nbmemprof.errors import NotRecording
from nbmemprof.sources._cpu_hook import EVENT, SERIAL, Hook
from nbmemprof.sources._stacks import CHECKPOINT, OPTIMIZER, Layers, Stacks

__all__ = ["BACKWARD", "CAPTURE", "FORWARD", "PHASES", "RECOMPUTE", "ROW", "STEP", "Mark", "Tracker", "match", "tracker"]

ROW = np.dtype([("index", "i8"), *EVENT.descr])
_CAPTURE = struct.Struct("=qqIIHHBx")  # position in the events, serial, stack, layer, thread's slot, operator, phase
CAPTURE = np.dtype([("position", "i8"), ("serial", "i8"), ("stack", "u4"), ("layer", "u4"), ("slot", "u2"), ("op", "u2"), ("phase", "u1"), ("pad", "u1")])
PHASES = (None, "forward", "backward", "recompute", "optimizer")
FORWARD, BACKWARD, RECOMPUTE, STEP = 1, 2, 3, 4


TRIED = {(2, 11), (2, 13)}  # the test-suite ran with these
_REHEARSAL = "NBMEMPROF_REHEARSAL"
_TRIAL = """
import torch
import nbmemprof
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters())
with nbmemprof.record(source="torch_cpu") as rec:
    for _ in range(3):
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
assert rec.capture.events.height > 50, rec.capture
"""

Rows = npt.NDArray[Any]


@dataclass(eq=False)
class Mark:
    """A position in the record."""

    position: int
    time: int
    spent: int
    operators: int


def match(rows: Rows) -> npt.NDArray[np.int64]:
    """For each allocation the row of its release, for each release that of its allocation; -1 where there is none."""
    partner = np.full(len(rows), -1, np.int64)
    order = np.argsort(rows["addr"], kind="stable")
    addr, made = rows["addr"][order], rows["size"][order] > 0
    pair = np.flatnonzero((addr[:-1] == addr[1:]) & made[:-1] & ~made[1:])
    partner[order[pair]], partner[order[pair + 1]] = order[pair + 1], order[pair]
    return partner


def _rehearse(version: str) -> None:
    """See in a child process that a PyTorch which was not tried yet bears the observers: a crash there costs nothing here."""
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) in TRIED or os.environ.get(_REHEARSAL):
        return
    try:
        done = subprocess.run([sys.executable, "-c", _TRIAL], env=os.environ | {_REHEARSAL: "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, timeout=120, check=False)  # noqa: S603 - our own text
        failed = f"exit code {done.returncode}" if done.returncode else None
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = type(error).__name__
    if failed:
        raise NotRecording(
            f"A trial recording of CPU tensors with PyTorch {version} failed in a process of its own ({failed}), so none is made here. "
            f"Use PyTorch {' or '.join(f'{a}.{b}' for a, b in sorted(TRIED))}, or record on a GPU."
        )


class Tracker:
    """Counts its users; the first starts it, the last stops it."""

    def __init__(self) -> None:
        self.stacks, self.layers = Stacks(), Layers()
        self.ops: dict[bytes, int] = {b"": 0}
        self.known: dict[int, tuple[int, int]] = {}  # alive when the recording began: address → bytes, stack
        self.faults: dict[str, int] = {}
        self.dropped = self.lost = 0
        self.native_ns = 0.0  # an observed operator's cost outside Python
        self.spent = 0  # ns in Python
        self.first = 0
        self._hook: Hook | None = None
        self._users = 0
        self._seen = 0  # events up to here are in chunks or in known
        self._chunks: list[Rows] = []
        self._log: list[bytes] = []
        self._captures: list[Rows] = []
        self._marks: weakref.WeakSet[Mark] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._bytes = self._bound = self._limit = 0
        self._sequences, self._sequence_layers = array("q"), array("q")

    # ------------------------------------------------------------------ begin and end
    def acquire(self, stacks: str, ring_bytes: int) -> Mark:
        """Begin to follow, or join who follows already."""
        torch = _optional.require("torch", feature="Recording CPU tensors")
        with self._lock:
            if self._users == 0:
                hook = self._hook or self._prepare(torch)
                if not hook.hooked:
                    hook.hook()
                self._recall(hook)
                self._bound = self._limit = ring_bytes // 3  # thinning needs as much again, and a little
                self._chunks, self._captures, self._bytes, self.dropped, self.lost, self.faults = [], [], 0, 0, 0, {}
                self._log.clear()
                self.stacks.look()
                self._where = self._make_where(torch, stacks != "none")
                hook.on()
            self._users += 1
            return self.mark()

    def release(self) -> None:
        """Stop with the last user. What is alive stays known, with its stack, for the next recording."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            assert self._hook is not None  # noqa: S101 - acquire made it
            self._hook.off()
            rows, captures = self.rows(), self.captures()
            alive = self.alive(rows, match(rows))
            at = attribute(rows, captures)[alive]
            stack = np.where(at >= 0, captures["stack"][at], 0) if len(captures) else np.zeros(len(alive), np.int64)
            touched = set(rows["addr"].tolist())
            kept = {a: (size, old) for a, (size, old) in self.known.items() if a not in touched}
            self.known = kept | {int(a): (int(s), int(n)) for a, s, n in zip(rows["addr"][alive], rows["size"][alive], stack, strict=True)}
            number = self.stacks.keep(n for _, n in self.known.values())
            self.known = {a: (size, number[n]) for a, (size, n) in self.known.items()}
            self._chunks, self._captures, self._bytes = [], [], 0
            self._log.clear()

    def leave(self) -> None:
        """Take the allocation hook away too, where nobody records; the next recording begins with nothing known."""
        with self._lock:
            if self._hook is not None and not self._users:
                self._hook.unhook()
                self.known = {}
                self._seen = self._hook.count

    def _recall(self, hook: Hook) -> None:
        """Take in what happened since the last recording: which of the known have died, what was born unrecorded."""
        count = hook.count
        if count - self._seen > hook.capacity:
            self.known = {}
        else:
            rows = hook.read(self._seen, count)
            last = rows[len(rows) - 1 - np.unique(rows["addr"][::-1], return_index=True)[1]] if len(rows) else rows
            for addr, size in zip(last["addr"].tolist(), last["size"].tolist(), strict=True):
                if size > 0 and addr:
                    self.known[addr] = (size, 0)
                else:
                    self.known.pop(addr, None)
        self.first = self._seen = count

    def _prepare(self, torch: Any) -> Hook:
        """Put the observers in place, see that they work, and measure what an operator pays for them."""
        _rehearse(torch.__version__)
        overloads: dict[str, bool] = {}
        for full in torch._C._dispatch_get_all_op_names():
            name, _, overload = full.partition(".")
            if "out" not in overload:
                overloads[name] = overloads.get(name, True) and torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeImplicitAutograd")
        hook = Hook(torch, self._tell, [name for name, composite in overloads.items() if composite])
        self._where = lambda: (0, 0, 0)
        hook.on()
        try:
            start = hook.count
            x = torch.empty(1021)
            del x
            rows = hook.read(start, hook.count)
            if rows["size"].tolist()[:1] != [4084] or len(rows) != 2:
                raise NotRecording(f"PyTorch {torch.__version__} does not allocate CPU memory as expected here, so it can't be observed. Use a PyTorch wheel from pytorch.org.")
            x = torch.ones(1)
            observed = min(_clock(x.neg_) for _ in range(5))
        finally:
            hook.off()
        self.native_ns = max(0.0, observed - min(_clock(x.neg_) for _ in range(5)))
        os.register_at_fork(after_in_child=hook.off)  # a child's memory is not this process's
        self._seen, self._hook = hook.count, hook
        _skip_in_dynamo(self._tell, Stacks.of, Stacks._learn, Layers.of, Layers._number, Tracker._drain, Tracker._thin)
        return hook

    # ------------------------------------------------------------------ the record
    def _tell(self, name: bytes, slot: int, serial: int) -> None:
        """Called by the native side at the end of an operator that has allocated, in its thread."""
        begin = time.perf_counter_ns()
        try:
            hook = self._hook
            if hook is None:
                return
            op = self.ops.get(name)
            if op is None:
                op = self.ops[name] = len(self.ops) if len(self.ops) < 65_535 else 0
            stack, layer, phase = self._where()
            position = hook.count
            self._log.append(_CAPTURE.pack(position, serial, stack, layer, slot, op, phase))
            if position - self._seen > hook.capacity // 2:
                self._drain()
        except Exception as error:  # the operator has run; it must not fail for our sake
            text = f"{type(error).__name__}: {error}"[:200]
            self.faults[text] = self.faults.get(text, 0) + 1
        self.spent += time.perf_counter_ns() - begin

    def _make_where(self, torch: Any, with_stacks: bool) -> Any:
        """A function that tells stack, layer and phase of the operator that ends now."""
        current_task, current_node, sequence = torch._C._current_graph_task_id, torch._C._current_autograd_node, torch.autograd._get_sequence_nr
        grad_enabled, get_frame, of, path = torch.is_grad_enabled, sys._getframe, self.stacks.of, self.layers.of
        sequences, layers = self._sequences, self._sequence_layers

        def where() -> tuple[int, int, int]:
            stack = told = layer = 0
            if with_stacks:
                stack, told, inner, outer = of(get_frame(2))
                if inner is not None and outer is not None:
                    layer = path(inner, outer)
            if current_task() != -1:
                if not told & CHECKPOINT:
                    node = current_node()
                    if node is not None and len(sequences):  # autograd numbers its nodes as it makes them
                        at = bisect_right(sequences, node._sequence_nr()) - 1
                        layer = layers[at] if at >= 0 else 0
                    return stack, layer, BACKWARD
                phase = RECOMPUTE
            else:
                phase = STEP if told & OPTIMIZER else FORWARD if layer else 0
            if grad_enabled():
                sequences.append(sequence() - 1)
                layers.append(layer)
                if len(sequences) > 1 << 20:
                    del sequences[: 1 << 19], layers[: 1 << 19]
            return stack, layer, phase

        _skip_in_dynamo(where)
        return where

    def mark(self) -> Mark:
        """The position now."""
        assert self._hook is not None  # noqa: S101 - acquire made it
        mark = Mark(self._hook.count, time.perf_counter_ns(), self.spent, self._hook.operators)
        self._marks.add(mark)
        return mark

    def _drain(self) -> None:
        """Copy new events out of the ring; thin the old ones when the bound is reached."""
        hook = self._hook
        if hook is None or not self._lock.acquire(blocking=False):
            return
        try:
            start, stop = self._seen, hook.count
            if stop - start > hook.capacity:
                self.lost += stop - start - hook.capacity
                start = stop - hook.capacity
            rows = np.empty(stop - start, ROW)
            rows["index"] = np.arange(start, stop)
            events = hook.read(start, stop)
            for name in EVENT.names or ():
                rows[name] = events[name]
            self._chunks.append(rows)
            self._seen = stop
            count = len(self._log)
            self._captures.append(np.frombuffer(b"".join(self._log[:count]), CAPTURE))
            del self._log[:count]
            self._bytes += rows.nbytes + self._captures[-1].nbytes
            if self._bytes > self._limit:
                self._thin()
        finally:
            self._lock.release()

    def rows(self) -> Rows:
        """Every event that is kept, up to now."""
        with self._lock:
            self._drain()
            if len(self._chunks) != 1:
                self._chunks = [np.concatenate(self._chunks)]
            return self._chunks[0]

    def captures(self) -> Rows:
        """Where Python was, for the events of ``rows``."""
        with self._lock:
            if len(self._captures) != 1:
                self._captures = [np.concatenate(self._captures) if self._captures else np.zeros(0, CAPTURE)]
            return self._captures[0]

    def alive(self, rows: Rows, partner: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Rows of the allocations that live on."""
        open_ = np.flatnonzero((rows["size"] > 0) & (partner < 0) & (rows["addr"] > 0))
        newest = len(rows) - 1 - np.unique(rows["addr"][::-1], return_index=True)[1]
        return np.intersect1d(open_, newest)

    def _thin(self) -> None:
        """Of all but the newest quarter keep what is unfinished, and what was alive at a peak that an open window can ask for."""
        rows, captures = np.concatenate(self._chunks), np.concatenate(self._captures)
        partner = match(rows)
        old = len(rows) * 3 // 4
        born = np.flatnonzero((rows["size"] > 0) & (partner >= 0) & (partner < old))
        died = partner[born]
        inside = (rows["tag"][born] == rows["tag"][died]) & ((rows["tag"][born] & SERIAL) > 0)
        real = np.ones(len(rows), bool)
        real[born[inside]] = real[died[inside]] = False
        change = np.where(rows["size"] > 0, rows["size"], np.where(partner >= 0, -rows["size"][partner], 0)) * real
        needed = np.zeros(len(born), bool)
        for start in {0, *(int(np.searchsorted(rows["index"], mark.position)) for mark in self._marks)}:
            if start < len(rows):
                peak = start + int(np.argmax(np.cumsum(change[start:])))
                needed |= ~inside & (born <= peak) & (died > peak)
        keep = np.ones(len(rows), bool)
        keep[born[~needed]] = keep[died[~needed]] = False
        keep[:old] &= partner[:old] + (rows["size"][:old] > 0) >= 0  # releases of nobody's memory
        self.dropped += int((~keep).sum())
        rows = rows[keep]
        used = np.zeros(len(captures) + 1, bool)
        used[attribute(rows, captures)] = True
        used[len(captures) - len(captures) // 4 :] = True
        self._chunks, self._captures = [rows], [captures[used[:-1]]]
        self._bytes = rows.nbytes + self._captures[0].nbytes
        self._limit = max(self._bound, 2 * self._bytes)


def attribute(rows: Rows, captures: Rows, last: bool = False) -> npt.NDArray[np.int64]:
    """For each event the capture that followed it in its thread (``last``: that came before it); -1 where there is none."""
    found = np.full(len(rows), -1, np.int64)
    slots = (rows["tag"] >> np.uint64(48)).astype(np.int64)
    for slot in np.unique(captures["slot"]):
        mine, here = np.flatnonzero(captures["slot"] == slot), np.flatnonzero(slots == slot)
        at = np.searchsorted(captures["position"][mine], rows["index"][here], side="right") - int(last)
        good = (at >= 0) & (at < len(mine))
        found[here[good]] = mine[at[good]]
    return found


def _clock(call: Any, times: int = 100) -> float:
    begin = time.perf_counter_ns()
    for _ in range(times):
        call()
    return (time.perf_counter_ns() - begin) / times


def _skip_in_dynamo(*functions: Any) -> None:
    """torch.compile must not trace our functions when they run within a frame that it looks at."""
    try:
        skip_code = importlib.import_module("torch._C._dynamo.eval_frame").skip_code
    except (ImportError, AttributeError):
        return
    for function in functions:
        skip_code(function.__code__)


tracker = Tracker()
