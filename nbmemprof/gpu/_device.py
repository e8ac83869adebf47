"""The GPU as probes see it: arrays, launches, times; and whether there is one."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nbmemprof import _optional
from nbmemprof.gpu import _loader

__all__ = ["CupyGpu", "Gpu", "Times", "find"]

# bytes a second, from NVIDIA's data sheets
DATASHEET = {
    "NVIDIA H200": 4.8e12,
    "NVIDIA H100 80GB HBM3": 3.35e12,
    "NVIDIA H100 PCIe": 2.0e12,
    "NVIDIA A100-SXM4-80GB": 2.039e12,
    "NVIDIA A100-SXM4-40GB": 1.555e12,
    "NVIDIA L40S": 0.864e12,
    "NVIDIA GeForce RTX 4090": 1.008e12,
}
WARM_MS = 100  # idle clocks are low; the first launches only raise them


@dataclass(frozen=True)
class Times:
    """Durations of one thing measured several times, in microseconds."""

    all_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The middle."""
        return statistics.median(self.all_us)

    @property
    def low_us(self) -> float:
        """First quartile, or the least of fewer than four."""
        return statistics.quantiles(self.all_us, n=4, method="inclusive")[0] if len(self.all_us) > 3 else min(self.all_us)

    @property
    def high_us(self) -> float:
        """Third quartile, or the most of fewer than four."""
        return statistics.quantiles(self.all_us, n=4, method="inclusive")[2] if len(self.all_us) > 3 else max(self.all_us)


class Gpu(Protocol):
    """What a probe asks of a GPU. ``xp`` is NumPy's interface to its arrays; a launch takes such arrays and NumPy scalars."""

    xp: Any
    name: str
    multiprocessors: int
    l2_bytes: int
    theory_bytes_per_s: float | None
    clock_hz: float | None
    versions: dict[str, str]

    @property
    def free_bytes(self) -> int: ...
    def launch(self, file: str, kernel: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any, shared: int = 0, **macros: int) -> None: ...
    def time(self, run: Callable[[], Any], repeats: int = 10) -> Times: ...
    def wall(self, run: Callable[[], Any], repeats: int = 10) -> Times: ...
    def memory(self) -> AbstractContextManager[None]: ...
    def synchronize(self) -> None: ...
    def words(self, n: int) -> Any: ...
    def reals(self, n: int) -> Any: ...
    def poisoned(self, n: int, dtype: Any) -> Any: ...
    def pinned(self, nbytes: int) -> Any: ...
    def copy(self, target: Any, source: Any) -> None: ...
    def register(self, host: Any) -> None: ...
    def unregister(self, host: Any) -> None: ...
    def malloc(self, nbytes: int) -> Any: ...
    def free(self, pointer: Any) -> None: ...
    def malloc_async(self, nbytes: int) -> Any: ...
    def free_async(self, pointer: Any) -> None: ...
    def managed(self, nbytes: int) -> tuple[Any, Any]: ...


def mixed(xp: Any, n: int) -> Any:
    """Words that look random: the integer hash "lowbias32" (Chris Wellons) of their places."""
    found = xp.arange(n, dtype=xp.uint32)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        found ^= found >> xp.uint32(shift)
        found *= xp.uint32(factor)
    found ^= found >> xp.uint32(16)
    return found


def mixed_reals(xp: Any, n: int) -> Any:
    """Floats in [1, 2) with random mantissas."""
    found = mixed(xp, n)
    found >>= xp.uint32(9)
    found |= xp.uint32(0x3F800000)
    return found.view(xp.float32)


