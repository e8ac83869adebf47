"""Findings that categories, phases and the ledger show, on small versions of cases from the field."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from support import ROOT

import nbmemprof as mp
from nbmemprof.capture import Capture
from nbmemprof.views.findings import findings

torch: Any = pytest.importorskip("torch")
MIB = 1 << 20


def recorded(work: Callable[[], Any]) -> Capture:
    with mp.record() as rec:
        held = work()
    del held
    assert rec.capture is not None
    return rec.capture


def found(capture: Capture, rule: str) -> str | None:
    rows = [row for row in mp.advise(capture, replay=False).to_dicts() if row["rule"] == rule]
    return f"{rows[0]['finding']} {rows[0]['action']}" if rows else None


# ---------------------------------------------------------------------- the second iteration needs more than the first
def adam(steps: int = 3, optimizer: str = "Adam") -> Any:
    net = torch.nn.Sequential(*[torch.nn.Linear(256, 256, bias=False) for _ in range(4)])
    opt = getattr(torch.optim, optimizer)(net.parameters(), lr=1e-4)
    for _ in range(steps):
        net(torch.randn(16, 256)).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return net, opt


@pytest.mark.cost(2)
def test_the_state_that_adam_makes_in_its_first_step_is_named_and_is_no_leak() -> None:
    capture = recorded(adam)
    said = found(capture, "first_step") or ""
    for word in ("optimizer state", "first step", "exp_avg", "2 MiB", "test_usage.py:"):
        assert word in said
    assert "leak" not in said and mp.leaks(capture).is_empty()
    weights, grads, state = (4 * 4 * 256 * 256 * n for n in (1, 1, 2))
    held = dict(mp.breakdown(capture, at="end").select("category", "requested_bytes").iter_rows())
    assert (held["weights"], held["gradients"], held["optimizer_state"]) == (weights, grads, state + 4 * 4)  # and a step counter each
    assert said.split(" Judge")[0] in " ".join(findings(capture))


def test_an_optimizer_without_state_has_no_first_step_to_speak_of() -> None:
    assert found(recorded(lambda: adam(optimizer="SGD")), "first_step") is None


# ---------------------------------------------------------------------- checkpointing that saves nothing
SIZE, BLOCKS, OPS = 1 << 18, 8, 4


def block(x: Any) -> Any:
    for _ in range(OPS):
        x = x.sin()
    return x


def whole(x: Any) -> Any:
    for _ in range(BLOCKS):
        x = block(x)
    return x


def checkpointed(*, each: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.zeros(SIZE // 4, requires_grad=True)
    for part in [block] * BLOCKS if each else [whole]:
        x = checkpoint(part, x, use_reentrant=False)
    x.sum().backward()


@pytest.mark.cost(0.8)
def test_one_checkpoint_around_everything_is_told_and_one_a_block_is_not() -> None:
    once, each = recorded(lambda: checkpointed(each=False)), recorded(lambda: checkpointed(each=True))
    said = found(once, "one_checkpoint") or ""
    for word in ("Checkpoint", "recompute", "backward", "each block"):
        assert word in said
    assert found(each, "one_checkpoint") is None
    peaks = [mp.summary(c)["peak_allocated_bytes"].item() // SIZE for c in (once, each)]
    assert peaks[0] >= BLOCKS * OPS and peaks[1] <= BLOCKS + OPS + 4


# ---------------------------------------------------------------------- the ledger's part, from an H200
def ledger_of(name: str) -> Capture:
    return mp.load(gzip.decompress((ROOT / "tests" / "fixtures" / "h200" / "ledger" / f"{name}.nbmem.gz").read_bytes()))


def test_cupys_pool_a_strangers_memory_and_pinned_memory_are_findings() -> None:
    said = found(ledger_of("cupy"), "cupy_pool") or ""
    assert "384 MiB" in said and "free_all_blocks" in said and "context" not in said
    assert "298.2 MiB of the" in (found(ledger_of("foreign"), "unexplained") or "")
    for name, more in (("pinned", "rounded up to a power of two, 504 MiB more"), ("pinned_after", "belong to tensors that are gone")):
        pinned = found(ledger_of(name), "pinned") or ""
        assert "1 GiB of host memory are pinned" in pinned and more in pinned and "_host_emptyCache" in pinned
    assert [found(ledger_of(name), rule) for name, rule in (("gpt2_train", "cupy_pool"), ("before_foreign", "unexplained"))] == [None, None]


def test_cases_from_the_field_get_their_diagnosis_on_an_h200() -> None:
    """``tests/gpu/record_ledger.py OUT cases``: what was said there, and torch's own numbers."""
    told = json.loads((ROOT / "tests" / "fixtures" / "h200" / "ledger" / "cases.json").read_text())["numbers"]
    weights = 8 * 4096 * 4096 * 4
    held = dict(told["first step"]["at the end"])
    assert (held["weights"], held["gradients"], held["optimizer_state"]) == (weights, weights, 2 * weights)
    wanted = {
        "first step": ("optimizer state", "first step", "exp_avg", "1 GiB"), "one checkpoint": ("Checkpointing saves next to nothing", "recompute", "backward"),
        "loading, run 2": ("512 MiB of the peak were the previous value of DATA", "del DATA"), "loading, run 3": ("previous value of DATA",),
    }  # fmt: skip
    for case, words in wanted.items():
        assert all(word in " ".join(told[case]["findings"]) for word in words), case
    assert all(case["leaks"] == 0 for case in told.values())
    size = 16 * MIB
    above = {name: (told[name]["peak"] - told[name]["start"]) / size for name in ("one checkpoint", "one a block")}
    assert above["one checkpoint"] >= 32 and above["one a block"] <= 8 + 4 + 4
    assert not [rule for rule, *_ in told["one a block"]["advise"] if rule == "one_checkpoint"]
    loading = [told[f"loading, run {n}"] for n in (1, 2, 3)]
    assert [run["peak"] - loading[0]["start"] for run in loading] == [512 * MIB, 1024 * MIB, 1024 * MIB]
    assert [run["end"] - run["start"] for run in loading] == [512 * MIB, 0, 0]


