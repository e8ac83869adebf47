"""Record the CPU tensor storages of a window: allocation, release, operator, module, Python stack, phase.

Counted is the memory that PyTorch's CPU allocator gives out, to the byte and whoever asks: operators, backward,
other threads, compiled code, ``torch.load``. Not counted: what an operator takes and gives back inside itself (kernel
scratch; ``recording["scratch_peak_bytes"]`` has the peak with it), memory that is not this allocator's (``from_numpy``,
``frombuffer``, mapped files, shared memory), other processes (DataLoader workers). Of what was there before the
first recording, known are parameters, their gradients and buffers of modules that the window calls, and large storages that die in it.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import polars as pl

from nbmemprof import _optional, heap, schema
from nbmemprof.capture import Capture
from nbmemprof.errors import NotRecording
from nbmemprof.flags import Flag
from nbmemprof.sources import _cpu_trace as tr
from nbmemprof.sources import _placing
from nbmemprof.sources._cpu_hook import SERIAL, unsupported
from nbmemprof.sources._observer import Observer
from nbmemprof.sources._stacks import MODULE
from nbmemprof.units import format_count

__all__ = ["FLAGS", "TorchCpu", "source", "unavailable"]

FLAGS: list[Flag] = []
_CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "temporary", "buffers")
_LARGE = 64 << 10  # an unknown release of this size, aligned as tensors are, was a tensor
_LOSSES = {
    "events": "history truncated: {count} events of finished allocations were dropped to stay within ring_bytes; the peak's value and composition are kept.",
    "overrun": "history truncated: {count} events came faster than they could be read and are lost; what is alive may be wrong.",
    "stacks": "no frames: {count} allocations have no stack, as there were too many different ones.",
}


def unavailable() -> str | None:
    """Why CPU tensors can't be recorded now; None where they can. Never imports torch."""
    torch = _optional.loaded("torch")
    if torch is None or not hasattr(torch, "_C"):
        return "torch is not imported yet"
    return unsupported()


def source() -> TorchCpu:
    """A fresh recorder."""
    return TorchCpu()


def leave() -> None:
    """Take away what stays between recordings (the allocation hook)."""
    tr.tracker.leave()


class TorchCpu:
    """Records CPU storages; several at a time share one follower."""

    name = "torch_cpu"

    def __init__(self) -> None:
        self._begin: tr.Mark | None = None
        self._options: dict[str, Any] = {}
        self._made: Capture | None = None
        self._observer: Observer | None = None
        self._records: WeakKeyDictionary[tr.Mark, int] = WeakKeyDictionary()

    def start(self, *, stacks: str = "python", ring_bytes: int = 512 << 20, cell: int | None = None, attribution: bool = True, **_: Any) -> None:
        """Begin. ``stacks="none"`` gives no stack, layer or optimizer phase; "all" is as "python" here.

        Without ``attribution`` nobody looks for what owns the storages: bytes alone, for who measures often.
        """
        if self._begin is not None:
            raise NotRecording("This torch_cpu source was started before. Make a new one with source().")
        self._options = {"stacks": stacks, "cell": cell}
        self._begin = tr.tracker.acquire(stacks, ring_bytes)
        if attribution:
            self._observe()

    def mark(self) -> tr.Mark:
        """The position now."""
        mark = tr.tracker.mark()
        if self._observer is not None:
            self._records[mark] = self._observer.look()
        return mark

    def _observe(self) -> None:
        """Watch steps, modules and owners too."""
        seen = Observer(_optional.require("torch", feature="Recording CPU tensors"), "cpu", clock_ns=time.perf_counter_ns)
        seen.ask_router = True  # on a CPU nobody has to wait
        try:
            seen.open()
            self._observer = seen
        except Exception as error:  # the recording goes on without it
            seen.close()
            text = f"watching modules: {type(error).__name__}: {error}"[:200]
            tr.tracker.faults[text] = tr.tracker.faults.get(text, 0) + 1

    def cut(self, since: tr.Mark) -> Capture:
        """What happened from ``since`` until now."""
        end = tr.tracker.mark()
        log = None
        if self._observer is not None:
            self._observer.look(everywhere=end.position > since.position)
            log = _placing.Log.of(self._observer)
        window = _Window(tr.tracker.rows(), tr.tracker.captures(), since, end)
        window.log, window.record = log, self._records.get(since, 0)
        return window.capture(self._options)

    def stop(self) -> Capture:
        """Everything since ``start``; recording ends."""
        if self._made is None:
            if self._begin is None:
                raise NotRecording("This torch_cpu source was never started. Call start() first.")
            try:
                self._made = self.cut(self._begin)
            finally:
                if self._observer is not None:
                    self._observer.close()
                tr.tracker.release()
        return self._made


