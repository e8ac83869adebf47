"""What do scattered reads cost, and does the model of a warp say how much?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import access
from nbmemprof.gpu import _device, twins
from nbmemprof.gpu.probes._bandwidth import size_for

__all__ = ["COLUMNS", "measure"]

FILE = "coalescing"
STRIDES = (1, 2, 3, 4, 8, 16, 32, 64)
OFFSETS = (1, 2, 4, 8)
FIELDS = 8
UNROLL = 8  # of the kernels: elements that a thread takes at once
COLUMNS: dict[str, Any] = {
    "what": pl.String, "sectors": pl.Float64, "efficiency": pl.Float64, "achieved_bytes_per_s": pl.Float64, "ceiling_bytes_per_s": pl.Float64, "share_of_ceiling": pl.Float64,
    "modelled_share": pl.Float64, "sector_bytes_per_s": pl.Float64, "datasheet_bytes_per_s": pl.Float64, "median_us": pl.Float64, "low_us": pl.Float64, "high_us": pl.Float64,
    "useful_bytes": pl.Int64, "grid": pl.Int64, "block": pl.Int64, "repeats": pl.Int64, "verified": pl.Boolean,
}  # fmt: skip
NEEDLE = np.uint32(0xDEADBEEF)


@dataclass(frozen=True)
class _Case:
    """A pattern: its kernel, elements, useful bytes, the model's sectors a load and share of their bytes that is used, the arguments before the sums and after."""

    what: str
    kernel: str
    useful: int
    model: tuple[float, float]
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    def args(self, sums: Any, keep: int) -> tuple[Any, ...]:
        return (*self.before, sums, *self.after, NEEDLE, np.int32(keep))


def _model(*loads: access.GlobalAccess) -> tuple[float, float]:
    sectors = sum(one.sectors for one in loads)
    return sectors / len(loads), sum(one.unique_bytes for one in loads) / (32 * sectors)


def _load(stride: int, offset: int = 0, width: int = 4) -> tuple[float, float]:
    return _model(access.global_load([(t * stride + offset) * width for t in range(32)], width))


def _cases(gpu: _device.Gpu, source: Any, words: int) -> list[_Case]:
    cases = []
    for stride, offset in [(s, 0) for s in STRIDES] + [(1, o) for o in OFFSETS]:
        n = (words - offset) // stride
        name = f"offset {offset}" if offset else f"stride {stride}"
        cases.append(_Case(name, "strided", 4 * n, _load(stride, offset), (source,), (np.uint64(n), np.uint64(stride), np.uint64(offset))))
    n = words // FIELDS
    for name, stride in (("one field of 8, array of structures", FIELDS), ("one field of 8, structure of arrays", 1)):
        cases.append(_Case(name, "strided", 4 * n, _load(stride), (source,), (np.uint64(n), np.uint64(stride), np.uint64(3))))
    # in an array of structures the lines that the load of the first field fetches serve the other seven
    for name, pitches, model in (
        ("all 8 fields, array of structures", (FIELDS, 1), (32.0, 1.0)),
        ("all 8 fields, structure of arrays", (1, n), _load(1)),
    ):
        cases.append(_Case(name, "structures", 4 * FIELDS * n, model, (source,), (np.uint64(n), np.int32(FIELDS), *map(np.uint64, pitches))))
    cases.append(_Case("4 fields at once, 16 B a lane", "structures_wide", 4 * words, _load(1, 0, 16), (source,), (np.uint64(words // 4),)))
    n = words // 32
    places = _device.mixed(gpu.xp, n)
    places %= np.uint32(words)
    sample = [4 * int(p) for p in places[: min(32 * 64, n // 32 * 32)].tolist()]
    model = _model(*(access.global_load(sample[first : first + 32]) for first in range(0, len(sample), 32)))
    return [*cases, _Case("gather, random places", "gather", 4 * n, model, (source, places), (np.uint64(n),))]


def measure(gpu: _device.Gpu, size_bytes: int | None = None, repeats: int = 20) -> list[dict[str, Any]]:
    """Measure; a row a pattern. Useful bytes are those that the program asked for."""
    words = size_for(gpu, size_bytes) // 4
    source = gpu.words(words)
    sums = gpu.poisoned(words // 4 + (1 << 20), np.uint32)
    rows: list[dict[str, Any]] = []
    for case in _cases(gpu, source, words):
        n = int(case.after[0])
        tried = [(g, b) for b in (256, 512, 1024) for g in (gpu.multiprocessors * (2048 // b), -(-n // (UNROLL * b)), -(-n // b)) if g * b <= sums.size]
        timed = {(g, b): gpu.time(partial(gpu.launch, FILE, case.kernel, g, b, *case.args(sums, 0)), repeats) for g, b in tried}
        (grid, block), times = min(timed.items(), key=lambda one: one[1].median_us)
        rows.append({
            "what": case.what, "sectors": case.model[0], "efficiency": case.model[1], "achieved_bytes_per_s": case.useful / times.median_us * 1e6,
            "median_us": times.median_us, "low_us": times.low_us, "high_us": times.high_us, "useful_bytes": case.useful, "grid": grid, "block": block,
            "repeats": repeats, "verified": _verified(gpu, case, grid, block, sums),
        })  # fmt: skip
    ceiling = max(row["achieved_bytes_per_s"] for row in rows)
    for row in rows:
        row |= {
            "ceiling_bytes_per_s": ceiling, "share_of_ceiling": row["achieved_bytes_per_s"] / ceiling, "modelled_share": row["efficiency"],
            "sector_bytes_per_s": row["achieved_bytes_per_s"] / row["efficiency"], "datasheet_bytes_per_s": _device.DATASHEET.get(gpu.name),
        }  # fmt: skip
    return rows


def _verified(gpu: _device.Gpu, case: _Case, grid: int, block: int, sums: Any) -> bool:
    mine, check = sums[: grid * block], gpu.poisoned(1, np.uint32)
    mine[:] = np.uint32(0xA5A5A5A5)
    gpu.launch(FILE, case.kernel, grid, block, *case.args(mine, 1))
    twins.TWINS[FILE, case.kernel](gpu.xp, *case.args(check, 1))
    return twins.total(gpu.xp, mine) == int(check[0])
