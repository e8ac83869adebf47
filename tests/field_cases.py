"""Memory trouble as people meet it, at any scale and on any device: what runs, what is right to say of it, what this library says.

Each case is a function of ``Where`` that gives ``Seen``: the expected line, bytes and holder beside those that were found. The
lines end in a mark. At scale 1 (a GPU) the numbers are those of the reports that the cases stand for; ``tests/test_field_cases.py`` runs them
small on the CPU, ``tests/gpu/record_cases.py`` whole on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch

import nbmemprof as mp
from nbmemprof import holding

MIB = 1 << 20
CASES: dict[str, Callable[[Where], Seen]] = {}
DEV = "cpu"  # where the bodies below put their tensors
ACTS: list[torch.Tensor] = []
BEST: list[torch.Tensor] = []


@dataclass(frozen=True)
class Where:
    """The device, and how large: 1 is what was reported."""

    device: str = "cpu"
    scale: float = 1.0

    def many(self, whole: int, least: int = 1, of: int = 1) -> int:
        """A size at this scale, a multiple of ``of``."""
        return max(least, int(whole * self.scale) // of * of)

    def alive(self) -> int:
        """Bytes of tensors alive: torch's counter, or the storages of all CPU tensors that Python knows."""
        gc.collect()
        if self.device == "cuda":
            return int(torch.cuda.memory_allocated())
        storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]  # a fake one has no storage
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@dataclass
class Seen:
    """What is right and what was found, by the same names; the captures that were asked."""

    expected: dict[str, Any]
    found: dict[str, Any]
    captures: dict[str, mp.Capture] = field(default_factory=dict)


def case(number: str) -> Callable[[Callable[[Where], Seen]], Callable[[Where], Seen]]:
    def made(function: Callable[[Where], Seen]) -> Callable[[Where], Seen]:
        @functools.wraps(function)
        def run(where: Where) -> Seen:
            global DEV
            DEV = where.device
            gc.collect()
            return function(where)

        CASES[number] = run
        return run

    return made


def line(mark: str) -> str:
    """``field_cases.py:12``: the line that ends in ``# mark``."""
    found = [number for number, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith(f"# {mark}")]
    (number,) = found
    return f"field_cases.py:{number}"


def by_line(capture: mp.Capture) -> dict[str, int]:
    """Line to bytes an iteration, as ``leaks`` says."""
    return dict(mp.leaks(capture).group_by("site", maintain_order=True).agg(pl.col("bytes_per_iteration").sum()).sort("site").iter_rows())


def kept(capture: mp.Capture) -> dict[str, int]:
    """Line to bytes made within the capture and alive at its end."""
    rows = mp.sites(capture, at="end").filter(pl.col("kept_bytes") > 0)
    return dict(rows.group_by("site", maintain_order=True).agg(pl.col("kept_bytes").sum()).sort("site").iter_rows())


def held(where: Where, namespace: dict[str, Any], **like: str) -> dict[str, Any]:
    """The largest group of ``holders`` of this kind or name."""
    rows = mp.holders(namespace, device=where.device, by="holder")
    for column, value in like.items():
        rows = rows.filter(pl.col(column) == value)
    return rows.row(0, named=True) if rows.height else {}


# ---------------------------------------------------------------------- 01: validation keeps every graph
BATCHES = 12


def evaluate(batch: int, wide: int, hidden: int):
    net = torch.nn.Sequential(torch.nn.Linear(wide, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)).to(DEV)
    total = torch.zeros((), device=DEV)
    for _ in range(BATCHES):
        x = torch.randn(batch, wide, device=DEV)  # 01 input
        y = net(x)  # 01 graph
        total = total + y.pow(2).mean()
    return net, total


@case("01")
def running_loss(where: Where) -> Seen:
    """No ``no_grad`` and a running sum of the losses: linear growth, held by ``total.grad_fn``."""
    batch, wide, hidden = where.many(256, 128, 128), where.many(1024, 256), where.many(4096, 1024)
    with mp.record() as window:
        net, total = evaluate(batch, wide, hidden)
    graph, first = batch * hidden * 4 + batch * 4, batch * wide * 4
    holder = held(where, {"net": net, "total": total}, kind="graph")
    return Seen(
        {"lines": {line("01 graph"): graph, line("01 input"): first}, "bytes_per_iteration": graph + first, "holder": "total.grad_fn", "holder_bytes": BATCHES * (graph + first), "advice": True},
        {
            "lines": by_line(window.capture), "bytes_per_iteration": sum(by_line(window.capture).values()), "holder": holder.get("holder"), "holder_bytes": holder.get("size_bytes"),
            "advice": all(word in holder.get("advice", "") for word in ("no_grad", ".item()")),
        },
        {"": window.capture},
    )  # fmt: skip


