"""Measure workloads on a GPU, each in a fresh process: torch's own peaks, what lies outside, and the requests in order.

    python tests/gpu/record_predictions.py OUT_FOLDER [MODULE.py] [JOBS]

``MODULE.py`` has ``WORKLOADS``: name -> (function without arguments, options); ``env`` in the options is set before the process starts. Writes
``NAME.json`` (peaks, versions, device, date) and ``NAME.trace.json.gz`` (sizes: positive when taken, negative when given back).
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

DEFAULT = Path(__file__).parents[1] / "predicted_workloads.py"


def load(path):
    spec = importlib.util.spec_from_file_location("measured_workloads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["measured_workloads"] = module
    spec.loader.exec_module(module)
    return module.WORKLOADS


def one(out, path, name):
    import torch

    run, options = load(path)[name]
    torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=2_000_000)
    begun = time.monotonic()
    row = {"name": name, "options": options, "device": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d")}
    try:
        kept = run()
        torch.cuda.synchronize()
        del kept
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:500]}"
    free, total = torch.cuda.mem_get_info()
    stats = torch.cuda.memory_stats()
    row |= {
        "seconds": round(time.monotonic() - begun, 2), "peak_allocated_bytes": stats["allocated_bytes.all.peak"], "peak_reserved_bytes": stats["reserved_bytes.all.peak"],
        "peak_requested_bytes": stats["requested_bytes.all.peak"], "retries": stats["num_alloc_retries"], "ooms": stats["num_ooms"], "free_bytes": free, "total_bytes": total,
    }  # fmt: skip
    (out / f"{name}.json").write_text(json.dumps(row))
    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    sizes = [e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] in ("alloc", "free_requested")]
    with gzip.open(out / f"{name}.trace.json.gz", "wt") as file:
        json.dump(sizes, file)


def main(out, path=DEFAULT, jobs=4):
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)

    def start(item):
        name, (_, options) = item
        environment = os.environ | options.get("env", {})
        done = subprocess.run([sys.executable, __file__, "--one", str(out), str(path), name], env=environment, capture_output=True, text=True, timeout=140, check=False)
        if done.returncode:
            (out / f"{name}.error.txt").write_text(done.stderr[-4000:])
        return name, done.returncode

    with ThreadPoolExecutor(int(jobs)) as pool:
        for name, code in pool.map(start, load(path).items()):
            print(name, "ok" if code == 0 else f"ended with {code}", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(Path(sys.argv[2]), sys.argv[3], sys.argv[4])
    else:
        main(*sys.argv[1:])
