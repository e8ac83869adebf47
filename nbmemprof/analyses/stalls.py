"""Time that the allocator spent on the driver."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture

__all__ = ["CALLS", "codes_of", "stalls"]

Times = npt.NDArray[np.float64]
Codes = npt.NDArray[np.int8]
CALLS = ("segment_alloc", "segment_map", "segment_free", "segment_unmap")
ALLOC, SEGMENT_ALLOC, SEGMENT_MAP, SEGMENT_FREE, SEGMENT_UNMAP, DONE, OOM, OTHER = range(8)
_CODES = {"alloc": ALLOC, **dict(zip(CALLS, range(1, 5), strict=True)), "free_completed": DONE, "oom": OOM}
_REAL = ("measured", "recorded")  # origins whose device calls were made
_SOME = 8  # calls of a kind from which quartiles tell what is usual
_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "rank": pl.Int64, "what": pl.String, "count": pl.Int64, "size_bytes": pl.Int64, "time_us": pl.Float64, "least_us": pl.Float64,
    "most_us": pl.Float64, "share": pl.Float64, "site": pl.String, "origin": pl.String,
}  # fmt: skip


def stalls(capture: Capture) -> pl.DataFrame:
    """How much time did device calls, flushes and retries take?

    A trace has moments, not durations. What passes between two device calls of one request is the driver's; what passes before
    its first one may be the program's too: it is estimated as what exceeds the usual gap before a request of the same line. A gap
    far longer than those before the other calls of its kind (above their third quartile and three times the distance of the quartiles, as
    where a library is loaded or a graph captured) counts with that much: the rest is not the driver's, or can't be told from it.

    Parameters
    ----------
    capture
        A capture with a trace of a CUDA device.

    Returns
    -------
    One row a device and ``what``: ``segment_alloc segment_map segment_free segment_unmap``, and ``retry``: memory given back right
    before new memory was asked for, whole (of the rows before, so do not add it; an ``empty_cache()`` at that place looks the same, where the
    recording has no mark of it);
    ``count size_bytes``; ``time_us``, the estimate, between ``least_us`` (surely the driver's) and ``most_us``; ``share`` of the time
    from the device's first event to its last (``recording["seconds"]`` where that is longer); ``site`` of the line with most of that
    time; ``origin``. Times are null where the trace has no clock, or events were dropped, and in a modelled, predicted or replayed
    capture: its device calls are the model's, which take no time, and the gaps between them are the program's.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.stalls(capture).select("what", "count", "size_bytes").rows()
    [('segment_alloc', 10, 20971520)]
    """
    rows = [row for curve in heap.curves(capture) if curve.key[2] == "device" and len(curve.seq) for row in _device(capture, curve)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("rank", "device", maintain_order=True, nulls_last=True)


def _device(capture: Capture, curve: heap.Curve) -> list[dict[str, Any]]:
    events = capture.tables["events"]
    mine = events if events.height == len(curve.seq) else events.filter(heap.matches(curve.key))
    action = codes_of(mine["action"])
    call = (action >= SEGMENT_ALLOC) & (action <= SEGMENT_UNMAP)
    if not call.any():
        return []
    size = mine["size_bytes"].fill_null(0).to_numpy()
    timed = capture.meta["origin"] in _REAL and mine["time_us"].null_count() == 0 and not any("event" in str(what) and n for what, n in (capture.meta.get("dropped") or {}).items())
    time = mine["time_us"].fill_null(0.0).to_numpy()
    estimate, least, most = _times(time, action, call, mine["stack_id"].fill_null(np.iinfo(np.uint32).max).to_numpy())
    seconds = (capture.meta.get("recording") or {}).get("seconds")
    span = max(float(time[-1] - time[0]), 1e6 * seconds if isinstance(seconds, (int, float)) else 0.0)
    emptied = np.isin(np.r_[-1, mine["seq"].to_numpy()[:-1]], _emptied(capture, curve.key[1]))  # events right behind an empty_cache()
    rows = []
    for what in (*CALLS, "retry"):
        chosen, count = _retries(action, emptied) if what == "retry" else ((at := action == _CODES[what]), int(at.sum()))
        if not count:
            continue
        spent = float(estimate[chosen].sum())
        row = {"device": curve.key[1], "rank": curve.key[0], "what": what, "count": count, "origin": capture.meta["origin"]}
        row["size_bytes"] = int(size[chosen & (_back(action) if what == "retry" else True)].sum())
        if timed:
            row |= {"time_us": spent, "least_us": float(least[chosen].sum()), "most_us": float(most[chosen].sum()), "share": spent / span if span > 0 else None}
        rows.append(row | {"site": _site(capture, mine, estimate, chosen)})
    return rows


def _times(time: Times, action: Codes, call: npt.NDArray[np.bool_], stack: npt.NDArray[Any]) -> tuple[Times, Times, Times]:
    """For each device call the gap before it: estimated, surely and at most the driver's. What follows a release is its own: torch notes it first."""
    gap = np.diff(time, prepend=time[0])
    within = np.r_[False, call[:-1]] & call  # the event before is a device call too
    ends = np.r_[False, call[:-1]] & ~call & np.r_[False, _back(action[:-1])]  # what a release took, seen at the event after it
    plain = (action == ALLOC) & np.r_[True, ~call[:-1]]
    usual = float(np.median(gap[plain])) if plain.any() else 0.0
    by_stack = {}
    if plain.any():
        told = pl.DataFrame({"stack": stack[plain], "gap": gap[plain]}).group_by("stack").agg(pl.col("gap").median())
        by_stack = dict(told.iter_rows())
    base = np.array([by_stack.get(s, usual) for s in stack[call].tolist()])
    estimate, least, most = np.zeros_like(gap), np.zeros_like(gap), np.zeros_like(gap)
    estimate[call] = np.where(within[call], gap[call], np.maximum(gap[call] - base, 0.0))
    for kind in range(SEGMENT_ALLOC, SEGMENT_UNMAP + 1):
        _fence(estimate, (action == kind) & ~within)
    least[call], most[call] = np.where(within[call], gap[call], 0.0), gap[call]
    after = np.flatnonzero(ends & ((action == ALLOC) | (action == OOM)))  # refused, or served by what was there
    for into in (estimate, least, most):
        into[after - 1] += gap[after]
    return estimate, least, most


def _fence(times: Times, chosen: npt.NDArray[np.bool_]) -> None:
    """Bound what is far outside of the others (Tukey's outer fence)."""
    if int(chosen.sum()) >= _SOME:
        low, high = np.quantile(times[chosen], [0.25, 0.75])
        times[chosen] = np.minimum(times[chosen], high + 3 * (high - low))


def codes_of(action: pl.Series) -> Codes:
    """Actions as small numbers."""
    known = pl.DataFrame({"word": action.unique().drop_nulls()}).with_columns(number=pl.col("word").to_physical())
    table = np.full(int(known["number"].to_numpy().max(initial=0)) + 2, OTHER, np.int8)
    for word, number in known.iter_rows():
        table[number] = _CODES.get(word, OTHER)
    return np.asarray(table[action.to_physical().fill_null(len(table) - 1).to_numpy()], np.int8)


def _back(action: Codes) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = (action == SEGMENT_FREE) | (action == SEGMENT_UNMAP)
    return found


def _emptied(capture: Capture, device: int | None) -> list[int]:
    marks = capture.tables["marks"].filter(pl.col("kind").cast(pl.String) == "empty_cache", pl.col("device").is_null() | pl.col("device").eq_missing(pl.lit(device, pl.Int64)))
    return [int(seq) for seq in marks["seq"].drop_nulls()]


def _retries(action: Codes, emptied: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.bool_], int]:
    """Runs of memory given back that end in new memory or a refusal, and that new memory; a run with a mark (``emptied``) at its beginning is the program's own doing."""
    back, new = _back(action), (action == SEGMENT_ALLOC) | (action == SEGMENT_MAP)
    run = back | (action == DONE)
    chosen, count = np.zeros(len(action), bool), 0
    edges = np.diff(np.r_[0, run.astype(np.int8), 0])
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    some = np.diff(np.r_[0, np.cumsum(back)][np.stack([starts, ends], axis=1)], axis=1)[:, 0] > 0
    for start, end in zip(starts[some].tolist(), ends[some].tolist(), strict=True):
        begin = start + int(np.argmax(back[start:end]))
        if end < len(action) and (new[end] or action[end] == OOM) and not emptied[start : begin + 1].any():
            stop = end
            while stop < len(action) and new[stop]:
                stop += 1
            chosen[begin:stop] = True
            count += 1
    return chosen & (back | new), count


def _site(capture: Capture, events: pl.DataFrame, spent: Times, chosen: npt.NDArray[np.bool_]) -> str | None:
    most = (
        pl.DataFrame({"stack_id": events["stack_id"], "time": spent})
        .filter(pl.Series(chosen), pl.col("stack_id").is_not_null())
        .join(site_of_stacks(capture.tables["stacks"]).select("stack_id", "site"), on="stack_id", how="inner")
        .group_by("site")
        .agg(pl.col("time").sum(), n=pl.len())
        .sort("time", "n", "site", descending=[True, True, False])
    )
    return str(most["site"][0]) if most.height else None
