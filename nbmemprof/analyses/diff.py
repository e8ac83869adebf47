"""What one run holds more than another."""

from __future__ import annotations

import os
from typing import Any

import polars as pl

from nbmemprof.analyses._moment import live_at
from nbmemprof.analyses._sites import with_site
from nbmemprof.capture import Capture, load
from nbmemprof.errors import NbmemprofError

__all__ = ["BY", "diff", "on_one_place"]

BY = ("site", "category", "layer", "phase", "function", "kind", "pool", "stream", "op")
_COLUMN = {"pool": "pool_id", "kind": "kind"}
_HEAP = ["device", "rank", "kind"]
_VERDICTS = pl.Enum(["worse", "better", "new", "gone", "same"])


def diff(a: Capture | str | os.PathLike[str], b: Capture | str | os.PathLike[str], by: str = "site", *, at: str | float = "peak") -> pl.DataFrame:
    """What got worse from one run to the other, and by how much?

    Parameters
    ----------
    a, b
        Captures, or what :func:`mp.load` opens: two snapshots, two files, a file and a live capture. ``a`` is before.
    by
        ``site category layer phase function kind pool stream op``. Lines that moved within their function are followed: ``site`` is that of ``b``, ``a_site`` that of ``a``.
    at
        ``"peak"`` (each device of each run at its own), ``"end"``, or a time in µs from the start.

    Returns
    -------
    One row a device and ``by`` that changed, the worst first: ``device rank kind <by> a_bytes b_bytes change_bytes change_share`` (of ``a_bytes``; null
    where that is 0) ``a_count b_count verdict`` (``worse better new gone``; ``same``: as many bytes in another number of blocks) ``origin``. Rows
    without a change are left out, so nothing is left of a run and itself. Bytes are those the allocator gave. Where each run has one device, and not the
    same (a CPU and a GPU, or two ranks), these are compared, under the name that ``b`` has.

    Raises
    ------
    NbmemprofError
        For a ``by`` or ``at`` that does not exist; as :func:`mp.load` for files.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> first = device.malloc("100MiB")
    >>> before = mp.load(device.snapshot())
    >>> second = device.malloc("60MiB")
    >>> after = mp.load(device.snapshot())
    >>> mp.diff(before, after, by="kind").select("a_bytes", "b_bytes", "verdict").rows()
    [(104857600, 167772160, 'worse')]
    """
    if by not in BY:
        raise NbmemprofError(f"by={by!r} is not a way to compare. Use one of: {', '.join(BY)}.")
    before, after = _open(a), _open(b)
    column = _COLUMN.get(by, by)
    keys = [*_HEAP, *([] if column == "kind" else [column])]
    held = on_one_place(*(_held(capture, by, at) for capture in (before, after)))
    if by == "site":
        held[0] = _follow_lines(held[0], held[1])
    sums = [
        rows.group_by(keys).agg(
            pl.col("size_bytes").sum().alias(f"{side}_bytes"), pl.col("count").sum().alias(f"{side}_count"), *([pl.col("a_site").first()] if "a_site" in rows.columns else [])
        )
        for side, rows in zip("ab", held, strict=True)
    ]
    joined = sums[0].join(sums[1], on=keys, how="full", coalesce=True, nulls_equal=True)
    joined = joined.with_columns(pl.col("a_bytes", "b_bytes", "a_count", "b_count").fill_null(0))
    change = pl.col("b_bytes") - pl.col("a_bytes")
    verdict = (
        pl.when(pl.col("a_count") == 0).then(pl.lit("new")).when(pl.col("b_count") == 0).then(pl.lit("gone"))
        .when(change > 0).then(pl.lit("worse")).when(change < 0).then(pl.lit("better")).otherwise(pl.lit("same"))
    )  # fmt: skip
    origins = list(dict.fromkeys(str(c.meta["origin"]) for c in (before, after)))
    made = joined.with_columns(
        change_bytes=change,
        change_share=pl.when(pl.col("a_bytes") > 0).then(change / pl.col("a_bytes")),
        verdict=verdict.cast(_VERDICTS),
        origin=pl.lit(" and ".join(origins)),
    ).filter((pl.col("change_bytes") != 0) | (pl.col("a_count") != pl.col("b_count")))
    shown = [*keys, "a_bytes", "b_bytes", "change_bytes", "change_share", "a_count", "b_count", "verdict", *(["a_site"] if by == "site" else []), "origin"]
    made = made.select(shown).sort("change_bytes", *keys, descending=[True, *(False for _ in keys)], nulls_last=True)
    return made.rename({column: by}) if column != by else made


