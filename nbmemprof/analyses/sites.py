"""Which lines hold the memory."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._moment import live_at
from nbmemprof.analyses._sites import with_site
from nbmemprof.capture import Capture

__all__ = ["sites"]


def sites(capture: Capture, at: str | float = "peak", top: int | None = None) -> pl.DataFrame:
    """Which lines of the user's code hold the memory at a moment?

    Parameters
    ----------
    capture
        Any capture.
    at
        ``"peak"`` (each device at its own), ``"end"``, or a time in µs from the start.
    top
        At most this many rows a device; all by default.

    Returns
    -------
    One row a device and site, by ``size_bytes`` descending: ``device rank kind site function size_bytes requested_bytes
    count`` (at the moment), ``share``, ``end_bytes`` (live at the end), ``kept_bytes`` (of those, made within the capture), ``allocations`` and ``allocated_bytes`` (over the whole
    capture: churn), ``stack_id`` (of most bytes) and ``origin``. ``site`` is null where no stack was recorded.

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
    >>> mp.sites(recording.capture, at="end")["size_bytes"].sum()
    8008000
    """
    keys = ["device", "rank", "kind", "site", "function"]
    rows = with_site(capture.tables["allocations"], capture.tables["stacks"])
    ended = pl.col("free_seq").is_null()
    overall = rows.group_by(keys).agg(
        pl.col("size_bytes").filter(ended).sum().alias("end_bytes"),
        pl.col("size_bytes").filter(ended & pl.col("alloc_seq").is_not_null()).sum().alias("kept_bytes"),
        pl.col("alloc_seq").count().cast(pl.Int64).alias("allocations"),
        pl.col("size_bytes").filter(pl.col("alloc_seq").is_not_null()).sum().alias("allocated_bytes"),
    )
    live = with_site(live_at(capture, at), capture.tables["stacks"])  # a kept picture of the peak has stacks, no sites
    held = (
        live.group_by([*keys, "stack_id"])
        .agg(pl.col("size_bytes").sum(), pl.col("requested_bytes").sum(), pl.len().cast(pl.Int64).alias("count"))
        .sort("size_bytes", "stack_id", descending=[True, False])
    )
    now = held.group_by(keys, maintain_order=True).agg(pl.col("size_bytes", "requested_bytes", "count").sum(), pl.col("stack_id").first())
    joined = overall.join(now, on=keys, how="full", coalesce=True, nulls_equal=True).with_columns(
        pl.col("size_bytes", "requested_bytes", "count", "end_bytes", "kept_bytes", "allocations", "allocated_bytes").fill_null(0)
    )
    whole = pl.col("size_bytes").sum().over("device", "rank", "kind")
    made = (
        joined.with_columns(pl.when(whole > 0).then(pl.col("size_bytes") / whole).alias("share"), pl.lit(capture.meta["origin"]).alias("origin"))
        .select(*keys, "size_bytes", "requested_bytes", "count", "share", "end_bytes", "kept_bytes", "allocations", "allocated_bytes", "stack_id", "origin")
        .sort("rank", "device", "size_bytes", "allocated_bytes", "site", "function", descending=[False, False, True, True, False, False], nulls_last=True)
    )
    return made if top is None else made.group_by("rank", "device", "kind", maintain_order=True).head(top)
