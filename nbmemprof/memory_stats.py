"""Torch's allocator counters under their right names, with what each means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError

__all__ = ["stats"]

_SCHEMA = {"device": pl.Int64, "counter": pl.String, "value": pl.Int64, "unit": pl.String, "meaning": pl.String}

# prefix of torch.cuda.memory_stats -> (unit, what it counts); rules from CUDACachingAllocator.cpp
_ARRAYS = {
    "allocation": ("blocks", "live blocks"),
    "allocated_bytes": ("bytes", "live blocks, rounded as the allocator gave them"),
    "requested_bytes": ("bytes", "what was asked for; blocks that are freed but wait for a stream are still in"),
    "active": ("blocks", "live blocks and freed ones that wait for a stream"),
    "active_bytes": ("bytes", "live blocks and freed ones that wait for a stream"),
    "reserved_bytes": ("bytes", "memory held from the driver"),
    "segment": ("segments", "segments got by cudaMalloc; expandable segments are not counted here"),
    "inactive_split": ("blocks", "free pieces of segments that are partly in use; expandable segments are not counted here"),
    "inactive_split_bytes": ("bytes", "free pieces of segments that are partly in use; expandable segments are not counted here"),
    "oversize_allocations": ("blocks", "live blocks of max_split_size and more"),
    "oversize_segments": ("segments", "segments of max_split_size and more"),
}
_WHAT = {"current": "now", "peak": "highest since the peaks were last reset", "allocated": "sum of all increases so far", "freed": "sum of all decreases so far"}
_POOLS = {"all": "", "small_pool": " (requests up to 1 MiB)", "large_pool": " (requests above 1 MiB)"}
_TOTALS = {("allocation", "allocated"): "requests served so far", ("allocation", "freed"): "blocks freed so far", ("segment", "allocated"): "cudaMalloc calls for segments so far"}
_SINGLE = {
    "num_alloc_retries": ("times", "the whole cache was flushed under pressure and the request tried again; normally 0, and not a number of segments"),
    "num_ooms": ("times", "out-of-memory errors raised"),
    "num_oom_rejections": ("times", "requests refused at once because of the memory limit (throw_on_cudamalloc_oom)"),
    "num_sync_all_streams": ("times", "the allocator waited for all streams: at each flush, empty_cache() included"),
    "num_device_alloc": ("calls", "memory was asked of the driver: cudaMalloc, or a mapped range of an expandable segment"),
    "num_device_free": ("calls", "memory was given back to the driver: cudaFree, or an unmapped range"),
    "max_split_size": ("bytes", "blocks from this size on are not split; null is no limit (torch prints -1)"),
}


def stats(stats: Mapping[str, Any] | None = None, *, device: int | None = None) -> pl.DataFrame:
    """What do the allocator's counters say, and what do they mean?

    Parameters
    ----------
    stats
        A dict of ``torch.cuda.memory_stats()`` from elsewhere, flat or nested; without it those of this process,
        for every device that torch has used, and this process's own memory on the host.
    device
        Ordinal: of the dict given, or the only one to show.

    Returns
    -------
    ``device counter value unit meaning``. Counters that begin with ``derived.`` are worked out here and add up:
    reserved = requested + rounding + cached, cached = pinned + releasable (stranded is a part of it). Null ``value``: no limit, or not to be
    told from counters. ``device`` is null for the host.

    Raises
    ------
    NbmemprofError
        If what is given is not a dict of counters.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> mp.stats({"allocated_bytes.all.current": 1 << 20}).filter(counter="allocated_bytes.all.current")["value"].item()
    1048576
    """
    if stats is not None:
        if not isinstance(stats, Mapping) or not all(isinstance(name, str) for name in stats):
            raise NbmemprofError(f"A {type(stats).__name__} is not a dict of counters. Give torch.cuda.memory_stats(), or nothing for this process.")
        return _frame(_device_rows(device if device is not None else 0, _flat(stats), None))
    rows = list(_host_rows()) if device is None else []
    torch = _optional.loaded("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        for ordinal in range(torch.cuda.device_count()) if device is None else (device,):
            counters = _flat(torch.cuda.memory_stats(ordinal))
            if device is not None or counters.get("reserved_bytes.all.peak"):
                rows += _device_rows(ordinal, counters, _picture(torch, ordinal))
    elif device is not None:
        raise NbmemprofError(f"Device {device} has no counters: CUDA has not been used in this process. Allocate something on it first.")
    return _frame(rows)


def _frame(rows: Any) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema=_SCHEMA, orient="row")


def _flat(stats: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in stats.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _device_rows(device: int, counters: Mapping[str, Any], picture: Mapping[str, int] | None) -> Iterator[tuple[Any, ...]]:
    for name, (value, unit, meaning) in _derived(counters, picture).items():
        yield device, f"derived.{name}", value, unit, meaning
    for name, value in counters.items():
        if not isinstance(value, int):
            continue
        yield device, name, None if name == "max_split_size" and value < 0 else value, *_meaning(name)


def _meaning(name: str) -> tuple[str | None, str]:
    if name in _SINGLE:
        return _SINGLE[name]
    prefix, _, rest = name.partition(".")
    pool, _, what = rest.rpartition(".")
    if prefix in _ARRAYS and what in _WHAT and pool in {*_POOLS, ""}:
        unit, counted = _ARRAYS[prefix]
        short = _TOTALS.get((prefix, what))
        return unit, f"{short or f'{counted}: {_WHAT[what]}'}{_POOLS.get(pool, '')}"
    if prefix == "reserved_bytes_by_private_pools" and what in _WHAT:
        return "bytes", f"memory held from the driver by the private pool {pool.removesuffix('.all')}: {_WHAT[what]}"
    return None, "a counter of torch that this version does not describe"


def _derived(counters: Mapping[str, Any], picture: Mapping[str, int] | None) -> dict[str, tuple[int | None, str, str]]:
    def now(name: str, what: str = "current") -> int | None:
        value = counters.get(f"{name}.all.{what}")
        return int(value) if value is not None else None

    def less(a: int | None, b: int | None) -> int | None:
        return a - b if a is not None and b is not None else None

    reserved, active, classic = now("reserved_bytes"), now("active_bytes"), now("segment")
    cached = less(reserved, active)
    # counters leave expandable segments out of "inactive_split": without a picture their share can't be told
    told = picture is not None or (classic is not None and (classic > 0 or not reserved))
    pinned = picture["pinned"] if picture is not None else now("inactive_split_bytes") if told else None
    segments = picture["segments"] if picture is not None else classic if told else None
    return {
        "live_blocks": (now("allocation"), "blocks", "blocks in use now (allocation.all.current is this, not the number of requests)"),
        "requests": (now("allocation", "allocated"), "requests", "requests served so far"),
        "segments": (segments, "segments", "segments and mapped ranges held from the driver now"),
        "pending_bytes": (less(active, now("allocated_bytes")), "bytes", "freed blocks that wait for another stream (record_stream)"),
        "rounding_bytes": (less(active, now("requested_bytes")), "bytes", "given beyond what was asked for (internal fragmentation)"),
        "cached_bytes": (cached, "bytes", "reserved and free: kept for later requests"),
        "pinned_bytes": (pinned, "bytes", "free, but in a segment or page that is also in use: empty_cache() can't give it back (external fragmentation)"),
        "releasable_bytes": (less(cached, pinned), "bytes", "free, in segments or pages that nothing uses: empty_cache() gives it back, but for stranded_bytes"),
        "stranded_bytes": (picture["stranded"] if picture is not None else None, "bytes", "of releasable_bytes: in private pools (CUDA graphs, MemPools), which give it back only once nobody uses the pool"),
    }


_PAGES = {"small": 2 << 20, "large": 20 << 20}


def _picture(torch: Any, device: int) -> dict[str, int] | None:
    """Segments, and free bytes that empty_cache() could not give back, from the heap as it is now."""
    if torch.cuda.get_allocator_backend() != "native":
        return None
    try:
        segments = torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:  # torch before 2.11
        segments = torch.cuda.memory_snapshot()
    mine = [s for s in segments if s["device"] == device]
    private = [s for s in mine if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)]
    return {"segments": len(mine), "pinned": sum(map(_pinned, mine)), "stranded": sum(_free(s) - _pinned(s) for s in private)}


def _free(segment: Mapping[str, Any]) -> int:
    return sum(int(block["size"]) for block in segment["blocks"] if block["state"] == "inactive")


def _pinned(segment: Mapping[str, Any]) -> int:
    pinned, at = 0, 0
    for block in segment["blocks"]:
        size = int(block["size"])
        if block["state"] == "inactive":
            if segment.get("is_expandable"):  # whole pages are unmapped; they count from the segment's start
                page = _PAGES.get(segment.get("segment_type", ""), _PAGES["large"])
                pinned += size - max((at + size) // page - -(-at // page), 0) * page
            elif size < segment["total_size"]:
                pinned += size
        at += size
    return pinned


def _host_rows() -> Iterator[tuple[Any, ...]]:
    for word, name, meaning in (("VmRSS", "rss", "memory of this process on the host now"), ("VmHWM", "rss.peak", "highest memory of this process on the host")):
        yield None, f"host.{name}", _proc(word), "bytes", meaning


def _proc(word: str) -> int | None:
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{word}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
