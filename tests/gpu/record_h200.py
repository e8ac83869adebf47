"""Run the CUDA recording on a real GPU and write what it measured: the numbers in README and the fixtures in tests/fixtures/h200.

    python tests/gpu/record_h200.py OUT [stage ...]

Each stage runs in a process of its own. ``OUT/STAGE.json`` has device, versions, date, command and numbers;
``OUT/STAGE.pickle.gz`` a snapshot as torch gave it (paths shortened), for the tests that replay it without a GPU.
Peak counters are reset here, in fresh processes, never by the library.
"""

from __future__ import annotations

import gc
import gzip
import json
import os
import pickle
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _recording import ROOT, Stages, versions, without_paths

MIB = 1 << 20


def facts() -> dict[str, str]:
    return versions() | {"conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")}


stage = Stages(
    __file__, facts, limits={"": 120, "long_20m": 240, "long_2m_older_peak": 240},
    env={"expandable": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "async": {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}},
)  # fmt: skip


# ---------------------------------------------------------------------- helpers
def memory(word: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(word + ":"):
            return int(line.split()[1]) * 1024
    return 0


def forget_high_water() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def gpt2(batch: int = 8, layers: int = 12) -> tuple[Any, Callable[[], None]]:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, 50257, (batch, 1024), device="cuda")

    def step(*, autocast: bool = False) -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def counters() -> dict[str, int]:
    import torch

    return {"peak_allocated_bytes": torch.cuda.max_memory_allocated(), "peak_reserved_bytes": torch.cuda.max_memory_reserved(), "end_allocated_bytes": torch.cuda.memory_allocated(), "end_reserved_bytes": torch.cuda.memory_reserved()}


def of(capture: Any) -> dict[str, Any]:
    import nbmemprof as mp

    row = mp.summary(capture).row(0, named=True)
    keep = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_requested_bytes", "end_allocated_bytes", "end_reserved_bytes", "events", "ooms", "outside_bytes", "segments")
    return {n: row[n] for n in keep} | {"warnings": capture.meta["warnings"], "recording": capture.meta["recording"], "counters": capture.meta["counters"], "dropped": capture.meta["dropped"], "limit_bytes": capture.meta["limit_bytes"]}


def same(capture: dict[str, Any], torchs: dict[str, int]) -> bool:
    return all(capture[n] == v for n, v in torchs.items())


def keep(out: Path, name: str, start: dict[str, Any]) -> dict[str, Any]:
    """Write the allocator's snapshot as it is now; returns the counters that go with it."""
    import torch

    end = torch._C._cuda_memoryStats(0)
    snapshot = without_paths(torch.cuda.memory._snapshot())
    (out / f"{name}.pickle.gz").write_bytes(gzip.compress(pickle.dumps(snapshot, protocol=4), 9, mtime=0))
    return {"start": start, "end": end}


