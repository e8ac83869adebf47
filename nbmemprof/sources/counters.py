"""``--counters``: hardware counters of every kernel that the cell launches, beside the recording of its memory.

The cell runs once, as a plain cell; CUPTI runs each kernel as often as it needs passes and puts back what the kernel wrote
(:mod:`nbmemprof.gpu.counters` says what that means for kernels with other effects).
"""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof.capture import Capture
from nbmemprof.flags import Flag

__all__ = ["FLAGS", "Counters", "companion"]

FLAGS = [Flag("--counters", "count what every GPU kernel of this cell does with memory: each is run several times, so the cell takes longer", action="store_true", default=False)]


def companion(options: dict[str, Any]) -> Counters | None:
    """Give what counts, where the options ask for it."""
    return Counters() if options.get("counters") else None


class Counters:
    """Counts kernels beside a source."""

    name = "counters"

    def __init__(self, counting: Any = None) -> None:
        self._counting, self._counted = counting, None  # type: Any, Capture | None

    def start(self) -> None:
        """Take hold of the counters."""
        from nbmemprof.gpu._counting import Counting

        self._counting = self._counting or Counting()
        self._counting.start()

    def stop(self) -> None:
        """Wait for the GPU and let go."""
        counting, self._counting = self._counting, None
        if counting is not None:
            try:
                self._counted = counting.stop()
                self._began = counting.began
            finally:
                counting.close()

    def attach(self, capture: Capture, began: float) -> None:
        """Put the tables of the kernels into the capture; their stacks get numbers after its own."""
        counted = self._counted
        if counted is None:
            return
        stacks = capture.tables["stacks"]
        first = int(stacks["stack_id"].max() or 0) if stacks.height else 0  # type: ignore[arg-type]
        moved = pl.col("stack_id") + pl.lit(first, pl.UInt32)
        capture.tables["stacks"] = pl.concat([stacks, counted.tables["stacks"].with_columns(moved)], how="diagonal")
        capture.tables["kernels"] = counted.tables["kernels"].with_columns(moved, pl.col("time_us") + (self._began - began) * 1e6)
        capture.tables["metrics"] = counted.tables["metrics"]
        for name in ("counters", "ceilings"):
            capture.meta[name] = counted.meta[name]
        capture.meta["warnings"] = [*capture.meta.get("warnings", ()), *counted.meta["warnings"]]