def on_one_place(before: pl.DataFrame, after: pl.DataFrame) -> list[pl.DataFrame]:
    """Give the rows of ``before`` the device of ``after`` where each has one alone: a run on another device is still the run before."""
    places = [rows.select(_HEAP).unique() for rows in (before, after)]
    if any(rows.height != 1 for rows in places) or places[0].equals(places[1]):
        return [before, after]
    return [before.with_columns(pl.lit(places[1][name][0], dtype=before.schema[name]).alias(name) for name in _HEAP), after]


def _open(given: Any) -> Capture:
    if isinstance(given, Capture):
        return given
    inner = getattr(given, "capture", None)  # a recording, a run
    return inner if isinstance(inner, Capture) else load(given)


def _held(capture: Capture, by: str, at: str | float) -> pl.DataFrame:
    """What is live at the moment, a row a group: keys, ``function`` too for sites, ``size_bytes``, ``count``."""
    sites: pl.DataFrame | None = capture.tables.get("live_sites")
    if by == "site" and sites is not None and sites.height and capture.tables["allocations"].is_empty():
        newest = sites.filter(pl.col("time_us") == pl.col("time_us").max().over("rank"))  # a watch keeps totals by line, at each look
        kind = pl.when(pl.col("device").is_null()).then(pl.lit("host")).otherwise(pl.lit("device")).cast(capture.tables["allocations"].schema["kind"])
        return newest.select("device", "rank", kind.alias("kind"), "site", pl.lit(None, pl.String).alias("function"), "size_bytes", "count")
    live = live_at(capture, at)
    if by in ("site", "function"):
        live = with_site(live, capture.tables["stacks"])
    column = _COLUMN.get(by, by)
    keys = [*_HEAP, *([] if column == "kind" else [column]), *(["function"] if by == "site" else [])]
    rows = live.with_columns(pl.col(column).cast(pl.String)) if live.schema[column] in (pl.Categorical, pl.Enum) and column != "kind" else live
    return rows.group_by(keys).agg(pl.col("size_bytes").fill_null(0).sum(), pl.len().cast(pl.Int64).alias("count"))


def _follow_lines(before: pl.DataFrame, after: pl.DataFrame) -> pl.DataFrame:
    """Give lines of ``before`` that ``after`` doesn't have the line of the same function that ``before`` doesn't have, in their order.

    Only where a function has as many of the one as of the other: an edit above moves its lines all alike.
    """
    parts = [pl.col("site").str.extract(r"^(.*):\d+$").alias("file"), pl.col("site").str.extract(r":(\d+)$").cast(pl.Int64).alias("line")]
    group = [*_HEAP, "file", "function"]
    same = [*_HEAP, "site"]

    def alone(rows: pl.DataFrame, others: pl.DataFrame) -> pl.DataFrame:
        rest = rows.select(*same, "function").unique().join(others.select(same).unique(), on=same, how="anti", nulls_equal=True)
        rest = rest.with_columns(parts).drop_nulls(["file", "line", "function"]).sort(*group, "line")
        return rest.with_columns(place=pl.int_range(pl.len()).over(group), many=pl.len().over(group))

    moved = alone(before, after).join(
        alone(after, before).select(*group, "place", "many", now="site"), on=[*group, "place", "many"], how="inner", nulls_equal=True
    )
    found = before.join(moved.select(*same, "function", "now"), on=[*same, "function"], how="left", nulls_equal=True)
    return found.with_columns(a_site=pl.when(pl.col("now").is_not_null()).then(pl.col("site")), site=pl.coalesce("now", "site")).drop("now")
