"""A live snapshot of torch's allocator into columns; call stacks are interned across snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import schema
from nbmemprof._cells import cell_names

__all__ = ["COUNTED", "COUNTS", "Reading", "Stacks", "events_frame", "heap_frames", "tail_of", "unseen_from"]

# actions that torch's counters count too, so that a position in the trace can be told from the counters
COUNTED = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom")
# torch's names (torch.cuda.memory_stats) of what a reading keeps of them; the counters of events in the order of Reading.counts
COUNTS = ("allocation.all.allocated", "allocation.all.freed", "active.all.freed", "num_device_alloc", "num_device_free", "num_ooms", "num_alloc_retries")
_STATES = {"active_allocated": "active_allocated", "active_pending_free": "active_pending_free", "active_awaiting_free": "active_pending_free", "inactive": "inactive"}
_TAIL = 8


@dataclass(frozen=True)
class Reading:
    """Torch's counters of one device, as far as the recording needs them."""

    events: int  # entries that the trace got since the counters began, COUNTED ones only
    calls: int  # segments and mapped ranges got from the driver
    allocated: int
    requested: int
    reserved: int
    peak_allocated: int
    peak_requested: int
    peak_reserved: int
    counts: tuple[int, ...] = ()  # COUNTS

    @property
    def ooms(self) -> int:
        """Requests refused since the counters began."""
        return self.counts[5] if self.counts else 0

    @classmethod
    def of(cls, stats: dict[str, Any]) -> Reading:
        """From the nested dict of ``torch._C._cuda_memoryStats``; counters that it lacks count as 0."""

        def total(name: str, what: str) -> int:
            return int(stats.get(name, {}).get("all", {}).get(what, 0))

        uses = (total("allocation", "allocated"), total("allocation", "freed"), total("active", "freed"))
        calls, *others = (int(stats.get(name, 0)) for name in COUNTS[3:])
        return cls(
            sum(uses) + calls + sum(others[:-1]),
            calls,
            total("allocated_bytes", "current"),
            total("requested_bytes", "current"),
            total("reserved_bytes", "current"),
            total("allocated_bytes", "peak"),
            total("requested_bytes", "peak"),
            total("reserved_bytes", "peak"),
            (*uses, calls, *others),
        )


class Stacks:
    """Call stacks by content: the same stack has the same id in every snapshot of one recording."""

    def __init__(self) -> None:
        self._ids: dict[tuple[tuple[str, str, int], ...], int] = {}

    def ids(self, lists: Sequence[Any]) -> npt.NDArray[np.int64]:
        """Id of each stack, -1 for an empty one. Torch shares the frames between stacks, and some stacks."""
        if not lists:
            return np.empty(0, np.int64)
        _, first, inverse = np.unique(np.fromiter(map(id, lists), np.int64, len(lists)), return_index=True, return_inverse=True)
        seen: dict[tuple[int, ...], int] = {(): -1}
        found = np.empty(len(first), np.int64)
        for at, row in enumerate(first.tolist()):
            frames = lists[row] or ()
            key = tuple(map(id, frames))
            got = seen.get(key)
            if got is None:
                got = seen[key] = self._intern(frames)
            found[at] = got
        return found[inverse.reshape(-1)]

    def _intern(self, frames: Sequence[dict[str, Any]]) -> int:
        content = tuple((str(f.get("filename", "")), str(f.get("name", "")), _line(f.get("line"))) for f in frames)
        return self._ids.setdefault(content, len(self._ids))

    def through(self, place: str) -> list[int]:
        """Ids of the stacks that pass through a file."""
        return [number for content, number in self._ids.items() if any(name.endswith(place) for name, _, _ in content)]

    def ending_in(self, place: str) -> list[int]:
        """Ids of the stacks whose innermost Python frame is in a file."""
        return [number for content, number in self._ids.items() if content and content[0][0].endswith(place)]

    def frame(self, used: pl.Series) -> pl.DataFrame:
        """The table of the stacks with these ids; files of notebook cells are named ``In[7]``, and a stack begins with its cell."""
        wanted = set(used.drop_nulls().unique().to_list())
        cells = cell_names()
        rows = [
            (number, depth, function, cells.get(filename, filename), line or None)
            for content, number in self._ids.items()
            if number in wanted
            for depth, (filename, function, line) in enumerate(_from_cell(content, cells))
        ]
        columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * 5
        return schema.fill("stacks", {n: pl.Series(n, columns[i], dtype=t) for i, (n, t) in enumerate(schema.dtypes("stacks").items())})


def _line(line: int | None) -> int:
    """0 for a frame whose line Python can't tell; torch writes that as 2**64 - 1 (seen on a frame that unwinds)."""
    return line if line is not None and 0 < line < 1 << 31 else 0


def _from_cell(content: tuple[tuple[str, str, int], ...], cells: dict[str, str]) -> tuple[tuple[str, str, int], ...]:
    """The frames up to the notebook's cell, without those of the kernel that runs it."""
    outermost = next((depth for depth in range(len(content) - 1, -1, -1) if content[depth][0] in cells), len(content) - 1)
    return content[: outermost + 1]


