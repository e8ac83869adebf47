"""From a fake run's record to a capture: the requests go through the allocator's model, what is known of each goes into the shared columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import _kv_caches, heap, schema
from nbmemprof.allocator import Device
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._picture import picture
from nbmemprof.capture import Capture
from nbmemprof.prediction.catalogue import GPU
from nbmemprof.prediction.ranges import bounds
from nbmemprof.prediction.recorder import EMPTY_CACHE, Allocation, Record
from nbmemprof.prediction.room import change, operations, outside_bytes

__all__ = ["capture_of", "needs", "served"]

_ROUND = 512  # bytes of a block at least
_GOES_ON = "the error of a refused request is not raised inside the cell: the request is skipped with its free, and the code goes on; a real run ends at the first"
NOTHING_SPENT = {"stacks": "none", "cost_text": ""}  # meta["recording"] of a window of a fake run: what is not in it did not happen
_ACTIONS = {
    M.ALLOC: "alloc", M.FREE_REQUESTED: "free_requested", M.FREE_COMPLETED: "free_completed", M.SEGMENT_ALLOC: "segment_alloc", M.SEGMENT_FREE: "segment_free",
    M.SEGMENT_MAP: "segment_map", M.SEGMENT_UNMAP: "segment_unmap", M.OOM: "oom",
}  # fmt: skip


def served(
    record: Record,
    *,
    conf: str = "",
    torch: str = "2.11",
    limit_bytes: int | None = None,
    capacity_bytes: int | None = None,
    history: bool = True,
    sizes: Any = None,
    since: int = 0,
    opened: Callable[[Device], None] | None = None,
    rooms: Sequence[tuple[int, int, int | None]] = (),
    card_bytes: int = 0,
    left_out: Iterable[int] = (),
) -> Device:
    """Put the requests of a record through the allocator's model, in one go.

    Parameters
    ----------
    sizes
        Bytes of each allocation instead of the record's, for a range's other end.
    since, opened
        Number of events before a window begins, and what is called with the device at that moment.
    rooms, card_bytes
        What there was from an event on (``Record.rooms``), and of which card.
    left_out
        Allocations that are not asked for.

    Returns
    -------
    The device after the last request. Its trace names, in the last word of a row, the operation that caused it.
    """
    device = Device(conf, torch=torch, limit_bytes=limit_bytes, capacity_bytes=capacity_bytes, history=history)
    events = np.asarray(record.events, np.int64)
    nbytes = np.asarray([*([made.nbytes for made in record.made] if sizes is None else sizes), 0], np.int64)
    nbytes[list(left_out)] = 0
    model = device._model
    words = operations(events, nbytes[np.where(events == EMPTY_CACHE, -1, np.where(events >= 0, events, ~events))], model.default).reshape(-1)
    rows = np.zeros(2 * len(nbytes), np.int64)
    model.m[M.NOW], model.m[M.NEXT_GIVEN] = 0, 0
    begins = {at: (capacity, limit) for at, capacity, limit in rooms}
    for end in sorted({0, since, len(events), *begins}):
        model.m[M.STOP] = end * M.WORDS
        device._trace = model.run(device._trace, words, rows, work=len(events))
        if end == since and opened is not None:
            opened(device)
        if end in begins:
            change(device, *begins[end], card_bytes)
    return device


def capture_of(record: Record, gpu: GPU, *, conf: str, torch: str, limit_bytes: int | None, capacity_bytes: int | None, meta: dict[str, Any], since: int = 0) -> Capture:
    """Make the capture of a prediction; what was there before the event number ``since`` is its opening balance."""
    capacity = gpu.capacity_bytes if capacity_bytes is None else capacity_bytes
    outside = outside_bytes(gpu, record)
    opening = _Opening()
    room: dict[str, Any] = {"conf": conf, "torch": torch, "limit_bytes": limit_bytes, "capacity_bytes": capacity if record.rooms else max(0, capacity - outside), "rooms": record.rooms, "card_bytes": capacity}
    device = served(record, **room, since=since, opened=opening if since else None)
    whole = device._trace[: int(device._model.m[M.AT])].reshape(-1, M.WORDS)
    trace = whole[opening.rows :]
    stats = device.stats()
    stacks = stack_ids(record, whole)
    ends = [*([(opening.snapshot, opening.rows)] if since else []), (device.snapshot(), len(whole))]
    pictures = [_with_stacks(picture(snapshot, number), whole[:at], stacks[:at]) for number, (snapshot, at) in enumerate(ends)]
    tables = {
        "events": _events(trace, stacks[opening.rows :]), "hints": _hints(record, trace), "segments": pl.concat([s for s, _ in pictures]), "blocks": pl.concat([b for _, b in pictures]),
        "marks": _marks(record, trace), "stacks": stack_table(record, stacks), "owners": _owners(record, whole, opening.rows),
    } | _more_tables(record, trace, since)  # fmt: skip
    counters = {
        "peak_allocated_bytes": stats["allocated_bytes.all.peak"], "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "start_allocated_bytes": opening.allocated, "start_reserved_bytes": opening.reserved,
        "end_allocated_bytes": stats["allocated_bytes.all.current"], "end_reserved_bytes": stats["reserved_bytes.all.current"], "retries": stats["num_alloc_retries"] - opening.retries,
    }  # fmt: skip
    if since:
        meta = meta | {"start_snapshot_id": 0}

    def again(sizes: Any) -> Device:
        return served(record, **room, since=since, history=False, sizes=sizes, opened=Device.reset_peak_stats if since else None, left_out=record.refused)

    assumptions = dict(record.assumptions)
    refused = np.flatnonzero(trace[:, 0] == M.OOM)
    refused = refused[~np.isin(np.asarray(record.events, np.int64)[trace[refused, 5] // M.WORDS], record.spared)] if record.spared else refused
    if len(refused):
        meta = meta | {"needs": _needs(record, trace, refused, _unrefused(record, trace, refused, since, opening.allocated) or needs(record, conf=conf, torch=torch, since=since))}
        if not record.refused:
            assumptions[_GOES_ON] = len(refused)

    counters |= bounds(record, again, counters["peak_allocated_bytes"], counters["peak_reserved_bytes"])
    made = heap.build(
        tables, origin="predicted", source="prediction", device=gpu.title, capacity_bytes=capacity, limit_bytes=limit_bytes, conf=conf, torch=torch, outside_bytes=outside,
        counters={"0": counters}, assumptions=[{"what": what, "count": count} for what, count in sorted(assumptions.items())], kernels=dict(record.kernels), **meta,
    )  # fmt: skip
    if since:
        made.tables["allocations"] = _known_before(made.tables["allocations"], record, whole[: opening.rows], stacks[: opening.rows])
    return made


def _needs(record: Record, trace: Any, refused: Any, free: dict[str, Any]) -> dict[str, Any]:
    """The first request that is refused, and what the code would have taken if none were: bytes of tensors and of what torch reserves for them."""
    made = record.made[int(np.asarray(record.events, np.int64)[trace[refused[0], 5] // M.WORDS])]
    return {
        "refused_bytes": made.nbytes, "refused": len(refused), "seq": int(refused[0]), "op": made.op, "layer": made.layer, "phase": made.phase, "step": made.step,
        "raised": bool(record.refused), "caught": record.caught if record.refused else None,
    } | free  # fmt: skip


def needs(record: Record, *, conf: str, torch: str, since: int = 0) -> dict[str, Any]:
    """Peaks from an event on as if there were room for everything; what had been refused before is not counted."""
    stats = served(record, torch=torch, conf=_without_limit(conf), history=False, since=since, opened=Device.reset_peak_stats if since else None, left_out=record.refused).stats()
    return {"peak_allocated_bytes": stats["allocated_bytes.all.peak"], "peak_reserved_bytes": stats["reserved_bytes.all.peak"], "known_by": "the code went on as if nothing were refused", "whole": True}


def _unrefused(record: Record, trace: Any, refused: Any, since: int, before: int) -> dict[str, Any] | None:
    """What a copy of the run found; where it found nothing, what was held and asked for at the refusal, which is the least. None where no request met an error."""
    if not record.refused:
        return None
    told = next((answer for at, answer in record.needs if at >= since), None)
    if told is not None:
        return told
    sizes = -(-trace[:, 2] // _ROUND) * _ROUND
    kinds = trace[: refused[0], 0]
    held = before + int(sizes[: refused[0]][kinds == M.ALLOC].sum() - sizes[: refused[0]][kinds == M.FREE_REQUESTED].sum()) + int(sizes[refused[0]])
    return {"peak_allocated_bytes": held, "peak_reserved_bytes": held, "known_by": "what was held and asked for at the refusal: it needs more, how much was not found in time", "whole": False}


def _without_limit(conf: str) -> str:
    """An allocator's setting without the share of the memory that a process may take."""
    return ",".join(part for part in conf.split(",") if not part.strip().startswith("per_process_memory_fraction"))


