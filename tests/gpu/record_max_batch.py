"""Largest batch on a real GPU, beside accelerate's and Lightning's ways: recordings for tests/fixtures/h200/max_batch.

    python tests/gpu/record_max_batch.py OUT [kind ...]

Each kind of step runs under a limit (``set_per_process_memory_fraction``). ``OUT/KIND.json`` has the tries of each way, the answer run in fresh processes
(two full steps, and at the answer + 1), device, versions, date and command; ``OUT/KIND-N.parquet`` the requests of try N. Without a GPU the kinds run small on
the CPU under a made-up limit, to see that the script works.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _recording import ROOT, today
from max_batch_kinds import DEVICE, KINDS, ON_GPU, Kind

STEPS = 2
START = 512 if ON_GPU else 32  # where a person who does not know would let accelerate begin
PRETENDED = 21  # largest batch of the dry run


# ---------------------------------------------------------------------- limits
@contextlib.contextmanager
def under(kind: Kind) -> Any:
    """The kind's limit and settings."""
    if not ON_GPU:
        yield
        return
    clean()
    total = torch.cuda.get_device_properties(0).total_memory
    torch._C._accelerator_setAllocatorSettings(kind.conf or "expandable_segments:False")
    torch.cuda.set_per_process_memory_fraction((kind.limit + 0.5) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
        clean()


def clean() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def pretend(kind: Kind) -> Kind:
    """In the dry run a batch beyond a made-up limit is refused."""
    if ON_GPU:
        return kind

    def step(state: Any, batch: int) -> None:
        if batch > PRETENDED:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than was pretended")
        kind.step(state, batch)

    return Kind(kind.setup, step, kind.limit, kind.conf)


# ---------------------------------------------------------------------- three ways
def ours(kind: Kind, out: Path, name: str) -> dict[str, Any]:
    import nbmemprof as mp
    from nbmemprof.searching import batch as searching
    from nbmemprof.searching import trying

    captures: list[tuple[int, Any, Any]] = []

    class Keeping(trying.CudaBench):
        def stream(self, capture: Any, batch: int, fits: bool) -> Any:
            captures.append((batch, capture, self.room()))
            return super().stream(capture, batch, fits)

    original, searching.CudaBench = searching.CudaBench, Keeping  # type: ignore[misc,assignment]
    begin = time.perf_counter()
    try:
        result = mp.max_batch(kind.step, setup=kind.setup, **({} if ON_GPU else {"limit_bytes": "24MiB"}))
    finally:
        searching.CudaBench = original  # type: ignore[misc]
    seconds = time.perf_counter() - begin
    rooms = []
    for number, (_batch, capture, room) in enumerate(captures, 1):
        keep(capture, out / f"{name}-{number}")
        rooms.append([room.limit_bytes, room.capacity_bytes, room.card_bytes])
    return {
        "answer": result.batch, "exact": result.exact, "tries": len(result.made), "ooms": result.ooms, "seconds": seconds, "log": result.tries.to_dicts(), "rooms": rooms,
        "per_sample_bytes": result.per_sample_bytes, "fixed_bytes": result.fixed_bytes, "residual_bytes": result.residual_bytes, "said": repr(result), "stopped": result.stopped,
    }  # fmt: skip


def keep(capture: Any, path: Path) -> None:
    """The tables from which a try's requests are read again."""
    import polars as pl

    for table in ("events", "segments", "blocks", "marks"):
        frame = capture.tables[table]
        if frame.height:
            plain = frame.with_columns(pl.col(pl.Categorical).cast(pl.String), pl.col(pl.Enum).cast(pl.String)).drop("stack_id", strict=False)
            plain.write_parquet(f"{path}-{table}.parquet", compression="zstd", compression_level=19)
    names = ("origin", "source", "conf", "torch", "settings", "capacity_bytes", "limit_bytes", "start_snapshot_id", "counters", "dropped")
    Path(f"{path}-meta.json").write_text(json.dumps({n: capture.meta.get(n) for n in names}, default=str))


class Counted:
    """A kind whose tries are counted as another tool makes them."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.log = kind, []  # type: ignore[var-annotated]

    def two_steps(self, batch: int) -> None:
        entry = {"batch": batch, "fits": False}
        self.log.append(entry)
        state = self.kind.setup()
        for _ in range(STEPS):
            self.kind.step(state, batch)
        if ON_GPU:
            torch.cuda.synchronize()
        entry["fits"] = True

    def told(self, answer: int, begin: float) -> dict[str, Any]:
        return {"answer": answer, "tries": len(self.log), "ooms": sum(not e["fits"] for e in self.log), "seconds": time.perf_counter() - begin, "log": self.log}


def accelerates(kind: Kind) -> dict[str, Any]:
    from accelerate.utils import find_executable_batch_size

    counted, begin = Counted(kind), time.perf_counter()

    @find_executable_batch_size(starting_batch_size=START)
    def run(batch_size: int) -> int:
        counted.two_steps(batch_size)
        return batch_size

    return counted.told(run(), begin)


def lightnings(kind: Kind, mode: str) -> dict[str, Any]:
    import logging
    import warnings

    import lightning.pytorch as pl
    from lightning.pytorch.tuner import Tuner, batch_size_scaling

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    counted = Counted(kind)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.batch_size = 2
            self.made: Any = None
            self.dummy = torch.nn.Linear(1, 1)

        def training_step(self, *_: Any) -> None:
            self.made = self.made or [kind.setup()]
            kind.step(self.made[0], self.batch_size)
            self.optimizers().step()  # of a layer beside the model: Lightning counts its steps by it

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.dummy.parameters(), lr=0.1)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(list(range(1 << 14)), batch_size=self.batch_size)

    module, original = Module(), batch_size_scaling._try_loop_run

    def tried(*args: Any) -> Any:
        entry = {"batch": module.batch_size, "fits": False}
        counted.log.append(entry)
        found = original(*args)
        entry["fits"] = True
        return found

    batch_size_scaling._try_loop_run, begin = tried, time.perf_counter()
    try:
        trainer = pl.Trainer(accelerator="gpu" if ON_GPU else "cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir="/tmp/lightning")
        more = {"margin": 0.0} if mode == "binsearch" else {}
        answer = Tuner(trainer).scale_batch_size(module, mode=mode, steps_per_trial=STEPS, init_val=2, **more)
    finally:
        batch_size_scaling._try_loop_run = original
    return counted.told(int(answer or 0), begin)


# ---------------------------------------------------------------------- the truth
def verify(name: str, batch: int) -> str:
    """Two full steps in this fresh process."""
    kind = pretend(KINDS[name]())
    with under(kind):
        try:
            state = kind.setup()
            for _ in range(STEPS):
                kind.step(state, batch)
            if ON_GPU:
                torch.cuda.synchronize()
        except torch.OutOfMemoryError:
            return "out of memory"
    return "fits"


def begin(name: str, batch: int) -> subprocess.Popen[str]:
    """The same in a process of its own, while others go on."""
    return subprocess.Popen([sys.executable, __file__, "--verify", name, str(batch)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=120)
    return said.strip().splitlines()[-1] if said.strip() else "no answer"


def attempt(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return function()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": traceback.format_exc()[-1500:]}


def main(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    facts = {
        "device": torch.cuda.get_device_name() if ON_GPU else "CPU", "torch": torch.__version__, "python": sys.version.split()[0], "date": today(),
        "command": f"python tests/gpu/record_max_batch.py OUT {' '.join(names)}".strip(),
    }  # fmt: skip
    for package in ("transformers", "accelerate", "lightning"):
        with contextlib.suppress(Exception):
            facts[package] = __import__(package).__version__
    if ON_GPU:  # kernels and handles that every way would meet
        torch.nn.functional.linear(torch.ones(8, 8, device=DEVICE, requires_grad=True), torch.ones(8, 8, device=DEVICE)).sum().backward()
    results: dict[str, dict[str, Any]] = {}
    waiting: dict[str, dict[int, subprocess.Popen[str]]] = {}
    for name in names:
        kind = pretend(KINDS[name]())
        row: dict[str, Any] = dict(facts) | {"kind": name, "what": (KINDS[name].__doc__ or "").strip(), "limit_bytes": kind.limit, "conf": kind.conf}
        with under(kind):
            row["nbmemprof"] = attempt(lambda kind=kind, name=name: ours(kind, out, name))  # type: ignore[misc]
        for tool, run in (("accelerate", accelerates), ("lightning_power", lambda k: lightnings(k, "power")), ("lightning_binsearch", lambda k: lightnings(k, "binsearch"))):
            with under(kind):
                row[tool] = attempt(lambda run=run, kind=kind: run(kind))  # type: ignore[misc]
        results[name] = row
        mine = row["nbmemprof"].get("answer", 0)
        others = {r["answer"] for tool, r in row.items() if isinstance(r, dict) and "answer" in r and r["answer"] > mine}
        waiting[name] = {batch: begin(name, batch) for batch in sorted({mine, mine + 1, *others} - {0})}
        (out / f"{name}.json").write_text(json.dumps(row, indent=1, default=str))
        print(name, {t: {k: r.get(k) for k in ("answer", "tries", "ooms", "seconds", "exact", "error") if k in r} for t, r in row.items() if isinstance(r, dict)}, flush=True)
    for name, row in results.items():
        row["fresh"] = {str(batch): ended(process) for batch, process in waiting[name].items()}
        (out / f"{name}.json").write_text(json.dumps(row, indent=1, default=str))
        print(name, "fresh processes:", row["fresh"], flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--verify":
        print(verify(sys.argv[2], int(sys.argv[3])))
    else:
        os.chdir(ROOT)
        main(Path(sys.argv[1]).resolve(), sys.argv[2:] or list(KINDS))
