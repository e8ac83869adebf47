"""What do bank conflicts cost, and do padding and swizzling cure them?"""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof import access
from nbmemprof.gpu import _device, twins

__all__ = ["COLUMNS", "measure"]

WARPS = 8
REPEATS = 2048
BYTES = 32 << 10
SIDE = 8192  # of the matrix that is transposed
THREADS = 256  # of a block that adds up
COLUMNS: dict[str, Any] = {
    "what": pl.String, "width": pl.Int64, "wavefronts": pl.Int64, "ways": pl.Int64, "cycles_per_load": pl.Float64, "cycles_per_wavefront": pl.Float64,
    "achieved_bytes_per_s": pl.Float64, "median_us": pl.Float64, "low_us": pl.Float64, "high_us": pl.Float64, "repeats": pl.Int64, "verified": pl.Boolean,
}  # fmt: skip


def _loops() -> list[tuple[str, access.SharedAccess]]:
    """Access patterns of the loop: strides, and a column of a matrix as it is, padded, swizzled."""
    found = [(f"stride {s}", _strided(s, width)) for width in (4, 8, 16) for s in (0, 1, 2, 3, 4, 8, 16, 32) if 31 * s * width + width <= BYTES]
    for width in (4, 8, 16):
        columns = 128 // width
        found += [
            ("column of rows of 128 B", _strided(columns, width)),
            ("… padded by one element", _strided(columns + 1, width)),
            ("… swizzled, column ^ row", access.shared_load([(t * columns + t % columns) * width for t in range(32)], width)),
        ]
    return found


def _strided(elements: int, width: int) -> access.SharedAccess:
    return access.shared_load([t * elements * width for t in range(32)], width)


def measure(gpu: _device.Gpu, repeats: int = 10) -> list[dict[str, Any]]:
    """Measure; a row a pattern of the loop, then whole kernels."""
    rows = [_loop(gpu, name, one, repeats) for name, one in _loops()]
    rows += [_transposed(gpu, kind, repeats) for kind in ("naive", "tiled", "padded", "swizzled")]
    return rows + [_reduced(gpu, kind, repeats) for kind in ("strided", "halves")]


def _loop(gpu: _device.Gpu, name: str, one: access.SharedAccess, repeats: int) -> dict[str, Any]:
    xp, blocks = gpu.xp, gpu.multiprocessors
    fill = gpu.words(BYTES // 4)
    places = xp.asarray(np.array([0 if a is None else a for a in one.addresses], np.int32))
    cycles = gpu.poisoned(blocks * WARPS, np.int64)
    sums, check = gpu.poisoned(blocks * WARPS * 32, np.uint32), gpu.poisoned(blocks * WARPS * 32, np.uint32)
    args = (places, fill, np.int32(BYTES), np.int32(REPEATS), np.int32(0), cycles)
    took = []
    for _ in range(repeats):
        gpu.launch("bank_conflicts", "shared_loads", blocks, WARPS * 32, *args, sums, shared=BYTES, WIDTH=one.width)
        gpu.synchronize()
        took.append(float(xp.median(cycles)) / (REPEATS * WARPS))
    twins.TWINS["bank_conflicts", "shared_loads"](xp, *args, check, WIDTH=one.width)
    each = _device.Times(tuple(took))
    return {
        "what": name, "width": one.width, "wavefronts": one.wavefronts, "ways": one.ways, "cycles_per_load": each.median_us,
        "cycles_per_wavefront": each.median_us / one.wavefronts, "repeats": repeats, "verified": twins.same(xp, sums, check),
    }  # fmt: skip


def _transposed(gpu: _device.Gpu, kind: str, repeats: int) -> dict[str, Any]:
    """Wavefronts are those of the column that is read from the tile, sectors being ideal but in the naive one."""
    pitch = {"naive": None, "tiled": 32, "padded": 33, "swizzled": 33}[kind]  # a swizzled column lies as a padded one does
    one = None if pitch is None else _strided(pitch, 4)
    side = SIDE
    while 2 * side * side * 4 > gpu.free_bytes // 4 and side > 64:
        side //= 2
    source, out, check = gpu.reals(side * side), gpu.poisoned(side * side, np.float32), gpu.poisoned(side * side, np.float32)
    name = f"transpose_{kind}"
    times = gpu.time(lambda: gpu.launch("transpose", name, (side // 32, side // 32), (32, 8), source, out, np.int32(side)), repeats)
    twins.TWINS["transpose", name](gpu.xp, source, check, np.int32(side))
    return {
        "what": f"transpose, {kind}", "width": 4, "wavefronts": one and one.wavefronts, "ways": one and one.ways, "achieved_bytes_per_s": 2 * source.nbytes / times.median_us * 1e6,
        "median_us": times.median_us, "low_us": times.low_us, "high_us": times.high_us, "repeats": repeats, "verified": twins.same(gpu.xp, out, check),
    }  # fmt: skip


def _reduced(gpu: _device.Gpu, kind: str, repeats: int) -> dict[str, Any]:
    """Wavefronts and ways of the worst step."""
    blocks, rounds = gpu.multiprocessors * 8, 32
    source = gpu.words(rounds * blocks * THREADS)
    sums, check = gpu.poisoned(blocks, np.uint32), gpu.poisoned(blocks, np.uint32)
    name = f"reduce_{kind}"
    times = gpu.time(lambda: gpu.launch("reduction", name, blocks, THREADS, source, sums, np.int32(rounds), shared=4 * THREADS), repeats)
    twins.TWINS["reduction", name](gpu.xp, source, check, np.int32(rounds))
    steps = [1 << k for k in range(THREADS.bit_length() - 1)]
    worst = max(
        (access.shared_load([4 * 2 * s * t for t in range(32) if 2 * s * t < THREADS] if kind == "strided" else [4 * t for t in range(min(32, s))]) for s in steps),
        key=lambda one: one.ways,
    )
    return {
        "what": f"reduction, {kind}", "width": 4, "wavefronts": worst.wavefronts, "ways": worst.ways, "achieved_bytes_per_s": source.nbytes / times.median_us * 1e6,
        "median_us": times.median_us, "low_us": times.low_us, "high_us": times.high_us, "repeats": repeats, "verified": twins.same(gpu.xp, sums, check),
    }  # fmt: skip