class CupyGpu:
    """The current device, through CuPy."""

    def __init__(self) -> None:
        self.xp = cupy = _optional.require("cupy", feature="A probe")
        self._runtime = runtime = cupy.cuda.runtime
        properties = runtime.getDeviceProperties(runtime.getDevice())
        self.name = properties["name"].decode()
        self.multiprocessors = int(properties["multiProcessorCount"])
        self.l2_bytes = int(properties["l2CacheSize"])
        self.theory_bytes_per_s = self._theory()
        self.clock_hz = self._attribute(13, 1e3)
        self.versions = {"cupy": cupy.__version__, "cuda_driver": str(runtime.driverGetVersion()), "cuda_runtime": str(runtime.runtimeGetVersion()), **_kernel_module()}
        self._warm = False

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Take what is allocated inside from a pool of its own, and give it back to the driver at the end: the user's pool stays as it was."""
        pool = self.xp.cuda.MemoryPool()
        try:
            with self.xp.cuda.using_allocator(pool.malloc):
                yield
        finally:
            pool.free_all_blocks()

    @property
    def free_bytes(self) -> int:
        """Memory that no one uses."""
        return int(self._runtime.memGetInfo()[0])

    def _attribute(self, number: int, factor: float) -> float | None:
        try:
            return float(self._runtime.deviceGetAttribute(number, self._runtime.getDevice())) * factor or None
        except self._runtime.CUDARuntimeError:  # a driver without this attribute
            return None

    def _theory(self) -> float | None:
        """Memory clock (attribute 36, kHz) × 2 for double data rate × bus width (attribute 37, bits)."""
        clock, bits = self._attribute(36, 1e3), self._attribute(37, 1.0)
        return clock * 2 * bits / 8 if clock and bits else None

    def launch(self, file: str, kernel: str, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: Any, shared: int = 0, **macros: int) -> None:
        """Launch device code of ``kernels/FILE.cu``."""
        compiled = _loader.kernel(file, kernel, **macros)
        if shared > 48 << 10 and compiled.max_dynamic_shared_size_bytes < shared:
            compiled.max_dynamic_shared_size_bytes = shared  # above 48 KiB a kernel has to ask
        compiled(grid if isinstance(grid, tuple) else (grid,), block if isinstance(block, tuple) else (block,), args, shared_mem=shared)

    def time(self, run: Callable[[], Any], repeats: int = 10) -> Times:
        """Time ``run`` on the GPU by events, one launch after the other without a gap: the host is ahead all the time."""
        event, elapsed = self.xp.cuda.Event, self.xp.cuda.get_elapsed_time
        if not self._warm:
            self._warm = True
            end = time.perf_counter() + WARM_MS / 1e3
            while time.perf_counter() < end:
                run()
                self.synchronize()
        for _ in range(3):
            run()
        marks = [event() for _ in range(repeats + 1)]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        marks[-1].synchronize()
        return Times(tuple(elapsed(a, b) * 1e3 for a, b in itertools.pairwise(marks)))

    def wall(self, run: Callable[[], Any], repeats: int = 10) -> Times:
        """Time ``run`` and the wait for its end on the host's clock, after one that isn't counted."""
        found = []
        for _ in range(repeats + 1):
            self.synchronize()
            begin = time.perf_counter()
            run()
            self.synchronize()
            found.append((time.perf_counter() - begin) * 1e6)
        return Times(tuple(found[1:]))

    def synchronize(self) -> None:
        """Wait until the GPU has nothing to do."""
        self._runtime.deviceSynchronize()

    def words(self, n: int) -> Any:
        """Random 32-bit words."""
        return mixed(self.xp, n)

    def reals(self, n: int) -> Any:
        """Random 32-bit floats in [1, 2)."""
        return mixed_reals(self.xp, n)

    def poisoned(self, n: int, dtype: Any) -> Any:
        """Memory filled with a value that no result has."""
        found = self.xp.empty(n, dtype)
        self._runtime.memset(found.data.ptr, 0xA5, found.nbytes)
        return found

    def pinned(self, nbytes: int) -> Any:
        """Page-locked host memory."""
        import numpy as np

        cuda = self.xp.cuda  # not from CuPy's pool, which would keep it
        return np.frombuffer(cuda.PinnedMemoryPointer(cuda.PinnedMemory(nbytes), 0), np.uint8, nbytes)

    def copy(self, target: Any, source: Any) -> None:
        """``cudaMemcpyAsync`` between host (NumPy) and device (CuPy), either way, or on the device."""
        address = [x.data.ptr if hasattr(x, "device") and hasattr(x.data, "ptr") else x.ctypes.data for x in (target, source)]
        self._runtime.memcpyAsync(*address, source.nbytes, 4, self.xp.cuda.get_current_stream().ptr)  # 4: direction by address

    def register(self, host: Any) -> None:
        """``cudaHostRegister``: lock pages that are there already."""
        self._runtime.hostRegister(host.ctypes.data, host.nbytes, 0)

    def unregister(self, host: Any) -> None:
        """``cudaHostUnregister``."""
        self._runtime.hostUnregister(host.ctypes.data)

    def malloc(self, nbytes: int) -> Any:
        """``cudaMalloc``."""
        return self._runtime.malloc(nbytes)

    def free(self, pointer: Any) -> None:
        """``cudaFree``."""
        self._runtime.free(pointer)

    def malloc_async(self, nbytes: int) -> Any:
        """``cudaMallocAsync`` on the current stream."""
        return self._runtime.mallocAsync(nbytes, self.xp.cuda.get_current_stream().ptr)

    def free_async(self, pointer: Any) -> None:
        """``cudaFreeAsync`` on the current stream."""
        self._runtime.freeAsync(pointer, self.xp.cuda.get_current_stream().ptr)

    def managed(self, nbytes: int) -> tuple[Any, Any]:
        """``cudaMallocManaged``: the same words as the device and as the host see them; given back with the device's array."""
        import ctypes

        import numpy as np

        memory = self.xp.cuda.malloc_managed(nbytes)
        device = self.xp.ndarray(nbytes // 4, self.xp.uint32, memory)
        host = np.ctypeslib.as_array(ctypes.cast(memory.ptr, ctypes.POINTER(ctypes.c_uint32)), (nbytes // 4,))
        return device, host


def _kernel_module() -> dict[str, str]:
    """Version of NVIDIA's kernel module, where Linux tells it."""
    try:
        found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
    except OSError:
        return {}
    return {"driver": found[1]} if found else {}


def find() -> Gpu | None:
    """Return the GPU at hand, or None: no CuPy, no driver, no device."""
    try:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() < 1:
            return None
    except Exception:  # whatever CuPy raises without a driver: there is no GPU to probe
        return None
    return CupyGpu()
