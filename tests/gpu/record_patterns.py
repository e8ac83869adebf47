"""Count on a real GPU what one warp's access patterns cost, with ncu, for the tests that compare the model with it.

    python tests/gpu/record_patterns.py OUT [single | random | all]

``single``: the worked examples, the patterns counted before and those that tell rules for wide shared loads apart: packed, and every third in a launch of its own.
``random``: the 500 patterns of tests/fixtures/h200/patterns/random.json, packed. Packed means that up to four of a space share a launch, executed 1, 33, 33² and
33³ times. A count lies between 0 and 32, so the total, written in base 33, has the four counts as its digits; requests (global) and instructions (shared) must come out as
1 + 33 + 33² + 33³ exactly. All are counted a second time in other packs. What the launch itself moves is counted by the same launch with no repetition.
The program runs twice: as what starts ncu and reads its report, and (``launches``) as what ncu watches.
"""

from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]

import patterns as examples
from patterns import SPACES, WINDOW, Pattern

BASE, DIGITS = 33, 4
ALONE = 4096  # repetitions of a pattern that has a launch to itself: more than the launch's own traffic, which is the remainder
METRICS = {
    "global load": ("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"),
    "global store": ("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"),
    "shared load": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "smsp__inst_executed_op_shared_ld.sum"),
    "shared store": ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum", "smsp__inst_executed_op_shared_st.sum"),
}
Launch = list[tuple[int, int]]  # numbers of patterns and how often each is executed


def alone(found: list[Pattern], numbers: Iterable[int] | None = None) -> list[Launch]:
    return [[(n, ALONE)] for n in (range(len(found)) if numbers is None else numbers)]


def packed(found: list[Pattern], order: int) -> list[Launch]:
    """Packs of up to four patterns of each space, each pack followed by itself without repetitions; loads come before stores."""
    shuffled = random.Random(order)
    queues = []
    for space in SPACES:
        mine = [n for n, p in enumerate(found) if p.space == space]
        shuffled.shuffle(mine)
        queues.append(mine)
    launches: list[Launch] = []
    at = 0
    while any(at < len(q) for q in queues):
        loads_first = sorted(queues, key=lambda q: bool(q) and found[q[0]].space.endswith("store"))
        pack = [(n, BASE**digit) for queue in loads_first for digit, n in enumerate(queue[at : at + DIGITS])]
        launches += [pack, [(n, 0) for n, _ in pack]]
        at += DIGITS
    return launches


def decoded(found: list[Pattern], launches: list[Launch], counts: list[dict[str, int]]) -> dict[int, int]:
    """Number of a pattern -> sectors or wavefronts of one execution; raises where a total can't be what the patterns give."""
    result: dict[int, int] = {}
    pairs = iter(zip(launches, counts, strict=True))
    for launch, counted in pairs:
        if len(launch) == 1 and launch[0][1] == ALONE:
            (number, times), *_ = launch
            metric, *requests = METRICS[found[number].space]
            if requests and counted[requests[0]] // times != 1:
                raise ValueError(f"pattern {number}: {counted[requests[0]]} requests in {times} executions")
            result[number] = counted[metric] // times
            continue
        _, own = next(pairs)
        for space, (metric, *requests) in METRICS.items():
            mine = [(n, times) for n, times in launch if found[n].space == space]
            total = counted[metric] - own[metric]
            if requests and counted[requests[0]] - own[requests[0]] != sum(times for _, times in mine):
                raise ValueError(f"{space}: {counted[requests[0]] - own[requests[0]]} requests, not {sum(times for _, times in mine)}, in a pack of {mine}")
            for number, _ in sorted(mine, key=lambda one: one[1]):
                result[number], total = total % BASE, total // BASE
            if total:
                raise ValueError(f"{space}: {total} left over in a pack of {mine}")
    return result


# ---------------------------------------------------------------------- what a launch gives, in NumPy
def initial() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, WINDOW["global"], dtype=np.uint8)


def expected(found: list[Pattern], launch: Launch, memory: np.ndarray) -> np.ndarray:
    """Sums of each lane; loads come before stores in a launch, so all of them see the memory as it was."""
    sums = np.zeros(32, np.uint64)
    for number, times in launch:
        p = found[number]
        if p.space.endswith("load"):
            for lane, place in enumerate(p.places):
                if place is not None:
                    read = memory[place : place + p.width]
                    value = int(read.view(np.uint32).astype(np.uint64).sum()) if p.width >= 4 else int.from_bytes(read.tobytes(), "little")
                    sums[lane] += np.uint64(value * times % (1 << 32))
    return (sums % (1 << 32)).astype(np.uint32)


