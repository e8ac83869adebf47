"""Inputs of the allocator that no event tells: the limit, ``empty_cache()``, pools that were dropped, and the verdict on the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator import _run
from nbmemprof.allocator._attempt import Followed, Terms, attempt
from nbmemprof.allocator._counted import has_readings, miscounted
from nbmemprof.allocator._gone_pools import Division, reroute, supposed
from nbmemprof.allocator._limits import Bounds, roundest
from nbmemprof.allocator._missing import locate, refusal_by_stack, shown
from nbmemprof.allocator._one_more import certain, divided_with_one_more, with_event
from nbmemprof.allocator._recording import Recording, recordings
from nbmemprof.allocator.conf import ConfError, Settings, parse
from nbmemprof.allocator.rounding import ROUND_LARGE, divisions_of
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["Followed", "as_recorded", "recorded_settings", "replayable"]

_UNCOUNTED = "torch's count of refused requests (num_ooms) is not in the recording: a refused request that gave no memory back leaves no event but its oom, so were one lost, nothing here would show it"
_MANY_SEGMENTS = 12  # of which each is tried


def as_recorded(capture: Capture, limit_bytes: int | None, capacity_bytes: int | None, torch: str | None) -> list[Followed]:
    """Follow every device's trace under the settings that it was recorded with; kept with the capture."""
    # in the capture itself: what is kept refers to it, and from a table beside it the two would hold each other for good
    kept: dict[tuple[Any, ...], list[Followed]] = capture.__dict__.setdefault("_as_recorded", {})
    key = (limit_bytes, capacity_bytes, torch)
    if key not in kept:
        kept[key] = [_follow(r, limit_bytes, capacity_bytes, torch) for r in recordings(capture)]
    return kept[key]


def replayable(capture: Capture, limit_bytes: int | None, capacity_bytes: int | None, torch: str | None) -> list[Followed]:
    """As :func:`as_recorded`, for who needs something to replay.

    Raises
    ------
    NbmemprofError
        There is no trace of a CUDA device.
    """
    followed = as_recorded(capture, limit_bytes, capacity_bytes, torch)
    if not followed:
        raise NbmemprofError(
            "Nothing to replay: the capture has no events of a CUDA device. Record with %%memprof on a GPU, or load a snapshot that has device_traces."
        )
    return followed


def recorded_settings(meta: Mapping[str, Any], torch: str | None) -> tuple[Settings, list[str]]:
    """Read the settings of a recording: its configuration text, corrected by the values that the snapshot lists."""
    said: list[str] = []
    listed = meta.get("settings") or {}
    text = meta.get("conf") if meta.get("conf") is not None else listed.get("PYTORCH_CUDA_ALLOC_CONF")
    if text is None and not listed:
        said.append("the recording does not tell its configuration; torch's defaults are assumed")
    if text is not None and not isinstance(text, str):  # of a damaged file
        said.append(f"the configuration text can't be read, the values that the snapshot lists are used (it is {text!r})")
        text = None
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
    bounds = Bounds(recording, settings)
    open_, refused = False, None
    if limit is None:
        limit, text = bounds.limit()
        refused = bounds.physical() if limit is None else None
        if limit is None and not text:
            limit, text = bounds.collected()
        said += text
        open_ = bool(text) or (settings.garbage_collection_threshold > 0 and bool((recording.kind == M.SEGMENT_FREE).any()))

    terms = Terms(settings, torch, limit, capacity_bytes or refused, card, empty=recording.starts_empty or recording.may_be_whole)

    def under(**changed: Any) -> Followed:
        return attempt(recording, replace(terms, **changed))

    found, trail = under(), []
    if not found.exact and len(recording.pool_names) > 1:
        found = _unsplit(found, recording.pool_names[1:], lambda whole: under(whole=whole))
        divided = found.terms
        trail = reroute(found, lambda whole: attempt(recording, replace(divided, whole=whole), often=True))
        found = trail[-1].found
    if open_ and not found.exact:
        found = _narrow(found, bounds.widest(), lambda limit: under(limit_bytes=limit))
        if not found.exact and (free := under(limit_bytes=None)).exact:  # the collector never ran: what was given back was empty_cache()'s doing
            found = free
        if found.limit_bytes != limit:
            said = [text for text in said if not text.startswith("a memory limit of")]
    if not found.exact and recording.may_be_whole:
        if recording.cached_at_start():
            found = _cached(found, recording, under)
        elif found.mismatch is not None and found.mismatch["expected"] is not None:
            found.mismatch["reason"] += "; or the trace began with this segment cached and nothing live, which no event tells"
    if found.exact:
        found.mismatch = refusal_by_stack(found) or miscounted(recording)
    else:
        found = _located(found, trail)
        if open_ and limit_bytes is None and found.mismatch is not None and "missing" not in found.mismatch:
            found = _under_another_limit(found) or found
        if found.mismatch is not None and "missing" not in found.mismatch:
            found.mismatch = miscounted(recording) or found.mismatch
    tight = found.limit_bytes is not None or found.capacity_bytes is not None or len(bounds.ooms) > 0
    if tight and meta.get("origin") not in ("modelled", "predicted", "replayed") and not has_readings(recording):
        said.append(_UNCOUNTED)
    found.inferred = [*said, *found.inferred]
    return found