# ---------------------------------------------------------------------- stages
@stage
def probe(out: Path) -> dict[str, Any]:
    """What torch does that its documentation does not say, and what an entry costs."""
    import torch

    found: dict[str, Any] = {}
    begin = time.perf_counter()
    found["device_count_before_init"] = torch.cuda.device_count()
    found["device_count_ms"] = (time.perf_counter() - begin) * 1e3
    found["initialized_by_device_count"] = torch.cuda.is_initialized()
    begin = time.perf_counter()
    import nbmemprof as mp

    assert mp.record
    assert mp.summary
    found["import_ms"] = (time.perf_counter() - begin) * 1e3
    for name, code in {"record": "torch.cuda.memory._record_memory_history('all', stacks='python', max_entries=1000)", "is_on": "torch._C._cuda_isHistoryEnabled()", "backend": "torch.cuda.get_allocator_backend()"}.items():
        told = subprocess.run([sys.executable, "-c", f"import torch; print({code}, torch.cuda.is_initialized())"], capture_output=True, text=True, check=False)
        found[f"{name}_before_init"] = [told.returncode, told.stdout.strip()[-200:], told.stderr.strip()[-200:]]
    keep_it = torch.empty(MIB, device="cuda")
    stats_us = []
    for _ in range(100):
        begin = time.perf_counter()
        torch._C._cuda_memoryStats(0)
        stats_us.append((time.perf_counter() - begin) * 1e6)
    found["stats_us"] = statistics.median(stats_us)

    def deep(depth: int, count: int) -> float:
        if depth:
            return deep(depth - 1, count)
        begin = time.perf_counter()
        for _ in range(count):
            torch.empty(MIB, device="cuda")
        return (time.perf_counter() - begin) / count * 1e6

    deep(25, 20_000)
    for mode in ("off", "none", "python", "all"):
        count = 100_000 if mode != "all" else 30_000
        gc.collect()
        rss = memory("VmRSS")
        if mode != "off":
            torch.cuda.memory._record_memory_history("all", context=None if mode == "none" else "all", stacks="all" if mode == "all" else "python", max_entries=10**7)
        each = deep(25, count)
        row: dict[str, Any] = {"us_per_alloc_and_free": each}
        if mode != "off":
            row["ring_bytes_per_entry"] = (memory("VmRSS") - rss) / (3 * count)
            begin = time.perf_counter()
            snapshot = torch.cuda.memory._snapshot()
            row["snapshot_us_per_entry"] = (time.perf_counter() - begin) / (3 * count) * 1e6
            row["ring_and_snapshot_bytes_per_entry"] = (memory("VmRSS") - rss) / (3 * count)
            from nbmemprof.sources._cuda_trace import Stacks, events_frame

            begin = time.perf_counter()
            frame = events_frame(snapshot["device_traces"][0], 0, Stacks())
            row["columns_us_per_entry"] = (time.perf_counter() - begin) / max(frame.height, 1) * 1e6
            row["entries"] = frame.height
            row["actions_before_clear"] = len(snapshot["device_traces"][0])
            del snapshot, frame
            torch.cuda.memory._record_memory_history("all", context=None if mode == "none" else "all", stacks="python", max_entries=10**7, clear_history=True)
            row["entries_after_clear"] = len(torch.cuda.memory._snapshot()["device_traces"][0])
            torch.cuda.memory._record_memory_history(None)
        found[mode] = row
    from nbmemprof.sources import _nvml, torch_history

    cuda = torch_history.Cuda()
    found["stack_us_at_this_depth"] = cuda.stack_cost_us(cpp=False)
    facts = cuda.device_facts(0)
    begin = time.perf_counter()
    held = _nvml.process_bytes(facts["uuid"])
    found["nvml_ms"] = (time.perf_counter() - begin) * 1e3
    found["nvml_process_bytes"] = held
    free, total = torch.cuda.mem_get_info()
    found["device_used_bytes"] = total - free
    since, big = time.time() * 1e6, torch.ones(8192, 8192, device="cuda")
    for _ in range(40):
        big @ big
    torch.cuda.synchronize()
    begin = time.perf_counter()
    found["busy_fraction_of_products"] = [_nvml.busy_fraction(facts["uuid"], since), (time.perf_counter() - begin) * 1e3, (time.time() * 1e6 - since) / 1e6]
    import cProfile
    import io
    import pstats

    for _ in range(3):
        with mp.record(source="torch_history"):
            pass
    profile = cProfile.Profile()
    profile.enable()
    with mp.record(source="torch_history"):
        pass
    profile.disable()
    text = io.StringIO()
    pstats.Stats(profile, stream=text).sort_stats("tottime").print_stats(14)
    found["empty_window"] = [line for line in text.getvalue().splitlines() if line.strip()]
    found["facts"] = facts
    del keep_it
    return found


def _train(out: Path, name: str, *, before: int, steps: int, layers: int = 12) -> dict[str, Any]:
    import torch

    import nbmemprof as mp

    torch.zeros(1, device="cuda")
    step: Any = None
    if before:
        _model, step = gpt2(layers=layers)
        for _ in range(before):
            step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch._C._cuda_memoryStats(0)
    with mp.record(source="torch_history", title=name) as rec:
        if step is None:
            _model, step = gpt2(layers=layers)
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
        truth = counters()
        stats = keep(out, name, start)
    found = of(rec.capture)
    return {"torch": truth, "capture": found, "equal": same(found, truth), "at_start_bytes": int(rec.capture.allocations.filter("at_start")["size_bytes"].sum()), "stats": stats}