class _Window:
    """Events of the allocator made into tables."""

    log: _placing.Log | None = None
    record = 0  # of the observer, at the beginning

    def __init__(self, rows: tr.Rows, captures: tr.Rows, since: tr.Mark, end: tr.Mark) -> None:
        rows = rows[: np.searchsorted(rows["index"], end.position)]
        self.rows, self.captures, self.since, self.end = rows, captures, since, end
        self.partner = tr.match(rows)
        self.begin = int(np.searchsorted(rows["index"], since.position))
        self.made = rows["size"] > 0
        self.failed = self.made & (rows["addr"] == 0)
        serial = (rows["tag"] & np.uint64(SERIAL)).astype(np.int64)
        mate = np.maximum(self.partner, 0)
        self.scratch = (self.partner >= 0) & (rows["tag"] == rows["tag"][mate]) & (serial > 0)
        self.bytes = np.where(self.made, rows["size"], np.where(self.partner >= 0, rows["size"][mate], 0))
        self._meet_strangers()
        at = tr.attribute(rows, captures)
        self.place = captures[np.maximum(at, 0)] if len(captures) else np.zeros(len(rows), tr.CAPTURE)
        self.place[at < 0] = 0
        self.place["op"] = np.where((self.place["serial"] == serial) & (serial > 0), self.place["op"], 0)
        before = tr.attribute(rows, captures, last=True)
        self.phase_before = np.where(before >= 0, captures["phase"][np.maximum(before, 0)], 0) if len(captures) else np.zeros(len(rows), np.uint8)
        self.shown = np.flatnonzero(~self.scratch & (self.bytes > 0) & (np.arange(len(rows)) >= self.begin))

    def _meet_strangers(self) -> None:
        """Releases without an allocation: known from before the recording, or large enough to have been a tensor's."""
        stray = np.flatnonzero(~self.made & (self.partner < 0))
        seen: set[int] = set()
        for at, addr, size in zip(stray.tolist(), self.rows["addr"][stray].tolist(), self.rows["size"][stray].tolist(), strict=True):
            if addr in seen:
                continue
            seen.add(addr)
            if addr in tr.tracker.known:
                self.bytes[at] = tr.tracker.known[addr][0]
            elif addr % 64 == 0 and -size >= _LARGE:
                self.bytes[at] = -size - 1

    def capture(self, options: dict[str, Any]) -> Capture:
        """The tables and what is known about them."""
        used = _addresses()
        alive = self._alive(used)
        stack, older = self.place["stack"][self.shown[self.made[self.shown]]], self._older()
        numbers = np.unique(np.concatenate([stack, np.asarray([*(n for _, n in alive.values()), *older.values()], np.uint32)]))
        if not len(self.shown):
            return self._still(alive, used, options)
        seq, events = self._events(options.get("cell"))
        tables = {
            "events": events, "blocks": _blocks(alive), "stacks": tr.tracker.stacks.table(int(n) for n in numbers if n),
            "hints": self._hints(seq, used), "marks": self._failures(seq),
        }  # fmt: skip
        tables |= self._seen(seq, tables["marks"])
        capture = heap.build(tables, **self._meta(options))
        if older:
            capture.tables["allocations"] = _with_older(capture.tables["allocations"], older)
        if alive:
            capture.tables["allocations"] = _attribute_start(capture.tables["allocations"], used)
        return capture

    def _still(self, alive: dict[int, tuple[int, int]], used: dict[int, tuple[int, int]], options: dict[str, Any]) -> Capture:
        """The capture of a window in which nothing happened: what is alive, in a few milliseconds."""
        blocks = _blocks(alive)
        what = pl.Series([_CATEGORIES[used[addr][0] - 1] if addr in used else "unknown" for addr in alive], dtype=pl.String)
        same = {name: blocks[name] for name in ("kind", "source", "addr", "size_bytes", "requested_bytes", "pool_id", "stack_id")}
        evidence = pl.Series(["storage" if addr in used else "none" for addr in alive], dtype=pl.String)
        rows = schema.fill("allocations", same | {"category": what, "evidence": evidence, "at_start": True, "size_exact": True}, len(alive))
        numbers = sorted({n for _, n in alive.values() if n})
        return Capture.build({"blocks": blocks, "stacks": tr.tracker.stacks.table(numbers), "allocations": rows}, **self._meta(options))

    def _alive(self, used: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
        """Address → bytes and stack of every storage that is alive at the end."""
        touched = set(self.rows["addr"].tolist())
        alive = {addr: (size, stack) for addr, (size, stack) in tr.tracker.known.items() if addr not in touched}
        alive |= {addr: (size, 0) for addr, (_, size) in used.items() if size and addr not in touched and addr not in alive}
        rows = tr.tracker.alive(self.rows, self.partner)
        return alive | {int(a): (int(s), int(n)) for a, s, n in zip(self.rows["addr"][rows], self.rows["size"][rows], self.place["stack"][rows], strict=True)}

    def _older(self) -> dict[int, int]:
        """Address → stack of what was there before the window and dies in it: allocated in an earlier recording, or in one around this."""
        gone = self.shown[~self.made[self.shown]]
        addresses, mates = self.rows["addr"][gone], self.partner[gone]
        _, first = np.unique(addresses, return_index=True)  # a later release at that address is of a block made here
        found: dict[int, int] = {}
        for addr, mate in zip(addresses[first].tolist(), mates[first].tolist(), strict=True):
            stack = int(self.place["stack"][mate]) if 0 <= mate < self.begin else tr.tracker.known.get(addr, (0, 0))[1] if mate < 0 else 0
            if stack:
                found[addr] = stack
        return found

    def _events(self, cell: int | None) -> tuple[np.ndarray[Any, Any], pl.DataFrame]:
        """Sequence number of each shown row, and the table; a release is two events, as it waits for nothing."""
        rows, made = self.rows[self.shown], self.made[self.shown]
        count = np.where(made, 1, 2)
        seq = np.cumsum(count) - count
        at = np.repeat(np.arange(len(rows)), count)
        action = np.where(made[at], np.where(rows["addr"][at] > 0, 0, 3), 1)
        action[seq[~made] + 1] = 2
        words = pl.Series(action).replace_strict(dict(enumerate(("alloc", "free_requested", "free_completed", "oom"))), return_dtype=pl.String)
        size = self.bytes[self.shown][at]
        time_us = np.maximum.accumulate(np.maximum(rows["time"][at] - self.since.time, 0)) / 1000.0
        stack = np.where(made[at], self.place["stack"][self.shown][at], 0)
        columns = {
            "kind": "host", "source": "torch", "seq": np.arange(len(at)), "time_us": time_us, "action": words, "addr": _or_null(rows["addr"][at]),
            "requested_bytes": size, "size_bytes": size, "pool_id": "0_0", "stack_id": _or_null(stack), "cell": cell,
        }  # fmt: skip
        return seq, schema.fill("events", columns, len(at))

    def _hints(self, seq: np.ndarray[Any, Any], used: dict[int, tuple[int, int]]) -> pl.DataFrame:
        """What was seen of each allocation: its operator, layer and phase, and what it turned out to be."""
        mine = np.flatnonzero(self.made[self.shown] & ~self.failed[self.shown])
        at = self.shown[mine]
        place, mate = self.place[at], self.partner[at]
        dead = mate >= 0
        seen = np.asarray([0 if d else used.get(a, (0, 0))[0] for a, d in zip(self.rows["addr"][at].tolist(), dead.tolist(), strict=True)], np.int64)
        told = tr.tracker.stacks.told()
        module = np.asarray([bool(told.get(n, 0) & MODULE) for n in range(int(place["stack"].max(initial=0)) + 1)])[place["stack"]]
        ops = [name.decode(errors="replace") for name in tr.tracker.ops]
        empty = np.asarray([name == "aten::empty" for name in ops])[place["op"]]
        category, evidence = _judge(place["phase"], self.phase_before[mate] * dead, dead, seen, module & empty)
        ddp = pl.Series(np.isin(place["stack"], tr.tracker.stacks.ending_in("torch/nn/parallel/distributed.py")))  # its buckets
        names = pl.select(pl.when(ddp).then(pl.lit("DDP bucket")).otherwise(_words(place["op"], [None, *ops[1:]]))).to_series()
        category, evidence = (pl.select(pl.when(ddp).then(pl.lit(word)).otherwise(column)).to_series() for column, word in ((category, "framework"), (evidence, "stack")))
        columns = {
            "alloc_seq": seq[mine], "category": category, "evidence": evidence,
            "layer": _words(place["layer"], tr.tracker.layers.names), "phase": _words(place["phase"], tr.PHASES), "op": names,
        }  # fmt: skip
        return schema.fill("hints", columns, len(mine))

    def _seen(self, seq: np.ndarray[Any, Any], marks: pl.DataFrame) -> dict[str, pl.DataFrame]:
        """What the observer saw: where each event happened, and whose storages are where."""
        if self.log is None:
            return {}
        placed = _placing.place(self.log, _placing.bare_events(seq, self.rows["time"][self.shown] / 1e3), notes=False)
        seen = _placing.contexts(self.log, placed)
        spans = _placing.marks(self.log, placed, seen, self.since.time / 1e3, self.end.time / 1e3)
        found = {"contexts": seen, "owners": _placing.owners(self.log, placed, "host", self.record), "marks": pl.concat([marks, spans])}
        return found | _placing.tables(self.log, placed, self.record)

    def _failures(self, seq: np.ndarray[Any, Any]) -> pl.DataFrame:
        mine = np.flatnonzero(self.failed[self.shown])
        at = self.shown[mine]
        columns = {"time_us": (self.rows["time"][at] - self.since.time) / 1000.0, "seq": seq[mine], "kind": "oom", "name": "the system gave no memory"}
        return schema.fill("marks", columns, len(at))

    def _meta(self, options: dict[str, Any]) -> dict[str, Any]:
        torch = _optional.require("torch", feature="Recording CPU tensors")
        tracker, since, end = tr.tracker, self.since, self.end
        seconds = max((end.time - since.time) / 1e9, 1e-9)
        cost_us = (end.spent - since.spent + (end.operators - since.operators) * tracker.native_ns) / 1e3
        fraction = min(cost_us / 1e6 / seconds, 1.0)
        dropped = {what: count for what, count in (("events", tracker.dropped), ("overrun", tracker.lost), ("stacks", tracker.stacks.lost)) if count}
        warnings = [text.format(count=format_count(dropped[what])) for what, text in _LOSSES.items() if what in dropped]
        warnings += [f"inconsistent: the recorder failed {count} times ({text}); the operators themselves ran." for text, count in tracker.faults.items()]
        window = slice(self.begin, None)
        change = np.where(self.made, self.bytes, -self.bytes)[window]
        with_scratch = int(np.cumsum(change).max(initial=0))
        rise = int(np.cumsum(change * ~self.scratch[window]).max(initial=0))
        return {
            "origin": "measured", "source": "torch_cpu", "device": "CPU", "capacity_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "torch": torch.__version__, "versions": {"torch": torch.__version__, "python": platform.python_version()}, "warnings": warnings, "dropped": dropped,
            "cell": options.get("cell"), "counters": {}, "peaks": {"host": {"rise_bytes": rise}} if tracker.dropped else None,
            "recording": {
                "seconds": seconds, "events": len(self.rows) - self.begin, "operators": end.operators - since.operators, "cost_us": cost_us, "cost_fraction": fraction,
                "cost_text": f"recording took {cost_us / 1e3:.3g} ms of {seconds * 1e3:.3g} ms ({fraction:.1%})", "stacks": options.get("stacks", "python"),
                "scratch_peak_bytes": with_scratch,
            },
        }  # fmt: skip


def _addresses() -> dict[int, tuple[int, int]]:
    """Address → what it is (index of the category, from 1) and bytes, of parameters, their gradients, and buffers of the modules that were called."""
    found: dict[int, tuple[int, int]] = {}
    for root in tr.tracker.layers.roots():
        for tensor, what in [*((p, 1) for p in root.parameters()), *((b, 6) for b in root.buffers()), *((p.grad, 2) for p in root.parameters() if p.grad is not None)]:
            try:
                if tensor.device.type == "cpu" and type(tensor).__name__ != "FakeTensor":
                    # a gradient's storage is left alone: with a Python object it would count as shared, and autograd would no longer add in place
                    storage = None if what == 2 else tensor.untyped_storage()
                    size = _own_bytes(tensor) if storage is None else storage.nbytes() if storage.resizable() else 0  # borrowed memory can't be resized
                    found.setdefault(tensor.data_ptr() - tensor.storage_offset() * tensor.element_size(), (what, size))
            except (RuntimeError, NotImplementedError, ValueError):  # fake, sparse and lazy tensors have no address
                continue
    return found


def _own_bytes(tensor: Any) -> int:
    """Bytes of a tensor's storage, where its own shape tells them: it is dense and no view of another; else 0."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    whole = tensor.numel() > 0 and reach == tensor.numel() and not tensor.storage_offset() and not tensor._is_view()
    return int(tensor.nbytes) if whole else 0


def _or_null(numbers: np.ndarray[Any, Any]) -> pl.Series:
    series = pl.Series(np.ascontiguousarray(numbers))
    return pl.select(pl.when(series > 0).then(series)).to_series()


def _blocks(alive: dict[int, tuple[int, int]]) -> pl.DataFrame:
    addr = pl.Series(list(alive), dtype=pl.UInt64)
    size = pl.Series([size for size, _ in alive.values()], dtype=pl.Int64)
    columns = {
        "kind": "host", "source": "torch", "snapshot_id": 0, "segment_addr": addr, "addr": addr, "size_bytes": size, "requested_bytes": size,
        "state": "active_allocated", "pool_id": "0_0", "stack_id": _or_null(np.asarray([n for _, n in alive.values()], np.uint32)),
    }  # fmt: skip
    return schema.fill("blocks", columns, len(alive))


def _judge(phase: Any, end_phase: Any, dead: Any, seen: Any, made_by_module: Any) -> tuple[pl.Series, pl.Series]:
    """Category by what the storage was seen to be, else by the phases in which it was allocated and released; null where neither tells."""
    backward, ends_in_backward = (phase == tr.BACKWARD) | (phase == tr.RECOMPUTE), dead & ((end_phase == tr.BACKWARD) | (end_phase == tr.RECOMPUTE))
    rules = [
        (seen > 0, seen - 1, 0),
        (made_by_module, 0, 2),
        ((phase == tr.STEP) & ~(dead & (end_phase == tr.STEP)) & ~ends_in_backward, 2, 1),
        ((phase != tr.BACKWARD) & ends_in_backward, 3, 1),
        ((phase == tr.BACKWARD) & dead & ~ends_in_backward, 1, 1),
        (dead & (((phase == tr.FORWARD) & (end_phase == tr.FORWARD)) | (backward & ends_in_backward) | (phase == tr.STEP)), 4, 1),
    ]
    conditions = [condition for condition, _, _ in rules]
    category = np.select(conditions, [np.broadcast_to(number, len(phase)) for _, number, _ in rules], -1)
    evidence = np.select(conditions, [np.full(len(phase), how) for _, _, how in rules], -1)
    words = pl.Series(category).replace_strict(dict(enumerate(_CATEGORIES)), default=None, return_dtype=pl.String)
    return words, pl.Series(evidence).replace_strict({0: "storage", 1: "phase", 2: "stack"}, default=None, return_dtype=pl.String)


def _words(numbers: np.ndarray[Any, Any], words: Any) -> pl.Series:
    known = {i: word for i, word in enumerate(words) if word is not None}
    return pl.Series(np.ascontiguousarray(numbers)).replace_strict(known, default=None, return_dtype=pl.String) if known else pl.Series([None] * len(numbers), dtype=pl.String)


def _with_older(allocations: pl.DataFrame, stacks: dict[int, int]) -> pl.DataFrame:
    """Give the blocks that died in the window the stack that an earlier recording saw."""
    known = pl.col("addr").replace_strict(stacks, default=None, return_dtype=pl.UInt32)
    applies = pl.col("at_start") & pl.col("free_seq").is_not_null() & pl.col("stack_id").is_null()
    return allocations.with_columns(pl.when(applies).then(known).otherwise(pl.col("stack_id")).alias("stack_id"))


def _attribute_start(allocations: pl.DataFrame, used: dict[int, tuple[int, int]]) -> pl.DataFrame:
    """Say what the storages are that were there before the window and are alive."""
    words = {addr: _CATEGORIES[what - 1] for addr, (what, _) in used.items()}
    if not words:
        return allocations
    word = pl.col("addr").replace_strict(words, default=None, return_dtype=pl.String)
    applies = pl.col("at_start") & pl.col("free_seq").is_null() & word.is_not_null()
    dtypes = schema.dtypes("allocations")
    return allocations.with_columns(
        pl.when(applies).then(word.cast(dtypes["category"])).otherwise(pl.col("category")).alias("category"),
        pl.when(applies).then(pl.lit("storage", dtypes["evidence"])).otherwise(pl.col("evidence")).alias("evidence"),
    )