# ---------------------------------------------------------------------- 03: each re-run of the cell adds a hook
PASSES = 8


def probe(net: torch.nn.Module, batch: int, wide: int):
    def keep(module, args, out):
        ACTS.append(out.detach().clone())  # 03 hook

    net[1].register_forward_hook(keep)
    with torch.no_grad():
        x = torch.ones(batch, wide, device=DEV)
        for _ in range(PASSES):
            net(x)


@case("03")
def hook_again(where: Where) -> Seen:
    """Run r of the cell keeps r times as much: a hook more each time."""
    batch, wide = where.many(1024, 64), where.many(2048, 512)
    net = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU()).to(DEV)
    each, found, captures = batch * wide * 4, [], {}
    for run in (1, 2, 3):
        with mp.record() as window:
            probe(net, batch, wide)
        hooks = [count for where_, _, function, count in holding.look({"net": net}).hooks if where_ == "net.1" and function == "probe.keep"]
        found.append({"lines": by_line(window.capture), "kept": sum(kept(window.capture).values()), "hooks": len(net[1]._forward_hooks), "told hooks": hooks})
        captures[str(run)] = window.capture
    holder = held(where, {"net": net}, holder="field_cases.ACTS[…]")
    seen = Seen(
        {
            "runs": [{"lines": {line("03 hook"): r * each}, "kept": r * PASSES * each, "hooks": r, "told hooks": [r] if r > 1 else []} for r in (1, 2, 3)],
            "holder": "field_cases.ACTS[…]", "holder_bytes": 6 * PASSES * each,
        },
        {"runs": found, "holder": holder.get("holder"), "holder_bytes": holder.get("size_bytes")},
        captures,
    )  # fmt: skip
    ACTS.clear()
    return seen


# ---------------------------------------------------------------------- 04: a failed cell keeps its tensors
def _inner(batch, size: int):
    work = torch.empty(size, dtype=torch.uint8, device=DEV)  # 04 work
    if work.numel() > batch.numel():
        raise ValueError("label 7 is not in range(5)")


def fail(first: int, second: int):
    batch = torch.empty(first, dtype=torch.uint8, device=DEV)  # 04 batch
    _inner(batch, second)


@contextlib.contextmanager
def notebook() -> Iterator[Any]:
    """A shell with the magics, that shows what it prints nowhere."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.clear_instance()
    with capture_output():
        shell = InteractiveShell.instance()
        shell.run_line_magic("load_ext", "nbmemprof")
        shell.user_ns.update(torch=torch, mp=mp, DEV=DEV)
        try:
            yield shell
        finally:
            shell.run_line_magic("unload_ext", "nbmemprof")
            shell.run_line_magic("reset", "-f")
            InteractiveShell.clear_instance()


def cell(shell: Any, source: str) -> mp.Capture:
    shell.run_cell(source, store_history=True)
    return shell.user_ns["_memprof"]


@case("04")
def traceback_keeps(where: Where) -> Seen:
    """The stored traceback's frames hold what the failed cell made; dropping it gives all of it back."""
    first, second = where.many(96) * 2 * MIB, where.many(160) * 2 * MIB
    with notebook() as shell:
        before = where.alive()
        shell.user_ns.update(fail=fail, first=first, second=second)
        capture = cell(shell, "%%memprof\nfail(first, second)")
        kept_now = where.alive() - before
        frame = mp.holders(shell.user_ns, device=where.device).filter(pl.col("kind") == "traceback")
        holders = {row["holder"].partition(":")[0]: row["size_bytes"] for row in frame.iter_rows(named=True)}
        told = capture.meta.get("traceback_bytes")
        shell.run_line_magic("memprof", "release --yes")
        after = where.alive() - before
    return Seen(
        {
            "lines": {line("04 work"): second, line("04 batch"): first}, "leaks": {}, "kept": first + second, "told": first + second,
            "holders": {"work in _inner (field_cases.py": second, "batch in fail (field_cases.py": first}, "after": 0,
        },
        {"lines": kept(capture), "leaks": by_line(capture), "kept": kept_now, "told": told, "holders": holders, "after": after},
        {"": capture},
    )  # fmt: skip


# ---------------------------------------------------------------------- 06: lru_cache on a method
FOLDS = 5


def scorer(rows: int, wide: int) -> type[torch.nn.Module]:
    class Scorer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = torch.nn.Parameter(torch.zeros(rows, wide, device=DEV))  # 06 parameter

        @functools.cache  # noqa: B019 - the leak
        def mask(self, n):
            return torch.ones(n, n, dtype=torch.bool, device=DEV).tril()  # 06 mask

    return Scorer


