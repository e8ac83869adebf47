"""Which source lines of the counted kernels touch more than they need?"""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof.capture import Capture

__all__ = ["SCHEMA", "TABLE", "kernel_lines"]

TABLE = "kernel_lines"  # beside the schema's tables: only ncu fills it, from code compiled with -lineinfo
SCHEMA: dict[str, Any] = {
    "kernel_id": pl.Int64, "name": pl.String, "file": pl.String, "line": pl.Int64, "text": pl.String, "space": pl.String, "operation": pl.String, "width_bytes": pl.Int64,
    "instructions": pl.Int64, "sectors": pl.Int64, "ideal_sectors": pl.Int64, "wavefronts": pl.Int64, "ideal_wavefronts": pl.Int64, "stall_samples": pl.Int64, "stride": pl.String,
}  # fmt: skip


def kernel_lines(capture: Capture) -> pl.DataFrame:
    """Which source lines of the counted kernels touch more than they need?

    Returns
    -------
    A row a kernel, line, space (``global shared local``), operation (``load store`` …) and width of a lane's access, the greatest excess first:
    ``kernel_id name file line text space operation width_bytes``; warp ``instructions``; of global memory ``sectors`` and ``ideal_sectors``; of shared
    memory ``wavefronts`` and ``ideal_wavefronts``; ``stall_samples`` taken there; ``stride``, in elements from a lane to the next as the
    line's text has it (null: it can't be told from the text); ``excess``, sectors and wavefronts beyond the ideal. Empty where the kernels were not counted
    by ncu or have no line numbers.
    """
    if TABLE not in capture.tables:
        return pl.DataFrame(schema={**SCHEMA, "excess": pl.Int64})
    excess = (pl.col("sectors") - pl.col("ideal_sectors")).fill_null(0) + (pl.col("wavefronts") - pl.col("ideal_wavefronts")).fill_null(0)
    return capture.tables[TABLE].with_columns(excess=excess).sort("excess", descending=True, maintain_order=True)