@stage
def gpt2_b8(out: Path) -> dict[str, Any]:
    """GPT-2 small, batch 8, 1024 tokens, fp32, two steps, model built inside the window; pool empty before."""
    return _train(out, "gpt2_b8", before=0, steps=2)


@stage
def midrun(out: Path) -> dict[str, Any]:
    """The same from the third step on: what was there before is known by the final heap and the walk back."""
    return _train(out, "midrun", before=2, steps=1)


@stage
def expandable(out: Path) -> dict[str, Any]:
    """The same with expandable segments, one step."""
    return _train(out, "expandable", before=0, steps=1)


@stage
def overhead(out: Path) -> dict[str, Any]:
    """Step time with and without the recording (Python stacks), in interleaved blocks."""
    import torch

    import nbmemprof as mp

    _model, step = gpt2()
    found = {}
    for name, autocast, steps in (("fp32", False, 8), ("bf16 autocast", True, 20)):
        for _ in range(3):
            step(autocast=autocast)
        torch.cuda.synchronize()
        times: dict[bool, list[float]] = {False: [], True: []}
        told = []
        for block in range(10):
            on = block % 2 == 1
            rec = mp.record(source="torch_history").start() if on else None
            step(autocast=autocast)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(steps):
                step(autocast=autocast)
            torch.cuda.synchronize()
            times[on].append((time.perf_counter() - begin) / steps)
            if rec is not None:
                told.append(rec.stop().meta["recording"])
        off, on_ = statistics.median(times[False]), statistics.median(times[True])
        found[name] = {
            "step_ms_off": off * 1e3, "step_ms_on": on_ * 1e3, "overhead": on_ / off - 1, "told_cost_fraction": statistics.median(t["cost_fraction"] for t in told), "told_cpu_fraction": statistics.median(t["cpu_fraction"] for t in told), "busy": [t["busy_fraction"] for t in told],
            "blocks_off_ms": [t * 1e3 for t in times[False]], "blocks_on_ms": [t * 1e3 for t in times[True]],
        }  # fmt: skip
    return found


