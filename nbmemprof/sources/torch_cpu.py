"""Record the CPU tensor storages of a window: allocation, release, operator, module, Python stack, phase.

Counted is the memory that PyTorch's CPU allocator gives to storages, to the byte. Not counted: what an operator
takes and gives back inside itself (kernel scratch), memory that is not torch's own (``from_numpy``, ``frombuffer``,
mapped files, shared memory), other processes (DataLoader workers), threads that ran before the recording began.
Storages from before the window are met when an operator uses them, or known from an earlier recording.
"""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import _optional, heap, schema
from nbmemprof.capture import Capture
from nbmemprof.errors import NotRecording
from nbmemprof.flags import Flag
from nbmemprof.sources import _storages as st

__all__ = ["FLAGS", "TorchCpu", "source", "unavailable"]

FLAGS: list[Flag] = []
_CATEGORIES = ("weights", "gradients", "optimizer_state", "activations", "temporary")
_ACTIONS = {st.ALLOC: "alloc", st.FREE: "free_requested", st.OOM: "oom"}


def unavailable() -> str | None:
    """Why CPU tensors can't be recorded now; None where they can. Never imports torch."""
    torch = _optional.loaded("torch")
    if torch is None or not hasattr(torch, "_C"):
        return "torch is not imported yet"
    if not hasattr(torch._C, "_push_on_torch_dispatch_stack"):
        return f"torch {torch.__version__} has no dispatch modes (torch 2.4 or newer is needed)"
    return None


def source() -> TorchCpu:
    """A fresh recorder."""
    return TorchCpu()


class TorchCpu:
    """Records CPU storages; several at a time share one follower."""

    name = "torch_cpu"

    def __init__(self) -> None:
        self._begin: st.Mark | None = None
        self._options: dict[str, Any] = {}
        self._made: Capture | None = None

    def start(self, *, stacks: str = "python", ring_bytes: int = 512 << 20, cell: int | None = None, **_: Any) -> None:
        """Begin. ``stacks="all"`` also keeps who released each storage; ``"none"`` gives no stack, layer or optimizer phase."""
        if self._begin is not None:
            raise NotRecording("This torch_cpu source was started before. Make a new one with source().")
        self._options = {"stacks": stacks, "cell": cell}
        self._begin = st.tracker.acquire(stacks, ring_bytes)

    def mark(self) -> st.Mark:
        """The position now."""
        return st.tracker.mark()

    def cut(self, since: st.Mark) -> Capture:
        """What happened from ``since`` until now."""
        begin = time.perf_counter()
        end = st.tracker.mark()
        refs = [ref for ref in list(st.tracker.live.values()) if ref.bytes]
        records = st.tracker.records()[since.position :]
        capture = _capture(records, refs, since, end, self._options)
        capture.meta["recording"]["cut_seconds"] = time.perf_counter() - begin
        return capture

    def stop(self) -> Capture:
        """Everything since ``start``; recording ends."""
        if self._made is None:
            if self._begin is None:
                raise NotRecording("This torch_cpu source was never started. Call start() first.")
            try:
                self._made = self.cut(self._begin)
            finally:
                st.tracker.release()
        return self._made


def _capture(records: st.Records, refs: list[st.Ref], since: st.Mark, end: st.Mark, options: dict[str, Any]) -> Capture:
    seq, events = _events(records, since.time, options.get("cell"))
    blocks = _blocks(refs)
    numbers = np.unique(np.concatenate([records["stack"], np.asarray([ref.stack for ref in refs], np.uint32)]))
    tables = {
        "events": events,
        "blocks": blocks,
        "stacks": st.tracker.stacks.table(int(n) for n in numbers if n),
        "hints": _hints(records, seq, refs),
        "marks": _failures(records, seq, since.time),
    }
    capture = heap.build(tables, **_meta(records, since, end, options))
    seen = {addr: "weights" if what == st.WEIGHT else "gradients" for addr, what in _seen_before(records, refs)}
    if seen:
        capture.tables["allocations"] = _attribute_start(capture.tables["allocations"], seen)
    return capture


