"""What can be wrong with how a kernel uses memory, rule by rule: a counted kernel and its source lines in, sentences out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from nbmemprof.units import format_bytes

__all__ = ["CONSEQUENCES", "RULES", "Rule", "Said", "short"]

_WASTE = 1.1  # sectors over ideal, wavefronts over ideal: below it is not worth a line
_NEAR = 0.85  # of the ceiling: then access is as good as it gets
_NARROW_BYTES = 64  # a warp's access: 32 lanes of 2 bytes
_BUSY = 0.7  # of the ceiling: then narrow accesses are no matter
_STALLED = 4.0  # warps waiting for memory each time one instruction is issued
_FULL = (32.0, 64.0, 128.0, 256.0, 512.0)  # bytes of a request of 32 lanes, each as wide
_CODE = 72  # characters of a line that are told
_LINES = 3  # lines of one kernel that get a sentence each

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Said:
    """One finding: the rule's name, two sentences, which of ``_kernel_time.FAULTS`` mending it takes away, the kernel's source line."""

    rule: str
    finding: str
    action: str
    fault: str | None = None
    line: int | None = None


Rule = Callable[[Row, pl.DataFrame], Iterator[Said]]


def short(name: str | None) -> str:
    """A kernel's name without types and arguments."""
    return (name or "").replace("(anonymous namespace)::", "").removeprefix("void ").split("(")[0].split("<")[0].split("[")[0].rpartition("::")[2]


def _scattered(what: str, verb: str) -> Rule:
    def rule(row: Row, lines: pl.DataFrame) -> Iterator[Said]:
        actual, ideal = row[f"{what}_sectors_per_request"], row[f"{what}_ideal_per_request"]
        if actual is None or ideal is None or not _is_waste(row, what):
            return
        name, fault, found = f"scattered_{what}s", f"{what}s", False
        for line in _worst(lines, "global", what, "sectors"):
            each, least = line["sectors"] / line["instructions"], line["ideal_sectors"] / line["instructions"]
            pattern, action = _pattern(each, least, what, verb, line)
            yield Said(name, f"{_number(each)} sectors where {_number(least)} would do{_code(line)}; {pattern}", action, fault, line["line"])
            found = True
        if not found:
            pattern, action = _pattern(actual, ideal, what, verb, {})
            yield Said(name, f"a warp's {what} touches {_number(actual)} sectors where {_number(ideal)} would do; {pattern}", action, fault)

    return rule


def _is_waste(row: Row, what: str) -> bool:
    """Whether a kernel's accesses surely touch more than they need.

    Where every request moves as much as its width allows, the ideal is the bytes over 32. Where requests differ (a broadcast beside
    a full one), each may need a sector more than its share of the bytes: only what is beyond that is waste.
    """
    requests, sectors, asked = row[f"{what}_requests"], row[f"{what}_sectors"], row[f"{what}_bytes"]
    packed = asked / 32
    return bool(sectors >= _WASTE * max(packed, requests) and (sectors > packed + requests or asked / requests in _FULL))


def _worst(lines: pl.DataFrame, space: str, operation: str, unit: str) -> list[dict[str, Any]]:
    """Lines with waste of one kind, the greatest first."""
    wasted = pl.col(unit) > _WASTE * pl.col(f"ideal_{unit}")
    kind = (pl.col("space") == space) & pl.col("operation").str.starts_with(operation)
    return lines.filter(kind & wasted & (pl.col("instructions") > 0)).head(_LINES).to_dicts()


def _pattern(actual: float, ideal: float, what: str, verb: str, line: Row) -> tuple[str, str]:
    """What is known of the addresses, and what to do."""
    beside = f"Let neighbouring threads {verb} neighbouring words: swap the indices, put arrays of structures into one array a field, or go through shared memory."
    if line.get("stride") not in (None, "1"):
        return f"threads {verb} with stride {_stride(line)}", beside
    if 0 < actual - ideal <= 1.01 and ideal >= 2:
        return f"threads {verb} side by side but begin off the 32-byte grid", "Begin at a multiple of 32 bytes: pad the row or shift the index."
    if actual > 31:
        return f"every thread {verb}s a sector of its own: 32 bytes or more from its neighbour, or at random", beside
    times = actual / ideal
    if abs(times - round(times)) < 0.05:
        return f"as where threads {verb} every {_ordinal(round(times))} element", beside
    return f"threads {verb} scattered words", beside


def _code(line: Row) -> str:
    text = line["text"] or ""
    return f" in “{text if len(text) <= _CODE else text[: _CODE - 1] + '…'}”" if text else ""


