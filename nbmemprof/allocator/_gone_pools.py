"""Private pools that are gone at the end: no event of torch up to 2.13 tells which requests were theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._attempt import Followed, times
from nbmemprof.allocator._model import Words
from nbmemprof.allocator._recording import UNNAMED, Recording

__all__ = ["Division", "reroute", "supposed"]

_FOLLOWED = 1_000_000  # events, about 8 s where they are not compiled
_SIDEWAYS = 40  # steps without getting further before the search gives up: within a flush segments are taken off one by one


@dataclass(frozen=True)
class Division:
    """Which requests are taken for which pool's, and how far the trace is followed with it."""

    found: Followed
    trace: Words
    names: list[str]
    segments: int  # given to private pools

    @classmethod
    def of(cls, found: Followed, segments: int = 0) -> Division:
        """As the recording has it now."""
        return cls(found, found.recording.trace.copy(), list(found.recording.pool_names), segments)

    def apply(self) -> None:
        """Let the recording have it again."""
        self.found.recording.trace[:] = self.trace
        self.found.recording.pool_names[:] = self.names


def reroute(found: Followed, again: Callable[[frozenset[str]], Followed], most: int = _FOLLOWED) -> list[Division]:
    """Whether segments that are gone at the end were private pools': a segment is taken for one where the trace is then followed further.

    At a difference either the block that the rules would have used was not theirs to use, or the recorded one lies in a pool of its own.
    A pool gives its segments back when it has gone, so those that went together are tried as one pool first.
    Returns the division that the recording tells, then those with which the trace was followed further and further; the last is in the recording.
    ``again`` follows the trace once more, with these pools taken for made without splitting; ``most``: events that are followed in all.
    """
    recording = found.recording
    search = _Search(recording, again, found.terms.whole, most)
    trail = [Division.of(found)]
    while not found.exact and search.left > 0:
        step = search.step(found)
        if step is None:
            break
        found = step
        if found.exact or _reached(found) > _reached(trail[-1].found):
            trail.append(Division.of(found, len(search.routed)))
            search.sideways = 0
        elif search.sideways > _SIDEWAYS:
            break
    trail[-1].apply()
    if len(trail) > 1:
        trail[-1].found.inferred.append(supposed(trail[0], trail[-1]))
    return trail


def supposed(first: Division, last: Division) -> str:
    """What a division supposes, as a sentence."""
    return (
        f"{times(last.segments, 'segment')} that served some requests only and are gone at the end are taken for private pools' ({len(last.names) - len(first.names)} without a name): "
        "with them the rest is followed, though another division into pools could do so too"
    )


def _reached(found: Followed) -> int:
    return int(found.model.m[M.AT])


