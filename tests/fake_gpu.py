"""A GPU made of NumPy: kernels are their twins, times come from a simple law. It runs every line of the probes but CuPy's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from nbmemprof.gpu import _device, twins


class FakeGpu:
    xp = np
    name = "NVIDIA H200"
    multiprocessors = 4
    l2_bytes = 1 << 16
    free_bytes = 1 << 26
    theory_bytes_per_s = 4.8e12
    clock_hz = 1.98e9
    versions = {"fake": "1"}

    def __init__(self, broken: str = "") -> None:
        self.broken = broken  # a kernel that changes one bit of its output
        self.launches: list[tuple[str, str, Any, Any, dict[str, int]]] = []
        self.held: dict[int, int] = {}
        self.locked: list[int] = []

    def launch(self, file: str, kernel: str, grid: Any, block: Any, *args: Any, shared: int = 0, **macros: int) -> None:
        self.launches.append((file, kernel, grid, block, macros))
        threads = int(np.prod(grid)) * int(np.prod(block))
        known = {"WIDTH": macros["WIDTH"]} if kernel == "shared_loads" else {}
        twins.TWINS[file, kernel](np, *args, **known)
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        if kernel in ("chase", "line_latency"):
            out, hops = args[-1], int(args[-2])
            if kernel == "chase":
                out[:2] = hops * 40, hops * 20
            else:
                out[:] = np.where(out < 0, -1, hops * (200 + 10 * (np.arange(len(out)) % 7)))
        if kernel == "shared_loads":
            args[5][:] = 2048 * 8 * 3
        if kernel == self.broken:
            (args[-1][2:] if kernel == "chase" else arrays[-1]).view(np.uint32)[0] ^= 1
        self.took = 100.0 + sum(a.nbytes for a in arrays) / 1e3 / (1 + macros.get("UNROLL", 1) / 100) + abs(threads - 4096) * 1e-6

    def time(self, run: Callable[[], Any], repeats: int = 10) -> _device.Times:
        run()
        return _device.Times(tuple(self.took + k for k in range(repeats)))

    def wall(self, run: Callable[[], Any], repeats: int = 10) -> _device.Times:
        run()
        return _device.Times((5.0,) * repeats)

    @contextmanager
    def memory(self):
        self.inside = True
        try:
            yield
        finally:
            self.inside = False

    def synchronize(self) -> None: ...

    def words(self, n: int) -> Any:
        return _device.mixed(np, n)

    def reals(self, n: int) -> Any:
        return _device.mixed_reals(np, n)

    def poisoned(self, n: int, dtype: Any) -> Any:
        return np.frombuffer(bytearray(b"\xa5") * (n * np.dtype(dtype).itemsize), dtype)

    def pinned(self, nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    def copy(self, target: Any, source: Any) -> None:
        target[:] = source
        if self.broken == "copy to host":
            target[-1] = 7

    def register(self, host: Any) -> None:
        self.locked.append(host.nbytes)

    def unregister(self, host: Any) -> None:
        self.locked.remove(host.nbytes)

    def malloc(self, nbytes: int) -> Any:
        self.held[len(self.held) + 1] = nbytes
        return len(self.held)

    def free(self, pointer: Any) -> None:
        del self.held[pointer]

    malloc_async, free_async = malloc, free

    def managed(self, nbytes: int) -> tuple[Any, Any]:
        memory = np.zeros(nbytes // 4, np.uint32)
        return memory, memory
