"""What a person reads under the cell, on a GPU, of memory trouble as it is met: a fragmented heap that refuses, private pools of CUDA graphs. Each in a kernel of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_plain_cell import kernel, text_of

pytestmark = [pytest.mark.gpu, pytest.mark.cost(8)]
SETUP = f"import json, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport torch\nimport nbmemprof as mp\n%load_ext nbmemprof\ntorch.cuda.init()"


def said(folder: Path, *sources: str) -> list[str]:
    """What stands under each cell."""
    texts = ["\n".join(text_of(output) for output in cell.outputs) for cell in kernel([SETUP, *sources], folder)][1:]
    print(*texts, sep="\n\n")
    return texts


def test_a_checkerboard_that_refuses_a_request_is_told_with_its_numbers_and_the_setting_that_serves_it(tmp_path: Path) -> None:
    """Expected: 16 holes of 64 MiB, fragmentation 0.9375, nothing releasable, 256 MiB would fit if they were adjacent; expandable segments."""
    first, told, advice = said(
        tmp_path,
        "%%memprof\nfrom record_allocator import checkerboard\nkept = checkerboard(torch)",
        "print(json.dumps([mp.fragmentation(_memprof).to_dicts(), mp.advise(_memprof).to_dicts()]))",
        "%memprof advise",
    )
    assert "Fragmentation refused the request for 256 MiB" in first
    assert "1 GiB lay free in 16 pieces, the largest 64 MiB" in first
    assert "expandable_segments:True" in first and "expandable_segments:True" in advice
    (row,), rows = json.loads(told)
    assert (row["free_bytes"], row["largest_free_bytes"], row["releasable_bytes"], row["ratio"]) == (1 << 30, 64 << 20, 0, 0.9375)
    (served,) = [one for one in rows if one["rule"] == "refused"]
    assert served["origin"] == "replayed" and "with expandable_segments:True" in served["finding"]


def test_one_private_pool_a_graph_is_told_with_its_numbers_and_the_pool_to_share(tmp_path: Path) -> None:
    """Expected: 4 pools, 960 MiB reserved, 480 MiB allocated in them; share one pool, the largest first."""
    first, told = said(
        tmp_path,
        "%%memprof\nfrom record_allocator import graph_pools\nkept = graph_pools(torch)",
        "print(json.dumps([(str(pool), size, used) for pool, size, used in _memprof.segments.select('pool_id', 'size_bytes', 'allocated_bytes').rows()]))",
    )
    assert "4 private pools of CUDA graphs reserve 960 MiB" in first
    assert "Share one pool: torch.cuda.graph(g, pool=first.pool()), and capture the largest batch first." in first
    private: list[Any] = [row for row in json.loads(told) if row[0] != "0_0"]
    assert len({pool for pool, *_ in private}) == 4
    assert (sum(size for _, size, _ in private), sum(used for *_, used in private)) == (960 << 20, 480 << 20)
