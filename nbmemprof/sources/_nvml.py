"""Ask the driver (NVML, by ctypes) how many bytes this process holds on a device."""

from __future__ import annotations

import ctypes
import os
from functools import cache

__all__ = ["process_bytes"]

_TRY_AGAIN = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_NOT_TOLD = (1 << 64) - 1


class _Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def process_bytes(uuid: str | None, pid: int | None = None) -> int | None:
    """Device bytes of this process; None where the driver doesn't tell.

    In a container the driver's process ids are the host's: a process that is alone on the device is taken for this one.
    """
    library = _library()
    if library is None or not uuid:
        return None
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    handle = ctypes.c_void_p()
    try:
        if library.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle)):
            return None
        for room in (64, 4096):
            count, rows = ctypes.c_uint(room), (_Process * room)()
            answer = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), rows)
            if answer != _TRY_AGAIN:
                break
        if answer:
            return None
    except AttributeError:
        return None
    return _mine([(r.pid, r.used) for r in rows[: count.value]], os.getpid() if pid is None else pid)


def _mine(rows: list[tuple[int, int]], pid: int) -> int | None:
    found = [used for owner, used in rows if owner == pid] or ([rows[0][1]] if len(rows) == 1 else [])
    return found[0] if found and found[0] != _NOT_TOLD else None
