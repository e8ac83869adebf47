"""Predicted cells on a machine with a GPU: forked while CUDA is not in use, in a fresh process once it is; and the same cell for real.

``python tests/gpu/record_predicted_cells.py OUT`` writes ``OUT/predicted_cells.json`` and prints it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from traitlets.config import Config

BUILD = """
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.randn(64, 1024, device=device)
"""
STEP = """
for i in range(2):
    loss = model(data).pow(2).mean()
    for dtype in (torch.float32, torch.bfloat16):
        query = data.view(4, 16, 16, 64).to(dtype)
        loss = loss + nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True).float().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
print(loss.device)
"""


def main(out: Path) -> None:
    import nbmemprof as mp

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    shell.colors = "nocolor"
    mp.load_ipython_extension(shell)
    rows: list[dict] = []
    driver = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout.strip().split(", ")
    head = dict(zip(("device", "driver"), driver, strict=False)) | {"torch": version("torch"), "python": sys.version.split()[0], "date": datetime.now(UTC).date().isoformat(), "command": "python tests/gpu/record_predicted_cells.py OUT"}

    def run(name: str, text: str) -> None:
        began = time.perf_counter()
        shell.user_ns.pop("_memprof", None)
        with capture_output() as seen:
            result = shell.run_cell(text, store_history=True)
        capture = shell.user_ns.get("_memprof")
        row = {"name": name, "ok": result.success, "seconds": round(time.perf_counter() - began, 2), "text": (seen.stdout + seen.stderr)[-1500:]}
        if capture is not None:
            row |= {"origin": capture.meta["origin"], "summary": mp.summary(capture).filter(mp.summary(capture)["kind"] == "device").to_dicts(), "warnings": capture.meta["warnings"], "calibration": capture.meta.get("calibration"), "kernels": capture.meta.get("kernels"),
                    "held": mp.breakdown(capture).select("category", "requested_bytes").to_dicts()}  # fmt: skip
        rows.append(row)
        out.mkdir(parents=True, exist_ok=True)
        (out / "predicted_cells.json").write_text(json.dumps(head | {"cells": rows}, indent=1, default=str) + "\n")

    run("imports", "import torch\nfrom torch import nn\ndevice = 'cuda'")
    run("forked: CUDA is not in use", "%%memprof --predict H200\n" + BUILD + STEP + "\nprint(torch.cuda.is_initialized())")
    run("not in use after it", "assert not torch.cuda.is_initialized()")
    run("a backward on the CPU", "nn.Linear(4, 4)(torch.randn(2, 4)).sum().backward()")
    run("after a backward on the CPU", "%%memprof --predict H200\n" + BUILD + STEP)
    run("build", BUILD)
    run("fresh process: CUDA is in use", "%%memprof --predict H200\n" + STEP)
    run("calibrated", "%%memprof --predict H200 --calibrate\n" + STEP)
    run("an error there", "%%memprof --predict H200\n1 / 0")
    run("session", "%memprof predict on H200")
    run("in the session", "%%memprof\n" + STEP)
    run("session off", "%memprof predict off")
    run("for real", "%%memprof\n" + STEP)
    run("again for real", "%%memprof\n" + STEP)
    print(json.dumps(rows, indent=1, default=str)[-6000:])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
