"""Torch's CUDA allocator as the recording sees it, played by the allocator of ``strategies``: a ring, counters, a clock."""

from __future__ import annotations

from collections import Counter
from typing import Any

from strategies import Allocator

_COUNT = {
    "alloc": ("allocation", "allocated"),
    "free_requested": ("allocation", "freed"),
    "free_completed": ("active", "freed"),
}


class FakeCuda:
    """One device. ``malloc``, ``free`` and ``empty_cache`` go through, the recording reads as from torch."""

    def __init__(self, *, initialized: bool = True, history: str | None = None, **allocator: Any) -> None:
        self.heap = Allocator(**allocator)
        self.is_initialized, self.reason = initialized, history
        self.recording: dict[str, Any] | None = None
        self.calls: list[str] = []
        self.queue: list[Any] = []
        self.hooks: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self.first = 0  # the ring holds the trace from here on
        self.counts: Counter[tuple[str, str]] = Counter()
        self.counted = 0
        self.peaks = {"allocated_bytes": 0, "requested_bytes": 0, "reserved_bytes": 0}
        self.busy: float | None = None
        self.marks: list[int] = []  # positions of the marks that snapshots leave

    def clock(self) -> float:
        return (self.heap.start_us + 3 * len(self.heap.trace)) / 1e6

    # ---------------------------------------------------------------- the user's side
    def init(self) -> None:
        for call in list(self.queue):
            call()
        self.is_initialized = True

    def malloc(self, size: int, **more: Any) -> Any:
        block = self.heap.malloc(size, **more)
        self.count()
        return block

    def free(self, block: Any, **more: Any) -> None:
        self.heap.free(block, **more)
        self.count()

    def call(self, name: str, *args: Any, do: Any = None) -> None:
        """Call a function of torch._C that the recording may watch."""
        before, after = self.hooks
        before.get(name, lambda *_: None)(*args)
        if do:
            do()
        self.count()
        after.get(name, lambda *_: None)(*args)

    def empty_cache(self) -> None:
        self.call("_cuda_emptyCache", do=self.heap.empty_cache)

    def reset_peaks(self) -> None:
        self.call("_cuda_resetPeakMemoryStats", do=lambda: self.peaks.update(self.levels()))

    def reset_counts(self) -> None:
        self.call("_cuda_resetAccumulatedMemoryStats", do=self.counts.clear)

    def user_records(self, enabled: str | None, max_entries: int = 10**9) -> None:
        def do() -> None:
            self.recording = None if enabled is None else {"max_entries": max_entries, "stacks": "python"}
            if enabled is None:
                self.first = len(self.heap.trace)

        self.call("_cuda_record_memory_history", enabled, do=do)

    # ---------------------------------------------------------------- counters
    def levels(self) -> dict[str, int]:
        blocks = [b for s in self.heap.segments for b in s.blocks]
        return {
            "allocated_bytes": self.heap.live,
            "requested_bytes": sum(b.requested for b in blocks if b.state != "inactive"),
            "reserved_bytes": self.heap.reserved,
        }

    def count(self) -> None:
        for entry in self.heap.trace[self.counted :]:
            action = entry["action"]
            if action in ("segment_alloc", "segment_map"):
                self.counts["num_device_alloc", ""] += 1
            elif action in ("segment_free", "segment_unmap"):
                self.counts["num_device_free", ""] += 1
            elif action == "oom":
                self.counts["num_ooms", ""] += 1
            else:
                self.counts[_COUNT[action]] += 1
        self.counted = len(self.heap.trace)
        self.peaks = {n: max(v, self.peaks[n]) for n, v in self.levels().items()}

    # ---------------------------------------------------------------- what the recording asks
    def initialized(self) -> bool:
        return self.is_initialized

    def on_init(self, function: Any) -> None:
        self.queue.append(function)

    def forget(self, function: Any) -> None:
        self.queue = [f for f in self.queue if f != function]

    def devices(self) -> range:
        return range(1)

    def no_history(self) -> str | None:
        return self.reason

    def history_on(self) -> bool:
        return self.recording is not None

    def can_clear(self) -> bool:
        return True

    def record(self, stacks: str, max_entries: int, *, clear: bool = False) -> None:
        self.calls.append("clear" if clear else "record")
        if clear or self.recording is None:
            self.first = len(self.heap.trace)
        self.recording = {"stacks": stacks, "max_entries": max_entries}

    def stop(self) -> None:
        self.calls.append("stop")
        self.recording = None
        self.first = len(self.heap.trace)

    def stats(self, device: int) -> dict[str, Any]:
        levels = self.levels()
        nested: dict[str, Any] = {n: {"all": {"current": v, "peak": self.peaks[n]}} for n, v in levels.items()}
        for name in ("allocation", "active"):
            nested[name] = {"all": {what: self.counts[name, what] for what in ("allocated", "freed")}}
        return nested | {n: self.counts[n, ""] for n in ("num_device_alloc", "num_device_free", "num_ooms")}

    def snapshot(self, devices: range) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        trace = self.heap.trace[self.first :]
        mark = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0, "time_us": 0, "frames": []}
        for at in sorted((m for m in self.marks if m >= self.first), reverse=True):
            trace.insert(at - self.first, mark)
        self.marks.append(len(self.heap.trace))
        most = self.recording["max_entries"] if self.recording else 0
        return [self.stats(0)], {"segments": self.heap.snapshot_segments(), "device_traces": [trace[-most:] if most else []], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "a:b"}}

    def picture(self) -> dict[str, Any]:
        return {"segments": self.heap.snapshot_segments(), "device_traces": []}

    def device_facts(self, device: int) -> dict[str, Any]:
        return {"name": "Fake", "uuid": None, "capacity_bytes": 1 << 37, "limit_bytes": self.heap.limit}

    def outside(self) -> Any:
        return None

    def process_bytes(self, uuid: str | None) -> int | None:
        return self.heap.reserved + 1000

    def observer(self, *, notes: bool) -> Any:
        return None

    def busy_fraction(self, uuid: str | None, since_us: float) -> float | None:
        return self.busy

    def conf(self) -> str:
        return ""

    def versions(self) -> dict[str, str | None]:
        return {"torch": "2.11.0", "cuda": "13.0", "hip": None}

    def stack_cost_us(self, cpp: bool) -> float | None:
        return 3.0

    def watch(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        self.hooks = (before, after)

    def unwatch(self) -> None:
        self.hooks = ({}, {})
