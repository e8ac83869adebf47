"""What call stacks alone say an allocation is for: much of a file's bytes, and never what it is not."""

from __future__ import annotations

import polars as pl
import pytest
from attribution_played import NAMES, play
from strategies import MIB, Allocator, frames

import nbmemprof as mp
from nbmemprof import schema
from nbmemprof._stack_words import by_stacks

MODULE, OPTIM = "/site-packages/torch/nn/modules/module.py", "/site-packages/torch/optim"
MAIN = "train.py:9 <module>"
FORWARD = frames("model.py:3 forward", f"{MODULE}:1885 _call_impl", f"{MODULE}:1779 _wrapped_call_impl", "train.py:5 step", MAIN)
INNER = frames("/site-packages/torch/nn/functional.py:70 relu", "model.py:4 forward", f"{MODULE}:1885 _call_impl", "train.py:5 step", MAIN)
LOSS, ZERO = frames("train.py:6 step", MAIN), frames(f"{OPTIM}/optimizer.py:99 zero_grad", "train.py:8 step", MAIN)
STEP = frames(f"{OPTIM}/adam.py:178 _init_group", f"{OPTIM}/adam.py:238 step", "train.py:7 step", MAIN)
SQRT = frames(f"{OPTIM}/adam.py:400 _multi_tensor_adam", f"{OPTIM}/adam.py:238 step", "train.py:7 step", MAIN)
MOVED = frames(f"{MODULE}:1370 convert", f"{MODULE}:965 _apply", f"{MODULE}:934 _apply", f"{MODULE}:1384 to", "train.py:1 build", MAIN)
BUFFER = frames(f"{MODULE}:1370 convert", f"{MODULE}:1010 _apply", f"{MODULE}:934 _apply", f"{MODULE}:1384 to", "train.py:1 build", MAIN)


def trained(*, copied: bool = False) -> Allocator:
    """Two steps; ``copied``: frees have the stack of their request, as where torch records none of their own."""
    a = Allocator()
    a.malloc(8 * MIB, MOVED)
    a.malloc(2 * MIB, BUFFER)
    grad = None
    for _ in range(2):
        kept, scratch = a.malloc(30 * MIB, FORWARD), a.malloc(20 * MIB, INNER)
        a.free(scratch, stack=INNER if copied else FORWARD)
        loss = a.malloc(12 * MIB, LOSS)
        if grad is not None:
            a.free(grad, stack=() if copied else ZERO)
        own = a.malloc(14 * MIB)
        a.free(loss, stack=LOSS if copied else ())
        grad = a.malloc(8 * MIB)
        a.free(own)
        a.free(kept, stack=FORWARD if copied else ())
        if _ == 0:
            a.malloc(16 * MIB, STEP)
        a.free(a.malloc(4 * MIB, SQRT), stack=SQRT if copied else frames(f"{OPTIM}/adam.py:420 _multi_tensor_adam", "train.py:7 step", MAIN))
    return a


def words(capture: mp.Capture) -> dict[int, set[tuple[str, str]]]:
    rows = capture.allocations.select("requested_bytes", pl.col("category", "evidence").cast(pl.String))
    return {int(size): set(rows.filter(pl.col("requested_bytes") == size).select("category", "evidence").rows()) for size in rows["requested_bytes"].unique()}


def test_frames_of_torch_and_the_thread_of_autograd_tell_what_a_block_is_for():
    found = words(mp.load(trained().snapshot()))
    assert found == {
        8 * MIB: {("weights", "stack"), ("gradients", "stack")}, 2 * MIB: {("unknown", "none")}, 30 * MIB: {("activations", "stack")}, 20 * MIB: {("temporary", "stack")},
        12 * MIB: {("activations", "stack")}, 14 * MIB: {("temporary", "stack")}, 16 * MIB: {("optimizer_state", "stack")}, 4 * MIB: {("temporary", "stack")},
    }  # fmt: skip


def test_a_files_optimizer_state_comes_with_the_first_step_only_where_no_forward_lies_between_its_blocks():
    found = mp.advise(mp.load(trained().snapshot()), replay=False).filter(rule="first_step").row(0, named=True)
    assert "16 MiB that stay" in found["finding"]
    assert "made in one step() and kept" in found["evidence"]
    a = trained()
    a.malloc(16 * MIB, STEP)  # another step makes more
    assert mp.advise(mp.load(a.snapshot()), replay=False).filter(rule="first_step").is_empty()


def test_where_frees_have_no_stacks_of_their_own_only_what_stays_is_told():
    found = words(mp.load(trained(copied=True).snapshot()))
    told = {size: {word for word, _ in pairs} for size, pairs in found.items() if pairs != {("unknown", "none")}}
    assert told == {8 * MIB: {"weights", "unknown"}, 16 * MIB: {"optimizer_state"}}


def test_a_program_without_torchs_frames_stays_unknown():
    a = Allocator()
    a.free(a.malloc(5 * MIB, LOSS))
    a.malloc(6 * MIB)
    found = mp.breakdown(mp.load(a.snapshot()), at="end").select(pl.col("category").cast(pl.String), "reason").rows()
    assert found == [("unknown", "6 MiB: no call stack")]


def test_what_a_function_of_autograds_thread_asks_for_is_not_the_programs():
    """A recompute runs Python below ``torch/utils/checkpoint.py``: its blocks are no forward's."""
    again = frames("model.py:3 forward", f"{MODULE}:1885 _call_impl", "/site-packages/torch/utils/checkpoint.py:1500 unpack_hook")
    a = Allocator()
    a.free(a.malloc(3 * MIB, FORWARD), stack=LOSS)
    block = a.malloc(5 * MIB, again)
    a.free(a.malloc(7 * MIB))
    a.free(block)
    assert words(mp.load(a.snapshot()))[5 * MIB] == {("unknown", "none")}


@pytest.mark.parametrize("name", ["gpt2_accumulated", "gpt2_autocast", "llama1b_lora", "resnet50", "compiled"])
def test_on_an_h200_every_byte_that_stacks_tell_is_what_its_owner_was(name):
    """Recorded with owners and phases watched: their answer is taken away, and the stacks are asked."""
    assert name in NAMES
    capture, dtypes = play(name), schema.dtypes("allocations")
    blank = capture.allocations.with_columns(pl.lit("unknown").cast(dtypes["category"]).alias("category"), pl.lit("none").cast(dtypes["evidence"]).alias("evidence"))
    told = by_stacks(blank, capture.tables["stacks"])
    both = pl.DataFrame({"truth": capture.allocations["category"].cast(pl.String), "told": told["category"].cast(pl.String), "size": told["size_bytes"]}).filter(pl.col("told") != "unknown")
    assert both.height > 0
    assert both.filter(pl.col("truth") != pl.col("told")).is_empty()
    if name.startswith(("gpt2", "llama1b")):  # frees were recorded with stacks of their own
        assert both["size"].sum() > 0.9 * told["size_bytes"].sum()