# ---------------------------------------------------------------------- what checkpointing each block would save
class Blocks(torch.nn.Module):  # type: ignore[misc]
    """Six equal blocks that keep more within than they hand on, and a head that makes its own peak."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        linear, gelu = torch.nn.Linear, torch.nn.GELU
        self.blocks = torch.nn.ModuleList(
            [torch.nn.Sequential(linear(width, 8 * width), gelu(), linear(8 * width, 8 * width), gelu(), linear(8 * width, width)) for _ in range(6)]
        )

    def forward(self, x: Any, checkpoint: bool = False) -> Any:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if checkpoint else block(x)
        return x.square().mean()


@pytest.mark.cost(0.4)
def test_what_checkpointing_each_block_would_save_is_what_it_does_save() -> None:
    model, x = Blocks(), torch.randn(256, 64)

    def step(checkpoint: bool) -> None:
        model.zero_grad()
        model(x, checkpoint).backward()

    plain, again = (recorded(lambda how=how: step(how)) for how in (False, True))
    said, peaks = found(plain, "checkpoint") or "", [int(mp.summary(c)["peak_allocated_bytes"][0]) for c in (plain, again)]
    row = next(r for r in mp.advise(plain, replay=False).to_dicts() if r["rule"] == "checkpoint")
    assert "The 6 blocks of Blocks.blocks keep" in said
    assert row["saving_bytes"] == pytest.approx(peaks[0] - peaks[1], rel=0.1)
    assert row["origin"] == "modelled"
    assert found(again, "checkpoint") is None, "it does so already"


def test_modules_that_keep_nothing_but_their_result_are_not_proposed() -> None:
    net, x = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)]), torch.randn(256, 64)
    assert found(recorded(lambda: net(x).sum().backward()), "checkpoint") is None
