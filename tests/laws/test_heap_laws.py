"""Laws of the heap, over random legal lives of a small allocator that knows the truth about itself."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Allocator, allocators, capture

import nbmemprof as mp
from nbmemprof import heap
from nbmemprof.capture import Capture

pytestmark = pytest.mark.cost(1.5)

WAYS = ["addr", "alloc_seq", "free_seq", "done_seq", "requested_bytes", "size_bytes", "stack_id", "free_stack_id", "at_start"]


def rebuilt(made: Capture, **meta: object) -> Capture:
    """The capture that a source's tables give, with the allocations derived from the trace."""
    return heap.build({name: made.tables[name] for name in ("events", "segments", "blocks", "stacks", "marks")}, source="test", **meta)


def in_order(frame: pl.DataFrame, columns: list[str] = WAYS) -> pl.DataFrame:
    return frame.select(columns).sort(columns[:3], nulls_last=True)


@given(allocators())
@settings(max_examples=60, deadline=None)
def test_allocations_derived_from_the_trace_are_what_the_allocator_did(a: Allocator) -> None:
    truth = capture([a])
    derived = rebuilt(truth)
    assert in_order(derived.allocations).equals(in_order(truth.allocations))
    assert derived.allocations["size_exact"].all()
    assert derived.meta["warnings"] == []


@given(allocators(), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_a_trace_that_begins_in_mid_run_gives_the_same_allocations_with_a_picture_of_its_beginning(a: Allocator, share: float) -> None:
    first = int(share * len(a.trace))
    truth = capture([a], first)
    whole = rebuilt(capture([a]))
    opening = heap.blocks_at(whole, first - 1).with_columns(pl.lit(-5, pl.Int64).alias("snapshot_id"))
    tables = {name: truth.tables[name] for name in ("events", "segments", "stacks")} | {"blocks": pl.concat([opening, truth.blocks])}
    derived = heap.build(tables, source="test", start_snapshot_id=-5)
    told = ["addr", "alloc_seq", "done_seq", "size_bytes"]
    assert in_order(derived.allocations, told).equals(in_order(truth.allocations, told))


@given(allocators(), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_without_that_picture_a_size_is_right_or_said_to_be_a_bound(a: Allocator, share: float) -> None:
    truth = capture([a], int(share * len(a.trace)))
    derived = rebuilt(truth)
    both = derived.allocations.join(truth.allocations, on=["addr", "alloc_seq", "done_seq"], nulls_equal=True, suffix="_true")
    assert both.height == truth.allocations.height
    exact = both.filter("size_exact")
    assert exact["size_bytes"].equals(exact["size_bytes_true"].alias("size_bytes"))
    assert (both["size_bytes"] <= both["size_bytes_true"]).all()


@given(allocators(), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_blocks_tile_every_segment_at_any_moment(a: Allocator, share: float) -> None:
    made = rebuilt(capture([a]))
    seq = int(share * len(a.trace))
    blocks, segments = heap.blocks_at(made, seq), heap.segments_at(made, seq)
    for addr, size in segments.select("addr", "size_bytes").iter_rows():
        inside = blocks.filter((pl.col("addr") >= addr) & (pl.col("addr") < addr + size)).sort("addr")
        ends = inside["addr"].cast(pl.Int64) + inside["size_bytes"]
        assert inside["addr"][0] == addr
        assert ends[-1] == addr + size
        assert ends[:-1].to_list() == inside["addr"].cast(pl.Int64)[1:].to_list()


@given(allocators())
@settings(max_examples=40, deadline=None)
def test_the_heap_after_the_last_event_is_the_final_picture(a: Allocator) -> None:
    made = rebuilt(capture([a]))
    told = ["addr", "size_bytes", "state", "segment_addr", "pool"]
    assert heap.blocks_at(made, len(a.trace)).select(told).equals(made.blocks.select(told).sort("addr"))


@given(allocators())
@settings(max_examples=40, deadline=None)
def test_requested_le_allocated_le_active_le_reserved_at_every_event(a: Allocator) -> None:
    made = rebuilt(capture([a]))
    for curve in heap.curves(made):
        active = np.zeros(len(curve.seq), np.int64)
        for row in made.allocations.iter_rows(named=True):
            end = len(active) if row["done_seq"] is None else row["done_seq"]
            active[row["alloc_seq"] : end] += row["size_bytes"]
        assert (curve.live <= active).all()
        assert (active <= curve.reserved).all()
        assert (curve.requested <= active).all()
        assert int(curve.live.max(initial=0)) == a.peak


@given(allocators(device=0), allocators(device=1))
@settings(max_examples=20, deadline=None)
def test_two_devices_do_not_mix_although_their_addresses_are_the_same(a: Allocator, b: Allocator) -> None:
    both = mp.summary(rebuilt(capture([a, b])))
    for one in (a, b):
        row = both.filter(pl.col("device") == one.device)
        if one.trace:
            assert row["peak_allocated_bytes"].to_list() == [one.peak]
            assert row["end_allocated_bytes"].to_list() == [one.live]
            assert row["end_reserved_bytes"].to_list() == [one.reserved]


@given(allocators(max_ops=120), st.sampled_from(["category", "site", "pool", "stream", "total"]), st.integers(8, 60))
@settings(max_examples=60, deadline=None)
def test_a_reduced_timeline_keeps_its_maximum_and_its_last_value(a: Allocator, by: str, points: int) -> None:
    made = rebuilt(capture([a]))
    frame = mp.timeline(made, by=by, max_points=points, top=3)
    if by == "total":
        frame = frame.filter(pl.col("series") == "live")
    if frame.is_empty():
        assert not a.trace
        return
    sums = frame.group_by("seq", maintain_order=True).agg(pl.col("size_bytes").sum())["size_bytes"]
    assert sums.max() == a.peak
    assert sums[-1] == a.live


@given(allocators())
@settings(max_examples=30, deadline=None)
def test_sums_over_sites_and_categories_are_the_summary(a: Allocator) -> None:
    made = rebuilt(capture([a]))
    total = mp.summary(made)["peak_allocated_bytes"].sum()
    assert mp.breakdown(made)["size_bytes"].sum() == total
    assert mp.sites(made)["size_bytes"].sum() == total
    assert mp.breakdown(made, at="end")["size_bytes"].sum() == a.live == mp.sites(made)["end_bytes"].sum()


@given(allocators(), st.randoms())
@settings(max_examples=30, deadline=None)
def test_the_order_of_allocation_rows_does_not_change_answers(a: Allocator, random: object) -> None:
    made = rebuilt(capture([a]))
    order = list(range(made.allocations.height))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = Capture.build({n: f for n, f in made.tables.items() if n != "allocations"} | {"allocations": made.allocations[order]}, **made.meta)
    for question in (mp.summary, mp.breakdown):
        assert question(made).equals(question(shuffled))
    told = ["site", "size_bytes", "count", "end_bytes", "allocations"]
    assert mp.sites(made).select(told).equals(mp.sites(shuffled).select(told))