class _Opening:
    """The device when a window begins."""

    rows = allocated = reserved = retries = 0

    def __call__(self, device: Device) -> None:
        """Look at it, and let peaks count from here."""
        stats = device.stats()
        self.rows = int(device._model.m[M.AT]) // M.WORDS
        self.allocated, self.reserved, self.retries = stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"], stats["num_alloc_retries"]
        self.snapshot = device.snapshot()
        device.reset_peak_stats()


def _known_before(rows: pl.DataFrame, record: Record, before: Any, stacks: Any) -> pl.DataFrame:
    """What the allocations of the opening balance are for, and which lines made them."""
    at = np.flatnonzero(before[:, 0] == M.ALLOC)
    events = np.asarray(record.events, np.int64)
    made = [record.made[i] for i in events[before[at, 5] // M.WORDS].tolist()]
    words = [_category(one) for one in made]
    known = pl.DataFrame(
        {
            "addr": pl.Series(before[at, 1].astype(np.uint64)), "at_start": True, "_category": [w for w, _ in words], "_evidence": [e for _, e in words],
            "_layer": pl.Series([m.layer for m in made], dtype=pl.String), "_op": pl.Series([m.op for m in made], dtype=pl.String), "_stack_id": _known(stacks[at]),
        }
    ).unique("addr", keep="last", maintain_order=True)  # fmt: skip
    joined = rows.join(known, on=["addr", "at_start"], how="left", maintain_order="left")
    names = ("category", "evidence", "layer", "op", "stack_id")
    return joined.with_columns(pl.coalesce(pl.col("_" + name).cast(rows.schema[name]), name).alias(name) for name in names).select(rows.columns)


def _events(trace: Any, stacks: Any) -> pl.DataFrame:
    kind = trace[:, 0]
    addr = pl.Series(np.where(kind == M.OOM, 0, trace[:, 1]).astype(np.uint64))
    columns = {
        "device": 0, "kind": "device", "source": "torch", "seq": np.arange(len(trace)), "action": pl.Series(kind).replace_strict(_ACTIONS, return_dtype=pl.String),
        "addr": addr.set(pl.Series(kind == M.OOM), None) if len(addr) else addr, "requested_bytes": trace[:, 2], "stream": trace[:, 3], "pool_id": "0_0", "stack_id": _known(stacks),
    }  # fmt: skip
    return schema.fill("events", columns, len(trace))


def stack_ids(record: Record, trace: Any) -> Any:
    """Number of the stack that caused each row of a trace: a request, and what the device was asked for its sake; 0 where none is known."""
    events = np.asarray(record.events, np.int64)
    stacks = np.asarray([*(made.stack for made in record.made), 0], np.int64)
    source = events[trace[:, 5] // M.WORDS] if len(trace) else np.zeros(0, np.int64)
    return stacks[np.where((source >= 0) & (source != EMPTY_CACHE), source, -1)]


def stack_table(record: Record, stacks: Any) -> pl.DataFrame:
    """The table ``stacks`` of these numbers."""
    rows = [(int(number), depth, *frame) for number in np.unique(stacks) if number for depth, frame in enumerate(record.stacks[number])]
    return schema.fill("stacks", dict(zip(("stack_id", "depth", "function", "filename", "line"), zip(*rows, strict=True), strict=True)) if rows else {}, len(rows))


def _known(stacks: Any) -> pl.Series:
    """Numbers of stacks as a column, 0 as null."""
    return pl.Series(np.asarray(stacks, np.uint32)).replace(0, None)


def _with_stacks(tables: tuple[pl.DataFrame, pl.DataFrame], trace: Any, stacks: Any) -> tuple[pl.DataFrame, pl.DataFrame]:
    """A picture's segments and blocks with the lines that made them."""
    return _placed(tables[0], trace, stacks, M.SEGMENT_ALLOC, M.SEGMENT_MAP), _placed(tables[1], trace, stacks, M.ALLOC)


def _placed(rows: pl.DataFrame, trace: Any, stacks: Any, *kinds: int) -> pl.DataFrame:
    at = np.flatnonzero(np.isin(trace[:, 0], kinds))
    made = pl.DataFrame({"addr": trace[at, 1].astype(np.uint64), "_stack": _known(stacks[at])}).unique("addr", keep="last", maintain_order=True)
    joined = rows.join(made, on="addr", how="left", maintain_order="left")
    used = pl.col("state") != "inactive" if "state" in rows.columns else pl.lit(value=True)
    return joined.with_columns(pl.when(used).then("_stack").cast(rows.schema["stack_id"]).alias("stack_id")).select(rows.columns)


def _hints(record: Record, trace: Any) -> pl.DataFrame:
    at = np.flatnonzero(trace[:, 0] == M.ALLOC)
    events = np.asarray(record.events, np.int64)
    index = events[trace[at, 5] // M.WORDS].tolist()
    made = [record.made[i] for i in index]
    words = [_category(one) for one in made]
    columns = {
        "alloc_seq": at, "category": [w for w, _ in words], "evidence": [e for _, e in words], "layer": [m.layer for m in made], "phase": [m.phase for m in made],
        "step": [m.step for m in made], "op": [m.op for m in made],
    }  # fmt: skip
    return schema.fill("hints", columns, len(at))


def _owners(record: Record, whole: Any, opened: int) -> pl.DataFrame:
    """How their owners call weights, buffers, the optimizer's state and caches."""
    at = np.flatnonzero(whole[:, 0] == M.ALLOC)
    index = np.asarray(record.events, np.int64)[whole[at, 5] // M.WORDS]
    rows = [(place, one) for place, one in zip(at.tolist(), (record.made[i] for i in index.tolist()), strict=True) if one.name is not None and _category(one)[0] == one.category]
    columns = {
        "device": 0, "kind": "device", "source": "torch", "addr": pl.Series(whole[[place for place, _ in rows], 1].astype(np.uint64)), "seq": [max(0, place + 1 - opened) for place, _ in rows],
        "category": [one.category for _, one in rows], "evidence": [one.evidence for _, one in rows], "layer": pl.Series([one.layer for _, one in rows], dtype=pl.String), "name": [one.name for _, one in rows],
    }  # fmt: skip
    return schema.fill("owners", columns, len(rows))


def _more_tables(record: Record, trace: Any, since: int) -> dict[str, pl.DataFrame]:
    """Tables beside the schema's, as of live captures: ``caches`` and ``parameters``, where there is anything in them."""
    seen = [row for row in record.caches if row[0] >= since]
    source = trace[:, 5] // M.WORDS if len(trace) else np.zeros(0, np.int64)
    words = {"layer": pl.String, "name": pl.String, "dtype": pl.String, "elements": pl.Int64, "rows": pl.Int64, "size_bytes": pl.Int64}
    made = {
        "caches": _kv_caches.table([row[1:] for row in seen], np.searchsorted(source, [row[0] for row in seen], side="left")),
        "parameters": pl.DataFrame(record.parameters, schema=words, orient="row"),
    }
    return {name: frame for name, frame in made.items() if frame.height}


def _category(made: Allocation) -> tuple[str, str]:
    """What an allocation is for: its owner's word, else where it began and where it ended."""
    if made.category is not None and not (made.category == "kv_cache" and made.ended in ("backward", "recompute")):  # kept by the graph
        return made.category, made.evidence or "model"
    phase, ended = made.phase, made.ended
    if phase == "optimizer" and ended in ("backward", "recompute"):  # a loss that the step's closure computed
        return "activations", "saved"
    if phase == "optimizer":
        return ("temporary", "phase") if ended == "optimizer" else ("optimizer_state", "phase")
    if phase == "recompute":
        return ("temporary", "phase") if ended == "recompute" else ("activations", "saved")
    if phase == "backward":
        return ("temporary", "phase") if ended in ("backward", "recompute") else ("gradients", "phase")
    if ended in ("backward", "recompute"):
        return "activations", "saved"
    if phase == "forward":
        return ("temporary", "phase") if ended is not None else ("activations", "module")
    return ("temporary", "phase") if ended is not None else ("unknown", "none")


def _marks(record: Record, trace: Any) -> pl.DataFrame:
    """Steps, and refusals."""
    source = trace[:, 5] // M.WORDS if len(trace) else np.zeros(0, np.int64)
    seen = [mark for mark in record.marks if len(trace) and mark[0] > source[0]]  # those of a window
    seqs = [int(np.searchsorted(source, at, side="left")) - 1 for at, _, _ in seen]
    refused = np.flatnonzero(trace[:, 0] == M.OOM)
    kinds = [kind for _, kind, _ in seen] + ["oom"] * len(refused)
    names = [name for _, _, name in seen] + ["out of memory (predicted)"] * len(refused)
    values = [None] * len(seen) + [float(max(0, v)) for v in trace[refused, 1].tolist()]
    columns = {"device": 0, "seq": [*seqs, *refused.tolist()], "kind": kinds, "name": names, "value": pl.Series(values, dtype=pl.Float64)}
    return schema.fill("marks", columns, len(kinds))
