"""A modelled device in the form of torch's own snapshot: segments with their blocks, the trace, the settings."""

from __future__ import annotations

from typing import Any

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._model import Model, Words

__all__ = ["snapshot"]

_WORDS = {
    M.ALLOC: "alloc", M.FREE_REQUESTED: "free_requested", M.FREE_COMPLETED: "free_completed", M.SEGMENT_ALLOC: "segment_alloc", M.SEGMENT_FREE: "segment_free",
    M.SEGMENT_MAP: "segment_map", M.SEGMENT_UNMAP: "segment_unmap", M.OOM: "oom",
}  # fmt: skip
_STATES = {M.FREE: "inactive", M.LIVE: "active_allocated", M.PENDING: "active_pending_free"}


def snapshot(model: Model, trace: Words, pools: list[tuple[int, int]], device: int) -> dict[str, Any]:
    """What ``torch.cuda.memory._snapshot()`` of torch 2.11 would return; stacks are empty, ``time_us`` counts the events.

    Parameters
    ----------
    model
        The device's model.
    trace
        What it told, ``M.WORDS`` numbers an event.
    pools
        torch's name of each pool, in the order they were made.
    device
        Its ordinal.
    """
    settings = model.settings
    return {
        "segments": _segments(model, pools, device),
        "device_traces": [[] for _ in range(device)] + [_events(trace)],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": settings.text, "max_split_size": -1 if settings.max_split_size is None else settings.max_split_size,
            "garbage_collection_threshold": settings.garbage_collection_threshold, "expandable_segments": settings.expandable_segments,
            "release_lock_on_cudamalloc": settings.release_lock_on_cudamalloc, "graph_capture_record_stream_reuse": settings.graph_capture_record_stream_reuse,
            "roundup_power2_divisions": {str(1 << i): d for i, d in enumerate(settings.roundup_power2_divisions)},
        },
        "external_annotations": [],
    }  # fmt: skip


def _segments(model: Model, pools: list[tuple[int, int]], device: int) -> list[dict[str, Any]]:
    """Mapped memory in the order of addresses; a hole ends an expandable segment."""
    columns = model.blocks()
    segments: list[dict[str, Any]] = []
    apart = True  # from the block before it
    for i in range(len(columns["addr"])):
        state = int(columns["state"][i])
        if state == M.HOLE:
            apart = True
            continue
        addr, size, requested = (int(columns[n][i]) for n in ("addr", "size", "requested"))
        if columns["first"][i] or apart:
            segments.append({
                "device": device, "address": addr, "total_size": 0, "allocated_size": 0, "active_size": 0, "requested_size": 0, "stream": int(columns["stream"][i]),
                "segment_type": "small" if columns["small"][i] else "large", "segment_pool_id": pools[int(columns["pool"][i])], "is_expandable": bool(columns["area"][i]),
                "frames": [], "blocks": [],
            })  # fmt: skip
        segment = segments[-1]
        segment["total_size"] += size
        segment["allocated_size"] += size if state == M.LIVE else 0
        segment["active_size"] += size if state != M.FREE else 0
        segment["requested_size"] += requested if state != M.FREE else 0
        segment["blocks"].append({"address": addr, "size": size, "requested_size": requested, "state": _STATES[state], "frames": []})
        apart = False
    return segments


def _events(trace: Words) -> list[dict[str, Any]]:
    out = []
    for i, (kind, addr, size, stream, _row, _source) in enumerate(trace.reshape(-1, M.WORDS).tolist()):
        place = {"device_free": max(0, addr)} if kind == M.OOM else {"addr": addr}
        out.append({"action": _WORDS[kind]} | place | {"size": size, "stream": stream, "time_us": i, "compile_context": "N/A", "user_metadata": "", "frames": []})
    return out
