"""Count kernels on a real GPU, in process and by ncu: tests/fixtures/h200/counters.

    python tests/gpu/record_counters.py OUT [step ...]

Steps, each in a process of its own with its own time limit: ``cupti`` and ``ncu`` count the twenty kernels of ``counted_kernels.py``; ``compare``
holds the two against each other, ``predict`` writes down what the findings promise for the slow kernels (both need no GPU); ``diagnose`` counts the naive transpose, the array of structures and the reduction with conflicts, ``lines``
the same by ncu with their source lines; ``small`` and ``verify`` run kernels on small arrays, for compute-sanitizer; the latter holds their results against NumPy's; ``slow`` counts and times the six kernels of ``slow_kernels.py``, ``fast`` the same work done well; ``behaviour`` tries
graphs, room for few kernels, torch.profiler, side effects; ``cell`` runs ``%%memprof --counters`` in a shell, ``cuda_cell`` ``%%memprof_cuda``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from _recording import ROOT, device, today

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "gpu"), str(ROOT / "tests")]

LIMITS = {"cupti": 60, "ncu": 100, "ncu_cold": 100, "compare": 20, "diagnose": 40, "lines": 60, "slow": 60, "predict": 20, "verify": 40, "small": 40, "numba": 40, "fast": 60, "behaviour": 60, "room": 30, "cell": 40, "cuda_cell": 60}


def main() -> None:
    """Run the steps that are named, or all but ``fast``; each failure stands in ``failed.txt``."""
    out, steps = Path(sys.argv[1]), sys.argv[2:] or [name for name in LIMITS if name not in ("fast", "verify", "small")]
    out.mkdir(parents=True, exist_ok=True)
    if steps[:1] == ["--inside"]:
        globals()[f"step_{steps[1]}"](out)
        return
    for step in steps:
        began = time.perf_counter()
        try:
            done = subprocess.run([sys.executable, __file__, str(out), "--inside", step], capture_output=True, text=True, timeout=LIMITS[step], check=False)
            failed = f"{step}: rc {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}\n" if done.returncode else ""
            print(done.stdout[-6000:])
        except subprocess.TimeoutExpired as error:
            failed = f"{step}: longer than {LIMITS[step]} s\n{error.stdout!r}\n"
        if failed:
            print(failed)
            with (out / "failed.txt").open("a") as file:
                file.write(failed)
        print(f"## {step}: {time.perf_counter() - began:.1f} s", flush=True)


# ---------------------------------------------------------------------- keeping
def keep(capture: Any, path: Path, **more: Any) -> None:
    """A capture's counted kernels as JSON: what the tests read back."""
    metrics: dict[int, dict[str, float]] = {}
    for kernel, name, value, _ in capture.metrics.select("kernel_id", "metric", "value", "unit").iter_rows():
        metrics.setdefault(kernel, {})[name] = value
    kernels = [
        {key: row[key] for key in ("name", "grid", "block", "duration_us")} | {"metrics": metrics.get(row["kernel_id"], {})} for row in capture.kernels.iter_rows(named=True)
    ]
    meta = {name: capture.meta.get(name) for name in ("device", "versions", "warnings", "counters", "ceilings")}
    tables = {"lines": capture.tables["kernel_lines"].to_dicts()} if "kernel_lines" in capture.tables else {}
    path.write_text(lines_of({"made": about(), "meta": meta, "kernels": kernels, **tables, **more}))


def lines_of(value: dict[str, Any]) -> str:
    """JSON with a line an entry, and one for each item of a list of mappings."""
    rows = []
    for name, part in value.items():
        whole = ",\n  ".join(json.dumps(item, default=str) for item in part) if isinstance(part, list) and part and isinstance(part[0], dict) else None
        rows.append(f" {json.dumps(name)}: " + (f"[\n  {whole}\n ]" if whole is not None else json.dumps(part, default=str)))
    return "{\n" + ",\n".join(rows) + "\n}\n"


