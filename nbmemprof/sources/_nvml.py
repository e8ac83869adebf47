"""Ask the driver (NVML, by ctypes) how many bytes are in use on a device, by whom, and how busy the device was."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from itertools import pairwise

__all__ = ["busy_fraction", "everywhere", "process_bytes", "processes", "used_bytes"]

_UTILIZATION = 1  # NVML_GPU_UTILIZATION_SAMPLES
_TRY_AGAIN = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_NOT_TOLD = (1 << 64) - 1


class _Memory(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("total", ctypes.c_ulonglong), ("reserved", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


_MEMORY_V2 = ctypes.sizeof(_Memory) | 2 << 24  # NVML's versions of a struct: its size and its number


class _Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


class _Sample(ctypes.Structure):
    _fields_ = [("time_us", ctypes.c_ulonglong), ("value", ctypes.c_uint), ("_rest", ctypes.c_uint)]


@cache  # the driver looks through all devices of the machine; a handle stays good
def _handle(library: ctypes.CDLL, uuid: str) -> ctypes.c_void_p | None:
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    handle = ctypes.c_void_p()
    return handle if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)) == 0 else None


def process_bytes(uuid: str | None, pid: int | None = None) -> int | None:
    """Device bytes of this process; None where the driver doesn't tell.

    In a container the driver's process ids are the host's: a process that is alone on the device is taken for this one.
    """
    rows = processes(uuid)
    return None if rows is None else _mine(rows, os.getpid() if pid is None else pid)


def processes(uuid: str | None) -> list[tuple[int, int]] | None:
    """Process id and bytes of each process that computes on a device; None where the driver doesn't tell."""
    library = _library()
    try:
        handle = _handle(library, uuid) if library is not None and uuid else None
        if library is None or handle is None:
            return None
        for room in (64, 4096):
            count, rows = ctypes.c_uint(room), (_Process * room)()
            answer = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), rows)
            if answer != _TRY_AGAIN:
                break
        return None if answer else [(r.pid, r.used) for r in rows[: count.value]]
    except AttributeError:  # a library that lacks the call
        return None


def _mine(rows: list[tuple[int, int]], pid: int) -> int | None:
    found = [used for owner, used in rows if owner == pid] or ([rows[0][1]] if len(rows) == 1 else [])
    return found[0] if found and found[0] != _NOT_TOLD else None


def used_bytes(uuid: str | None) -> int | None:
    """Bytes in use on a device by all processes, without what the driver sets aside for itself; None where it doesn't tell."""
    library = _library()
    handle = _handle(library, uuid) if library is not None and uuid else None
    return None if library is None or handle is None else _used(library, handle)


def _used(library: ctypes.CDLL, handle: ctypes.c_void_p) -> int | None:
    memory = _Memory(version=_MEMORY_V2)
    try:
        return int(memory.used) if library.nvmlDeviceGetMemoryInfo_v2(handle, ctypes.byref(memory)) == 0 else None
    except AttributeError:  # a library that lacks the call
        return None


def everywhere() -> dict[str, int]:
    """Bytes in use on every device of the machine, by uuid; makes no CUDA context."""
    library, count, found = _library(), ctypes.c_uint(), {}
    if library is None or library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return {}
    for index in range(count.value):
        handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) or library.nvmlDeviceGetUUID(handle, name, 96):
            continue
        used = _used(library, handle)
        if used is not None:
            found[name.value.decode(errors="replace").removeprefix("GPU-")] = used
    return found


def busy_fraction(uuid: str | None, since_us: float) -> float | None:
    """Share of the time since then (Unix µs) in which a kernel ran on the device, by the driver's own samples.

    None where it doesn't tell, or has fewer than six samples (it takes about six a second and keeps some twenty seconds):
    with fewer, the idle moments before and after would count for too much.
    """
    library = _library()
    try:
        handle = _handle(library, uuid) if library is not None and uuid else None
        if library is None or handle is None:
            return None
        kind, count = ctypes.c_int(), ctypes.c_uint(0)
        begin = ctypes.c_ulonglong(int(since_us))
        if library.nvmlDeviceGetSamples(handle, _UTILIZATION, begin, ctypes.byref(kind), ctypes.byref(count), None):
            return None
        rows = (_Sample * max(count.value, 1))()
        if library.nvmlDeviceGetSamples(handle, _UTILIZATION, begin, ctypes.byref(kind), ctypes.byref(count), rows):
            return None
    except AttributeError:
        return None
    return _mean([(r.time_us, r.value) for r in rows[: count.value]], since_us)


def _mean(samples: list[tuple[int, int]], since_us: float) -> float | None:
    """Mean of the percentages, without the sample that began before."""
    times = sorted(samples)
    whole = [value for (before, _), (_, value) in pairwise(times) if before >= since_us]
    return sum(whole) / len(whole) / 100 if len(whole) >= 6 else None
