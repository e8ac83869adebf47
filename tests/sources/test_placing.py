"""Events put beside an observer's log, on small literal traces."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof.sources import _placing
from nbmemprof.sources._observer import BACKWARD, FORWARD, NONE, OPTIMIZER


def log(*records: tuple[float, int, int, int], steps: list[tuple[int, int]] | None = None, owners: list[Any] | None = None) -> _placing.Log:
    """Records of time, phase, group and group of the backward (-1: none)."""
    time, phase, group, back = (np.array(column) for column in zip(*records, strict=True))
    zero = np.zeros(len(records), np.int64)
    return _placing.Log(0, time.astype(float), phase, group, back, zero, zero, (phase == FORWARD).astype(np.int64), steps or [], [None, "Net"], [None], owners or [])


def events(*rows: tuple[float, str, str | None, int | None], again: tuple[int, ...] = ()) -> pl.DataFrame:
    """Time, action, note, stack; numbered from 0."""
    time, action, note, stack = zip(*rows, strict=True)
    columns = {"seq": range(len(rows)), "clock_us": pl.Series(time, dtype=pl.Float64), "action": action, "note": pl.Series(note, dtype=pl.String), "stack_id": pl.Series(stack, dtype=pl.UInt32)}
    return pl.DataFrame(columns).with_columns(pl.col("stack_id").is_in(list(again)).alias("again"))


def phases(seen: pl.DataFrame) -> list[str | None]:
    found: list[str | None] = seen["phase"].cast(pl.String).to_list()
    return found


SILENT = log((0, NONE, 0, -1), (10, FORWARD, 1, -1), (20, NONE, 2, -1), (40, OPTIMIZER, 3, -1), (50, NONE, 4, -1), steps=[(4, 1)])


def test_what_has_no_note_and_no_python_frame_is_backwards_where_torch_does_not_tell() -> None:
    trace = events((11, "alloc", "1.1", 5), (25, "alloc", None, None), (26, "free_requested", None, None), (41, "alloc", "3.0", 6), (51, "alloc", "4.0", 7))
    seen = _placing.contexts(SILENT, _placing.place(SILENT, trace, notes=True))
    assert phases(seen) == ["forward", "backward", "backward", "optimizer", None]
    assert seen["layer"].cast(pl.String).to_list() == ["Net", None, None, None, None]
    assert seen["step"].to_list() == [0, 0, 0, 0, 1]
    assert seen["span"][1] == seen["span"][2]
    assert seen["span"].n_unique() == 4


def test_a_thread_without_a_note_that_runs_python_is_a_stranger() -> None:
    trace = events((11, "alloc", "1.1", 5), (25, "alloc", None, 8), (26, "free_requested", None, None), (41, "alloc", "3.0", 6))
    seen = _placing.contexts(SILENT, _placing.place(SILENT, trace, notes=True))
    assert phases(seen) == ["forward", None, None, "optimizer"]
    assert seen["span"][1] not in (1, 2, 3)


def test_the_note_decides_and_not_the_clock() -> None:
    """The clocks of trace and log may differ a little; an event in the forward stays there."""
    trace = events((9.5, "alloc", "1.1", 5), (20.5, "alloc", "1.1", 5), (20.1, "alloc", "2.0", 5))
    assert phases(_placing.contexts(SILENT, _placing.place(SILENT, trace, notes=True))) == ["forward", "forward", None]


def test_a_function_that_is_checkpointed_runs_again_within_backward() -> None:
    """No module tells; the stack does, and what is released between two such allocations is the recomputation's too."""
    rows = [(11, "alloc", "1.1", 5), (25, "alloc", None, None), (26, "alloc", None, 9), (27, "free_requested", None, None), (28, "alloc", None, 9), (29, "free_requested", None, None), (30, "alloc", None, None)]
    seen = _placing.contexts(SILENT, _placing.place(SILENT, events(*rows, again=(9,)), notes=True))
    assert phases(seen) == ["forward", "backward", "recompute", "recompute", "recompute", "backward", "backward"]


def test_an_owner_found_between_two_notes_stands_before_the_later_one() -> None:
    """By the clock it would be after the third event, which the note puts behind it."""
    found = log((0, NONE, 0, -1), (10, FORWARD, 1, -1), (20, NONE, 2, -1), owners=[(2, 22_000, 0, 0xA000, "gradients", "storage", None, None)])
    trace = events((11, "alloc", "1.1", 5), (12, "alloc", None, None), (21, "alloc", "2.0", 5))
    placed = _placing.place(found, trace, notes=True)
    assert _placing.owners(found, placed)["seq"].to_list() == [2]


def test_the_loss_outside_modules_belongs_to_the_forward_before_it() -> None:
    told = log((0, NONE, 0, -1), (10, FORWARD, 1, -1), (20, NONE, 2, -1), (30, BACKWARD, 3, 3), (40, NONE, 4, -1))
    assert told.phase.tolist() == [NONE, FORWARD, FORWARD, BACKWARD, NONE]
