"""The layout of the heap before a trace, walked back from the final picture."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from nbmemprof.heap import _follow
from nbmemprof.heap._columns import Array

if TYPE_CHECKING:
    from nbmemprof.heap._group import Group

__all__ = ["Layout", "walk_back"]


class Layout:
    """The layout of a group's heap before its first event, as flat arrays for the kernel."""

    def __init__(self, group: Group) -> None:
        self.group = group
        segments = walk_back(group.segments, group.act, group.addr, group.size, group.stream)
        segments.sort()
        self.segments = segments
        self.addr = [s[0] for s in segments]
        rows = np.flatnonzero(group.row_alloc < 0)
        first = group.row_first[rows]
        addresses = np.zeros(len(rows), np.int64)
        paired = first >= 0
        addresses[paired] = group.addr[first[paired]]
        addresses[~paired] = group.extra_addr
        order = np.argsort(addresses, kind="stable")
        self._lay(rows[order].tolist(), addresses[order].tolist(), group.end_size[rows[order]].tolist(), group)

    def _lay(self, rows: list[int], addresses: list[int], sizes: list[int], group: Group) -> None:
        """Tile every run: border, blocks and free gaps in the order of addresses, border."""
        self.out: list[tuple[int, int, int, int]] = []  # addr, size, state, run
        self.heads, self.tails = [], []
        self.row_of_block: tuple[list[int], list[int]] = ([], [])
        self.unsure_rows: list[tuple[int, int, int, int]] = []  # addr, block, row, room
        i = 0
        for run, (addr, size, *_rest) in enumerate(self.segments):
            end, at = addr + size, addr
            self.heads.append(len(self.out))
            self.out.append((addr, 0, 3, run))
            while i < len(rows) and addresses[i] < addr:
                i += 1
            while i < len(rows) and addresses[i] < end:
                here, row, length = addresses[i], rows[i], sizes[i]
                i += 1
                if here < at:  # overlaps the one before
                    continue
                room = (addresses[i] if i < len(rows) and addresses[i] < end else end) - here
                if here > at:
                    self.out.append((at, here - at, 0, run))
                block = len(self.out)
                if length < 0 or length > room:
                    self.unsure_rows.append((here, block, row, room))
                    length = room
                pending = group.row_free[row] == 0
                self.out.append((here, length, 2 if pending else 1, run))
                self.row_of_block[0].append(row)
                self.row_of_block[1].append(block)
                at = here + length
            if at < end:
                self.out.append((at, end - at, 0, run))
            self.tails.append(len(self.out))
            self.out.append((end, 0, 3, run))
        self.used = len(self.out)

    def blocks(self, grow: int) -> dict[str, Array]:
        table = np.asarray(self.out, np.int64).reshape(-1, 4)
        n = len(table) + grow
        made = {
            name: np.empty(n, kind)
            for name, kind in {
                "addr": np.int64,
                "size": np.int64,
                "prev": np.int32,
                "next": np.int32,
                "state": np.int8,
                "run": np.int32,
                "where": np.int32,
            }.items()
        }
        used = np.arange(self.used)
        for position, name in enumerate(("addr", "size", "state", "run")):
            made[name][: self.used] = table[:, position]
        made["prev"][: self.used], made["next"][: self.used] = used - 1, used + 1
        made["prev"][self.heads], made["next"][self.tails] = self.heads, self.tails
        universe = self.group.universe
        place = np.searchsorted(universe, table[:, 0]) if len(universe) else np.zeros(len(table), np.int64)
        hit = (place < len(universe)) & (table[:, 2] != 3)
        hit[hit] = universe[place[hit]] == table[hit, 0]
        made["where"][: self.used] = np.where(hit, place, -1)
        return made

    def runs(self, grow: int) -> list[Array]:
        n = len(self.segments)
        columns = [
            [s[0] for s in self.segments],
            [s[0] + s[1] for s in self.segments],
            self.heads,
            self.tails,
            [1] * n,
            [int(s[2]) for s in self.segments],
            [s[3] for s in self.segments],
        ]
        made = []
        for values in [*columns, list(range(n))]:
            array = np.zeros(n + grow, np.int64)
            array[:n] = values
            made.append(array)
        return made

    def unsure(self, rounded: Array) -> tuple[Array, Array, Array, Array]:
        """Blocks of unknown size; one whose room is its rounded request has that size for certain."""
        tight = [row for _, _, row, room in self.unsure_rows if room == rounded[row]]
        loose = [u for u in self.unsure_rows if u[3] != rounded[u[2]]]
        columns = np.asarray([u[:3] for u in loose], np.int64).reshape(-1, 3)
        return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy(), np.asarray(tight, np.int64)


def signed(addr: int) -> int:
    """An address as the int64 of the same bits, which is what arrays of addresses hold here."""
    return addr - (1 << 64) if addr >= 1 << 63 else addr


def walk_back(segments: pl.DataFrame, act: Array, addr: Array, size: Array, stream: Array) -> list[tuple[int, int, bool, int]]:
    """Segments before the first of these events: (addr, size, expandable, stream). Undoes the events from last to first."""
    here: dict[int, tuple[int, bool, int]] = {}
    starts: list[int] = []  # ascending: what holds an address is found by bisection, however many ranges there are

    def put(start: int, value: tuple[int, bool, int]) -> None:
        if start not in here:
            insort(starts, start)
        here[start] = value

    def take(start: int) -> tuple[int, bool, int] | None:
        if start in here:
            del starts[bisect_left(starts, start)]
        return here.pop(start, None)

    for a, s, expandable, line in segments.select("addr", "size_bytes", "is_expandable", "stream").iter_rows():
        if s:
            here[signed(int(a))] = (int(s), bool(expandable), int(line or 0))
    starts += sorted(here)
    for i in np.flatnonzero((act >= _follow.SEGMENT_ALLOC) & (act <= _follow.UNMAP))[::-1].tolist():
        a, s, line = int(addr[i]), int(size[i]), int(stream[i])
        match act[i]:
            case _follow.SEGMENT_ALLOC:
                take(a)
            case _follow.SEGMENT_FREE:
                put(a, (s, False, line))
            case _follow.MAP:
                at = bisect_right(starts, a) - 1
                b = starts[at] if at >= 0 else a
                t, expandable, owner = here.get(b, (0, False, 0))
                if at >= 0 and a + s <= b + t:
                    take(b)
                    if b < a:
                        put(b, (a - b, expandable, owner))
                    if a + s < b + t:
                        put(a + s, (b + t - a - s, expandable, owner))
            case _:
                at = bisect_left(starts, a) - 1
                t, expandable, owner = here[starts[at]] if at >= 0 else (0, False, 0)
                begin = starts[at] if at >= 0 and expandable and owner == line and starts[at] + t == a else a
                above = take(a + s) if a + s in here and here[a + s][1:] == (True, line) else None
                put(begin, (a - begin + s + (above[0] if above else 0), True, line))
    return [(a, s, e, o) for a, (s, e, o) in here.items()]
