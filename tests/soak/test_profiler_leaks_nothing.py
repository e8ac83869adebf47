"""200 profiled cells with the full view in a real kernel: host memory, objects, tensors and device memory stay as flat as in its twin without the magic."""

from __future__ import annotations

import json

import pytest
from test_plain_cell import kernel, text_of

CELLS, WARM = 200, 40
COUNT = "gc.collect(); print(json.dumps([rss(), len(gc.get_objects()), int(mp.holders(device='all')['counted_bytes'].sum()), *on_device()]))"
SETUP = """import ctypes, gc, json, os, torch
import nbmemprof as mp
%load_ext nbmemprof
torch.set_num_threads(1)
def rss():
    ctypes.CDLL(None).malloc_trim(0)  # what was given back to the C library is not held
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE')
def on_device():
    if device == 'cpu':
        return 0, 0, 0
    free, total = torch.cuda.mem_get_info()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), total - free
device = 'cuda' if torch.cuda.is_available() else 'cpu'
net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(device)
opt = torch.optim.Adam(net.parameters())"""
BODY = """for _ in range(5):
    net(torch.randn(64, 256, device=device)).square().mean().backward()
    opt.step(); opt.zero_grad()"""
FAILS = "kept = torch.empty(1 << 20, device=device)\nraise ValueError('now and then')"


def counts(magic: str, folder) -> list[tuple[int, ...]]:
    """Resident bytes, objects, tensor bytes, and of the device allocated, reserved and used bytes, after each 20 cells."""
    sources = [SETUP]
    for i in range(CELLS):
        sources.append(magic + (FAILS if i % 20 == 10 else BODY))
        if i % 20 == 19:
            sources.append(COUNT)
    found = [json.loads("".join(text_of(o) for o in c.outputs)) for c in kernel(sources, folder) if c.source == COUNT]
    for at, (rss, objects, alive, *device) in enumerate(found):
        on_device = f"; on the device {device[0]:,} allocated, {device[1]:,} reserved, {device[2]:,} in use" if any(device) else ""
        print(f"{magic.strip() or 'plain':10s} after {20 * (at + 1):3d} cells: {rss / 2**20:.1f} MiB resident, {objects:,} objects, {alive:,} bytes of tensors{on_device}")
    return found[WARM // 20 - 1 :]


@pytest.mark.soak
def test_200_profiled_cells_leave_nothing(tmp_path):
    plain, profiled = counts("", tmp_path), counts("%%memprof\n", tmp_path)
    assert profiled[0][2:5] == profiled[-1][2:5]
    assert profiled[-1][5] - profiled[0][5] <= plain[-1][5] - plain[0][5]
    more = [(ours - theirs) / (CELLS - WARM) for ours, theirs in zip(*([late - early for early, late in zip(run[0], run[-1], strict=True)] for run in (profiled, plain)), strict=True)]
    print(f"a profiled cell leaves {more[0] / 1024:.1f} KiB and {more[1]:.1f} objects more than a plain one")
    assert more[1] < 5
    assert more[0] < 50 << 10
