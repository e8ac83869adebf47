"""The CUDA recording against torch's own counters, on whatever GPU is there. Longer runs: record_h200.py."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import polars as pl
import pytest

import nbmemprof as mp
from nbmemprof.sources import torch_history

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def torch() -> Any:
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    return torch


def train(torch: Any, steps: int = 2) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(256, 512, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()


def test_peaks_and_end_are_torchs_own(torch: Any) -> None:
    torch.cuda.reset_peak_memory_stats()
    with mp.record(source="torch_history") as rec:
        train(torch)
        truth = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    row = mp.summary(rec.capture).row(0, named=True)
    assert tuple(row[n] for n in ("peak_allocated_bytes", "peak_reserved_bytes", "end_allocated_bytes", "end_reserved_bytes")) == truth
    assert rec.capture.meta["warnings"] == []
    assert not torch._C._cuda_isHistoryEnabled()
    assert any("train" in f for f in rec.capture.stacks["function"])


def test_a_window_in_a_window_has_its_own_events_and_peak(torch: Any) -> None:
    with mp.record(source="torch_history") as outer:
        held = torch.empty(37 * MIB, dtype=torch.uint8, device="cuda")
        with mp.record(source="torch_history") as inner:
            more = torch.empty(48 * MIB, dtype=torch.uint8, device="cuda")
        del held, more
    assert (inner.capture.events["action"] == "alloc").sum() == 1
    assert (outer.capture.events["action"] == "alloc").sum() == 2
    assert inner.capture.allocations.filter(pl.col("at_start") & (pl.col("requested_bytes") == 37 * MIB)).height == 1


def test_an_out_of_memory_error_leaves_a_capture_and_a_working_process(torch: Any) -> None:
    rec = mp.record(source="torch_history")
    with pytest.raises(torch.OutOfMemoryError), rec:
        torch.empty(1 << 46, dtype=torch.uint8, device="cuda")
    (row,) = mp.oom(rec.capture).to_dicts()
    assert row["requested_bytes"] == 1 << 46
    assert float(torch.ones(8, device="cuda").sum()) == 8.0


def test_the_users_own_recording_goes_on_with_all_its_events(torch: Any) -> None:
    torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=10_000)
    try:
        before = torch.empty(MIB, device="cuda")
        with mp.record(source="torch_history") as rec:
            after = torch.empty(MIB, device="cuda")
        assert torch._C._cuda_isHistoryEnabled()
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert [e["action"] for e in trace].count("alloc") == 2
    assert (rec.capture.events["action"] == "alloc").sum() == 1
    assert before.numel() == after.numel()


def test_empty_cache_is_marked_and_torch_is_put_back(torch: Any) -> None:
    original = torch._C._cuda_emptyCache
    with mp.record(source="torch_history") as rec:
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
    assert rec.capture.marks.filter(pl.col("kind") == "empty_cache").height > 0
    assert torch._C._cuda_emptyCache is original


def test_counters_and_picture_add_up(torch: Any) -> None:
    held = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda")
    frame = mp.stats(device=torch.cuda.current_device())
    value = dict(frame.select("counter", "value").rows())
    parts = ["requested_bytes.all.current", "derived.rounding_bytes", "derived.pinned_bytes", "derived.releasable_bytes"]
    assert sum(value[p] for p in parts) == torch.cuda.memory_reserved()
    capture = torch_history.picture()
    assert capture.segments["size_bytes"].sum() == torch.cuda.memory_reserved()
    assert capture.blocks.filter(pl.col("state") == "active_allocated")["size_bytes"].sum() == torch.cuda.memory_allocated()
    assert held.numel() == 3 * MIB


def test_looking_for_fragmentation_moves_no_counter(torch: Any) -> None:
    """A picture is taken and read: nothing is asked of the allocator, given back, or waited for."""
    kept = [torch.empty(9 * MIB, dtype=torch.uint8, device="cuda") for _ in range(6)]
    del kept[::2]
    before, history = torch.cuda.memory_stats(), torch._C._cuda_isHistoryEnabled()
    free = mp.fragmentation(request_bytes="96MiB")
    assert torch.cuda.memory_stats() == before
    assert torch._C._cuda_isHistoryEnabled() == history
    assert free["reserved_bytes"].sum() == torch.cuda.memory_reserved()
    assert len(kept) == 3


def test_a_window_without_cuda_makes_no_context_and_one_that_begins_it_misses_nothing() -> None:
    code = """
import torch, nbmemprof as mp
with mp.record(source="torch_history"):
    torch.zeros(3)
assert not torch.cuda.is_initialized()
with mp.record(source="torch_history") as rec:
    torch.empty(1000, device="cuda")
assert rec.capture.events["action"].to_list() == ["segment_alloc", "alloc", "free_requested", "free_completed"], rec.capture.events
assert rec.capture.meta["recording"]["mode"] == "own"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_ring_that_is_far_too_small_keeps_the_true_peak(torch: Any) -> None:
    """Below an older peak, so that no counter helps: every event has to be read in time."""
    torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    source = torch_history.TorchHistory()
    source.start(ring_bytes=80_000 * 1800)
    source._ring.keep_events = 50_000
    assert source._ring.max_entries == 80_000
    base, held = torch.cuda.memory_allocated(), None
    for i in range(100_000):
        held = torch.empty(1024, dtype=torch.uint8, device="cuda")
        if i == 20_000:
            spike = [torch.empty(16 * MIB, dtype=torch.uint8, device="cuda") for _ in range(3)]
            del spike
    capture = source.stop()
    del held
    assert "events" not in capture.meta["dropped"]
    assert capture.meta["peaks"][str(torch.cuda.current_device())]["peak_allocated_bytes"] == base + 48 * MIB + 1024
