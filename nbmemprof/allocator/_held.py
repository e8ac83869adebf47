"""What a trace says of the memory held, without any rule: segments and mapped ranges that come and go."""

from __future__ import annotations

import bisect

from nbmemprof.allocator import _memory as M

__all__ = ["Held"]


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