def about() -> dict[str, Any]:
    """When, on what, with which versions."""
    import cupy

    torch = sys.modules.get("torch")
    return {
        "date": today(), "gpu": device(), "python": sys.version.split()[0], "cupy": cupy.__version__, "torch": getattr(torch, "__version__", None),
        "command": f"python tests/gpu/record_counters.py OUT {sys.argv[3] if len(sys.argv) > 3 else ''}".strip(),
    }  # fmt: skip


def times_us(call: Callable[[], Any], repeats: int = 9) -> list[float]:
    """Durations by CUDA events, after two calls that don't count, sorted."""
    import cupy

    call()
    call()
    found = []
    for _ in range(repeats):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(cupy.cuda.get_elapsed_time(start, end) * 1e3)
    return sorted(found)


# ---------------------------------------------------------------------- two ways
def step_cupti(out: Path) -> None:
    """The twenty kernels in this process, twice, and what that took."""
    import counted_kernels as these
    import torch

    import nbmemprof as mp

    began = time.perf_counter()
    these.run()
    torch.cuda.synchronize()
    plain_s = time.perf_counter() - began
    for number in (1, 2):
        counted = mp.counters(these.run)
        keep(counted.capture, out / f"cupti_{number}.json", calls=[name for name, _ in these.CALLS], plain_s=plain_s)
        print(number, counted.height, counted.capture.meta["counters"], counted.capture.meta["warnings"], f"plain {plain_s:.4f} s")


def step_ncu(out: Path, cold: bool = False) -> None:
    """The same under ncu."""
    import counted_kernels as these

    from nbmemprof.gpu import _ncu

    capture = _ncu.profile(these.run, (), metrics="all", timeout_s=90, lines=False, cold=cold)
    keep(capture, out / ("ncu_cold.json" if cold else "ncu.json"), calls=[name for name, _ in these.CALLS])
    print(capture.kernels.height, capture.meta["counters"])


def step_ncu_cold(out: Path) -> None:
    """The same with the caches flushed before each pass."""
    step_ncu(out, cold=True)


def step_compare(out: Path) -> None:
    """What differs between the two."""
    from counters.recorded import compared

    print(compared(out / "cupti_1.json", out / "ncu.json"))


# ---------------------------------------------------------------------- diagnoses
def step_diagnose(out: Path) -> None:
    """Counters, findings and times."""
    import cupy
    import naive_kernels as these

    import nbmemprof as mp

    timed = {name: times_us(call) for name, call in these.CALLS}
    cupy.cuda.Device().synchronize()
    counted = mp.counters(these.run)
    keep(counted.capture, out / "diagnose.json", calls=[name for name, _ in these.CALLS], events_us=timed, findings=counted.findings.to_dicts())
    for row in counted.findings.iter_rows(named=True):
        print(row["finding"], row["action"])


def step_lines(out: Path) -> None:
    """The same by ncu, with lines."""
    import naive_kernels as these

    import nbmemprof as mp

    counted = mp.counters(these.run, how="ncu", timeout_s=50)
    keep(counted.capture, out / "lines.json", findings=counted.findings.to_dicts())
    print(counted.lines.select("name", "line", "text", "space", "operation", "instructions", "sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts"))
    for row in counted.findings.iter_rows(named=True):
        print(row["finding"], row["action"])


def step_slow(out: Path) -> None:
    """The six slow kernels: counters, findings, times. The fast ones are not launched."""
    _pairs(out, "slow", 0)


def step_predict(out: Path) -> None:
    """What the findings of slow.json say that the same work will take when it is done well."""
    from counters.recorded import predictions

    (out / "predictions.json").write_text(lines_of({"made": {"date": datetime.now(UTC).isoformat(timespec="minutes"), "from": "slow.json"}, **predictions(out / "slow.json")}))


def step_fast(out: Path) -> None:
    """The same work done well, after the predictions."""
    _pairs(out, "fast", 1)


