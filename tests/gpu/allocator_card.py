"""The operations of ``allocator_scripts.py`` on a real GPU, and the files of what it did."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from allocator_scripts import GC_LIMITS, KEYS, MIB, OVERSIZE, PATTERNS, SCRIPTS, SETTINGS, Op, digest


class Card:
    """The operations on a real GPU."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        torch.cuda.init()
        self.total = torch.cuda.get_device_properties(0).total_memory
        self.streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
        self.tensor: dict[int, Any] = {}
        self.used: set[int] = set()
        self.graphs: dict[int, Any] = {}
        self.pools: dict[int, Any] = {}
        self.entered: dict[int, Any] = {}
        self.capture: Any = None
        self.fill = self.free_before = 0

    def pointers(self) -> list[int]:
        return [s.cuda_stream for s in self.streams]

    def do(self, op: Op) -> int | str | None:
        return getattr(self, "_" + op[0])(*op[1:])  # type: ignore[no-any-return]

    def counters(self) -> list[int]:
        stats = self.torch._C._cuda_memoryStats(0)
        return [stats[OVERSIZE[k]]["current"] if k in OVERSIZE else stats[k] if k.startswith("num_") else stats[k]["all"]["current"] for k in KEYS]

    def _alloc(self, which: int, size: int, stream: int) -> int | str:
        with self.torch.cuda.stream(self.streams[stream]):
            try:
                self.tensor[which] = self.torch.empty(size, dtype=self.torch.uint8, device="cuda")
            except self.torch.OutOfMemoryError:
                return "OOM"
        return int(self.tensor[which].data_ptr())

    def _fill(self, which: int, leave: int) -> int | str:
        self.torch.cuda.synchronize()
        self.free_before = self.torch.cuda.mem_get_info()[0]
        self.fill = (self.free_before - leave) // (20 * MIB) * (20 * MIB)
        return self._alloc(which, self.fill, 0)

    def _free(self, which: int) -> None:
        if self.tensor.pop(which, None) is not None and which in self.used:
            time.sleep(0.002)  # what an idle stream has to do for its event

    def _use(self, which: int, stream: int) -> None:
        if which in self.tensor:
            self.used.add(which)
            self.tensor[which].record_stream(self.streams[stream])

    def _busy(self, stream: int) -> None:
        with self.torch.cuda.stream(self.streams[stream]):
            self.torch.cuda._sleep(200_000_000)

    def _sync(self) -> None:
        self.torch.cuda.synchronize()

    def _empty(self) -> None:
        self.torch.cuda.empty_cache()

    def _limit(self, limit: int) -> None:
        fraction = (limit + 0.5) / self.total
        assert int(fraction * self.total) == limit
        self.torch.cuda.set_per_process_memory_fraction(fraction)

    def _limit_over_fill(self, limit: int) -> None:
        self._limit(self.fill + limit)

    def _warm(self, stream: int) -> None:
        self._begin(-1, stream, None)
        self._end(-1)

    def _begin(self, graph: int, stream: int, share: int | None) -> None:
        self.torch.cuda._sleep(1)  # loaded before a capture, in which nothing can be
        self.torch.cuda.synchronize()
        self.graphs[graph] = self.torch.cuda.CUDAGraph()
        self.capture = self.torch.cuda.stream(self.streams[stream])
        self.capture.__enter__()
        options = {} if share is None else {"pool": self.graphs[share].pool()}
        self.graphs[graph].capture_begin(capture_error_mode="relaxed", **options)

    def _end(self, graph: int) -> None:
        self.torch.cuda._sleep(1000)
        self.graphs[graph].capture_end()
        self.capture.__exit__(None, None, None)

    def _replay(self, graph: int) -> None:
        self.graphs[graph].replay()
        self.torch.cuda.synchronize()

    def _reset(self, graph: int) -> None:
        self.graphs.pop(graph).reset()

    def _pool(self, pool: int, options: dict[str, bool]) -> None:
        self.pools[pool] = self.torch.cuda.MemPool(**options)

    def _enter(self, pool: int) -> None:
        self.entered[pool] = self.torch.cuda.use_mem_pool(self.pools[pool])
        self.entered[pool].__enter__()

    def _leave(self, pool: int) -> None:
        self.entered.pop(pool).__exit__(None, None, None)

    def _drop(self, pool: int) -> None:
        del self.pools[pool]


