"""How long does one load take, by the size of what is walked through; and how fast is a set that fits into the L2?"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.gpu import _device, twins

__all__ = ["COLUMNS", "SET_COLUMNS", "measure", "measure_sets"]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LINE_WORDS = 32  # one word of each line of 128 bytes is used
# what may answer, bytes, and who brought the lines there: the thread that walks, or all multiprocessors (then no line is met twice)
SIZES = (
    ("L1", 16 * KIB, "walk"), ("L1", 128 * KIB, "walk"), ("L2", 2 * MIB, "all"), ("L2", 16 * MIB, "all"), ("L2", 40 * MIB, "all"), ("L2", 2 * MIB, "walk"),
    ("L2", 16 * MIB, "walk"), ("L2", 40 * MIB, "walk"), ("L2", 256 * MIB, "all"), ("L2", 2 * GIB, "all"), ("L2", 8 * GIB, "all"),
)  # fmt: skip
HOPS = 32768
LINES = 256
SETS = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 128, 256, 512, 1024)  # MiB
COLUMNS: dict[str, Any] = {
    "what": pl.String, "size_bytes": pl.Int64, "through": pl.String, "brought_by": pl.String, "cycles": pl.Float64, "low_cycles": pl.Float64, "high_cycles": pl.Float64, "ns": pl.Float64,
    "hops": pl.Int64, "repeats": pl.Int64, "verified": pl.Boolean,
}  # fmt: skip
SET_COLUMNS: dict[str, Any] = {
    "size_bytes": pl.Int64, "achieved_bytes_per_s": pl.Float64, "ceiling_bytes_per_s": pl.Float64, "datasheet_bytes_per_s": pl.Float64, "median_us": pl.Float64, "low_us": pl.Float64,
    "high_us": pl.Float64, "rounds": pl.Int64, "grid": pl.Int64, "block": pl.Int64, "repeats": pl.Int64, "verified": pl.Boolean,
}  # fmt: skip


def measure(gpu: _device.Gpu, repeats: int = 7, most_bytes: int | None = None) -> list[dict[str, Any]]:
    """Measure; a row a size, then single lines of the L2: the nearest, the middle, the farthest."""
    most = gpu.free_bytes // 4 if most_bytes is None else most_bytes
    rows = [_chase(gpu, through, size, brought, repeats) for through, size, brought in SIZES if size <= most]
    return rows + _lines(gpu, repeats)


def _name(gpu: _device.Gpu, through: str, size: int, brought: str) -> str:
    if through == "L1":
        return "L1"
    if size < gpu.l2_bytes:
        return "L2" if brought == "all" else "L2, walked before"
    return "memory" if size <= 256 * MIB else "memory, many pages"


def _chase(gpu: _device.Gpu, through: str, size: int, brought: str, repeats: int) -> dict[str, Any]:
    xp, lines = gpu.xp, size // (4 * LINE_WORDS)
    order = xp.argsort(_device.mixed(xp, lines)).astype(np.uint32)
    order *= np.uint32(LINE_WORDS)
    following = xp.zeros(size // 4, np.uint32)
    following[order] = xp.roll(order, -1)
    warm = lines if brought == "walk" else 64
    hops = max(lines, 4096) if lines <= 4096 else min(lines - warm % lines, HOPS) // 16 * 16
    out = gpu.poisoned(3, np.int64)
    cycles, ns, right, at = [], [], True, 0
    for _ in range(repeats):
        if brought == "all":  # written by all: each line lies in one place of the L2, as far as it fits there
            gpu.launch("touch", "touch", gpu.multiprocessors * 8, 256, following, np.uint64(following.size), np.uint32(0))
        start = np.uint32(int(order[at % lines]))
        gpu.launch("latency", "chase", 1, 1, following, start, np.int32(warm), np.int32(hops), out, CACHED=int(through == "L1"))
        gpu.synchronize()
        took = [int(v) for v in out.tolist()]
        at += warm + hops
        right = right and took[2] == int(order[at % lines])
        cycles.append(took[0] / hops)
        ns.append(took[1] / hops)
    each = _device.Times(tuple(cycles))
    return {
        "what": _name(gpu, through, size, brought), "size_bytes": size, "through": through, "brought_by": brought, "cycles": each.median_us, "low_cycles": each.low_us,
        "high_cycles": each.high_us, "ns": _device.Times(tuple(ns)).median_us, "hops": hops, "repeats": repeats, "verified": right,
    }  # fmt: skip


def _lines(gpu: _device.Gpu, repeats: int) -> list[dict[str, Any]]:
    """Some lines lie in the half of the L2 that is next to the multiprocessor, others in the far one."""
    xp, hops, size = gpu.xp, 64, 8 * MIB
    following = xp.arange(size // 4, dtype=np.uint32)
    lines = _device.mixed(xp, LINES) % np.uint32(size // 4 // LINE_WORDS) * np.uint32(LINE_WORDS)
    out = gpu.poisoned(LINES, np.int64)
    found = []
    for _ in range(repeats):
        gpu.launch("latency", "line_latency", 1, 1, following, lines, np.int32(LINES), np.int32(hops), out, CACHED=0)
        gpu.synchronize()
        found.append([int(v) / hops for v in out.tolist()])
    middle = np.sort(np.median(np.array(found), axis=0))
    rows = []
    for name, share in (("L2, nearest lines", 0.05), ("L2, middle line", 0.5), ("L2, farthest lines", 0.95)):
        cycles = float(middle[int(share * (LINES - 1))])
        rows.append({
            "what": name, "size_bytes": size, "through": "L2", "brought_by": "walk", "cycles": cycles, "low_cycles": float(middle[0]), "high_cycles": float(middle[-1]),
            "ns": None if gpu.clock_hz is None else cycles / gpu.clock_hz * 1e9, "hops": hops, "repeats": repeats, "verified": bool((middle >= 0).all()),
        })  # fmt: skip
    return rows


def measure_sets(gpu: _device.Gpu, repeats: int = 7, moved_bytes: int = 4 * GIB) -> list[dict[str, Any]]:
    """Read sets of growing size again and again; a row a size."""
    xp, block = gpu.xp, 1024
    grid = gpu.multiprocessors * 2
    sums, check = gpu.poisoned(grid * block, np.uint32), gpu.poisoned(1, np.uint32)
    rows: list[dict[str, Any]] = []
    for size in (mib * MIB for mib in SETS):
        if size > gpu.free_bytes // 2:
            break
        source, n, rounds = gpu.words(size // 4), np.uint64(size // 16), max(2, moved_bytes // size)
        args = (source, sums, n, np.int32(rounds))
        times = gpu.time(partial(gpu.launch, "working_set", "reread", grid, block, *args), repeats)
        twins.TWINS["working_set", "reread"](xp, source, check, n, rounds)
        rows.append({
            "size_bytes": size, "achieved_bytes_per_s": rounds * size / times.median_us * 1e6, "datasheet_bytes_per_s": _device.DATASHEET.get(gpu.name), "median_us": times.median_us,
            "low_us": times.low_us, "high_us": times.high_us, "rounds": rounds, "grid": grid, "block": block, "repeats": repeats,
            "verified": twins.total(xp, sums) == int(check[0]),
        })  # fmt: skip
    ceiling = rows[-1]["achieved_bytes_per_s"]
    return [row | {"ceiling_bytes_per_s": ceiling} for row in rows]
