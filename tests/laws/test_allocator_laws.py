"""What holds of the modelled allocator whatever is asked of it: blocks tile, sums agree, nothing is lost, a replay is its recording."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import SIZES

import nbmemprof as mp
from nbmemprof.allocator import Device, verdict
from nbmemprof.allocator import _memory as M
from nbmemprof.errors import OutOfMemoryError

MIB = 1 << 20
CONFS = (
    "", "expandable_segments:True", "max_split_size_mb:21", "max_split_size_mb:24,max_non_split_rounding_mb:32", "roundup_power2_divisions:4",
    "max_split_size_mb:21,garbage_collection_threshold:0.5", "max_split_size_mb:30,expandable_segments:True", "large_segment_size_mb:33",
    "roundup_power2_divisions:[1:2,8:4,>:8],expandable_segments:True",
)  # fmt: skip
FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@dataclass
class Life:
    """A device after a random life: what was served, what was refused."""

    device: Device
    live: dict[int, int] = field(default_factory=dict)
    refused: list[int] = field(default_factory=list)
    asked: int = 0


@st.composite
def lives(draw: st.DrawFn, max_calls: int = 60, pools: bool = True, whole_blocks: bool = True, streams: bool = True, confs: tuple[str, ...] = CONFS) -> Life:
    limit = draw(st.sampled_from([None, None, 64 * MIB, 130 * MIB]))
    device = Device(draw(st.sampled_from(confs)), limit_bytes=limit, addresses=draw(st.sampled_from(["ascending", "descending", "windows", 1])))
    life = Life(device)
    names: list[Any] = [None, None, None] + ([device.mem_pool(), device.mem_pool(no_split=whole_blocks)] if pools else [])
    for _ in range(draw(st.integers(0, max_calls))):
        what = draw(st.sampled_from(["malloc"] * 5 + ["free"] * 4 + ["record", "empty", "busy", "done"]))
        if what == "malloc":
            size = draw(SIZES)
            life.asked += 1
            try:
                life.live[device.malloc(size, stream=draw(st.sampled_from([0, 0, 7] if streams else [0])), pool=draw(st.sampled_from(names)))] = size
            except OutOfMemoryError:
                life.refused.append(size)
        elif what in ("free", "record") and life.live:
            addr = draw(st.sampled_from(sorted(life.live)))
            if what == "record" and streams:
                device.record_stream(addr, 9)
            elif what == "free":
                del life.live[addr]
                device.free(addr)
        elif what == "empty":
            device.empty_cache()
        elif what == "busy" and streams:
            device.busy(9)
        elif what == "done":
            device.synchronize()
    return life


@pytest.mark.cost(0.6)
@FEW
@given(lives())
def test_blocks_tile_their_segments_and_sums_are_the_counters(life):
    stats, snapshot = life.device.stats(), life.device.snapshot()
    sums = dict.fromkeys(("total_size", "allocated_size", "active_size", "requested_size"), 0)
    for segment in snapshot["segments"]:
        at = segment["address"]
        for block in segment["blocks"]:
            assert block["address"] == at
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            at += block["size"]
        assert at == segment["address"] + segment["total_size"]
        free = [b["state"] == "inactive" for b in segment["blocks"]]
        assert not any(a and b for a, b in itertools.pairwise(free)), "two free neighbours would have merged"
        for name in sums:
            sums[name] += segment[name]
    now = {n: stats[f"{n}_bytes.all.current"] for n in ("reserved", "allocated", "active", "requested")}
    assert sums == {"total_size": now["reserved"], "allocated_size": now["allocated"], "active_size": now["active"], "requested_size": now["requested"]}


@pytest.mark.cost(0.6)
@FEW
@given(lives())
def test_the_law_of_bytes(life):
    """Requested of live blocks ≤ allocated ≤ active ≤ reserved; classes add up; what went up and down is what is there."""
    stats = life.device.stats()
    assert sum(life.live.values()) <= stats["allocated_bytes.all.current"] <= stats["active_bytes.all.current"] <= stats["reserved_bytes.all.current"]
    for name in {k.split(".")[0] for k in stats if ".all." in k}:
        for metric in ("current", "allocated", "freed"):
            assert stats[f"{name}.all.{metric}"] == stats[f"{name}.small_pool.{metric}"] + stats[f"{name}.large_pool.{metric}"]
        for kind in ("all", "small_pool", "large_pool"):
            assert stats[f"{name}.{kind}.current"] == stats[f"{name}.{kind}.allocated"] - stats[f"{name}.{kind}.freed"] >= 0
            assert stats[f"{name}.{kind}.peak"] >= stats[f"{name}.{kind}.current"]
    assert stats["allocation.all.current"] == len(life.live)
    assert stats["num_ooms"] == len(life.refused)


@pytest.mark.cost(0.6)
@FEW
@given(lives())
def test_sets_hold_exactly_the_free_blocks_in_order(life):
    """The ordered sets inside: every free or unmapped block once, by size and address, parents outranking children."""
    m = life.device._model.m
    records = life.device._model.records()
    found: dict[int, int] = {}
    for i, record in enumerate(records):
        if record[M.STATE] != M.IS_LIST:
            continue
        for root, state in ((M.LIST_FREE, M.FREE), (M.LIST_HOLES, M.HOLE)):
            keys, b = [], M.at_least(m, M.HEAD + i * M.RECORD + root, 0)
            while b:
                found[int(b)] = state
                keys.append((int(m[b + M.KEY]), int(m[b + M.ADDR])))
                assert m[b + M.STATE] == state
                assert not m[b + M.UP] or m[m[b + M.UP] + M.RANK] >= m[b + M.RANK]
                b = M.after(m, b)
            assert keys == sorted(keys)
    free = np.flatnonzero((records[:, M.STATE] == M.FREE) | (records[:, M.STATE] == M.HOLE)) * M.RECORD + M.HEAD
    assert sorted(found) == free.tolist()


@pytest.mark.cost(1)
@FEW
@given(lives(pools=False))
def test_replay_under_the_recorded_setting_gives_the_recording(life):
    capture = mp.load(life.device.snapshot())
    if not capture.events.height:
        return
    told = verdict(capture, limit_bytes=life.device.limit_bytes)
    assert told["exact"], told


@pytest.mark.cost(1.4)
@FEW
@given(lives(pools=False, confs=("", "roundup_power2_divisions:4", "expandable_segments:True")), st.sampled_from(CONFS[:4]))
def test_what_if_loses_no_request(life, conf):
    capture = mp.load(life.device.snapshot())
    if not capture.events.height:
        return
    made = mp.replay(capture, conf, limit_bytes=life.device.limit_bytes)
    served = capture.events["action"].cast(str).to_list().count("alloc")
    assert made.allocations.height + made.meta["refused"]["requests"] == served
    assert made.allocations["requested_bytes"].sum() + made.meta["refused"]["bytes"] == capture.allocations["requested_bytes"].sum()
    assert mp.summary(made)["peak_reserved_bytes"].to_list() == [made.meta["stats"]["0"]["reserved_bytes.all.peak"]]


@pytest.mark.cost(1.1)
@FEW
@given(lives(whole_blocks=False))  # that a pool does not split is in no file, so the reader of files can't know it
def test_a_snapshot_of_the_model_loads_and_agrees_with_its_counters(life):
    capture = mp.load(life.device.snapshot())
    frame, stats = mp.summary(capture), life.device.stats()
    if not frame.height:
        return
    row = frame.row(0, named=True)
    assert row["end_allocated_bytes"] == stats["allocated_bytes.all.current"]
    assert row["end_reserved_bytes"] == stats["reserved_bytes.all.current"]
    assert row["end_pending_bytes"] == stats["active_bytes.all.current"] - stats["allocated_bytes.all.current"]
    if capture.events.height:
        assert row["peak_allocated_bytes"] == stats["allocated_bytes.all.peak"]
        assert row["peak_reserved_bytes"] == stats["reserved_bytes.all.peak"]
        assert row["peak_requested_bytes"] == stats["requested_bytes.all.peak"]
    assert not [w for w in capture.meta["warnings"] if w.startswith("inconsistent")]
