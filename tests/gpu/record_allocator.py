"""Drive torch's allocator on a real GPU by seeded scripts and write what it did: tests/fixtures/h200/allocator.

    python tests/gpu/record_allocator.py --predict FILE             without a GPU: what the model says beforehand
    python tests/gpu/record_allocator.py OUT [--commit HASH] [name ...]

A script is a list of operations made by plain code, the same with and without a GPU: requests, frees, ``record_stream``, streams kept
busy, CUDA graphs, memory pools, limits. Each runs in a process of its own. ``OUT/ops_NAME.json.gz`` has every operation with the
address it returned and 16 counters after it, the trace and the last segments; ``OUT/whatif_PATTERN_SETTING.json.gz`` a trace and
torch's peaks; ``OUT/case_NAME.*`` a snapshot, our report's text and numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu")]
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FILL = 120 * GIB  # what the model takes for "all but LEAVE of the card"; counters are compared without it
LEAVE = 3 * GIB
Op = list[Any]
KEYS = (
    "reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes", "inactive_split_bytes", "inactive_split", "segment", "allocation", "active",
    "num_alloc_retries", "num_ooms", "num_device_alloc", "num_device_free", "num_sync_all_streams", "ovs_alloc", "ovs_seg",
)  # fmt: skip
FILLED = (0, 1, 2, 3)  # places of KEYS that count the fill
OVERSIZE = {"ovs_alloc": "oversize_allocations", "ovs_seg": "oversize_segments"}
POLICIES: tuple[str | int, ...] = ("windows", "ascending", "descending", 1, 2)


# ---------------------------------------------------------------------- scripts
def size_of(rng: random.Random, large: int = 150 * MIB) -> int:
    kind = rng.random()
    if kind < 0.45:
        return int(2 ** rng.uniform(5, 20))
    if kind < 0.75:
        return int(rng.uniform(1 * MIB, 10 * MIB))
    return int(rng.uniform(10 * MIB, large))


class Script:
    """Writes operations and knows what is live."""

    def __init__(self, seed: int, *, streams: int = 2, budget: int = 1 * GIB, large: int = 150 * MIB) -> None:
        self.rng, self.streams, self.budget, self.large = random.Random(seed), streams, budget, large
        self.ops: list[Op] = []
        self.live: dict[int, int] = {}
        self.next = 0
        self.sizes = [size_of(self.rng, large) for _ in range(40)]

    def alloc(self, size: int | None = None, stream: int | None = None) -> int:
        rng = self.rng
        size = size or (rng.choice(self.sizes) if rng.random() < 0.6 else size_of(rng, self.large))
        self.ops.append(["alloc", self.next, size, rng.randrange(self.streams) if stream is None else stream])
        self.live[self.next] = size
        self.next += 1
        return self.next - 1

    def free(self, which: int | None = None) -> None:
        which = self.rng.choice(list(self.live)) if which is None else which
        del self.live[which]
        self.ops.append(["free", which])

    def step(self, **where: Any) -> None:
        """One request, or a free where the budget is used up."""
        if self.live and (sum(self.live.values()) > self.budget or self.rng.random() < 0.42):
            self.free()
        else:
            self.alloc(**where)

    def used(self, other: int) -> None:
        if self.live:
            self.ops.append(["use", self.rng.choice(list(self.live)), other])

    def say(self, *op: Any) -> None:
        self.ops.append(list(op))


def graph_script(seed: int, count: int, *, uses: bool = False) -> list[Op]:
    """Captures into pools of their own and shared ones, requests beside the captured stream, frees after the end, replays, resets."""
    s = Script(seed, budget=700 * MIB, large=60 * MIB)
    s.say("warm", 1)
    graphs: list[int] = []
    made = 0
    while len(s.ops) < count:
        for _ in range(s.rng.randrange(10, 30)):
            s.step()
        if s.rng.random() < 0.25:
            s.say("empty")
        share = s.rng.choice(graphs) if graphs and s.rng.random() < 0.35 else None
        s.say("begin", made, 1, share)
        inside: list[int] = []
        for _ in range(s.rng.randrange(8, 30)):
            draw = s.rng.random()
            if draw < 0.55:
                inside.append(s.alloc(stream=1))
            elif draw < 0.75 and inside:
                s.free(inside.pop(s.rng.randrange(len(inside))))
            elif draw < 0.87:
                s.step(stream=0)
                inside = [i for i in inside if i in s.live]
            elif uses and inside:
                s.say("use", s.rng.choice(inside), 0)
        if s.rng.random() < 0.2:
            s.say("empty")
        s.say("end", made)
        graphs.append(made)
        made += 1
        for i in inside:
            if s.rng.random() < 0.6:
                s.free(i)
        s.say("replay", s.rng.choice(graphs))
        if len(graphs) > 3 or s.rng.random() < 0.3:
            s.say("reset", graphs.pop(s.rng.randrange(len(graphs))))
            if s.rng.random() < 0.5:
                s.say("empty")
    return s.ops


def pool_script(seed: int, count: int, *, limit: int = 0, **options: bool) -> list[Op]:
    """Memory pools with options beside a plain one, routed and not, dropped with and without live memory."""
    s = Script(seed, budget=900 * MIB if limit else 600 * MIB, large=90 * MIB)
    if limit:
        s.say("limit", limit)
    pools: list[int] = []
    made = 0
    while len(s.ops) < count:
        if len(pools) < 3:
            s.say("pool", made, options if made % 3 < 2 else {})
            pools.append(made)
            made += 1
        for _ in range(s.rng.randrange(5, 25)):
            s.step()
        pool = s.rng.choice(pools)
        s.say("enter", pool)
        mine = []
        for _ in range(s.rng.randrange(5, 20)):
            if s.rng.random() < 0.6:
                mine.append(s.alloc())
            else:
                s.step()
                mine = [i for i in mine if i in s.live]
        s.say("leave", pool)
        for i in mine:
            if s.rng.random() < 0.75:
                s.free(i)
        if s.rng.random() < 0.1:
            s.say("empty")
        if s.rng.random() < 0.12:
            s.say("drop", pool)
            pools.remove(pool)
    return s.ops


def driver_script(seed: int, count: int) -> list[Op]:
    """All but 3 GiB of the card taken; random requests until and beyond the driver's refusal; then under a limit; then without the fill."""
    s = Script(seed, budget=int(3.2 * GIB), large=500 * MIB)
    s.say("fill", -1, LEAVE)
    while len(s.ops) < count * 3 // 5:
        s.step()
        if s.rng.random() < 0.01:
            s.say("empty")
    s.say("limit_over_fill", 2 * GIB)
    s.budget = 2 * GIB
    while len(s.ops) < count:
        s.step()
    s.say("free", -1)
    for _ in range(20):
        s.step()
    for which in list(s.live):
        s.free(which)
    s.say("empty")
    return s.ops


