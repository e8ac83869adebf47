"""A watch on a process that leaks device memory."""

from __future__ import annotations

import time

import pytest

import nbmemprof as mp

MIB = 1 << 20


@pytest.mark.gpu
def test_a_leak_on_the_device_is_told_before_its_limit_with_its_line(tmp_path):
    import torch

    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    peak = torch.cuda.max_memory_allocated()
    limit, told, kept = before + 512 * MIB, [], []
    with mp.watch(tmp_path, interval_s=0.02, warmup_s=0, limit_bytes=limit, on_alarm=told.append, stacks=True, stacks_every_s=0.5) as watch:
        while not told and torch.cuda.memory_allocated() < limit:
            torch.empty(64 * MIB, dtype=torch.uint8, device="cuda").fill_(1)
            kept.append(torch.empty(64 << 10, dtype=torch.uint8, device="cuda"))  # a thousandth
            watch.step()
            time.sleep(0.001)
    assert told, "an alarm before the limit"
    assert told[0].device == "0"
    assert told[0].slope_bytes_per_step == pytest.approx(64 << 10, rel=0.1)
    assert any(site.startswith("test_watch_cuda.py") for site, _ in told[0].sites)
    assert torch.cuda.max_memory_allocated() >= peak, "peak counters are never reset"
    assert mp.summary(mp.open_run(tmp_path).capture)["peak_allocated_bytes"].to_list() == [torch.cuda.max_memory_allocated()]
    print(f"{len(kept)} steps, {watch!r}; {told[0].text}")
