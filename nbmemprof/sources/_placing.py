"""Put what an observer logged beside the events of an allocator: tables ``contexts`` and ``owners``, marks of phases and steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import _kv_caches, schema
from nbmemprof.sources._observer import BACKWARD, FORWARD, NONE, PHASES, RECOMPUTE, ZERO_GRAD, Observer

__all__ = ["Log", "Placed", "bare_events", "contexts", "marks", "owners", "place", "tables"]

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_RUN = 1 << 40  # numbers of backward spans that nobody announced
_MOST_MARKS = 2000


@dataclass
class Log:
    """What an observer logged, as columns; record ``i`` of them has number ``first + i``."""

    first: int
    times_us: npt.NDArray[np.float64]
    phase: Ints
    group: Ints
    back: Ints
    layer: Ints
    name: Ints
    grad: Ints
    steps: list[tuple[int, int]]
    layers: list[str | None]
    names: list[str | None]
    owners: list[tuple[int, int, int | None, int, str, str, str | None, str | None]]
    caches: list[tuple[int, int, Any, int | None]] = field(default_factory=list)
    routing: list[Any] = field(default_factory=list)
    parameters: list[tuple[str, str, str, int, int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, seen: Observer) -> Log:
        """Take a copy."""
        times, phase, group, back, layer, name, grad = (np.array(c, np.int64) for c in (seen.times, seen.phases, seen.groups, seen.backs, seen.layer_of, seen.name_of, seen.grads))
        return cls(seen.first, times / 1e3, phase, group, back, layer, name, grad, list(seen.steps), list(seen.layers.names), list(seen.names), list(seen.owned.rows), list(seen.owned.caches), list(seen.routing), list(seen.owned.parameters))

    def __post_init__(self) -> None:
        self.phase = _loss(self.phase, self.grad)

    def step_of(self, record: Ints) -> Ints:
        """Training step of each record; -1 where no optimizer was seen."""
        return np.searchsorted(self.ends(), record, side="right").astype(np.int64) if self.steps else np.full(len(record), -1, np.int64)

    def ends(self) -> Ints:
        """Records at which steps ended."""
        if not self.steps:
            return np.zeros(0, np.int64)
        which = [optimizer for _, optimizer in self.steps]
        again = next((i for i in range(1, len(which)) if which[i] == which[0]), len(which))
        last = which[again - 1]  # the optimizer that ends a step, where several take turns
        return np.array([at for at, optimizer in self.steps if optimizer == last], np.int64)


def _loss(phase: Ints, grad: Ints) -> Ints:
    """What lies between a forward and the backward that follows belongs to the forward: the loss."""
    made, state, start = phase.copy(), False, -1
    for at, (here, on) in enumerate(zip(phase.tolist(), grad.tolist(), strict=True)):
        if here == ZERO_GRAD:  # it may stand between a forward and its backward
            continue
        if here == FORWARD:
            if on and not state:
                state, start = True, at
        elif here == BACKWARD:
            if state:
                gap = made[start:at]
                gap[gap == NONE] = FORWARD
            state = False
        elif here != NONE:
            state = False
    return made


@dataclass
class Placed:
    """For each event its record, the layer that its note names (-1: no note), whether it has a note, its number and clock."""

    record: Ints
    layer: Ints
    noted: Flags
    seq: Ints
    clock_us: npt.NDArray[np.float64]
    notes: bool
    bare: Flags  # an allocation without a call stack, where call stacks are recorded: no Python code asked for it
    framed: Flags  # an allocation with one
    stacks: bool
    again: Flags  # an allocation whose stack passes through torch.utils.checkpoint


def place(log: Log, events: pl.DataFrame, *, notes: bool) -> Placed:
    """Find the record in which each event happened.

    Parameters
    ----------
    events
        ``seq clock_us note stack_id action`` of allocations and releases; ``again``, where there is such a column:
        the stack passes through ``torch.utils.checkpoint``.
    notes
        The threads attached notes; then an event without one is of a thread that has none, backward's or a
        stranger's. Else the clock tells alone.
    """
    count, clock = len(log.times_us), events["clock_us"].to_numpy()
    stacks = events["stack_id"].null_count() < events.height
    made = (events["action"].cast(pl.String) == "alloc").fill_null(value=False) & stacks
    bare, framed = (made & events["stack_id"].is_null()).to_numpy(), (made & events["stack_id"].is_not_null()).to_numpy()
    again = (made & events["again"].fill_null(value=False)).to_numpy() if "again" in events.columns else np.zeros(events.height, bool)
    by_time = np.clip(np.searchsorted(log.times_us, clock, side="right") - 1, 0, max(count - 1, 0))
    note = events["note"]
    if not notes or not count or note.null_count() == len(note):
        return Placed(by_time, log.layer[by_time] if count else by_time, np.zeros(len(by_time), bool), events["seq"].to_numpy(), clock, notes=False, bare=bare, framed=framed, stacks=stacks, again=again)
    text = note.cast(pl.String)
    words = pl.DataFrame({"note": text.unique()})
    parts = words["note"].str.extract_groups(r"^(\d+)\.(\d+)$").struct.unnest()
    table = words.with_columns(parts["1"].cast(pl.Int64, strict=False).alias("record") - log.first, parts["2"].cast(pl.Int64, strict=False).alias("layer"))
    read = pl.DataFrame({"note": text}).join(table, on="note", how="left", maintain_order="left", nulls_equal=True)
    record = read["record"].fill_null(-1).to_numpy().copy()
    noted = (record >= 0) & (record < count)
    record[~noted] = -1
    low = np.maximum.accumulate(record)
    high = np.minimum.accumulate(np.where(noted, record, count - 1)[::-1])[::-1]
    free = np.clip(by_time, np.maximum(low, 0), np.maximum(high, low))
    at = np.where(noted, record, _nearest_backward(log, free, low, high, noted))
    layer = np.where(noted, read["layer"].fill_null(-1).to_numpy(), -1)
    return Placed(at, layer, noted, events["seq"].to_numpy(), clock, notes=True, bare=bare, framed=framed, stacks=stacks, again=again)


def bare_events(seq: Any, clock_us: Any) -> pl.DataFrame:
    """Events of a source without notes, as ``place`` takes them."""
    empty = pl.Series([None] * len(seq), dtype=pl.String)
    return pl.DataFrame({"seq": seq, "clock_us": clock_us, "note": empty, "stack_id": empty, "action": empty})


def _nearest_backward(log: Log, at: Ints, low: Ints, high: Ints, noted: Flags) -> Ints:
    """An event without a note is a backward's, if one ran between the notes around it."""
    in_backward = np.flatnonzero(log.back >= 0)
    if not len(in_backward):
        return at
    made = at.copy()
    loose = np.flatnonzero(~noted & (log.back[at] < 0))
    place = np.searchsorted(in_backward, at[loose])
    before, after = in_backward[np.maximum(place - 1, 0)], in_backward[np.minimum(place, len(in_backward) - 1)]
    fits_before = (before >= np.maximum(low[loose], 0)) & (before <= high[loose])
    fits_after = (after >= np.maximum(low[loose], 0)) & (after <= high[loose])
    nearer = np.abs(after - at[loose]) < np.abs(at[loose] - before)
    made[loose] = np.where(fits_after & (nearer | ~fits_before), after, np.where(fits_before, before, at[loose]))
    return made


