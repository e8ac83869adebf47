"""Leaks, lifetimes, free lists and refusals on generated and real traces: sums hold, and known truths come back to the byte."""

from __future__ import annotations

import json

import make_snapshot
import polars as pl
import pytest
from hypothesis import given, settings
from strategies import Allocator, allocators, capture

import nbmemprof as mp
from nbmemprof.analyses.fragmentation import fragmentation
from nbmemprof.analyses.leaks import leaks
from nbmemprof.analyses.lifetimes import lifetimes
from nbmemprof.analyses.oom import oom
from nbmemprof.capture import Capture

EVENTS = (20_000, 40_000, 70_000, 100_000)


def check_seed(seed: int) -> None:
    """The leak that the generator planted, each device's: its line, its bytes, its blocks, and nothing else."""
    snap, truths = make_snapshot.build(EVENTS[seed % 4], seed=seed, devices=1 + (seed % 5 == 4))
    found = leaks(mp.load(snap))
    want = [(t["device"], site, size, t["leaked_blocks"]) for t in truths for site, size in t["leaked_bytes_by_site"].items()]
    assert sorted(found.select("device", "site", "leak_bytes", "leak_count").rows()) == sorted(want)
    assert found["bytes_per_iteration"].to_list() == [205] * len(want)  # 1024 bytes each fifth step