def streams_script(seed: int, count: int, limit: int) -> list[Op]:
    """Three streams, blocks used by others, streams kept busy, a memory limit."""
    s = Script(seed, streams=3, budget=int(limit * 0.95), large=120 * MIB)
    s.say("limit", limit)
    while len(s.ops) < count:
        for _ in range(s.rng.randrange(5, 25)):
            s.step()
            if s.rng.random() < 0.15:
                s.used(s.rng.randrange(3))
        busy = s.rng.randrange(1, 3)
        s.say("busy", busy)
        for _ in range(s.rng.randrange(5, 16)):
            if s.rng.random() < 0.35:
                s.used(busy)
            s.step()
        s.say("sync")
    return s.ops


def plain_script(seed: int, count: int, limit: int = 0) -> list[Op]:
    s = Script(seed, budget=1400 * MIB)
    if limit:
        s.say("limit", limit)
    while len(s.ops) < count:
        s.step()
        if s.rng.random() < 0.006:
            s.say("empty")
    return s.ops


def random_pattern() -> list[Op]:
    s = Script(11, streams=1, budget=1500 * MIB)
    while len(s.ops) < 2600:
        s.step()
    return s.ops


def train_pattern(*, varying: bool = False) -> list[Op]:
    """Layers forth and back: parameters, activations, gradients, optimizer state; with a changing length where ``varying``."""
    s = Script(13, streams=1)
    width, layers = 768, 10
    shapes = [3 * width * width * 4, width * width * 4, 4 * width * width * 4, 4 * width * width * 4, width * 4, width * 4]
    weights = [[s.alloc(n) for n in shapes] for _ in range(layers)]
    state: list[int] = []
    for step in range(14 if varying else 10):
        tokens = s.rng.randrange(900, 8200) if varying else 4096
        kept: list[list[int]] = []
        for _ in range(layers):
            kept.append([s.alloc(tokens * width * 2), s.alloc(tokens * 3 * width * 2), s.alloc(tokens * 4)])
            temporary = s.alloc(12 * tokens * 160)
            kept[-1].append(s.alloc(tokens * 4 * width * 2))
            s.free(temporary)
        logits = s.alloc(tokens * 8000 * 2)
        loss = s.alloc(4)
        gradients: list[int] = []
        flow = s.alloc(tokens * width * 2)
        s.free(logits)
        for layer in reversed(kept):
            for i in reversed(layer):
                below = s.alloc(s.live[i])
                s.free(i)
                s.free(flow)
                flow = below
            gradients += [s.alloc(n) for n in shapes]
        s.free(flow)
        if not state:
            state = [s.alloc(n) for _ in range(2 * layers) for n in shapes]
        for i in gradients:
            scratch = s.alloc(s.live[i])
            s.free(scratch)
            s.free(i)
        s.free(loss)
        if step % 5 == 4:
            for _ in range(4):
                probe = s.alloc(tokens * width * 4)
                s.free(probe)
    assert weights
    return s.ops


