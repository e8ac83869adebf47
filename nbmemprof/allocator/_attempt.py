"""A recorded trace followed once under given terms, and what differs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator import _run
from nbmemprof.allocator._held import Held
from nbmemprof.allocator._model import Model, Words
from nbmemprof.allocator._recording import Recording
from nbmemprof.allocator.conf import Settings
from nbmemprof.allocator.versions import rules_of
from nbmemprof.units import format_count

__all__ = ["ACTIONS", "Followed", "Prepared", "Terms", "attempt", "end_differs", "mismatch_at", "prepare", "times"]

ACTIONS = {
    M.ALLOC: "alloc", M.FREE_REQUESTED: "free_requested", M.FREE_COMPLETED: "free_completed", M.SEGMENT_ALLOC: "segment_alloc", M.SEGMENT_FREE: "segment_free",
    M.SEGMENT_MAP: "segment_map", M.SEGMENT_UNMAP: "segment_unmap", M.OOM: "oom",
}  # fmt: skip
_OFTEN = 100_000  # events of many attempts together: enough to load compiled code, not to compile it
_REASONS = {
    _run.DIFFERS: "the rules give another event",
    _run.STRAY: "nothing is allocated at this address: its alloc is missing",
    _run.NOTHING_PENDING: "no free is pending at this address",
    _run.NOTHING_TO_RELEASE: "the model has no such memory to give back",
    _run.NO_REQUEST: "no request follows that could have caused this",
}


@dataclass(frozen=True)
class Terms:
    """What an attempt supposes: settings, torch version, limits; whether the trace begins with an empty heap; private pools made without splitting; segments (their addresses) that were not there at the beginning, though no event tells that they were taken."""

    settings: Settings
    torch: str | None
    limit_bytes: int | None
    capacity_bytes: int | None
    card_bytes: int | None
    empty: bool
    whole: frozenset[str] = frozenset()
    later: frozenset[int] = frozenset()


@dataclass
class Followed:
    """A recording followed through the rules: the model at its end, and what had to be inferred."""

    recording: Recording
    terms: Terms
    model: Model
    rows: Words
    moments: Words
    mismatch: dict[str, Any] | None
    inferred: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return self.mismatch is None

    @property
    def settings(self) -> Settings:
        return self.terms.settings

    @property
    def limit_bytes(self) -> int | None:
        return self.terms.limit_bytes

    @property
    def capacity_bytes(self) -> int | None:
        return self.terms.capacity_bytes

    @property
    def torch(self) -> str | None:
        return self.terms.torch


@dataclass
class Prepared:
    """A model at the beginning of a trace; ``seen``: whether the source saw the calls of ``empty_cache()``."""

    model: Model
    trace: Words
    rows: Words
    moments: Words
    seen: bool
    said: list[str]


def prepare(recording: Recording, terms: Terms) -> Prepared:
    """Build the model, with the heap before the first event."""
    model = Model(
        terms.settings, rules_of(terms.torch), limit_bytes=terms.limit_bytes, capacity_bytes=terms.capacity_bytes, card_bytes=terms.card_bytes, records=4096 + 4 * recording.segments.height
    )
    for name in recording.pool_names[1:]:
        model.add_pool(no_split=name in terms.whole)
    trace = recording.bind(model)
    rows = np.zeros(2 * max(recording.rows.height, 1), np.int64)
    said = [] if terms.empty else recording.lay_out(model, rows, terms.later)
    seen = _seen_empty_caches(recording)
    bursts = int(((recording.kind == M.SEGMENT_FREE) | (recording.kind == M.SEGMENT_UNMAP)).sum())
    moments = np.full(2 * (bursts if seen is None else len(seen)) + 2, -1, np.int64)
    if seen is not None:
        moments[0 : 2 * len(seen) : 2], moments[1 : 2 * len(seen) : 2] = seen, 0
    m = model.m
    m[M.MODE], m[M.INFER], m[M.END], m[M.STOP] = M.FED, seen is None, len(trace), min([len(trace), *recording.lost])
    return Prepared(model, trace, rows, moments, seen is not None, said)


def attempt(recording: Recording, terms: Terms, *, often: bool = False) -> Followed:
    """Follow the trace to its end or to the first difference; ``often``: one of many attempts, for which compiled code is loaded where there is any."""
    start = prepare(recording, terms)
    model = start.model
    model.run(start.trace, start.trace, start.rows, start.moments, work=max(recording.events.height, _OFTEN if often else 0))
    mismatch = _mismatch(recording, model)
    if mismatch is None and recording.lost:
        mismatch = mismatch_at(recording, min(recording.lost) // M.WORDS, _never_completes(recording), None)
    if mismatch is None:
        mismatch = end_differs(recording, model) if recording.has_picture else _given_twice(recording)
    return Followed(recording, terms, model, start.rows, start.moments, mismatch, [*start.said, *_inferred(recording, model, start)])


def _never_completes(recording: Recording) -> str:
    seen = "yet the block is not pending at the end" if recording.has_picture else "and no other free of this trace waits for a stream"
    return f"its free never completes, {seen}: a free_completed is missing"


def _inferred(recording: Recording, model: Model, start: Prepared) -> list[str]:
    """What no event tells, in sentences."""
    m, said = model.m, []
    if not start.seen:
        found = start.moments[: int(m[M.FOUND])]
        flushes = found[0::2][found[1::2] == 0] // M.WORDS
        dropped = int((found[1::2] > 0).sum())
        if len(flushes):
            said.append(f"{times(len(flushes), 'empty_cache() call')}, from bursts of segments given back that no request explains ({_places(flushes)}); a refused request whose oom is missing leaves the same events")
        if dropped:
            said.append(f"{times(dropped, 'private pool')} dropped by the last user, from their segments given back")
        if m[M.AMBIGUOUS]:
            said.append(
                f"{times(int(m[M.AMBIGUOUS]), 'of those calls')} came right before new memory: a refusal by the driver with a flush leaves the same trace; counted as empty_cache(), not as retries"
            )
    if m[M.REFUSALS]:
        said.append(f"{times(int(m[M.REFUSALS]), 'refusal')} by the driver, read from the trace: what else is on the card is not in it")
    if recording.deferred:
        said.append(f"{times(recording.deferred, 'free')} waited for other streams; when those were done is read from the trace")
    if len(recording.pool_names) > 1 and not recording.pools_told:
        said.append(f"private pools {', '.join(recording.pool_names[1:])}: requests are told apart by the final segments, as the events name no pool")
    return said


def _places(at: Words) -> str:
    """Events that a remark is about, the first few of them."""
    shown = ", ".join(format_count(int(i)) for i in at[:6])
    return f"at event{'s' if len(at) > 1 else ''} {shown}{f' and {format_count(len(at) - 6)} more' if len(at) > 6 else ''}"


def times(count: int, what: str) -> str:
    """A count with its word."""
    return f"{format_count(count)} {what}{'s' if count != 1 and not what.startswith('of') else ''}"


# ---------------------------------------------------------------------------------------------- what differs
def _mismatch(recording: Recording, model: Model) -> dict[str, Any] | None:
    m = model.m
    if not m[M.WRONG]:
        return None
    at = int(m[M.AT]) // M.WORDS
    expected = None
    if m[M.WRONG] == _run.DIFFERS:
        expected = {"action": ACTIONS[int(m[M.WRONG_KIND])], "addr": int(m[M.WRONG_ADDR]), "bytes": int(m[M.WRONG_SIZE]), "stream": int(m[M.WRONG_STREAM])}
    return mismatch_at(recording, at, _REASONS[int(m[M.WRONG])], expected)


def mismatch_at(recording: Recording, at: int, reason: str, expected: dict[str, Any] | None) -> dict[str, Any]:
    """Describe a difference at an event of the trace; behind the last one there is nothing recorded."""
    n = recording.events.height
    found = None
    if at < n:
        found = {
            "action": recording.events["action"][at], "addr": int(recording.addr[at]), "bytes": int(recording.size[at]), "stream": recording.events["stream"][at],
        }  # fmt: skip
    rank, device, _kind = recording.key
    return {
        "seq": int(recording.curve.seq[min(at, n - 1)]) if n else None, "index": at, "device": device, "rank": rank, "expected": expected, "found": found, "reason": reason,
    }  # fmt: skip


def end_differs(recording: Recording, model: Model) -> dict[str, Any] | None:
    """Whether the model's heap at the end is the final picture."""
    if not recording.has_picture:
        return None
    ours = model.blocks()
    here = ours["state"] != M.HOLE
    state = np.asarray(["inactive", "active_allocated", "active_pending_free"])[np.minimum(ours["state"][here], 2)]
    blocks = recording.final.filter(pl.col("size_bytes") > 0).sort("addr")
    theirs = blocks["addr"].to_numpy().view(np.int64)
    end = recording.events.height
    if len(theirs) != int(here.sum()) or not np.array_equal(theirs, ours["addr"][here]):
        return mismatch_at(recording, end, "the final picture has other blocks than the rules leave: events are missing at the end, or before it", None)
    same = (blocks["size_bytes"].to_numpy() == ours["size"][here]) & (blocks["state"].cast(pl.String).to_numpy().astype(str) == state)
    if not same.all():
        return mismatch_at(recording, end, f"the block at {int(theirs[np.argmin(same)]):#x} of the final picture has another size or state than the rules give", None)
    told = (state != "inactive") & blocks["requested_bytes"].is_not_null().to_numpy()
    same = ~told | (blocks["requested_bytes"].fill_null(0).to_numpy() == ours["requested"][here])
    if not same.all():
        return mismatch_at(recording, end, f"for the block at {int(theirs[np.argmin(same)]):#x} of the final picture another size was asked for than in the trace", None)
    same = blocks["stream"].fill_null(0).to_numpy() == np.where(blocks["stream"].is_null().to_numpy(), 0, ours["stream"][here])
    if not same.all():
        return mismatch_at(recording, end, f"the block at {int(theirs[np.argmin(same)]):#x} of the final picture is another stream's than in the trace", None)
    return None


def _given_twice(recording: Recording) -> dict[str, Any] | None:
    """Find memory that is taken while it is held: that it was given back is missing. A final picture shows that too, and more."""
    held = Held()
    for i in np.flatnonzero((recording.kind >= M.SEGMENT_ALLOC) & (recording.kind <= M.SEGMENT_UNMAP)).tolist():
        if held.move(int(recording.kind[i]), int(recording.addr[i]), int(recording.size[i]), 0):
            return mismatch_at(recording, i, "this memory is held already: that it was given back is missing", None)
    return None


def _seen_empty_caches(recording: Recording) -> list[int] | None:
    """Words in the trace before which the source saw ``empty_cache()`` called; None where it does not look."""
    marks = recording.capture.tables["marks"]
    rows = marks.filter(pl.col("kind").cast(pl.String) == "empty_cache")
    if rows.is_empty():
        return None
    seqs = rows.filter(pl.col("device").is_null() | (pl.col("device") == recording.key[1]))["seq"].drop_nulls().sort().to_numpy()
    at: list[int] = (np.searchsorted(recording.curve.seq, seqs, side="right") * M.WORDS).tolist()
    return at
