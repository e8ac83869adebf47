"""What a trace says of the memory held, without any rule: segments and mapped ranges that come and go."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._model import Words

__all__ = ["Area", "Held", "reservations"]


class Held:
    """Memory held by the trace's own account: segments, and mapped ranges as they were mapped."""

    def __init__(self) -> None:
        self.begins: list[int] = []
        self.ranges: dict[int, tuple[int, int]] = {}  # begin → bytes, stream
        self.segments: set[int] = set()  # all beginnings of classic ones

    def over(self, addr: int, size: int) -> list[tuple[int, int, int]]:
        """Return what is held of a range: begin, bytes, stream."""
        found = []
        for i in range(max(bisect.bisect_right(self.begins, addr) - 1, 0), len(self.begins)):
            begin = self.begins[i]
            if begin >= addr + size:
                break
            if begin + self.ranges[begin][0] > addr:
                found.append((begin, *self.ranges[begin]))
        return found

    def move(self, kind: int, addr: int, size: int, stream: int) -> list[tuple[int, int, int]]:
        """Take the event in; returns what it gives out a second time."""
        taken = kind in (M.SEGMENT_ALLOC, M.SEGMENT_MAP)
        again = self.over(addr, size)
        for begin, length, of in again:
            self.begins.remove(begin)
            del self.ranges[begin]
            for low, high in ((begin, addr), (addr + size, begin + length)):
                if low < high:
                    self._hold(low, high - low, of)
        if taken:
            self._hold(addr, size, stream)
            if kind == M.SEGMENT_ALLOC:
                self.segments.add(addr)
        return again if taken else []

    def _hold(self, addr: int, size: int, stream: int) -> None:
        bisect.insort(self.begins, addr)
        self.ranges[addr] = (size, stream)

    def classic(self) -> list[tuple[int, int, int]]:
        """Return the segments that are held."""
        return [(begin, *self.ranges[begin]) for begin in self.segments if begin in self.ranges]


@dataclass
class Area:
    """A reservation of expandable segments: the events with which it came and went (one more than there are for one that stays), and its addresses as far as it was ever mapped."""

    begin: int
    end: int
    low: int
    high: int
    mapped: int
    stream: int


def reservations(kind: Words, addr: Words, size: Words, stream: Words) -> list[Area]:
    """Tell reservations apart in a trace from the beginning: each grows from its low end without gaps, is given back when nothing of it is mapped, and is one pool's.

    Allocator rules 1.7: pages are mapped in the lowest hole that serves, so never past the end of what was mapped before.
    """
    made: list[Area] = []
    for i in np.flatnonzero((kind == M.SEGMENT_MAP) | (kind == M.SEGMENT_UNMAP)).tolist():
        at, bytes_ = int(addr[i]), int(size[i])
        live = [a for a in made if a.end == len(kind) and a.stream == stream[i] and a.low <= at <= a.high - (kind[i] == M.SEGMENT_UNMAP)]
        if not live:
            made.append(Area(i, len(kind), at, at, 0, int(stream[i])))
            live = made[-1:]
        area = live[-1]
        area.high = max(area.high, at + bytes_)
        area.mapped += bytes_ if kind[i] == M.SEGMENT_MAP else -bytes_
        if area.mapped <= 0:
            area.end = i
    return made