def streams_pattern() -> list[Op]:
    s = Script(17, streams=3, budget=1300 * MIB)
    while len(s.ops) < 2400:
        s.step()
        if s.rng.random() < 0.06:
            s.used(s.rng.randrange(3))
    return s.ops


# name: configuration, operations
SCRIPTS: dict[str, tuple[str, Any]] = {
    "driver_oom": ("", lambda: driver_script(31, 520)),
    "driver_oom_exp": ("expandable_segments:True", lambda: driver_script(32, 420)),
    "graph": ("", lambda: graph_script(41, 1000)),
    "graph_exp": ("expandable_segments:True", lambda: graph_script(42, 600)),
    "graph_streams": ("", lambda: graph_script(43, 300, uses=True)),
    "pool_on_oom": ("", lambda: pool_script(51, 900, limit=1 * GIB, use_on_oom=True)),
    "pool_on_oom_exp": ("expandable_segments:True", lambda: pool_script(52, 500, limit=1 * GIB, use_on_oom=True)),
    "pool_no_split": ("", lambda: pool_script(53, 700, no_split=True)),
    "streams_limit": ("", lambda: streams_script(61, 900, 1200 * MIB)),
    "streams_limit_gc": ("max_split_size_mb:64,garbage_collection_threshold:0.7", lambda: streams_script(62, 700, 1600 * MIB)),
    "lseg64": ("large_segment_size_mb:64", lambda: plain_script(71, 800, 1800 * MIB)),
}
PATTERNS: dict[str, Any] = {"random": random_pattern, "train": train_pattern, "varlen": lambda: train_pattern(varying=True), "streams": streams_pattern}
GC_LIMITS = {"random": 2300 * MIB, "train": 1700 * MIB, "varlen": 3000 * MIB, "streams": 2600 * MIB}
SETTINGS: dict[str, str] = {
    "default": "", "expandable": "expandable_segments:True", "round4": "roundup_power2_divisions:4", "split64": "max_split_size_mb:64", "gc80": "garbage_collection_threshold:0.8",
}  # fmt: skip
UNKNOWN = "throw_on_cudamalloc_oom:True"


