"""What grows with every iteration."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._growth import HEAP, LEAK, behaviour
from nbmemprof.analyses._orphans import orphans
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture

__all__ = ["leaks"]

_CLASSES = pl.Enum(["growing", "orphaned"])
_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "device": pl.Int64, "rank": pl.Int64, "kind": pl.String, "site": pl.String, "stack": pl.List(pl.String), "leak_bytes": pl.Int64, "leak_count": pl.Int64,
    "bytes_per_iteration": pl.Int64, "iterations": pl.Int64, "class": _CLASSES, "confidence": pl.Float64, "evidence": pl.String, "stack_id": pl.UInt32, "origin": pl.String,
}  # fmt: skip


def leaks(capture: Capture, held: pl.DataFrame | None = None) -> pl.DataFrame:
    """Which lines keep something in iteration after iteration?

    Judged by growth over the trace, one full stack at a time: blocks that are live at the end, made in three iterations
    or more, as many in the second half as in the first, up to the end. Iterations are found by themselves, from ``step``
    marks or from the stacks that repeat. So these are not in it: what was made before the iterations or once in the first
    (weights, optimizer state, workspaces), a window that moves or a list that is emptied (the last few losses), a cache
    that has stopped to fill, tensors of a step or forward pass that the trace ends in. ``lifetimes`` names those.

    Parameters
    ----------
    capture
        Any capture with a trace; without one nothing can be judged and no row comes back.
    held
        ``mp.holders(device="all")``, taken in this process after the recording: with it, what is alive and held by nobody is told.

    Returns
    -------
    One row a full stack, by ``leak_bytes`` descending: ``device rank kind``; ``site``, the frame at which the stack differs
    from the others of the same innermost line, else the innermost user frame (null: no frames, told by size only);
    ``stack`` ("file:line function", innermost first); ``leak_bytes`` and ``leak_count``: blocks live at the end, the first
    included, and where the history is truncated those older than it; ``bytes_per_iteration``; ``iterations`` seen (null: it does not grow); ``class``:
    ``growing``, or with ``held`` ``orphaned``: its blocks are garbage in reference cycles, or (where they grow) nothing but C++ code has them; ``confidence`` in [0, 1]; ``evidence``; ``stack_id``; ``origin``.

    Raises
    ------
    NbmemprofError
        For ``held`` that is not a frame of ``mp.holders``.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     kept = []
    ...     for _ in range(20):
    ...         kept.append(torch.ones(1 << 18))
    >>> mp.leaks(recording.capture).select("class", "leak_count", "bytes_per_iteration").rows()
    [('growing', 20, 1048576)]
    """
    found = [
        grown.with_columns(
            pl.lit(value, dtype=dtype).alias(name)
            for name, dtype in (("rank", pl.Int64), ("device", pl.Int64), ("kind", pl.String))
            for value in (identity[name],)
        )
        for identity, _, _, grown in behaviour(capture)
        if grown.height
    ]
    lost = orphans(capture, held)
    if not found and lost.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    rows = _with_orphans(pl.concat(found) if found else None, lost).with_columns(origin=pl.lit(capture.meta["origin"]))
    ids = rows.get_column("stack_id").drop_nulls().unique()
    stacks = capture.tables["stacks"]
    mine = stacks.filter(pl.col("stack_id").is_in(ids.implode()))
    rows = rows.join(_lines(mine), on="stack_id", how="left").join(_site(stacks, mine), on="stack_id", how="left")
    return rows.select(*_SCHEMA).sort("leak_bytes", *HEAP, "stack_id", descending=[True, False, False, False, False], nulls_last=True)


def _with_orphans(grown: pl.DataFrame | None, lost: pl.DataFrame) -> pl.DataFrame:
    """Give what nobody holds its class: of what grows all of a stack, of the rest each block in a cycle."""
    keys, lost = [*HEAP, "key"], lost.with_columns(pl.col("kind").cast(pl.String))
    if grown is None:
        grown = lost.head(0).select(*keys, "stack_id").with_columns(pl.lit(None, dtype=dtype).alias(name) for name, dtype in LEAK.items() if name not in ("key", "stack_id"))
    alone = lost.join(grown, on=keys, how="anti", nulls_equal=True).filter(pl.col("cycle_count") > 0)
    many = pl.col("cycle_count") + pl.col("native_count")
    marked = grown.join(lost.drop("stack_id"), on=keys, how="left", nulls_equal=True)
    whole = (many == pl.col("live_count")).fill_null(value=False)
    text = (
        pl.when(pl.col("cycle_count") > 0)
        .then(pl.format("{}; {} of its live blocks are garbage in reference cycles until gc.collect()", "evidence", "cycle_count"))
        .when(whole)
        .then(pl.format("{}; no name, container or graph holds them: C++ code does", "evidence"))
        .otherwise("evidence")
    )
    marked = marked.with_columns(text.alias("evidence"), pl.when(whole).then(pl.lit("orphaned")).otherwise(pl.lit("growing")).cast(_CLASSES).alias("class"))
    more = alone.select(
        *keys, "stack_id", leak_bytes="cycle_bytes", leak_count="cycle_count", confidence=pl.lit(1.0),
        evidence=pl.format("{} of its {} live blocks are garbage in reference cycles until gc.collect()", "cycle_count", "live_count"),
    ).with_columns(pl.lit("orphaned").cast(_CLASSES).alias("class"))  # fmt: skip
    return pl.concat([marked.select(*grown.columns, "class"), more], how="diagonal_relaxed")


def _lines(frames: pl.DataFrame) -> pl.DataFrame:
    """``stack``: a stack's frames as text."""
    line = pl.coalesce(pl.col("line").cast(pl.String), pl.lit("?"))
    return (
        frames.sort("stack_id", "depth")
        .group_by("stack_id", maintain_order=True)
        .agg(stack=pl.format("{}:{} {}", pl.col("filename").fill_null("?"), line, pl.col("function").fill_null("?")))
    )


