"""What a watch reads: counters that cost microseconds. No peak counter is reset, no CUDA context is made."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from nbmemprof import _optional

__all__ = ["HOST", "Readings", "limits", "read", "rss_bytes"]

HOST = "host"
Readings = dict[str, dict[str, float]]  # device ("0", "host") to gauge to value
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_COUNTERS = {"allocated_bytes": "allocated_bytes", "reserved_bytes": "reserved_bytes", "requested_bytes": "requested_bytes", "active_bytes": "active_bytes"}
_NO_LIMIT = 1 << 60


def rss_bytes() -> int | None:
    """Memory of this process on the host now."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:  # noqa: PTH123 - half the time of Path.read_bytes, many times a second
            return int(file.read(256).split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return None


def read() -> Readings:
    """Host memory, and torch's counters of each device where CUDA is in use."""
    found: Readings = {}
    rss = rss_bytes()
    if rss is not None:
        found[HOST] = {"rss_bytes": float(rss)}
    torch = _in_use()
    for device in range(torch.cuda.device_count()) if torch is not None else ():
        stats = torch._C._cuda_memoryStats(device)
        if not stats["reserved_bytes"]["all"]["peak"]:
            continue  # nothing of this process is there
        row = {gauge: float(stats[name]["all"]["current"]) for name, gauge in _COUNTERS.items() if name in stats}
        row["allocated_peak_bytes"] = float(stats["allocated_bytes"]["all"]["peak"])
        row["live_blocks"] = float(stats["allocation"]["all"]["current"])
        row["ooms"], row["retries"] = float(stats.get("num_ooms", 0)), float(stats.get("num_alloc_retries", 0))
        found[str(device)] = row
    return found


def limits(limit_bytes: int | None, host_limit_bytes: int | None) -> dict[str, int]:
    """Where each device and the host end: as the user says, else torch's memory fraction of the card, and the container's or machine's memory."""
    found = {HOST: host_limit_bytes or _host_limit()}
    torch = _in_use()
    for device in range(torch.cuda.device_count()) if torch is not None else ():
        found[str(device)] = limit_bytes or _device_limit(torch, device)
    return {device: value for device, value in found.items() if value}


def _in_use() -> Any:
    torch: Any = _optional.loaded("torch")
    cuda = getattr(torch, "cuda", None)  # a torch that is being imported has none yet
    try:
        return torch if cuda is not None and cuda.is_initialized() and hasattr(torch._C, "_cuda_memoryStats") else None
    except AttributeError:
        return None


def _device_limit(torch: Any, device: int) -> int:
    total = int(torch.cuda.get_device_properties(device).total_memory)
    ask = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    try:
        return int(total * float(ask(device))) if ask is not None else total
    except (RuntimeError, ValueError):  # an allocator without a fraction
        return total


def _host_limit() -> int | None:
    found = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            found.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * _PAGE)
    return min((value for value in found if 0 < value < _NO_LIMIT), default=None)