# ---------------------------------------------------------------------- the model's side
class Modelled:
    """The operations on :class:`nbmemprof.allocator.Device`."""

    def __init__(
        self,
        conf: str,
        *,
        streams: list[int] | None = None,
        fill: int = FILL,
        limit: int | None = None,
        capacity: int | None = None,
        addresses: Any = "ascending",
    ) -> None:
        from nbmemprof.allocator import Device

        self.streams, self.fill = streams or [0, 1 << 20, 2 << 20], fill
        self.device = Device(conf, torch="2.11", limit_bytes=limit, capacity_bytes=capacity, addresses=addresses)
        self.addr: dict[int, int] = {}
        self.pools: dict[Any, Any] = {}
        self.users: dict[Any, int] = {}
        self.entered: dict[Any, Any] = {}
        self.captured: tuple[int, Any] | None = None

    def do(self, op: Op) -> int | str | None:
        device = self.device
        before = device.stats()
        waiting = {s for s, queue in device._queues.items() if queue}
        answer = getattr(self, "_" + op[0])(*op[1:])
        after = device.stats()
        if after["num_device_free"] > before["num_device_free"]:  # the driver waits for the whole device before it frees
            device.synchronize()
        elif after["num_sync_all_streams"] > before["num_sync_all_streams"]:
            for stream in waiting:
                device.synchronize(stream)
        return answer

    def counters(self) -> list[int]:
        stats = self.device.stats()
        return [stats[f"{OVERSIZE[k]}.current"] if k in OVERSIZE else stats[k] if k.startswith("num_") else stats[f"{k}.all.current"] for k in KEYS]

    def _alloc(self, which: int, size: int, stream: int) -> int | str:
        from nbmemprof.errors import OutOfMemoryError

        outside = self.captured is not None and stream != self.captured[0]
        try:
            self.addr[which] = self.device.malloc(size, stream=self.streams[stream], pool=(0, 0) if outside else None)
        except OutOfMemoryError:
            return "OOM"
        return self.addr[which]

    def _fill(self, which: int, _leave: int) -> int | str:
        return self._alloc(which, self.fill, 0)

    def _free(self, which: int) -> None:
        if which in self.addr:
            self.device.free(self.addr.pop(which))

    def _use(self, which: int, stream: int) -> None:
        if which in self.addr:
            self.device.record_stream(self.addr[which], self.streams[stream])

    def _busy(self, stream: int) -> None:
        self.device.busy(self.streams[stream])

    def _sync(self) -> None:
        self.device.synchronize()

    def _empty(self) -> None:
        self.device.empty_cache()

    def _limit(self, limit: int) -> None:
        self.device.set_limit(limit)

    def _limit_over_fill(self, limit: int) -> None:
        self.device.set_limit(self.fill + limit)

    def _warm(self, stream: int) -> None:
        """The first graph of a process makes two small tensors for random numbers, which stay while a graph does."""
        for _ in range(2):
            self.device.malloc(8, stream=self.streams[stream])
        self.device.graph_pool()

    def _begin(self, graph: int, stream: int, share: int | None) -> None:
        context = self.device.capture(None if share is None else self.pools["graph", share], stream=self.streams[stream])
        pool = self.pools["graph", graph] = context.__enter__()
        self.users[pool] = self.users.get(pool, 0) + 1
        self.entered["graph", graph] = context
        self.captured = (stream, pool)

    def _end(self, graph: int) -> None:
        self.entered.pop(("graph", graph)).__exit__(None, None, None)
        self.captured = None

    def _replay(self, graph: int) -> None:
        """No event."""

    def _reset(self, graph: int) -> None:
        pool = self.pools["graph", graph]
        self.users[pool] -= 1
        if self.users[pool] == 0:
            self.device.drop_pool(pool)

    def _pool(self, pool: int, options: dict[str, bool]) -> None:
        self.pools[pool] = self.device.mem_pool(**options)

    def _enter(self, pool: int) -> None:
        self.entered[pool] = self.device.use_pool(self.pools[pool])
        self.entered[pool].__enter__()

    def _leave(self, pool: int) -> None:
        self.entered.pop(pool).__exit__(None, None, None)

    def _drop(self, pool: int) -> None:
        self.device.drop_pool(self.pools[pool])


def without_fill(counters: list[int], fill: int) -> list[int]:
    """Counters without the filling request, where it is live."""
    filled = counters[0] >= fill > 0
    return [c - fill if filled and i in FILLED else c for i, c in enumerate(counters)]


def digest(rows: Any) -> str:
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()[:16]


def outcome(answer: Any) -> Any:
    return "served" if isinstance(answer, int) else answer


def foretell(name: str, policy: str | int) -> dict[str, Any]:
    conf, make = SCRIPTS[name]
    ops = make()
    fill = FILL if ops[0][0] == "fill" else 0
    model = Modelled(conf, capacity=fill + LEAVE if fill else None, addresses=policy)
    rows = []
    for op in ops:
        try:
            answer = model.do(op)
        except RuntimeError:  # the script ends here, as a recording does
            break
        rows.append([outcome(answer), without_fill(model.counters(), fill)])
    stats = model.device.stats()
    return {
        "rows": digest(rows), "refused": [i for i, (answer, _) in enumerate(rows) if answer == "OOM"], "checkpoints": [counters for _, counters in rows[99::100]],
        "end": rows[-1][1], "peak_reserved_bytes": stats["reserved_bytes.all.peak"] - fill, "peak_allocated_bytes": stats["allocated_bytes.all.peak"] - fill,
        "retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"],
    }  # fmt: skip


