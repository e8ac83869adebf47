"""On which cards a recorded cell would fit."""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof.allocator.replay import replay as replayed
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction.catalogue import CATALOGUE, GPU, MIB
from nbmemprof.units import format_bytes

__all__ = ["cards"]

_SCHEMA: dict[str, Any] = {
    "card": pl.String, "capacity_bytes": pl.Int64, "low_bytes": pl.Int64, "high_bytes": pl.Int64, "fits": pl.String, "headroom_bytes": pl.Int64, "evidence": pl.String, "origin": pl.String,
}  # fmt: skip
_EXPANDABLE = "expandable_segments:True"
_MOST = 300_000  # events that are replayed for a card
_WHERE_FROM_A_CPU = "a CPU's requests; a GPU's kernels ask for workspaces too"


def cards(capture: Capture, replay: bool = True) -> pl.DataFrame:
    """Which cards would this cell fit on, and which is the smallest?

    Parameters
    ----------
    replay
        Whether a card that is large enough for the tensors but not for all that torch reserved is decided by replaying the requests
        with so much memory (torch gives its cache back before it gives up); otherwise such a card is ``"maybe"``.

    Returns
    -------
    One row a card of the catalogue, by ``capacity_bytes``: ``card capacity_bytes low_bytes`` (peak of live blocks) ``high_bytes`` (peak reserved), both with what a process takes beside
    the allocator (context, libraries) at its least and its most, ``fits`` (``yes``, ``with expandable_segments:True``, ``maybe``, ``no``), ``headroom_bytes`` (capacity less ``high_bytes``), ``evidence origin``. The
    first ``yes`` is the smallest card. Of several devices the fullest counts. A prediction in which a request was refused is judged by its peaks as if none were.

    Raises
    ------
    NbmemprofError
        For a capture without a peak.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> address = device.malloc("30GiB")
    >>> mp.cards(mp.load(device.snapshot())).filter(fits="yes")["card"][0]
    'RTX 5090'
    """
    rows = summary(capture)
    told = rows.drop_nulls("peak_allocated_bytes")
    if told.is_empty():
        raise NbmemprofError("This capture has no peak: no event and no recording tells of one. Record the cell with %%memprof, or open a snapshot with its history.")
    needs = capture.meta.get("needs") or {}
    on_gpu = told.filter(pl.col("kind").cast(pl.String) == "device")
    fullest = (on_gpu if on_gpu.height else told).sort("peak_allocated_bytes", descending=True).row(0, named=True)
    allocated = int(fullest["peak_allocated_bytes"])
    reserved = max(int(fullest["peak_reserved_bytes"] or allocated), allocated)
    allocated, reserved = max(allocated, int(needs.get("peak_allocated_bytes", 0))), max(reserved, int(needs.get("peak_reserved_bytes", 0)))
    made = [_row(capture, gpu, allocated, reserved, replay=replay and bool(on_gpu.height) and not needs, on_gpu=bool(on_gpu.height)) for gpu in CATALOGUE.values()]
    return pl.DataFrame(made, schema=_SCHEMA, orient="row").sort("capacity_bytes", "card")


def _row(capture: Capture, gpu: GPU, allocated: int, reserved: int, *, replay: bool, on_gpu: bool) -> dict[str, Any]:
    outside = gpu.outside
    usual, most = outside.blas * MIB, (outside.cudnn + outside.plus_minus) * MIB
    least = max(usual - outside.plus_minus * MIB, 0)
    low, high = allocated + least, reserved + most
    evidence, origin = f"recorded peak; beside it {usual // MIB} ± {outside.plus_minus} MiB ({outside.source})", capture.meta["origin"]
    if not on_gpu:
        evidence = f"{evidence}; {_WHERE_FROM_A_CPU}"
    fits = "yes" if high <= gpu.capacity_bytes else "no" if low > gpu.capacity_bytes else "maybe"
    if needs := capture.meta.get("needs"):
        evidence = f"predicted peak as if no request were refused{evidence.removeprefix('recorded peak')}"
        if not needs.get("whole", True):
            fits, evidence = "no" if fits == "no" else "maybe", str(needs["known_by"])
        if capture.meta.get("limit_bytes") is None and gpu.capacity_bytes <= int(capture.meta.get("capacity_bytes") or 0):
            fits, evidence = "no", f"{evidence}; the prediction with {format_bytes(int(capture.meta['capacity_bytes']))} met a refusal"
    if fits == "maybe" and replay and capture.events.height <= _MOST:
        fits, more = _tried(capture, gpu.capacity_bytes - usual - outside.plus_minus * MIB)
        evidence, origin = f"{evidence}; {more}", "replayed"
    elif fits == "yes" and not on_gpu:
        fits = "yes" if 2 * high <= gpu.capacity_bytes else "maybe"  # workspaces and fragmentation of a GPU are not in it
    return {
        "card": gpu.name, "capacity_bytes": gpu.capacity_bytes, "low_bytes": low, "high_bytes": high, "fits": fits, "headroom_bytes": gpu.capacity_bytes - high, "evidence": evidence, "origin": origin,
    }  # fmt: skip


def _tried(capture: Capture, room: int) -> tuple[str, str]:
    """The requests again with so much memory, under the recorded setting and, where that refuses, with expandable segments."""
    if room <= 0:
        return "no", "nothing is left for the allocator"
    recorded = str(capture.meta.get("conf") or "")
    said = []
    for conf, verdict in ((recorded, "yes"), (_EXPANDABLE, f"with {_EXPANDABLE}")):
        try:
            ooms = int(summary(replayed(capture, conf, limit_bytes=room))["ooms"].sum())
        except NbmemprofError as error:
            return "maybe", f"not replayed: {error}"
        said.append(f"replayed with {room // MIB} MiB{f' and {conf}' if conf else ''}: {f'{ooms} refused' if ooms else 'every request served'}")
        if not ooms:
            return verdict, "; ".join(said)
        if "expandable_segments" in recorded:
            break
    return "no", "; ".join(said)
