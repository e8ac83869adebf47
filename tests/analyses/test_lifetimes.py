"""Everything alive at the end has a name, and the lifetimes are those of what was given up."""

from __future__ import annotations

from stories import GRAD, KEEP, LAYER, LOSS, STATE, STEP, WEIGHT, train
from strategies import KIB, Allocator, frames

from nbmemprof.analyses.leaks import leaks
from nbmemprof.analyses.lifetimes import CLASSES, lifetimes
from nbmemprof.capture import Capture


def classes(a: Allocator) -> dict[str, str]:
    """Innermost line to class."""
    cap = a.capture()
    names = {r["stack_id"]: f"{r['filename'].rsplit('/', 1)[-1]}:{r['line']}" for r in cap.stacks.filter(depth=0).rows(named=True)}
    return {names[i]: c for i, c in lifetimes(cap).select("stack_id", "class").rows()}


def head(stack) -> str:
    return f"{stack[0][0].rsplit('/', 1)[-1]}:{stack[0][1]}"


def test_weights_state_activations_and_a_leak_have_their_names():
    a = Allocator()
    train(a, 12, lambda _: a.malloc(4096, KEEP))
    found = classes(a)
    assert found[head(WEIGHT)] == "persistent"
    assert found[head(STATE)] == "first-step"
    assert found[head(LAYER)] == "temporary"
    assert found[head(GRAD)] == "temporary"
    assert found[head(KEEP)] == "growing"
    assert found[head(LOSS)] == "temporary"  # the last of the running losses


def test_what_is_in_use_when_the_trace_ends_is_temporary():
    a = Allocator()
    train(a, 12, end_in_forward=True)
    assert classes(a)[head(LAYER)] == "temporary"


def test_a_cache_that_filled_over_some_iterations_is_cached():
    a = Allocator()
    train(a, 40, lambda step: a.malloc(4096, KEEP) if step < 12 else None)
    assert classes(a)[head(KEEP)] == "cached"


def test_a_window_that_moves_is_cached():
    a = Allocator()
    held = []

    def after(step):
        held.append(a.malloc(4096, KEEP))
        if len(held) > 10:
            a.free(held.pop(0))

    train(a, 50, after)
    assert classes(a)[head(KEEP)] == "cached"


def test_without_iterations_what_stays_is_persistent():
    a = Allocator()
    a.malloc(4096, KEEP)
    assert classes(a) == {head(KEEP): "persistent"}


def test_a_first_forward_pass_has_no_iterations_and_no_caches():
    """Its layers are no iterations: what they keep just stays."""
    a = Allocator()
    call = "lib/python3.12/site-packages/torch/nn/modules/module.py:1786 _call_impl"
    for _ in range(12):
        for line in (10, 11):
            a.malloc(4096, frames(f"model.py:{line} forward", call, "model.py:31 forward", call, "In[3]:2 <module>"))
        a.free(a.malloc(4096, frames("model.py:12 forward", call, "model.py:31 forward", call, "In[3]:2 <module>")))
    assert classes(a) == {"model.py:10": "persistent", "model.py:11": "persistent", "model.py:12": "temporary"}


def test_the_live_bytes_of_all_classes_are_all_live_bytes():
    a = Allocator()
    train(a, 12, lambda _: a.malloc(4096, KEEP), end_in_forward=True)
    rows = lifetimes(a.capture())
    assert rows["live_bytes"].sum() == a.live
    assert set(rows["class"]) <= set(CLASSES)


def test_growing_here_is_what_leaks_says():
    a = Allocator()
    train(a, 20, lambda _: a.malloc(4096, KEEP))
    cap = a.capture()
    growing = lifetimes(cap).filter(lifetimes(cap)["class"] == "growing")
    assert growing["live_bytes"].to_list() == leaks(cap)["leak_bytes"].to_list()


def test_lifetimes_are_measured_in_time_and_in_events():
    """Lives of 1, 2 and 3 allocations in between; one block is never given up and has none."""
    a = Allocator()
    other, site = frames("train.py:1 f"), frames("train.py:2 f", STEP)
    a.malloc(512, other)
    for between in (1, 2, 3):
        block = a.malloc(KIB, site)
        for _ in range(between):
            a.malloc(512, other)
        a.free(block)
    rows = lifetimes(a.capture())
    row = rows.filter(rows["site"] == "train.py:2").row(0, named=True)
    assert (row["life_events_median"], row["life_events_p90"], row["life_events_max"]) == (3.0, 4.0, 4.0)
    assert (row["life_us_median"], row["life_us_max"]) == (9.0, 12.0)
    assert (row["count"], row["live_count"], row["size_median_bytes"]) == (3, 0, KIB)
    kept = rows.filter(rows["site"] == "train.py:1").row(0, named=True)
    assert kept["life_us_max"] is None


def test_an_empty_capture_has_the_columns():
    a = Allocator()
    a.malloc(512, KEEP)
    assert lifetimes(Capture.build({"allocations": a.capture().allocations.head(0)})).schema == lifetimes(a.capture()).schema
