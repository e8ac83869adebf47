"""Memory that is alive though nobody holds it has a class of its own, told with what ``holders`` found."""

from __future__ import annotations

import gc

import polars as pl
import pytest
from stories import KEEP, train
from strategies import KIB, Allocator, capture, frames

import nbmemprof as mp
from nbmemprof.analyses.leaks import leaks
from nbmemprof.analyses.lifetimes import lifetimes


class Node:
    pass


def in_a_cycle(size: int) -> None:
    import torch

    node = Node()
    node.me, node.tensor = node, torch.empty(size, dtype=torch.uint8)


@pytest.mark.cost(1.5)
def test_what_only_cycles_hold_is_orphaned_and_what_a_name_holds_is_not():
    import torch

    kept = []
    gc.collect()
    gc.disable()
    try:
        with mp.record("torch_cpu") as window:
            for _ in range(6):
                in_a_cycle(4096)
                kept.append(torch.empty(512, dtype=torch.uint8))
                torch.empty(64)
            in_a_cycle(777)
        held = mp.holders(device="all")
    finally:
        gc.enable()
    alone, known = mp.leaks(window.capture), mp.leaks(window.capture, held)
    assert set(alone["class"]) == {"growing"}
    assert alone.height == 2
    told = {(row["class"], row["leak_bytes"], row["bytes_per_iteration"], row["iterations"]) for row in known.iter_rows(named=True)}
    assert told == {("orphaned", 6 * 4096, 4096, 6), ("growing", 6 * 512, 512, 6), ("orphaned", 777, None, None)}
    assert "6 of its live blocks are garbage in reference cycles until gc.collect()" in known.filter(pl.col("leak_bytes") == 6 * 4096)["evidence"][0]
    classes = mp.lifetimes(window.capture, held).filter(pl.col("live_bytes") > 0)
    assert {(str(c), b) for c, b in classes.select("class", "live_bytes").iter_rows()} == {("orphaned", 6 * 4096), ("growing", 6 * 512), ("orphaned", 777)}
    gc.collect()
    assert set(mp.leaks(window.capture, mp.holders(device="all"))["class"]) == {"growing"}, "what is gone by now is not told"


def story() -> Allocator:
    a = Allocator()
    train(a, 6, lambda step: a.malloc(8 * KIB, KEEP))
    a.malloc(3 * KIB, frames("train.py:99 main"))
    return a


def held_by(made, kinds: dict[int, str], size_of=lambda size: size) -> pl.DataFrame:
    """Every live block, held by a variable, or as told by its size."""
    live = made.allocations.filter(pl.col("free_seq").is_null())
    rows = [(device, addr, size_of(size), kinds.get(size, "variable")) for device, addr, size in live.select("device", "addr", "requested_bytes").iter_rows()]
    return pl.DataFrame(rows, schema={"device": pl.Int64, "addr": pl.UInt64, "size_bytes": pl.Int64, "kind": pl.String}, orient="row")


@pytest.mark.parametrize(("kind", "word"), [("cycle", "orphaned"), ("native", "orphaned"), ("variable", "growing"), ("graph", "growing")])
def test_growth_that_only_code_in_c_holds_is_orphaned_too(kind, word):
    made = capture([story()])
    found = leaks(made, held_by(made, {8 * KIB: kind}))
    assert found["class"].to_list() == [word]
    assert found["leak_bytes"].to_list() == [48 * KIB]
    assert ("C++ code does" in found["evidence"][0]) == (kind == "native")


@pytest.mark.parametrize(("kind", "word"), [("cycle", "orphaned"), ("native", "temporary")])
def test_a_single_block_is_orphaned_in_a_cycle_alone(kind, word):
    """A library's workspace has no holder either: that it is there is no trouble."""
    made = capture([story()])
    held = held_by(made, {3 * KIB: kind})
    assert [row["leak_bytes"] for row in leaks(made, held).iter_rows(named=True) if row["class"] == "orphaned"] == ([3 * KIB] if word == "orphaned" else [])
    assert lifetimes(made, held).filter(pl.col("size_max_bytes") == 3 * KIB)["class"].to_list() == [word]


def test_an_address_that_was_given_out_again_is_told_by_its_size():
    made = capture([story()])
    assert leaks(made, held_by(made, {8 * KIB: "cycle"}, lambda size: size - 512))["class"].to_list() == ["growing"]


def test_one_holder_with_a_name_is_enough():
    made = capture([story()])
    held = held_by(made, {8 * KIB: "cycle"})
    both = pl.concat([held, held.with_columns(kind=pl.lit("variable"))])
    assert leaks(made, both).select("class", "evidence").rows() == leaks(made).select("class", "evidence").rows()


def test_a_frame_that_is_something_else_is_refused():
    with pytest.raises(mp.NbmemprofError, match=r"no column 'addr'.*a row a tensor"):
        leaks(capture([story()]), mp.holders(device="cpu", by="holder"))
