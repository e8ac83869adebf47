"""A line's requests served from memory of its own: the trace edited so, and put through the allocator's model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._infer import Followed, as_recorded
from nbmemprof.allocator._serve import Requests, serve
from nbmemprof.analyses._trials import why_not
from nbmemprof.capture import Capture

__all__ = ["Line", "Spared", "spared"]

_POLICIES: tuple[str | int, ...] = ("windows", "ascending", 1)
Words = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Line:
    """A line and what it would get: ``advice``, a block of ``need_bytes``; ``rows``: which of the capture's allocations are its own."""

    device: int | None
    rank: int | None
    advice: str
    need_bytes: int
    rows: pl.Expr


@dataclass(frozen=True)
class Spared:
    """What the peak of reserved memory would have been below the recorded one, least and most over orders of addresses, and device calls spared."""

    low_bytes: int
    high_bytes: int
    device_calls: int


def spared(capture: Capture, lines: list[Line]) -> list[Spared | None]:
    """What would each line's own memory have saved, the others left as they are?

    Of a ``buffer`` or ``arena`` the first request is for all of it and is never given back; the line's others are not made. Of a ``stream`` the line's frees
    wait for nobody. None: not to be told, as the trace is not followed exactly, is too long, or the line asks on several streams or pools.
    """
    if not lines or why_not(capture) is not None:
        return [None] * len(lines)
    followed = {(one.recording.key[0], one.recording.key[1]): _Tried(one, 1 + len(lines)) for one in as_recorded(capture, None, None, None)}
    return [tried.of(line) if (tried := followed.get((line.rank, line.device))) is not None else None for line in lines]


class _Tried:
    """One device's requests as they were, and with a line's taken out."""

    def __init__(self, one: Followed, lines: int) -> None:
        self.one, self.requests, self.runs = one, Requests(one), lines * len(_POLICIES)
        self.base: dict[str | int, tuple[int, int]] = {}

    def of(self, line: Line) -> Spared | None:
        mine = np.zeros(self.requests.height + 1, bool)
        mine[: self.one.recording.rows.height] = self.one.recording.rows.select(line.rows.fill_null(value=False)).to_series().to_numpy()
        table = self.one.recording.trace.reshape(-1, M.WORDS)
        asks = table[(table[:, M.T_KIND] == M.ALLOC) & (table[:, M.T_ROW] >= 0) & mine[table[:, M.T_ROW]]]
        if not len(asks) or len(np.unique(asks[:, [M.T_STREAM, M.T_POOL]], axis=0)) > 1:
            return None
        less, calls = [], []
        for policy in _POLICIES:
            base, then = self._run(policy, None), self._run(policy, (line, mine))
            less.append(base[0] - then[0])
            calls.append(base[1] - then[1])
        return Spared(min(less), max(less), calls[0])

    def _run(self, policy: str | int, change: tuple[Line, npt.NDArray[np.bool_]] | None) -> tuple[int, int]:
        """Peak of reserved bytes, and device calls."""
        if change is None and policy in self.base:
            return self.base[policy]
        one = self.one
        edit = None if change is None else lambda operations: _edited(operations, *change)
        m = serve(self.requests, one.settings, torch=one.torch, limit_bytes=one.limit_bytes, capacity_bytes=one.capacity_bytes, policy=policy, runs=self.runs, edit=edit).model.m
        found = int(m[M.RESERVED_BYTES + 1]), int(m[M.DEVICE_ALLOC] + m[M.DEVICE_FREE])
        if change is None:
            self.base[policy] = found
        return found


def _edited(operations: Words, line: Line, mine: npt.NDArray[np.bool_]) -> Words:
    """The operations with a line's requests served from its own block."""
    table = operations.copy().reshape(-1, M.WORDS)
    kind, row = table[:, M.T_KIND], table[:, M.T_ROW]
    own = (row >= 0) & mine[row]
    if line.advice == "stream":
        table[own & (kind == M.FREE_REQUESTED), M.T_POOL] = 0
        return table.reshape(-1)
    first = int(np.flatnonzero(own & (kind == M.ALLOC))[0])
    table[first, M.T_SIZE] = line.need_bytes
    own[first] = False
    table[own & np.isin(kind, (M.ALLOC, M.FREE_REQUESTED, M.FREE_COMPLETED)), M.T_KIND] = M.OTHER
    return table.reshape(-1)
