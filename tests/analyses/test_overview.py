"""summary, breakdown, sites and timeline on frames written by hand."""

from __future__ import annotations

import polars as pl
import pytest
from strategies import Allocator, capture, frames

import nbmemprof as mp
from nbmemprof import heap, schema
from nbmemprof.analyses._sites import is_user_file, site_of_stacks
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

MIB = 1 << 20
STEP, MAIN = "train.py:20 step", "train.py:90 main"


def trained() -> Capture:
    """4 MiB of weights, then twice 8 MiB of activations at once, 1 MiB kept."""
    a = Allocator()
    a.malloc(4 * MIB, frames("model.py:5 build", MAIN))
    for _ in range(2):
        acts = [a.malloc(4 * MIB, frames("site-packages/torch/nn/functional.py:9 linear", "model.py:31 forward", STEP, MAIN)) for _ in range(2)]
        for block in acts:
            a.free(block)
    a.malloc(MIB, frames("train.py:22 step", MAIN))
    made = capture([a])
    return heap.build(
        {n: made.tables[n] for n in ("events", "segments", "blocks", "stacks")}, source="test", capacity_bytes={"0": 100 * MIB}, outside_bytes={"0": 7}
    )


def test_summary_tells_peak_and_end() -> None:
    row = mp.summary(trained()).row(0, named=True)
    assert row["device"] == 0
    assert row["peak_allocated_bytes"] == 12 * MIB == row["peak_requested_bytes"]
    assert row["end_allocated_bytes"] == 5 * MIB
    assert (row["start_allocated_bytes"], row["end_reserved_bytes"], row["segments"], row["live_blocks"]) == (0, 22 * MIB, 2, 2)
    assert (row["capacity_bytes"], row["outside_bytes"], row["retries"], row["unknown_events"], row["inexact_bytes"]) == (100 * MIB, 7, None, 0, 0)


def test_a_picture_without_events_has_no_peak() -> None:
    made = trained()
    row = mp.summary(heap.build({n: made.tables[n] for n in ("segments", "blocks")}, source="test")).row(0, named=True)
    assert row["peak_allocated_bytes"] is None
    assert row["end_allocated_bytes"] == 5 * MIB == row["unrecorded_bytes"]


def test_a_peak_that_the_source_kept_counts_above_the_events_that_are_left() -> None:
    made = trained()
    picture = made.blocks.with_columns(pl.lit(-1, pl.Int64).alias("snapshot_id"))
    tables = {n: made.tables[n] for n in ("events", "segments", "stacks")} | {"blocks": pl.concat([picture, made.blocks])}
    kept = heap.build(tables, source="test", peaks={"0": {"peak_allocated_bytes": 99 * MIB, "peak_reserved_bytes": 120 * MIB, "snapshot_id": -1, "seq": None}})
    row = mp.summary(kept).row(0, named=True)
    assert (row["peak_allocated_bytes"], row["peak_reserved_bytes"]) == (99 * MIB, 120 * MIB)
    assert mp.breakdown(kept)["size_bytes"].sum() == 5 * MIB  # what the picture holds
    assert mp.sites(kept)["size_bytes"].sum() == 5 * MIB


def test_breakdown_at_the_peak_at_the_end_and_at_a_time() -> None:
    made = trained()
    assert mp.breakdown(made).select("device", "category", "size_bytes", "share", "evidence").rows() == [(0, "unknown", 12 * MIB, 1.0, "none")]
    assert mp.breakdown(made, at="end")["size_bytes"].to_list() == [5 * MIB]
    assert mp.breakdown(made, at=3.0)["size_bytes"].to_list() == [4 * MIB]
    for at in (-1.0, 1e9, float("nan")):
        with pytest.raises(mp.NbmemprofError, match=r"is outside the recording, which goes from 0 to \d+ µs\. Give a time in it"):
            mp.breakdown(made, at=at)


@pytest.mark.parametrize("at", ["middle", None, True])
def test_what_is_no_moment_is_refused(at: object) -> None:
    with pytest.raises(NbmemprofError, match="not a moment"):
        mp.breakdown(trained(), at=at)  # type: ignore[arg-type]


def test_sites_name_the_innermost_line_of_the_user() -> None:
    frame = mp.sites(trained())
    assert frame.select("site", "function", "size_bytes", "count", "end_bytes", "allocations", "allocated_bytes").rows() == [
        ("model.py:31", "forward", 8 * MIB, 2, 0, 4, 16 * MIB),
        ("model.py:5", "build", 4 * MIB, 1, 4 * MIB, 1, 4 * MIB),
        ("train.py:22", "step", 0, 0, MIB, 1, MIB),
    ]
    assert mp.sites(trained(), top=1).height == 1
    assert frame["kept_bytes"].to_list() == frame["end_bytes"].to_list()  # all of it was made in the window


