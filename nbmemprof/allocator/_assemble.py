"""Tables of a capture from what a model did."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof import schema
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._serve import Requests, Served

__all__ = ["tables_of"]

_ACTIONS = ["alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "other", "oom"]
_STATES = ["inactive", "active_allocated", "active_pending_free"]


def tables_of(requests: Requests, served: Served, first_seq: int) -> dict[str, pl.DataFrame]:
    """Return events, allocations, segments, blocks and marks; events are numbered from ``first_seq``."""
    recording = requests.recording
    trace = served.trace.reshape(-1, M.WORDS)
    cold = len(requests.cold)
    source = trace[:, M.T_POOL] // M.WORDS - cold
    at = np.clip(source, 0, max(recording.events.height - 1, 0))
    old = recording.events
    place = {"rank": recording.key[0], "device": recording.key[1], "kind": "device", "source": "torch"}
    kind = trace[:, M.T_KIND]
    block = (kind == M.ALLOC) | (kind == M.FREE_REQUESTED) | (kind == M.FREE_COMPLETED)
    row = trace[:, M.T_ROW]
    given = np.where(block & (row >= 0), served.rows[2 * np.maximum(row, 0) + 1], trace[:, M.T_SIZE])
    pools = np.asarray(recording.pool_names)
    pool = np.where(block & (row >= 0), _pool_of_rows(requests, served)[np.maximum(row, 0)], 0)
    seq = np.arange(first_seq, first_seq + len(trace))
    segment_event = (kind >= M.SEGMENT_ALLOC) & (kind <= M.SEGMENT_UNMAP)
    events = schema.fill(
        "events",
        place
        | {
            "seq": pl.Series(seq), "time_us": old["time_us"][at], "action": pl.Series(kind).replace_strict(list(range(9)), _ACTIONS, return_dtype=pl.String),
            "addr": _nulled(trace[:, M.T_ADDR].view(np.uint64), kind == M.OOM), "requested_bytes": _nulled(trace[:, M.T_SIZE], segment_event),
            "size_bytes": _nulled(given, kind == M.OOM), "stream": pl.Series(trace[:, M.T_STREAM]), "pool_id": pl.Series(pools[pool]),
            "stack_id": old["stack_id"][at], "cell": old["cell"][at],
        },
        len(trace),
    )  # fmt: skip
    marks = _marks(requests, source, seq)
    blocks, segments = _picture(requests, served, place)
    return {"events": events, "allocations": _allocations(requests, served, trace, seq), "blocks": blocks, "segments": segments, "marks": marks}


def _nulled(values: Any, where: Any) -> pl.Series:
    series = pl.Series(values)
    return series.set(pl.Series(where), None) if where.any() else series


def _pool_of_rows(requests: Requests, served: Served) -> Any:
    """Number of the pool that each row asked of."""
    operations = requests.bound(served.model)[0].reshape(-1, M.WORDS)
    pools = np.zeros(max(requests.height, 1), np.int64)
    asks = operations[((operations[:, M.T_KIND] == M.ALLOC) | (operations[:, M.T_KIND] == M.OOM)) & (operations[:, M.T_ROW] >= 0)]
    for number, handle in enumerate(served.model.pools[1:], 1):
        pools[asks[asks[:, M.T_POOL] == handle, M.T_ROW]] = number
    return pools


def _allocations(requests: Requests, served: Served, trace: Any, seq: Any) -> pl.DataFrame:
    rows = requests.rows()
    n = rows.height
    moments = {}
    addr = np.zeros(n + 1, np.int64)
    for name, code in (("alloc_seq", M.ALLOC), ("free_seq", M.FREE_REQUESTED), ("done_seq", M.FREE_COMPLETED)):
        mine = np.flatnonzero((trace[:, M.T_KIND] == code) & (trace[:, M.T_ROW] >= 0))
        found = np.full(n + 1, -1, np.int64)
        found[trace[mine, M.T_ROW]] = seq[mine]
        if code == M.ALLOC:
            addr[trace[mine, M.T_ROW]] = trace[mine, M.T_ADDR]
        moments[name] = _nulled(found[:n], found[:n] < 0)
    size = served.rows[1::2][:n]
    frame = rows.with_columns(
        *(values.alias(name) for name, values in moments.items()),
        pl.Series("addr", addr[:n].view(np.uint64)),
        pl.Series("size_bytes", size),
        pl.lit(value=True).alias("size_exact"),
        pl.lit(value=False).alias("at_start"),
    )
    times = dict(zip(("time_us", "end_us"), ("alloc_seq", "free_seq"), strict=True))
    frame = frame.with_columns(pl.when(pl.col(of).is_null()).then(None).otherwise(pl.col(name)).alias(name) for name, of in times.items())
    return frame.filter(pl.Series(moments["alloc_seq"].is_not_null())).select(*schema.TABLES["allocations"])


def _marks(requests: Requests, source: Any, seq: Any) -> pl.DataFrame:
    """Marks stand at the first event that comes after what they stood at; those of refusals are the model's own events now."""
    recording = requests.recording
    marks = recording.capture.tables["marks"]
    device = pl.col("device").is_null() | (pl.col("device") == recording.key[1])
    marks = marks.filter(device & (pl.col("kind").cast(pl.String) != "oom"))
    if marks.is_empty() or not len(seq):
        return marks
    known = marks["seq"].fill_null(-1).to_numpy()
    old = np.searchsorted(recording.curve.seq, known, side="right") - 1
    new = np.searchsorted(source, old, side="right") - 1
    placed = pl.Series(np.where(new >= 0, seq[np.maximum(new, 0)], seq[0]))
    return marks.with_columns(pl.when(pl.col("seq").is_null()).then(None).otherwise(placed).alias("seq"))


