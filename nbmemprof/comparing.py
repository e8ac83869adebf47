"""The same step run in several ways, side by side."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import polars as pl

from nbmemprof import _optional, recording
from nbmemprof.analyses.breakdown import breakdown
from nbmemprof.analyses.layers import COLUMNS
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["compare"]


def compare(*, warm: int = 1, source: Any = "auto", **functions: Callable[[], Any]) -> pl.DataFrame:
    """What does the same step need when it is run in several ways?

    ``mp.compare(train=step, no_grad=lambda: quiet(step), inference_mode=…)``. Each function runs ``warm`` times
    unrecorded (workspaces, caches, optimizer state are made then), then once recorded; what it returns is let go in between.

    Parameters
    ----------
    warm
        Runs before the recorded one.
    source
        As for :func:`nbmemprof.record`.
    functions
        The ways, by name; each is called without arguments.

    Returns
    -------
    One row a function and device, in the order given: ``function device kind start_bytes peak_bytes end_bytes`` (live block bytes)
    ``rise_bytes`` (the peak above the start) ``kept_bytes`` (end above start) ``saved_bytes`` (what autograd kept for backward, at its highest) ``seconds`` (recording
    included), ``autograd_share`` (``saved_bytes`` over the requested bytes at the peak: what autograd keeps of all there is, in [0, 1]), ``accumulators_bytes`` (gradients in
    ``.grad``, at their highest), ``rounding_bytes`` (given beyond what was asked for, at the peak), ``slack_bytes`` (reserved beyond the live blocks, at their highest
    each; null on a CPU), and by category at the peak ``weights_bytes … other_bytes`` (requested bytes). What autograd costs is the difference of two rows.

    Raises
    ------
    NbmemprofError
        Without a function. An error of a function itself is raised as it is.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> rows = mp.compare(source="torch_cpu", one=lambda: torch.ones(1 << 18), two=lambda: torch.ones(1 << 19))
    >>> rows["function"].to_list(), rows["rise_bytes"][1] == 2 * rows["rise_bytes"][0]
    (['one', 'two'], True)
    """
    if not functions or not all(callable(f) for f in functions.values()):
        raise NbmemprofError(_refused(functions))
    rows: list[dict[str, Any]] = []
    for name, function in functions.items():
        for _ in range(warm):
            function()
        gc.collect()
        with recording.record(source=source, title=name) as rec:
            begin = time.perf_counter()
            result = function()
            _wait()
            seconds = time.perf_counter() - begin
        assert rec.capture is not None  # noqa: S101 - the block has ended
        rows += [{"function": name} | row | {"seconds": seconds} for row in _of(rec.capture)]
        del result, rec
    return pl.DataFrame(rows, infer_schema_length=None)


def _refused(functions: dict[str, Any]) -> str:
    """What can't be run, by name and kind, and what to write."""
    stray = {name: value for name, value in functions.items() if not callable(value)}
    if not stray:
        return "compare runs functions by name, and none was given. Write mp.compare(train=step, no_grad=other_step)."
    named = ", ".join(f"{name} (a value of type {type(value).__name__})" for name, value in stray.items())
    if all(isinstance(value, (Capture, recording.Recording)) for value in stray.values()):
        first, second = [*stray, "b"][:2] if len(stray) > 1 else ("a", "b")
        return f"compare runs functions, not captures: it was given {named}. Write mp.diff({first}, {second}) for what one holds more than the other."
    return f"compare runs functions, not values: it was given {named}. Give each as a function without arguments, like mp.compare(train=step, no_grad=lambda: other(step)); mp.diff(a, b) compares captures."


def _of(capture: Capture) -> list[dict[str, Any]]:
    shown, found = breakdown(capture), []
    for row in summary(capture).to_dicts():
        mine = shown.filter(pl.col("device").eq_missing(pl.lit(row["device"], pl.Int64)), pl.col("kind").cast(pl.String) == str(row["kind"]))
        asked, given = int(mine["requested_bytes"].sum()), int(mine["size_bytes"].sum())
        by = dict(zip(mine["category"].cast(pl.String), mine["requested_bytes"], strict=True))
        allocations = capture.allocations.filter(pl.col("device").eq_missing(pl.lit(row["device"], pl.Int64)), pl.col("kind").cast(pl.String) == str(row["kind"]))
        start = int(allocations.filter("at_start")["size_bytes"].sum())
        saved, reserved = _highest(allocations, pl.col("evidence").cast(pl.String) == "saved", whole=False), row["peak_reserved_bytes"]
        peak, end = row["peak_allocated_bytes"], row["end_allocated_bytes"]
        found.append(
            {"device": row["device"], "kind": str(row["kind"]), "start_bytes": start, "peak_bytes": peak, "end_bytes": end,
             "rise_bytes": peak - start if peak is not None else None, "kept_bytes": end - start if end is not None else None, "saved_bytes": saved,
             "autograd_share": saved / asked if asked else None, "accumulators_bytes": _highest(allocations, pl.col("category").cast(pl.String) == "gradients", whole=True),
             "rounding_bytes": given - asked, "slack_bytes": reserved - peak if reserved is not None and peak is not None else None}
            | {column: by.get(word, 0) for word, column in COLUMNS.items()} | {"other_bytes": sum(size for word, size in by.items() if word not in COLUMNS)}
        )  # fmt: skip
    return found


def _highest(allocations: pl.DataFrame, which: pl.Expr, *, whole: bool) -> int:
    """Highest sum of requested bytes of some allocations; ``whole``: those from before and those that stay count too."""
    kept = allocations.filter(which) if whole else allocations.filter(which, pl.col("free_seq").is_not_null(), pl.col("alloc_seq").is_not_null())
    if kept.is_empty():
        return 0
    begin = int(kept.filter(pl.col("alloc_seq").is_null())["requested_bytes"].sum())
    born, gone = kept.drop_nulls("alloc_seq"), kept.drop_nulls("free_seq")
    moves = pl.concat([born.select(seq="alloc_seq", change="requested_bytes"), gone.select(seq="free_seq", change=-pl.col("requested_bytes"))]).sort("seq")
    levels: list[int] = moves["change"].cum_sum().to_list()
    return begin + max([0, *levels])


def _wait() -> None:
    torch = _optional.loaded("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
