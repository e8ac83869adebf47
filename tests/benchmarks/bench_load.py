"""Open a snapshot of a million events, against a plain ``pickle.load`` of the same file.

``python tests/benchmarks/bench_load.py [FILE] [--events 1000000]`` prints seconds and peak memory of each, each
in a process of its own; without FILE a synthetic snapshot is written to a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import subprocess
import sys
import tempfile
from pathlib import Path

LOAD = """
import json, resource, sys, time
start = time.perf_counter()
{code}
took = time.perf_counter() - start
print(json.dumps({{"seconds": round(took, 3), "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}}))
"""
WAYS = {
    "pickle.load": "import pickle\nwith open(sys.argv[1], 'rb') as file: pickle.load(file)",
    "tables, before the heap is followed": "import nbmemprof.heap as heap\nheap.build = lambda tables, **meta: None\nfrom nbmemprof.sources import torch_snapshot\ntorch_snapshot.from_path(sys.argv[1])",
    "mp.load": "import nbmemprof as mp\ncap = mp.load(sys.argv[1])",
    "mp.load and mp.summary": "import nbmemprof as mp\ncap = mp.load(sys.argv[1])\nmp.summary(cap)",
}


def synthetic(events: int, path: Path, depth: int = 24) -> None:
    """A ring of live allocations in which each event has a list of shared frames of its own, as the real recorder writes them at worst."""
    rng = random.Random(7)
    frames = [{"filename": f"torch/nn/modules/file_{i}.py", "line": i, "name": f"forward_{i}"} for i in range(400)]
    stacks = [[frames[rng.randrange(400)] for _ in range(depth)] for _ in range(300)]
    trace, clock, base = [], 1_700_000_000_000_000, 0x7F0000000000

    def event(action: str, addr: int, size: int, stack: list[dict]) -> None:
        nonlocal clock
        clock += 3
        trace.append(
            {
                "action": action,
                "addr": addr,
                "size": size,
                "stream": 0,
                "time_us": clock,
                "compile_context": "N/A",
                "user_metadata": "",
                "pool_id": (0, 0),
                "frames": list(stack),
            }
        )

    slots = [base + i * (1 << 20) for i in range(512)]
    event("segment_alloc", base, 512 << 20, stacks[0])
    held: dict[int, tuple[int, list[dict]]] = {}
    while len(trace) < events:
        slot = rng.choice(slots)
        if slot in held:
            size, stack = held.pop(slot)
            event("free_requested", slot, size, stack)
            event("free_completed", slot, size, stack)
        else:
            held[slot] = (rng.randrange(1 << 19, 1 << 20), rng.choice(stacks))
            event("alloc", slot, *held[slot])
    blocks = []
    for slot in slots:
        size, stack = held.get(slot, (0, []))
        blocks.append({"address": slot, "size": 1 << 20, "requested_size": size, "state": "active_allocated" if size else "inactive", "frames": list(stack)})
    live = len(held) << 20
    segment = {
        "device": 0, "address": base, "total_size": 512 << 20, "allocated_size": live, "active_size": live, "stream": 0, "segment_type": "large", "segment_pool_id": (0, 0),
        "is_expandable": False, "frames": list(stacks[0]), "blocks": blocks,
    }  # fmt: skip
    with path.open("wb") as file:
        pickle.dump({"segments": [segment], "device_traces": [trace], "allocator_settings": {}, "external_annotations": []}, file, protocol=4)


def measure(code: str, path: Path) -> dict[str, float]:
    """Seconds and peak memory of a process that does it."""
    done = subprocess.run([sys.executable, "-c", LOAD.format(code=code), str(path)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path)
    parser.add_argument("--events", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.file or Path(folder) / "synthetic.pickle"
        if options.file is None:
            synthetic(options.events, path)
        print(f"{path.stat().st_size / 1e6:.1f} MB, best of {options.rounds}")
        for name, code in WAYS.items():
            measure(code, path)  # compile and warm the file's pages
            best = min((measure(code, path) for _ in range(options.rounds)), key=lambda m: m["seconds"])
            print(f"{best['seconds']:7.2f} s  {best['peak_mib']:6.0f} MiB  {name}")


if __name__ == "__main__":
    main()
