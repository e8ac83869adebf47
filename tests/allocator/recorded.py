"""Recordings of a real H200 (torch 2.11), read from the fixtures: snapshots, requests one by one, traces."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import nbmemprof as mp

FOLDER = Path(__file__).parents[1] / "fixtures" / "recordings"
_LETTERS = {
    "a": "alloc", "r": "free_requested", "f": "free_completed", "S": "segment_alloc", "F": "segment_free", "M": "segment_map", "U": "segment_unmap", "O": "oom",
}  # fmt: skip


def snapshot(name: str) -> dict[str, Any]:
    """The snapshot of ``NAME.pickle.gz``, our own file."""
    return pickle.loads(gzip.decompress((FOLDER / f"{name}.pickle.gz").read_bytes()))


def facts(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def requests(name: str) -> dict[str, Any]:
    """4,000 requests with the address and 16 counters after each."""
    return json.loads(gzip.decompress((FOLDER / f"ops_{name}.json.gz").read_bytes()))


def of_requests(found: dict[str, Any]) -> dict[str, Any]:
    """The snapshot that the requests would have left."""
    trace = [{"action": a, ("device_free" if a == "oom" else "addr"): x, "size": s, "stream": t, "time_us": i} for i, (a, x, s, t) in enumerate(found["trace"])]
    segments = []
    for addr, size, stream, expandable, blocks in found["segs"]:
        at, made = addr, []
        for length, requested, state in blocks:
            made.append({"address": at, "size": length, "requested_size": requested, "state": state})
            at += length
        largest = max(b[0] for b in blocks)
        kind = "small" if (expandable and addr % 2**21 == 0 and size % (20 << 20)) or (not expandable and size == 2 << 20) or largest < 512 else "large"
        segments.append({"address": addr, "total_size": size, "stream": stream, "is_expandable": expandable, "segment_type": kind, "segment_pool_id": (0, 0), "blocks": made, "device": 0})
    return {"segments": segments, "device_traces": [trace], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": found["conf"]}}


def of_trace(name: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The snapshot of ``trace_NAME.json.gz`` (no final picture), and the peaks that torch counted."""
    found = json.loads(gzip.decompress((FOLDER / f"trace_{name}.json.gz").read_bytes()))
    rows = zip(found["actions"], found["addrs"], found["sizes"], strict=True)
    trace = [{"action": _LETTERS[a], "addr": x + found["addr_base"], "size": s, "stream": 0, "time_us": i} for i, (a, x, s) in enumerate(rows)]
    return {"segments": [], "device_traces": [trace], "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": found["conf"]}}, found["peak"]


def script(name: str) -> dict[str, Any]:
    """``h200/allocator/ops_NAME.json.gz``: a script of operations, with the address and 16 counters after each."""
    made: dict[str, Any] = json.loads(gzip.decompress((FOLDER.parent / "h200" / "allocator" / f"ops_{name}.json.gz").read_bytes()))
    return made


def of_script(name: str) -> dict[str, Any]:
    """The snapshot that a script left, with its private pools."""
    found = script(name)
    pictured = of_requests(found | {"segs": [segment[:5] for segment in found["segs"]]})
    for made, (*_, kind, pool) in zip(pictured["segments"], found["segs"], strict=True):
        made |= {"segment_type": kind, "segment_pool_id": tuple(pool)}
    return pictured


def readings(found: dict[str, Any], every: int = 1) -> list[dict[str, int]]:
    """The counters that torch was asked for after each ``every``-th request, zeros before the first."""
    names = [name if name.startswith(("num_", "ovs")) else f"{name}.all.current" for name in found["keys"]]
    rows = [[0] * len(names), *(row[-1] for row in found["ops"][every - 1 :: every]), found["ops"][-1][-1]]
    return [dict(zip(names, row, strict=True)) for row in rows]


def with_readings(capture: mp.Capture, found: dict[str, Any], every: int = 1) -> mp.Capture:
    """The capture with those counters, as our own recordings have them."""
    return mp.Capture.build({name: capture.tables[name] for name in capture.tables}, **capture.meta | {"readings": {"0": readings(found, every)}})
