"""Parameter blocks of CUPTI's range profiler and profiler host, as ``ctypes`` structures.

Layouts: ``cupti_profiler_target.h``, ``cupti_range_profiler.h``, ``cupti_profiler_host.h``, ``cupti_target.h`` and ``cupti_callbacks.h`` of
CUPTI 13.0.85 (the range profiler exists since CUDA 12.6). Every block begins with its size and a private pointer; the size that CUPTI
expects ends with the last member (``CUPTI_PROFILER_STRUCT_SIZE``): padding behind it doesn't count.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from typing import Any

__all__ = ["AUTO_RANGE", "BLOCKS", "KERNEL_REPLAY", "SUPPORTED", "LaunchData", "LaunchParams", "block", "block_size"]

AUTO_RANGE, USER_RANGE = 1, 2  # CUpti_ProfilerRange
KERNEL_REPLAY, USER_REPLAY = 2, 3  # CUpti_ProfilerReplayMode
SUPPORTED = 3  # CUpti_Profiler_Support_Level: 0 unknown, 1 unsupported, 2 disabled by the system, 3 supported

_NAMES = ctypes.POINTER(c_char_p)
_IMAGE = c_void_p

# function -> members after structSize and pPriv, in the header's order
_MEMBERS: dict[str, list[tuple[str, Any]]] = {
    "cuptiProfilerInitialize": [],
    "cuptiProfilerDeInitialize": [],
    "cuptiProfilerDeviceSupported": [
        ("device", c_int), ("supported", c_int), ("architecture", c_int), ("sli", c_int), ("vgpu", c_int),
        ("confidential", c_int), ("cmp", c_int), ("wsl", c_int), ("api", c_int),
    ],
    "cuptiDeviceGetChipName": [("index", c_size_t), ("chip", c_char_p)],
    "cuptiProfilerGetCounterAvailability": [("context", c_void_p), ("size", c_size_t), ("image", _IMAGE)],
    "cuptiProfilerHostInitialize": [("kind", c_int), ("chip", c_char_p), ("availability", _IMAGE), ("host", c_void_p)],
    "cuptiProfilerHostDeinitialize": [("host", c_void_p)],
    "cuptiProfilerHostGetMetricProperties": [
        ("host", c_void_p), ("metric", c_char_p), ("description", c_char_p), ("unit", c_char_p), ("dimension", c_char_p), ("kind", c_int),
    ],
    "cuptiProfilerHostConfigAddMetrics": [("host", c_void_p), ("metrics", _NAMES), ("count", c_size_t)],
    "cuptiProfilerHostGetConfigImageSize": [("host", c_void_p), ("size", c_size_t)],
    "cuptiProfilerHostGetConfigImage": [("host", c_void_p), ("size", c_size_t), ("image", _IMAGE)],
    "cuptiProfilerHostGetNumOfPasses": [("size", c_size_t), ("image", _IMAGE), ("passes", c_size_t)],
    "cuptiProfilerHostEvaluateToGpuValues": [
        ("host", c_void_p), ("data", _IMAGE), ("size", c_size_t), ("range", c_size_t), ("metrics", _NAMES), ("count", c_size_t), ("values", ctypes.POINTER(c_double)),
    ],
    "cuptiRangeProfilerEnable": [("context", c_void_p), ("profiler", c_void_p)],
    "cuptiRangeProfilerDisable": [("profiler", c_void_p)],
    "cuptiRangeProfilerGetCounterDataSize": [
        ("profiler", c_void_p), ("metrics", _NAMES), ("count", c_size_t), ("ranges", c_size_t), ("nodes", c_uint32), ("size", c_size_t),
    ],
    "cuptiRangeProfilerCounterDataImageInitialize": [("profiler", c_void_p), ("size", c_size_t), ("data", _IMAGE)],
    "cuptiRangeProfilerSetConfig": [
        ("profiler", c_void_p), ("config_size", c_size_t), ("config", _IMAGE), ("size", c_size_t), ("data", _IMAGE), ("range", c_int), ("replay", c_int),
        ("ranges", c_size_t), ("levels", c_uint16), ("first_level", c_uint16), ("pass_index", c_size_t), ("target_level", c_uint16),
    ],
    "cuptiRangeProfilerStart": [("profiler", c_void_p)],
    "cuptiRangeProfilerStop": [("profiler", c_void_p), ("pass_index", c_size_t), ("target_level", c_size_t), ("all_submitted", c_uint8)],
    "cuptiRangeProfilerDecodeData": [("profiler", c_void_p), ("dropped", c_size_t)],
    "cuptiRangeProfilerGetCounterDataInfo": [("data", _IMAGE), ("size", c_size_t), ("ranges", c_size_t)],
    "cuptiRangeProfilerCounterDataGetRangeInfo": [("data", _IMAGE), ("size", c_size_t), ("range", c_size_t), ("delimiter", c_char_p), ("name", c_char_p)],
}  # fmt: skip

BLOCKS: dict[str, type[ctypes.Structure]] = {
    name: type(name, (ctypes.Structure,), {"_fields_": [("structSize", c_size_t), ("pPriv", c_void_p), *members]}) for name, members in _MEMBERS.items()
}


def block_size(name: str) -> int:
    """``structSize`` of a function's block: where its last member ends, padding left out."""
    kind = BLOCKS[name]
    last, dtype = kind._fields_[-1][:2]
    return int(getattr(kind, last).offset) + ctypes.sizeof(dtype)


def block(name: str, **members: Any) -> Any:
    """The parameter block of a function, its size filled in."""
    return BLOCKS[name](structSize=block_size(name), pPriv=None, **members)


class LaunchData(ctypes.Structure):
    """``CUpti_CallbackData``: what a driver callback is told."""

    _fields_ = (
        ("site", c_int),  # 0 enter, 1 exit
        ("function", c_char_p),
        ("params", c_void_p),
        ("result", c_void_p),
        ("symbol", c_char_p),
        ("context", c_void_p),
        ("context_uid", c_uint32),
        ("correlation_data", c_void_p),
        ("correlation_id", c_uint32),
    )


class LaunchParams(ctypes.Structure):
    """``cuLaunchKernel_params`` up to the stream; the cooperative launch begins alike. ``CUlaunchConfig`` has the same without the function."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared_bytes", c_uint32),
        ("stream", c_void_p),
    )


class LaunchConfig(ctypes.Structure):
    """``CUlaunchConfig`` up to the stream: what ``cuLaunchKernelEx`` is given a pointer to."""

    _fields_ = (("grid", c_uint32 * 3), ("block", c_uint32 * 3), ("shared_bytes", c_uint32), ("stream", c_void_p))
