"""Threads of a block in Python: each runs the kernel with its own ``cuda``, notes what it touches, and waits at barriers for the others."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CellType, CodeType, FunctionType
from typing import Any

import numpy as np

from nbmemprof.access._lanes import LANES
from nbmemprof.errors import NbmemprofError

__all__ = ["Notes", "run_block"]

_SHARED_ALIGN = 16
Place = tuple[int, int]  # line, column


@dataclass
class _Dim:
    x: int
    y: int = 1
    z: int = 1


@dataclass
class Notes:
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

    def __init__(self, data: Any, name: str, space: str, base: int, notes: Notes) -> None:
        self._data, self._name, self._space, self._base, self._notes = data, name, space, base, notes
        self.shape, self.size, self.ndim, self.dtype = data.shape, data.size, data.ndim, data.dtype

    def __len__(self) -> int:
        return len(self._data)

    def atomic(self, index: Any, change: Callable[[Any, Any], Any], value: Any, lock: threading.Lock) -> Any:
        """Read, change and write one element without another thread in between; returns what was there."""
        if self._space == "shared":
            raise NbmemprofError(f"cuda.atomic on {self._name}: atomics on shared memory are not modelled. Trace the kernel without them, or count it on a GPU.")
        where = self._touch(index, "atomic", 3)
        with lock:
            old = self._data[where]
            self._data[where] = change(old, value)
        return old

    def _touch(self, index: Any, operation: str, depth: int = 2) -> Any:
        where = index if isinstance(index, tuple) else (index,)
        if len(where) != self.ndim:
            raise NbmemprofError(f"{self._name}{list(where)}: {len(where)} of {self.ndim} indices. A kernel touches one element at a time: give an index a dimension.")
        flat = 0
        for i, length in zip(where, self.shape, strict=True):
            if not 0 <= int(i) < length:
                raise NbmemprofError(f"{self._name}{[int(one) for one in where]} lies outside its shape {tuple(self.shape)}. Guard the access, or launch fewer threads.")
            flat = flat * length + int(i)
        frame = sys._getframe(depth)
        width = self.dtype.itemsize
        self._notes.add(_place(frame.f_code, frame.f_lasti), self._name, self._space, operation, width, self._base + flat * width)
        return tuple(int(one) for one in where)

    def __getitem__(self, index: Any) -> Any:
        return self._data[self._touch(index, "load")]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._data[self._touch(index, "store")] = value


class _Shared:
    """``cuda.shared``: the n-th array that a thread declares is the n-th of its block."""

    def __init__(self, block: _Block, notes: Notes) -> None:
        self._block, self._notes, self._declared = block, notes, itertools.count()

    def array(self, shape: int | Sequence[int], dtype: Any) -> _Array:
        """Declare shared memory, as in ``numba.cuda``; the type is NumPy's or numba's."""
        number = next(self._declared)
        data, base = self._block.shared(number, shape, _dtype(dtype))
        return _Array(data, f"shared {number}" if number else "shared", "shared", base, self._notes)


class _Local:
    """``cuda.local``: a thread's own array; its traffic is the compiler's affair and not modelled."""

    def array(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """Return zeros."""
        return np.zeros(shape, _dtype(dtype))


class _Atomic:
    """``cuda.atomic``."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def add(self, array: _Array, index: Any, value: Any) -> Any:
        """Add."""
        return array.atomic(index, lambda old, new: old + new, value, self._lock)

    def sub(self, array: _Array, index: Any, value: Any) -> Any:
        """Subtract."""
        return array.atomic(index, lambda old, new: old - new, value, self._lock)

    def max(self, array: _Array, index: Any, value: Any) -> Any:
        """Keep the larger."""
        return array.atomic(index, max, value, self._lock)

    def min(self, array: _Array, index: Any, value: Any) -> Any:
        """Keep the smaller."""
        return array.atomic(index, min, value, self._lock)

    def exch(self, array: _Array, index: Any, value: Any) -> Any:
        """Put it there."""
        return array.atomic(index, lambda _, new: new, value, self._lock)


def _dtype(given: Any) -> Any:
    return np.dtype(str(given) if type(given).__module__.startswith("numba") else given)


