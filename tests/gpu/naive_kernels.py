"""The kernels of the notebook that are to be diagnosed, and what mends each; imported, it makes their arrays, and ``run`` launches each once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import cupy

from nbmemprof.gpu import _loader


def _calls() -> list[tuple[str, Callable[[], Any]]]:
    side = int(os.environ.get("COUNTED_KERNELS_SIDE", 1 << 14))
    n = side * side
    x = cupy.random.default_rng(1).random(n, dtype=cupy.float32)
    y = cupy.zeros(n, dtype=cupy.float32)
    words, sums = x.view(cupy.uint32), cupy.zeros(132 * 16 * 256, dtype=cupy.uint32)
    tiles, block = (side // 32, side // 32), (32, 8)
    needle, keep_none = cupy.uint32(1), cupy.int32(0)

    def shipped(file: str, name: str, grid: tuple[int, ...], threads: tuple[int, ...], *arguments: Any, shared: int = 0) -> tuple[str, Callable[[], Any]]:
        function = _loader.kernel(file, name)
        return name, lambda: function(grid, threads, arguments, shared_mem=shared)

    quarter = cupy.uint64(n // 4)
    structures = [
        ("array of structures", shipped("coalescing", "structures", (132 * 16,), (256,), words, sums, quarter, cupy.int32(1), cupy.uint64(4), cupy.uint64(1), needle, keep_none)[1]),
        ("structure of arrays", shipped("coalescing", "structures", (132 * 16,), (256,), words, sums, quarter, cupy.int32(1), cupy.uint64(1), quarter, needle, keep_none)[1]),
    ]
    rounds = cupy.int32(n // (132 * 8 * 256))
    return [
        *(shipped("transpose", f"transpose_{kind}", tiles, block, x, y, cupy.int32(side)) for kind in ("naive", "tiled", "padded", "swizzled")),
        *structures,
        *(shipped("reduction", f"reduce_{kind}", (132 * 8,), (256,), words, sums, rounds, shared=1024) for kind in ("strided", "halves")),
    ]


CALLS = _calls()


def run() -> None:
    """Launch each kernel once."""
    for _, call in CALLS:
        call()


run()  # compiled and loaded
cupy.cuda.Device().synchronize()
