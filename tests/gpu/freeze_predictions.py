"""Predict the workloads of tests/predicted_workloads.py and write what was predicted, with the commit of the rules.

    python tests/gpu/freeze_predictions.py [SET of tests/sweep]

Run on a clean commit, without a GPU, before anything is measured; the file goes into the next commit unchanged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import warnings
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import sweep
from predicted_workloads import WORKLOADS

import nbmemprof as mp

FIXTURES = TESTS / "fixtures" / "prediction"


def main(which: str = "") -> None:
    workloads = {name: (run, {}) for name, run in sweep.workloads(which).items()} if which else WORKLOADS
    warnings.simplefilter("ignore")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=TESTS).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain", "--", "../nbmemprof/prediction", "../nbmemprof/allocator", "predicted_workloads.py", "sweep"], capture_output=True, text=True, check=True, cwd=TESTS).stdout
    rows = {}
    for name, (run, options) in workloads.items():
        made = mp.predict(run, device="H200", conf=options.get("env", {}).get("PYTORCH_CUDA_ALLOC_CONF", ""))
        row = mp.summary(made).row(0, named=True)
        rows[name] = {key: row[key] for key in row if key.startswith("peak_") and row[key] is not None}
        rows[name] |= {"outside_bytes": row["outside_bytes"], "assumptions": made.meta["assumptions"], "kernels": made.meta["kernels"]}
        print(name, rows[name], flush=True)
    head = {"rules_commit": commit, "uncommitted": dirty.split("\n")[:-1], "device": "H200", "torch": "2.11", "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), "command": f"python tests/gpu/freeze_predictions.py {which}".strip()}
    (FIXTURES / (f"sweep_{which}_predictions.json" if which else "predictions.json")).write_text(json.dumps(head | {"predictions": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