def contexts(log: Log, placed: Placed) -> pl.DataFrame:
    """Where each event happened, as a table."""
    record, noted = placed.record, placed.noted
    if not len(record) or not len(log.times_us):
        return schema.empty("contexts")
    inside = log.back[record] >= 0
    phase, group, layer = log.phase[record], np.where(inside, log.back[record], log.group[record]), placed.layer
    if placed.notes:
        run, backward = _backward_runs(log, placed)
        layer = np.where(noted, layer, 0)
        phase = np.where(noted, phase, np.where(inside | backward, BACKWARD, NONE))
        within = ~inside & (backward | (noted & (phase == RECOMPUTE)))
        group = np.where(within, -_RUN - run, np.where(noted | inside, group, -1 - group))  # a stranger's is in no span of ours
    elif placed.stacks and not inside.any():
        run, backward = _bare_runs(placed)
        phase, layer = np.where(backward, BACKWARD, phase), np.where(backward, 0, layer)
        group = np.where(backward, -_RUN - run, group)
    phase = np.where((phase == BACKWARD) & _again(placed), RECOMPUTE, phase)
    step = pl.Series(log.step_of(record + log.first))
    columns = {
        "seq": pl.Series(placed.seq), "span": pl.Series(group), "phase": _words(phase, list(PHASES)), "layer": _words(layer, log.layers), "name": _words(log.name[record], log.names),
        "step": pl.select(pl.when(step >= 0).then(step)).to_series(), "evidence": "annotation" if placed.notes else "phase",
    }  # fmt: skip
    return schema.fill("contexts", columns, len(record))