def _pairs(out: Path, name: str, which: int) -> None:
    import cupy
    import slow_kernels

    import nbmemprof as mp

    calls = slow_kernels.launches(slow_kernels.arrays())[which]
    timed = {}
    for kind, call in calls.items():
        try:
            timed[kind] = times_us(call)
        except Exception as error:
            print(kind, error)
    cupy.cuda.Device().synchronize()
    counted = mp.counters(lambda: [call() for call in calls.values()])
    keep(counted.capture, out / f"{name}.json", calls=list(calls), events_us=timed, findings=counted.findings.to_dicts())
    print({kind: found[len(found) // 2] for kind, found in timed.items()})
    print(counted.select("name", "duration_us", "bandwidth_bytes_per_s", "ceiling_share", "load_sectors_per_request", "shared_load_ways", "l2_hit_share"))
    for row in counted.findings.iter_rows(named=True):
        print(row["finding"], row["action"])


def step_verify(out: Path) -> None:
    """The slow kernels and the fast ones give NumPy's results; small, so that it runs under compute-sanitizer too."""
    import slow_kernels

    found = slow_kernels.wrong(slow_kernels.arrays())
    (out / "verify.json").write_text(json.dumps({"made": about(), "n": slow_kernels.N, "wrong": found}) + "\n")
    print(slow_kernels.N, "wrong:", found)


def step_small(out: Path) -> None:
    """The twenty kernels and the naive ones once, small: for compute-sanitizer."""
    import os

    os.environ["COUNTED_KERNELS_SIDE"] = "1024"
    import counted_kernels
    import naive_kernels

    print(len(counted_kernels.CALLS), "and", len(naive_kernels.CALLS), "kernels ran")


def step_numba(out: Path) -> None:
    """A kernel of numba-cuda is counted under its name, with its line."""
    import numpy as np

    vars(np)["row_stack"] = np.vstack  # numba-cuda of that machine still asks for it, NumPy has it no more
    from numba import cuda

    import nbmemprof as mp

    @cuda.jit
    def strided(x, y):
        i = cuda.grid(1)
        if i < y.size:
            y[i] = x[i * 32]

    x, y = cuda.to_device(np.arange(32 << 20, dtype=np.float32)), cuda.device_array(1 << 20, dtype=np.float32)
    strided[4096, 256](x, y)
    counted = mp.counters(lambda: strided[4096, 256](x, y))
    told = counted.select("name", "site", "grid", "block", "load_sectors_per_request", "store_sectors_per_request").to_dicts()
    print(told)
    (out / "numba.json").write_text(json.dumps({"made": about(), "kernels": told, "warnings": counted.capture.meta["warnings"]}, indent=1) + "\n")


# ---------------------------------------------------------------------- behaviour
def step_behaviour(out: Path) -> None:
    """Room for few, graphs, another profiler, side effects, a kernel that fails."""
    import cupy
    import torch

    import nbmemprof as mp

    told: dict[str, Any] = {}

    def trial(name: str, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            told[name] = work()
        except Exception as error:
            told[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-600:]}
        told[f"{name}, s"] = time.perf_counter() - began
        print(name, told[name], f"{told[f'{name}, s']:.2f} s", flush=True)
        (out / "behaviour.json").write_text(json.dumps({"made": about(), **told}, indent=1, default=str))

    x = torch.rand(1 << 20, device="cuda")

    def seen(counted: Any) -> dict[str, Any]:
        return {"names": counted["name"].to_list(), "us": counted["duration_us"].to_list(), "warnings": counted.capture.meta["warnings"], "told": counted.capture.meta["counters"]}

    def many() -> None:
        for _ in range(40):
            torch.mul(x, 2, out=x)

    trial("forty kernels", lambda: seen(mp.counters(many))["told"])
    y = torch.empty_like(x)
    graphs = {}
    for size in (1, 2, 3, 5):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for k in range(size):
                torch.mul(x, k + 2, out=y)
        graphs[size] = graph

    def with_graph(size: int) -> Any:
        return seen(mp.counters(lambda: (torch.add(x, 1, out=y), graphs[size].replay(), torch.sub(x, 1, out=y)), metrics="dram"))

    for size in graphs:
        trial(f"graph of {size}", lambda size=size: with_graph(size))
    counter = cupy.zeros(1, dtype=cupy.uint32)
    bump = cupy.RawKernel('extern "C" __global__ void bump(unsigned* c) { atomicAdd(c, 1u); }', "bump")
    trial("an atomic add", lambda: (seen(mp.counters(lambda: bump((1,), (1,), (counter,))))["told"], int(counter[0])))
    printing = cupy.RawKernel('#include <cstdio>\nextern "C" __global__ void say() { printf("said "); }', "say", options=("-std=c++17",))
    trial("a kernel that prints", lambda: seen(mp.counters(lambda: printing((1,), (1,), ()))))
    trial("counting inside counting", lambda: mp.counters(lambda: mp.counters(many)))

    def profiled() -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
            return seen(mp.counters(many, metrics="dram"))

    trial("inside torch.profiler", profiled)
    trial("after torch.profiler", lambda: seen(mp.counters(many, metrics="dram", max_kernels=3)))
    trial("backward on another thread", lambda: seen(mp.counters(lambda: torch.nn.functional.softmax(x.requires_grad_(), 0).sum().backward(), metrics="dram")))


def step_room(out: Path) -> None:
    """Room for four of forty kernels: counting ends inside a launch."""
    import torch

    import nbmemprof as mp

    x = torch.rand(1 << 20, device="cuda")
    torch.mul(x, 2, out=x)
    began = time.perf_counter()
    counted = mp.counters(lambda: [torch.mul(x, 2, out=x) for _ in range(40)], max_kernels=4)
    told = {"s": time.perf_counter() - began, "kernels": counted.height, "names": counted["name"].to_list(), "told": counted.capture.meta}
    again = mp.counters(lambda: torch.mul(x, 2, out=x))
    told["again"] = again.height
    print(told)
    (out / "room.json").write_text(json.dumps({"made": about(), **told}, indent=1, default=str))


def step_cell(out: Path) -> None:
    """A notebook's cell with the flag: the capture, saved and loaded again."""
    import io
    from contextlib import redirect_stdout

    from IPython.core.interactiveshell import InteractiveShell

    import nbmemprof as mp

    shell = InteractiveShell.instance()
    shell.run_cell("%load_ext nbmemprof")
    shell.run_cell("import torch\nx = torch.rand(1 << 24, device='cuda', requires_grad=True)\n(x * 2).sum().backward()\nx.grad = None")
    said = io.StringIO()
    with redirect_stdout(said):
        result = shell.run_cell("%%memprof --counters\ny = (x * 2).relu()\ny.sum().backward()\nvalue = float(x.grad.sum())\nvalue")
    capture = shell.user_ns["_memprof"]
    print(result.success, result.result, capture, capture.meta["warnings"], capture.meta.get("counters"))
    print(said.getvalue())
    capture.save(out / "cell.nbmem")
    again = mp.load(out / "cell.nbmem")
    print(mp.counters(again).select("name", "site", "duration_us", "load_sectors_per_request"))
    (out / "cell.json").write_text(json.dumps({"made": about(), "said": said.getvalue(), "result": result.result, "sites": mp.counters(again)["site"].to_list(), "counters": capture.meta.get("counters")}, indent=1, default=str))


def step_cuda_cell(out: Path) -> None:
    """``%%memprof_cuda``, counted in process and by ncu with lines; CuPy's arrays and torch's."""
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    shell.run_cell("%load_ext nbmemprof\nimport cupy, torch\nn = 1 << 20\nx = cupy.arange(32 * n, dtype=cupy.float32)\ny = torch.zeros(n, device='cuda')")
    code = 'extern "C" __global__ void strided(const float* x, float* y, int n) {\n    int i = blockIdx.x * blockDim.x + threadIdx.x;\n    if (i < n) y[i] = x[i * 32];\n}'
    told = {}
    for name, flag in (("counted", ""), ("lines", " --lines")):
        result = shell.run_cell(f"%%memprof_cuda strided(x, y, n) --block 256 --out frame{flag}\n{code}")
        told[name] = result.result._repr_mimebundle_()["text/plain"] if result.success else repr(result.error_in_exec)
        print(told[name])
    right = shell.run_cell("bool((cupy.asarray(y) == x[::32][:n]).all())").result
    (out / "cuda_cell.json").write_text(json.dumps({"made": about(), "right": right, **told}, indent=1) + "\n")


if __name__ == "__main__":
    main()
