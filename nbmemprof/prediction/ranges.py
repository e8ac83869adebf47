"""How far a prediction may be off: the requests once more with the smallest and the largest sizes, and a margin for what had to be assumed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nbmemprof.prediction.recorder import Record

__all__ = ["MARGINS", "Margin", "bounds"]

Margin = tuple[float, float, float, float]  # allocated down and up, reserved down and up, as parts of the prediction

# what is left where every size is known: 45 workloads on an H200 were within 0.2 % (allocated) and 0.8 % (reserved)
BASE: Margin = (0.003, 0.003, 0.008, 0.008)
# by how the text of an assumption begins
MARGINS: dict[str, Margin] = {
    "sizes hang on": (0.02, 0.03, 0.06, 0.12),  # experts that are not asked equally often
    "an unknown mask": (0.30, 0.02, 0.30, 0.04),
    "unknown elements": (0.10, 0.01, 0.10, 0.02),
    "unknown repeats": (0.10, 0.10, 0.10, 0.10),
    "an unknown bincount": (0.01, 0.10, 0.01, 0.10),
    "nested tensors": (0.05, 0.05, 0.08, 0.08),
    "torch.compile": (0.40, 0.60, 0.40, 0.60),
    "LBFGS": (0.02, 0.40, 0.02, 0.40),  # a small net on an H200: 19 % more allocated than without a history
    "flex_attention": (0.10, 0.10, 0.10, 0.10),
    "no rule": (0.05, 0.30, 0.08, 0.35),
}
LEAST = 0.032  # and the least, where there are any: a U-Net was 3.8 % above
SCRATCH = 0.009  # part of allocated that kernels' own scratch may add or lack where it is only bounded
LAYOUT = 0.10  # most that sizes which are only bounded can move where the cached blocks lie, as a part of reserved


def bounds(record: Record, served: Callable[[Any], Any], allocated: int, reserved: int) -> dict[str, int]:
    """Low and high of both peaks.

    Parameters
    ----------
    record
        The fake run's.
    served
        Puts the requests with other sizes (an array, one an allocation) through the allocator's model; returns the device.
    allocated, reserved
        The prediction.
    """
    down, up, reserved_down, reserved_up = BASE
    for what in record.assumptions:
        for start, margin in MARGINS.items():
            if what.startswith(start):
                down, up, reserved_down, reserved_up = (max(a, b) for a, b in zip((down, up, reserved_down, reserved_up), margin, strict=True))
    if record.slack:
        down, up = max(down, SCRATCH), max(up, SCRATCH)
    lows, highs, reserved_lows, reserved_highs = [allocated], [allocated], [reserved], [reserved]
    widest = 0
    if record.slack:
        sizes = np.asarray([made.nbytes for made in record.made], np.int64)
        for end in (1, 2):
            other = sizes.copy()
            for entry in record.slack:
                other[entry[0]] = entry[end]
            stats = served(other).stats()
            lows.append(stats["allocated_bytes.all.peak"])
            reserved_lows.append(stats["reserved_bytes.all.peak"])
        highs, reserved_highs = lows, reserved_lows
        widest = max(high - low for _, low, high in record.slack)
    moved = min(LAYOUT, max(LEAST, widest / max(1, reserved))) if record.slack else 0.0
    return {
        "peak_allocated_low_bytes": int(min(lows) * (1 - down)), "peak_allocated_high_bytes": int(max(highs) * (1 + up)),
        "peak_reserved_low_bytes": int(min(reserved_lows) * (1 - reserved_down - moved)), "peak_reserved_high_bytes": int(max(reserved_highs) * (1 + reserved_up + moved)),
    }  # fmt: skip