def _backward_runs(log: Log, placed: Placed) -> tuple[Ints, Flags]:
    """Number of the stretch between two notes of the program's own threads, and which events in it are backward's.

    Not every torch tells when its engine runs. What no thread with a note did, among it something that no Python code
    asked for, is the engine's; without call stacks, what follows a forward with gradients.
    """
    noted = placed.noted
    run = np.cumsum(noted & (log.phase[placed.record] != RECOMPUTE), dtype=np.int64)
    if placed.stacks:
        known = np.unique(run[~noted & placed.bare])
    else:
        graded = np.flatnonzero(log.grad)
        known = np.unique(run[~noted & (placed.record >= graded[0])]) if len(graded) else np.zeros(0, np.int64)
    return run, ~noted & np.isin(run, known)


def _again(placed: Placed) -> Flags:
    """What a checkpointed function without modules does when it runs again: its allocations, and the releases between two of them."""
    made = np.flatnonzero(placed.bare | placed.framed)
    if not placed.again.any():
        return placed.again
    at = np.searchsorted(made, np.arange(len(placed.seq)), side="right") - 1
    flags = np.append(placed.again[made], [False])
    return flags[np.maximum(at, 0)] & (at >= 0) & (flags[np.minimum(at + 1, len(made))] | placed.again)


def _bare_runs(placed: Placed) -> tuple[Ints, Flags]:
    """The same where no thread has notes: from the first allocation that no Python code asked for to the last event before one that it did."""
    run = np.cumsum(placed.framed, dtype=np.int64)
    first = np.full(int(run[-1]) + 1, len(run), np.int64)
    np.minimum.at(first, run[placed.bare], np.flatnonzero(placed.bare))
    return run, np.arange(len(run)) >= first[run]


def owners(log: Log, placed: Placed, kind: str = "device", since: int = 0) -> pl.DataFrame:
    """The owners that were found from record ``since`` on, and before which event."""
    found = [owner for owner in log.owners if owner[0] >= since]
    if not found:
        return schema.empty("owners")
    seq = _before_event(log, placed, [o[0] for o in found], [o[1] for o in found])
    columns: dict[str, Any] = {
        "kind": kind, "source": "torch", "device": pl.Series([o[2] for o in found], dtype=pl.Int64), "addr": pl.Series([o[3] for o in found], dtype=pl.UInt64), "seq": pl.Series(seq),
        **{name: pl.Series([o[i] for o in found], dtype=pl.String) for i, name in enumerate(("category", "evidence", "layer", "name"), 4)},
    }  # fmt: skip
    return schema.fill("owners", columns, len(found))


def _before_event(log: Log, placed: Placed, records: list[int], clocks_ns: list[int]) -> Ints:
    """The event before which something was seen, by the record and the clock of then."""
    moment = np.array(records, np.int64) - log.first
    at = np.searchsorted(placed.clock_us, np.array(clocks_ns, np.int64) / 1e3, side="right")
    if placed.notes and placed.noted.any():
        rising = np.maximum.accumulate(np.where(placed.noted, placed.record, -1))
        later = np.searchsorted(rising, moment, side="left")  # the first event that carries this record or a later one
        places = np.flatnonzero(placed.noted)
        last = np.searchsorted(places, later, side="left")
        at = np.clip(at, np.where(last > 0, places[np.maximum(last - 1, 0)] + 1, 0), later)
    numbers = placed.seq
    made: Ints = np.append(numbers, numbers[-1] + 1 if len(numbers) else 0)[at]
    return made


