"""Drive torch's allocator on a real GPU by seeded scripts and write what it did: tests/fixtures/h200/allocator.

    python tests/gpu/record_allocator.py --predict FILE             without a GPU: what the model says beforehand
    python tests/gpu/record_allocator.py OUT [--commit HASH] [name ...]

A script is a list of operations made by plain code, the same with and without a GPU: requests, frees, ``record_stream``, streams kept
busy, CUDA graphs, memory pools, limits. Each runs in a process of its own. ``OUT/ops_NAME.json.gz`` has every operation with the
address it returned and 16 counters after it, the trace and the last segments; ``OUT/whatif_PATTERN_SETTING.json.gz`` a trace and
torch's peaks; ``OUT/case_NAME.*`` a snapshot, our report's text and numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _recording import ROOT, device, today
from allocator_card import run_pattern, run_script
from allocator_modelled import predict
from allocator_scripts import MIB, PATTERNS, SCRIPTS, SETTINGS, UNKNOWN

sys.path.insert(0, str(ROOT))


# ---------------------------------------------------------------------- two cases from the field
def checkerboard(torch: Any) -> dict[str, Any]:
    """One cached segment cut into 32 parts of 64 MiB, every other one kept; then four parts are asked for under a limit one part above what is reserved."""
    part, count = 64 * MIB, 32

    def tensor(size: int) -> Any:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    whole = tensor(part * count)
    del whole
    cut = [tensor(part) for _ in range(count)]
    survivors = cut[1::2]
    del cut
    limit = torch.cuda.memory_reserved() + part
    torch.cuda.set_per_process_memory_fraction((limit + 0.5) / torch.cuda.get_device_properties(0).total_memory)
    refused = ""
    try:
        tensor(4 * part)
    except torch.OutOfMemoryError as error:
        refused = str(error)
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {
        "kept": survivors, "message": refused,
        "expected": {"requested": 4 * part, "reserved": count * part, "allocated": count // 2 * part, "free": count // 2 * part, "holes": count // 2, "largest_hole": part, "fragmentation": 1 - 2 / count, "releasable": 0},
    }  # fmt: skip


def graph_pools(torch: Any) -> dict[str, Any]:
    """Four graphs of growing batch, each captured into a pool of its own: two live intermediates each, of which one stays."""
    row, batches = 32 * MIB, (1, 2, 4, 8)

    def work(x: Any) -> Any:
        doubled = x * 2
        more = doubled + 1
        del doubled
        return more.sin()

    kept = []
    for batch in batches:
        x = torch.zeros(batch * row // 4, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            work(x)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = work(x)
        kept.append((graph, x, y))
        torch.cuda.empty_cache()
    return {"kept": kept, "expected": {"private_pools": len(batches), "private_reserved": 2 * sum(batches) * row, "private_allocated": sum(batches) * row}}


def run_case(name: str, out: Path, head: dict[str, Any]) -> str:
    import torch
    from record_h200 import keep

    import nbmemprof as mp
    from nbmemprof.views import findings, text

    body = {"checkerboard": checkerboard, "graph_pools": graph_pools}[name]
    torch.cuda.init()
    with mp.record(source="torch_history") as rec:
        told = body(torch)
        counters = keep(out, f"case_{name}", {})
    capture = rec.capture
    frames: dict[str, Any] = {}
    for what, make in {"oom": mp.oom, "fragmentation": mp.fragmentation, "summary": mp.summary, "what_if": mp.what_if, "verdict": mp.allocator.verdict}.items():
        try:
            made = make(capture)
            frames[what] = made if isinstance(made, dict) else made.to_dicts()
        except Exception as error:
            frames[what] = f"{type(error).__name__}: {error}"
    found = head | {
        "name": name, "expected": told["expected"], "message": told.get("message"), "counters": counters["end"], "report": text.report(capture), "findings": findings.findings(capture), "frames": frames,
        "limit_bytes": capture.meta["limit_bytes"], "warnings": capture.meta["warnings"],
    }  # fmt: skip
    (out / f"case_{name}.json").write_text(json.dumps(found, indent=1, default=str))
    return "\n".join([*found["findings"], found["report"]])[:2500]


def run_unknown(out: Path, head: dict[str, Any]) -> str:
    """What torch says to an option that this version does not know."""
    import torch

    try:
        torch.zeros(1, device="cuda")
        said = "accepted"
    except Exception as error:
        said = f"refused: {str(error).splitlines()[0]}"
    (out / "unknown_option.json").write_text(json.dumps(head | {"conf": UNKNOWN, "said": said}, indent=1))
    return said


# ---------------------------------------------------------------------- running them
def everything() -> dict[str, str]:
    """Name of each recording and the configuration of its process."""
    names = {name: conf for name, (conf, _) in SCRIPTS.items()}
    names |= {f"whatif_{p}_{s}": conf for p in PATTERNS for s, conf in SETTINGS.items()}
    return names | {"case_checkerboard": "", "case_graph_pools": "", "unknown": UNKNOWN}


def one(name: str, out: Path, commit: str) -> int:
    import torch

    head = {
        "command": f"python tests/gpu/record_allocator.py OUT {name}", "device": device(), "torch": torch.__version__, "python": sys.version.split()[0],
        "date": today(), "predicted_in_commit": commit,
    }  # fmt: skip
    kind, _, rest = name.partition("_")
    try:
        if name in SCRIPTS:
            said = run_script(name, out, head)
        elif kind == "whatif":
            said = run_pattern(*rest.split("_"), out, head)  # type: ignore[arg-type]
        elif kind == "case":
            said = run_case(rest, out, head)
        else:
            said = run_unknown(out, head)
    except BaseException:
        print(f"== {name} failed\n{traceback.format_exc()}", flush=True)
        return 1
    print(f"== {name}: {said}", flush=True)
    return 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--predict", type=Path)
    parser.add_argument("--commit", default="")
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args(arguments)
    if given.predict:
        predict(given.predict)
        return 0
    given.out.mkdir(parents=True, exist_ok=True)
    confs = everything()
    names = given.names or list(confs)
    if len(names) == 1:
        return one(names[0], given.out, given.commit)

    def run(name: str) -> int:
        begin = time.perf_counter()
        env = {k: v for k, v in os.environ.items() if k not in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")} | (
            {"PYTORCH_CUDA_ALLOC_CONF": confs[name]} if confs[name] else {}
        )
        try:
            code = subprocess.run([sys.executable, __file__, str(given.out), name, "--commit", given.commit], env=env, check=False, timeout=90).returncode
        except subprocess.TimeoutExpired:
            print(f"== {name} stopped after 90 s", flush=True)
            code = 1
        print(f"   {name}: {time.perf_counter() - begin:.1f} s", flush=True)
        return code

    alone = [n for n in names if n.startswith(("driver", "streams", "graph"))]  # the whole card, or kernels that would delay others' events
    with ThreadPoolExecutor(given.jobs) as pool:
        codes = list(pool.map(run, [n for n in names if n not in alone]))
    codes += [run(n) for n in alone]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
