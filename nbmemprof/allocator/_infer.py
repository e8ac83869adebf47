"""Inputs of the allocator that no event tells: the limit, ``empty_cache()``, pools that were dropped, and the verdict on the rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator import _run
from nbmemprof.allocator._model import Model, Words
from nbmemprof.allocator._recording import Recording, recordings
from nbmemprof.allocator.conf import ConfError, Settings, parse
from nbmemprof.allocator.rounding import MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE, divisions_of, round_sizes
from nbmemprof.allocator.versions import rules_of
from nbmemprof.capture import Capture
from nbmemprof.heap._columns import int64
from nbmemprof.units import format_bytes, format_count

__all__ = ["Followed", "as_recorded", "recorded_settings"]

_WORDS = {
    M.ALLOC: "alloc", M.FREE_REQUESTED: "free_requested", M.FREE_COMPLETED: "free_completed", M.SEGMENT_ALLOC: "segment_alloc", M.SEGMENT_FREE: "segment_free",
    M.SEGMENT_MAP: "segment_map", M.SEGMENT_UNMAP: "segment_unmap", M.OOM: "oom",
}  # fmt: skip
_REASONS = {
    _run.DIFFERS: "the rules give another event",
    _run.STRAY: "nothing is allocated at this address: its alloc is missing",
    _run.NOTHING_PENDING: "no free is pending at this address",
    _run.NOTHING_TO_RELEASE: "the model has no such memory to give back",
    _run.NO_REQUEST: "no request follows that could have caused this",
}


@dataclass
class Followed:
    """A recording followed through the rules: the model at its end, and what had to be inferred."""

    recording: Recording
    settings: Settings
    model: Model
    rows: Words
    moments: Words
    limit_bytes: int | None
    capacity_bytes: int | None
    torch: str | None
    mismatch: dict[str, Any] | None
    inferred: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        return self.mismatch is None


_KEPT: weakref.WeakKeyDictionary[Capture, dict[tuple[Any, ...], list[Followed]]] = weakref.WeakKeyDictionary()


def as_recorded(capture: Capture, limit_bytes: int | None, capacity_bytes: int | None, torch: str | None) -> list[Followed]:
    """Follow every device's trace under the settings that it was recorded with; kept with the capture."""
    kept = _KEPT.setdefault(capture, {})
    key = (limit_bytes, capacity_bytes, torch)
    if key not in kept:
        kept[key] = [_follow(r, limit_bytes, capacity_bytes, torch) for r in recordings(capture)]
    return kept[key]


def recorded_settings(meta: Mapping[str, Any], torch: str | None) -> tuple[Settings, list[str]]:
    """Read the settings of a recording: its configuration text, corrected by the values that the snapshot lists."""
    said: list[str] = []
    listed = meta.get("settings") or {}
    text = meta.get("conf") if meta.get("conf") is not None else listed.get("PYTORCH_CUDA_ALLOC_CONF")
    if text is None and not listed:
        said.append("the recording does not tell its configuration; torch's defaults are assumed")
    try:
        made = parse(text or "", torch)
    except ConfError as error:
        said.append(f"the configuration text can't be read, the values that the snapshot lists are used ({error})")
        made = Settings(text=str(text))
    found: dict[str, Any] = {}
    if isinstance(listed.get("expandable_segments"), bool):
        found["expandable_segments"] = listed["expandable_segments"]
    if isinstance(listed.get("max_split_size"), int):
        found["max_split_size"] = listed["max_split_size"] if listed["max_split_size"] > 0 else None
    if isinstance(listed.get("garbage_collection_threshold"), (int, float)):
        found["garbage_collection_threshold"] = float(listed["garbage_collection_threshold"])
    if isinstance(listed.get("roundup_power2_divisions"), Mapping):
        found["roundup_power2_divisions"] = tuple(divisions_of(listed))
    changed = sorted(name for name, value in found.items() if getattr(made, name) != value)
    if changed:
        said.append(f"{', '.join(changed)} at the end differ from the configuration text {text!r}: they were changed at run time; the values at the end are used throughout")
    return replace(made, **found), said