def _site(stacks: pl.DataFrame, mine: pl.DataFrame) -> pl.DataFrame:
    """``site``: the user's frame from the one on at which a stack parts from all others of the same innermost line."""
    place = ["filename", "line"]
    heads = stacks.filter(pl.col("depth") == 0).select("stack_id", *place)
    twins = heads.filter(pl.col("stack_id").is_in(mine.get_column("stack_id").unique().implode())).join(heads, on=place, suffix="_other", nulls_equal=True)
    twins = twins.filter(pl.col("stack_id") != pl.col("stack_id_other")).select("stack_id", "stack_id_other")
    pairs = twins.join(mine.select("stack_id", "depth", *place), on="stack_id")
    theirs = stacks.select(pl.col("stack_id").alias("stack_id_other"), "depth", same=pl.struct(place))
    pairs = pairs.join(theirs, on=["stack_id_other", "depth"], how="left").with_columns(equal=(pl.struct(place) == pl.col("same")).fill_null(value=False))
    shared = pairs.group_by("stack_id", "stack_id_other").agg(parts=pl.col("depth").filter(~pl.col("equal")).min(), last=pl.col("depth").max())
    parts = shared.group_by("stack_id").agg(parts=pl.coalesce("parts", "last").max())
    outward = mine.join(parts, on="stack_id", how="left").filter(pl.col("depth") >= pl.col("parts").fill_null(0))
    # files are named as in every other frame: as much of the path as tells all files of the capture apart
    files = stacks.select(
        pl.lit(2**32 - 1, dtype=pl.UInt32).alias("stack_id"), pl.lit(0, dtype=pl.UInt16).alias("depth"), "function", "filename", "line"
    ).unique("filename")
    there, whole = (site_of_stacks(pl.concat([frames.select(files.columns), files])) for frames in (outward, mine))
    whole = whole.select("stack_id", whole="site")
    return there.join(whole, on="stack_id", how="left").select(
        "stack_id", site=pl.when(pl.col("user")).then(pl.col("site")).otherwise(pl.coalesce("whole", "site"))
    )