def _cached(found: Followed, recording: Recording, under: Callable[..., Followed]) -> Followed:
    """Whether the trace began with segments cached and nothing live; that one of them came later, and that event is missing, is tried too."""
    tried = [found, under(empty=False)]
    if not tried[-1].exact:
        first = recording.first_segments()
        begin = first["addr"].to_numpy().view("int64").tolist()
        tried += [under(empty=False, later=frozenset([addr])) for addr in begin] if 1 < len(begin) <= _MANY_SEGMENTS else []
    exact = [one for one in tried if one.exact]
    return exact[0] if exact else max(tried, key=lambda one: int(one.model.m[M.AT]))


def _located(found: Followed, trail: list[Division]) -> Followed:
    """Name the event that is missing; ``trail``: the divisions into private pools that were tried, where there may have been pools that are gone."""
    if not trail or not found.recording.pools_may_be_gone():
        locate(found)
        return found
    trail[0].apply()
    undivided = attempt(found.recording, trail[0].found.terms) if len(trail) > 1 else found
    if locate(undivided, part=len(trail) < 2) or (len(trail) < 2 and undivided.mismatch is not None and "missing" in undivided.mismatch):
        return undivided
    trail[-1].apply()
    if shown(found, next(iter(certain(found)), None)) or locate(found, part=False):
        return found
    division = divided_with_one_more(trail) if len(trail) > 1 else None
    if division is not None and locate(division.found, part=False):
        division.found.inferred.append(supposed(trail[0], division))
        return division.found
    trail[-1].apply()
    _say_pools(found)
    return found


def _under_another_limit(found: Followed) -> Followed | None:
    """A limit that no file tells was found from the trace as it is; with what is certainly missing put in, another may be the one."""
    recording, terms = found.recording, found.terms
    for suspect in certain(found)[:3]:
        longer = with_event(recording, suspect, suspect.certain[1] if suspect.certain is not None else suspect.high)
        if longer is None:
            continue

        def again(limit: int | None, longer: Recording = longer) -> Followed:
            return attempt(longer, replace(terms, limit_bytes=limit), often=True)

        bounds = Bounds(longer, found.settings)
        tried = again(bounds.limit()[0] or bounds.collected()[0] or terms.limit_bytes)
        whole = tried if tried.exact else _narrow(tried, bounds.widest(), again)
        if whole.exact:
            other = attempt(recording, replace(terms, limit_bytes=whole.limit_bytes))
            if locate(other, part=False):
                other.inferred += [text for text in whole.inferred if text.startswith("the limit ")]
                return other
    return None


def _say_pools(found: Followed) -> None:
    if found.mismatch is not None:
        found.mismatch["reason"] += "; or it was a request of a private pool that is gone at the end, which no event of this torch names"


def _unsplit(found: Followed, names: list[str], again: Callable[[frozenset[str]], Followed]) -> Followed:
    """Whether private pools were made without splitting, which no file tells: a pool is taken for one where the trace is then followed further."""
    whole: frozenset[str] = frozenset()
    for name in names[:8]:
        other = again(whole | {name})
        if other.exact or other.model.m[M.AT] > found.model.m[M.AT]:
            found, whole = other, whole | {name}
        if found.exact:
            break
    if whole:
        found.inferred.append(f"private pools made with no_split: {', '.join(sorted(whole))}, as their blocks are handed out whole")
    return found


def _narrow(found: Followed, bounds: tuple[int, int], again: Callable[[int | None], Followed]) -> Followed:
    """Search for a limit under which the rules give the trace: each difference says on which side it is."""
    low, high = bounds
    best = found
    while high - low > ROUND_LARGE and not best.exact:
        m = found.model.m
        at = found.limit_bytes
        if at is not None and low <= at < high:
            refused = m[M.WRONG] == _run.DIFFERS and m[M.WRONG_KIND] in (M.SEGMENT_FREE, M.SEGMENT_UNMAP, M.OOM) and not _in_inferred_burst(found)
            refused = refused and not (found.settings.garbage_collection_threshold > 0 and m[M.REFUSALS])  # what the collector gave back, taken for the driver's doing
            low, high = (at + 1, high) if refused else (low, at)
        middle = low + (high - low) // 2
        found = again(roundest(middle, min(high, middle + ROUND_LARGE)))
        if found.exact or found.model.m[M.AT] > best.model.m[M.AT]:
            best = found
    if best.limit_bytes is not None and (best is not found or best.exact):
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


# ---------------------------------------------------------------------------------------------- reading
def _version(meta: Mapping[str, Any]) -> str | None:
    found = meta.get("torch") or (meta.get("versions") or {}).get("torch")
    return str(found) if found else None


def _number(value: Any, recording: Recording) -> int | None:
    """A meta value is one number, or one a device (keys as text)."""
    found = value.get(str(recording.key[1])) if isinstance(value, dict) else value
    return int(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None
