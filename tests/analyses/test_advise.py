"""Advice: every trouble that the rules prove is found where it is and only there; savings are those of the model."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
from modelled import MIB, chequered, fenced, graphs, loaded, waited
from strategies import Allocator, frames

import nbmemprof as mp
from nbmemprof.allocator import Device
from nbmemprof.analyses import _trials
from nbmemprof.analyses.advise import advise
from nbmemprof.capture import Capture

TRAIN, KEEP = frames("train.py:12 step"), frames("cache.py:9 keep")


def rules(cap: Capture, **options) -> dict[str, dict]:
    return {row["rule"]: row for row in advise(cap, **({"replay": False} | options)).iter_rows(named=True)}


def with_conf(conf: str, **meta) -> Capture:
    a = Allocator()
    a.malloc(MIB, TRAIN)
    cap = mp.load(a.snapshot())
    return Capture.build(dict(cap.tables.items()), **(cap.meta | {"conf": conf, "settings": None, "source": "torch_history"} | meta))


# ---------------------------------------------------------------- holes that max_split_size fences
def test_max_split_size_with_expandable_segments_leaks_and_either_alone_does_not():
    row = rules(loaded(fenced()))["fenced_holes"]
    assert row["saving_bytes"] == 20 * int(136.5 * MIB)
    assert "20 free holes that requests below 128 MiB may not use" in row["finding"]
    for conf in ("max_split_size_mb:128", "expandable_segments:True"):
        assert "fenced_holes" not in rules(loaded(fenced(conf)))


@pytest.mark.cost(0.5)
def test_the_saving_of_a_setting_is_the_difference_of_two_models():
    found = rules(loaded(fenced()), replay=True)["settings"]
    before = fenced().stats()["reserved_bytes.all.peak"]
    after = min(
        fenced(conf).stats()["reserved_bytes.all.peak"] for conf in ("", "expandable_segments:True", "max_split_size_mb:128", "roundup_power2_divisions:8")
    )
    assert found["saving_bytes"] == before - after
    assert found["origin"] == "replayed"
    assert "less at the peak" in found["finding"]


@pytest.mark.cost(0.5)
def test_a_saving_is_of_reserved_bytes_pages_that_are_free_included():
    """8 x 16 MiB freed, then 4 x 32: 256 MiB in segments; 140 in pages of 20, of which 128 are in use."""
    device = Device()
    for addr in [device.malloc(16 * MIB) for _ in range(8)]:
        device.free(addr)
    for _ in range(4):
        device.malloc(32 * MIB)
    row = rules(loaded(device), replay=True)["settings"]
    assert row["finding"].startswith("expandable_segments:True would have reserved 116 MiB less at the peak (140 MiB instead of 256 MiB)")
    assert row["saving_bytes"] == 116 * MIB


@pytest.mark.cost(0.5)
def test_where_nothing_helps_it_is_said_with_what_was_tried():
    device = Device()
    for _ in range(3):
        device.malloc(40 * MIB)
    row = rules(loaded(device), replay=True)["settings"]
    assert (row["finding"], row["saving_bytes"]) == ("No other allocator setting would have lowered the peak of reserved memory.", 0)
    assert "expandable_segments:True" in row["evidence"]


def test_beyond_the_bound_nothing_is_replayed_and_it_is_said(monkeypatch):
    monkeypatch.setattr(_trials, "MOST_EVENTS", 10)
    row = rules(loaded(fenced()), replay=True)["settings"]
    assert "not replayed: the trace has 182 events, more than 10" in row["finding"]
    assert row["saving_bytes"] is None


@pytest.mark.cost(0.5)
def test_a_refused_request_names_the_setting_that_would_have_served_it():
    row = rules(loaded(chequered()), replay=True)["refused"]
    assert row["finding"] == "The request for 256 MiB that was refused would have been served with expandable_segments:True."
    assert "would fit if the free pieces were adjacent" in row["evidence"]
    assert "refused" not in rules(loaded(chequered("expandable_segments:True")), replay=True)


def test_no_line_says_to_leave_a_setting_that_another_line_says_to_change():
    found = rules(loaded(chequered()), replay=True)
    assert found["refused"]["action"].startswith("Set PYTORCH_CUDA_ALLOC_CONF")
    assert found["settings"]["action"] == "Change it for what was refused, not for the peak."


# ---------------------------------------------------------------- private pools
def test_pools_of_graphs_shall_be_shared_largest_first():
    row = rules(loaded(graphs()))["private_pools"]
    assert "4 private pools of CUDA graphs reserve 960 MiB, of which 480 MiB are allocated" in row["finding"]
    assert "largest batch first" in row["action"]
    assert row["saving_bytes"] == (960 - 512) * MIB  # what the largest needs is enough for all


def test_the_saving_of_one_shared_pool_is_what_the_model_saves():
    apart = graphs().stats()["reserved_bytes.all.current"]
    device, pool = Device(), None
    for n in (8, 4, 2, 1):
        device.malloc(n * 32 * MIB)
        with device.capture(pool) as pool:
            a = device.malloc(n * 32 * MIB)
            b = device.malloc(n * 32 * MIB)
            device.free(a)
            device.malloc(n * 32 * MIB)
            device.free(b)
        device.empty_cache()
    assert apart - device.stats()["reserved_bytes.all.current"] == rules(loaded(graphs()))["private_pools"]["saving_bytes"]
    assert "private_pools" not in rules(loaded(device))


# ---------------------------------------------------------------- late frees
def test_a_refusal_beside_a_fitting_block_is_a_free_that_came_too_late():
    row = rules(loaded(waited()))["late_frees"]
    assert "50 MiB" in row["finding"]
    assert "fitting block of 80 MiB" in row["finding"]
    assert "record_stream" in row["evidence"]
    assert "late_frees" not in rules(loaded(chequered()))


# ---------------------------------------------------------------- limit and expandable segments
def needless() -> Device:
    """Limit 45: 3 MiB freed; 25 MiB need one more page of 20, but 20 + 26 is more than 45."""
    device = Device("expandable_segments:True", limit_bytes=45 * MIB)
    device.free(device.malloc(3 * MIB))
    device.malloc(25 * MIB)
    return device


def test_a_flush_that_the_nominal_size_caused_is_needless():
    assert needless().stats()["num_alloc_retries"] == 1
    row = rules(loaded(needless(), limit_bytes=45 * MIB))["limit_flushes"]
    assert "emptied the cache once though the new pages would have fitted" in row["finding"]
    assert "limit_flushes" not in rules(loaded(needless(), limit_bytes=39 * MIB))  # then the pages would not have fitted
    assert "limit_flushes" not in rules(loaded(needless()))  # no limit is told


# ---------------------------------------------------------------- settings without effect
@pytest.mark.cost(0.5)
def test_a_setting_that_refuses_less_is_proposed():
    """Holes of two neighbouring segments, twice too small; as pages they are one."""
    device = Device(limit_bytes=45 * MIB)
    kept = [device.malloc(9 * MIB) for _ in range(4)]
    device.free(kept[1])
    device.free(kept[2])
    for _ in range(3):
        with contextlib.suppress(mp.OutOfMemoryError):
            device.malloc(16 * MIB)
    row = rules(mp.load(device.snapshot()), replay=True)["refusals"]
    assert "would have refused none of the requests, instead of 3" in row["finding"]
    assert row["origin"] == "replayed"


def test_scattered_memory_is_named_without_a_replay():
    device = Device(limit_bytes=45 * MIB)
    kept = [device.malloc(9 * MIB) for _ in range(4)]
    device.free(kept[1])
    device.free(kept[2])
    with contextlib.suppress(mp.OutOfMemoryError):
        device.malloc(16 * MIB)
    cap = mp.load(device.snapshot())
    row = rules(cap)["scattered"]
    assert "Fragmentation refused the request for 16 MiB: 22 MiB lay free in 3 pieces, the largest 11 MiB." in row["finding"]
    assert "not replayed yet" in row["action"]
    assert "scattered" not in rules(cap, replay=True)


def test_what_was_given_back_may_be_the_collector_s_doing():
    """A file without a limit, with segments given back: whether the collector ran can't be told, so nothing is."""
    device = Device("garbage_collection_threshold:0.5", limit_bytes=100 * MIB)
    for size in (20, 14, 24, 30):
        device.free(device.malloc(size * MIB))
    device.malloc(90 * MIB)
    cap = mp.load(device.snapshot())
    assert (cap.events["action"] == "segment_free").any()
    assert "collection_that_never_runs" not in rules(cap)