def _events(records: st.Records, start_ns: int, cell: int | None) -> tuple[np.ndarray[Any, Any], pl.DataFrame]:
    """Sequence number of each record, and the table; a release is two events, as it waits for nothing."""
    rows = np.where(records["action"] == st.FREE, 2, 1)
    seq = np.cumsum(rows) - rows
    at = np.repeat(np.arange(len(records)), rows)
    second = np.zeros(len(at), bool)
    second[seq[rows == 2] + 1] = True
    action = pl.Series(records["action"][at]).replace_strict(_ACTIONS, return_dtype=pl.String)
    some = records[at]
    time_us = np.maximum.accumulate(np.maximum(some["time"] - start_ns, 0)) / 1000.0
    action = pl.select(pl.when(pl.Series(second)).then(pl.lit("free_completed")).otherwise(action)).to_series()
    columns = {
        "kind": "host", "source": "torch", "seq": np.arange(len(at)), "time_us": time_us, "action": action, "addr": pl.Series(some["addr"].copy()),
        "requested_bytes": some["bytes"].copy(), "size_bytes": some["bytes"].copy(), "pool_id": "0_0", "stack_id": _or_null(some["stack"]), "cell": cell,
    }  # fmt: skip
    return seq, schema.fill("events", columns, len(at))


def _or_null(numbers: np.ndarray[Any, Any]) -> pl.Series:
    series = pl.Series(numbers.copy())
    return pl.select(pl.when(series > 0).then(series)).to_series()


def _blocks(refs: list[st.Ref]) -> pl.DataFrame:
    addr = pl.Series([ref.addr for ref in refs], dtype=pl.UInt64)
    size = pl.Series([ref.bytes for ref in refs], dtype=pl.Int64)
    stack = _or_null(np.asarray([ref.stack for ref in refs], np.uint32))
    columns = {
        "kind": "host", "source": "torch", "snapshot_id": 0, "segment_addr": addr, "addr": addr, "size_bytes": size, "requested_bytes": size,
        "state": "active_allocated", "pool_id": "0_0", "stack_id": stack,
    }  # fmt: skip
    return schema.fill("blocks", columns, len(refs))


def _hints(records: st.Records, seq: np.ndarray[Any, Any], refs: list[st.Ref]) -> pl.DataFrame:
    """What was seen of each allocation: its operator, layer and phase, and what it turned out to be."""
    born, died = np.flatnonzero(records["action"] == st.ALLOC), np.flatnonzero(records["action"] == st.FREE)
    size = int(records["n"].max(initial=-1)) + 1
    # by number of the allocation; of the living, what is known now
    end_phase, seen, dead = np.zeros(size, np.uint8), np.zeros(size, np.uint8), np.zeros(size, bool)
    died = died[records["n"][died] >= 0]
    end_phase[records["n"][died]], seen[records["n"][died]], dead[records["n"][died]] = records["phase"][died], records["seen"][died], True
    for ref in refs:
        if 0 <= ref.n < size:
            seen[ref.n] = ref.seen
    n, phase = records["n"][born], records["phase"][born]
    category, evidence = _judge(phase, end_phase[n], dead[n], seen[n])
    ops, layers, phases = st.tracker.ops, st.tracker.layers.names, st.PHASES
    columns = {
        "alloc_seq": seq[born], "category": category, "evidence": evidence,
        "layer": _words(records["layer"][born], layers), "phase": _words(phase, phases), "op": _words(records["op"][born], [None, *ops[1:]]),
    }  # fmt: skip
    return schema.fill("hints", columns, len(born))


def _judge(phase: np.ndarray[Any, Any], end_phase: np.ndarray[Any, Any], dead: np.ndarray[Any, Any], seen: np.ndarray[Any, Any]) -> tuple[pl.Series, pl.Series]:
    """Category by what the storage was seen to be, else by the phases in which it was allocated and released; null where neither tells."""
    backward = (phase == st.BACKWARD) | (phase == st.RECOMPUTE)
    ends_in_backward = dead & ((end_phase == st.BACKWARD) | (end_phase == st.RECOMPUTE))
    number = np.select(
        [
            seen == st.WEIGHT,
            seen == st.GRADIENT,
            (phase == st.STEP) & ~(dead & (end_phase == st.STEP)),
            (phase != st.STEP) & (phase != st.BACKWARD) & ends_in_backward,
            dead & (((phase == st.FORWARD) & (end_phase == st.FORWARD)) | (backward & ends_in_backward) | (phase == st.STEP)),
        ],
        [0, 1, 2, 3, 4],
        -1,
    )
    category = pl.Series(number).replace_strict(dict(enumerate(_CATEGORIES)), default=None, return_dtype=pl.String)
    evidence = np.where(number < 0, -1, np.where(number < 2, 0, 1))
    return category, pl.Series(evidence).replace_strict({0: "storage", 1: "phase"}, default=None, return_dtype=pl.String)


