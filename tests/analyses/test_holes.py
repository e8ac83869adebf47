"""How fragmentation came about: the lines of a segment in their order, what stays, and the sentence."""

from __future__ import annotations

import polars as pl
import pytest
from strategies import Allocator, frames

import nbmemprof as mp

MIB = 1 << 20
ARENA, PARTS, KEEP = frames("train.py:1 arena"), frames("train.py:2 parts"), frames("train.py:3 keep")


def chequered() -> mp.Capture:
    """A segment of 40 MiB, freed; two blocks cut from it, the first freed again; a small one kept elsewhere."""
    a = Allocator()
    arena = a.malloc(40 * MIB, ARENA)
    a.free(arena)
    first, second = a.malloc(15 * MIB, PARTS), a.malloc(10 * MIB, KEEP)
    a.free(first)
    assert second
    return mp.load(a.snapshot())


def test_lines_come_in_the_order_in_which_they_used_the_segment():
    rows = mp.holes(chequered())
    assert rows["site"].to_list() == ["train.py:1", "train.py:2", "train.py:3"]
    assert rows["step"].to_list() == [0, 1, 2]
    assert rows["stays_count"].to_list() == [0, 0, 1]
    assert rows["size_bytes"].to_list() == [40 * MIB, 15 * MIB, 10 * MIB]
    assert rows["first_seq"].is_sorted()
    assert set(rows["free_bytes"]) == {30 * MIB}
    assert rows["story"][0] == (
        "A segment of 40 MiB: train.py:1 made 1 block (40 MiB in all), all freed again; then train.py:2 made 1 block (15 MiB in all), all freed again; "
        "then train.py:3 made 1 block (10 MiB in all), of which 1 block (10 MiB) stay. 30 MiB lie in 2 holes between what stays."
    )


def test_a_block_that_waits_for_another_stream_neither_went_nor_stays():
    a = Allocator()
    a.free(a.malloc(40 * MIB, ARENA))
    first, second = a.malloc(15 * MIB, PARTS), a.malloc(10 * MIB, KEEP)
    a.free(first)
    a.free(second, pending=True)
    cap = mp.load(a.snapshot())
    row = mp.holes(cap).filter(pl.col("site") == "train.py:3").row(0, named=True)
    assert (row["count"], row["stays_count"], row["pending_count"], row["pending_bytes"]) == (1, 0, 1, 10 * MIB)
    assert "train.py:3 made 1 block (10 MiB in all), of which 1 block (10 MiB) freed but waiting for another stream." in row["story"]


def test_small_blocks_that_wait_are_no_tensors_that_stay():
    a = Allocator()
    a.free(a.malloc(40 * MIB, ARENA))
    first, second = a.malloc(38 * MIB, PARTS), a.malloc(1 * MIB + 512, KEEP)
    a.free(first)
    a.free(second, pending=True)
    found = mp.advise(mp.load(a.snapshot()), replay=False).filter(rule="survivors").row(0, named=True)
    assert found["finding"].startswith("1 freed block of train.py:3, 2 MiB in all, still waits for another stream and holds 38 MiB")
    assert "Synchronize that stream" in found["action"]


def test_a_heap_without_holes_has_no_story():
    a = Allocator()
    a.malloc(20 * MIB, KEEP)
    assert mp.holes(mp.load(a.snapshot())).is_empty()
    assert mp.holes(mp.Capture.build({})).is_empty()


def test_the_verbs_print_findings_stories_and_pools(capsys):
    from nbmemprof.views import advice

    text = advice.findings(chequered(), replay=False)
    assert "How the largest holes came about" in text
    assert "train.py:2 made 1 block" in text
    a = Allocator()
    for _ in range(30):
        a.free(a.malloc(12 * MIB, PARTS))
        a.empty_cache()
    told = advice.pools(mp.load(a.snapshot()))
    assert "train.py:2" in told
    assert "buffer" in told
    assert "No line would gain" in advice.pools(mp.Capture.build({}))


@pytest.mark.cost(0.6)
def test_the_magic_s_verbs_are_there(capsys):
    from nbmemprof.flags import verbs

    assert {"advise", "pools"} <= set(verbs())
