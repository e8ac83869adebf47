"""What in the counted kernels deserves attention, and what would mending it win?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from nbmemprof.analyses._kernel_time import predicted_us
from nbmemprof.analyses.kernels import kernels
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_time_us

__all__ = ["kernel_findings"]

_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "kernel_id": pl.Int64, "name": pl.String, "site": pl.String, "launches": pl.Int64, "rule": pl.String, "finding": pl.String, "action": pl.String,
    "duration_us": pl.Float64, "predicted_us": pl.Float64, "saving_us": pl.Float64, "origin": pl.String,
}  # fmt: skip
_WASTE = 1.1  # sectors over ideal, wavefronts over ideal: below it is not worth a line
_NEAR = 0.85  # of the ceiling: then access is as good as it gets
_NARROW_BYTES = 64  # a warp's access: 32 lanes of 2 bytes
_BUSY = 0.7  # of the ceiling: then narrow accesses are no matter
_STALLED = 4.0  # warps waiting for memory each time one instruction is issued
_SMALL = 0.01  # share of all kernels' time below which a kernel is left out


@dataclass(frozen=True)
class _Said:
    rule: str
    finding: str
    action: str
    fault: str | None = None  # which of FAULTS mending it would take away


def kernel_findings(capture: Capture) -> pl.DataFrame:
    """What in the counted kernels deserves attention, and what would mending it win?

    Launches of one kernel with the same grid from the same line are one finding. Kernels that took less than 1 % of the time are left out.

    Returns
    -------
    A row a finding, by ``saving_us`` descending: ``device``, ``kernel_id`` (of the first such launch), ``name``, ``site``, ``launches``,
    ``rule`` (its name), ``finding`` and ``action`` as sentences, ``duration_us`` of all such launches, ``predicted_us`` what they would take with
    everything that is found in this kernel mended, ``saving_us`` their difference (null: the card's ceilings are not known, or nothing can be
    said), ``origin``: ``predicted`` where there is a saving, else that of the capture.
    """
    ceilings = capture.meta.get("ceilings") or {}
    frame = kernels(capture)
    total = frame["duration_us"].sum() or 0.0
    rows = []
    for group in _alike(frame):
        row = group.row(0, named=True)
        took = group["duration_us"].sum() or 0.0
        if took < _SMALL * total:
            continue
        said = [one for rule in _RULES for one in rule(row)]
        faults = {one.fault for one in said if one.fault}
        then = predicted_us(row, faults, ceilings) if faults else None
        share = then / row["duration_us"] if then is not None and row["duration_us"] else None
        for one in said:
            mends = one.fault is not None and share is not None
            rows.append({
                "device": row["device"], "kernel_id": row["kernel_id"], "name": row["name"], "site": row["site"], "launches": group.height, "rule": one.rule,
                "finding": f"{_who(row)}: {one.finding}.", "action": one.action + (_gain(took, took * share, len(faults)) if mends and share is not None else ""),
                "duration_us": took, "predicted_us": took * share if mends and share is not None else None, "saving_us": took * (1 - share) if mends and share is not None else None,
                "origin": "predicted" if mends else capture.meta["origin"],
            })  # fmt: skip
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("saving_us", descending=True, nulls_last=True, maintain_order=True)


def _alike(frame: pl.DataFrame) -> list[pl.DataFrame]:
    return frame.partition_by("device", "name", "site", "grid", "block", maintain_order=True) if frame.height else []


def _who(row: Mapping[str, Any]) -> str:
    name = row["name"] or f"kernel {row['kernel_id']}"
    short = name.split("(")[0].split("<")[0].removeprefix("void ")
    return f"{short} ({row['site']})" if row["site"] else short


def _gain(took: float, then: float, faults: int) -> str:
    mended = "Mended" if faults == 1 else "With all that is found in it mended"
    if then >= 0.97 * took:
        return f" {mended}, it would take about as long: something else holds it back (predicted)."
    return f" {mended}, about {format_time_us(then)} in place of {format_time_us(took)} (predicted from this kind of card's measured ceilings)."


# ---------------------------------------------------------------------- rules
def _scattered(what: str, verb: str) -> Callable[[Mapping[str, Any]], Iterator[_Said]]:
    def rule(row: Mapping[str, Any]) -> Iterator[_Said]:
        actual, ideal = row[f"{what}_sectors_per_request"], row[f"{what}_ideal_per_request"]
        if actual is None or ideal is None or actual < _WASTE * ideal:
            return
        pattern, action = _pattern(actual, ideal, what)
        yield _Said(f"scattered_{what}s", f"a warp's {what} touches {_number(actual)} sectors where {_number(ideal)} would do; {pattern.format(verb=verb)}", action, f"{what}s")

    return rule


def _pattern(actual: float, ideal: float, what: str) -> tuple[str, str]:
    """What the counts tell of the addresses, and what to do."""
    beside = f"Let neighbouring threads {'read' if what == 'load' else 'write'} neighbouring words: swap the indices, put arrays of structures into one array a field, or go through shared memory."
    if actual - ideal <= 1.01 and ideal >= 2:
        return "threads {verb} side by side but begin off the 32-byte grid", "Begin at a multiple of 32 bytes: pad the row or shift the index."
    if actual > 31:
        return "every thread {verb}s a sector of its own: 32 bytes or more from its neighbour, or at random", beside
    stride = actual / ideal
    if abs(stride - round(stride)) < 0.05:
        return f"as where threads {{verb}} every {_ordinal(round(stride))} element", beside
    return "threads {verb} scattered words", beside


def _conflicts(row: Mapping[str, Any]) -> Iterator[_Said]:
    worst = max(("load", "store"), key=lambda what: (row[f"shared_{what}_wavefronts"] or 0.0) * (1 - 1 / (row[f"shared_{what}_ways"] or 1.0)))
    ways = row[f"shared_{worst}_ways"]
    if ways is None or ways < _WASTE:
        return
    yield _Said(
        "bank_conflicts",
        f"its shared-memory {worst}s run into {_number(ways)}-way bank conflicts",
        "Pad the rows of the shared array by one element, or swizzle its index (column ^ row); mp.access.shared_load shows the banks.",
        "shared",
    )


def _narrow(row: Mapping[str, Any]) -> Iterator[_Said]:
    requests = (row["load_requests"] or 0.0) + (row["store_requests"] or 0.0)
    moved = (row["load_bytes"] or 0.0) + (row["store_bytes"] or 0.0)
    if not requests or not moved or moved / requests > _NARROW_BYTES or (row["ceiling_share"] or 1.0) > _BUSY:
        return
    yield _Said(
        "narrow_accesses",
        f"a warp's access moves {_number(moved / requests)} bytes on average, of 512 that it could, and the kernel reaches {row['ceiling_share']:.0%} of the bandwidth".replace("%", " %"),
        "Let each thread read and write 4 or 16 neighbouring bytes at once (uchar4, float4).",
        "narrow",
    )


def _spills(row: Mapping[str, Any]) -> Iterator[_Said]:
    if row["local_bytes"]:
        yield _Said(
            "local_memory",
            f"it moves {format_bytes(row['local_bytes'])} of local memory: registers spill, or an array of a thread is indexed by a variable",
            "Unroll the loop so that indices are constants, keep less alive at once, or allow more registers (__launch_bounds__).",
            "local",
        )


def _host(row: Mapping[str, Any]) -> Iterator[_Said]:
    if row["host_bytes"] and row["host_bytes"] > 0.05 * (row["l2_bytes"] or 0.0):
        yield _Said("host_memory", f"it touches {format_bytes(row['host_bytes'])} of host memory itself, over the bus", "Copy the array to the GPU once, before the kernel.")


def _latency(row: Mapping[str, Any]) -> Iterator[_Said]:
    stall, share = row["long_scoreboard_stall"], row["ceiling_share"]
    scattered = any((row[f"{w}_sectors_per_request"] or 0) > _WASTE * (row[f"{w}_ideal_per_request"] or 99) for w in ("load", "store"))
    if stall is not None and stall >= _STALLED and share is not None and share < 0.5 and not scattered:
        yield _Said(
            "waits_for_memory",
            f"{_number(stall)} warps wait for memory each time one gets on, at {share:.0%} of the bandwidth that such a card has".replace("%", " %"),
            "Keep more bytes in flight: more blocks, 16-byte loads, or several independent loads a thread.",
        )


def _at_ceiling(row: Mapping[str, Any]) -> Iterator[_Said]:
    share = row["ceiling_share"]
    if share is not None and share >= _NEAR:
        yield _Said(
            "at_ceiling",
            f"it moves {row['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s, {share:.0%} of the best measured for its mix of reads and writes".replace("%", " %"),
            "Only moving fewer bytes makes it faster: fuse it with its neighbours, or use a smaller dtype.",
        )


_RULES = (_scattered("load", "read"), _scattered("store", "write"), _narrow, _conflicts, _spills, _host, _latency, _at_ceiling)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third", 4: "fourth"}.get(number, f"{number}th")