class _Search:
    def __init__(self, recording: Recording, again: Callable[[frozenset[str]], Followed], whole: frozenset[str], most: int) -> None:
        self.recording, self.follow, self.whole, self.left = recording, again, whole, most
        self.sideways = 0
        self.tried: set[tuple[int, int]] = set()  # (segment, pool)
        self.went: dict[int, set[int]] = {}  # unnamed pool → flushes in which segments of its went
        back = np.isin(recording.kind, (M.SEGMENT_FREE, M.SEGMENT_UNMAP, M.OTHER))
        self.burst = np.cumsum(~back)

    def again(self, whole: frozenset[str]) -> Followed:
        """Follow the trace once more, and count how far."""
        other = self.follow(whole)
        self.left -= _reached(other) // M.WORDS + self.recording.events.height // 20  # what it takes to begin
        return other

    def step(self, found: Followed) -> Followed | None:
        """Route one segment; returns the attempt that got furthest, or one that got as far and differs elsewhere."""
        recording, mismatch = self.recording, found.mismatch
        assert mismatch is not None  # noqa: S101 - asked for where something differs
        if mismatch["index"] >= recording.events.height:
            return self._pictured(found)
        kept, known = recording.trace.copy(), list(recording.pool_names)
        aside = None
        for segment, number in self._options(found):
            if self.left <= 0 or (segment[0], number) in self.tried:
                continue
            if recording.route(segment, number):
                other = self.again(self.whole)
                if other.exact or _reached(other) > _reached(found):
                    return self._take(segment, number, other)
                elsewhere = other.mismatch is not None and other.mismatch["expected"] != mismatch["expected"]
                if aside is None and elsewhere and _reached(other) == _reached(found):
                    aside = segment, number, other, recording.trace.copy(), list(recording.pool_names)
                    if mismatch["expected"]["action"] == "segment_free":  # in whatever pool it is, this flush passes it over
                        break
            recording.trace[:] = kept
            recording.pool_names[:] = known
        unsplit = self._unsplit(found)
        if unsplit is not None or aside is None:
            return unsplit
        segment, number, other, recording.trace[:], recording.pool_names[:] = aside
        self.sideways += 1
        return self._take(segment, number, other)

    def _pictured(self, found: Followed) -> Followed | None:
        """All events are followed and the final picture is not: a pool that is there was made without splitting."""
        for name in self.recording.pool_names[1:]:
            if name not in self.whole and self.left > 0:
                other = self.again(self.whole | {name})
                if other.exact:
                    self.whole |= {name}
                    return other
        return None

    def _unsplit(self, found: Followed) -> Followed | None:
        """Take the pool of the block that the rules would use for one made without splitting: what would be left of a block is not there."""
        recording, mismatch = self.recording, found.mismatch
        if mismatch is None or mismatch["expected"] is None or mismatch["expected"]["action"] != "alloc":
            return None
        addr, index = mismatch["expected"]["addr"], min(mismatch["index"], recording.events.height - 1)
        segment, known, kept = recording.segment_gone(addr, index), list(recording.pool_names), recording.trace.copy()
        if segment is None:  # it stays, so its pool has a name
            options = [recording.pool_at(addr, index) or len(known)]
        else:
            now, unnamed = recording.pool_beside(addr, index), [i for i, name in enumerate(known) if name.startswith(UNNAMED)]
            options = list(dict.fromkeys([*([now] if now else []), *reversed(unnamed), len(known), *range(1, len(known))]))
        for number in options if self.left > 0 else ():
            if segment is not None:
                recording.route(segment, number)
            whole = self.whole | ({recording.pool_names[number]} if number < len(recording.pool_names) else set())
            if whole != self.whole:
                other = self.again(whole)
                if other.exact or _reached(other) > _reached(found):
                    self.whole = whole
                    return other if segment is None else self._take(segment, number, other)
            recording.trace[:] = kept
            recording.pool_names[:] = known
        return None

    @property
    def routed(self) -> set[int]:
        """Segments that were given to a pool."""
        return {segment for segment, _ in self.tried}

    def _take(self, segment: tuple[int, int], number: int, other: Followed) -> Followed:
        self.tried.add((segment[0], number))
        self.went.setdefault(number, set()).add(int(self.burst[segment[1]]))
        return other

    def _options(self, found: Followed) -> Iterator[tuple[tuple[int, int], int]]:
        mismatch, recording = found.mismatch, self.recording
        if mismatch is None or mismatch["expected"] is None or mismatch["found"] is None:
            return
        unnamed = [i for i, name in enumerate(recording.pool_names) if name.startswith(UNNAMED)]
        if mismatch["found"]["action"] == "oom":  # a refused request names no pool either; within a pool nothing is flushed for it
            for number in dict.fromkeys([*self._pools_near(mismatch["index"]), *range(len(recording.pool_names))]):
                yield (mismatch["index"], mismatch["index"] + 1), number
        for side in ("expected", "found"):
            segment = recording.segment_gone(mismatch[side]["addr"], min(mismatch["index"], recording.events.height - 1))
            if segment is None:
                continue
            together = [i for i in unnamed if int(self.burst[segment[1]]) in self.went.get(i, ())]
            for number in dict.fromkeys([*together, *reversed(unnamed), len(recording.pool_names), 0]):
                yield segment, number

    def _pools_near(self, index: int) -> list[int]:
        """Pools of the requests before and after an event."""
        recording = self.recording
        asks = np.flatnonzero(recording.kind == M.ALLOC)
        at = int(np.searchsorted(asks, index))
        pools = recording.trace[M.T_POOL :: M.WORDS]
        return [int(pools[i]) for i in asks[max(at - 1, 0) : at + 1]]
