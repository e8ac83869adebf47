"""Run the probes on a real GPU, and hold the bandwidth kernels against public ones in the same run.

    python tests/gpu/record_probes.py OUT [versus | PROBE ...]

``OUT/PROBE.json`` are the recordings that ship in nbmemprof/gpu/probes/recorded; ``OUT/versus.json`` is the comparison: medians of five runs, each the median
of 20 launches, in turns; both sides' geometry is searched first. ``public_read`` is gpu-benches' algorithm, ``public_copy`` and ``public_triad``
BabelStream's (reference_kernels.cu names the files), beside ``torch.Tensor.copy_`` and ``cudaMemcpyAsync`` on the device.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from nbmemprof.gpu import _device, _loader, probes
from nbmemprof.gpu.probes import _bandwidth, _frame

RUNS, LAUNCHES = 5, 20
BLOCKS = (64, 128, 256, 512, 1024)
# cycles a load on another H200, 2026-11-30 (size in bytes -> cycles)
LATENCIES = {16 << 10: 40, 128 << 10: 40, 2 << 20: 332, 16 << 20: 332, 40 << 20: 358, 256 << 20: 639, 2 << 30: 695}


def clocks() -> str:
    done = subprocess.run(["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu", "--format=csv,noheader"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


# ---------------------------------------------------------------------- ours against theirs
def public(gpu: Any, kernels: _bandwidth.Kernels, what: str) -> dict[str, Callable[[], None]]:
    """Every geometry of a public kernel, by name."""
    source = (Path(__file__).parent / "reference_kernels.cu").read_text()
    a, b, out = kernels.a, kernels.b, kernels.out
    made: dict[str, Callable[[], None]] = {}
    for kind in ("float", "double"):
        kernel = gpu.xp.RawModule(code=source, options=("-std=c++17", f"-DELEMENT={kind}"), backend="nvrtc").get_function(f"public_{what}")
        n = kernels.words if kind == "float" else kernels.words // 2
        args = {"read": (a, out, np.int32(n), np.int32(0)), "copy": (a, out, np.int32(n)), "triad": (out, a, b, np.int32(n))}[what]
        for block in BLOCKS:
            made[f"public_{what}, {kind}, {block} threads"] = lambda k=kernel, n=n, block=block, args=args: k((-(-n // block),), (block,), args)
    return made


def copies(gpu: Any, kernels: _bandwidth.Kernels) -> dict[str, Callable[[], None]]:
    import torch

    source, target = torch.as_tensor(kernels.a, device="cuda"), torch.as_tensor(kernels.out, device="cuda")
    return {"torch copy_": lambda: target.copy_(source), "cudaMemcpyAsync": lambda: gpu.copy(kernels.out, kernels.a)}


def ours(gpu: Any, kernels: _bandwidth.Kernels, what: str) -> tuple[str, Callable[[], None], bool, int]:
    best = None
    tried = 0
    for width in (8, 16):
        candidates = _bandwidth.geometries(gpu, kernels.words * 4 // width)
        tried += len(candidates)
        for geometry, times in _bandwidth.search(kernels, what, width, candidates, repeats=LAUNCHES).values():
            if best is None or times.median_us < best[0]:
                best = (times.median_us, width, geometry)
    assert best is not None
    _, width, geometry = best
    return f"{what}, {width} B, {geometry}", kernels.launcher(what, width, geometry), kernels.verified(what, width, geometry), tried


def versus(out: Path) -> None:
    gpu = _device.CupyGpu()
    size = 1 << 30
    kernels = _bandwidth.Kernels(gpu, size)
    kept: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "device": gpu.name, "versions": gpu.versions, "command": "python tests/gpu/record_probes.py OUT versus", "array_bytes": size, "clocks_before": clocks(), "kernels": {}}
    for what in ("read", "copy", "triad"):
        name, mine, verified, tried = ours(gpu, kernels, what)
        theirs = public(gpu, kernels, what)
        brief = {key: gpu.time(run, 5).median_us for key, run in theirs.items()}
        best = sorted(theirs, key=brief.__getitem__)[:3]
        contenders = {name: mine, **{key: theirs[key] for key in best}, **(copies(gpu, kernels) if what == "copy" else {})}
        rates: dict[str, list[float]] = {key: [] for key in contenders}
        keys = list(contenders)
        for run in range(RUNS):
            for key in keys[run % len(keys) :] + keys[: run % len(keys)]:
                rates[key].append(_bandwidth.ARRAYS[what] * size / gpu.time(contenders[key], LAUNCHES).median_us * 1e6)
        middle = {key: statistics.median(values) for key, values in rates.items()}
        others = max(value for key, value in middle.items() if key != name)
        kept["kernels"][what] = {
            "ours": name, "verified": verified, "geometries_tried": {"ours": tried, "theirs": len(theirs)}, "ratio_to_best_other": middle[name] / others,
            "contenders": {key: {"median_bytes_per_s": middle[key], "runs": rates[key], "spread": (max(rates[key]) - min(rates[key])) / middle[key]} for key in keys},
        }  # fmt: skip
        print(what, f"{middle[name] / 1e12:.3f} TB/s, {middle[name] / others:.4f} of the best other", verified, flush=True)
        kept["clocks_after"] = clocks()
        (out / "versus.json").write_text(json.dumps(kept, indent=1))


def one(out: Path, name: str) -> None:
    begin = time.perf_counter()
    frame = getattr(probes, name)()
    assert frame.origin == "measured"
    frame.about = {**frame.about, "command": f"python tests/gpu/record_probes.py OUT {name}", "seconds": round(time.perf_counter() - begin, 1), "clocks": clocks()}
    (out / f"{name}.json").write_text(_frame.to_json(frame))
    print(name, frame.height, "rows", frame.about["seconds"], "s, all verified:", bool(frame["verified"].all()) if "verified" in frame.columns else "-", flush=True)
    if name == "latency":
        for row in frame.iter_rows(named=True):
            if row["size_bytes"] in LATENCIES and row["brought_by"] == ("walk" if row["through"] == "L1" else "all"):
                known = LATENCIES[row["size_bytes"]]
                print(f"  {row['what']} {row['size_bytes']}: {row['cycles']:.1f} cycles, {row['cycles'] / known - 1:+.1%} of {known}", flush=True)


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or ["versus", *probes.NAMES]:
        try:
            versus(out) if name == "versus" else one(out, name)
        except Exception:
            (out / f"{name}.failed.txt").write_text(traceback.format_exc())
            print(name, "FAILED", traceback.format_exc(), flush=True)
        if "cupy" in sys.modules:
            sys.modules["cupy"].get_default_memory_pool().free_all_blocks()


if __name__ == "__main__":
    assert _loader.names()
    main()
