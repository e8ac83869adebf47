"""Predict the workloads of tests/sweep and print them beside what an H200 measured.

    python tests/benchmarks/bench_sweep.py [SET] [NAME ...]

Each workload in a process of its own. Predicted and measured peaks in MiB, errors in per cent, whether the truth lies in the stated ranges, seconds.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import torch
from sweep import workloads

import nbmemprof as mp
from nbmemprof.prediction import feed
from nbmemprof.prediction.catalogue import find
from nbmemprof.prediction.engine import fake_run

GPU = find("H200")


def predicted(run: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    begun = time.monotonic()
    record = fake_run(run, device_row=GPU)
    seconds = time.monotonic() - begun
    row = mp.summary(feed.capture_of(record, GPU, conf="", torch="2.11", limit_bytes=None, capacity_bytes=None, meta={})).row(0, named=True)
    return {key: row[key] for key in row if key.startswith("peak_")} | {"seconds": round(seconds, 1), "assumed": len(record.assumptions)}


def forked(run: Any) -> dict[str, Any]:
    """The same in a child; an error comes back as its text."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = predicted(run)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {str(error)[:90]}"}
        with os.fdopen(writing, "w") as pipe:
            pipe.write(json.dumps(answer))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the child ended with status {status}"}


def main(which: str = "first", *names: str) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    measured = json.loads((TESTS / "fixtures" / "prediction" / f"sweep_{which}_measured.json").read_text())["measured"]
    errors: dict[str, list[float]] = {"allocated": [], "reserved": []}
    inside = 0
    print(f"{'workload':28s} {'allocated: predicted':>20s} {'measured':>9s} {'error':>8s}   {'reserved: predicted':>19s} {'measured':>9s} {'error':>8s}  in range  seconds")
    for name, run in workloads(which).items():
        if names and name not in names:
            continue
        row, real = forked(run), measured[name]
        if "error" in row:
            print(f"{name:28s} {row['error']}", flush=True)
            continue
        parts, good = [], []
        for what, found in errors.items():
            said, seen = row[f"peak_{what}_bytes"], real[f"peak_{what}_bytes"]
            found.append(100 * (said / seen - 1))
            good.append(row[f"peak_{what}_low_bytes"] <= seen <= row[f"peak_{what}_high_bytes"])
            parts.append(f"{said / 2**20:19.1f} {seen / 2**20:9.1f} {found[-1]:+7.2f}%")
        inside += all(good)
        print(f"{name:28s} {parts[0]}   {parts[1]}  {'yes' if all(good) else 'no':8s} {row['seconds']:7.1f}", flush=True)
    count = len(errors["allocated"])
    for what, limit in (("allocated", 1.0), ("reserved", 5.0)):
        sizes = sorted(abs(error) for error in errors[what])
        print(f"{what}: median {statistics.median(sizes):.2f} %, {sum(size <= limit for size in sizes)} of {count} within {limit:.0f} %, worst {sizes[-1]:.1f} %")
    print(f"both peaks in their ranges: {inside} of {count}")


if __name__ == "__main__":
    main(*sys.argv[1:])