def foretell_peak(pattern: str, setting: str, policy: str | int) -> dict[str, int]:
    model = Modelled(SETTINGS[setting], limit=GC_LIMITS[pattern] if setting == "gc80" else None, addresses=policy)
    for op in PATTERNS[pattern]():
        model.do(op)
    stats = model.device.stats()
    return {
        "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"],
        "ooms": stats["num_ooms"],
        "retries": stats["num_alloc_retries"],
    }


def predict(path: Path) -> None:
    found: dict[str, Any] = {
        "what": "Said by nbmemprof.allocator.Device before the recordings were made. Addresses are not said: they are the driver's. Where the orders of segment addresses (the policies) differ, the outcome hangs on addresses.",
        "assumed": [
            "driver_oom*: the driver gives exactly what cudaMemGetInfo calls free, in whole pages of 2 MiB",
            "streams_limit*: a busy stream ends at the script's sync, at a flush that waits for it, or where the driver frees a segment (which waits for the device)",
            "graph_streams: frees deferred by a capture complete in the first request after its end",
            "graph*: the first graph of a process makes two 8-byte tensors",
        ],
        "keys": KEYS, "date": datetime.now(UTC).date().isoformat(), "scripts": {}, "patterns": {}, "unknown_option": {UNKNOWN: refusal()},
    }  # fmt: skip
    for name, (conf, make) in SCRIPTS.items():
        made: dict[str, Any] = {}
        for policy in POLICIES:
            said = foretell(name, policy)
            same = next((p for p, other in made.items() if other == said), None)
            made[str(policy)] = said if same is None else {"as": same}
        hangs = any("as" not in v for p, v in made.items() if p != "windows")
        found["scripts"][name] = {"conf": conf, "operations": len(make()), "script": digest(make()), "hangs_on_addresses": hangs, "policies": made}
        print(name, len(make()), "hangs" if hangs else "same", {k: made["windows"][k] for k in ("retries", "ooms", "peak_reserved_bytes")}, flush=True)
    for pattern in PATTERNS:
        for setting in SETTINGS:
            each = [foretell_peak(pattern, setting, policy) for policy in POLICIES]
            found["patterns"][f"{pattern}_{setting}"] = {k: [min(e[k] for e in each), max(e[k] for e in each)] for k in each[0]}
            print(pattern, setting, found["patterns"][f"{pattern}_{setting}"], flush=True)
    path.write_text(json.dumps(found, separators=(",", ":")).replace('"},"', '"},\n"').replace('},"', '},\n"') + "\n")


def refusal() -> str:
    from nbmemprof.allocator import ConfError, parse

    try:
        parse(UNKNOWN, "2.11")
    except ConfError as error:
        return f"refused: {error}"
    return "accepted"


# ---------------------------------------------------------------------- torch's side
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


