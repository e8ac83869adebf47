"""A leak is what grows with the iterations; everything else that is alive at the end has another name."""

from __future__ import annotations

import re
from itertools import pairwise

import polars as pl
import pytest
from stories import CALL, KEEP, LAYER, LINEAR, STATE, STEP, WEIGHT, train
from strategies import KIB, MIB, Allocator, capture, frames

import nbmemprof as mp
from nbmemprof import schema
from nbmemprof.analyses.leaks import leaks
from nbmemprof.capture import Capture


def rows(a: Allocator | list[Allocator], **options):
    found = leaks(capture(a if isinstance(a, list) else [a], **options))
    return found.select("site", "leak_bytes", "leak_count", "bytes_per_iteration").rows()


@pytest.mark.parametrize("steps", [3, 4, 5, 12, 40])
@pytest.mark.parametrize("end_in_forward", [False, True])
def test_training_without_a_leak_has_none(steps, end_in_forward):
    """Weights, optimizer state, running loss and the activations that the trace ends in are no leaks."""
    a = Allocator()
    train(a, steps, end_in_forward=end_in_forward)
    assert rows(a) == []


@pytest.mark.parametrize("steps", [3, 4, 5, 12, 40])
@pytest.mark.parametrize("end_in_forward", [False, True])
def test_one_block_kept_each_step_is_found_to_the_byte(steps, end_in_forward):
    a = Allocator()
    train(a, steps, lambda _: a.malloc(10_000, KEEP), end_in_forward=end_in_forward)
    kept = steps - end_in_forward
    assert rows(a) == ([("train.py:19", kept * 10_240, kept, 10_240)] if kept >= 3 else [])


