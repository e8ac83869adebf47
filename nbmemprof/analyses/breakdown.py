"""What the memory is for."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._moment import live_at
from nbmemprof.capture import Capture

__all__ = ["breakdown"]


def breakdown(capture: Capture, at: str | float = "peak") -> pl.DataFrame:
    """What holds the memory: weights, gradients, activations, …?

    Parameters
    ----------
    capture
        Any capture.
    at
        ``"peak"`` (each device at its own), ``"end"``, or a time in µs from the start.

    Returns
    -------
    One row a device and category: ``device rank kind category requested_bytes size_bytes count share`` (of the device's
    ``size_bytes``, in [0, 1]) ``evidence`` (by bytes, the strongest first) ``origin``; by ``size_bytes`` descending. The
    difference of the byte columns is rounding. What no evidence speaks for is ``unknown``.

    Raises
    ------
    NbmemprofError
        For an ``at`` that is no moment, or a time outside the recording.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     model = torch.nn.Linear(1000, 1000)
    ...     model(torch.ones(8, 1000)).sum().backward()
    >>> mp.breakdown(recording.capture, at="end").select("category", "size_bytes").rows()
    [('weights', 4004000), ('gradients', 4004000)]
    """
    keys = ["device", "rank", "kind"]
    live = live_at(capture, at)
    by_evidence = (
        live.group_by(*keys, "category", "evidence")
        .agg(pl.col("requested_bytes").sum(), pl.col("size_bytes").sum(), pl.len().cast(pl.Int64).alias("count"))
        .sort("size_bytes", "evidence", descending=[True, False])
    )
    summed = by_evidence.group_by(*keys, "category", maintain_order=True).agg(
        pl.col("requested_bytes").sum(), pl.col("size_bytes").sum(), pl.col("count").sum(), pl.col("evidence").cast(pl.String).str.join(", ")
    )
    whole = pl.col("size_bytes").sum().over(keys)
    return (
        summed.with_columns(pl.when(whole > 0).then(pl.col("size_bytes") / whole).alias("share"), pl.lit(capture.meta["origin"]).alias("origin"))
        .select(*keys, "category", "requested_bytes", "size_bytes", "count", "share", "evidence", "origin")
        .sort("rank", "device", "size_bytes", "category", descending=[False, False, True, False], nulls_last=True)
    )