# ---------------------------------------------------------------------- two cases from the field
def checkerboard(torch: Any) -> dict[str, Any]:
    """One cached segment cut into 32 parts of 64 MiB, every other one kept; then four parts are asked for under a limit one part above what is reserved."""
    part, count = 64 * MIB, 32

    def tensor(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    whole = tensor(part * count)
    del whole
    cut = [tensor(part) for _ in range(count)]
    survivors = cut[1::2]
    del cut
    limit = torch.cuda.memory_reserved() + part
    torch.cuda.set_per_process_memory_fraction((limit + 0.5) / torch.cuda.get_device_properties(0).total_memory)
    refused = ""
    try:
        tensor(4 * part)
    except torch.OutOfMemoryError as error:
        refused = str(error)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {
        "kept": survivors, "message": refused,
        "expected": {"requested": 4 * part, "reserved": count * part, "allocated": count // 2 * part, "free": count // 2 * part, "holes": count // 2, "largest_hole": part, "fragmentation": 1 - 2 / count, "releasable": 0},
    }  # fmt: skip


def graph_pools(torch: Any) -> dict[str, Any]:
    """Four graphs of growing batch, each captured into a pool of its own: two live intermediates each, of which one stays."""
    row, batches = 32 * MIB, (1, 2, 4, 8)

    def work(x: Any) -> Any:
        doubled = x * 2
        more = doubled + 1
        del doubled
        return more.sin()

    kept = []
    for batch in batches:
        x = torch.zeros(batch * row // 4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = work(x)
        kept.append((graph, x, y))
        torch.cuda.empty_cache()
    return {"kept": kept, "expected": {"private_pools": len(batches), "private_reserved": 2 * sum(batches) * row, "private_allocated": sum(batches) * row}}


def run_case(name: str, out: Path, head: dict[str, Any]) -> str:
    import torch
    from record_h200 import keep

    import nbmemprof as mp
    from nbmemprof.views import findings, text

    body = {"checkerboard": checkerboard, "graph_pools": graph_pools}[name]
    torch.cuda.init()
    with mp.record(source="torch_history") as rec:
        told = body(torch)
        counters = keep(out, f"case_{name}", {})
    capture = rec.capture
    frames: dict[str, Any] = {}
    for what, make in {"oom": mp.oom, "fragmentation": mp.fragmentation, "summary": mp.summary, "what_if": mp.what_if, "verdict": mp.allocator.verdict}.items():
        try:
            made = make(capture)
            frames[what] = made if isinstance(made, dict) else made.to_dicts()
        except Exception as error:
            frames[what] = f"{type(error).__name__}: {error}"
    found = head | {
        "name": name, "expected": told["expected"], "message": told.get("message"), "counters": counters["end"], "report": text.report(capture), "findings": findings.findings(capture), "frames": frames,
        "limit_bytes": capture.meta["limit_bytes"], "warnings": capture.meta["warnings"],
    }  # fmt: skip
    (out / f"case_{name}.json").write_text(json.dumps(found, indent=1, default=str))
    return "\n".join([*found["findings"], found["report"]])[:2500]


def run_unknown(out: Path, head: dict[str, Any]) -> str:
    """What torch says to an option that this version does not know."""
    import torch

    try:
        torch.zeros(1, device="cuda")
        said = "accepted"
    except Exception as error:
        said = f"refused: {str(error).splitlines()[0]}"
    (out / "unknown_option.json").write_text(json.dumps(head | {"conf": UNKNOWN, "said": said}, indent=1))
    return said


# ---------------------------------------------------------------------- running them
def everything() -> dict[str, str]:
    """Name of each recording and the configuration of its process."""
    names = {name: conf for name, (conf, _) in SCRIPTS.items()}
    names |= {f"whatif_{p}_{s}": conf for p in PATTERNS for s, conf in SETTINGS.items()}
    return names | {"case_checkerboard": "", "case_graph_pools": "", "unknown": UNKNOWN}


def one(name: str, out: Path, commit: str) -> int:
    import torch

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    ).stdout.strip()
    head = {
        "command": f"python tests/gpu/record_allocator.py OUT {name}", "device": driver, "torch": torch.__version__, "python": sys.version.split()[0],
        "date": datetime.now(UTC).date().isoformat(), "predicted_in_commit": commit,
    }  # fmt: skip
    kind, _, rest = name.partition("_")
    try:
        if name in SCRIPTS:
            said = run_script(name, out, head)
        elif kind == "whatif":
            said = run_pattern(*rest.split("_"), out, head)  # type: ignore[arg-type]
        elif kind == "case":
            said = run_case(rest, out, head)
        else:
            said = run_unknown(out, head)
    except BaseException:
        print(f"== {name} failed\n{traceback.format_exc()}", flush=True)
        return 1
    print(f"== {name}: {said}", flush=True)
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args(arguments)
    if given.predict:
        predict(given.predict)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    confs = everything()
    names = given.names or list(confs)
    if len(names) == 1:
        return one(names[0], given.out, given.commit)

    def run(name: str) -> int:
        begin = time.perf_counter()
        env = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")} | (
            {"PYTORCH_CUDA_ALLOC_CONF": confs[name]} if confs[name] else {}
        )
        try:
            code = subprocess.run([sys.executable, __file__, str(given.out), name, "--commit", given.commit], env=env, check=False, timeout=90).returncode
        except subprocess.TimeoutExpired:
            print(f"== {name} stopped after 90 s", flush=True)
            code = 1
        print(f"   {name}: {time.perf_counter() - begin:.1f} s", flush=True)
        return code

    alone = [n for n in names if n.startswith(("driver", "streams", "graph"))]  # the whole card, or kernels that would delay others' events
    with ThreadPoolExecutor(given.jobs) as pool:
        codes = list(pool.map(run, [n for n in names if n not in alone]))
    codes += [run(n) for n in alone]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