class _Block:
    """What the threads of a block have in common: shared memory and the barriers."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self.warps = [threading.Barrier(min(LANES, threads - first)) for first in range(0, threads, LANES)]
        self.lock = threading.Lock()
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

    def abort(self) -> None:
        """Wake all who wait."""
        for barrier in (self.barrier, *self.warps):
            barrier.abort()


class _Cuda:
    """The name ``cuda`` as one thread sees it."""

    def __init__(self, thread: tuple[int, int, int], at: tuple[int, int, int], grid: tuple[int, int, int], size: tuple[int, int, int], block: _Block, notes: Notes) -> None:
        self.threadIdx, self.blockIdx, self.blockDim, self.gridDim = _Dim(*thread), _Dim(*at), _Dim(*size), _Dim(*grid)
        number = thread[0] + size[0] * (thread[1] + size[1] * thread[2])
        self.laneid, self.warpsize = number % LANES, LANES
        self.shared, self.local, self.atomic = _Shared(block, notes), _Local(), _Atomic(block.lock)
        self._block, self._notes, self._warp = block, notes, block.warps[number // LANES]

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

    def syncwarp(self, mask: int = 0xFFFFFFFF) -> None:
        """Wait for the warp's other threads; all of them, whatever the mask."""
        self._warp.wait()


# ---------------------------------------------------------------------- a block runs
def run_block(function: FunctionType, args: tuple[Any, ...], bases: list[int], grid: tuple[int, int, int], size: tuple[int, int, int], at: tuple[int, int, int]) -> list[Notes]:
    """Run each thread of a block in a Python thread of its own, so that barriers work; they take turns by the interpreter's lock."""
    threads = math.prod(size)
    block, notes = _Block(threads), [Notes() for _ in range(threads)]
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    failed: list[tuple[int, BaseException]] = []

    def one(number: int) -> None:
        thread = (number % size[0], number // size[0] % size[1], number // (size[0] * size[1]))
        cuda = _Cuda(thread, at, grid, size, block, notes[number])
        bound = _bound(function, cuda)
        mine = [_Array(a, names[i] if i < len(names) else f"argument {i}", "global", bases[i], notes[number]) if isinstance(a, np.ndarray) else a for i, a in enumerate(args)]
        try:
            bound(*mine)
        except threading.BrokenBarrierError as error:
            failed.append((threads, error))
        except BaseException as error:  # the kernel's own error, told with its thread
            failed.append((number, error))
            block.abort()

    _together([threading.Thread(target=one, args=(number,), daemon=True) for number in range(threads)], block)
    if failed:
        number, error = min(failed, key=lambda f: f[0])
        if isinstance(error, NbmemprofError):
            raise error
        if isinstance(error, threading.BrokenBarrierError):
            raise NbmemprofError(
                f"In block {at} of {function.__name__} some threads wait at cuda.syncthreads() or cuda.syncwarp() that others never reach. Move the barrier out of the condition."
            )
        raise NbmemprofError(f"{function.__name__} raised in thread {number} of block {at}: {type(error).__name__}: {error}. Run it as plain Python to see where.") from error
    _same_barriers(function, at, notes)
    return notes


def _bound(function: FunctionType, cuda: _Cuda) -> FunctionType:
    """Return the function with this ``cuda`` in place of its own, and so each function of its file that it calls (numba's device functions by their Python)."""
    names = {**function.__globals__, "cuda": cuda}
    for name in function.__code__.co_names:
        called = getattr(names.get(name), "py_func", names.get(name))
        if isinstance(called, FunctionType) and called is not function and "cuda" in called.__code__.co_names:
            names[name] = _bound(called, cuda)
    cells = function.__closure__ or ()
    closure = tuple(CellType(cuda) if name == "cuda" else cell for name, cell in zip(function.__code__.co_freevars, cells, strict=True))
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure or None)


def _together(workers: list[threading.Thread], block: _Block) -> None:
    """Start and end all; where all that are left wait for some that have ended, the barriers are broken. An interrupt ends those that wait."""
    try:
        for worker in workers:
            worker.start()
        while alive := [worker for worker in workers if worker.is_alive()]:
            alive[0].join(0.05)
            waiting = block.barrier.n_waiting + sum(warp.n_waiting for warp in block.warps)
            if waiting and waiting == sum(worker.is_alive() for worker in workers) and _stuck(block):
                block.abort()
    except BaseException:
        block.abort()
        raise


def _stuck(block: _Block) -> bool:
    """Whether no barrier can fill any more: nobody runs, and none is complete."""
    return all(barrier.n_waiting < barrier.parties for barrier in (block.barrier, *block.warps))


def _same_barriers(function: FunctionType, at: Any, notes: list[Notes]) -> None:
    if len({note.epoch for note in notes}) > 1:
        raise NbmemprofError(f"Threads of block {at} of {function.__name__} pass different numbers of barriers. Move cuda.syncthreads() out of the condition.")
