"""A recording's requests put through the exact model of PyTorch's allocator."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof import schema
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._assemble import tables_of
from nbmemprof.allocator._infer import Followed, as_recorded, replayable
from nbmemprof.allocator._model import Model
from nbmemprof.allocator._serve import Requests, serve
from nbmemprof.allocator.conf import parse
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_count, parse_bytes

__all__ = ["replay", "verdict"]


def verdict(capture: Capture, *, limit_bytes: int | str | None = None, capacity_bytes: int | str | None = None, torch: str | None = None) -> dict[str, Any]:
    """Do the rules give the recorded addresses?

    Parameters
    ----------
    capture, limit_bytes, capacity_bytes, torch
        As for :func:`nbmemprof.replay`.

    Returns
    -------
    ``exact`` (every event is the recorded one, and so is the picture at the end), ``events``, ``first_mismatch`` (None, or
    ``seq index device rank expected found reason``), ``inferred`` (what no event tells, in sentences), ``text``.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.allocator.verdict(capture)["exact"]
    True
    """
    return _verdict(as_recorded(capture, _bytes(limit_bytes), _bytes(capacity_bytes), torch))


def replay(
    capture: Capture,
    conf: str | None = None,
    *,
    limit_bytes: int | str | None = None,
    capacity_bytes: int | str | None = None,
    torch: str | None = None,
) -> Capture:
    """What would the allocator have done with these requests?

    Parameters
    ----------
    capture
        A recording with a trace of a CUDA device.
    conf
        None: as recorded, and every address is compared with the recorded one. Else the configuration to try (``""``: torch's
        defaults): recorded segments are then outcomes, and are not used; new ones lie at ascending addresses.
    limit_bytes, capacity_bytes
        torch's own limit; what the driver can give. None: as recorded (of the driver, what it had when it refused), or without bound where the
        recording shows none.
    torch
        Version whose rules hold; None: the recording's, else 2.11.

    Returns
    -------
    A capture of origin ``replayed``: events, allocations (categories and stacks carried over), segments and blocks, so that every
    analysis works on it. ``meta["verdict"]`` is that of :func:`verdict`; ``meta["refused"]`` counts requests that were
    refused, which are left out with their frees; ``meta["stats"]`` has torch's counters by device.

    Raises
    ------
    NbmemprofError
        There is no trace of a CUDA device, or torch would refuse the configuration.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.replay(capture).meta["verdict"]["exact"]
    True
    >>> mp.summary(mp.replay(capture, "expandable_segments:True"))["peak_reserved_bytes"].item()
    20971520
    """
    limit, capacity = _bytes(limit_bytes), _bytes(capacity_bytes)
    followed = replayable(capture, limit, capacity, torch)
    judged = _verdict(followed)
    meta = {k: v for k, v in capture.meta.items() if k not in ("counters", "recording", "peaks", "readings")} | {"origin": "replayed", "verdict": judged}
    if conf is None and judged["exact"]:
        return _as_it_was(capture, followed, meta)
    parts: dict[str, list[pl.DataFrame]] = {}
    models, refused, first = {}, [0, 0], 0
    for one in followed:
        settings = one.settings if conf is None else parse(conf, one.torch)
        bound = _limit(one, limit, settings.per_process_memory_fraction, capacity)
        served = serve(Requests(one), settings, torch=one.torch, limit_bytes=bound, capacity_bytes=one.capacity_bytes if capacity is None else capacity, keep=True)
        tables = tables_of(Requests(one), served, first)
        first += tables["events"].height
        for name, frame in tables.items():
            parts.setdefault(name, []).append(frame)
        models[str(one.recording.key[1])] = served.model
        refused = [refused[0] + int(served.model.m[M.SKIPPED]), refused[1] + int(served.model.m[M.SKIPPED_BYTES])]
    whole = {name: pl.concat(frames, how="vertical_relaxed") for name, frames in parts.items()}
    whole["marks"] = whole["marks"].unique(maintain_order=True)
    whole["stacks"] = capture.tables["stacks"]
    meta |= _counted(models) | {"refused": {"requests": refused[0], "bytes": refused[1]}, "warnings": [w for w in meta["warnings"] if w.startswith("no frames")]}
    meta |= {"conf": meta.get("conf") if conf is None else conf, "limit_bytes": limit if limit is not None else followed[0].limit_bytes, "settings": None}
    if capacity is not None:
        meta["capacity_bytes"] = capacity
    meta["settings"] = _listed(next(iter(models.values())))
    return Capture.build({name: schema.check(name, frame) for name, frame in whole.items()}, **meta)


def _as_it_was(capture: Capture, followed: list[Followed], meta: dict[str, Any]) -> Capture:
    """The recorded tables are the replayed ones, with the model's block sizes."""
    tables = {name: capture.tables[name] for name in capture.tables if capture.tables.is_ready(name)}
    lazy = {name: (lambda name=name: capture.tables[name]) for name in capture.tables if name not in tables}
    rows = capture.tables["allocations"]
    told = rows["size_bytes"].fill_null(0).to_numpy().copy()
    exact = rows["size_exact"].fill_null(value=False).to_numpy().copy()
    for one in followed:
        mine = slice(None) if one.recording.rows.height == rows.height else rows.with_row_index("at").filter(_same(one))["at"].to_numpy()
        given = one.rows[1::2][: one.recording.rows.height]
        told[mine] = np.where(given > 0, given, told[mine])
        exact[mine] |= given > 0
    if not (np.array_equal(told, rows["size_bytes"].fill_null(0).to_numpy()) and exact.all()):
        tables["allocations"] = rows.with_columns(pl.Series("size_bytes", told), pl.Series("size_exact", exact))
    meta |= _counted({str(one.recording.key[1]): one.model for one in followed}) | {"refused": {"requests": 0, "bytes": 0}}
    meta["limit_bytes"] = followed[0].limit_bytes
    return Capture.build(tables, lazy, **meta)