@stage
def oom(out: Path) -> dict[str, Any]:
    """An out-of-memory error in the window, under a limit; the process works on."""
    import torch

    import nbmemprof as mp
    from nbmemprof.views import first

    torch.zeros(1, device="cuda")
    torch.cuda.set_per_process_memory_fraction(2 * 1024 * MIB / torch.cuda.get_device_properties(0).total_memory)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = torch._C._cuda_memoryStats(0)
    error, stats = None, {}
    rec = mp.record(source="torch_history", title="oom")
    try:
        with rec:
            try:
                held = [torch.empty(100 * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
                torch.cuda.empty_cache()
                held += [torch.empty(300 * MIB, dtype=torch.uint8, device="cuda") for _ in range(10)]
            finally:
                truth = counters()
                stats = keep(out, "oom", start)
    except torch.OutOfMemoryError as caught:
        error = str(caught)[:80]
    found = of(rec.capture)
    bundle = first.bundle(rec.capture)
    after = float(torch.ones(1000, device="cuda").sum())
    marks = rec.capture.marks.select("kind", "value", "seq").rows()
    return {"error": error, "torch": truth, "capture": found, "peak_equal": found["peak_allocated_bytes"] == truth["peak_allocated_bytes"], "marks": marks, "report_bytes": len(bundle["text/html"]), "works_after": after == 1000.0, "stats": stats}


def _loop(count: int, spike_at: int) -> None:
    import torch

    held = None
    for i in range(count):
        held = torch.empty(1000 + 512 * (i & 63), dtype=torch.uint8, device="cuda")
        if i == spike_at:
            spike = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(5)]
            del spike
    del held


def _long(iterations: int, *, older_peak: bool) -> dict[str, Any]:
    import torch

    import nbmemprof as mp
    from nbmemprof.views import first

    torch.zeros(1, device="cuda")
    kept = torch.empty(8 * MIB, dtype=torch.uint8, device="cuda")
    _warm(mp)
    if older_peak:
        torch.empty(2048 * MIB, dtype=torch.uint8, device="cuda")
        torch.cuda.empty_cache()
    else:
        torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    _loop(200_000, -1)
    plain_us = (time.perf_counter() - begin) / 200_000 * 1e6
    forget_high_water()
    rss = memory("VmRSS")
    rec = mp.record(source="torch_history").start()
    begin = time.perf_counter()
    _loop(iterations, iterations // 3)
    ended = time.perf_counter()
    capture = rec.stop()
    stopped = time.perf_counter()
    growth = memory("VmHWM") - rss
    row = of(capture)
    size = len(first.bundle(capture)["text/html"])
    shown = time.perf_counter()
    expected = allocated + 5 * 64 * MIB + 512 * 64 + 1024
    peak = capture.meta["peaks"]["0"]
    made_of = capture.blocks.filter(capture.blocks["snapshot_id"] == peak["snapshot_id"]).group_by("size_bytes").len().sort("size_bytes", descending=True).head(3).rows()
    return {
        "iterations": iterations, "events": capture.meta["recording"]["events"], "older_peak": older_peak,
        "loop_s": ended - begin, "plain_us_per_iteration": plain_us, "recorded_us_per_iteration": (ended - begin) / iterations * 1e6,
        "stop_s": stopped - ended, "first_view_s": shown - stopped, "html_bytes": size, "growth_bytes_at_most": growth, "growth_with_view": memory("VmHWM") - rss,
        "peak_bytes": peak["peak_allocated_bytes"], "torch_peak_bytes": torch.cuda.max_memory_allocated(), "peak_at_most": expected, "peaks": peak, "largest_blocks_at_peak": made_of,
        "peak_right": peak["peak_allocated_bytes"] == torch.cuda.max_memory_allocated() if not older_peak else allocated + 5 * 64 * MIB < peak["peak_allocated_bytes"] <= expected,
        "samples": capture.samples.height, "kept_live": kept.numel(), **row,
    }  # fmt: skip


def _warm(mp: Any) -> None:
    """Compile what is compiled on first use, once per machine, so that times below are those of the second cell."""
    import torch

    with mp.record(source="torch_history"):
        for i in range(120_000):
            torch.empty(512 * (1 + (i & 7)), dtype=torch.uint8, device="cuda")


@stage
def long_20m(out: Path) -> dict[str, Any]:
    """6.7 million allocations and frees: 20 million events."""
    return _long(6_700_000, older_peak=False)


@stage
def long_2m_older_peak(out: Path) -> dict[str, Any]:
    """Two million events below an older peak: no counter tells of this cell's own, every event must be read."""
    return _long(700_000, older_peak=True)


@stage
def user(out: Path) -> dict[str, Any]:
    """The user's own recording is on before and after, with every event in it."""
    import torch

    import nbmemprof as mp

    torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=50_000)
    held = [torch.empty(MIB, device="cuda") for _ in range(5)]
    before = len(torch.cuda.memory._snapshot()["device_traces"][0])
    with mp.record(source="torch_history") as rec:
        held += [torch.empty(MIB, device="cuda") for _ in range(7)]
    on = torch._C._cuda_isHistoryEnabled()
    after = len([e for e in torch.cuda.memory._snapshot()["device_traces"][0] if e["action"] != "snapshot"])
    torch.cuda.memory._record_memory_history(None)
    with mp.record(source="torch_history") as started_inside:
        torch.empty(MIB, device="cuda")
        torch.cuda.memory._record_memory_history("all", max_entries=1000)
        torch.empty(MIB, device="cuda")
        torch.cuda.memory._record_memory_history(None)
        torch.empty(MIB, device="cuda")
    return {"still_on": on, "events_before": before, "events_after": after, "capture": of(rec.capture), "allocs": int((rec.capture.events["action"] == "alloc").sum()),
            "inside": of(started_inside.capture), "inside_allocs": int((started_inside.capture.events["action"] == "alloc").sum()), "off_after": torch._C._cuda_isHistoryEnabled()}  # fmt: skip


@stage
def late(out: Path) -> dict[str, Any]:
    """CUDA begins inside the window; a window without CUDA makes no context."""
    import torch

    import nbmemprof as mp

    begin = time.perf_counter()
    with mp.record(source="torch_history") as nothing:
        torch.zeros(10).sum()
    empty_ms, made = (time.perf_counter() - begin) * 1e3, torch.cuda.is_initialized()
    with mp.record(source="torch_history") as rec:
        torch.empty(MIB, device="cuda")
    quick = []
    for _ in range(5):
        begin = time.perf_counter()
        with mp.record(source="torch_history"):
            pass
        quick.append((time.perf_counter() - begin) * 1e3)
    picture = mp.snapshot()
    return {"context_without_use": made, "empty_ms_without_cuda": empty_ms, "warnings": nothing.capture.meta["warnings"], "actions": rec.capture.events["action"].to_list(),
            "capture": of(rec.capture), "empty_window_ms": quick, "picture_segments": picture.segments.height, "stats": mp.stats().filter(mp.stats()["counter"].str.starts_with("derived")).rows()}  # fmt: skip


@stage
def async_(out: Path) -> dict[str, Any]:
    """backend:cudaMallocAsync keeps no history: counters are read instead."""
    import torch

    import nbmemprof as mp

    with mp.record(source="torch_history") as rec:
        held = [torch.empty(50 * MIB, dtype=torch.uint8, device="cuda") for _ in range(4)]
        time.sleep(0.2)
        del held
        torch.cuda.synchronize()
    return {"warnings": rec.capture.meta["warnings"], "peaks": rec.capture.meta["peaks"], "samples": rec.capture.samples.height, "summary": str(mp.summary(rec.capture).to_dicts())[:600]}


@stage
def notebook(out: Path) -> dict[str, Any]:
    """``%%memprof`` in a real kernel on the GPU: a training cell, an out-of-memory cell, a cell after it."""
    import nbformat
    from nbclient import NotebookClient

    home = out / "jupyter"
    spec = home / "kernels" / "python3"
    spec.mkdir(parents=True, exist_ok=True)
    (spec / "kernel.json").write_text(json.dumps({"argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"], "display_name": "Python 3", "language": "python"}))
    os.environ["JUPYTER_PATH"] = str(home)
    cells = [
        "import sys; sys.path[:0] = ['tests/gpu']; import torch, record_h200; torch.zeros(1, device='cuda'); torch.cuda.reset_peak_memory_stats()\n%load_ext nbmemprof",
        "%%memprof\nmodel, step = record_h200.gpt2()\nstep(); step(); torch.cuda.synchronize()\ntruth = record_h200.counters()\ntruth",
        "import json, nbmemprof as mp\ncap = _memprof\nrow = mp.summary(cap).row(0, named=True)\nprint(json.dumps({'truth': truth, 'capture': {k: row[k] for k in truth}, 'warnings': cap.meta['warnings'], 'recording': cap.meta['recording'], 'sites': mp.sites(cap, top=3).select('site').to_series().to_list()}))",
        "%%memprof\nbig = [torch.empty(20 << 30, dtype=torch.uint8, device='cuda') for _ in range(20)]",
        "row = mp.summary(_memprof).row(0, named=True)\nprint(json.dumps({'ooms': row['ooms'], 'peak': row['peak_allocated_bytes'], 'works': float(torch.ones(10, device='cuda').sum()), 'raised': True}))",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    book.cells[3].metadata["tags"] = ["raises-exception"]
    NotebookClient(book, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    nbformat.write(book, out / "notebook.ipynb")

    def outputs(cell: int) -> list[dict[str, Any]]:
        return list(book.cells[cell].outputs)

    texts = [o["text"] for i in (2, 4) for o in outputs(i) if o["output_type"] == "stream" and o["name"] == "stdout"]
    reports = {i: [[*sorted(o["data"]), len(o["data"].get("text/html", "")), str(o["data"].get("text/plain", ""))[:400]] for o in outputs(i) if "data" in o] for i in (1, 3)}
    errors = {i: [o["ename"] for o in outputs(i) if o["output_type"] == "error"] for i in range(5)}
    train, after = json.loads(texts[0]), json.loads(texts[1])
    return {"train": train, "equal": train["truth"] == train["capture"], "after_oom": after, "errors": errors, "reports": reports}


if __name__ == "__main__":
    sys.exit(stage.main(sys.argv[1:]))
