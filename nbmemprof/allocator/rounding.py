"""How the caching allocator rounds a request (c10/core/AllocatorConfig.h, CUDACachingAllocator.cpp, unchanged in torch 2.6 to 2.13)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["BUCKETS", "LARGE_BUFFER", "MIN_BLOCK", "MIN_LARGE_ALLOC", "ROUND_LARGE", "SMALL_BUFFER", "SMALL_SIZE", "divisions_of", "round_sizes"]

MIN_BLOCK = 512
SMALL_SIZE = 1 << 20
SMALL_BUFFER = 2 << 20
LARGE_BUFFER = 20 << 20
MIN_LARGE_ALLOC = 10 << 20
ROUND_LARGE = 2 << 20
BUCKETS = 16


def divisions_of(settings: Mapping[str, Any] | None) -> list[int]:
    """Read the 16 buckets of ``roundup_power2_divisions`` as a snapshot lists them (key: bucket start in MiB)."""
    table = (settings or {}).get("roundup_power2_divisions")
    found = [0] * BUCKETS
    if isinstance(table, Mapping):
        for key, value in table.items():
            if str(key).isdigit() and isinstance(value, int) and 0 < int(key) <= 1 << 15 and 0 < value <= 1 << 20:
                found[int(key).bit_length() - 1] = value
    return found


def round_sizes(requested: npt.NDArray[np.int64], divisions: list[int] | None = None) -> npt.NDArray[np.int64]:
    """Round requests to block sizes.

    Parameters
    ----------
    requested
        Bytes asked for, one a request; values below 0 count as 0.
    divisions
        ``roundup_power2_divisions`` for the 16 buckets that begin at 1 MiB; 0 and 1 mean plain rounding.

    Returns
    -------
    Bytes, a multiple of 512, at least 512.
    """
    n = np.maximum(requested, 0)
    plain: npt.NDArray[np.int64] = np.maximum((n + (MIN_BLOCK - 1)) // MIN_BLOCK * MIN_BLOCK, MIN_BLOCK)
    if not divisions or max(divisions) <= 1:
        return plain
    # exact integer log2: frexp of a float64 is exact below 2^53, above which no request is served
    log2 = np.frexp(np.maximum(n, 1).astype(np.float64))[1].astype(np.int64) - 1
    d = np.asarray(divisions, dtype=np.int64)[np.clip(log2 - 20, 0, BUCKETS - 1)]
    floor = np.int64(1) << log2
    step = floor >> (np.frexp(np.maximum(d, 1).astype(np.float64))[1].astype(np.int64) - 1)
    divided = np.where(n == floor, n, np.where(step == 0, 2 * floor, (n + step - 1) // np.maximum(step, 1) * np.maximum(step, 1)))
    return np.where((d > 1) & (n > MIN_BLOCK * d), divided, plain)
