"""Captures for the views: three training steps written out, and two small real files."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import polars as pl
import pytest

from nbmemprof import heap, load, schema
from nbmemprof.capture import Capture

MIB = 1 << 20
FRAMES = [("model.py", "init", 8), ("data.py", "load", 4), ("model.py", "forward", 20), ("train.py", "backward", 50), ("train.py", "step", 61)]
SITE = {"weights": 0, "inputs": 1, "activations": 2, "gradients": 3, "optimizer_state": 4}


class Trace:
    """Writes events, hints and marks; every allocation has a segment of its own."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.hints: list[tuple[int, str]] = []
        self.marks: list[tuple[str, str, float, float | None, int]] = []
        self.segments: dict[int, int] = {}
        self.held: set[int] = set()
        self.time = 0.0

    def _event(self, action: str, addr: int | None, size: int, stack: int | None = None) -> int:
        self.events.append((len(self.events), self.time, action, addr, size, stack))
        return len(self.events) - 1

    def alloc(self, mib: int, category: str) -> tuple[int, int]:
        addr = (1 << 40) + (len(self.segments) << 30)
        self.segments[addr] = mib * MIB
        self.held.add(addr)
        self._event("segment_alloc", addr, mib * MIB)
        self.hints.append((self._event("alloc", addr, mib * MIB, SITE[category]), category))
        self.time += 900
        return addr, mib

    def free(self, block: tuple[int, int]) -> None:
        self.held.discard(block[0])
        for action in ("free_requested", "free_completed"):
            self._event(action, block[0], block[1] * MIB)
        self.time += 300

    def oom(self, mib: int, free_mib: int) -> None:
        seq = self._event("oom", None, mib * MIB, SITE["activations"])
        self.marks.append(("oom", "oom", self.time, None, seq))
        self.free_bytes = float(free_mib * MIB)
        self.time += 500


def _training(trace: Trace) -> None:
    """Weights 300, then twice: inputs 20, activations 4 x 100, gradients 4 x 50 while they go; optimizer state 4 x 60."""
    for _ in range(3):
        trace.alloc(100, "weights")
    state: list[tuple[int, int]] = []
    for step in range(2):
        begin = trace.time
        batch = trace.alloc(20, "inputs")
        saved = [trace.alloc(100, "activations") for _ in range(4)]
        trace.marks.append(("phase", "forward", begin, trace.time, len(trace.events)))
        grads = []
        for activation in reversed(saved):
            grads.append(trace.alloc(50, "gradients"))
            trace.free(activation)
        state = state or [trace.alloc(60, "optimizer_state") for _ in range(4)]
        for block in [*grads, batch]:
            trace.free(block)
        trace.marks.append(("step", f"step {step}", begin, trace.time, len(trace.events)))


@pytest.fixture
def training() -> Callable[..., Capture]:
    """Make the capture of a training cell: peak 1010 MiB, kept 540 MiB."""

    def make(*, on: str = "device", categories: bool = True, stacks: bool = True, oom: bool = False, **meta: Any) -> Capture:
        trace = Trace()
        _training(trace)
        if oom:
            trace.oom(4096, 1024)
        names = ["seq", "time_us", "action", "addr", "requested_bytes", "stack_id"]
        frame = pl.DataFrame(trace.events, schema=names, orient="row", infer_schema_length=None)
        if on == "host":
            frame = frame.filter(pl.col("action") != "segment_alloc")
        common: dict[str, Any] = {"kind": on, "source": "torch", "device": 0 if on == "device" else None}
        events = {n: frame[n] for n in names if stacks or n != "stack_id"}
        tables = {"events": schema.fill("events", events | common), "marks": _marks(trace)}
        if stacks:
            file, function, line = zip(*FRAMES, strict=True)
            tables["stacks"] = schema.fill(
                "stacks", {"stack_id": list(range(len(FRAMES))), "depth": [0] * len(FRAMES), "function": function, "filename": file, "line": line}
            )
        if categories:
            words = pl.Series([c for _, c in trace.hints]).cast(schema.dtypes("hints")["category"])
            tables["hints"] = schema.fill("hints", {"alloc_seq": [s for s, _ in trace.hints], "category": words, "evidence": "storage"})
        if on == "device":
            addrs, sizes = list(trace.segments), list(trace.segments.values())
            states = pl.Series(["active_allocated" if a in trace.held else "inactive" for a in addrs]).cast(schema.dtypes("blocks")["state"])
            tables["segments"] = schema.fill("segments", {"addr": addrs, "size_bytes": sizes, "snapshot_id": 0} | common)
            tables["blocks"] = schema.fill("blocks", {"addr": addrs, "segment_addr": addrs, "size_bytes": sizes, "state": states, "snapshot_id": 0} | common)
        return heap.build(tables, **{"source": "torch_history" if on == "device" else "torch_cpu"} | meta)

    return make


def _marks(trace: Trace) -> pl.DataFrame:
    kind, name, begin, end, seq = zip(*trace.marks, strict=True)
    value = pl.Series([getattr(trace, "free_bytes", None) if k == "oom" else None for k in kind], dtype=pl.Float64)
    return schema.fill("marks", {"kind": kind, "name": name, "time_us": begin, "end_us": end, "seq": seq, "value": value})


@pytest.fixture
def two_devices(fixtures) -> Capture:
    """Four devices in one file: 0 with 3 MiB, 1 with a leak in train_demo.py:19, 2 and 3 with nothing."""
    return load(fixtures / "views" / "two_devices.pickle.gz")


@pytest.fixture
def markup(fixtures) -> Capture:
    """File and function names that are HTML, JavaScript and templates."""
    return load(fixtures / "views" / "markup_in_names.pickle")
