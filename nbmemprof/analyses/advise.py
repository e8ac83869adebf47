"""What to change, and what it would save."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._detectors import DETECTORS, Finding, Seen
from nbmemprof.analyses._trials import Trials, trials
from nbmemprof.analyses._usage import USAGE
from nbmemprof.analyses.oom import oom
from nbmemprof.analyses.pools import pools
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes

__all__ = ["advise"]

_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "rank": pl.Int64, "rule": pl.String, "finding": pl.String, "evidence": pl.String, "saving_bytes": pl.Int64, "action": pl.String, "origin": pl.String,
}  # fmt: skip
_WORTH = 0.01  # share of the peak reserved that a setting must save to be proposed
_MIB = 1 << 20
_SEVERAL = 2  # refusals from which a setting that has fewer is worth a line; a single one has its own
_LINES = 3  # lines that get a pool's advice
_CALLS = 20  # device calls below which a pool is not worth a line


def advise(capture: Capture, replay: bool = True) -> pl.DataFrame:
    """What would reduce memory, or the time spent on it, and by how much?

    Parameters
    ----------
    capture
        Any capture.
    replay
        Whether to put the requests through the allocator's model under other settings, and to look for lines that want a pool of
        their own: about a second for 100,000 events; beyond 300,000 events nothing is replayed, and a row says so.

    Returns
    -------
    One row a finding, by ``saving_bytes`` descending: ``device rank`` (null: all), ``rule`` (its name), ``finding``, ``evidence`` and
    ``action`` as sentences; ``saving_bytes``: reserved bytes saved, the least of the range, of ``checkpoint`` allocated ones (0: it saves time or makes it work at all;
    null: not to be told); ``origin``: ``replayed`` for what other settings would have done, ``modelled`` for what checkpointing would, else that of the capture.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.advise(capture).select("rule", "saving_bytes", "origin").rows()
    [('settings', 0, 'replayed')]
    """
    seen = Seen(capture)
    seen.replayed = replay and seen.is_cuda and trials(capture).why_not is None
    found = [one for detector in (*DETECTORS, *USAGE) for one in detector(seen)]
    if seen.replayed:  # the replay says for certain what would have served a request
        found = [one for one in found if one.rule != "scattered"]
    if replay and seen.is_cuda:
        too_much = list(_too_much(capture))
        refused = list(_refused(capture))
        served = any(one.origin == "replayed" for one in refused)
        found = [*too_much, *refused, *found, *([] if too_much else _settings(trials(capture), served=served)), *_pools(capture)]
    rows = [
        {"device": one.device, "rank": one.rank, "rule": one.rule, "finding": one.finding, "evidence": one.evidence, "saving_bytes": one.saving_bytes, "action": one.action,
         "origin": one.origin or capture.meta["origin"]}
        for one in found
    ]  # fmt: skip
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("saving_bytes", descending=True, nulls_last=True, maintain_order=True)


def _too_much(capture: Capture) -> Iterator[Finding]:
    """A prediction whose tensors alone are more than there is room for: no setting helps."""
    needs, limit = capture.meta.get("needs"), capture.meta.get("limit_bytes")
    if not isinstance(needs, dict):
        return
    room = int(capture.meta.get("capacity_bytes") or 0) - int(capture.meta.get("outside_bytes") or 0)
    room = max(0, room if limit is None else min(room, int(limit)))
    if int(needs["peak_allocated_bytes"]) > room:
        least = "Let less live at once: a smaller batch, activation checkpointing, smaller tensors"
        if int(needs["refused_bytes"]) > room:
            least = "That one request is larger than all the room: ask for less at once"
        yield Finding(
            "does_not_fit", f"It does not fit: its tensors take {format_bytes(int(needs['peak_allocated_bytes']))} at the peak, and there is room for {format_bytes(room)}.",
            f"Predicted as if no request were refused; the first refused one asks for {format_bytes(int(needs['refused_bytes']))} ({needs['op']}).",
            f"No allocator setting helps. {least}; nbmemprof.cards(capture) tells on which GPU it fits.", 0, None, None,
        )  # fmt: skip


def _refused(capture: Capture) -> Iterator[Finding]:
    """What would have let the first refusals through."""
    if not (capture.tables["events"]["action"] == "oom").any():
        return
    for row in oom(capture, replay=True).filter(pl.col("setting").is_not_null() | pl.col("free_site").is_not_null()).head(_LINES).iter_rows(named=True):
        where = f" at {row['site']}" if row["site"] else ""
        setting, site = row["setting"], row["free_site"]
        what = f"with {setting or 'the default settings'}" if setting is not None else f"once {site} gave back its {format_bytes(row['free_site_bytes'])}"
        yield Finding(
            "refused", f"The request for {format_bytes(row['requested_bytes'])}{where} that was refused would have been served {what}.", f"{row['reason']} {row['help']}",
            (f"Set PYTORCH_CUDA_ALLOC_CONF={setting} before torch is imported." if setting else "Unset PYTORCH_CUDA_ALLOC_CONF.") if setting is not None else f"Free what {site} holds before it.",
            0, row["rank"], row["device"], "replayed" if setting is not None else None,
        )  # fmt: skip


def _settings(tried: Trials, *, served: bool) -> Iterator[Finding]:
    """The setting that saves most, with the range over orders of addresses; ``served``: another one serves what was refused."""
    if tried.why_not is not None:
        yield Finding(
            "settings",
            f"Other settings were not replayed: {tried.why_not}.",
            "A saving is told only where the model gives the recorded addresses.",
            "nbmemprof.what_if(capture) tries them all the same.",
            None,
        )
        return
    for (rank, device), (recorded, others) in tried.rows.items():
        if not others:
            continue
        fewer = list(_fewer(rank, device, recorded, others))
        yield from fewer
        base_low, base_high = recorded["peak_reserved_low_bytes"], recorded["peak_reserved_high_bytes"]
        fair = [row for row in others if row["ooms_high"] == 0 or row["ooms_high"] <= recorded["ooms"]]
        best = min(fair, key=lambda row: (row["peak_reserved_high_bytes"], row["conf"]), default=None)
        names = ", ".join(row["conf"] or "torch's defaults" for row in others)
        low = base_low - best["peak_reserved_high_bytes"] if best else 0
        if best is None or low < max(_MIB, _WORTH * base_low):
            yield Finding(
                "settings", "No other allocator setting would have lowered the peak of reserved memory.",
                f"Replayed: {names}. The recorded setting reserved {format_bytes(base_high)}, the best of them {format_bytes(best['peak_reserved_high_bytes']) if best else 'more'}.",
                "Change it for what was refused, not for the peak." if served or fewer else "Leave the setting as it is; fewer live bytes are what is left to save.", 0, rank, device, "replayed",
            )  # fmt: skip
            continue
        high = base_high - best["peak_reserved_low_bytes"]
        by = format_bytes(low) if low == high else f"{format_bytes(low)} to {format_bytes(high)}"
        conf = best["conf"] or "torch's defaults"
        calls = f"; {best['device_calls']} device calls instead of {recorded['device_calls']}" if best["device_calls"] != recorded["device_calls"] else ""
        yield Finding(
            "settings", f"{conf} would have reserved {by} less at the peak ({format_bytes(best['peak_reserved_high_bytes'])} instead of {format_bytes(base_low)}).",
            f"The same requests replayed under {len(others)} other settings; the range is over {best['runs']} order{'s' if best['runs'] > 1 else ''} of segment addresses{calls}.",
            f"Set PYTORCH_CUDA_ALLOC_CONF={best['conf']} before torch is imported." if best["conf"] else "Unset PYTORCH_CUDA_ALLOC_CONF.",
            int(low), rank, device, "replayed",
        )  # fmt: skip


def _fewer(rank: int | None, device: int | None, recorded: dict[str, Any], others: list[dict[str, Any]]) -> Iterator[Finding]:
    """The setting that refuses least, where several requests were refused."""
    best = min((row for row in others if row["ooms_high"] < recorded["ooms"]), key=lambda row: (row["ooms_high"], row["peak_reserved_high_bytes"]), default=None)
    if best is None or recorded["ooms"] < _SEVERAL:
        return
    low, high, conf = best["ooms"], best["ooms_high"], best["conf"] or "torch's defaults"
    count = f"{low}" if low == high else f"{low} to {high}"
    yield Finding(
        "refusals", f"{conf} would have refused {'none' if high == 0 else count} of the requests, instead of {recorded['ooms']}.",
        "The same requests replayed under it; what was refused when it was recorded is asked again and given back at once.",
        f"Set PYTORCH_CUDA_ALLOC_CONF={best['conf']} before torch is imported." if best["conf"] else "Unset PYTORCH_CUDA_ALLOC_CONF.",
        0, rank, device, "replayed",
    )  # fmt: skip


def _pools(capture: Capture) -> Iterator[Finding]:
    """Lines that a replay shows to gain from memory of their own; where nothing could be replayed nothing is promised."""
    wanted = pools(capture).filter(pl.col("origin") == "replayed", pl.col("advice") != "none", pl.col("saved_bytes") >= 0)
    peak = max((int(c.reserved.max(initial=0)) for c in heap.curves(capture)), default=0)
    lines = wanted.filter((pl.col("saved_bytes") >= max(_MIB, _WORTH * peak)) | (pl.col("device_calls_saved") >= _CALLS))
    for row in lines.sort("saved_bytes", "device_calls_saved", descending=True).head(_LINES).iter_rows(named=True):
        where = row["site"] or f"The requests for {format_bytes(row['asked_bytes'])}"
        if row["advice"] == "stream":
            finding = f"{where}: {row['pending_count']} of {row['count']} blocks waited for another stream after they were freed."
            action = "Allocate them on the stream that uses them last, or wait for an event before the free."
        else:
            buffer = row["advice"] == "buffer"
            need = f"one buffer of {format_bytes(row['size_max_bytes'])}" if buffer else f"an arena of {format_bytes(row['peak_bytes'])}"
            finding = f"{where}: {row['count']} blocks, at most {row['peak_count']} alive at once, took {row['device_calls']} device calls for new memory; {need} would do."
            action = "Make the tensor once and write into it (out=, copy_), or mp.BufferPool." if buffer else "Allocate them from one torch.cuda.MemPool, or cut them from one tensor."
        low, high = row["saved_bytes"], row["saved_high_bytes"]
        less = f"{format_bytes(low)} lower" if low == high else f"{format_bytes(low)} to {format_bytes(high)} lower"
        yield Finding(
            "pools", finding,
            f"Replayed so, the peak of reserved memory is {less if high else 'the same'}; it takes {row['device_calls_saved']} device calls fewer and {row['calls_saved']} allocs and frees. They ask for {format_bytes(row['size_bytes'])} in all.",
            action, int(low), row["rank"], row["device"], "replayed",
        )  # fmt: skip