def test_collection_without_a_limit_never_runs():
    conf = "garbage_collection_threshold:0.8"
    assert "never runs without a memory limit." in rules(with_conf(conf))["collection_that_never_runs"]["finding"]
    assert "this file tells of none" in rules(with_conf(conf, source="torch_snapshot"))["collection_that_never_runs"]["finding"]
    assert "collection_that_never_runs" not in rules(with_conf(conf, limit_bytes=64 * MIB))
    assert "frees nothing" in rules(with_conf(conf + ",expandable_segments:True", limit_bytes=64 * MIB))["collection_that_never_runs"]["finding"]


@pytest.mark.parametrize(
    ("conf", "words"),
    [
        ("backend:cudaMallocAsync,expandable_segments:True", "expandable_segments has no effect with backend:cudaMallocAsync"),
        ("backend:cudaMallocAsync,max_split_size_mb:64,roundup_power2_divisions:[256:1,>:4]", "max_split_size_mb, roundup_power2_divisions have no effect"),
        ("no_such_option:1", "can't have been in force: torch refuses it"),
        ("max_non_split_rounding_mb:64", "no effect without max_split_size_mb"),
    ],
)
def test_settings_that_are_ignored_are_named(conf, words):
    assert words in rules(with_conf(conf))["ignored_settings"]["finding"]


