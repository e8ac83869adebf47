"""One event missing in a trace whose private pools are gone: the pools are told anew with the event put in.

Which requests were a gone pool's is told by what the rules would otherwise have done (:mod:`nbmemprof.allocator._gone_pools`); where
an event is missing that search ends, for no division into pools explains it. So at the place where it ends, and at those where it got
further before, each suspect is put in, and the search goes on from there with the longer trace. One with which it comes to the end
is a division under which the missing event can be located as in any other trace.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import polars as pl

from nbmemprof import heap, schema
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._attempt import ACTIONS, Followed, attempt
from nbmemprof.allocator._gone_pools import Division, reroute
from nbmemprof.allocator._missing import Trials
from nbmemprof.allocator._model import Words
from nbmemprof.allocator._recording import Recording, recordings
from nbmemprof.allocator._suspects import Suspect, suspects

__all__ = ["certain", "divided_with_one_more", "with_event"]

_BACK = 8  # divisions from which the search goes on: the last one that explains all before the lost event is among the last
_EACH = 6  # suspects that are put in at each
_FOLLOWED = 600_000  # events in all attempts, about 6 s where they are not compiled


def certain(found: Followed) -> list[Suspect]:
    """Return the events that the trace itself shows to be missing, whatever the pools are, the first before others: memory taken or freed twice, a free of which one half is there."""
    known = [s for s in suspects(found) if s.certain is not None]
    return sorted(known, key=lambda s: s.certain[1] if s.certain is not None else 0)


def divided_with_one_more(trail: list[Division]) -> Division | None:
    """Return a division under which the trace lacks one event and nothing else; None where none was found. It is in the recording then."""
    left = [_FOLLOWED]
    for division in trail[: -_BACK - 1 : -1]:
        division.apply()
        trials, found = Trials(division.found), []
        for suspect in suspects(division.found):
            place = trials.places(suspect)
            if place is not None:
                found.append(place)
            if trials.spent > trials.budget:
                break
        for place in sorted(found, key=lambda f: -f.reached)[:_EACH]:
            whole = _followed_with(division, place.suspect, place.high, left) if left[0] > 0 else None
            if whole is not None:
                return whole
    return None


def _followed_with(division: Division, suspect: Suspect, place: int, left: list[int]) -> Division | None:
    """Go on with the event put in; None where that does not come to the end. ``left``: events that may be followed, counted down."""
    division.apply()
    recording, terms = division.found.recording, division.found.terms
    longer = with_event(recording, suspect, place)
    if longer is None:
        return None

    def again(whole: frozenset[str]) -> Followed:
        other = attempt(longer, replace(terms, whole=whole), often=True)
        left[0] -= int(other.model.m[M.AT]) // M.WORDS + len(longer.kind) // 20
        return other

    found = again(terms.whole)
    last = Division.of(found) if found.exact else reroute(found, again, left[0])[-1]
    if not last.found.exact:
        return None
    asks, pools = _asks(recording), _table(longer)[np.arange(len(longer.kind)) != place, M.T_POOL]
    _table(recording)[asks, M.T_POOL] = pools[asks]
    recording.pool_names[:] = longer.pool_names
    return Division.of(attempt(recording, last.found.terms), division.segments + last.segments)


def with_event(recording: Recording, suspect: Suspect, place: int) -> Recording | None:
    """Return the recording as if this event were there, before the one at ``place``; its requests ask of the same pools."""
    old, events = recording.capture, recording.events
    rank, device, kind = recording.key
    like = events[max(min(place, events.height) - 1, 0)]
    one = schema.fill(
        "events",
        {
            "rank": rank, "device": device, "kind": kind, "action": ACTIONS[suspect.kind], "requested_bytes": suspect.size, "stream": suspect.stream,
            "addr": pl.Series([suspect.addr % (1 << 64) if suspect.kind != M.OOM else None], dtype=pl.UInt64), "source": like["source"].cast(pl.String)[0], "time_us": like["time_us"][0],
        },
        1,
    )  # fmt: skip
    with_sizes = events.with_columns(pl.coalesce("requested_bytes", "size_bytes").alias("requested_bytes"))
    whole = pl.concat([with_sizes[:place], one, with_sizes[place:]], how="vertical_relaxed").with_columns(pl.int_range(pl.len(), dtype=pl.Int64).alias("seq"))
    tables = {name: old.tables[name].filter(heap.matches(recording.key)) for name in ("segments", "blocks")}
    marks = old.tables["marks"].filter(pl.col("device").is_null() | (pl.col("device") == device))
    at = np.searchsorted(recording.curve.seq, marks["seq"].fill_null(-1).to_numpy())
    tables["marks"] = marks.with_columns(pl.when(pl.col("seq").is_not_null()).then(pl.Series(at + (at >= place), dtype=pl.Int64)).alias("seq"))
    made = recordings(heap.build({"events": whole, "stacks": old.tables["stacks"], **tables}, **old.meta))
    if len(made) != 1 or len(made[0].kind) != len(recording.kind) + 1:
        return None
    longer, kept = made[0], np.arange(events.height + 1) != place
    table = _table(longer)
    pools = np.zeros(len(table), np.int64)
    pools[kept] = _table(recording)[:, M.T_POOL]
    pools[place] = min(suspect.pool, len(recording.pool_names) - 1) if len(recording.pool_names) > 1 else M.HEAD
    asks = _asks(longer)
    table[asks, M.T_POOL] = pools[asks]
    longer.pool_names[:] = recording.pool_names
    if suspect.kind == M.ALLOC and len(recording.pool_names) > 1 and (beside := recording.pool_beside(suspect.addr, max(place - 1, 0))) is not None:
        table[place, M.T_POOL] = beside
    return longer


def _table(recording: Recording) -> Words:
    return recording.trace.reshape(-1, M.WORDS)


def _asks(recording: Recording) -> Words:
    return np.flatnonzero((recording.kind == M.ALLOC) | (recording.kind == M.OOM))