def test_blocks_of_varying_size_from_one_line_are_one_leak():
    a = Allocator()
    sizes = [1000 + 700 * (n * n % 11) for n in range(30)]
    train(a, 30, lambda step: a.malloc(sizes[step], KEEP))
    want = sum(-(-s // 512) * 512 for s in sizes)
    assert rows(a) == [("train.py:19", want, 30, round(want / 30))]


@pytest.mark.parametrize("start", [5, 20, 30])
def test_a_leak_that_starts_midway_counts_from_its_start(start):
    a = Allocator()
    train(a, 40, lambda step: a.malloc(4096, KEEP) if step >= start else None)
    assert rows(a) == [("train.py:19", (40 - start) * 4096, 40 - start, 4096)]


def test_every_fifth_step_is_a_leak_with_a_fifth_of_its_bytes_an_iteration():
    a = Allocator()
    train(a, 53, lambda step: a.malloc(1024, KEEP) if step % 5 == 0 else None)
    assert rows(a) == [("train.py:19", 11 * 1024, 11, 205)]


def test_kept_every_fifth_step_but_made_in_each_is_a_leak():
    """The same line makes a block each step; one in five stays."""
    a = Allocator()

    def after(step):
        block = a.malloc(1024, KEEP)
        if step % 5:
            a.free(block)

    train(a, 50, after)
    assert rows(a) == [("train.py:19", 10 * 1024, 10, 205)]


def test_a_cache_that_has_stopped_to_fill_is_no_leak():
    a = Allocator()
    train(a, 40, lambda step: a.malloc(4096, KEEP) if step < 12 else None)
    assert rows(a) == []


def test_a_cache_that_has_just_stopped_to_fill_is_no_leak():
    """It filled from step 10 to 34 of 40, one in each: for six steps nothing has come."""
    a = Allocator()
    train(a, 40, lambda step: a.malloc(4096, KEEP) if 10 <= step < 34 else None)
    assert rows(a) == []


def test_a_cache_that_fills_ever_more_slowly_is_no_leak():
    """A new shape each 1, 2, 4, 8 … steps."""
    a = Allocator()
    train(a, 64, lambda step: a.malloc(4096, KEEP) if (step + 1) & step == 0 or step in range(8) else None)
    assert rows(a) == []


@pytest.mark.parametrize("width", [2, 3, 10, 30, 40])
def test_the_last_few_that_are_kept_are_no_leak(width):
    """A deque of the last results: as much goes as comes."""
    a = Allocator()
    held = []

    def after(step):
        held.append(a.malloc(4096, KEEP))
        if len(held) > width:
            a.free(held.pop(0))

    train(a, 50, after)
    assert rows(a) == []


def test_a_list_that_is_emptied_now_and_then_is_no_leak():
    a = Allocator()
    held = []

    def after(step):
        held.append(a.malloc(4096, KEEP))
        if step % 10 == 9:
            while held:
                a.free(held.pop())

    train(a, 47, after)
    assert rows(a) == []


def test_one_that_was_let_go_late_does_not_excuse_the_others():
    a = Allocator()
    held = []

    def after(step):
        held.append(a.malloc(4096, KEEP))
        if step == 30:
            a.free(held.pop(0))

    train(a, 40, after)
    assert rows(a) == [("train.py:19", 39 * 4096, 39, round(39 * 4096 / 39))]


def test_two_leaks_come_by_their_bytes():
    a = Allocator()
    other = frames("train.py:25 log", "train.py:48 step", STEP)
    train(a, 20, lambda _: (a.malloc(2048, KEEP), a.malloc(8192, other)))
    assert [r[:3] for r in rows(a)] == [("train.py:25", 20 * 8192, 20), ("train.py:19", 20 * 2048, 20)]


def test_a_hook_added_at_each_run_keeps_ever_more():
    """Run r keeps r blocks at each of its 8 calls; all happens inside the module's call, and the hook is a leak all the same."""
    a = Allocator()
    hook = frames("probe.py:33 keep", CALL, "lib/python3.12/site-packages/torch/nn/modules/container.py:250 forward", CALL, "probe.py:39 run", "In[3]:1 <module>")
    relu = frames("lib/python3.12/site-packages/torch/nn/modules/activation.py:133 forward", CALL, "lib/python3.12/site-packages/torch/nn/modules/container.py:250 forward", CALL, "probe.py:39 run", "In[3]:1 <module>")
    for run in (1, 2, 3):
        for _ in range(8):
            out = a.malloc(MIB, relu)
            for _ in range(run):
                a.malloc(8 * MIB, hook)
            a.free(out)
    assert rows(a)[0][:3] == ("probe.py:33", 48 * 8 * MIB, 48)


def test_a_loop_that_does_nothing_but_keep_is_a_leak_with_less_confidence():
    """A slice keeps its large storage: each iteration makes one block and keeps it."""
    a, b = Allocator(), Allocator()
    for _ in range(16):
        a.malloc(4 * MIB, frames("probe.py:38 run", "In[3]:1 <module>"))
    train(b, 16, lambda _: b.malloc(4 * MIB, KEEP))
    assert rows(a) == [("probe.py:38", 64 * MIB, 16, 4 * MIB)]
    assert leaks(a.capture())["confidence"][0] < leaks(b.capture())["confidence"][0]


def test_a_line_that_makes_two_and_keeps_one_is_a_leak():
    """``torch.ones(n, n).tril()`` in a cached method: the first block goes, the second stays; so does the parameter."""
    a = Allocator()
    param, mask = frames("case.py:36 __init__", "case.py:45 run", "In[3]:1 <module>"), frames("case.py:40 mask", "case.py:46 run", "In[3]:1 <module>")
    for _ in range(5):
        a.malloc(64 * MIB, param)
        ones = a.malloc(4 * MIB, mask)
        a.malloc(4 * MIB, mask)
        a.free(ones)
    assert rows(a) == [("case.py:36", 5 * 64 * MIB, 5, 64 * MIB), ("case.py:40", 5 * 4 * MIB, 5, 4 * MIB)]


def test_a_workspace_made_once_on_the_same_line_is_kept_apart():
    a = Allocator()
    line = frames(LINEAR, CALL, "case.py:44 run", "In[3]:1 <module>")
    for step in range(12):
        a.malloc(MIB, frames("case.py:43 run", "In[3]:1 <module>"))
        if step == 0:
            a.malloc(32 * MIB, line)
        a.malloc(4 * MIB, line)
        temporary = a.malloc(512, line)
        a.free(temporary)
    assert rows(a) == [("case.py:44", 48 * MIB, 12, 4 * MIB), ("case.py:43", 12 * MIB, 12, MIB)]


def forward(a: Allocator, layers: int):
    a.malloc(MIB, frames("model.py:30 forward", CALL, "In[3]:2 <module>"))
    for _ in range(layers):
        for line in (10, 11, 12):
            a.malloc(MIB, frames(LINEAR, CALL, f"model.py:{line} forward", CALL, "model.py:31 forward", CALL, "In[3]:2 <module>"))
        a.free(a.malloc(MIB, frames("model.py:13 forward", CALL, "model.py:31 forward", CALL, "In[3]:2 <module>")))


@pytest.mark.parametrize("calls", [1, 2])
def test_a_forward_pass_that_the_trace_ends_in_is_no_leak(calls):
    """Each layer keeps its activations: they grow with the layers, not with iterations."""
    a = Allocator()
    forward(a, 12)
    for block in [b for s in a.segments for b in s.blocks if b.state != "inactive"] if calls == 2 else []:
        a.free(block)
    if calls == 2:
        forward(a, 9)
    assert rows(a) == []


def test_a_module_called_again_and_again_with_its_graph_kept_is_a_leak():
    """``outs.append(net(x))``: all happens inside the module's call, and each line of it comes anew with each call."""
    a = Allocator()
    for _ in range(10):
        hidden = a.malloc(MIB, frames(LINEAR, CALL, "model.py:10 forward", CALL, "In[3]:2 <module>"))
        a.malloc(2 * MIB, frames("model.py:11 forward", CALL, "In[3]:2 <module>"))
        a.free(hidden)
    assert rows(a) == [("model.py:11", 20 * MIB, 10, 2 * MIB)]


@pytest.mark.cost(1)
def test_calls_of_one_module_are_told_from_calls_of_many():
    """``outs.append(net(x))`` has nothing beside the module's own stacks, as a loop over layers has: which module was called when tells them apart."""
    import torch

    line = torch.nn.Linear(64, 128)
    deep = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(8))

    class Rounds(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = torch.nn.Linear(64, 64)

        def forward(self, x):
            for _ in range(8):
                x = self.cell(x).tanh()
            return x

    rounds, x, outs = Rounds(), torch.randn(16, 64), []

    def leaked(body):
        outs.clear()
        with mp.record("torch_cpu") as window:
            body()
        return sum(mp.leaks(window.capture)["bytes_per_iteration"])

    def keep(net, times=6):
        for _ in range(times):
            outs.append(net(x))

    def through_layers():
        h = x
        for layer in layers:
            h = layer(h)
        outs.append(h)

    assert leaked(lambda: keep(deep)) == 16 * 128 * 4 + 16 * 64 * 4
    with torch.no_grad():
        assert leaked(lambda: keep(deep)) == 16 * 64 * 4
    assert leaked(lambda: keep(line)) == 16 * 128 * 4
    assert leaked(lambda: keep(rounds)) == 8 * 16 * 64 * 4
    assert leaked(lambda: keep(rounds, 1)) == leaked(through_layers) == 0


def test_optimizer_state_and_weights_alone_are_no_leak():
    """The trace has one burst and nothing else: a loop over parameters."""
    a, b = Allocator(), Allocator()
    for _ in range(24):
        a.malloc(64 * KIB, STATE)
    for _ in range(24):
        b.malloc(64 * KIB, WEIGHT)
        b.malloc(1 * KIB, frames("lib/python3.12/site-packages/torch/nn/modules/linear.py:111 __init__", "model.py:12 __init__", "train.py:70 main"))
    assert rows(a) == []
    assert rows(b) == []


def test_a_leak_of_training_is_still_found_after_a_shorter_evaluation():
    a = Allocator()
    train(a, 30, lambda _: a.malloc(4096, KEEP))
    for _ in range(10):
        a.free(a.malloc(MIB, frames(LINEAR, CALL, "train.py:60 evaluate", STEP)))
    assert rows(a) == [("train.py:19", 30 * 4096, 30, 4096)]


def test_devices_are_judged_one_by_one():
    """Both use the same addresses; only one leaks."""
    a, b = Allocator(device=0), Allocator(device=1)
    train(a, 20)
    train(b, 20, lambda _: b.malloc(4096, KEEP))
    found = leaks(capture([a, b]))
    assert found.select("device", "leak_bytes").rows() == [(1, 20 * 4096)]


def test_host_memory_is_judged_too():
    a = Allocator()
    train(a, 20, lambda _: a.malloc(4096, KEEP))
    found = leaks(capture([a], kind="host"))
    assert found.select("device", "kind", "leak_bytes").rows() == [(None, "host", 20 * 4096)]


def test_a_truncated_history_counts_the_older_blocks_and_says_so():
    a = Allocator()
    train(a, 40, lambda _: a.malloc(4096, KEEP))
    found = leaks(a.capture(first=len(a.trace) // 2))
    assert found.select("leak_bytes", "leak_count", "bytes_per_iteration").rows() == [(40 * 4096, 40, 4096)]
    assert re.search(r"\d+ more are older than the trace", found["evidence"][0])
    assert "truncated" in found["evidence"][0]
    assert found["confidence"][0] < leaks(a.capture())["confidence"][0]


def test_a_window_counts_its_own_blocks_and_mentions_the_older():
    """The second run of a cell: what the first run leaked was told then."""
    a = Allocator()
    train(a, 20, lambda _: a.malloc(4096, KEEP))
    first = len(a.trace)
    train(a, 10, lambda _: a.malloc(4096, KEEP), built=False)
    cap = a.capture(first)
    window = Capture.build(dict(cap.tables.items()), **(cap.meta | {"warnings": []}))
    found = leaks(window)
    assert found.select("leak_bytes", "leak_count").rows() == [(10 * 4096, 10)]
    assert "20 more are older than the trace" in found["evidence"][0]


def test_without_frames_a_size_is_told_and_no_site_made_up():
    a, few = Allocator(), Allocator()
    for steps, b in ((20, a), (5, few)):
        for _ in range(steps):
            act = b.malloc(MIB, ())
            b.malloc(4096, ())
            b.free(act)
    found = leaks(a.capture())
    assert found.select("site", "stack", "leak_bytes").rows() == [(None, None, 20 * 4096)]
    assert "no frames" in found["evidence"][0]
    assert leaks(few.capture()).is_empty()  # five are too few to tell by size


def test_a_backward_pass_without_frames_does_not_set_the_pace():
    """On a GPU the thread of the backward pass records no frames; its blocks come round with every layer."""
    a = Allocator()
    for step in range(10):
        act = a.malloc(MIB, LAYER)
        for _ in range(30):
            a.free(a.malloc(2 * MIB, ()))
        a.free(act)
        if step:
            a.malloc(4096, KEEP)
    assert leaks(a.capture()).select("leak_bytes", "bytes_per_iteration", "iterations").rows() == [(9 * 4096, 4096, 10)]


def test_step_marks_give_the_iterations():
    """A leak at irregular places inside the steps."""
    a = Allocator()
    for step in range(9):
        a.mark("step", str(step))
        for n in range(3 + step % 4):
            a.free(a.malloc(MIB * (1 + n), LAYER))
        a.malloc(4096, KEEP)
    found = leaks(a.capture())
    assert found.select("leak_bytes", "iterations").rows() == [(9 * 4096, 9)]
    assert "step marks" in found["evidence"][0]


def test_without_a_trace_nothing_is_judged():
    a = Allocator()
    train(a, 10, lambda _: a.malloc(4096, KEEP))
    assert leaks(a.capture(first=len(a.trace))).is_empty()
    assert leaks(Capture.build({"allocations": schema.empty("allocations")})).columns == leaks(a.capture()).columns


def test_the_site_is_where_the_stack_parts_from_its_twins():
    """A helper called from two lines: the leak is named by the calling line that it has alone."""
    a = Allocator()
    helper = "util.py:5 clone"
    keep = frames(helper, "util.py:9 wrap", "train.py:47 step", STEP)
    train(a, 10, lambda _: (a.malloc(4096, keep), a.free(a.malloc(4096, frames(helper, "util.py:9 wrap", "train.py:44 step", STEP)))))
    found = leaks(a.capture())
    assert found["site"].to_list() == ["train.py:47"]
    assert found["stack"].to_list() == [["util.py:5 clone", "util.py:9 wrap", "train.py:47 step", "train.py:90 main"]]


def test_the_order_of_rows_does_not_matter():
    a = Allocator()
    train(a, 20, lambda _: a.malloc(4096, KEEP))
    whole = a.capture()
    mixed = Capture.build({n: whole.tables[n].sample(fraction=1, shuffle=True, seed=3) for n in ("allocations", "stacks", "marks")})
    assert leaks(mixed).drop("origin").equals(leaks(whole).drop("origin"))


def test_confidence_rises_with_the_iterations():
    def confidence(steps: int) -> float:
        a = Allocator()
        train(a, steps, lambda _: a.malloc(4096, KEEP))
        return leaks(a.capture())["confidence"][0]

    seen = [confidence(n) for n in (3, 5, 10, 20)]
    assert all(x < y for x, y in pairwise(seen)) or seen[-1] == 1.0
    assert all(0 < x <= 1 for x in seen)


def test_columns_and_types():
    a = Allocator()
    train(a, 5, lambda _: a.malloc(4096, KEEP))
    schema_ = leaks(a.capture()).schema
    assert list(schema_)[:2] == ["device", "rank"]
    assert schema_["stack"] == pl.List(pl.String)
    assert schema_["leak_bytes"] == pl.Int64
