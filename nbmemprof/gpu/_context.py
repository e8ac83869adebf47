"""The CUDA context that this thread works in, by the driver library: what CUPTI has to be told."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from nbmemprof import _optional
from nbmemprof.errors import NotRecording

__all__ = ["Context", "current"]

_LIBRARIES = ("libcuda.so.1", "nvcuda.dll")


@dataclass(frozen=True)
class Context:
    """``CUcontext`` as an integer, its device's ordinal and name, and a way to wait for it."""

    handle: int
    device: int
    name: str
    driver: Any

    def synchronize(self) -> int:
        """Wait for all work in it; CUDA's result (0: done)."""
        return int(self.driver.cuCtxSynchronize())


def _driver() -> Any:
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NotRecording("Hardware counters need an NVIDIA GPU, and this machine has no NVIDIA driver (no libcuda.so.1). The access model (mp.access) and the shipped recordings of mp.probes work here.")


def current(driver: Any = None) -> Context:
    """The context that torch, CuPy or numba works in on this thread; the first device's own where none is current yet.

    Raises
    ------
    NotRecording
        Where there is no driver, no device, or the device can't be used.
    """
    cuda = driver or _driver()
    if code := cuda.cuInit(0):
        raise NotRecording(f"Hardware counters need an NVIDIA GPU, and the driver found none that it can use (cuInit: error {code}). nvidia-smi tells whether it sees one.")
    handle, device = ctypes.c_void_p(), ctypes.c_int()
    cuda.cuCtxGetCurrent(ctypes.byref(handle))
    if not handle.value:
        torch = _optional.loaded("torch")
        ordinal = torch.cuda.current_device() if torch is not None and torch.cuda.is_available() else 0
        if (code := cuda.cuDeviceGet(ctypes.byref(device), ordinal)) or (code := cuda.cuDevicePrimaryCtxRetain(ctypes.byref(handle), device)):
            raise NotRecording(f"GPU {ordinal} can't be used (CUDA error {code}). nvidia-smi tells its state.")
        cuda.cuCtxSetCurrent(handle)
    cuda.cuCtxGetDevice(ctypes.byref(device))
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, len(name), device)
    return Context(int(handle.value or 0), int(device.value), name.value.decode(errors="replace"), cuda)
