"""What did every counted kernel do with memory?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.analyses._counters import COUNTERS
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture

__all__ = ["COLUMNS", "SECTOR_BYTES", "alike", "ceiling_bytes_per_s", "kernels"]

SECTOR_BYTES = 32  # granule of L1 and L2 traffic (CUDA C++ best practices guide, "coalesced access to global memory")
_BANK_BYTES = 128  # what shared memory moves in one wavefront: 32 banks of 4 bytes

COLUMNS: dict[str, tuple[type[pl.DataType], str]] = {
    "device": (pl.Int64, "device ordinal"),
    "kernel_id": (pl.Int64, "in launch order"),
    "name": (pl.String, "kernel name; null where another tool kept it from us"),
    "site": (pl.String, "line of the user's code that launched it"),
    "grid": (pl.String, "blocks"),
    "block": (pl.String, "threads of a block"),
    "duration_us": (pl.Float64, "time on the GPU while counted: launches one after the other"),
    "dram_read_bytes": (pl.Float64, "read from DRAM"),
    "dram_write_bytes": (pl.Float64, "written to DRAM"),
    "bandwidth_bytes_per_s": (pl.Float64, "DRAM bytes over duration"),
    "ceiling_bytes_per_s": (pl.Float64, "the best that was measured on such a card for this mix of reads and writes"),
    "ceiling_share": (pl.Float64, "bandwidth over ceiling"),
    "load_sectors_per_request": (pl.Float64, "32-byte sectors that a warp's load touches"),
    "load_ideal_per_request": (pl.Float64, "sectors that would do for the bytes asked for"),
    "store_sectors_per_request": (pl.Float64, "the same, stores"),
    "store_ideal_per_request": (pl.Float64, "the same, stores"),
    "shared_load_ways": (pl.Float64, "wavefronts of a shared-memory load over those that would do; 1: no bank conflict"),
    "shared_store_ways": (pl.Float64, "the same, stores"),
    "l1_hit_share": (pl.Float64, "sectors found in L1"),
    "l2_hit_share": (pl.Float64, "sectors of the SMs found in L2"),
    "l2_bytes": (pl.Float64, "asked of L2 by the SMs"),
    "local_bytes": (pl.Float64, "local memory: spilled registers, arrays indexed by a variable"),
    "host_bytes": (pl.Float64, "host memory that the kernel touched itself"),
    "long_scoreboard_stall": (pl.Float64, "warps that wait for global or local memory, each time an instruction is issued"),
    "clock_hz": (pl.Float64, "SM clock while counted"),
}


def kernels(capture: Capture) -> pl.DataFrame:
    """What did every counted kernel do with memory?

    From the tables ``kernels`` and ``metrics``; nothing is measured here. Ceilings come from ``meta["ceilings"]``
    (``read``, ``write``, ``copy``, ``triad`` in bytes/s, those that are known).

    Returns
    -------
    A row a kernel, in launch order, with :data:`COLUMNS` and every counter of :data:`COUNTERS` by its short name. Ratios whose
    denominator is 0 are null: no loads, no sectors per load.
    """
    wide = _counters(capture)
    total = pl.col("dram_read") + pl.col("dram_write")
    derived = {
        "duration_us": pl.col("duration") / 1e3,
        "dram_read_bytes": pl.col("dram_read"),
        "dram_write_bytes": pl.col("dram_write"),
        "bandwidth_bytes_per_s": _over(total, pl.col("duration")) * 1e9,
        "load_sectors_per_request": _per_request("load"),
        "load_ideal_per_request": _ideal_per_request("load"),
        "store_sectors_per_request": _per_request("store"),
        "store_ideal_per_request": _ideal_per_request("store"),
        "shared_load_ways": _ways("load"),
        "shared_store_ways": _ways("store"),
        "l1_hit_share": pl.col("l1_hit") / 100,
        "l2_hit_share": (1 - _over(pl.col("l2_misses"), pl.col("l2_sectors"))).clip(lower_bound=0.0),  # hits may come from another pass, with other things in the cache
        "l2_bytes": pl.col("l2_sectors") * SECTOR_BYTES,
        "local_bytes": (pl.col("local_load_sectors") + pl.col("local_store_sectors")) * SECTOR_BYTES,
        "host_bytes": pl.col("host_sectors") * SECTOR_BYTES,
        "long_scoreboard_stall": pl.col("stall_long_scoreboard"),
        "clock_hz": pl.col("clock"),
    }
    ceilings = capture.meta.get("ceilings") or {}
    shares = wide.select(_over(pl.col("dram_read"), total)).to_series()
    best = pl.Series("ceiling_bytes_per_s", [ceiling_bytes_per_s(ceilings, share) for share in shares], dtype=pl.Float64)
    made = wide.with_columns(**derived).with_columns(best)
    made = made.with_columns(ceiling_share=_over(pl.col("bandwidth_bytes_per_s"), pl.col("ceiling_bytes_per_s")))
    return made.select(*(pl.col(name).cast(dtype) for name, (dtype, _) in COLUMNS.items()), *COUNTERS)


def alike(frame: pl.DataFrame) -> pl.DataFrame:
    """Number what is one kernel to a reader: the same name, line, grid and pattern of access; a column ``alike`` more."""
    pattern = [pl.col(f"{what}_sectors_per_request").round(1) for what in ("load", "store")]
    return frame.with_columns(alike=pl.struct("device", "name", "site", "grid", "block", *pattern).rank("dense"))


def _counters(capture: Capture) -> pl.DataFrame:
    """Kernels with a column a counter; null where it was not gathered."""
    rows = capture.tables["kernels"].sort("kernel_id")
    long = capture.tables["metrics"].with_columns(pl.col("metric").cast(pl.String))
    wide = long.pivot(on="metric", index="kernel_id", values="value", aggregate_function="first") if long.height else long.select("kernel_id")
    there = {counter.metric: name for name, counter in COUNTERS.items()}
    wide = wide.rename({metric: name for metric, name in there.items() if metric in wide.columns})
    wide = wide.with_columns(pl.lit(None, pl.Float64).alias(name) for name in COUNTERS if name not in wide.columns)
    sites = site_of_stacks(capture.tables["stacks"]).select("stack_id", "site")
    joined = rows.join(wide.unique("kernel_id"), on="kernel_id", how="left", maintain_order="left").join(sites, on="stack_id", how="left", maintain_order="left")
    clocked = pl.col("duration").fill_null(pl.col("duration_us") * 1e3)  # a source may have timed a kernel that it did not count
    return joined.with_columns(clocked)


def _over(a: pl.Expr, b: pl.Expr) -> pl.Expr:
    """Quotient; null where ``b`` is 0 or either is null."""
    return pl.when(b > 0).then(a / b)


def _per_request(what: str) -> pl.Expr:
    return _over(pl.col(f"{what}_sectors"), pl.col(f"{what}_requests"))


def _ideal_per_request(what: str) -> pl.Expr:
    """Sectors that would do for a request.

    The bytes asked for, packed, need bytes / 32 sectors, and a request needs one at least. Lanes that read the same word ask for it each,
    so that a broadcast asks for more than it touches: then what it touches is all that is needed.
    """
    dense = pl.max_horizontal(_over(pl.col(f"{what}_bytes"), pl.col(f"{what}_requests")) / SECTOR_BYTES, pl.lit(1.0))
    return pl.when(pl.col(f"{what}_bytes").is_not_null()).then(pl.min_horizontal(_per_request(what), dense))


def _ways(what: str) -> pl.Expr:
    """Wavefronts of shared-memory accesses over those that would do: those without conflicts, and at least the bytes over 128.

    Instructions say nothing here: one whose lanes are all switched off is counted and needs no wavefront.
    """
    cycles, conflicts, asked = (pl.col(f"shared_{what}_{name}") for name in ("cycles", "conflicts", "bytes"))
    waves = pl.coalesce(f"shared_{what}_wavefronts", cycles)
    least = pl.max_horizontal(cycles - conflicts, asked / _BANK_BYTES)  # of those that are known
    return pl.when(waves > 0).then(pl.max_horizontal(_over(waves, least), pl.lit(1.0)))


def ceiling_bytes_per_s(ceilings: Mapping[str, Any], read_share: float | None) -> float | None:
    """The best measured bandwidth for a mix of reads and writes.

    Between the measured mixes (write only, copy 1:1, triad 2:1, read only) it is interpolated linearly.

    Parameters
    ----------
    ceilings
        ``write copy triad read`` in bytes/s, two of them at least.
    read_share
        Bytes read over bytes moved, 0 to 1.
    """
    known = [(at, float(ceilings[name])) for name, at in (("write", 0.0), ("copy", 0.5), ("triad", 2 / 3), ("read", 1.0)) if ceilings.get(name)]
    if read_share is None or not known:
        return None
    return float(np.interp(read_share, [at for at, _ in known], [rate for _, rate in known]))
