"""Counted kernels of a real GPU, as tests/gpu/record_counters.py keeps them, made a capture again; and two ways of counting held against each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof.analyses._counters import COUNTERS
from nbmemprof.analyses.kernel_findings import kernel_findings
from nbmemprof.analyses.kernel_lines import SCHEMA, TABLE
from nbmemprof.analyses.kernels import kernels
from nbmemprof.capture import Capture
from nbmemprof.gpu import _ceilings
from nbmemprof.gpu._counting import tables
from nbmemprof.gpu._launches import Launch

# what is a property of the code and its addresses alone
DETERMINISTIC = (
    "load_requests", "store_requests", "load_sectors", "store_sectors", "load_bytes", "store_bytes", "shared_load_wavefronts", "shared_store_wavefronts",
    "shared_load_instructions", "shared_store_instructions", "shared_load_bytes", "shared_store_bytes", "local_load_sectors", "local_store_sectors", "instructions",
)  # fmt: skip


def capture_of(path: Path) -> Capture:
    """The capture that was kept."""
    told = json.loads(path.read_text())
    launches = [Launch(row["name"] or "", _triple(row["grid"]), _triple(row["block"]), None, None, ()) for row in told["kernels"]]
    made = tables([row["metrics"] for row in told["kernels"]], launches, device=0, began=0.0)
    if "lines" in told:
        made[TABLE] = pl.DataFrame(told["lines"], schema=SCHEMA)
    return Capture.build(made, source="counters", origin="recorded", **told["meta"])


def _triple(text: str | None) -> tuple[int, int, int] | None:
    found = [int(part) for part in text.split(",")] if text else []
    return (found[0], found[1], found[2]) if found else None


def predictions(path: Path) -> dict[str, dict[str, Any]]:
    """What the findings say of each recorded kernel: its duration, what it would take, by which rules. The card's ceilings are the package's."""
    capture = capture_of(path)
    capture.meta["ceilings"] = _ceilings.of(str(capture.meta["device"]))
    found = kernel_findings(capture)
    made = {}
    for number, name in enumerate(json.loads(path.read_text())["calls"]):
        rows = found.filter((pl.col("kernel_id") == number) & pl.col("predicted_us").is_not_null())
        if rows.height:
            made[name] = {"duration_us": rows["duration_us"][0], "predicted_us": round(rows["predicted_us"][0], 1), "rules": rows["rule"].to_list()}
    return made


def compared(a: Path, b: Path) -> pl.DataFrame:
    """Two ways of counting the same launches.

    Returns
    -------
    A row a kernel: ``name``; ``differs``, the deterministic counters that are not equal; the difference in DRAM bytes read and written and
    in sectors of L2, each as a share of the kernel's own; hit rates' differences in points of 100.
    """
    one, two = (kernels(capture_of(path)) for path in (a, b))
    calls = json.loads(a.read_text())["calls"]
    rows: list[dict[str, Any]] = []
    for name, x, y in zip(calls, one.iter_rows(named=True), two.iter_rows(named=True), strict=True):
        total = max(y["dram_read"] + y["dram_write"], 1.0)
        rows.append({
            "name": name,
            "differs": [counter for counter in DETERMINISTIC if x[counter] != y[counter]],
            "dram_read": (x["dram_read"] - y["dram_read"]) / total,
            "dram_write": (x["dram_write"] - y["dram_write"]) / total,
            "l2_sectors": (x["l2_sectors"] - y["l2_sectors"]) / max(y["l2_sectors"], 1.0),
            "l1_hit": 100 * ((x["l1_hit_share"] or 0.0) - (y["l1_hit_share"] or 0.0)),
            "l2_hit": 100 * ((x["l2_hit_share"] or 0.0) - (y["l2_hit_share"] or 0.0)),
            "moved_bytes": total,
            "duration": x["duration_us"] / y["duration_us"] - 1 if y["duration_us"] else None,
        })  # fmt: skip
    return pl.DataFrame(rows)


assert set(DETERMINISTIC) <= set(COUNTERS)