# ---------------------------------------------------------------------------------------------- following
def _follow(recording: Recording, limit_bytes: int | None, capacity_bytes: int | None, torch: str | None) -> Followed:
    meta = recording.capture.meta
    torch = torch or _version(meta)
    settings, said = recorded_settings(meta, torch)
    if torch is None:
        said.append("the recording does not name its torch version; the rules of 2.11 are used")
    card = _number(meta.get("capacity_bytes"), recording)
    limit = limit_bytes if limit_bytes is not None else _number(meta.get("limit_bytes"), recording)
    if limit is None and settings.per_process_memory_fraction not in (None, 1.0):
        whole = capacity_bytes or card
        if whole is not None:
            limit = int(float(settings.per_process_memory_fraction or 0) * float(whole))
        else:
            said.append("per_process_memory_fraction is set, but the card's size is not known")
    bounds = _Bounds(recording, settings)
    open_ = False
    if limit is None:
        limit, text = bounds.limit()
        said += text
        open_ = bool(text)
    refused = bounds.physical() if limit is None else None

    begins_empty = recording.starts_empty or recording.may_be_whole

    def attempt(limit: int | None, *, empty: bool = begins_empty, whole: frozenset[str] = frozenset()) -> Followed:
        return _attempt(recording, settings, torch, limit, capacity_bytes or refused, card, empty=empty, whole=whole)

    found = attempt(limit)
    if not found.exact and len(recording.pool_names) > 1:
        found = _unsplit(found, recording.pool_names[1:], lambda whole: attempt(limit, whole=whole))
        found = _reroute(found, lambda: attempt(limit))
    if open_ and not found.exact:
        found = _narrow(found, bounds.widest(), attempt)
    if not found.exact and recording.may_be_whole:
        if recording.cached_at_start():
            cached = attempt(limit, empty=False)
            found = cached if cached.exact else found
        elif found.mismatch is not None and found.mismatch["expected"] is not None:
            found.mismatch["reason"] += "; or the trace began with this segment cached and nothing live, which no event tells"
    _say_where(found)
    found.inferred = [*said, *found.inferred]
    return found


