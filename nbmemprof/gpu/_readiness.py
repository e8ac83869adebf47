"""Can kernels be counted here? Looked up without starting anything: no CUDA call, no library loaded."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nbmemprof.gpu import _cupti

__all__ = ["is_locked", "reason"]

_PARAMS = "/proc/driver/nvidia/params"
_STATUS = "/proc/self/status"
_SYS_ADMIN = 21  # bit of CAP_SYS_ADMIN in the effective set (capability.h)


def is_locked(params: str = _PARAMS, status: str = _STATUS) -> bool:
    """Whether the driver gives counters to administrators only, and this process is none's."""
    try:
        admin_only = re.search(r"RmProfilingAdminOnly:\s*1", Path(params).read_text()) is not None
        effective = re.search(r"CapEff:\s*([0-9a-f]+)", Path(status).read_text())
    except OSError:
        return False  # not told: trying tells
    able = effective is not None and bool(int(effective.group(1), 16) >> _SYS_ADMIN & 1)
    return admin_only and not able and os.geteuid() != 0


def reason(params: str = _PARAMS, status: str = _STATUS) -> str | None:
    """Why kernels can't be counted here, in one sentence with what to do; None where nothing speaks against it."""
    if not Path(params).exists() and not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return "there is no NVIDIA GPU here"
    if _cupti.find_library() is None:
        return "no libcupti was found. pip install 'nvidia-cuda-cupti>=13,<14'"
    if is_locked(params, status):
        return _cupti.LOCKED
    return None