def events_frame(trace: Sequence[dict[str, Any]], device: int, stacks: Stacks, skip: int = 0) -> pl.DataFrame:
    """Entries of one device's trace: ``action addr size stream clock_us stack_id device free counted note``.

    The marks that snapshots leave are left out, for most of them are ours. ``skip`` leaves out as many
    entries at the front, marks not counted.
    """
    rows = [e for e in trace if e.get("action") != "snapshot"]
    if skip:
        rows = rows[skip:]
    stack = pl.Series(stacks.ids([e.get("frames") for e in rows]))
    action = pl.Series("action", [e.get("action") for e in rows], pl.String)
    return pl.DataFrame(
        {
            "action": action.cast(pl.Categorical),
            "addr": pl.Series([e.get("addr") for e in rows], dtype=pl.UInt64),
            "size": pl.Series(list(map(itemgetter("size"), rows)), dtype=pl.Int64),
            "stream": pl.Series(list(map(itemgetter("stream"), rows)), dtype=pl.Int64),
            "clock_us": pl.Series(list(map(itemgetter("time_us"), rows)), dtype=pl.Float64),
            "pool_id": pl.Series([_pool(e.get("pool_id")) for e in rows], dtype=pl.String) if rows and "pool_id" in rows[0] else pl.Series([None], dtype=pl.String).new_from_index(0, len(rows)),
            "stack_id": stack.set(stack < 0, None).cast(pl.UInt32),
            "device": pl.Series([device], dtype=pl.Int64).new_from_index(0, len(rows)),
            "free": pl.Series([e.get("device_free") for e in rows], dtype=pl.Int64),
            "counted": action.is_in(list(COUNTED)),
            "note": pl.Series([e.get("user_metadata") or None for e in rows], dtype=pl.String).cast(pl.Categorical),
        }
    )


def _pool(pool: Any) -> str | None:
    return f"{pool[0]}_{pool[1]}" if pool is not None else None


def tail_of(frame: pl.DataFrame) -> list[tuple[Any, ...]]:
    """The last entries, to find the place again in a later snapshot."""
    return frame.select("action", "addr", "size", "stream").tail(_TAIL).rows()


def unseen_from(trace: Sequence[dict[str, Any]], tail: list[tuple[Any, ...]], expected: int) -> int | None:
    """How many entries (marks of snapshots not counted) were seen before; None if the place can't be found.

    ``expected`` is what the counters say is new. They are read just before the trace is copied, so a thread
    that runs without the interpreter's lock can shift the place a little: it is where the ``tail`` matches.
    """
    rows = [e for e in trace if e.get("action") != "snapshot"]
    guess = min(len(rows) - expected, len(rows))

    def fits(at: int) -> bool:
        have = rows[max(at - len(tail), 0) : at]
        return [(e.get("action"), e.get("addr"), e.get("size"), e.get("stream")) for e in have] == tail[len(tail) - len(have) :]

    if guess <= 0:  # everything is new, or more was written than the ring holds
        return 0
    if fits(guess):
        return guess
    for off in range(1, len(rows)):
        for at in (guess - off, guess + off):
            if len(tail) <= at <= len(rows) and fits(at):
                return at
        if off > 100_000:
            break
    return None


def heap_frames(snapshot: dict[str, Any], stacks: Stacks, snapshot_id: int) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Segments and blocks of a snapshot as tables."""
    segments = snapshot["segments"]
    pool_ids = [_pool(s.get("segment_pool_id")) for s in segments]
    words = {"kind": "device", "source": "torch", "snapshot_id": snapshot_id}

    def column(rows: Sequence[dict[str, Any]], name: str, dtype: Any = pl.Int64) -> pl.Series:
        return pl.Series([r.get(name) for r in rows], dtype=dtype)

    def stack(rows: Sequence[dict[str, Any]]) -> pl.Series:
        ids = pl.Series(stacks.ids([r.get("frames") for r in rows]), dtype=pl.Int64)
        return ids.set(ids < 0, None).cast(pl.UInt32)

    table = schema.fill(
        "segments",
        words
        | {
            "device": column(segments, "device"),
            "addr": column(segments, "address", pl.UInt64),
            "size_bytes": column(segments, "total_size"),
            "allocated_bytes": column(segments, "allocated_size"),
            "active_bytes": column(segments, "active_size"),
            "stream": column(segments, "stream"),
            "pool_id": pl.Series(pool_ids, dtype=pl.String),
            "pool": column(segments, "segment_type", pl.String),
            "is_expandable": column(segments, "is_expandable", pl.Boolean),
            "stack_id": stack(segments),
        },
    )
    blocks = list(chain.from_iterable(s["blocks"] for s in segments))
    counts = np.array([len(s["blocks"]) for s in segments], np.int64)
    owner = np.repeat(np.arange(len(segments)), counts)
    state = column(blocks, "state", pl.String)
    parts = schema.fill(
        "blocks",
        words
        | {
            **{name: table[name].gather(owner) for name in ("device", "stream", "pool_id", "pool")},
            "segment_addr": table["addr"].gather(owner),
            "addr": column(blocks, "address", pl.UInt64),
            "size_bytes": column(blocks, "size"),
            "requested_bytes": column(blocks, "requested_size").set(state == "inactive", None),
            "state": state.replace_strict(_STATES, default="unknown"),
            "stack_id": stack(blocks),
        },
    )
    return table, parts
