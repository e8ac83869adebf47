"""Peaks that are predicted with this torch, one workload a line: name, bytes allocated, bytes reserved, requests, assumptions.

    python soak/peaks.py

The rules are those of the torch that was measured (2.11) whichever is installed, so two versions print the same where their operators ask for the same.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "prediction")]


def line(name: str, run: Callable[[], None], conf: str) -> str:
    import nbmemprof as mp
    from nbmemprof.prediction import feed
    from nbmemprof.prediction.catalogue import find
    from nbmemprof.prediction.engine import fake_run

    gpu = find("H200")
    record = fake_run(run, device_row=gpu)
    row = mp.summary(feed.capture_of(record, gpu, conf=conf, torch=gpu.torch, limit_bytes=None, capacity_bytes=None, meta={})).row(0, named=True)
    return f"{name:26s} {row['peak_allocated_bytes']:12d} {row['peak_reserved_bytes']:12d} {len(record.made):7d} {sum(record.assumptions.values()):3d}"


def jobs() -> dict[str, tuple[Callable[[], None], str]]:
    from known_workloads import KNOWN
    from predicted_workloads import WORKLOADS

    return {name: (run, "") for name, run in KNOWN.items()} | {name: (run, options.get("env", {}).get("PYTORCH_CUDA_ALLOC_CONF", "")) for name, (run, options) in WORKLOADS.items()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    importlib.import_module("torch._dynamo")  # once for all of them
    failed = False
    for name, (run, conf) in jobs().items():
        pid = os.fork()  # each in a process of its own, as a GPU would see it
        if pid == 0:
            print(line(name, run, conf), flush=True)
            os._exit(0)
        failed |= bool(os.waitpid(pid, 0)[1])
    sys.exit(failed)
