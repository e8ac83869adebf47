"""Which event is missing, and where: the one event with which the rules follow a trace that they could not follow without it.

A difference shows where the recording can't be true any more; the event that is missing may have been earlier. What the rest of the
trace tells (a free without its alloc, a request that never completes, a segment that is gone) names suspects. Each is put in at
every place that is possible for it, and the trace is followed again: places at which all that comes after agrees are those that the
recording allows; between two of them it holds nothing that could tell them apart.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.allocator import _blocks, _run
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._attempt import ACTIONS, Followed, Prepared, end_differs, mismatch_at, prepare
from nbmemprof.allocator._link import worth
from nbmemprof.allocator._recording import Recording
from nbmemprof.allocator._suspects import Suspect, suspects
from nbmemprof.units import format_bytes, format_count

__all__ = ["Trials", "locate", "refusal_by_stack", "shown"]

_NO_STACK = (1 << 32) - 1
_INTERPRETED, _COMPILED = 800_000, 60_000_000  # events followed in all trials, about 8 s at most
_FURTHER = 64  # events that one more must explain where it does not explain all: what the rules would do here always explains one
_AROUND = 8  # events that one request can have had before the one that can't be followed
_EACH = 128  # places that are all tried at first; of more a few


@dataclass(frozen=True)
class _Found:
    suspect: Suspect
    low: int
    high: int
    reached: int  # first event at which the trace still differs; one more than there are for none


def locate(found: Followed, *, part: bool = True) -> bool:
    """Write to the mismatch which event is ``missing`` and ``between`` which places it was; the verdict is about the last of them.

    Returns whether that one event explains the whole trace; ``part``: write it too where it explains much of it and no more.
    """
    mismatch, recording = found.mismatch, found.recording
    if mismatch is None:
        return True
    trials, best = Trials(found), None
    for suspect in suspects(found):
        place = trials.places(suspect)
        if place is not None and (best is None or place.reached > best.reached):
            best = place
        if trials.spent > trials.budget or (best is not None and best.reached > trials.end):
            break
    if best is not None and (best.reached > trials.end or (part and best.reached >= trials.at + _FURTHER)):
        _tell(recording, mismatch, best)
    return best is not None and best.reached > trials.end


def shown(found: Followed, suspect: Suspect | None) -> bool:
    """Write to the mismatch an event that the trace itself shows to be missing: where it was follows from what must have come before and after it, whatever the pools are. Returns whether there is one."""
    if suspect is None or suspect.certain is None or found.mismatch is None:
        return False
    (low, high), end = suspect.certain, found.recording.events.height
    what = _named(found.mismatch, suspect)
    last = f"event {format_count(high)}" if high < end else "the end"
    if low == high:
        reason = f"{what} is missing right before {last}, as its neighbours show"
    else:
        reason = f"{what} is missing: it was behind event {format_count(low - 1)} and before {last}, as both show; which requests were those of private pools that are gone is not known, so no rule tells more"
    _put(found.recording, found.mismatch, (low, high), reason)
    return True


def _tell(recording: Recording, mismatch: dict[str, Any], best: _Found) -> None:
    end, what = recording.events.height, _named(mismatch, best.suspect)
    rest = "all the rest follows" if best.reached > end else f"the rest follows up to event {format_count(best.reached)}"
    place = f"before event {format_count(best.high)}" if best.high < end else "behind the last event"
    if best.low == best.high:
        reason = f"{what} is missing right {place}: with it there {rest}"
    else:
        reason = f"{what} is missing, lost between events {format_count(best.low)} and {format_count(best.high)}: at any place from the one to the other {rest}, and nothing recorded tells which it was"
    if best.suspect.guess:
        reason += "; nothing else recorded is of it, so it may have been another one before"
    _put(recording, mismatch, (0 if best.suspect.guess else best.low, best.high), reason)


def _named(mismatch: dict[str, Any], suspect: Suspect) -> str:
    """Write down which event is missing; returns it in words."""
    action = ACTIONS[suspect.kind]
    mismatch["missing"] = {"action": action, "addr": suspect.addr, "bytes": suspect.size, "stream": suspect.stream}
    what = f"{'an' if action[0] in 'ao' else 'a'} {action}"
    return f"{what} (a request that was refused)" if suspect.kind == M.OOM else f"{what} of {format_bytes(suspect.size)} at {suspect.addr:#x}"


def _put(recording: Recording, mismatch: dict[str, Any], between: tuple[int, int], reason: str) -> None:
    """Write down the places; wherever it was, from the last of them on the trace is not what happened."""
    mismatch["between"] = list(between)
    mismatch.update(mismatch_at(recording, between[1], reason, dict(mismatch["missing"])) | {"noticed": mismatch["index"]})


def refusal_by_stack(found: Followed) -> dict[str, Any] | None:
    """Find a refusal whose ``oom`` is missing by the call stack of the memory that was given back for it.

    Memory given back for a request has the stack of that request (``release_cached_blocks(context, ...)`` in ``malloc``); from
    ``empty_cache()`` it has the stack of that call, or where such calls' stacks are not recorded that of the segment's own ``segment_alloc``.
    """
    recording = found.recording
    moments = found.moments[: int(found.model.m[M.FOUND])].reshape(-1, 2)
    flushes = (moments[moments[:, 1] == 0, 0] // M.WORDS).tolist()
    if not flushes or recording.events["stack_id"].null_count() == recording.events.height:
        return None
    stack = recording.events["stack_id"].fill_null(_NO_STACK).to_numpy()
    kind, addr, size = recording.kind, recording.addr, recording.size
    taken = np.flatnonzero((kind == M.SEGMENT_ALLOC) | (kind == M.SEGMENT_MAP))
    known = {_NO_STACK, *_calls_of_empty_cache(recording)}
    for begin in flushes:
        end = begin
        while end < len(kind) and kind[end] in (M.SEGMENT_FREE, M.SEGMENT_UNMAP, M.OTHER):
            end += 1
        told = int(stack[begin])
        if told in known or (end < len(kind) and int(stack[end]) == told):  # served by new memory, after the driver had refused
            continue
        before = taken[: np.searchsorted(taken, begin)]
        own = before[(addr[before] < addr[begin] + size[begin]) & (addr[before] + size[before] > addr[begin])]
        if not len(own) or (stack[own] == told).any():
            continue
        reason = "memory was given back by a request, as the call stack shows, and no request is recorded: an oom (a request that was refused) is missing right before this event"
        missing = {"action": "oom", "addr": None, "bytes": None, "stream": recording.events["stream"][begin]}
        return mismatch_at(recording, end, reason, None) | {"missing": missing, "between": [end, end], "noticed": begin}
    return None


def _calls_of_empty_cache(recording: Recording) -> set[int]:
    stacks = recording.capture.tables["stacks"]
    found: set[int] = set(stacks.filter(pl.col("function").cast(pl.String) == "empty_cache")["stack_id"].to_list())
    return found


class Trials:
    """Follow the trace with one event more; beginnings that were followed once are kept."""

    def __init__(self, found: Followed) -> None:
        self.found, self.recording = found, found.recording
        assert found.mismatch is not None  # noqa: S101 - asked for where something differs
        self.at, self.end = int(found.mismatch["index"]), self.recording.events.height
        self.work = 12 * self.end
        self.budget = _INTERPRETED if worth(_run.run, self.work) is None else _COMPILED
        self.spent = 0
        self._kept: dict[tuple[int, int], Prepared] = {}  # by event and the row that is not there at the beginning

    # ------------------------------------------------------------------ places
    def places(self, suspect: Suspect) -> _Found | None:
        """Where the event can have been; None where it explains nothing."""
        if suspect.low > suspect.high or not self._helps(suspect):
            return None
        where = self._open(suspect)
        if suspect.kind == M.ALLOC:
            serving = self._serving(suspect)
            where = [place for place in where if place in serving]
        if not where:
            return None
        best, at = -1, -1
        for place in self._first(suspect, where):
            reached = self.run(suspect, place)
            if reached > best:
                best, at = reached, place
            if best > self.end or self.spent > self.budget:
                break
        if best <= max(self.at, at):
            return None
        least, most = self._around(suspect, where, where.index(at), best)
        return _Found(suspect, where[least], where[most], best)

    def _open(self, suspect: Suspect) -> list[int]:
        """Places that are not within a free or a flush."""
        low, high, kind, row = suspect.low, suspect.high, self.recording.kind, self.recording.trace[M.T_ROW :: M.WORDS]
        if suspect.kind in (M.FREE_REQUESTED, M.FREE_COMPLETED):
            return list(range(low, high + 1))
        at = np.arange(low, high + 1)
        before, after = np.maximum(at - 1, 0), np.minimum(at, self.end - 1)
        pair = (kind[before] == M.FREE_REQUESTED) & (kind[after] == M.FREE_COMPLETED) & (row[before] == row[after])
        burst = np.isin(kind[before], (M.SEGMENT_FREE, M.SEGMENT_UNMAP)) & np.isin(kind[after], (M.SEGMENT_FREE, M.SEGMENT_UNMAP))
        places: list[int] = at[(at == low) | (at == high) | ~(pair | burst)].tolist()
        return places

    def _first(self, suspect: Suspect, where: list[int]) -> list[int]:
        """Places in the order in which they are tried: where it is missed, the borders, then in between."""
        missed = where[int(np.argmin(np.abs(np.asarray(where) - self.at)))]
        rest = where[::-1] if len(where) <= _EACH else [where[i] for i in np.linspace(len(where) - 1, 0, 24).astype(int)]
        return list(dict.fromkeys([where[-1], missed, where[0], *rest]))

    def _serving(self, suspect: Suspect) -> set[int]:
        """Places at which the block that the alloc got is the one that the rules would give, and those around the event that can't be followed without it."""
        state = self._copy(self._state(suspect, suspect.low))
        model, trace = state.model, state.trace
        found: set[int] = set()
        pool = model.pools[suspect.pool]
        for place in range(suspect.low, suspect.high + 1):
            model.m[M.STOP] = place * M.WORDS
            model.run(trace, trace, state.rows, state.moments, work=self.work)
            if model.m[M.WRONG]:
                missed = int(model.m[M.AT]) // M.WORDS
                found.update(range(min(place, missed) - _AROUND, max(place, missed) + _AROUND))
                break
            block = _run.free_block(model.m.data, pool, suspect.size, suspect.stream)  # type: ignore[arg-type]
            if block and model.m[block + M.ADDR] == suspect.addr:
                found.add(place)
        self.spent += max(0, int(model.m[M.AT]) // M.WORDS - suspect.low)
        return found

    def _around(self, suspect: Suspect, where: list[int], at: int, best: int) -> tuple[int, int]:
        """Return the first and last of the places (their positions) at which the trace is followed as far as at this one."""
        until = self.end if self.found.model.m[M.GC_ON] else min(self.end, max(self.at, suspect.high) + 2)
        known, most_spent = {at: True}, self.spent + self.budget // 2

        def good(i: int, *, whole: bool = False) -> bool:
            """Whether the trace is followed as far; a place that can't be tried any more counts as one."""
            if self.spent > most_spent:
                return known.get(i, True)
            if whole or i not in known:
                reached = self.run(suspect, where[i], self.end if whole else until)
                known[i] = reached >= best if whole else reached >= min(until, best)
            return known[i]

        least = next(i for i in range(at + 1) if i == at or good(i))
        most = next(i for i in range(len(where) - 1, at - 1, -1) if i == at or good(i))
        while least < at and not good(least, whole=True):
            least += 1
        while most > at and not good(most, whole=True):
            most -= 1
        return least, most

    # ------------------------------------------------------------------ blocks that were not there at the beginning
    def _row_before(self, suspect: Suspect) -> int:
        """Row that is taken to be in the heap before the first event, though its alloc is what may be missing; -1 for none."""
        there = suspect.kind == M.ALLOC and not self.found.terms.empty and 0 <= suspect.row < self.recording.rows.height
        return suspect.row if there and self._beginning(-1).rows[2 * suspect.row] else -1

    def _helps(self, suspect: Suspect) -> bool:
        """Whether the trace is followed further when the block is not there at the beginning."""
        row = self._row_before(suspect)
        if row < 0:
            return True
        state = self._copy(self._beginning(row))
        m = state.model.m
        m[M.STOP] = min([(self.at + 1) * M.WORDS, *self.recording.lost])
        state.model.run(state.trace, state.trace, state.rows, state.moments, work=self.work)
        self.spent += int(state.model.m[M.AT]) // M.WORDS + self.end // 100
        return not state.model.m[M.WRONG] or int(state.model.m[M.AT]) > self.at * M.WORDS

    def _beginning(self, row: int) -> Prepared:
        """The heap before the first event; without the block of a row."""
        if (0, -1) not in self._kept:
            self._kept[0, -1] = prepare(self.recording, self.found.terms)
        if row < 0 or (0, row) in self._kept:
            return self._kept[0, row]
        state = self._copy(self._kept[0, -1])
        m: Any = state.model.m.data
        block = int(state.rows[2 * row])
        if block and m[block + M.STATE] == M.LIVE:
            m[M.MODE] = M.MUTE
            _blocks.free(m, m, block, 0)
            m[M.MODE] = M.FED
        state.rows[2 * row] = 0
        return state

    # ------------------------------------------------------------------ one trial
    def run(self, suspect: Suspect, place: int, until: int | None = None) -> int:
        """Put the event in before this one and follow; returns the first event that differs, ``end`` where only the final picture does, ``end + 1`` where nothing does."""
        recording, until = self.recording, self.end if until is None else until
        state = self._copy(self._state(suspect, place))
        model, at = state.model, place * M.WORDS
        m = model.m
        event = np.asarray([suspect.kind, suspect.addr, suspect.size, suspect.stream, suspect.row, self._extra(suspect, model)], np.int64)
        trace = state.trace
        table = trace.reshape(-1, M.WORDS)
        at_once = suspect.kind == M.FREE_COMPLETED and place > 0 and table[place - 1, M.T_KIND] == M.FREE_REQUESTED and table[place - 1, M.T_ROW] == suspect.row
        if suspect.uses or at_once:
            trace = trace.copy()
            trace.reshape(-1, M.WORDS)[list(suspect.uses), M.T_ROW] = suspect.row
            trace[at - M.WORDS + M.T_POOL] *= not at_once
        trace = np.concatenate([trace[:at], event, trace[at:]])
        if state.seen:
            state.moments[0::2][state.moments[0::2] > at] += M.WORDS
        lost = [i + (M.WORDS if i >= at else 0) for i in recording.lost if not (suspect.kind == M.FREE_COMPLETED and i == suspect.low * M.WORDS)]
        begin = int(m[M.AT]) // M.WORDS
        m[M.END], m[M.STOP] = len(trace), min([len(trace) if until == self.end else (until + 1) * M.WORDS, *lost])
        model.run(trace, trace, state.rows, state.moments, work=self.work)
        m = model.m
        reached = int(m[M.AT]) // M.WORDS
        self.spent += reached - begin + self.end // 100  # the copies too
        reached -= reached > place
        if m[M.WRONG] or lost or until < self.end:
            return reached
        return self.end + 1 if end_differs(recording, model) is None else self.end

    @staticmethod
    def _extra(suspect: Suspect, model: Any) -> int:
        if suspect.kind in (M.ALLOC, M.OOM):
            return int(model.pools[suspect.pool])
        return 1 if suspect.kind == M.FREE_REQUESTED else 0

    def _state(self, suspect: Suspect, place: int) -> Prepared:
        """Return the trace followed up to a place from which what comes before the suspect's is decided; from the beginning where that reads too far."""
        kind, row = self.recording.kind, self._row_before(suspect)
        before = min(suspect.low - (suspect.kind == M.FREE_COMPLETED), place, self.at)
        while before > 0 and kind[before - 1] not in (M.ALLOC, M.OOM, M.FREE_REQUESTED):
            before -= 1
        if (0, row) not in self._kept:
            self._kept[0, row] = self._beginning(row)
        if (before, row) not in self._kept:
            state = self._copy(self._kept[0, row])
            state.model.m[M.STOP] = min([before * M.WORDS, *self.recording.lost])
            state.model.run(state.trace, state.trace, state.rows, state.moments, work=self.work)
            self.spent += before
            self._kept[before, row] = state
        state = self._kept[before, row]
        return self._kept[0, row] if state.model.m[M.WRONG] or state.model.m[M.AT] > place * M.WORDS else state

    @staticmethod
    def _copy(state: Prepared) -> Prepared:
        model = copy.copy(state.model)
        model.m = state.model.m.copy()
        rows = state.rows
        return Prepared(model, state.trace, np.concatenate([rows, np.zeros(2, np.int64)]), state.moments.copy(), state.seen, state.said)
