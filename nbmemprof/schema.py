"""Every table of a capture, version 1: column, dtype, unit, meaning, and what null means.

A column that a source cannot know is null, never 0 or -1. Events point to ``stacks``, never embed
them. Addresses stay ``UInt64``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import polars as pl

from nbmemprof.errors import SchemaError

__all__ = [
    "ACTIONS",
    "CATEGORIES",
    "EVIDENCE",
    "KINDS",
    "ORIGINS",
    "SCHEMA_VERSION",
    "STATES",
    "TABLES",
    "Column",
    "check",
    "empty",
    "fill",
]

SCHEMA_VERSION = 1

KINDS = ("device", "managed", "pinned", "host", "array", "vmm")
ORIGINS = ("measured", "replayed", "predicted", "recorded", "modelled")
CATEGORIES = (
    "weights", "gradients", "optimizer_state", "activations", "inputs", "kv_cache",
    "buffers", "workspace", "temporary", "cuda_graph", "framework", "unknown",
)  # fmt: skip
EVIDENCE = (
    "storage",  # the storage was found in a parameter, .grad, optimizer state, buffer or cache
    "saved",  # autograd kept it for backward
    "annotation",  # the allocator's own note or the thread's metadata at allocation time
    "tag",  # mp.tag or mp.phase, by the user
    "phase",  # the phase in which it was allocated and freed
    "operator",  # the operator that asked for it
    "module",  # the module whose forward asked for it
    "stack",  # frames of its call stack
    "pool",  # the private pool that it lives in
    "model",  # a predicted run knows because it made the request
    "none",  # nothing is known: the category is unknown
)
STATES = ("active_allocated", "active_pending_free", "inactive", "unknown")
# What torch writes (reference: torch/cuda/memory.py); any other word is kept as it is and counted as unknown.
ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "snapshot", "oom", "annotate", "user_defined",
)  # fmt: skip

_KIND, _STATE = pl.Enum(KINDS), pl.Enum(STATES)
_WORD = pl.Categorical


@dataclass(frozen=True)
class Column:
    """One column of a table: its Polars dtype, unit, meaning, and what null means in it."""

    dtype: pl.DataType | type[pl.DataType]
    meaning: str
    unit: str = ""
    null: str = ""


_HEAP = {
    "rank": Column(pl.Int64, "rank of the process", null="one process, or not told"),
    "device": Column(pl.Int64, "device ordinal as in the source", null="host memory"),
    "kind": Column(_KIND, "kind of memory"),
    "source": Column(_WORD, "library or framework that asked"),
}
_STACK = Column(pl.UInt32, "key into stacks", null="no stack was recorded")
_TIME = Column(pl.Float64, "time from the capture's start", "µs", "the source has no clock")
_STREAM = Column(pl.Int64, "raw stream handle; 0 is the default stream", null="no streams here")
_POOL = Column(_WORD, "private pool 'a_b'; '0_0' is the default pool", null="not told by the source")
_REQUESTED = Column(pl.Int64, "bytes asked for", "bytes", "not told by the source")
_SIZE = Column(pl.Int64, "bytes that the allocator gave", "bytes", "can't be recovered from the source")
_ADDR = Column(pl.UInt64, "address", null="no address")

TABLES: dict[str, dict[str, Column]] = {
    "events": _HEAP
    | {
        "seq": Column(pl.Int64, "order of the entry within the capture"),
        "time_us": _TIME,
        "action": Column(_WORD, "what happened; unknown words are kept", null="the entry had no action"),
        "addr": _ADDR,
        "requested_bytes": _REQUESTED,
        "size_bytes": _SIZE,
        "stream": _STREAM,
        "pool_id": _POOL,
        "stack_id": _STACK,
        "cell": Column(pl.Int64, "execution count of the notebook cell", null="not in a notebook"),
    },
    "stacks": {
        "stack_id": Column(pl.UInt32, "key"),
        "depth": Column(pl.UInt16, "0 is the innermost frame"),
        "function": Column(pl.String, "function name"),
        "filename": Column(pl.String, "file name; a notebook cell is In[7]"),
        "line": Column(pl.Int64, "line in the file", null="not known"),
    },
    "segments": _HEAP
    | {
        "snapshot_id": Column(pl.Int64, "which picture of the heap; the highest is the last"),
        "addr": _ADDR,
        "size_bytes": _SIZE,
        "allocated_bytes": Column(pl.Int64, "live block bytes in it", "bytes", "not told"),
        "active_bytes": Column(pl.Int64, "live and pending block bytes in it", "bytes", "not told"),
        "stream": _STREAM,
        "pool_id": _POOL,
        "pool": Column(pl.Enum(("small", "large")), "which half of the pool", null="not told"),
        "is_expandable": Column(pl.Boolean, "a mapped range of an expandable segment", null="not told"),
        "stack_id": _STACK,
    },
    "blocks": _HEAP
    | {
        "snapshot_id": Column(pl.Int64, "which picture of the heap; the highest is the last"),
        "segment_addr": Column(pl.UInt64, "address of the segment it lies in"),
        "addr": _ADDR,
        "size_bytes": _SIZE,
        "requested_bytes": _REQUESTED,
        "state": Column(_STATE, "state; unknown words become 'unknown' and are named in the warnings"),
        "stream": _STREAM,
        "pool_id": _POOL,
        "pool": Column(pl.Enum(("small", "large")), "which half of the pool", null="not told"),
        "stack_id": _STACK,
    },
    "allocations": _HEAP
    | {
        "alloc_seq": Column(pl.Int64, "event that made it", null="it was there before the first event"),
        "free_seq": Column(pl.Int64, "event that gave it up (free_requested)", null="live at the end"),
        "done_seq": Column(pl.Int64, "event that ended it (free_completed)", null="live or pending at the end"),
        "time_us": Column(pl.Float64, "when it was made", "µs", "before the first event, or no clock"),
        "end_us": Column(pl.Float64, "when it was given up", "µs", "live at the end, or no clock"),
        "addr": _ADDR,
        "requested_bytes": _REQUESTED,
        "size_bytes": _SIZE,
        "stream": _STREAM,
        "pool_id": _POOL,
        "stack_id": _STACK,
        "free_stack_id": Column(pl.UInt32, "key into stacks: who gave it up", null="live, or not recorded"),
        "category": Column(pl.Enum(CATEGORIES), "what it is for"),
        "evidence": Column(pl.Enum(EVIDENCE), "how that is known"),
        "layer": Column(_WORD, "module path", null="not known"),
        "phase": Column(_WORD, "phase of the step", null="not known"),
        "step": Column(pl.Int64, "training step, from 0", null="not known"),
        "op": Column(_WORD, "operator that asked", null="not known"),
        "at_start": Column(pl.Boolean, "it was there before the first event"),
        "size_exact": Column(pl.Boolean, "size_bytes is the allocator's own number, not a bound"),
    },
    "hints": {
        "alloc_seq": Column(pl.Int64, "event that made the allocation"),
        "category": Column(pl.Enum(CATEGORIES), "what the source saw it used for", null="not seen"),
        "evidence": Column(pl.Enum(EVIDENCE), "how the source knows", null="not seen"),
        "layer": Column(_WORD, "module path at the allocation", null="not seen"),
        "phase": Column(_WORD, "phase at the allocation", null="not seen"),
        "step": Column(pl.Int64, "training step at the allocation", null="not seen"),
        "op": Column(_WORD, "operator that asked", null="not seen"),
    },
    "contexts": {
        "seq": Column(pl.Int64, "the event"),
        "span": Column(pl.Int64, "the piece of the program that it fell into: one forward, backward or step of an optimizer, or what lies between two of them"),
        "phase": Column(_WORD, "forward, backward, recompute, optimizer, zero_grad", null="none of them"),
        "layer": Column(_WORD, "module path", null="outside modules, or not seen"),
        "name": Column(_WORD, "the phase that the user named, by mp.phase or a range of NVTX", null="none"),
        "step": Column(pl.Int64, "training step, from 0", null="no optimizer was seen"),
        "evidence": Column(pl.Enum(EVIDENCE), "how the source knows"),
    },
    "owners": _HEAP
    | {
        "addr": _ADDR,
        "seq": Column(pl.Int64, "it was found just before this event"),
        "category": Column(pl.Enum(CATEGORIES), "what the storage there was for"),
        "evidence": Column(pl.Enum(EVIDENCE), "how that is known"),
        "layer": Column(_WORD, "module path of the owner", null="it has none"),
        "name": Column(pl.String, "who held it", null="not named"),
    },
    "samples": _HEAP
    | {
        "time_us": _TIME,
        "gauge": Column(_WORD, "what was read"),
        "value": Column(pl.Float64, "the reading", null="the reading failed"),
        "unit": Column(_WORD, "its unit"),
    },
    "marks": {
        "rank": _HEAP["rank"],
        "device": Column(pl.Int64, "device ordinal", null="all of them"),
        "time_us": _TIME,
        "end_us": Column(pl.Float64, "end of the span", "µs", "a moment, or still open"),
        "seq": Column(pl.Int64, "last event before it", null="not placed among the events"),
        "kind": Column(_WORD, "cell, phase, step, oom, snapshot, range, empty_cache, note"),
        "name": Column(pl.String, "its name"),
        "value": Column(pl.Float64, "a number that belongs to it (an OOM's device_free)", null="none"),
    },
    "kernels": {
        "rank": _HEAP["rank"],
        "device": Column(pl.Int64, "device ordinal"),
        "kernel_id": Column(pl.Int64, "key"),
        "name": Column(pl.String, "kernel name"),
        "stream": _STREAM,
        "time_us": _TIME,
        "duration_us": Column(pl.Float64, "duration", "µs", "not measured"),
        "grid": Column(pl.String, "grid as 'x,y,z'"),
        "block": Column(pl.String, "block as 'x,y,z'"),
        "stack_id": _STACK,
    },
    "metrics": {
        "kernel_id": Column(pl.Int64, "key into kernels"),
        "metric": Column(_WORD, "counter name"),
        "value": Column(pl.Float64, "its value", null="not readable"),
        "unit": Column(_WORD, "its unit"),
    },
    "transfers": _HEAP
    | {
        "time_us": _TIME,
        "duration_us": Column(pl.Float64, "duration", "µs", "not measured"),
        "what": Column(_WORD, "copy, migration or fault"),
        "addr": _ADDR,
        "size_bytes": Column(pl.Int64, "bytes moved", "bytes", "not known"),
        "count": Column(pl.Int64, "records that this row sums"),
        "cause": Column(_WORD, "why", null="not known"),
        "kernel_id": Column(pl.Int64, "key into kernels", null="no kernel"),
    },
    "ranges": _HEAP
    | {
        "addr": _ADDR,
        "size_bytes": Column(pl.Int64, "length", "bytes"),
        "name": Column(pl.String, "name of the range"),
        "stack_id": _STACK,
    },
}


_empty: dict[str, pl.DataFrame] = {}


def dtypes(table: str) -> dict[str, pl.DataType | type[pl.DataType]]:
    """Column name to dtype of one table."""
    return {name: column.dtype for name, column in TABLES[table].items()}


def empty(table: str) -> pl.DataFrame:
    """The table with its columns and no rows."""
    if table not in _empty:  # a capture has fourteen; made anew they cost more than an empty cell may
        _empty[table] = pl.DataFrame(schema=dtypes(table))
    return _empty[table].clone()


def fill(table: str, columns: Mapping[str, object], height: int | None = None) -> pl.DataFrame:
    """Build a table from the columns that a source knows; scalars are repeated, the others are null.

    Raises
    ------
    SchemaError
        For a column that the table does not have.
    """
    wanted = dtypes(table)
    if stray := sorted(set(columns) - set(wanted)):
        raise SchemaError(f"The table {table!r} has no column {stray[0]!r}. Its columns are: {', '.join(wanted)}.")
    series: dict[str, pl.Series] = {}
    scalars: dict[str, object] = {}
    for name, values in columns.items():
        if values is None or isinstance(values, (str, int, float, bool)):
            scalars[name] = values
            continue
        made = values if isinstance(values, pl.Series) else pl.Series(name, cast("Any", values))
        series[name] = made.alias(name) if made.dtype == wanted[name] else made.alias(name).cast(wanted[name])
        height = len(made) if height is None else height
    rows = height or 0
    for name, dtype in wanted.items():
        if name not in series:
            value = scalars.get(name)
            if value is None:
                series[name] = pl.Series(name, [None], dtype=dtype).new_from_index(0, rows) if rows else pl.Series(name, [], dtype=dtype)
            else:
                series[name] = pl.Series(name, [value]).cast(dtype).new_from_index(0, rows)
    return pl.DataFrame([series[name] for name in wanted])


def check(table: str, frame: pl.DataFrame) -> pl.DataFrame:
    """Return the frame if it is this table; further columns are allowed at its end.

    Raises
    ------
    SchemaError
        Names the column and both dtypes.
    """
    here = frame.schema
    for name, dtype in dtypes(table).items():
        if name not in here:
            raise SchemaError(f"The table {table!r} lacks its column {name!r} ({dtype}). Build it with schema.fill({table!r}, ...).")
        if here[name] != dtype:
            raise SchemaError(
                f"Column {name!r} of the table {table!r} is {here[name]}, not {dtype}. Cast it, or build the frame with schema.fill({table!r}, ...)."
            )
    return frame