def _attempt(
    recording: Recording, settings: Settings, torch: str | None, limit: int | None, capacity: int | None, card: int | None, *, empty: bool, whole: frozenset[str]
) -> Followed:
    model = Model(settings, rules_of(torch), limit_bytes=limit, capacity_bytes=capacity, card_bytes=card, records=4096 + 4 * recording.segments.height)
    m = model.m
    for name in recording.pool_names[1:]:
        model.add_pool(no_split=name in whole)
    trace = recording.bind(model)
    rows = np.zeros(2 * max(recording.rows.height, 1), np.int64)
    said = [] if empty else recording.lay_out(model, rows)
    m = model.m
    seen = _seen_empty_caches(recording)
    bursts = int(((recording.kind == M.SEGMENT_FREE) | (recording.kind == M.SEGMENT_UNMAP)).sum())
    moments = np.full(2 * (bursts if seen is None else len(seen)) + 2, -1, np.int64)
    if seen is not None:
        moments[0 : 2 * len(seen) : 2], moments[1 : 2 * len(seen) : 2] = seen, 0
    m[M.MODE], m[M.INFER], m[M.END], m[M.STOP] = M.FED, seen is None, len(trace), min([len(trace), *recording.lost])
    model.run(trace, trace, rows, moments, work=recording.events.height)
    m = model.m
    mismatch = _mismatch(recording, model, trace)
    if mismatch is None and recording.lost:
        mismatch = _at(recording, min(recording.lost) // M.WORDS, "its free never completes, yet the block is not pending at the end: a free_completed is missing", None)
    if mismatch is None:
        mismatch = _end_differs(recording, model)
    if seen is None:
        found = moments[: int(m[M.FOUND])]
        flushes, dropped = int((found[1::2] == 0).sum()), int((found[1::2] > 0).sum())
        if flushes:
            said.append(f"{_times(flushes, 'empty_cache() call')}, from bursts of segments given back that no request explains")
        if dropped:
            said.append(f"{_times(dropped, 'private pool')} dropped by the last user, from their segments given back")
        if m[M.AMBIGUOUS]:
            said.append(
                f"{_times(int(m[M.AMBIGUOUS]), 'of those calls')} came right before new memory: a refusal by the driver with a flush leaves the same trace; counted as empty_cache(), not as retries"
            )
    if m[M.REFUSALS]:
        said.append(f"{_times(int(m[M.REFUSALS]), 'refusal')} by the driver, read from the trace: what else is on the card is not in it")
    if recording.deferred:
        said.append(f"{_times(recording.deferred, 'free')} waited for other streams; when those were done is read from the trace")
    if len(recording.pool_names) > 1 and not recording.pools_told:
        said.append(f"private pools {', '.join(recording.pool_names[1:])}: requests are told apart by the final segments, as the events name no pool")
    return Followed(recording, settings, model, rows, moments, limit, capacity, torch, mismatch, said)


def _times(count: int, what: str) -> str:
    return f"{format_count(count)} {what}{'s' if count != 1 and not what.startswith('of') else ''}"


def _unsplit(found: Followed, names: list[str], attempt: Callable[[frozenset[str]], Followed]) -> Followed:
    """Whether private pools were made without splitting, which no file tells: a pool is taken for one where the trace is then followed further."""
    whole: frozenset[str] = frozenset()
    for name in names[:8]:
        other = attempt(whole | {name})
        if other.exact or other.model.m[M.AT] > found.model.m[M.AT]:
            found, whole = other, whole | {name}
        if found.exact:
            break
    if whole:
        found.inferred.append(f"private pools made with no_split: {', '.join(sorted(whole))}, as their blocks are handed out whole")
    return found


def _reroute(found: Followed, attempt: Callable[[], Followed]) -> Followed:
    """Whether segments that are gone at the end were a private pool's, which then is in no file: a segment is taken for one where the rest then fits.

    At a difference either the block that the rules would have used was not theirs to use, or the recorded one lies in a pool of its own.
    What does not end in an exact replay is undone.
    """
    recording, first = found.recording, found
    before = recording.trace.copy()
    names = list(recording.pool_names)
    for _ in range(min(40, max(4, 1_000_000 // recording.events.height))):
        mismatch = found.mismatch
        if mismatch is None or mismatch["expected"] is None or mismatch["found"] is None:
            break
        best = None
        for side in ("expected", "found"):
            kept = recording.trace.copy()
            if recording.route(mismatch[side]["addr"], mismatch["index"]):
                other = attempt()
                if other.exact or other.model.m[M.AT] > found.model.m[M.AT]:
                    best = other
                    break
            recording.trace[:] = kept
        if best is None:
            break
        found = best
    if found.exact:
        if found is not first:
            found.inferred.append("segments that are gone at the end and served some requests only are taken for a private pool's")
        return found
    recording.trace[:] = before
    recording.pool_names[:] = names
    return first


def _narrow(found: Followed, bounds: tuple[int, int], attempt: Callable[[int | None], Followed]) -> Followed:
    """Search for a limit under which the rules give the trace: each difference says on which side it is."""
    low, high = bounds
    best = found
    while high - low > ROUND_LARGE and not best.exact:
        m = found.model.m
        at = found.limit_bytes
        if at is not None and low <= at < high:
            refused = m[M.WRONG] == _run.DIFFERS and m[M.WRONG_KIND] in (M.SEGMENT_FREE, M.SEGMENT_UNMAP, M.OOM) and not _in_inferred_burst(found)
            low, high = (at + 1, high) if refused else (low, at)
        middle = low + (high - low) // 2
        found = attempt(_roundest(middle, min(high, middle + ROUND_LARGE)))
        if found.exact or found.model.m[M.AT] > best.model.m[M.AT]:
            best = found
    if best is not found or best.exact:
        best.inferred.append(f"the limit {best.limit_bytes} B was found by trying: under it the rules agree with the trace longest")
    return best


def _in_inferred_burst(found: Followed) -> bool:
    """Whether the difference lies in a burst that was taken for an ``empty_cache()``: the limit may be lower, and the burst its doing."""
    m = found.model.m
    if not m[M.FOUND]:
        return False
    at, begin = int(m[M.AT]) // M.WORDS, int(found.moments[int(m[M.FOUND]) - 2]) // M.WORDS
    kinds = found.recording.kind[begin:at]
    return bool(((kinds == M.SEGMENT_FREE) | (kinds == M.SEGMENT_UNMAP)).all())


def _say_where(found: Followed) -> None:
    """Of a lost alloc say between which events it was: after its place became free, before it is missed."""
    mismatch, recording = found.mismatch, found.recording
    if mismatch is None or mismatch["reason"] not in (_REASONS[_run.STRAY], _REASONS[_run.DIFFERS]):
        return
    event = mismatch["found"] if mismatch["reason"] == _REASONS[_run.STRAY] else mismatch["expected"]
    if event is None or event["action"] not in ("alloc", "free_requested"):
        return
    rows, seq = recording.rows, recording.curve.seq
    orphans = rows.filter(pl.col("alloc_seq").is_null())
    if not (int64(orphans["addr"]) == event["addr"]).any():
        return
    begin, size = int64(rows["addr"]), int64(rows["size_bytes"])
    over = (begin < event["addr"] + max(event["bytes"], 1)) & (begin + size > event["addr"])
    done = rows["done_seq"].to_numpy()[over]
    before = done[done < seq[min(mismatch["index"], len(seq) - 1)]] if len(done) else done
    low = int(np.searchsorted(seq, before.max())) + 1 if len(before) else 0
    mismatch["reason"] = f"the alloc at {event['addr']:#x} is missing, lost between events {low} and {mismatch['index']}"
    mismatch["between"] = [low, mismatch["index"]]


# ---------------------------------------------------------------------------------------------- what differs
def _mismatch(recording: Recording, model: Model, trace: Words) -> dict[str, Any] | None:
    m = model.m
    if not m[M.WRONG]:
        return None
    at = int(m[M.AT]) // M.WORDS
    expected = None
    if m[M.WRONG] == _run.DIFFERS:
        expected = {"action": _WORDS[int(m[M.WRONG_KIND])], "addr": int(m[M.WRONG_ADDR]), "bytes": int(m[M.WRONG_SIZE]), "stream": int(m[M.WRONG_STREAM])}
    return _at(recording, at, _REASONS[int(m[M.WRONG])], expected)


def _at(recording: Recording, at: int, reason: str, expected: dict[str, Any] | None) -> dict[str, Any]:
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


def _end_differs(recording: Recording, model: Model) -> dict[str, Any] | None:
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
        return _at(recording, end, "the final picture has other blocks than the rules leave: events are missing at the end, or before it", None)
    same = (blocks["size_bytes"].to_numpy() == ours["size"][here]) & (blocks["state"].cast(pl.String).to_numpy().astype(str) == state)
    if not same.all():
        return _at(recording, end, f"the block at {int(theirs[np.argmin(same)]):#x} of the final picture has another size or state than the rules give", None)
    return None


# ---------------------------------------------------------------------------------------------- the limit
class _Bounds:
    """What the recorded outcomes say about the memory limit: granted new memory lies below it, refused above."""

    def __init__(self, recording: Recording, settings: Settings) -> None:
        self.recording, self.settings = recording, settings
        kind = recording.kind
        self.ooms = np.flatnonzero(kind == M.OOM)

    def limit(self) -> tuple[int | None, list[str]]:
        """Return a limit that fits all outcomes, None where nothing shows one; and what was concluded."""
        r = self.recording
        if not len(self.ooms):
            return None, []
        free = self._device_free()
        nominal = self._nominal(r.size[self.ooms])
        by_limit = np.asarray([f is None or f >= n for f, n in zip(free, nominal.tolist(), strict=True)])
        if not by_limit.any():
            return None, []
        reserved = r.reserved[self.ooms]
        high = int((reserved + nominal)[by_limit].min())
        low = self._granted()
        if low >= high:
            return None, [f"no single limit explains every refusal (memory was granted up to {format_bytes(low)} and refused at {format_bytes(high)}): refusals are read from the trace"]
        for needed in self._bursts():
            if low < needed < high:
                high = needed
        chosen = _roundest(low, high)
        return chosen, [f"a memory limit of {format_bytes(chosen, 3)} ({chosen} B), from what was refused: anything from {low} B to {high - 1} B refuses the same"]

    def widest(self) -> tuple[int, int]:
        """Any limit at all."""
        return 1, int(self.recording.reserved.max()) + int(self._nominal(self.recording.size).max()) + ROUND_LARGE

    def physical(self) -> int | None:
        """What the driver could give, where it refused: the least of reserved and free at a refusal."""
        free = self._device_free()
        known = [int(self.recording.reserved[at]) + f for at, f in zip(self.ooms.tolist(), free, strict=True) if f is not None]
        return min(known) if known else None

    def _device_free(self) -> list[int | None]:
        marks = self.recording.capture.tables["marks"]
        rows = marks.filter((pl.col("kind").cast(pl.String) == "oom") & pl.col("value").is_not_null())
        free = dict(zip(rows["seq"].to_list(), rows["value"].to_list(), strict=True))
        return [None if (v := free.get(int(self.recording.curve.seq[at]))) is None else int(v) for at in self.ooms.tolist()]

    def _nominal(self, requested: Words) -> Words:
        rounded = round_sizes(requested, list(self.settings.roundup_power2_divisions))
        large = np.where(rounded < MIN_LARGE_ALLOC, self.settings.large_segment_size, (rounded + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE)
        return np.where(rounded <= SMALL_SIZE, SMALL_BUFFER, large)

    def _request_after(self, at: Words) -> Words:
        """Nominal size of the request after each of these events."""
        r = self.recording
        asks = np.flatnonzero((r.kind == M.ALLOC) | (r.kind == M.OOM))
        place = np.minimum(np.searchsorted(asks, at), max(len(asks) - 1, 0))
        return self._nominal(r.size[asks[place]])

    def _granted(self) -> int:
        r = self.recording
        new = (r.kind == M.SEGMENT_ALLOC) | (r.kind == M.SEGMENT_MAP)
        first = np.flatnonzero(new & ~np.concatenate([[False], new[:-1]]))
        if not len(first):
            return 0
        before = np.where(first > 0, r.reserved[np.maximum(first - 1, 0)], r.start_reserved)
        return int((before + self._request_after(first)).max())

    def _bursts(self) -> list[int]:
        """Bytes that were needed where memory was given back right before new memory was taken, smallest last."""
        r = self.recording
        back = (r.kind == M.SEGMENT_FREE) | (r.kind == M.SEGMENT_UNMAP)
        first = np.flatnonzero(back & ~np.concatenate([[False], back[:-1]]))
        after = np.searchsorted(np.flatnonzero(~back), first)
        rest = np.flatnonzero(~back)
        first, after = first[after < len(rest)], after[after < len(rest)]
        if not len(first):
            return []
        new = np.isin(r.kind[rest[after]], (M.SEGMENT_ALLOC, M.SEGMENT_MAP))
        first = first[new]
        before = np.where(first > 0, r.reserved[np.maximum(first - 1, 0)], r.start_reserved)
        needed: list[int] = (before + self._request_after(first)).tolist()
        return sorted(needed, reverse=True)


def _roundest(low: int, high: int) -> int:
    """Return the number in [low, high) with the most trailing zero bits: limits are set as round numbers more often than not."""
    for bit in range(50, -1, -1):
        candidate = -(-low >> bit) << bit
        if low <= candidate < high:
            return candidate
    return low


def _seen_empty_caches(recording: Recording) -> list[int] | None:
    """Words in the trace before which the source saw ``empty_cache()`` called; None where it does not look."""
    marks = recording.capture.tables["marks"]
    rows = marks.filter(pl.col("kind").cast(pl.String) == "empty_cache")
    if rows.is_empty():
        return None
    seqs = rows.filter(pl.col("device").is_null() | (pl.col("device") == recording.key[1]))["seq"].drop_nulls().sort().to_numpy()
    at: list[int] = (np.searchsorted(recording.curve.seq, seqs, side="right") * M.WORDS).tolist()
    return at


def _version(meta: Mapping[str, Any]) -> str | None:
    found = meta.get("torch") or (meta.get("versions") or {}).get("torch")
    return str(found) if found else None


def _number(value: Any, recording: Recording) -> int | None:
    """A meta value is one number, or one a device (keys as text)."""
    found = value.get(str(recording.key[1])) if isinstance(value, dict) else value
    return int(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None
