"""Legal traces: a small best-fit caching allocator that writes what torch 2.11 writes, and hypothesis strategies over it.

Rules as in PyTorch's ``CUDACachingAllocator.cpp``: 512-byte rounding, two pools, best fit within a (pool, stream), split
and merge, pending frees, private pools, ``empty_cache``, expandable ranges mapped page by page. It knows the truth about
itself: ``capture()`` has ``allocations`` filled from what it did, not derived from the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl
from hypothesis import strategies as st

from nbmemprof import schema
from nbmemprof.capture import Capture

KIB, MIB = 1 << 10, 1 << 20
DEFAULT = (0, 0)


def up(n: int, quantum: int) -> int:
    return -(-n // quantum) * quantum


def frames(*lines: str) -> tuple[tuple[str, int, str], ...]:
    """``frames("train.py:7 step", "train.py:20 main")``: a stack, innermost first."""
    out = []
    for text in lines:
        place, _, function = text.partition(" ")
        name, _, line = place.rpartition(":")
        out.append((name, int(line), function or "f"))
    return tuple(out)


@dataclass(eq=False)
class Block:
    addr: int
    size: int
    segment: Segment
    state: str = "inactive"
    requested: int = 0
    stack: tuple = ()
    row: int = -1


@dataclass(eq=False)
class Segment:
    addr: int
    size: int
    stream: int
    pool: tuple[int, int]
    kind: str
    expandable: bool
    stack: tuple
    blocks: list[Block] = field(default_factory=list)


@dataclass
class Allocator:
    """One device. ``malloc`` returns a block, or None for an OOM (which is in the trace)."""

    device: int = 0
    expandable: bool = False
    limit: int | None = None
    base: int = 0x7F0000000000
    start_us: int = 1_700_000_000_000_000
    trace: list[dict[str, Any]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    peak: int = 0
    live: int = 0
    interned: dict[tuple, list[dict[str, Any]]] = field(default_factory=dict)
    marks: list[dict[str, Any]] = field(default_factory=list)

    def frames(self, stack: tuple) -> list[dict[str, Any]]:
        if stack not in self.interned:
            self.interned[stack] = [{"filename": f, "line": n, "name": w} for f, n, w in stack]
        return self.interned[stack]

    def event(self, action: str, addr: int, size: int, stream: int, stack: tuple, pool: tuple[int, int] = DEFAULT, **more: int) -> int:
        entry = {
            "action": action,
            "addr": addr,
            "size": size,
            "stream": stream,
            "time_us": self.start_us + 3 * len(self.trace),
            "compile_context": "N/A",
            "user_metadata": "",
            "pool_id": pool,
            "frames": self.frames(stack),
        }
        if more:
            del entry["addr"]
        self.trace.append(entry | more)
        return len(self.trace) - 1

    @property
    def reserved(self) -> int:
        return sum(s.size for s in self.segments)

    def malloc(self, size: int, stack: tuple = (), stream: int = 0, pool: tuple[int, int] = DEFAULT) -> Block | None:
        rounded = max(512, up(size, 512))
        kind = "small" if rounded <= MIB else "large"
        fits = [b for s in self.segments if (s.stream, s.pool, s.kind) == (stream, pool, kind) for b in s.blocks if b.state == "inactive" and b.size >= rounded]
        block = min(fits, key=lambda b: (b.size, b.addr), default=None)
        if block is None:
            block = self._grow(rounded, kind, stack, stream, pool)
        if block is None:
            self.event("oom", 0, rounded, stream, stack, pool, device_free=max(0, (self.limit or 0) - self.reserved))
            return None
        rest = block.size - rounded
        if rest >= 512 if kind == "small" or block.segment.expandable else rest > MIB:
            at = block.segment.blocks.index(block)
            block.segment.blocks.insert(at + 1, Block(block.addr + rounded, rest, block.segment))
            block.size = rounded
        seq = self.event("alloc", block.addr, size, stream, stack, pool)
        block.state, block.requested, block.stack, block.row = "active_allocated", size, stack, len(self.rows)
        self.rows.append(
            {
                "alloc_seq": seq,
                "free_seq": None,
                "done_seq": None,
                "addr": block.addr,
                "requested_bytes": size,
                "size_bytes": block.size,
                "stream": stream,
                "pool": pool,
                "stack": stack,
                "free_stack": None,
            }
        )
        self.live += block.size
        self.peak = max(self.peak, self.live)
        return block

    def _grow(self, rounded: int, kind: str, stack: tuple, stream: int, pool: tuple[int, int]) -> Block | None:
        page = 2 * MIB if kind == "small" else 20 * MIB
        nominal = page if rounded < 10 * MIB else up(rounded, 2 * MIB)
        mine = [s for s in self.segments if s.expandable and (s.stream, s.pool, s.kind) == (stream, pool, kind)]
        tail = mine[-1] if mine else None
        have = tail.blocks[-1].size if tail and tail.blocks[-1].state == "inactive" else 0
        need = up(rounded - have, page) if self.expandable else nominal
        if self.limit is not None and self.reserved + need > self.limit:
            return None
        if self.expandable and tail is not None:
            self.event("segment_map", tail.addr + tail.size, need, stream, stack, pool)
            if have:
                tail.blocks[-1].size += need
            else:
                tail.blocks.append(Block(tail.addr + tail.size, need, tail))
            tail.size += need
            return tail.blocks[-1]
        seg = Segment(self.base, need, stream, pool, kind, self.expandable, stack)
        self.base += (1 << 36) if self.expandable else up(need, 2 * MIB) + 2 * MIB
        self.event("segment_map" if self.expandable else "segment_alloc", seg.addr, need, stream, stack, pool)
        seg.blocks.append(Block(seg.addr, need, seg))
        self.segments.append(seg)
        return seg.blocks[0]

    def free(self, block: Block, stack: tuple | None = None, pending: bool = False) -> None:
        """Give a block up; pending: it waits for another stream until ``complete``."""
        stack = block.stack if stack is None else stack
        row = self.rows[block.row]
        row["free_seq"], row["free_stack"] = self.event("free_requested", block.addr, block.requested, block.segment.stream, stack, block.segment.pool), stack
        block.state = "active_pending_free"
        self.live -= block.size
        if not pending:
            self.complete(block)

    def complete(self, block: Block) -> None:
        self.rows[block.row]["done_seq"] = self.event("free_completed", block.addr, block.requested, block.segment.stream, block.stack, block.segment.pool)
        block.state = "inactive"
        blocks = block.segment.blocks
        at = blocks.index(block)
        for left in (at, at - 1):
            if left >= 0 and left + 1 < len(blocks) and blocks[left].state == blocks[left + 1].state == "inactive":
                blocks[left].size += blocks.pop(left + 1).size

    def empty_cache(self) -> None:
        for seg in list(self.segments):
            if not seg.expandable and seg.pool == DEFAULT and len(seg.blocks) == 1 and seg.blocks[0].state == "inactive":
                self.event("segment_free", seg.addr, seg.size, seg.stream, seg.stack, seg.pool)
                self.segments.remove(seg)

    def mark(self, kind: str, name: str = "") -> None:
        self.marks.append({"seq": len(self.trace) - 1, "time_us": 3.0 * len(self.trace), "kind": kind, "name": name})

    def snapshot_segments(self) -> list[dict[str, Any]]:
        out = []
        for s in sorted(self.segments, key=lambda s: s.addr):
            used = [b for b in s.blocks if b.state != "inactive"]
            out.append({
                "device": self.device, "address": s.addr, "total_size": s.size, "stream": s.stream, "segment_type": s.kind,
                "segment_pool_id": s.pool, "is_expandable": s.expandable, "frames": self.frames(s.stack),
                "allocated_size": sum(b.size for b in used if b.state == "active_allocated"), "active_size": sum(b.size for b in used),
                "requested_size": sum(b.requested for b in used),
                "blocks": [{"address": b.addr, "size": b.size, "requested_size": b.requested, "state": b.state, "frames": self.frames(b.stack) if b.state != "inactive" else []} for b in s.blocks],
            })  # fmt: skip
        return out

    def snapshot(self) -> dict[str, Any]:
        """What ``torch.cuda.memory._snapshot()`` returns."""
        return snapshot([self])

    def capture(self, first: int = 0) -> Capture:
        """The capture that a source would make of it; ``first``: entries before this one were lost."""
        return capture([self], first)


def snapshot(devices: list[Allocator]) -> dict[str, Any]:
    traces: list[list[dict[str, Any]]] = [[] for _ in range(1 + max(a.device for a in devices))]
    for a in devices:
        traces[a.device] = list(a.trace)
    settings = {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "expandable_segments": any(a.expandable for a in devices),
        "garbage_collection_threshold": 0.0,
        "max_split_size": -1,
        "roundup_power2_divisions": {},
    }
    return {
        "segments": [s for a in devices for s in a.snapshot_segments()],
        "device_traces": traces,
        "allocator_settings": settings,
        "external_annotations": [],
    }


def capture(devices: list[Allocator], first: int = 0, kind: str = "device") -> Capture:
    """Tables written by hand from what the allocators did."""
    stacks: dict[tuple, int] = {}

    def stack_id(stack: tuple | None) -> int | None:
        return stacks.setdefault(stack, len(stacks)) if stack else None

    events: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    segments: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    marks: list[dict[str, Any]] = []
    for a in devices:
        heap = {"device": a.device if kind == "device" else None, "kind": kind, "source": "torch"}
        at = len(events)
        for i, e in enumerate(a.trace[first:]):
            seq = at + i
            events.append(
                heap
                | {
                    "seq": seq,
                    "time_us": float(e["time_us"] - a.start_us),
                    "action": e["action"],
                    "addr": e.get("addr"),
                    "requested_bytes": e["size"],
                    "stream": e["stream"],
                    "pool_id": "{}_{}".format(*e["pool_id"]),
                    "stack_id": stack_id(tuple((f["filename"], f["line"], f["name"]) for f in e["frames"])),
                }
            )
            if "device_free" in e:
                marks.append({"device": a.device, "seq": seq, "time_us": float(e["time_us"] - a.start_us), "kind": "oom", "value": float(e["device_free"])})
        for r in a.rows:
            if r["done_seq"] is not None and r["done_seq"] < first:
                continue
            seqs = {n: None if r[n] is None or r[n] < first else r[n] - first + at for n in ("alloc_seq", "free_seq", "done_seq")}
            clock = {n: None if s is None else 3.0 * (s - at + first) for n, s in (("time_us", seqs["alloc_seq"]), ("end_us", seqs["free_seq"]))}
            rows.append(
                heap
                | seqs
                | clock
                | {n: r[n] for n in ("addr", "requested_bytes", "size_bytes", "stream")}
                | {
                    "pool_id": "{}_{}".format(*r["pool"]),
                    "stack_id": stack_id(r["stack"]),
                    "free_stack_id": stack_id(r["free_stack"]),
                    "at_start": r["alloc_seq"] < first,
                    "size_exact": True,
                }
            )
        for s in a.snapshot_segments():
            common = heap | {"snapshot_id": 0, "stream": s["stream"], "pool_id": "{}_{}".format(*s["segment_pool_id"]), "pool": s["segment_type"]}
            segments.append(
                common
                | {
                    "addr": s["address"],
                    "size_bytes": s["total_size"],
                    "allocated_bytes": s["allocated_size"],
                    "active_bytes": s["active_size"],
                    "is_expandable": s["is_expandable"],
                }
            )
            for b in s["blocks"]:
                blocks.append(
                    common
                    | {
                        "segment_addr": s["address"],
                        "addr": b["address"],
                        "size_bytes": b["size"],
                        "requested_bytes": b["requested_size"],
                        "state": b["state"],
                        "stack_id": stack_id(tuple((f["filename"], f["line"], f["name"]) for f in b["frames"])),
                    }
                )
        marks += [{"device": a.device} | m | {"seq": m["seq"] - first + at} for m in a.marks]
    lines = [{"stack_id": i, "depth": d, "filename": f, "line": n, "function": w} for stack, i in stacks.items() for d, (f, n, w) in enumerate(stack)]
    return Capture.build({
        "events": table("events", events), "allocations": table("allocations", rows), "segments": table("segments", segments),
        "blocks": table("blocks", blocks), "marks": table("marks", marks), "stacks": table("stacks", lines),
    }, source="torch", warnings=["history truncated: the ring was full"] if first else [])  # fmt: skip


def table(name: str, rows: list[dict[str, Any]]) -> pl.DataFrame:
    """A table of the schema from rows that may lack columns."""
    wanted = schema.dtypes(name)
    return pl.DataFrame({c: pl.Series(c, [r.get(c) for r in rows], dtype=t if t != pl.Categorical else pl.String).cast(t) for c, t in wanted.items()})


# ---------------------------------------------------------------------------------------------- hypothesis

SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 2 * MIB),
    st.sampled_from([1, 511, 512, 513, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 21 * MIB]),
    st.integers(1, 40 * MIB),
)
STACKS = st.sampled_from([(), *(frames(f"model.py:{n} forward", f"train.py:{10 + n % 3} step", "train.py:90 main") for n in range(6))])


@st.composite
def allocators(
    draw: st.DrawFn,
    max_ops: int = 60,
    streams: tuple[int, ...] = (0, 7),
    pools: tuple[tuple[int, int], ...] = (DEFAULT, (1, 0)),
    expandable: bool | None = None,
    device: int = 0,
) -> Allocator:
    """An allocator after a random legal life."""
    a = Allocator(device=device, expandable=draw(st.booleans()) if expandable is None else expandable, limit=draw(st.sampled_from([None, 64 * MIB])))
    live: list[Block] = []
    waiting: list[Block] = []
    for _ in range(draw(st.integers(0, max_ops))):
        what = draw(st.sampled_from(["alloc", "alloc", "alloc", "free", "free", "defer", "complete", "empty"]))
        if what == "alloc":
            block = a.malloc(draw(SIZES), draw(STACKS), draw(st.sampled_from(streams)), draw(st.sampled_from(pools)))
            if block is not None:
                live.append(block)
        elif what in ("free", "defer") and live:
            block = live.pop(draw(st.integers(0, len(live) - 1)))
            a.free(block, pending=what == "defer")
            if what == "defer":
                waiting.append(block)
        elif what == "complete" and waiting:
            a.complete(waiting.pop(0))
        elif what == "empty":
            a.empty_cache()
    return a


def snapshots(**options: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Snapshots of random legal lives, as torch 2.11 writes them."""
    return allocators(**options).map(Allocator.snapshot)