def test_settings_that_another_call_replaced_are_named():
    cap = with_conf("expandable_segments:True", settings={"expandable_segments": False})
    row = rules(cap)["ignored_settings"]
    assert row["evidence"] == "expandable_segments: True written, False in force."


@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "backend:cudaMallocAsync", "backend:native", "max_non_split_rounding_mb:64,max_split_size_mb:64"]
)
def test_settings_that_hold_are_not_complained_about(conf):
    assert "ignored_settings" not in rules(with_conf(conf))


# ---------------------------------------------------------------- survivors
def test_a_small_tensor_that_holds_a_segment_is_named_with_its_line():
    a = Allocator()
    blocks = [a.malloc(512, KEEP if i == 3 else TRAIN) for i in range(8)]
    for i, block in enumerate(blocks):
        if i != 3:
            a.free(block)
    row = rules(mp.load(a.snapshot()))["survivors"]
    assert row["finding"] == "This 512 B tensor of cache.py:9 holds 2 MiB that empty_cache() can't give back."
    assert row["saving_bytes"] == 2 * MIB - 512


def test_two_lines_in_one_segment_do_not_hold_it_twice():
    a = Allocator()
    big = a.malloc(200 * MIB, TRAIN)
    a.free(big)
    a.malloc(2 * MIB, TRAIN)
    a.malloc(3 * MIB, KEEP)
    found = advise(mp.load(a.snapshot()), replay=False)
    assert found.filter(rule="survivors")["saving_bytes"].sum() == 195 * MIB


def test_a_full_segment_has_no_survivor():
    a = Allocator()
    a.malloc(20 * MIB, TRAIN)
    assert rules(mp.load(a.snapshot())) == {}


# ---------------------------------------------------------------- the frame
def test_without_a_device_or_anything_at_all_there_is_no_advice_and_the_columns_are_the_same():
    assert advise(Capture.build({})).is_empty()
    assert advise(Capture.build({})).schema == advise(loaded(graphs()), replay=False).schema


@pytest.mark.cost(0.6)
def test_the_cheap_part_costs_little_at_a_first_look():
    device = Device()
    live = [device.malloc(n) for n in (512, 70_000, 3 * MIB, 40 * MIB) for _ in range(20)]
    for i in range(3000):
        device.free(live[i % len(live)])
        live[i % len(live)] = device.malloc((512, 70_000, 3 * MIB, 40 * MIB)[i * 7 % 4])
    cap = loaded(device)
    advise(cap, replay=False)
    took = []
    for _ in range(5):
        start = time.process_time()
        advise(cap, replay=False)
        took.append(time.process_time() - start)
    assert min(took) < 0.15  # about 0.02 s on an idle machine


def test_settings_that_were_changed_at_run_time_give_no_ground_to_compare_with():
    device = Device("expandable_segments:True")
    device.set_conf("max_split_size_mb:128")
    device.malloc(40 * MIB)
    snap = device.snapshot()
    snap["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = ""
    row = rules(mp.load(snap), replay=True)["settings"]
    assert "expandable_segments, max_split_size in force at the end are not as its configuration text says" in row["finding"]
    assert row["saving_bytes"] is None


@pytest.mark.cost(1.2)
def test_strange_and_damaged_snapshots_get_an_answer():
    """Names with markup, unknown words, lost events, sizes of zero: advice or none, no error; the replay's word is always there."""
    answered = 0
    for path in sorted((Path(__file__).parents[1] / "fixtures/snapshots").glob("s*.pickle")):
        try:
            cap = mp.load(path)
        except mp.NbmemprofError:
            continue  # refused when loaded
        found = advise(cap)
        assert found.filter(rule="settings").height >= 1, path.name
        assert (found["saving_bytes"].drop_nulls() >= 0).all(), path.name
        assert not mp.pools(cap).is_empty(), path.name
        answered += 1
    assert answered >= 10


def test_a_model_that_ends_in_an_error_is_no_excuse():
    device = Device(limit_bytes=10 * MIB)
    with contextlib.suppress(mp.OutOfMemoryError):
        device.malloc(20 * MIB)
    assert "rule" in advise(loaded(device)).columns


@pytest.mark.parametrize(("refused", "words"), [(20, "That one request is larger than all the room"), (5, "a smaller batch")])
def test_what_does_not_fit_is_asked_for_in_parts_where_one_request_alone_is_too_large(refused, words):
    needs = {"peak_allocated_bytes": 24 << 30, "refused_bytes": refused << 30, "op": "empty"}
    cap = loaded(chequered(), needs=needs, capacity_bytes=16 << 30)
    (row,) = [row for row in advise(cap).to_dicts() if row["rule"] == "does_not_fit"]
    assert words in row["action"]