def _words(numbers: np.ndarray[Any, Any], words: Any) -> pl.Series:
    known = {i: word for i, word in enumerate(words) if word is not None}
    return pl.Series(numbers.copy()).replace_strict(known, default=None, return_dtype=pl.String) if known else pl.Series([None] * len(numbers), dtype=pl.String)


def _seen_before(records: st.Records, refs: list[st.Ref]) -> list[tuple[int, int]]:
    """Address and use of storages that were there before: parameters and gradients, met in the window."""
    gone = records[(records["action"] == st.FREE) & (records["seen"] > 0)]
    return [(int(r["addr"]), int(r["seen"])) for r in gone] + [(ref.addr, ref.seen) for ref in refs if ref.seen]


def _attribute_start(allocations: pl.DataFrame, seen: dict[int, str]) -> pl.DataFrame:
    word = pl.col("addr").replace_strict(seen, default=None, return_dtype=pl.String)
    applies = pl.col("at_start") & word.is_not_null()
    dtypes = schema.dtypes("allocations")
    return allocations.with_columns(
        pl.when(applies).then(word.cast(dtypes["category"])).otherwise(pl.col("category")).alias("category"),
        pl.when(applies).then(pl.lit("storage", dtypes["evidence"])).otherwise(pl.col("evidence")).alias("evidence"),
    )


def _failures(records: st.Records, seq: np.ndarray[Any, Any], start_ns: int) -> pl.DataFrame:
    at = np.flatnonzero(records["action"] == st.OOM)
    columns = {"time_us": (records["time"][at] - start_ns) / 1000.0, "seq": seq[at], "kind": "oom", "name": "the system gave no memory"}
    return schema.fill("marks", columns, len(at))


def _meta(records: st.Records, since: st.Mark, end: st.Mark, options: dict[str, Any]) -> dict[str, Any]:
    torch = _optional.require("torch", feature="Recording CPU tensors")
    tracker = st.tracker
    seconds = max((end.time - since.time) / 1e9, 1e-9)
    cost_us = (end.spent - since.spent + (end.ops - since.ops) * tracker.op_ns) / 1e3
    fraction = min(cost_us / 1e6 / seconds, 1.0)
    warnings = []
    if tracker.dropped:
        warnings.append(f"history truncated: {tracker.dropped:,} events of finished allocations were dropped to stay within ring_bytes; the peak's value and composition are kept.")
    if tracker.stacks.lost:
        warnings.append(f"no frames: {tracker.stacks.lost:,} allocations have no stack, as there were too many different ones.")
    warnings += [f"inconsistent: the recorder failed {count} times ({text}); the operators themselves ran." for text, count in tracker.faults.items()]
    change = np.where(records["action"] == st.ALLOC, records["bytes"], np.where(records["action"] == st.FREE, -records["bytes"], 0))
    dropped = {"events": tracker.dropped} if tracker.dropped else {}
    if tracker.stacks.lost:
        dropped["stacks"] = tracker.stacks.lost
    return {
        "origin": "measured", "source": "torch_cpu", "device": "CPU", "capacity_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": torch.__version__, "versions": {"torch": torch.__version__, "python": platform.python_version()}, "warnings": warnings, "dropped": dropped,
        "cell": options.get("cell"), "counters": {}, "peaks": {"host": {"rise_bytes": int(np.cumsum(change).max(initial=0))}} if tracker.dropped else None,
        "recording": {
            "seconds": seconds, "events": len(records), "operators": end.ops - since.ops, "cost_us": cost_us, "cost_fraction": fraction, "stacks": options.get("stacks", "python"),
            "cost_text": f"recording took {cost_us / 1e3:.3g} ms of {seconds * 1e3:.3g} ms ({fraction:.1%}), measured in the recorder's own code",
        },
    }  # fmt: skip