@contextlib.contextmanager
def history(torch: Any) -> Iterator[None]:
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    yield
    torch.cuda.memory._record_memory_history(None)


def trace_of(snapshot: dict[str, Any]) -> list[list[Any]]:
    return [[e["action"], e.get("device_free", e.get("addr")), e["size"], e["stream"]] for e in snapshot["device_traces"][0] if e["action"] != "snapshot"]


def segments_of(snapshot: dict[str, Any]) -> list[list[Any]]:
    return [
        [
            s["address"],
            s["total_size"],
            s["stream"],
            s["is_expandable"],
            [[b["size"], b["requested_size"], b["state"]] for b in s["blocks"]],
            s["segment_type"],
            list(s["segment_pool_id"]),
        ]
        for s in snapshot["segments"]
    ]


def write(path: Path, found: dict[str, Any]) -> None:
    path.write_bytes(gzip.compress(json.dumps(found, separators=(",", ":")).encode(), 9, mtime=0))


def run_script(name: str, out: Path, head: dict[str, Any]) -> str:
    conf, make = SCRIPTS[name]
    card = Card()
    rows: list[list[Any]] = []
    stopped = None
    with history(card.torch):
        for op in make():
            try:
                answer = card.do(op)
            except Exception as error:  # what was recorded until here is kept
                stopped = f"operation {len(rows)}, {op}: {type(error).__name__}: {str(error)[:300]}"
                break
            done = [op[0], op[1], card.fill] if op[0] == "fill" else op
            rows.append([*done, *([answer] if op[0] in ("alloc", "fill") else []), card.counters()])
        snapshot = card.torch.cuda.memory._snapshot()
    found = head | {
        "name": name, "conf": conf, "limit": 0, "keys": KEYS, "script": digest(make()), "stopped": stopped, "fill": card.fill, "free_before": card.free_before, "streams": card.pointers(), "fraction_total": card.total,
        "ops": rows, "trace": trace_of(snapshot), "segs": segments_of(snapshot),
    }  # fmt: skip
    write(out / f"ops_{name}.json.gz", found)
    return f"{len(rows)} operations, ooms {rows[-1][-1][10]}, retries {rows[-1][-1][9]}, fill {card.fill}, stopped {stopped}"


def run_pattern(pattern: str, setting: str, out: Path, head: dict[str, Any]) -> str:
    card = Card()
    limit = GC_LIMITS[pattern] if setting == "gc80" else 0
    if limit:
        card.do(["limit", limit])
    with history(card.torch):
        for op in PATTERNS[pattern]():
            card.do(op)
        snapshot = card.torch.cuda.memory._snapshot()
    stats = card.torch._C._cuda_memoryStats(0)
    truth = {
        "peak_reserved_bytes": stats["reserved_bytes"]["all"]["peak"], "peak_allocated_bytes": stats["allocated_bytes"]["all"]["peak"],
        "ooms": stats["num_ooms"], "retries": stats["num_alloc_retries"], "device_calls": stats["num_device_alloc"] + stats["num_device_free"],
    }  # fmt: skip
    trace = trace_of(snapshot)
    letters = {
        "alloc": "a",
        "free_requested": "r",
        "free_completed": "f",
        "segment_alloc": "S",
        "segment_free": "F",
        "segment_map": "M",
        "segment_unmap": "U",
        "oom": "O",
    }
    base = min(e[1] for e in trace if e[0] != "oom")
    found = head | {
        "name": f"{pattern}_{setting}", "conf": SETTINGS[setting], "limit": limit, "truth": truth, "fraction_total": card.total, "addr_base": base, "actions": "".join(letters[e[0]] for e in trace),
        "addrs": [e[1] - (0 if e[0] == "oom" else base) for e in trace], "sizes": [e[2] for e in trace], "streams": [e[3] for e in trace],
    }  # fmt: skip
    write(out / f"whatif_{pattern}_{setting}.json.gz", found)
    return json.dumps(truth)
