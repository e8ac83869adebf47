"""The best that was measured on a card: what a kernel's bandwidth is held against."""

from __future__ import annotations

from functools import cache
from typing import Any

import polars as pl

from nbmemprof.errors import NbmemprofError

__all__ = ["measured", "of"]

_MIXES = {"read": ("read",), "triad": ("add", "triad"), "copy": ("copy", "scale"), "write": ("write",)}  # kernels of mp.probes.bandwidth with that mix of reads and writes
_L2_FROM_BYTES = 16 << 20  # smaller sets may lie in the SMs' own caches


def measured(bandwidth: pl.DataFrame, working_set: pl.DataFrame | None = None) -> dict[str, Any]:
    """Ceilings out of what the probes gave.

    Parameters
    ----------
    bandwidth
        What ``mp.probes.bandwidth()`` returns: the best rate of each kernel counts.
    working_set
        What ``mp.probes.working_set()`` returns, for the ceiling of the L2.

    Returns
    -------
    ``read triad copy write l2`` in bytes/s, those that are known; ``origin`` and ``device``.

    Raises
    ------
    NbmemprofError
        The frame is not a bandwidth probe's.
    """
    if not {"what", "achieved_bytes_per_s"} <= set(bandwidth.columns):
        raise NbmemprofError(f"Ceilings come from the frame of mp.probes.bandwidth(); this one has the columns {', '.join(bandwidth.columns[:6])} … Give that frame, or leave ceilings out.")
    best = dict(bandwidth.group_by("what").agg(pl.col("achieved_bytes_per_s").max()).iter_rows())
    made: dict[str, Any] = {mix: max(found) for mix, names in _MIXES.items() if (found := [best[name] for name in names if best.get(name)])}
    if working_set is not None:
        made["l2"] = working_set.filter(pl.col("size_bytes") >= _L2_FROM_BYTES)["achieved_bytes_per_s"].max()
    return {**made, "origin": getattr(bandwidth, "origin", "measured"), "device": getattr(bandwidth, "device", None)}


def of(device: str) -> dict[str, Any]:
    """Ceilings of a card from the recordings that ship with the package; empty for a card that was never recorded."""
    found = _shipped()
    return dict(found) if found and str(found["device"]) in device else {}


@cache
def _shipped() -> dict[str, Any]:
    from nbmemprof.gpu import probes

    try:
        return measured(probes.bandwidth(recorded=True), probes.working_set(recorded=True))
    except NbmemprofError:
        return {}
