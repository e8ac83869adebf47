"""What lies on the device beside torch's allocator: asked of the driver, of CuPy, of torch's pinned memory; and which libraries were loaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from nbmemprof import _optional
from nbmemprof.sources import _nvml, _owners

__all__ = ["Outside", "Row"]

Row = tuple[str, str, str, float | None]  # kind, source, gauge, value
# what torch loads of a library when it is first used, and not before (torch 2.x for Linux: cuDNN 9 loads its parts, the linear algebra is a library of its own)
_LOADED = {"cudnn": ("libcudnn_ops", "libcudnn_engines", "libcudnn_cnn"), "cusolver": ("libtorch_cuda_linalg",)}
_RESERVED_NOW, _USED_NOW = 5, 7  # CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, CU_MEMPOOL_ATTR_USED_MEM_CURRENT


class Outside:
    """Asks; nothing here allocates on a device, and only ``touch`` makes a CUDA context."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def everywhere(self) -> dict[str, int]:
        """Bytes in use on every device of the machine, by uuid, before CUDA has begun."""
        return _nvml.everywhere()

    def used(self, device: int, uuid: str | None) -> int | None:
        """Bytes in use on a device by everybody, as the driver counts them."""
        found = _nvml.used_bytes(uuid)
        if found is not None:
            return found
        try:
            free, total = self._torch.cuda.mem_get_info(device)
        except Exception:  # a device without memory information, an old driver
            return None
        return int(total - free)

    def touch(self, device: int) -> None:
        """Have the device's context made."""
        self._torch.cuda.mem_get_info(device)

    def rows(self, device: int, uuid: str | None) -> Iterator[Row]:
        """Everything that takes longer to ask: processes, other pools."""
        processes = _nvml.processes(uuid)
        if processes is not None:
            mine = _nvml._mine(processes, os.getpid())
            known = mine is not None
            yield "device", "driver", "process_bytes", float(mine) if mine is not None else None
            yield "device", "driver", "others_bytes", float(sum(used for _, used in processes) - (mine or 0)) if known else None
            yield "device", "driver", "processes", float(len(processes))
        for source, total, used in (("cupy", *_cupy(device)), ("cudaMallocAsync", *_async_pool(device))):
            if total is not None:
                yield "device", source, "pool_bytes", float(total)
                yield "device", source, "pool_used_bytes", float(used) if used is not None else None

    def pinned(self) -> Iterator[Row]:
        """Page-locked host memory of torch: locked, in use, and what the tensors in it asked for."""
        ask = getattr(self._torch.cuda, "host_memory_stats", None)
        try:
            stats = ask() if ask is not None else {}
        except (RuntimeError, AttributeError):
            return
        # of the host allocator "allocated" is all it has locked, "active" what is given out (CachingHostAllocator.h); some versions count by pool too
        locked, active = (next((v for k, v in stats.items() if k.startswith(name) and k.endswith("current")), None) for name in ("allocated_bytes", "active_bytes"))
        if not locked:
            return
        yield "pinned", "torch", "locked_bytes", float(locked)
        yield "pinned", "torch", "in_use_bytes", float(active) if active is not None else None
        sizes = _owners.host_storages(self._torch, pinned=True).values()
        yield "pinned", "torch", "requested_bytes", float(sum(sizes))
        yield "pinned", "torch", "rounded_bytes", float(sum(1 << (size - 1).bit_length() for size in sizes))  # to a power of two (CachingHostAllocator.h)

    def libraries(self) -> dict[str, Any]:
        """Which libraries have been used in this process, as far as it shows; ``module_loading``: LAZY or EAGER."""
        found: dict[str, Any] = {"module_loading": os.environ.get("CUDA_MODULE_LOADING") or "LAZY"}
        maps = _maps()
        found |= {name: any(word in maps for word in words) for name, words in _LOADED.items()} if maps is not None else {}
        try:
            plans = self._torch.backends.cuda.cufft_plan_cache
            found["cufft"] = any(plans[d].size > 0 for d in range(self._torch.cuda.device_count()))
        except Exception:  # not every build has it
            found["cufft"] = None
        distributed = getattr(self._torch, "distributed", None)
        found["nccl"] = bool(distributed is not None and distributed.is_available() and distributed.is_initialized() and "nccl" in str(distributed.get_backend()))
        return found


def _maps() -> str | None:
    try:
        return Path("/proc/self/maps").read_text()
    except OSError:
        return None


def _cupy(device: int) -> tuple[int | None, int | None]:
    """Bytes that CuPy's default pool holds on a device, and those in use."""
    cupy: Any = _optional.loaded("cupy")
    if cupy is None or not hasattr(cupy, "get_default_memory_pool"):
        return None, None
    try:
        with cupy.cuda.Device(device):
            pool = cupy.get_default_memory_pool()
            return int(pool.total_bytes()), int(pool.used_bytes())
    except Exception:  # CuPy without a device
        return None, None


@cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _async_pool(device: int) -> tuple[int | None, int | None]:
    """Bytes that the device's default pool of ``cudaMallocAsync`` holds, and those in use; None where it holds nothing."""
    driver = _driver()
    if driver is None:
        return None, None
    handle, pool = ctypes.c_int(), ctypes.c_void_p()
    values = [ctypes.c_uint64(), ctypes.c_uint64()]
    try:
        if driver.cuDeviceGet(ctypes.byref(handle), device) or driver.cuDeviceGetDefaultMemPool(ctypes.byref(pool), handle):
            return None, None
        if any(driver.cuMemPoolGetAttribute(pool, which, ctypes.byref(value)) for which, value in zip((_RESERVED_NOW, _USED_NOW), values, strict=True)):
            return None, None
    except AttributeError:  # a driver before CUDA 11.2
        return None, None
    return (values[0].value, values[1].value) if values[0].value else (None, None)