def stacks(*rows: tuple[int, int, str, int | None]) -> pl.DataFrame:
    return schema.fill(
        "stacks",
        {
            "stack_id": [r[0] for r in rows],
            "depth": [r[1] for r in rows],
            "function": ["f"] * len(rows),
            "filename": [r[2] for r in rows],
            "line": [r[3] for r in rows],
        },
    )


def test_files_of_one_name_are_told_apart_by_their_folders() -> None:
    found = site_of_stacks(stacks((0, 0, "a/x/net.py", 1), (1, 0, "b/x/net.py", 1), (2, 0, "other.py", 2)))
    assert found.sort("stack_id")["site"].to_list() == ["a/x/net.py:1", "b/x/net.py:1", "other.py:2"]


def test_a_cell_is_named_by_its_number_and_a_library_only_stack_by_its_innermost_frame() -> None:
    found = site_of_stacks(
        stacks(
            (0, 0, "<ipython-input-7-abc>", 3),
            (1, 0, "lib/python3.12/site-packages/torch/optim/adam.py", 9),
            (1, 1, "lib/python3.12/runpy.py", 1),
            (2, 0, "q.py", None),
        )
    )
    assert found.sort("stack_id").select("site", "user").rows() == [("In[7]:3", True), ("adam.py:9", False), ("q.py", True)]


@pytest.mark.parametrize(
    ("name", "user"),
    [
        ("train.py", True),
        ("In[3]", True),
        ("/home/me/torch_things/a.py", True),
        ("/usr/lib/python3.11/threading.py", False),
        ("/x/site-packages/y/z.py", False),
        ("torch/nn/functional.py", False),
        ("??", False),
        ("", False),
        ("<frozen importlib._bootstrap>", False),
        ("/build/aten/src/ATen/Context.cpp", False),
    ],
)
def test_which_files_are_the_users(name: str, user: bool) -> None:
    assert is_user_file(name) is user


def test_a_timeline_shows_every_event_of_a_short_capture_and_stacks_to_the_live_bytes() -> None:
    frame = mp.timeline(trained(), by="site")
    sums = frame.group_by("seq", maintain_order=True).agg(pl.col("size_bytes").sum())
    assert sums.height == trained().events.height + 1
    assert sums["size_bytes"].max() == 12 * MIB
    assert frame["series"].unique().sort().to_list() == ["model.py:31", "model.py:5", "train.py:22"]
    assert mp.timeline(trained(), by="site", top=1)["series"].unique().sort().to_list() == ["(other)", "model.py:31"]


def test_a_window_of_the_timeline_is_a_part_of_the_whole() -> None:
    whole = mp.timeline(trained(), by="total")
    part = mp.timeline(trained(), by="total", start_us=9.0, end_us=21.0)
    assert part.equals(whole.filter((pl.col("time_us") >= 9.0) & (pl.col("time_us") <= 21.0) & pl.col("seq").is_not_null()))


def test_an_empty_capture_gives_empty_frames_with_their_columns() -> None:
    nothing = Capture.build({})
    assert mp.summary(nothing).height == mp.breakdown(nothing).height == mp.sites(nothing).height == mp.timeline(nothing).height == 0
    assert "size_bytes" in mp.timeline(nothing).columns


def test_wrong_options_of_the_timeline_are_refused() -> None:
    with pytest.raises(NbmemprofError, match=r"by='colour'.*category"):
        mp.timeline(trained(), by="colour")
    with pytest.raises(NbmemprofError, match="max_points=2"):
        mp.timeline(trained(), max_points=2)


def test_counters_alone_make_a_summary() -> None:
    counters = {"0": {"start_allocated_bytes": 5, "end_allocated_bytes": 7, "end_reserved_bytes": 20}}
    made = heap.build({}, source="torch_history", counters=counters, peaks={"0": {"peak_allocated_bytes": 9, "peak_reserved_bytes": 30}})
    row = mp.summary(made).row(0, named=True)
    names = ["device", "peak_allocated_bytes", "peak_reserved_bytes", "start_allocated_bytes", "end_allocated_bytes", "end_reserved_bytes", "events"]
    assert [row[n] for n in names] == [0, 9, 30, 5, 7, 20, 0]