def folds(cls: type[Any], size: int):
    for _ in range(FOLDS):
        model = cls()
        model.mask(size)
        del model
        gc.collect()


@case("06")
def cache_on_method(where: Where) -> Seen:
    """A cache of the class has ``self`` in its keys: every model stays."""
    rows, wide, size = where.many(4096, 256), where.many(4096, 512), where.many(2048, 256)
    cls, before = scorer(rows, wide), where.alive()
    with mp.record() as window:
        folds(cls, size)
    holder = held(where, {}, kind="lru_cache")
    grown = where.alive() - before
    cls.mask.cache_clear()
    each = {line("06 parameter"): rows * wide * 4, line("06 mask"): size * size}
    return Seen(
        {"lines": each, "kept": FOLDS * sum(each.values()), "holder": "lru_cache of scorer.Scorer.mask", "holder_bytes": FOLDS * sum(each.values()), "advice": True, "after": 0},
        {
            "lines": by_line(window.capture), "kept": grown, "holder": holder.get("holder"), "holder_bytes": holder.get("size_bytes"), "advice": "cache_clear()" in holder.get("advice", ""),
            "after": where.alive() - before,
        },
        {"": window.capture},
    )  # fmt: skip


# ---------------------------------------------------------------------- 08: a small view keeps a large storage
KEPT = 16


def best(rows: int, wide: int):
    for _ in range(KEPT):
        scores = torch.rand(rows, wide, device=DEV)  # 08 scores
        BEST.append(scores[:1])


@case("08")
def view_keeps_storage(where: Where) -> Seen:
    """A slice that is kept keeps all rows."""
    rows, wide = where.many(1024, 64), where.many(16384, 1024)
    with mp.record() as window:
        best(rows, wide)
    holder = held(where, {"BEST": BEST}, name="BEST")
    BEST.clear()
    return Seen(
        {"lines": {line("08 scores"): rows * wide * 4}, "holder": "BEST[…]", "holder_bytes": KEPT * rows * wide * 4, "visible": KEPT * wide * 4, "amplification": float(rows), "advice": True},
        {
            "lines": by_line(window.capture), "holder": holder.get("holder"), "holder_bytes": holder.get("size_bytes"), "visible": holder.get("tensor_bytes"),
            "amplification": holder.get("amplification"), "advice": ".clone()" in holder.get("advice", ""),
        },
        {"": window.capture},
    )  # fmt: skip


# ---------------------------------------------------------------------- 12: the second iteration needs more
LAYERS = 8


def train(wide: int, after: Callable[[Callable[[], None]], None]):
    net = torch.nn.Sequential(*[torch.nn.Linear(wide, wide, bias=False) for _ in range(LAYERS)]).to(DEV)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)

    def step() -> None:
        x = torch.randn(16, wide, device=DEV)
        net(x).square().mean().backward()
        opt.step()  # 12 step
        opt.zero_grad(set_to_none=False)

    after(step)
    return net, opt


@case("12")
def adam_first_step(where: Where) -> Seen:
    """The optimizer makes its state in the first step: once, and no leak."""
    wide = where.many(4096, 256, 256)
    steps: list[mp.Capture] = []

    def three(step: Callable[[], None]) -> None:
        for _ in range(3):
            with mp.record() as each:
                step()
            steps.append(each.capture)

    with mp.record() as window:
        net, opt = train(wide, three)
    weights = LAYERS * wide * wide * 4
    counters = 0 if where.device == "cuda" else LAYERS * 4  # the step counters live on the host
    classes = mp.lifetimes(window.capture).filter(pl.col("site") == line("12 step"), pl.col("live_bytes") > 0)
    parts = mp.breakdown(window.capture, at="end").filter(pl.col("category") != "unknown")
    grown = [kept(each).get(line("12 step"), 0) for each in steps]
    seen = Seen(
        {
            "leaks": {}, "classes": {"first-step": 2 * weights + counters}, "at the step's line": [2 * weights + counters, 0, 0],
            "breakdown": {"weights": weights, "gradients": weights, "optimizer_state": 2 * weights + counters},
        },
        {
            "leaks": by_line(window.capture), "classes": {str(k): v for k, v in classes.group_by("class").agg(pl.col("live_bytes").sum()).iter_rows()}, "at the step's line": grown,
            "breakdown": {name: dict(parts.select("category", "size_bytes").iter_rows()).get(name) for name in ("weights", "gradients", "optimizer_state")},
        },
        {"": window.capture},
    )  # fmt: skip
    del net, opt
    return seen


