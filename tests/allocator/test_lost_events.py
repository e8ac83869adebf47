"""One event taken out of a recording: the verdict turns false, and says which event is missing and where it can have been."""

from __future__ import annotations

import gzip
import pickle

import numpy as np
import pytest
from recorded import FOLDER, of_requests, of_script, of_trace, requests, snapshot

import nbmemprof as mp
from nbmemprof.allocator import Device, verdict
from nbmemprof.errors import OutOfMemoryError

pytestmark = pytest.mark.cost(0.4)


def whole_of(name: str) -> dict:
    return of_requests(requests(name)) if name in ("lseg", "msplit", "exp_lim") else of_trace(name)[0] if name.startswith("gpt2") else snapshot(f"{name}.snapshot")


def without(whole: dict, at: int) -> dict:
    trace = whole["device_traces"][0]
    return whole | {"device_traces": [trace[:at] + trace[at + 1 :]]}


def put_in(whole: dict, event: dict, at: int) -> dict:
    trace = whole["device_traces"][0]
    return whole | {"device_traces": [[*trace[:at], event, *trace[at:]]]}


def judged(whole: dict) -> dict:
    return verdict(mp.load(whole))


@pytest.mark.parametrize(
    ("name", "action", "share"),
    [
        ("mempool", "alloc", 0.2), ("mempool", "alloc", 0.7), ("default-streams", "alloc", 0.2), ("default-streams", "alloc", 0.7), ("split20-gc80-tight", "alloc", 0.7),
        ("expand-tight", "alloc", 0.2), ("lseg", "alloc", 0.7), ("mempool", "free_completed", 0.7), ("default-streams", "free_completed", 0.2), ("default-streams", "free_requested", 0.7),
        ("split20-gc80-tight", "segment_free", 0.2), ("expand-tight", "segment_unmap", 0.7), ("gpt2_varlen_b8_expand", "segment_map", 0.2),
    ],
)  # fmt: skip
def test_the_missing_event_is_named_with_the_places_where_it_can_have_been(name, action, share):
    """That the recording is false from the last of these places on; where there are several, the one that was taken out is among them."""
    whole = whole_of(name)
    trace = whole["device_traces"][0]
    of_this_kind = [i for i, e in enumerate(trace) if e["action"] == action]
    at = of_this_kind[int(share * len(of_this_kind))]
    told = judged(without(whole, at))
    assert not told["exact"]
    mismatch = told["first_mismatch"]
    low, high = mismatch.get("between", [mismatch["index"]] * 2)
    assert low <= at <= high == mismatch["index"]
    if "missing" in mismatch:
        assert (mismatch["missing"]["action"], mismatch["missing"]["addr"]) == (action, trace[at]["addr"])
        assert "is missing" in told["text"]


@pytest.mark.cost(0.6)
@pytest.mark.parametrize(("name", "which"), [("mempool", 270), ("default-streams", 700), ("lseg", 1300)])
def test_between_the_places_nothing_recorded_tells_and_outside_something_does(name, which):
    """The proof that no verdict can do better: with the event at the first or at the last place the recording is exact, one place further it is not."""
    whole = whole_of(name)
    at = [i for i, e in enumerate(whole["device_traces"][0]) if e["action"] == "alloc"][which]
    event, damaged = whole["device_traces"][0][at], without(whole, at)
    low, high = judged(damaged)["first_mismatch"]["between"]
    assert low < high
    assert judged(put_in(damaged, event, low))["exact"]
    assert judged(put_in(damaged, event, high))["exact"]
    trace = damaged["device_traces"][0]
    before = next(i for i in range(low - 1, -1, -1) if trace[i - 1]["action"] != "free_requested")
    after = next(i for i in range(high + 1, len(trace)) if trace[i - 1]["action"] != "free_requested")
    assert not judged(put_in(damaged, event, before))["exact"]
    assert not judged(put_in(damaged, event, after))["exact"]