@pytest.mark.cost(1)
@pytest.mark.parametrize("seed", [0, 4])
def test_the_planted_leak_is_found_to_the_byte_and_nothing_else(seed):
    check_seed(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_twenty_planted_leaks_are_found_to_the_byte_and_nothing_else(seed):
    check_seed(seed)


@pytest.mark.parametrize("name", ["s01_plain_leak.pickle", "s02_protocol5.pickle", "s04_gzip.pickle.gz", "s08_torch20_history.pickle", "s17_two_devices_interleaved.pickle"])
def test_the_leaks_of_the_snapshot_files_are_as_their_manifest_says(fixtures, name):
    folder = fixtures / "snapshots"
    case = next(c for c in json.loads((folder / "manifest.json").read_text())["cases"] if c["file"] == name)
    devices = case["expect"].get("devices", {"0": case["expect"]})
    want = [(int(d), e["leak_site"], e["leak_bytes"], e["leak_count"], e["leak_bytes_per_iter"]) for d, e in devices.items() if "leak_site" in e]
    assert leaks(mp.load(folder / name)).select("device", "site", "leak_bytes", "leak_count", "bytes_per_iteration").rows() == want


def test_without_frames_no_site_is_made_up(fixtures):
    found = leaks(mp.load(fixtures / "snapshots" / "s10_no_frames_anywhere.pickle"))
    assert found["site"].null_count() == found["stack"].null_count() == found.height


def test_a_truncated_ring_still_shows_the_leak_with_its_older_blocks(fixtures):
    found = leaks(mp.load(fixtures / "snapshots" / "s13_ring_overflow_silent.pickle"))
    assert found.select("site", "leak_count", "bytes_per_iteration").rows() == [("train_demo.py:19", 60, 655360)]
    assert "truncated" in found["evidence"][0]


@pytest.mark.parametrize("name", ["torch-2.11-resnet50", "torch-2.11-streams", "torch-2.11-mempool", "torch-2.11-oom-max-split"])
def test_real_training_without_a_leak_has_none(fixtures, name):
    assert leaks(mp.load(fixtures / "snapshots" / f"{name}.pickle.gz")).is_empty()


def test_the_oom_with_three_reasons_is_told_as_its_manifest_says(fixtures):
    folder = fixtures / "snapshots"
    name = "s21_oom_with_private_pool.pickle"
    want = next(c for c in json.loads((folder / "manifest.json").read_text())["cases"] if c["file"] == name)["expect"]
    cap = mp.load(folder / name)
    row = oom(cap).row(0, named=True)
    assert (row["requested_bytes"], row["device_free_bytes"], row["site"]) == (want["oom_requested"], want["oom_device_free"], want["oom_site"])
    assert (row["free_bytes_in_list"], row["largest_free_bytes"]) == (want["free_outside_private"], want["largest_hole"])
    assert (row["private_free_bytes"], row["pending_bytes"]) == (want["free_in_private"], want["pending"])
    lists = fragmentation(cap, want["oom_requested"])
    assert not lists["would_fit"].any()
    assert dict(lists.group_by("private").agg(pl.col("free_bytes").sum()).iter_rows()) == {False: want["free_outside_private"], True: want["free_in_private"]}


@settings(max_examples=60, deadline=None)
@given(allocators())
@pytest.mark.cost(1.4)
def test_free_lists_add_up_to_what_is_reserved(a: Allocator):
    lists = fragmentation(a.capture(), 100_000)
    assert (lists["active_bytes"] + lists["free_bytes"]).sum() == lists["reserved_bytes"].sum() == a.reserved
    assert lists["allocated_bytes"].sum() == a.live
    for row in lists.iter_rows(named=True):
        assert row["pinned_bytes"] + row["releasable_bytes"] == row["free_bytes"]
        assert min(row["pinned_bytes"], row["releasable_bytes"], row["rounding_bytes"]) >= 0
        assert row["largest_free_bytes"] <= row["free_bytes"]
        assert row["would_fit"] == (not row["private"] and row["pool"] == "small" and row["largest_free_bytes"] >= row["rounded_bytes"])
        assert (row["ratio"] is None) == (row["free_bytes"] == 0)


@settings(max_examples=40, deadline=None)
@given(allocators(expandable=False))
@pytest.mark.cost(0.9)
def test_what_is_releasable_is_what_empty_cache_returns(a: Allocator):
    """In the default pool; private pools wait for their last user."""
    lists = fragmentation(a.capture())
    before = a.reserved
    a.empty_cache()
    assert lists.filter(~pl.col("private"))["releasable_bytes"].sum() == before - a.reserved


@settings(max_examples=40, deadline=None)
@given(allocators(max_ops=40), allocators(max_ops=40, device=1))
@pytest.mark.cost(1.8)
def test_lifetimes_hold_all_that_is_live_and_leaks_no_more(a: Allocator, b: Allocator):
    cap = capture([a, b])
    rows = lifetimes(cap)
    assert rows["live_bytes"].sum() == a.live + b.live
    assert rows["count"].sum() == cap.allocations.height
    found = leaks(cap)
    assert found["leak_bytes"].sum() <= a.live + b.live
    growing = rows.filter(pl.col("class") == "growing")
    assert growing.height == found.height
    assert growing["live_bytes"].sum() >= found["leak_bytes"].sum()


@settings(max_examples=40, deadline=None)
@given(allocators(max_ops=80))
@pytest.mark.cost(0.6)
def test_each_refusal_has_a_row_with_the_bytes_asked_for(a: Allocator):
    refusals = [e for e in a.trace if e["action"] == "oom"]
    rows = oom(a.capture())
    assert rows["requested_bytes"].to_list() == [e["size"] for e in refusals]
    assert rows["device_free_bytes"].to_list() == [e["device_free"] for e in refusals]
    assert (rows["largest_free_bytes"] < rows["requested_bytes"]).all()  # else it would have been served


@settings(max_examples=20, deadline=None)
@given(allocators(max_ops=50))
@pytest.mark.cost(1.3)
def test_the_order_of_rows_changes_nothing(a: Allocator):
    cap = a.capture()
    mixed = Capture.build({n: cap.tables[n].sample(fraction=1, shuffle=True, seed=1) for n in ("allocations", "segments", "blocks", "stacks", "marks")} | {"events": cap.events})
    for question in (leaks, lifetimes, fragmentation):
        assert question(mixed).equals(question(cap))
