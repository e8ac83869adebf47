"""What the memory is for."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._moment import live_at
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_bytes

__all__ = ["breakdown"]


def breakdown(capture: Capture, at: str | float = "peak", by: str = "category") -> pl.DataFrame:
    """What holds the memory: weights, gradients, activations, …?

    Parameters
    ----------
    capture
        Any capture.
    at
        ``"peak"`` (each device at its own), ``"end"``, or a time in µs from the start.
    by
        ``"category"``; or ``"name"``: by category and the name that its owner gives it, as ``exp_avg`` and ``exp_avg_sq`` in an optimizer's state, in a column
        ``name`` behind the category (null: it has none).

    Returns
    -------
    One row a device and category: ``device rank kind category requested_bytes size_bytes count share`` (of the device's
    ``size_bytes``, in [0, 1]) ``evidence`` (by bytes, the strongest first) ``origin`` ``reason``; by ``size_bytes`` descending. The
    difference of the byte columns is rounding. What no evidence speaks for is ``unknown``, and ``reason`` says why, with the bytes of each; null elsewhere.

    Raises
    ------
    NbmemprofError
        For an ``at`` that is no moment, a time outside the recording, or another ``by``.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     model = torch.nn.Linear(1000, 1000)
    ...     model(torch.ones(8, 1000)).sum().backward()
    >>> mp.breakdown(recording.capture, at="end").select("category", "size_bytes").rows()
    [('weights', 4004000), ('gradients', 4004000)]
    """
    if by not in ("category", "name"):
        raise NbmemprofError(f"by={by!r} is not a way to sum a breakdown. Use 'category' or 'name'; mp.layers(cap) sums by module, mp.sites(cap) by line.")
    keys = ["device", "rank", "kind"]
    live, what = live_at(capture, at), ["category"]
    if by == "name":
        live, what = _named(live, capture.tables["owners"]), ["category", "name"]
    by_evidence = (
        live.group_by(*keys, *what, "evidence")
        .agg(pl.col("requested_bytes").sum(), pl.col("size_bytes").sum(), pl.len().cast(pl.Int64).alias("count"))
        .sort("size_bytes", "evidence", descending=[True, False])
    )
    summed = by_evidence.group_by(*keys, *what, maintain_order=True).agg(
        pl.col("requested_bytes").sum(), pl.col("size_bytes").sum(), pl.col("count").sum(), pl.col("evidence").cast(pl.String).str.join(", ")
    )
    whole = pl.col("size_bytes").sum().over(keys)
    made = (
        summed.with_columns(pl.when(whole > 0).then(pl.col("size_bytes") / whole).alias("share"), pl.lit(capture.meta["origin"]).alias("origin"))
        .select(*keys, *what, "requested_bytes", "size_bytes", "count", "share", "evidence", "origin")
        .sort("rank", "device", "size_bytes", *what, descending=[False, False, True, *(False for _ in what)], nulls_last=True)
    )
    unknown = pl.col("category").cast(pl.String) == "unknown"
    why = _reasons(live.filter(unknown), keys, watched=capture.tables["contexts"].height > 0)
    return made.join(why, on=keys, how="left", nulls_equal=True, maintain_order="left").with_columns(pl.when(unknown).then("reason").alias("reason"))


def _reasons(rows: pl.DataFrame, keys: list[str], *, watched: bool) -> pl.DataFrame:
    """Why rows are unknown, in words, a row a heap; ``watched``: phases and owners were looked for."""
    phase, framed = pl.col("phase").is_not_null(), pl.col("stack_id").is_not_null()
    nobody = ", and found in no model or optimizer" if watched else ""
    why = (
        pl.when("at_start").then(pl.lit(f"there before the recording{nobody}"))
        .when(phase & pl.lit(watched)).then(pl.format("asked for in {}, and neither an owner nor when it went tells what for", "phase"))
        .when(framed & pl.lit(watched)).then(pl.lit(f"asked for outside forward, backward and optimizer{nobody}"))
        .when(framed).then(pl.lit("the call stacks do not tell"))
        .otherwise(pl.lit(f"no call stack{', in no phase' if watched else ''}"))
    )  # fmt: skip
    each = rows.with_columns(why=why).group_by(*keys, "why").agg(pl.col("size_bytes").sum()).sort("size_bytes", "why", descending=[True, False])
    words = [f"{format_bytes(size)}: {text}" for size, text in each.select("size_bytes", "why").iter_rows()]
    return each.with_columns(words=pl.Series(words, dtype=pl.String)).group_by(keys, maintain_order=True).agg(reason=pl.col("words").str.join("; "))


def _named(live: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """Add the name of the first owner of the allocation's category that was found while it lived."""
    keys = ["rank", "device", "kind", "addr"]
    rows = live.with_row_index("_row")
    met = rows.select("_row", *keys, "alloc_seq", "free_seq", pl.col("category").cast(pl.String)).join(
        owners.select(*keys, "seq", "name", pl.col("category").cast(pl.String)).drop_nulls("name"), on=[*keys, "category"], nulls_equal=True
    )
    here = (pl.col("alloc_seq").is_null() | (pl.col("seq") > pl.col("alloc_seq"))) & (pl.col("free_seq").is_null() | (pl.col("seq") <= pl.col("free_seq")))
    first = met.filter(here).sort("seq", "name").unique("_row", keep="first", maintain_order=True).select("_row", "name")
    return rows.join(first, on="_row", how="left", maintain_order="left").drop("_row")
