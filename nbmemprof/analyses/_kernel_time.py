"""How long would a kernel take if it touched only what it needs? From its own counters and the card's measured ceilings.

A kernel can't be faster than the busiest of three: DRAM (its bytes at the measured bandwidth for their mix of reads and writes), L2 (what the SMs ask of
it), the L1 data stage (one wavefront a cycle and SM). Scattered, narrow and spilled accesses are taken to be all that keeps it from there. Bank conflicts are not: where
the L1 data stage is busy all the time, time follows its wavefronts; where it isn't, the time it wasn't (latency, barriers) stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from nbmemprof.analyses.kernels import SECTOR_BYTES, ceiling_bytes_per_s

__all__ = ["FAULTS", "START_US", "Work", "bounds_us", "mended", "predicted_us", "work_of"]

FAULTS = ("loads", "stores", "narrow", "shared", "local")  # what can be mended
LINE_BYTES = 128  # what the L1 data stage moves in one wavefront
ORDINARY = 0.96  # of the ceiling: what kernels reach whose geometry was not searched (94 to 99 % on an H200: copies by 16 bytes, torch's and Triton's additions)
_ALL_THE_TIME = 0.9
_SHORT = 5
START_US = 2.0  # an empty kernel's gpu__time_duration on an H200


@dataclass(frozen=True)
class Work:
    """What a kernel asks of the memory system: bytes of DRAM and L2, wavefronts of L1 (of all SMs together)."""

    dram_read: float
    dram_write: float
    l2_bytes: float
    wavefronts: float


def work_of(row: Mapping[str, Any]) -> Work | None:
    """What a counted kernel asks for; None where DRAM was not counted."""
    if row["dram_read"] is None or row["dram_write"] is None:
        return None
    return Work(row["dram_read"], row["dram_write"], row["l2_bytes"] or 0.0, row["lsu_wavefronts"] or 0.0)


def mended(row: Mapping[str, Any], faults: frozenset[str] | set[str]) -> Work | None:
    """What it would ask for with these faults mended.

    Sectors beyond the ideal ones go: from L2's traffic as far as L1 did not serve them, from DRAM's where more was moved than the ideal sectors hold.
    """
    work = work_of(row)
    if work is None:
        return None
    for what, moved in (("load", "dram_read"), ("store", "dram_write")):
        if f"{what}s" in faults and row[f"{what}_ideal_per_request"] is not None:
            ideal = row[f"{what}_requests"] * row[f"{what}_ideal_per_request"]
            excess = row[f"{what}_sectors"] - ideal
            missed = 1.0 - (row["l1_hit_share"] or 0.0) if what == "load" else 1.0
            work = replace(work, l2_bytes=max(work.l2_bytes - excess * missed * SECTOR_BYTES, 0.0))
            work = replace(work, **{moved: min(getattr(work, moved), ideal * SECTOR_BYTES)})
            waves = max(work.wavefronts - _shared(row), 0.0)
            spared = waves * excess / max((row["load_sectors"] or 0.0) + (row["store_sectors"] or 0.0), 1.0)
            work = replace(work, wavefronts=work.wavefronts - spared)
    work = replace(work, l2_bytes=min(work.l2_bytes, _asked(row, faults)))
    if "shared" in faults:
        for what in ("load", "store"):
            ways, waves = row[f"shared_{what}_ways"], row[f"shared_{what}_cycles"]
            if ways and waves:
                work = replace(work, wavefronts=max(work.wavefronts - waves * (1 - 1 / ways), 0.0))
    if "local" in faults and row["local_bytes"]:
        work = _without_local(work, row)
    if "narrow" in faults:  # the same bytes by 16-byte accesses: full lines
        whole = ((row["load_bytes"] or 0.0) + (row["store_bytes"] or 0.0)) / LINE_BYTES
        work = replace(work, wavefronts=min(work.wavefronts, _shared(row) + whole))
    return work


def _asked(row: Mapping[str, Any], faults: frozenset[str] | set[str]) -> float:
    """Bytes of the sectors that L1 is asked for, and what reaches L2 past them (atomics): L2 sees no more."""
    loads, stores = row["load_sectors"] or 0.0, row["store_sectors"] or 0.0
    local = (row["local_bytes"] or 0.0) / SECTOR_BYTES
    others = max((row["l2_bytes"] or 0.0) / SECTOR_BYTES - loads - stores - local, 0.0)
    for what in ("load", "store"):
        if f"{what}s" in faults and row[f"{what}_ideal_per_request"] is not None:
            spared = row[f"{what}_sectors"] - row[f"{what}_requests"] * row[f"{what}_ideal_per_request"]
            loads, stores = (loads - spared, stores) if what == "load" else (loads, stores - spared)
    return float((loads + stores + local + others) * SECTOR_BYTES)


def _without_local(work: Work, row: Mapping[str, Any]) -> Work:
    """Local memory gone: what is left for L2 and DRAM is what global accesses touch."""
    loads, stores = ((row[f"{what}_sectors"] or 0.0) * SECTOR_BYTES for what in ("load", "store"))
    waves = row["local_bytes"] / LINE_BYTES
    return Work(min(work.dram_read, loads), min(work.dram_write, stores), min(work.l2_bytes, loads + stores), max(work.wavefronts - waves, 0.0))


def _shared(row: Mapping[str, Any]) -> float:
    return float((row["shared_load_cycles"] or 0.0) + (row["shared_store_cycles"] or 0.0))


def bounds_us(work: Work, row: Mapping[str, Any], ceilings: Mapping[str, Any]) -> dict[str, float]:
    """Least time in each part of the memory system: ``dram``, ``l2``, ``l1``; a part whose ceiling is not known is left out."""
    made = {}
    total = work.dram_read + work.dram_write
    best = ceiling_bytes_per_s(ceilings, work.dram_read / total) if total else None
    if best:
        made["dram"] = total / best * 1e6
    if ceilings.get("l2"):
        made["l2"] = work.l2_bytes / ceilings["l2"] * 1e6
    if row["sm_cycles"] and row["duration_us"]:
        made["l1"] = work.wavefronts / row["sm_cycles"] * row["duration_us"]
    return made


def predicted_us(row: Mapping[str, Any], faults: frozenset[str] | set[str], ceilings: Mapping[str, Any]) -> float | None:
    """Duration with these faults mended; never more than it takes today.

    None where the card's ceilings are not known, or the kernel is so short that its start matters as much as its accesses.
    """
    after = mended(row, faults)
    if after is None or not ceilings or (row["duration_us"] or 0.0) < _SHORT * START_US:
        return None
    now_us, now, then = float(row["duration_us"]), bounds_us(work_of(row) or after, row, ceilings), bounds_us(after, row, ceilings)
    least = [us if part == "l1" else us / ORDINARY for part, us in then.items()]
    if "shared" in faults and "l1" in now and now["l1"] == max(now.values()):
        busy = now["l1"] / now_us
        least.append(then["l1"] / busy if busy >= _ALL_THE_TIME else now_us - now["l1"] + then["l1"])
    return min(now_us, max(least) + START_US) if least else None
