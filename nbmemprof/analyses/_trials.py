"""Settings put through the allocator's model, a few and within a bound."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nbmemprof import heap
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._infer import Followed, as_recorded
from nbmemprof.allocator._infer import recorded_settings as _settings
from nbmemprof.allocator._model import Model
from nbmemprof.allocator._serve import Requests
from nbmemprof.allocator.conf import ConfError, Settings, parse
from nbmemprof.allocator.replay import verdict
from nbmemprof.allocator.versions import rules_of
from nbmemprof.allocator.what_if import what_if
from nbmemprof.capture import Capture
from nbmemprof.units import format_count

__all__ = ["MOST_EVENTS", "Trials", "inferred_limits", "inferred_retries", "recorded_settings", "serving", "trials", "why_not"]

MOST_EVENTS = 300_000
_REFUSALS = 4  # of a device, that are asked for again under other settings
_POLICIES: tuple[str | int, ...] = ("windows", "ascending", 1)
_CONFS = ("expandable_segments:True", "roundup_power2_divisions:8", "max_split_size_mb:128", "garbage_collection_threshold:0.8", "")
Key = tuple[int | None, int | None]
_KEPT: weakref.WeakKeyDictionary[Capture, Trials] = weakref.WeakKeyDictionary()


@dataclass
class Trials:
    """By rank and device: the row of the recorded setting, and those of the others. ``why_not``: why nothing was replayed."""

    devices: list[Key]
    why_not: str | None = None
    exact: bool = False
    rows: dict[Key, tuple[dict[str, Any], list[dict[str, Any]]]] = field(default_factory=dict)


def trials(capture: Capture) -> Trials:
    """What would a few other settings have done? Kept with the capture."""
    made = _KEPT.get(capture)
    if made is None:
        made = _KEPT[capture] = _try(capture)
    return made


def recorded_settings(capture: Capture) -> Settings:
    """Settings that the capture was recorded with, as far as it tells."""
    torch = capture.meta.get("torch")
    return _settings(capture.meta, torch if isinstance(torch, str) else None)[0]


def inferred_limits(capture: Capture) -> dict[int | None, int]:
    """Torch's own limit by device, as an exact replay has it."""
    return {one.recording.key[1]: one.limit_bytes for one in as_recorded(capture, None, None, None) if one.exact and one.limit_bytes is not None}


def inferred_retries(capture: Capture) -> dict[int | None, int]:
    """Requests that torch made again after it had emptied its cache, by device, as an exact replay counts them."""
    return {one.recording.key[1]: int(one.model.m[M.RETRIES]) for one in as_recorded(capture, None, None, None) if one.exact}


def why_not(capture: Capture) -> str | None:
    """Why other settings can't be tried on this capture; None where they can."""
    events = capture.tables["events"].height
    if not any(c.key[2] == "device" and len(c.seq) for c in heap.curves(capture)):
        return "there are no events of a CUDA device"
    if events > MOST_EVENTS:
        return f"the trace has {format_count(events)} events, more than {format_count(MOST_EVENTS)}; nbmemprof.what_if(capture) takes them all"
    if (text := _unreadable(capture)) is not None:
        return text
    judged = verdict(capture)
    return None if judged["exact"] else f"the rules do not give the recorded addresses ({judged['text']})"


def _unreadable(capture: Capture) -> str | None:
    """Whether the configuration text is not what was in force: a comparison would then have no ground."""
    found, torch = recorded_settings(capture), capture.meta.get("torch")
    try:
        written = parse(found.text, torch if isinstance(torch, str) else None)
    except ConfError as error:
        return f"its configuration can't be read ({error})"
    if written.backend != "native":
        return f"its configuration leaves memory to the driver's pool (backend:{written.backend}), which is not modelled"
    names = ("expandable_segments", "max_split_size", "roundup_power2_divisions", "garbage_collection_threshold")
    differ = [name for name in names if getattr(found, name) != getattr(written, name)]
    return f"{', '.join(differ)} in force at the end {'is' if len(differ) == 1 else 'are'} not as its configuration text says" if differ else None


def serving(capture: Capture) -> dict[int, tuple[bool, list[str]]]:
    """Under which settings is a refused request served, after all requests before it?

    Returns
    -------
    By the refusal's ``seq``, for the first few of each device: whether the model refuses it under the recorded setting as the
    recording does, and the other settings that serve it under every order of addresses that is tried.
    """
    made: dict[int, tuple[bool, list[str]]] = {}
    for one in as_recorded(capture, None, None, None):
        recording, requests = one.recording, Requests(one)
        for place in np.flatnonzero(recording.kind == M.OOM)[:_REFUSALS].tolist():
            refuses = not any(_is_served(one, requests, one.settings, place, policy) for policy in _POLICIES)
            others = [c for c in _CONFS if c != one.settings.text] if refuses else []
            good = [c for c in others if all(_is_served(one, requests, parse(c, one.torch), place, policy) for policy in _POLICIES)]
            made[int(one.recording.curve.seq[place])] = (refuses, good)
    return made


def _is_served(one: Followed, requests: Requests, settings: Settings, place: int, policy: str | int) -> bool:
    """Run all requests before a refused one, then that one: it counts as served where none of them is lost for it."""
    model = Model(settings, rules_of(one.torch), limit_bytes=one.limit_bytes, capacity_bytes=one.capacity_bytes, policy=policy)
    operations, moments = requests.bound(model)
    row, end = one.recording.rows.height, (len(requests.cold) + place + 1) * M.WORDS
    until = operations[:end].copy()
    kinds = until[M.T_KIND :: M.WORDS]
    kinds[kinds == M.OOM] = M.OTHER  # earlier refusals are not asked again: this one is the question
    until[-M.WORDS + M.T_KIND], until[-M.WORDS + M.T_ROW] = M.ALLOC, row
    rows = np.zeros(2 * (row + 1), np.int64)
    model.m[M.MODE], model.m[M.END], model.m[M.STOP] = M.MUTE, 0, end
    model.run(np.zeros(0, np.int64), until, rows, moments, work=_REFUSALS * len(_POLICIES) * len(_CONFS) * end // M.WORDS)
    return bool(rows[2 * row] > 0 and model.m[M.OOMS] == 0)


def _try(capture: Capture) -> Trials:
    made = Trials([(c.key[0], c.key[1]) for c in heap.curves(capture) if c.key[2] == "device" and len(c.seq)], why_not(capture))
    if made.why_not is not None:
        return made
    made.exact = True
    recorded = recorded_settings(capture)
    confs = [recorded.text, *(c for c in _CONFS if c != recorded.text)]
    for row in what_if(capture, confs).iter_rows(named=True):
        key = (row["rank"], row["device"])
        mine, others = made.rows.get(key, (None, []))
        if row["recorded"] and mine is None:
            mine = row
        else:
            others.append(row)
        made.rows[key] = (mine, others)  # type: ignore[assignment]
    made.rows = {key: rows for key, rows in made.rows.items() if rows[0] is not None}
    return made
