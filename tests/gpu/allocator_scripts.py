"""Seeded scripts for torch's allocator, and four patterns of requests: lists of operations made by plain code, the same with and without a GPU.

An operation is a name and its arguments, such as ``["alloc", 7, 4096, 1]`` (which, bytes, stream); ``allocator_modelled.py`` and
``allocator_card.py`` do them.
"""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

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


def digest(rows: Any) -> str:
    """Of a script's operations, or of what was said of them: whether two are the same."""
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()[:16]