def _stride(line: Row) -> str:
    width = line["width_bytes"]
    unit = "words" if width == 4 else f"elements of {width} bytes"
    return f"{line['stride']} {unit}"


def _narrow(row: Row, lines: pl.DataFrame) -> Iterator[Said]:
    requests = (row["load_requests"] or 0.0) + (row["store_requests"] or 0.0)
    moved = (row["load_bytes"] or 0.0) + (row["store_bytes"] or 0.0)
    share = row["ceiling_share"]
    if not requests or not moved or moved / requests > _NARROW_BYTES or share is None or share > _BUSY:
        return
    yield Said(
        "narrow_accesses",
        f"a warp's access moves {_number(moved / requests)} bytes on average, of 512 that it could, and the kernel reaches {_percent(share)} of the bandwidth",
        "Let each thread read and write 4 or 16 neighbouring bytes at once (uchar4, float4).",
        "narrow",
    )


def _conflicts(row: Row, lines: pl.DataFrame) -> Iterator[Said]:
    def lost(what: str) -> float:
        return float((row[f"shared_{what}_cycles"] or 0.0) * (1 - 1 / (row[f"shared_{what}_ways"] or 1.0)))

    what = max(("load", "store"), key=lost)
    ways, action = row[f"shared_{what}_ways"], "Pad the rows of the shared array by one element, or swizzle its index (column ^ row); mp.access.shared_load shows the banks."
    if ways is None or ways < _WASTE:
        return
    worst = _worst(lines, "shared", what, "wavefronts")
    for line in worst:
        each, least = line["wavefronts"] / line["instructions"], line["ideal_wavefronts"] / line["instructions"]
        counts = f": {_number(each)} wavefronts where {_number(least)} would do" if least >= 1 else ""  # less than one: most of its warps are switched off
        apart = f"; threads {'read' if what == 'load' else 'write'} with stride {_stride(line)}" if line.get("stride") not in (None, "1") else ""
        yield Said("bank_conflicts", f"{_number(each / least)}-way bank conflicts{_code(line)}{counts}{apart}", action, "shared", line["line"])
    if not worst:
        yield Said("bank_conflicts", f"its shared-memory {what}s run into {_number(ways)}-way bank conflicts", action, "shared")


def _spills(row: Row, lines: pl.DataFrame) -> Iterator[Said]:
    if row["local_bytes"]:
        yield Said(
            "local_memory",
            f"it moves {format_bytes(row['local_bytes'])} of local memory: registers spill, or an array of a thread is indexed by a variable",
            "Unroll the loop so that indices are constants, keep less alive at once, or allow more registers (__launch_bounds__).",
            "local",
        )


def _host(row: Row, lines: pl.DataFrame) -> Iterator[Said]:
    if row["host_bytes"] and row["host_bytes"] > 0.05 * (row["l2_bytes"] or 0.0):
        yield Said("host_memory", f"it touches {format_bytes(row['host_bytes'])} of host memory itself, over the bus", "Copy the array to the GPU once, before the kernel.")


def _latency(row: Row, lines: pl.DataFrame) -> Iterator[Said]:
    stall, share = row["long_scoreboard_stall"], row["ceiling_share"]
    if stall is None or share is None or stall < _STALLED or share >= 0.5:
        return
    yield Said(
        "waits_for_memory",
        f"{_number(stall)} warps wait for memory each time one gets on, at {_percent(share)} of the bandwidth that such a card has",
        "Keep more bytes in flight: more blocks, 16-byte loads, or several independent loads a thread.",
    )


def _at_ceiling(row: Row, lines: pl.DataFrame) -> Iterator[Said]:
    share = row["ceiling_share"]
    if share is not None and share >= _NEAR:
        yield Said(
            "at_ceiling",
            f"it moves {row['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s, {_percent(share)} of the best measured for its mix of reads and writes",
            "Only moving fewer bytes makes it faster: fuse it with its neighbours, or use a smaller dtype.",
        )


CONSEQUENCES = ("waits_for_memory", "at_ceiling")  # not told beside a fault
RULES: tuple[Rule, ...] = (_scattered("load", "read"), _scattered("store", "write"), _narrow, _conflicts, _spills, _host, _latency, _at_ceiling)


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value - round(value)) < 0.05 else f"{value:.1f}"


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def _ordinal(number: int) -> str:
    return {2: "second", 3: "third", 4: "fourth"}.get(number, f"{number}th")
