"""Who holds GPU memory: against torch's own counters, on whatever GPU is there."""

from __future__ import annotations

import gc
import sys
from typing import Any

import polars as pl
import pytest

import nbmemprof as mp
from nbmemprof.errors import MemoryKept
from nbmemprof.holding import held_by_traceback

pytestmark = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def torch() -> Any:
    import torch

    torch.zeros(1, device="cuda")
    gc.collect()
    return torch


def test_every_block_in_use_has_a_holder(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
    opt = torch.optim.AdamW(net.parameters())
    loss = net(torch.randn(256, 512, device="cuda")).square().mean()
    loss.backward(retain_graph=True)
    opt.step()
    torch.cuda.synchronize()
    frame = mp.holders({"net": net, "opt": opt, "loss": loss})
    blocks = {}
    for segment in torch.cuda.memory_snapshot():
        at = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                blocks[at] = block["size"]
            at += block["size"]
    held = frame.filter(pl.col("counted_bytes") > 0)
    assert set(held["addr"]) == set(blocks)
    assert sum(blocks.values()) == torch.cuda.memory_allocated()
    assert all(-(-size // 512) * 512 <= blocks[addr] for addr, size in held.select("addr", "size_bytes").iter_rows())
    kinds = dict(held.filter(pl.col("name").is_in(["net", "opt", "loss"])).group_by("kind").agg(pl.col("size_bytes").sum()).iter_rows())
    weights = 2 * (512 * 512 + 512) * 4
    assert kinds["variable"] >= 4 * weights  # with gradients and two moments
    assert kinds["graph"] >= 3 * 256 * 512 * 4
    assert set(frame["device"]) == {torch.cuda.current_device()}


def test_a_graph_kept_by_a_running_sum(torch: Any) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1)).cuda()
    net(torch.randn(256, 1024, device="cuda")).sum().item()  # workspaces
    before, total = torch.cuda.memory_allocated(), torch.zeros((), device="cuda")
    for _ in range(12):
        total = total + net(torch.randn(256, 1024, device="cuda")).pow(2).mean()
    grown = torch.cuda.memory_allocated() - before
    row = mp.holders({"net": net, "total": total}, by="holder").filter(pl.col("holder") == "total.grad_fn").row(0, named=True)
    assert row["size_bytes"] == 12 * 5243904
    assert 0 <= grown - row["size_bytes"] <= 2048


def test_a_failed_cell_is_released_by_the_counter(torch: Any) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    from nbmemprof.holding import _release

    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    before = torch.cuda.memory_allocated()
    shell.user_ns["torch"] = torch
    shell.run_cell("mine = torch.empty(1 << 20, dtype=torch.uint8, device='cuda')", store_history=True)
    shell.run_cell("def run():\n    batch = torch.empty(192 << 20, dtype=torch.uint8, device='cuda')\n    work = torch.empty(320 << 20, dtype=torch.uint8, device='cuda')\n    raise ValueError('label 7')\nrun()", store_history=True)
    shell.run_cell("torch.empty(64 << 20, dtype=torch.uint8, device='cuda')", store_history=True)
    try:
        size, text = held_by_traceback(shell)
        assert size == 512 * MIB
        assert "in run" in text
        done = _release.let_go(shell)
        assert done.size_bytes == 576 * MIB
        assert done.on_gpu
        assert torch.cuda.memory_allocated() - before == MIB
        assert shell.user_ns["mine"].nbytes == MIB
        assert not hasattr(sys, "last_value")
    finally:
        shell.user_ns.pop("mine", None)
        InteractiveShell.clear_instance()


def test_a_slice_keeps_its_storage(torch: Any) -> None:
    kept = [torch.rand(1024, 4096, device="cuda")[:1] for _ in range(4)]
    row = mp.holders({"kept": kept}, by="holder").filter(pl.col("name") == "kept").row(0, named=True)
    assert (row["size_bytes"], row["tensor_bytes"], row["amplification"]) == (64 * MIB, 64 << 10, 1024.0)


def test_the_patterns_count_on_the_gpu(torch: Any) -> None:
    kept: list[Any] = []

    def leak() -> None:
        kept.append(torch.empty(MIB, dtype=torch.uint8, device="cuda"))

    with pytest.raises(MemoryKept, match=r"Memory grew by 3 MiB, 1 MiB a call over 3 calls.*Allocated by: 1 MiB in 1 block from .*test_holders_gpu"):
        mp.assert_no_growth(leak, repeats=3, warmup=1)
    with pytest.raises(MemoryKept, match=r"1 MiB in 1 block from .*test_holders_gpu"), mp.temporary():
        leak()
    with mp.temporary():
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    with mp.LeakTracker(warmup=0) as tracker:
        for _ in range(3):
            leak()
            tracker.step()
    assert tracker.growth()["bytes_per_step"].to_list() == [MIB]
    pool = mp.BufferPool()
    with pool.buffer(1000, device="cuda") as x:
        address = x.data_ptr()
    with pool.buffer(1000, device="cuda:0") as x:
        assert x.data_ptr() == address