def tables(log: Log, placed: Placed, since: int = 0) -> dict[str, pl.DataFrame]:
    """Tables of their own beside the schema's: ``caches``, ``routing`` and ``parameters`` (what a module's weights are made of), where there is anything in them."""
    words = {"layer": pl.String, "name": pl.String, "dtype": pl.String, "elements": pl.Int64, "rows": pl.Int64, "size_bytes": pl.Int64}
    made = {"caches": _caches(log, placed, since), "routing": _routing(log, placed, since), "parameters": pl.DataFrame(log.parameters, schema=words, orient="row")}
    return {name: frame for name, frame in made.items() if frame.height}


def _routing(log: Log, placed: Placed, since: int) -> pl.DataFrame:
    """Tokens of the experts of each layer: ``seq`` (the event after the call) ``group`` (one forward) ``layer expert tokens experts``.

    ``expert`` -1: all together; -2: one of them, in order.
    """
    found = [call for call in log.routing if call.record >= since]
    names = ("group", "layer", "expert", "tokens", "experts")
    table = pl.DataFrame([tuple(getattr(call, name) for name in names) for call in found], schema={n: pl.String if n == "layer" else pl.Int64 for n in names}, orient="row")
    seq = _before_event(log, placed, [c.record for c in found], [c.clock for c in found]) if found else np.zeros(0, np.int64)
    return table.with_columns(pl.Series("seq", seq, dtype=pl.Int64)).select("seq", *names)


def _caches(log: Log, placed: Placed, since: int) -> pl.DataFrame:
    """What the KV caches held, and before which event."""
    found = [row for row in log.caches if row[0] >= since]
    seq = _before_event(log, placed, [row[0] for row in found], [row[1] for row in found]) if found else np.zeros(0, np.int64)
    return _kv_caches.table([(shape, padded) for _, _, shape, padded in found], seq)


def marks(log: Log, placed: Placed, seen: pl.DataFrame, start_us: float, end_us: float) -> pl.DataFrame:
    """Spans of phases (from their first event to their last) and steps within a window, as far as they are few enough to be looked at.

    ``seen`` is what ``contexts`` gave.
    """
    timed = seen.select("span", "layer", pl.col("phase").cast(pl.String), pl.Series("at", placed.clock_us - start_us) if seen.height else pl.lit(None, pl.Float64).alias("at")).drop_nulls("phase")
    spans = timed.group_by("span", "phase").agg(pl.col("at").min().alias("begin"), pl.col("at").max().alias("end"), pl.col("layer").is_not_null().any().alias("whole")).sort("begin")
    new = pl.col("whole") | (pl.col("phase") != pl.col("phase").shift()).fill_null(value=True)  # the loss outside modules goes on where the model ended
    spans = spans.group_by(new.cum_sum().alias("_run"), maintain_order=True).agg(pl.col("phase").first(), pl.col("begin").min(), pl.col("end").max())
    phases = schema.fill("marks", {"time_us": spans["begin"].clip(lower_bound=0.0), "end_us": spans["end"].clip(lower_bound=0.0), "kind": "phase", "name": spans["phase"]}, spans.height)
    ends = np.array([log.times_us[at - log.first] - start_us for at in log.ends() if log.first <= at < log.first + len(log.times_us)])
    ends = ends[(ends >= 0) & (ends <= end_us - start_us)]
    names = pl.Series([f"step {i}" for i in range(len(ends))], dtype=pl.String)
    begins = np.concatenate([[0.0], ends[:-1]]) if len(ends) else ends
    before = np.searchsorted(placed.clock_us, begins + start_us, side="right") - 1
    seq = pl.Series([int(placed.seq[at]) if at >= 0 else None for at in before.tolist()], dtype=pl.Int64)
    steps = schema.fill("marks", {"seq": seq, "time_us": pl.Series(begins), "end_us": pl.Series(ends), "kind": "step", "name": names}, len(ends))
    return pl.concat([part for part in (phases, steps) if part.height <= _MOST_MARKS] or [phases.clear()])


def _words(numbers: Ints, words: list[str | None]) -> pl.Series:
    known = {i: word for i, word in enumerate(words) if word is not None}
    return pl.Series(np.ascontiguousarray(numbers)).replace_strict(known, default=None, return_dtype=pl.String) if known else pl.Series([None] * len(numbers), dtype=pl.String)