@pytest.mark.cost(0.2)
@pytest.mark.parametrize(
    ("name", "at", "certain"),
    [("graph", 100, True), ("graph", 267, False), ("graph", 376, True), ("graph", 231, True), ("graph", 190, True), ("graph", 186, False), ("graph_streams", 93, False)],
)
def test_where_private_pools_are_gone_the_place_follows_from_the_events_before_and_after_and_from_no_guess_of_pools(name, at, certain):
    """Which requests were a gone pool's is not recorded; that memory was taken or given back twice, or a free has one half only, needs no pools."""
    whole = of_script(name)
    event = whole["device_traces"][0][at]
    mismatch = judged(without(whole, at))["first_mismatch"]
    low, high = mismatch["between"]
    assert low <= at <= high == mismatch["index"]
    assert (mismatch["missing"]["action"], mismatch["missing"]["addr"]) == (event["action"], event["addr"])
    assert (low == high) == certain


@pytest.mark.cost(0.3)
def test_in_a_recording_that_began_in_the_middle_of_a_run_a_block_without_its_alloc_was_not_there_at_the_beginning():
    """Walking back from the end has it there from the start; then other requests would have gone elsewhere from event 12 on."""
    whole = pickle.loads(gzip.decompress((FOLDER.parent / "h200" / "midrun.pickle.gz").read_bytes()))
    at = 2478
    mismatch = judged(without(whole, at))["first_mismatch"]
    assert (mismatch["noticed"], mismatch["between"]) == (12, [2477, 2478])
    assert mismatch["missing"]["addr"] == whole["device_traces"][0][at]["addr"]


@pytest.mark.cost(0.05)
def test_a_lost_request_that_was_never_freed_is_told_by_what_lies_where_the_rules_would_put_the_next():
    """No event and no picture has it; the requests after it lie behind it."""
    whole, _ = of_trace("gpt2_varlen_b8_expand")
    trace = whole["device_traces"][0][:400]
    freed = {e["addr"] for e in trace if e["action"] == "free_requested"}
    at = [i for i, e in enumerate(trace) if e["action"] == "alloc" and e["addr"] not in freed][60]
    mismatch = judged(without(whole | {"device_traces": [trace]}, at))["first_mismatch"]
    assert mismatch["between"][0] <= at <= mismatch["between"][1]
    assert mismatch["missing"]["addr"] == trace[at]["addr"]
    assert 0 <= mismatch["missing"]["bytes"] - trace[at]["size"] < 512


@pytest.mark.cost(0.05)
@pytest.mark.parametrize("neighbours", [("alloc", "free_requested"), ("free_completed", "free_requested")])
def test_two_neighbours_that_changed_places_are_seen_where_nothing_asks_for_what_completes(neighbours):
    """A free that completes after another event than its request waited for a stream, and only a request or a flush looks whether it is over."""
    device = Device()
    blocks = [device.malloc(1 << 20) for _ in range(4)]
    device.free(blocks[0])
    device.malloc("3MiB")
    device.free(blocks[1])
    device.free(blocks[2])
    device.free(blocks[3])
    whole = device.snapshot()
    trace = whole["device_traces"][0]
    assert judged(whole)["exact"]
    at = max(i for i in range(len(trace) - 1) if (trace[i]["action"], trace[i + 1]["action"]) == neighbours)
    told = judged(whole | {"device_traces": [[*trace[:at], trace[at + 1], trace[at], *trace[at + 2 :]]]})
    assert not told["exact"]
    assert at - 1 <= told["first_mismatch"]["index"] <= at + 3  # a segment taken for it is followed by no request then


