"""A kernel's index arithmetic, run for a block: which lanes touch which addresses, instruction by instruction.

The kernel is a Python function in the style of ``numba.cuda`` (or such a kernel itself): it speaks of ``cuda.threadIdx``, ``cuda.blockIdx``,
``cuda.blockDim``, ``cuda.gridDim``, ``cuda.grid``, ``cuda.shared.array``, ``cuda.syncthreads``, and indexes arrays. Every thread runs in
Python, and what it reads and writes is noted. Accesses of a warp's lanes are one instruction where they stem from the same place
in the code, since the same barrier, at the same repetition.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.access._lanes import LANES, WIDTHS
from nbmemprof.access._warp import GlobalAccess, SharedAccess
from nbmemprof.errors import NbmemprofError

__all__ = ["Site", "Trace", "trace"]

_MAX_THREADS = 1024  # of a block, on every GPU
_SHARED_ALIGN = 16
_GLOBAL_ALIGN = 512  # cudaMalloc gives at least 256, PyTorch and CuPy 512
Place = tuple[int, int]  # line, column


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
    """What the traced blocks did: ``sites``, a frame, and the arrays as they were left."""

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
        notes = _run(function, args, shape, size, at)
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


# ---------------------------------------------------------------------- what a thread sees
@dataclass
class _Dim:
    x: int
    y: int = 1
    z: int = 1


@dataclass
class _Notes:
    """Accesses of one thread: (place, array, space, operation, width, epoch, repetition) -> address."""

    seen: dict[tuple[Any, ...], int] = field(default_factory=dict)
    repeats: dict[tuple[Any, ...], int] = field(default_factory=dict)
    epoch: int = 0

    def add(self, place: Place, array: str, space: str, operation: str, width: int, address: int) -> None:
        site = (*place, array, space, operation, width, self.epoch)
        again = self.repeats.get(site, 0)
        self.repeats[site] = again + 1
        self.seen[(*site, again)] = address


@lru_cache(maxsize=4096)
def _place(code: CodeType, instruction: int) -> Place:
    """Line and column: an inlined call leaves the instruction pointer at one of several places of the same expression."""
    line, _, column, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    return line or 0, instruction if column is None or end is None else column * 1024 + end


class _Array:
    """A NumPy array that notes what is read and written, by the thread that has it."""

    def __init__(self, data: Any, name: str, space: str, base: int, notes: _Notes) -> None:
        self._data, self._name, self._space, self._base, self._notes = data, name, space, base, notes
        self.shape, self.size, self.ndim, self.dtype = data.shape, data.size, data.ndim, data.dtype

    def __len__(self) -> int:
        return len(self._data)

    def _touch(self, index: Any, operation: str) -> Any:
        where = index if isinstance(index, tuple) else (index,)
        if len(where) != self.ndim:
            raise NbmemprofError(f"{self._name}{list(where)}: {len(where)} of {self.ndim} indices. A kernel touches one element at a time: give an index a dimension.")
        flat = 0
        for i, length in zip(where, self.shape, strict=True):
            if not 0 <= int(i) < length:
                raise NbmemprofError(f"{self._name}{[int(one) for one in where]} lies outside its shape {tuple(self.shape)}. Guard the access, or launch fewer threads.")
            flat = flat * length + int(i)
        frame = sys._getframe(2)
        width = self.dtype.itemsize
        self._notes.add(_place(frame.f_code, frame.f_lasti), self._name, self._space, operation, width, self._base + flat * width)
        return tuple(int(one) for one in where)

    def __getitem__(self, index: Any) -> Any:
        return self._data[self._touch(index, "load")]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._data[self._touch(index, "store")] = value


class _Shared:
    """``cuda.shared``: the n-th array that a thread declares is the n-th of its block."""

    def __init__(self, block: _Block, notes: _Notes) -> None:
        self._block, self._notes, self._declared = block, notes, itertools.count()

    def array(self, shape: int | Sequence[int], dtype: Any) -> _Array:
        """Declare shared memory, as in ``numba.cuda``; the type is NumPy's or numba's."""
        number = next(self._declared)
        data, base = self._block.shared(number, shape, np.dtype(str(dtype) if type(dtype).__module__.startswith("numba") else dtype))
        return _Array(data, f"shared {number}" if number else "shared", "shared", base, self._notes)


class _Block:
    """What the threads of a block have in common: shared memory and the barrier."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self._arrays: list[tuple[Any, int]] = []
        self._end = 0
        self._lock = threading.Lock()

    def shared(self, number: int, shape: Any, dtype: Any) -> tuple[Any, int]:
        with self._lock:
            if number == len(self._arrays):
                base = -(-self._end // _SHARED_ALIGN) * _SHARED_ALIGN
                data = np.zeros(shape, dtype)
                self._arrays.append((data, base))
                self._end = base + data.nbytes
            return self._arrays[number]


class _Cuda:
    """The name ``cuda`` as one thread sees it."""

    def __init__(self, thread: tuple[int, int, int], at: tuple[int, int, int], grid: tuple[int, int, int], size: tuple[int, int, int], block: _Block, notes: _Notes) -> None:
        self.threadIdx, self.blockIdx, self.blockDim, self.gridDim = _Dim(*thread), _Dim(*at), _Dim(*size), _Dim(*grid)
        self.laneid = (thread[0] + size[0] * (thread[1] + size[1] * thread[2])) % LANES
        self.warpsize = LANES
        self.shared = _Shared(block, notes)
        self._block, self._notes = block, notes

    def grid(self, dimensions: int) -> Any:
        """Place of this thread in the whole launch."""
        t, b, d = self.threadIdx, self.blockIdx, self.blockDim
        where = (t.x + b.x * d.x, t.y + b.y * d.y, t.z + b.z * d.z)
        return where[0] if dimensions == 1 else where[:dimensions]

    def gridsize(self, dimensions: int) -> Any:
        """Threads of the whole launch."""
        d, g = self.blockDim, self.gridDim
        sizes = (d.x * g.x, d.y * g.y, d.z * g.z)
        return sizes[0] if dimensions == 1 else sizes[:dimensions]

    def syncthreads(self) -> None:
        """Wait for the block's other threads."""
        self._notes.epoch += 1
        self._block.barrier.wait()


# ---------------------------------------------------------------------- a block runs
def _run(function: FunctionType, args: tuple[Any, ...], grid: tuple[int, int, int], size: tuple[int, int, int], at: tuple[int, int, int]) -> list[_Notes]:
    """Run each thread of a block in a Python thread of its own, so that barriers work; they take turns by the interpreter's lock."""
    threads = math.prod(size)
    block, notes = _Block(threads), [_Notes() for _ in range(threads)]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    bases = _bases(args)
    failed: list[tuple[int, BaseException]] = []

    def one(number: int) -> None:
        thread = (number % size[0], number // size[0] % size[1], number // (size[0] * size[1]))
        cuda = _Cuda(thread, at, grid, size, block, notes[number])
        bound = FunctionType(function.__code__, {**function.__globals__, "cuda": cuda}, function.__name__, function.__defaults__, function.__closure__)
        mine = [_Array(a, names[i] if i < len(names) else f"argument {i}", "global", bases[i], notes[number]) if isinstance(a, np.ndarray) else a for i, a in enumerate(args)]
        try:
            bound(*mine)
        except threading.BrokenBarrierError as error:
            failed.append((threads, error))
        except BaseException as error:  # the kernel's own error, told with its thread
            failed.append((number, error))
            block.barrier.abort()

    _together([threading.Thread(target=one, args=(number,), daemon=True) for number in range(threads)], block)
    if failed:
        number, error = min(failed, key=lambda f: f[0])
        if isinstance(error, NbmemprofError):
            raise error
        if isinstance(error, threading.BrokenBarrierError):
            raise NbmemprofError(
                f"In block {at} of {function.__name__} some threads wait at cuda.syncthreads() that others never reach. Move the barrier out of the condition."
            )
        raise NbmemprofError(f"{function.__name__} raised in thread {number} of block {at}: {type(error).__name__}: {error}. Run it as plain Python to see where.") from error
    _same_barriers(function, at, notes)
    return notes


def _together(workers: list[threading.Thread], block: _Block) -> None:
    """Start and end all; where some have ended and the others wait for them, the barrier is broken."""
    for worker in workers:
        worker.start()
    while alive := [worker for worker in workers if worker.is_alive()]:
        alive[0].join(0.05)
        waiting = block.barrier.n_waiting
        if waiting and waiting == sum(worker.is_alive() for worker in workers) < len(workers):
            block.barrier.abort()


def _same_barriers(function: FunctionType, at: Any, notes: list[_Notes]) -> None:
    if len({note.epoch for note in notes}) > 1:
        raise NbmemprofError(f"Threads of block {at} of {function.__name__} pass different numbers of barriers. Move cuda.syncthreads() out of the condition.")


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


def _group(notes: list[_Notes], threads: int, sites: dict[tuple[Any, ...], list[Any]], uneven: set[tuple[Any, ...]]) -> None:
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