# ---------------------------------------------------------------------- 22: the batch that fails in the second step
def make_trainer(sample: int, state_bytes: int):
    state = []

    def step(batch):
        acts = [torch.empty(sample, dtype=torch.uint8, device=DEV) for _ in range(batch)]  # 22 sample
        del acts
        if not state:
            state.append(torch.empty(state_bytes, dtype=torch.uint8, device=DEV))  # 22 state

    return step


@case("22")
def second_step(where: Where) -> Seen:
    """State that exists only after the first step: two recorded steps tell what a sample and the state take, and so the largest batch."""
    sample = where.many(16, 6) * 2 * MIB if where.device == "cuda" else where.many(32 * MIB, 32 << 10, 1024)
    budget, state = 64 * sample, 600 * sample // 32 // 1024 * 1024
    if where.device == "cuda":
        state = state // (2 * MIB) * (2 * MIB)
    batch, windows = 8, []
    step = make_trainer(sample, state)
    with mp.record() as whole:
        for _ in range(2):
            with mp.record() as window:
                step(batch)
            windows.append(window.capture)
    peaks = [int(row["peak_allocated_bytes"] - row["start_allocated_bytes"]) for c in windows for row in [mp.summary(c).row(0, named=True)]]
    now = [int(row["end_allocated_bytes"] - row["start_allocated_bytes"]) for c in windows for row in [mp.summary(c).row(0, named=True)]]
    first = mp.lifetimes(whole.capture).filter(pl.col("site") == line("22 state"))
    holder = held(where, {"step": step}, kind="closure")
    per_sample = peaks[1] // batch
    seen = Seen(
        {
            "peaks above the start": [max(batch * sample, state), batch * sample], "kept by each step": [state, 0], "leaks": {}, "lines": {line("22 state"): state},
            "holder": "make_trainer.step: step closure state[…]", "holder_bytes": state, "batch of one step": budget // sample, "batch": (budget - state) // sample, "survives two steps": [True, False],
        },
        {
            "peaks above the start": peaks, "kept by each step": now, "leaks": by_line(whole.capture), "lines": dict(first.select("site", "live_bytes").iter_rows()),
            "holder": holder.get("holder"), "holder_bytes": holder.get("size_bytes"), "batch of one step": budget // per_sample, "batch": (budget - now[0]) // per_sample,
            "survives two steps": _survive(where, sample, state, budget, (budget - now[0]) // per_sample),
        },
        {"": whole.capture},
    )  # fmt: skip
    del step
    return seen


def _survive(where: Where, sample: int, state: int, budget: int, batch: int) -> list[bool]:
    """Whether two steps of this batch, and of one sample more, stay within the budget: on a GPU tried, else counted."""
    if where.device != "cuda":
        return [size * sample + state <= budget for size in (batch, batch + 1)]
    found = []
    for size in (batch, batch + 1):
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one that lies in a larger segment leaves a hole, into which a sample may fit
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + budget + 4096) / torch.cuda.get_device_properties(0).total_memory)
        step = make_trainer(sample, state)
        try:
            step(size)
            step(size)
            found.append(True)
        except torch.OutOfMemoryError:
            found.append(False)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            del step
    return found


# ---------------------------------------------------------------------- 27: the loading cell again
LOAD = "%%memprof\nDATA = torch.empty(size, dtype=torch.uint8, device=DEV)"


@case("27")
def loading_again(where: Where) -> Seen:
    """The old value lives until the name is bound anew: twice the peak, no leak."""
    size = where.many(256) * 2 * MIB
    with notebook() as shell:
        before = where.alive()
        shell.user_ns["size"] = size
        captures = {str(n): cell(shell, LOAD) for n in (1, 2, 3)}
        after = where.alive() - before
    rows = [mp.summary(c).sort("device", nulls_last=True).row(0, named=True) for c in captures.values()]
    base = rows[0]["start_allocated_bytes"]
    site = [max(kept(c), key=lambda name: kept(c)[name]).partition("]")[2] for c in captures.values()]
    return Seen(
        {
            "peaks above empty": [size, 2 * size, 2 * size], "retained change": [size, 0, 0], "replaced": [None, [{"name": "DATA", "size_bytes": size}], [{"name": "DATA", "size_bytes": size}]],
            "leaks": [{}, {}, {}], "alive": size, "line": [":2", ":2", ":2"],
        },
        {
            "peaks above empty": [row["peak_allocated_bytes"] - base for row in rows], "retained change": [row["end_allocated_bytes"] - row["start_allocated_bytes"] for row in rows],
            "replaced": [c.meta.get("replaced") for c in captures.values()], "leaks": [by_line(c) for c in captures.values()], "alive": after, "line": site,
        },
        captures,
    )  # fmt: skip
