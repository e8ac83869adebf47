"""A kernel's index arithmetic, run for a block: which lanes touch which addresses, instruction by instruction.

The kernel is a Python function in the style of ``numba.cuda`` (or such a kernel itself): it speaks of ``cuda.threadIdx``, ``cuda.blockIdx``,
``cuda.blockDim``, ``cuda.gridDim``, ``cuda.grid``, ``cuda.shared.array``, ``cuda.local.array``, ``cuda.syncthreads``, ``cuda.syncwarp``,
``cuda.atomic``, calls functions of its file, and indexes arrays. Every thread runs in Python, and what it reads and writes is noted.
Accesses of a warp's lanes are one instruction where they stem from the same place in the code, since the same barrier, at the same
repetition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.access._lanes import LANES, WIDTHS
from nbmemprof.access._simt import Notes, run_block
from nbmemprof.access._warp import GlobalAccess, SharedAccess
from nbmemprof.errors import NbmemprofError

__all__ = ["Site", "Trace", "trace"]

_MAX_THREADS = 1024  # of a block, on every GPU
_GLOBAL_ALIGN = 512  # cudaMalloc gives at least 256, PyTorch and CuPy 512


@dataclass(frozen=True)
class Site:
    """One place in the kernel that touches memory, over all traced warps.

    Attributes
    ----------
    line
        Line in the kernel's file, and its text in ``source``.
    array, space, operation, width
        What is touched: the argument's name, ``global`` or ``shared``, ``load`` or ``store``, bytes a lane.
    accesses
        One a warp instruction.
    aligned
        Whether all active lanes repeated this place equally often between two barriers. Where not (a loop whose length differs from lane to
        lane, inside another loop), the grouping by repetition is an approximation.
    """

    line: int
    source: str
    array: str
    space: str
    operation: str
    width: int
    accesses: tuple[GlobalAccess | SharedAccess, ...]
    aligned: bool = True

    @property
    def worst(self) -> GlobalAccess | SharedAccess:
        """The access that wastes most, by transactions too many; of those alike the first."""
        return max(self.accesses, key=lambda one: one.sectors / max(one.ideal_unique_sectors, 1) if isinstance(one, GlobalAccess) else one.wavefronts / max(one.ideal_wavefronts, 1))

    def total(self, name: str) -> int:
        """Sum of one of the accesses' numbers: ``sectors``, ``ideal_sectors``, ``wavefronts``, ``ideal_wavefronts``."""
        return sum(int(getattr(one, name)) for one in self.accesses)


@dataclass(frozen=True)
class Trace:
    """What the traced blocks did: ``sites``, a frame, and the arrays as they were left.

    Attributes
    ----------
    kernel
        The kernel's name.
    block
        Threads of a block, x first.
    blocks
        Indices of the blocks that ran.
    sites
        Each place of the kernel that touches memory, a :class:`Site`.
    """

    kernel: str
    block: tuple[int, int, int]
    blocks: tuple[tuple[int, int, int], ...]
    sites: tuple[Site, ...] = field(repr=False)

    @property
    def frame(self) -> pl.DataFrame:
        """One row a site.

        Returns
        -------
        ``line source array space operation width instructions transactions ideal_transactions per_instruction efficiency aligned``.
        Transactions are sectors in global memory, wavefronts in shared memory; ideal is what the same lanes' data need side by side
        (distinct bytes), without a conflict.
        """
        rows = []
        for site in self.sites:
            names = ("sectors", "ideal_unique_sectors") if site.space == "global" else ("wavefronts", "ideal_wavefronts")
            done, ideal = (site.total(name) for name in names)
            rows.append((
                site.line, site.source, site.array, site.space, site.operation, site.width, len(site.accesses),
                done, ideal, done / len(site.accesses), ideal / done if done else 1.0, site.aligned,
            ))  # fmt: skip
        return pl.DataFrame(rows, schema=_COLUMNS, orient="row")

    def suggestions(self) -> list[tuple[Site, Any]]:
        """For each site that wastes, what the model says is better for its worst access."""
        return [(site, one) for site in self.sites for one in site.worst.suggestions()[:2]]

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from nbmemprof.views.warp import trace_bundle

        return trace_bundle(self)


_COLUMNS: dict[str, Any] = {
    "line": pl.Int64, "source": pl.String, "array": pl.String, "space": pl.String, "operation": pl.String, "width": pl.Int64, "instructions": pl.Int64,
    "transactions": pl.Int64, "ideal_transactions": pl.Int64, "per_instruction": pl.Float64, "efficiency": pl.Float64, "aligned": pl.Boolean,
}  # fmt: skip