def stored_right(found: list[Pattern], launch: Launch, before: np.ndarray, after: np.ndarray) -> bool:
    """Whether global memory holds, where a store went, what one of its lanes wrote, and elsewhere what it held."""
    allowed: dict[int, set[int]] = {}
    for number, times in launch:
        p = found[number]
        if p.space == "global store" and times:
            for lane, place in enumerate(p.places):
                for k in range(p.width if place is not None else 0):
                    allowed.setdefault(place + k, set()).add((lane + 1) >> 8 * (k % 4) & 255 if p.width >= 4 else (lane + 1 if k == 0 else 0))
    untouched = np.ones(len(before), bool)
    untouched[list(allowed)] = False
    return bool((before[untouched] == after[untouched]).all()) and all(int(after[at]) in values for at, values in allowed.items())


# ---------------------------------------------------------------------- under ncu
def run_launches(plan: Path) -> None:
    """Launch every pack of a plan and check what it computed."""
    import cupy

    from nbmemprof.gpu import _loader

    todo = json.loads(plan.read_text())
    found = [Pattern.of(row) for row in todo["patterns"]]
    kernel = _loader.kernel("access_patterns", "access_patterns")
    memory = initial()
    pristine, device = cupy.asarray(memory), cupy.asarray(memory)
    wrong = []
    for i, launch in enumerate(todo["launches"]):
        device[:] = pristine
        places = cupy.asarray(np.array([[-1 if p is None else p for p in found[n].places] for n, _ in launch], np.int32))
        tables = [cupy.asarray(np.array(column, np.int32)) for column in ([found[n].width for n, _ in launch], [SPACES.index(found[n].space) for n, _ in launch], [t for _, t in launch])]
        sums = cupy.full(32, 0xDEADBEEF, np.uint32)
        kernel((1,), (32,), (places, *tables, np.int32(len(launch)), np.int32(0), device, np.int32(WINDOW["shared"]), sums), shared_mem=WINDOW["shared"])
        if not (sums.get() == expected(found, launch, memory)).all() or not stored_right(found, launch, memory, device.get()):
            wrong.append(i)
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    plan.with_suffix(".done.json").write_text(json.dumps({
        "wrong": wrong, "device": properties["name"].decode(), "driver": cupy.cuda.runtime.driverGetVersion(), "cupy": cupy.__version__,
        "compute_capability": f"{properties['major']}.{properties['minor']}",
    }))  # fmt: skip


def parsed(text: str) -> list[dict[str, int]]:
    """Rows of ``ncu --csv --page raw``: a head, a row of units without an ID, a row a launch."""
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    head = rows[0]
    wanted = [m for names in METRICS.values() for m in names]
    return [{m: int(float(row[head.index(m)].replace(",", ""))) for m in wanted} for row in rows[1:] if row[head.index("ID")]]


def count(out: Path, name: str, found: list[Pattern], launches: list[Launch]) -> tuple[list[dict[str, int]], dict]:
    plan, report = out / f"{name}.plan.json", out / f"{name}.ncu-rep"
    plan.write_text(json.dumps({"patterns": [p.row() for p in found], "launches": launches}))
    metrics = ",".join(m for names in METRICS.values() for m in names)
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "-k", "access_patterns", "-f", "-o", str(report.with_suffix("")), "--metrics", metrics]
    begin = time.perf_counter()
    watched = subprocess.run([*command, sys.executable, __file__, str(out), "launches", str(plan)], capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if watched.returncode or not report.exists():
        raise RuntimeError(f"ncu ended with {watched.returncode}: {watched.stdout[-2000:]}{watched.stderr[-2000:]}")
    read = subprocess.run(["ncu", "--import", str(report), "--csv", "--page", "raw", "--print-units", "base"], capture_output=True, text=True, check=True)
    about = json.loads(plan.with_suffix(".done.json").read_text())
    about |= {"seconds": round(took, 1), "launches": len(launches), "passes": sorted(set(re.findall(r"- (\d+) pass", watched.stdout))), "ncu": subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=False).stdout.partition("Version ")[2].split()[0]}
    for file in (plan, plan.with_suffix(".done.json"), report):
        file.unlink()
    return parsed(read.stdout), about


def record(out: Path, name: str, found: list[Pattern], plans: dict[str, list[Launch]]) -> None:
    kept: dict = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "command": f"python tests/gpu/record_patterns.py OUT {name}", "ways": {}}
    for way, launches in plans.items():
        counts, about = count(out, f"{name}-{way}", found, launches)
        result = decoded(found, launches, counts)
        kept["ways"][way] = {"counts": [result.get(n) for n in range(len(found))], "about": about}
        (out / f"patterns_{name}.json").write_text(json.dumps(kept))
        print(name, way, about, flush=True)


def main() -> None:
    out, what = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "all"
    if what == "launches":
        return run_launches(Path(sys.argv[3]))
    out.mkdir(parents=True, exist_ok=True)
    single = [e.pattern for e in (*examples.WORKED, *examples.COUNTED)] + [p for _, p in examples.joining()]
    if what in ("single", "all"):
        record(out, "single", single, {"packed": packed(single, 0), "alone": alone(single, range(0, len(single), 3))})
    if what in ("random", "all"):
        stored = examples.stored()
        record(out, "random", stored, {"packed": packed(stored, 1), "packed again": packed(stored, 2)})
    return None


if __name__ == "__main__":
    main()