def _picture(requests: Requests, served: Served, place: dict[str, Any]) -> tuple[pl.DataFrame, pl.DataFrame]:
    recording = requests.recording
    ours = served.model.blocks()
    hole = ours["state"] == M.HOLE
    n = len(hole)
    starts = ~hole & (ours["first"] | np.concatenate([[True], hole[:-1]])) if n else hole
    keep = ~hole
    number = np.cumsum(starts)[keep] - 1
    heads = np.flatnonzero(starts)
    state = ours["state"][keep]
    size, requested = ours["size"][keep], ours["requested"][keep]
    names = np.asarray(recording.pool_names)
    half = np.where(ours["small"] == 1, "small", "large")
    stack = requests.rows()["stack_id"]
    row = ours["row"][keep]
    held = (row >= 0) & (state != M.FREE)
    common = place | {"snapshot_id": 0}
    blocks = schema.fill(
        "blocks",
        common
        | {
            "segment_addr": pl.Series(ours["addr"][heads][number].view(np.uint64)), "addr": pl.Series(ours["addr"][keep].view(np.uint64)), "size_bytes": pl.Series(size),
            "requested_bytes": _nulled(requested, state == M.FREE), "state": pl.Series(np.asarray(_STATES)[state]), "stream": pl.Series(ours["stream"][keep]),
            "pool_id": pl.Series(names[ours["pool"][keep]]), "pool": pl.Series(half[keep]),
            "stack_id": stack[np.where(held, row, 0)].set(pl.Series(~held), None) if len(stack) else pl.Series([None] * len(row), dtype=pl.UInt32),
        },
        len(size),
    )  # fmt: skip
    total = np.zeros((3, len(heads)), np.int64)
    for i, mask in enumerate((np.ones(len(size), bool), state == M.LIVE, state != M.FREE)):
        np.add.at(total[i], number[mask], size[mask])
    segments = schema.fill(
        "segments",
        common
        | {
            "addr": pl.Series(ours["addr"][heads].view(np.uint64)), "size_bytes": pl.Series(total[0]), "allocated_bytes": pl.Series(total[1]),
            "active_bytes": pl.Series(total[2]), "stream": pl.Series(ours["stream"][heads]), "pool_id": pl.Series(names[ours["pool"][heads]]),
            "pool": pl.Series(half[heads]), "is_expandable": pl.Series(ours["area"][heads] != 0),
        },
        len(heads),
    )  # fmt: skip
    return blocks, segments
