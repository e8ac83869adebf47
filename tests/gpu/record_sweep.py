"""Measure the workloads of tests/sweep on a GPU: each in a process of its own, forked before CUDA begins.

    python tests/gpu/record_sweep.py OUT_FOLDER [SET] [JOBS] [SECONDS]

Writes ``NAME.json`` (peaks, versions, date; the error, where there was one) and ``NAME.trace.json.gz`` (requests in order: bytes when taken, minus
bytes when given back), and at the end ``measured.json`` with all of them. A workload that fails or takes longer than the seconds loses nothing of the others.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from sweep import workloads


def one(out, name, run, seconds):
    signal.alarm(int(seconds))
    warnings.simplefilter("ignore")
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2_000_000)
    torch.manual_seed(0)
    begun, row = time.monotonic(), {}
    try:
        run()
        torch.cuda.synchronize()
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["where"] = traceback.extract_tb(error.__traceback__)[-1].line
    stats = torch.cuda.memory_stats()
    row |= {"seconds": round(time.monotonic() - begun, 2), "peak_allocated_bytes": stats["allocated_bytes.all.peak"], "peak_reserved_bytes": stats["reserved_bytes.all.peak"], "retries": stats["num_alloc_retries"]}
    (out / f"{name}.json").write_text(json.dumps(row))
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    with gzip.open(out / f"{name}.trace.json.gz", "wt") as file:
        json.dump([e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] in ("alloc", "free_requested")], file)


def main(out, which="first", jobs=6, seconds=60):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    import transformers

    running, todo, ended = {}, list(workloads(which).items()), {}
    while todo or running:
        while todo and len(running) < int(jobs):
            name, run = todo.pop(0)
            child = os.fork()
            if child == 0:
                try:
                    one(out, name, run, seconds)
                finally:
                    os._exit(0)
            running[child] = name
        child, status = os.wait()
        ended[running.pop(child)] = status
    smi = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout.strip()
    rows = {name: json.loads((out / f"{name}.json").read_text()) if (out / f"{name}.json").is_file() else {"error": f"ended with status {status}"} for name, status in ended.items()}
    head = {"device": smi, "torch": torch.__version__, "transformers": transformers.__version__, "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d"), "command": f"python tests/gpu/record_sweep.py OUT {which}"}
    (out / "measured.json").write_text(json.dumps(head | {"measured": dict(sorted(rows.items()))}, indent=1))
    for name, row in rows.items():
        print(name, row.get("seconds"), row.get("error", "ok"), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
