"""What a person reads under the cell, on a GPU, of memory trouble as it is met: a fragmented heap that refuses, private pools of CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

import nbmemprof as mp

sys.path.insert(0, str(Path(__file__).parent))
pytestmark = [pytest.mark.gpu, pytest.mark.cost(8)]


@pytest.fixture
def shell() -> Iterator[Any]:
    import torch

    config = Config()
    config.HistoryManager.enabled = False
    made = InteractiveShell(config=config)
    made.colors = "nocolor"
    mp.load_ipython_extension(made)
    torch.cuda.init()
    yield made
    made.reset()
    torch.cuda.empty_cache()
    mp.unload_ipython_extension(made)


def cell(shell: Any, text: str) -> str:
    with capture_output() as seen:
        shell.run_cell(text, store_history=True).raise_error()
    said = "\n".join([seen.stdout, *(output.data.get("text/plain", "") for output in seen.outputs)])
    print(said)
    return said


def test_a_checkerboard_that_refuses_a_request_is_told_with_its_numbers_and_the_setting_that_serves_it(shell: Any) -> None:
    """Expected: 16 holes of 64 MiB, fragmentation 0.9375, nothing releasable, 256 MiB would fit if they were adjacent; expandable segments."""
    first = cell(shell, "%%memprof\nimport torch\nfrom record_allocator import checkerboard\ntold = checkerboard(torch)")
    assert "Fragmentation refused the request for 256 MiB" in first
    assert "1 GiB lay free in 16 pieces, the largest 64 MiB" in first
    assert "expandable_segments:True" in first
    capture = shell.user_ns["_memprof"]
    (row,) = mp.fragmentation(capture).to_dicts()
    assert (row["free_bytes"], row["largest_free_bytes"], row["releasable_bytes"], row["ratio"]) == (1 << 30, 64 << 20, 0, 0.9375)
    advice = mp.advise(capture)
    (served,) = advice.filter(advice["rule"] == "refused").to_dicts()
    assert served["origin"] == "replayed" and "with expandable_segments:True" in served["finding"]
    assert "expandable_segments:True" in cell(shell, "%memprof advise")


def test_one_private_pool_a_graph_is_told_with_its_numbers_and_the_pool_to_share(shell: Any) -> None:
    """Expected: 4 pools, 960 MiB reserved, 480 MiB allocated in them; share one pool, the largest first."""
    first = cell(shell, "%%memprof\nimport torch\nfrom record_allocator import graph_pools\ntold = graph_pools(torch)")
    expected = shell.user_ns["told"]["expected"]
    assert (expected["private_reserved"], expected["private_allocated"]) == (960 << 20, 480 << 20)
    assert "4 private pools of CUDA graphs reserve 960 MiB" in first
    assert "Share one pool: torch.cuda.graph(g, pool=first.pool()), and capture the largest batch first." in first
    private = shell.user_ns["_memprof"].segments.filter(shell.user_ns["_memprof"].segments["pool_id"].cast(str) != "0_0")
    assert private["pool_id"].n_unique() == 4
    assert (private["size_bytes"].sum(), private["allocated_bytes"].sum()) == (960 << 20, 480 << 20)