def trace(
    kernel: Callable[..., Any],
    *args: Any,
    grid: int | Sequence[int] = 1,
    block: int | Sequence[int] = LANES,
    blocks: Sequence[int | Sequence[int]] | None = None,
) -> Trace:
    """Run a kernel's index arithmetic for a block and note every access to memory.

    Parameters
    ----------
    kernel
        A Python function in the style of ``numba.cuda``, or a kernel that it compiled. The name ``cuda`` inside it is ours for the run.
    *args
        NumPy arrays (C order; they are read and written, as the kernel would) and scalars.
    grid, block
        Blocks of the launch, threads of a block: a number or up to three.
    blocks
        Which blocks run; the first alone unless said.

    Raises
    ------
    NbmemprofError
        A block of more than 1024 threads, an index outside its array, an element type that no instruction moves, threads of a block that
        don't all reach a barrier, or an error of the kernel's own, with its thread.

    Examples
    --------
    >>> import nbmemprof as mp, numpy as np
    >>> def scale(x, y):
    ...     i = cuda.grid(1)
    ...     y[i] = 2 * x[i * 8]
    >>> traced = mp.access.trace(scale, np.ones(256, np.float32), np.zeros(32, np.float32))
    >>> [(site.operation, site.total("sectors")) for site in traced.sites]
    [('load', 32), ('store', 4)]
    """
    size, shape = _three(block), _three(grid)
    if math.prod(size) > _MAX_THREADS or min(size) < 1:
        raise NbmemprofError(f"A block has 1 to {_MAX_THREADS} threads; {size} are {math.prod(size)}. Use a smaller block.")
    chosen = [_three(one, 0) for one in blocks] if blocks is not None else [(0, 0, 0)]
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, FunctionType):
        raise NbmemprofError(f"{kernel!r} is no Python function and has none inside (py_func). Pass a plain function, or a numba.cuda kernel.")
    sites: dict[tuple[Any, ...], list[GlobalAccess | SharedAccess]] = {}
    uneven: set[tuple[Any, ...]] = set()
    for at in chosen:
        notes = run_block(function, args, _bases(args), shape, size, at)
        _group(notes, math.prod(size), sites, uneven)
    source = _lines(function)
    made = [
        Site(key[0], source.get(key[0], ""), key[2], key[3], key[4], key[5], tuple(accesses), key not in uneven)
        for key, accesses in sorted(sites.items(), key=lambda one: one[0][0])
    ]
    return Trace(function.__name__, size, tuple(chosen), tuple(made))


def _three(value: int | Sequence[int], fill: int = 1) -> tuple[int, int, int]:
    numbers = [int(value)] if isinstance(value, (int, np.integer)) else [int(one) for one in value]
    x, y, z = [*numbers, fill, fill, fill][:3]
    return x, y, z


def _lines(function: FunctionType) -> dict[int, str]:
    import inspect

    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        return {}
    return {first + i: line.strip() for i, line in enumerate(lines)}


def _bases(args: tuple[Any, ...]) -> list[int]:
    """Addresses of the arrays, one after the other, each at a multiple of 512 as an allocator gives them."""
    bases, end = [], 0
    for arg in args:
        bases.append(end)
        if isinstance(arg, np.ndarray):
            if arg.dtype.itemsize not in WIDTHS:
                raise NbmemprofError(f"Elements of {arg.dtype} are {arg.dtype.itemsize} bytes: no single instruction moves them. Pass an array a field, or a view of 4-byte words.")
            if not arg.flags.c_contiguous:
                raise NbmemprofError(f"An array of shape {arg.shape} is not in C order; addresses are counted by shape. Pass numpy.ascontiguousarray(it).")
            end += -(-arg.nbytes // _GLOBAL_ALIGN) * _GLOBAL_ALIGN
    return bases


def _group(notes: list[Notes], threads: int, sites: dict[tuple[Any, ...], list[Any]], uneven: set[tuple[Any, ...]]) -> None:
    """Join the lanes of each warp into instructions."""
    for first in range(0, threads, LANES):
        warp = notes[first : first + LANES]
        found: dict[tuple[Any, ...], list[int | None]] = {}
        for lane, note in enumerate(warp):
            for key, address in note.seen.items():
                found.setdefault(key, [None] * LANES)[lane] = address
        for key, lanes in found.items():  # in the order of execution
            kind = GlobalAccess if key[3] == "global" else SharedAccess
            sites.setdefault(key[:6], []).append(kind(tuple(lanes), key[5], key[4]))
        for site in {key[:7] for key in found}:
            counts = {n for note in warp if (n := note.repeats.get(site, 0))}
            if len(counts) > 1:
                uneven.add(site[:6])
