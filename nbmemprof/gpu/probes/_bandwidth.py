"""How fast can this card's memory be read and written?"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _device, twins
from nbmemprof.gpu.probes._frame import say

__all__ = ["ARRAYS", "COLUMNS", "Geometry", "Kernels", "geometries", "measure", "search"]

FILE = "bandwidth"
ARRAYS = {"read": 1, "write": 1, "copy": 2, "scale": 2, "add": 3, "triad": 3}  # arrays that a kernel moves once each
FACTOR = np.float32(1.37)
SEED = np.uint32(12345)
COLUMNS: dict[str, Any] = {
    "what": pl.String, "width": pl.Int64, "form": pl.String, "best": pl.Boolean, "achieved_bytes_per_s": pl.Float64, "ceiling_bytes_per_s": pl.Float64,
    "datasheet_bytes_per_s": pl.Float64, "theory_bytes_per_s": pl.Float64, "share_of_ceiling": pl.Float64, "median_us": pl.Float64, "low_us": pl.Float64,
    "high_us": pl.Float64, "moved_bytes": pl.Int64, "grid": pl.Int64, "block": pl.Int64, "unroll": pl.Int64, "streaming": pl.Boolean, "tried": pl.Int64,
    "repeats": pl.Int64, "verified": pl.Boolean,
}  # fmt: skip


@dataclass(frozen=True)
class Geometry:
    """How a kernel is launched. ``form``: ``one-shot`` (a tile a block) or ``persistent`` (blocks that stay and take tile after tile)."""

    form: str
    grid: int
    block: int
    unroll: int
    stream: int


def geometries(gpu: _device.Gpu, n: int, *, blocks: Iterable[int] = (256, 512, 1024), unrolls: Iterable[int] = (1, 2, 4, 8)) -> list[Geometry]:
    """Return the launches that are tried for ``n`` elements."""
    found = []
    for block, unroll, stream in itertools.product(blocks, unrolls, (0, 1)):
        tiles = -(-n // (block * unroll))
        found.append(Geometry("one-shot", tiles, block, unroll, stream))
        resident = gpu.multiprocessors * (2048 // block)
        found += [Geometry("persistent", resident * k, block, unroll, stream) for k in (1, 2) if resident * k < tiles]
    return found


class Kernels:
    """The six kernels over three arrays of ``size_bytes`` and a word for each thread that reads."""

    def __init__(self, gpu: _device.Gpu, size_bytes: int) -> None:
        self.gpu, self.words = gpu, size_bytes // 4
        self.a, self.b = gpu.reals(self.words), gpu.reals(self.words)
        self.out = gpu.poisoned(self.words, np.float32)

    def sums(self, geometry: Geometry) -> Any:
        """A word for each thread, in the memory that the other kernels write to."""
        return self.out.view(np.uint32)[: max(1, geometry.grid * geometry.block)]

    def args(self, what: str, width: int, geometry: Geometry, *, keep: int = 0) -> tuple[Any, ...]:
        """Arguments of one kernel for elements of ``width`` bytes."""
        n = np.uint64(self.words * 4 // width)
        return {
            "read": (self.a, self.sums(geometry), n, np.uint32(0xDEADBEEF), np.int32(keep)),
            "write": (self.out, n, SEED),
            "copy": (self.a, self.out, n),
            "scale": (self.a, self.out, n, FACTOR),
            "add": (self.a, self.b, self.out, n),
            "triad": (self.a, self.b, self.out, n, FACTOR),
        }[what]

    def launcher(self, what: str, width: int, geometry: Geometry, *, keep: int = 0) -> Callable[[], None]:
        """Return a function that launches it."""
        args = self.args(what, width, geometry, keep=keep)
        return lambda: self.gpu.launch(FILE, what, geometry.grid, geometry.block, *args, WIDTH=width, UNROLL=geometry.unroll, STREAM=geometry.stream)

    def verified(self, what: str, width: int, geometry: Geometry) -> bool:
        """Poison the output, launch once, compare every bit with the twin."""
        xp = self.gpu.xp
        self.out.view(np.uint32)[:] = np.uint32(0xA5A5A5A5)
        self.launcher(what, width, geometry, keep=1)()
        if what == "read":
            return twins.total(xp, self.sums(geometry)) == twins.total(xp, self.a)
        check = self.gpu.poisoned(self.words, np.float32)
        args = tuple(check if arg is self.out else arg for arg in self.args(what, width, geometry))
        twins.TWINS[FILE, what](xp, *args)
        return twins.same(xp, self.out, check)


def search(kernels: Kernels, what: str, width: int, tried: list[Geometry], *, finalists: int = 4, repeats: int = 20) -> dict[str, tuple[Geometry, _device.Times]]:
    """Return the best launch of each form: all are timed briefly, the best few of each form again and longer."""
    gpu = kernels.gpu
    fits = [g for g in tried if what != "read" or g.grid * g.block <= kernels.words]
    brief = {g: gpu.time(kernels.launcher(what, width, g), 3).median_us for g in fits}
    found = {}
    for form in sorted({g.form for g in fits}):
        final = sorted((g for g in fits if g.form == form), key=brief.__getitem__)[:finalists]
        timed = {g: gpu.time(kernels.launcher(what, width, g), repeats) for g in final}
        best = min(timed, key=lambda g: timed[g].median_us)
        found[form] = (best, timed[best])
    return found


def size_for(gpu: _device.Gpu, size_bytes: int | None) -> int:
    """Bytes of one array: 2 GiB where there is room, else an eighth of what is free; at least four times the L2."""
    size = min(2 << 30, gpu.free_bytes // 8) if size_bytes is None else size_bytes
    size = size // (1 << 20) << 20
    if size < 4 * gpu.l2_bytes or size == 0:
        raise NbmemprofError(f"Arrays of {size} bytes would be answered by the L2 ({gpu.l2_bytes} bytes), not by memory. Free some memory or pass a size_bytes of at least four times the L2.")
    return size


def measure(gpu: _device.Gpu, size_bytes: int | None = None, widths: tuple[int, ...] = (4, 8, 16), repeats: int = 20) -> list[dict[str, Any]]:
    """Measure; a row a kernel, width and form of launch."""
    kernels = Kernels(gpu, size_for(gpu, size_bytes))
    rows: list[dict[str, Any]] = []
    for number, (width, (what, arrays)) in enumerate(itertools.product(widths, ARRAYS.items())):
        tried = geometries(gpu, kernels.words * 4 // width)
        say(f"probe bandwidth: {what}, {width} B a lane, {len(tried)} geometries ({number + 1} of {len(widths) * len(ARRAYS)})")
        for form, (geometry, times) in search(kernels, what, width, tried, repeats=repeats).items():
            moved = arrays * kernels.words * 4
            rows.append({
                "what": what, "width": width, "form": form, "moved_bytes": moved, "achieved_bytes_per_s": moved / times.median_us * 1e6,
                "median_us": times.median_us, "low_us": times.low_us, "high_us": times.high_us, "grid": geometry.grid, "block": geometry.block,
                "unroll": geometry.unroll, "streaming": bool(geometry.stream), "tried": len(tried), "repeats": repeats, "verified": kernels.verified(what, width, geometry),
            })  # fmt: skip
    best = {what: max(row["achieved_bytes_per_s"] for row in rows if row["what"] == what) for what in ARRAYS}
    ceiling = max(best.values())
    for row in rows:
        row |= {
            "best": row["achieved_bytes_per_s"] == best[row["what"]], "ceiling_bytes_per_s": ceiling, "share_of_ceiling": row["achieved_bytes_per_s"] / ceiling,
            "datasheet_bytes_per_s": _device.DATASHEET.get(gpu.name), "theory_bytes_per_s": gpu.theory_bytes_per_s,
        }  # fmt: skip
    return rows
