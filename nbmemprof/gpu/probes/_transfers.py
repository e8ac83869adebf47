"""How fast do bytes come to the card and back, what does an allocation cost, and what does a page fault?"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _device
from nbmemprof.units import format_bytes

__all__ = ["ALLOCATOR_COLUMNS", "COLUMNS", "UNIFIED_COLUMNS", "measure", "measure_allocators", "measure_unified"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (64 * KIB, MIB, 16 * MIB, 256 * MIB)
ALLOCATED = (4 * KIB, 2 * MIB, 64 * MIB, GIB)
MOST_MANAGED = 64 * MIB
COLUMNS: dict[str, Any] = {
    "what": pl.String, "direction": pl.String, "size_bytes": pl.Int64, "achieved_bytes_per_s": pl.Float64, "ceiling_bytes_per_s": pl.Float64, "median_us": pl.Float64,
    "low_us": pl.Float64, "high_us": pl.Float64, "repeats": pl.Int64, "verified": pl.Boolean,
}  # fmt: skip
ALLOCATOR_COLUMNS: dict[str, Any] = {
    "what": pl.String, "size_bytes": pl.Int64, "alloc_us": pl.Float64, "alloc_low_us": pl.Float64, "alloc_high_us": pl.Float64, "free_us": pl.Float64, "free_low_us": pl.Float64,
    "free_high_us": pl.Float64, "repeats": pl.Int64,
}  # fmt: skip
UNIFIED_COLUMNS: dict[str, Any] = {
    "what": pl.String, "size_bytes": pl.Int64, "achieved_bytes_per_s": pl.Float64, "median_us": pl.Float64, "low_us": pl.Float64, "high_us": pl.Float64, "repeats": pl.Int64,
    "verified": pl.Boolean,
}  # fmt: skip


# ---------------------------------------------------------------------- host and device
def measure(gpu: _device.Gpu, sizes: tuple[int, ...] = SIZES, repeats: int = 10) -> list[dict[str, Any]]:
    """Time each copy from call to completion on the host's clock; a row a kind of host memory, direction and size."""
    rows = []
    for size in sizes:
        device = gpu.poisoned(size // 4, np.uint32)
        truth = _device.mixed(np, size // 4)
        for what, host in (("pinned", gpu.pinned(size).view(np.uint32)), ("pageable", np.empty(size // 4, np.uint32)), ("registered", np.empty(size // 4, np.uint32))):
            host[:] = truth  # touches every page, too
            if what == "registered":
                if size < 16 * MIB:
                    continue
                rows.append(_row("register", "–", size, _registering(gpu, host, repeats), repeats, right=True))
                gpu.register(host)
            rows += _both(gpu, what, host, device, truth, repeats)
            if what == "registered":
                gpu.unregister(host)
    for direction in ("to device", "to host"):
        ceiling = max(row["achieved_bytes_per_s"] for row in rows if row["direction"] == direction)
        for row in rows:
            if row["direction"] == direction:
                row["ceiling_bytes_per_s"] = ceiling
    return rows


def _row(what: str, direction: str, size: int, times: _device.Times, repeats: int, *, right: bool) -> dict[str, Any]:
    return {
        "what": what, "direction": direction, "size_bytes": size, "achieved_bytes_per_s": size / times.median_us * 1e6, "median_us": times.median_us, "low_us": times.low_us,
        "high_us": times.high_us, "repeats": repeats, "verified": right,
    }  # fmt: skip


def _both(gpu: _device.Gpu, what: str, host: Any, device: Any, truth: Any, repeats: int) -> list[dict[str, Any]]:
    there = gpu.wall(lambda: gpu.copy(device, host), repeats)
    host[:] = np.uint32(0xA5A5A5A5)
    back = gpu.wall(lambda: gpu.copy(host, device), repeats)
    right = bool((host == truth).all())
    return [_row(what, "to device", host.nbytes, there, repeats, right=right), _row(what, "to host", host.nbytes, back, repeats, right=right)]


def _registering(gpu: _device.Gpu, host: Any, repeats: int) -> _device.Times:
    took = []
    for _ in range(min(repeats, 5)):
        begin = time.perf_counter()
        gpu.register(host)
        took.append((time.perf_counter() - begin) * 1e6)
        gpu.unregister(host)
    return _device.Times(tuple(took))


# ---------------------------------------------------------------------- allocators
def measure_allocators(gpu: _device.Gpu, sizes: tuple[int, ...] = ALLOCATED, repeats: int = 100) -> list[dict[str, Any]]:
    """Time each call on the host's clock, the cost of an empty Python call taken off; a row an allocator and size."""
    empty = _pairs(lambda _: None, lambda _: None, 0, 1000)[0].median_us
    rows = []
    for what, allocate, free in (("cudaMalloc", gpu.malloc, gpu.free), ("cudaMallocAsync", gpu.malloc_async, gpu.free_async)):
        for size in sizes:
            if size > gpu.free_bytes // 2:
                continue
            _pairs(allocate, free, size, 3)
            made, freed = _pairs(allocate, free, size, repeats if size < GIB else max(repeats // 5, 1))
            gpu.synchronize()
            rows.append({
                "what": what, "size_bytes": size, "alloc_us": made.median_us - empty, "alloc_low_us": made.low_us - empty, "alloc_high_us": made.high_us - empty,
                "free_us": freed.median_us - empty, "free_low_us": freed.low_us - empty, "free_high_us": freed.high_us - empty, "repeats": len(made.all_us),
            })  # fmt: skip
    return rows


def _pairs(allocate: Callable[[int], Any], free: Callable[[Any], Any], size: int, repeats: int) -> tuple[_device.Times, _device.Times]:
    made, freed = [], []
    for _ in range(repeats):
        a = time.perf_counter()
        pointer = allocate(size)
        b = time.perf_counter()
        free(pointer)
        made.append((b - a) * 1e6)
        freed.append((time.perf_counter() - b) * 1e6)
    return _device.Times(tuple(made)), _device.Times(tuple(freed))


# ---------------------------------------------------------------------- unified memory
def _read_into(sums: list[int], host: Any) -> None:
    sums.append(int(host.sum(dtype=np.uint64)))


def measure_unified(gpu: _device.Gpu, size_bytes: int = MOST_MANAGED, rounds: int = 3) -> list[dict[str, Any]]:
    """Touch managed memory on the GPU when its pages are on the host, when they are on the GPU, and read it back on the host.

    Raises
    ------
    NbmemprofError
        More than 64 MiB: managed memory beyond what a card has free can stop the card for everybody.
    """
    if size_bytes > MOST_MANAGED:
        raise NbmemprofError(f"The probe of unified memory uses at most {format_bytes(MOST_MANAGED)}; {format_bytes(size_bytes)} were asked for. Ask for less: the rates don't change with size.")
    device, host = gpu.managed(size_bytes)
    n = np.uint64(size_bytes // 4)
    truth = _device.mixed(np, size_bytes // 4)
    steps: dict[str, list[float]] = {}

    def timed(name: str, run: Callable[[], Any]) -> None:
        gpu.synchronize()
        begin = time.perf_counter()
        run()
        gpu.synchronize()
        steps.setdefault(name, []).append((time.perf_counter() - begin) * 1e6)

    def touch() -> None:
        gpu.launch("touch", "touch", gpu.multiprocessors * 8, 256, device, n, np.uint32(1))

    host[:] = truth
    right = True
    for turn in range(rounds + 1):
        timed("GPU touches pages on the host, first time" if turn == 0 else "GPU touches pages on the host", touch)
        timed("GPU touches pages on the GPU", touch)
        truth = truth + np.uint32(2)
        back: list[int] = []
        timed("host reads pages on the GPU", partial(_read_into, back, host))
        right = right and back[0] == int(truth.sum(dtype=np.uint64)) and bool((host == truth).all())
        host[:] = truth  # all pages are on the host again
    rows = []
    for name, took in steps.items():
        times = _device.Times(tuple(took))
        rows.append({
            "what": name, "size_bytes": size_bytes, "achieved_bytes_per_s": size_bytes / times.median_us * 1e6, "median_us": times.median_us, "low_us": times.low_us,
            "high_us": times.high_us, "repeats": len(took), "verified": right,
        })  # fmt: skip
    return rows