def _same(one: Followed) -> pl.Expr:
    from nbmemprof import heap

    return heap.matches(one.recording.key)


def _counted(models: dict[str, Model]) -> dict[str, Any]:
    stats = {device: model.stats() for device, model in models.items()}
    return {
        "stats": stats,
        "counters": {
            device: {
                "peak_allocated_bytes": s["allocated_bytes.all.peak"], "peak_reserved_bytes": s["reserved_bytes.all.peak"], "peak_requested_bytes": s["requested_bytes.all.peak"],
                "end_allocated_bytes": s["allocated_bytes.all.current"], "end_reserved_bytes": s["reserved_bytes.all.current"],
                "start_allocated_bytes": None, "start_reserved_bytes": None, "retries": s["num_alloc_retries"], "ooms": s["num_ooms"],
            }
            for device, s in stats.items()
        },
    }  # fmt: skip


def _listed(model: Model) -> dict[str, Any]:
    settings = model.settings
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings.text, "expandable_segments": settings.expandable_segments, "max_split_size": settings.max_split_size or -1,
        "garbage_collection_threshold": settings.garbage_collection_threshold, "roundup_power2_divisions": {str(1 << i): d for i, d in enumerate(settings.roundup_power2_divisions)},
    }  # fmt: skip


def _limit(one: Followed, given: int | None, fraction: float | None, capacity: int | None) -> int | None:
    """The limit of a what-if: as given, by its own fraction, else the recording's."""
    if given is not None:
        return given
    card = capacity or (one.recording.capture.meta.get("capacity_bytes") if not isinstance(one.recording.capture.meta.get("capacity_bytes"), dict) else None)
    if fraction not in (None, 1.0) and card:
        return int(float(fraction or 0.0) * float(card))
    return one.limit_bytes


def _bytes(size: int | str | None) -> int | None:
    return None if size is None else parse_bytes(size)


def _verdict(followed: list[Followed]) -> dict[str, Any]:
    events = sum(f.recording.events.height for f in followed)
    wrong = [f.mismatch for f in followed if f.mismatch is not None]
    inferred: list[str] = []
    for one in followed:
        place = f"device {one.recording.key[1]}: " if len(followed) > 1 else ""
        inferred += [place + text for text in one.inferred]
    exact = bool(followed) and not wrong
    if not followed:
        text = "not replayed: there are no events of a CUDA device"
    elif exact:
        text = f"replayed exactly: the rules give all {format_count(events)} recorded events, addresses included"
    else:
        text = f"not exact: {_sentence(wrong[0])}"
    if inferred:
        text += f" ({len(inferred)} thing{'s' if len(inferred) > 1 else ''} inferred)"
    return {"exact": exact, "events": events, "first_mismatch": wrong[0] if wrong else None, "inferred": inferred, "text": text}


def _sentence(mismatch: dict[str, Any]) -> str:
    def event(e: dict[str, Any] | None) -> str:
        return "nothing" if e is None else f"{e['action']} of {format_bytes(e['bytes'])} at {e['addr']:#x}"

    where = f"event {format_count(mismatch['index'])} of device {mismatch['device']}"
    if "missing" in mismatch:
        return f"at {where} ({event(mismatch['found'])}) the recording can't be true: {mismatch['reason']}"
    if mismatch["expected"] is not None:
        more = mismatch["reason"].partition("; ")
        return f"at {where} the rules give {event(mismatch['expected'])}, the recording has {event(mismatch['found'])}{''.join(more[1:])}"
    return f"at {where} ({event(mismatch['found'])}): {mismatch['reason']}"