@pytest.mark.cost(0.05)
def test_the_final_picture_tells_the_size_that_was_asked_for_and_the_stream():
    device = Device()
    device.malloc("3MiB")
    whole = device.snapshot()
    assert judged(whole)["exact"]
    (block,) = [b for s in whole["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    block["requested_size"] -= 1
    told = judged(whole)
    assert not told["exact"]
    assert "another size was asked for" in told["text"]


def tight(frames: dict | None = None) -> tuple[dict, int]:
    """A refusal that gave cached memory back; call stacks as torch records them: memory given back for a request has the request's. Returns the trace and where the oom is."""
    device = Device(limit_bytes="100MiB")
    held = device.malloc("40MiB")
    device.free(device.malloc("30MiB"))
    with pytest.raises(OutOfMemoryError):
        device.malloc("80MiB")
    device.free(held)
    device.malloc("12MiB")
    whole = device.snapshot()
    (at,) = [i for i, e in enumerate(whole["device_traces"][0]) if e["action"] == "oom"]
    for event in whole["device_traces"][0]:
        line = 80 if event["action"] in ("oom", "segment_free") else 30
        name = (frames or {}).get(event["action"], "step")
        event["frames"] = [{"filename": "torch/cuda/memory.py" if name == "empty_cache" else "train.py", "line": line, "name": name}] if frames is not None else []
    return whole, at


def test_a_lost_refusal_is_seen_by_the_stack_of_the_memory_given_back_for_it():
    whole, at = tight({})
    assert judged(whole)["exact"]
    told = judged(without(whole, at))
    assert not told["exact"]
    assert told["first_mismatch"]["index"] == at
    assert told["first_mismatch"]["missing"]["action"] == "oom"


def test_without_stacks_a_lost_refusal_is_an_empty_cache_and_that_is_said():
    """Nothing in the events could tell the two apart; the verdict says so, with the place."""
    whole, at = tight()
    told = judged(without(whole, at))
    assert told["exact"]
    (text,) = [t for t in told["inferred"] if "empty_cache() call" in t]
    assert f"at event {at - 1}" in text
    assert "a refused request whose oom is missing leaves the same events" in text


def test_the_stack_of_an_empty_cache_is_no_lost_refusal():
    whole, at = tight({"segment_free": "empty_cache"})
    assert judged(without(whole, at))["exact"]


def test_memory_taken_twice_is_seen_without_a_final_picture():
    device = Device(addresses=[1 << 30, 1 << 30])
    device.free(device.malloc("30MiB"))
    device.empty_cache()
    device.malloc("40MiB")
    trace = device.snapshot()["device_traces"][0]
    (at,) = [i for i, e in enumerate(trace) if e["action"] == "segment_free"]
    whole = {"segments": [], "device_traces": [trace], "allocator_settings": {}}
    assert judged(whole)["exact"]
    told = judged(without(whole, at))
    assert not told["exact"]
    assert told["first_mismatch"]["index"] == at


def test_a_lost_request_of_a_free_that_is_pending_at_the_end_is_told_by_the_picture():
    whole = snapshot("default-streams.snapshot")
    at = [i for i, e in enumerate(whole["device_traces"][0]) if e["action"] == "free_requested"][486]
    low, high = judged(without(whole, at))["first_mismatch"]["between"]
    assert low <= at <= high


def test_without_a_picture_the_only_free_that_waits_in_vain_lacks_its_completion():
    whole, _ = of_trace("gpt2_varlen_b8_expand")
    trace = whole["device_traces"][0]
    final = max(i for i, e in enumerate(trace) if e["action"] == "alloc")
    used_again = {e["addr"]: i for i, e in enumerate(trace) if e["action"] == "alloc"}
    at = max(i for i, e in enumerate(trace[:final]) if e["action"] == "free_completed" and used_again[e["addr"]] < i)
    told = judged(without(whole, at))
    assert not told["exact"]
    assert told["first_mismatch"]["index"] == at


def test_two_lost_events_are_told_one_at_a_time():
    whole = snapshot("mempool.snapshot")
    trace = whole["device_traces"][0]
    allocs = np.asarray([i for i, e in enumerate(trace) if e["action"] == "alloc"])[[150, 450]].tolist()
    told = judged(without(without(whole, allocs[1]), allocs[0]))
    mismatch = told["first_mismatch"]
    assert mismatch["between"][0] <= allocs[0] <= mismatch["between"][1]
    assert "the rest follows up to event" in mismatch["reason"]
