"""What other allocator settings would have made of a recording."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import polars as pl

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._infer import Followed, replayable
from nbmemprof.allocator._serve import Requests, serve
from nbmemprof.allocator.conf import Settings, parse
from nbmemprof.allocator.replay import _bytes, _limit
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["CONFS", "what_if"]

CONFS = (
    "", "expandable_segments:True", "max_split_size_mb:128", "max_split_size_mb:512", "roundup_power2_divisions:4", "roundup_power2_divisions:8",
    "max_split_size_mb:128,roundup_power2_divisions:8", "garbage_collection_threshold:0.8",
)  # fmt: skip
_POLICIES: tuple[str | int, ...] = ("windows", "ascending", "descending", 1, 2)
COLUMNS: dict[str, Any] = {
    "conf": pl.String, "device": pl.Int64, "rank": pl.Int64, "peak_reserved_low_bytes": pl.Int64, "peak_reserved_high_bytes": pl.Int64,
    "peak_allocated_low_bytes": pl.Int64, "peak_allocated_high_bytes": pl.Int64, "ooms": pl.Int64, "ooms_high": pl.Int64, "retries": pl.Int64,
    "device_calls": pl.Int64, "segments": pl.Int64, "refused_bytes": pl.Int64, "asked_again": pl.Int64, "served_again_low": pl.Int64, "served_again": pl.Int64, "recorded": pl.Boolean, "runs": pl.Int64, "origin": pl.String,
}  # fmt: skip


def what_if(
    capture: Capture,
    confs: str | Iterable[str] | None = None,
    *,
    limit_bytes: int | str | None = None,
    capacity_bytes: int | str | None = None,
    torch: str | None = None,
) -> pl.DataFrame:
    """What would each setting have reserved, refused and cost?

    Parameters
    ----------
    capture
        A recording with a trace of a CUDA device.
    confs
        Configurations to try; None for those that a person would try.
    limit_bytes, capacity_bytes, torch
        As for :func:`nbmemprof.replay`.

    Returns
    -------
    One row a configuration and device: ``conf device rank peak_reserved_low_bytes peak_reserved_high_bytes`` (over three to five orders
    of segment addresses, on which ties of the best fit hang; one number twice where they can't matter or are recorded)
    ``peak_allocated_low_bytes peak_allocated_high_bytes ooms ooms_high`` (least and most) ``retries device_calls segments``
    (of the first order) ``refused_bytes``; ``asked_again``: requests that were refused when it was recorded, which are asked again at their
    place; ``served_again_low served_again``: how many of them are served now, least and most: each is given back at once, as what the program would
    have done with it is in no file, so peaks hold for the program as it went on then, the request included; ``recorded`` (the setting
    that it was recorded with) ``runs origin``: the capture's own (``measured``, ``recorded``, ``predicted``, ``modelled``) where the row is the
    recording itself, followed exactly, else ``replayed``.

    Raises
    ------
    NbmemprofError
        There is no trace of a CUDA device, or torch would refuse a configuration.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.what_if(capture, ["", "expandable_segments:True"]).select("conf", "peak_reserved_high_bytes", "device_calls").rows()
    [('', 20971520, 10), ('expandable_segments:True', 20971520, 10)]
    """
    limit, capacity = _bytes(limit_bytes), _bytes(capacity_bytes)
    followed = replayable(capture, None, None, torch)
    rows: list[dict[str, Any]] = []
    origin = str(capture.meta.get("origin") or "measured")
    workers = max(1, min(8, os.cpu_count() or 1))
    with ThreadPoolExecutor(workers) as pool:
        for one in followed:
            requests = Requests(one)
            texts = list(CONFS) if confs is None else _texts(confs)
            if confs is None and one.settings.text not in texts:
                texts.insert(0, one.settings.text)
            settings = [parse(text, one.torch) for text in texts]
            runs = len(settings) * len(_POLICIES)
            rows += pool.map(lambda s, one=one, requests=requests, runs=runs: _row(one, requests, s, limit, capacity, runs, origin), settings)
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _texts(confs: str | Iterable[str]) -> list[str]:
    texts = [confs] if isinstance(confs, str) else list(confs) if isinstance(confs, Iterable) else [confs]
    if stray := [text for text in texts if not isinstance(text, str)]:
        raise NbmemprofError(f"{stray[0]!r} is no configuration. Give texts as PYTORCH_CUDA_ALLOC_CONF has them, as 'expandable_segments:True'; '' is torch's defaults.")
    return texts


def _row(one: Followed, requests: Requests, settings: Settings, limit: int | None, capacity: int | None, runs: int, origin: str) -> dict[str, Any]:
    bound = _limit(one, limit, settings.per_process_memory_fraction, capacity)
    same_card = capacity is None or (capacity == one.capacity_bytes or capacity == one.recording.capture.meta.get("capacity_bytes"))
    recorded = _alike(settings, one.settings) and (bound is None or bound == one.limit_bytes) and same_card
    if recorded and one.exact and one.recording.starts_empty:
        return _summed(one, settings, [one.model.m], True, origin)
    made = []
    for policy in _POLICIES:
        served = serve(requests, settings, torch=one.torch, limit_bytes=bound, capacity_bytes=one.capacity_bytes if capacity is None else capacity, policy=policy, runs=runs)
        made.append(served.model.m)
        if not served.tied or (len(made) == 3 and len({_outcome(m) for m in made}) == 1):
            break
    return _summed(one, settings, made, recorded, "replayed")


def _outcome(m: Any) -> tuple[int, ...]:
    return tuple(int(m[at]) for at in (M.RESERVED_BYTES + 1, M.ALLOCATED_BYTES + 1, M.OOMS, M.RETRIES))


def _alike(a: Settings, b: Settings) -> bool:
    names = ("backend", "expandable_segments", "max_split_size", "max_non_split_rounding", "roundup_power2_divisions", "garbage_collection_threshold", "large_segment_size")
    return all(getattr(a, name) == getattr(b, name) for name in names)


def _summed(one: Followed, settings: Settings, made: list[Any], recorded: bool, origin: str) -> dict[str, Any]:
    reserved = [int(m[M.RESERVED_BYTES + 1]) for m in made]
    allocated = [int(m[M.ALLOCATED_BYTES + 1]) for m in made]
    ooms = [int(m[M.OOMS]) for m in made]
    again = [int(m[M.SERVED_AGAIN]) for m in made]
    refused = one.recording.kind == M.OOM
    asked, asked_bytes = int(refused.sum()), int(one.recording.size[refused].sum())
    m = made[0]
    return {
        "conf": settings.text, "device": one.recording.key[1], "rank": one.recording.key[0], "peak_reserved_low_bytes": min(reserved), "peak_reserved_high_bytes": max(reserved),
        "peak_allocated_low_bytes": min(allocated), "peak_allocated_high_bytes": max(allocated), "ooms": min(ooms), "ooms_high": max(ooms), "retries": int(m[M.RETRIES]),
        "device_calls": int(m[M.DEVICE_ALLOC] + m[M.DEVICE_FREE]), "segments": int(m[M.SEGMENTS_MADE] if not m[M.AREAS_MADE] else m[M.DEVICE_ALLOC]),
        "refused_bytes": int(m[M.SKIPPED_BYTES]) if origin == "replayed" else asked_bytes, "asked_again": asked, "served_again_low": min(again), "served_again": max(again), "recorded": recorded, "runs": len(made), "origin": origin,
    }  # fmt: skip
