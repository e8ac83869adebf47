"""What a real H200 did comes out of the rules: every address, every counter, every peak; and a lost event is seen."""

from __future__ import annotations

import numpy as np
import polars as pl
import pytest
from recorded import facts, of_requests, of_trace, requests, snapshot

import nbmemprof as mp
from nbmemprof import schema
from nbmemprof.allocator import Device, _infer, verdict
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._model import Model
from nbmemprof.allocator.versions import rules_of
from nbmemprof.errors import OutOfMemoryError

pytestmark = pytest.mark.cost(0.1)
OPS = ("default_lim", "exp_lim", "msplit", "r4", "lseg")
SNAPSHOTS = ("default-streams", "expand-tight", "split20-gc80-tight", "mempool")


def follow(snapshot_, **options):
    (found,) = _infer.as_recorded(mp.load(snapshot_), options.get("limit_bytes"), None, None)
    return found


# ---------------------------------------------------------------------------------------------- request by request
@pytest.mark.cost(0.7)
@pytest.mark.parametrize("name", OPS)
def test_every_address_and_16_counters_after_each_of_4000_requests(name):
    found = requests(name)
    names = {"ovs_alloc": "oversize_allocations.current", "ovs_seg": "oversize_segments.current"}
    keys = [names.get(k, k if k.startswith("num_") else f"{k}.all.current") for k in found["keys"]]
    trace = found["trace"]
    following: list = [None] * (len(trace) + 1)
    for i in range(len(trace) - 1, -1, -1):
        following[i] = trace[i][1] if trace[i][0] in ("segment_alloc", "segment_map") else following[i + 1]
    device = Device(found["conf"], limit_bytes=found["limit"] or None, capacity_bytes=found["fraction_total"], addresses=[0])
    live = {}
    for number, request in enumerate(found["ops"]):
        if request[0] == "alloc":
            device._given.clear()  # the driver's answer, were one needed: the address that it gave next
            device._given.extend([following[int(device._model.m[M.AT]) // M.WORDS] or 0])
            try:
                addr = live[request[1]] = device.malloc(request[2], stream=found["streams"][request[3]])
            except OutOfMemoryError:
                addr = "OOM"
            assert addr == request[4], f"request {number}"
        elif request[0] == "free":
            device.free(live.pop(request[1]))
        else:
            device.empty_cache()
        stats = device.stats()
        assert [stats[k] for k in keys] == request[-1], f"request {number}"
    events = [[e["action"], e["size"], e["stream"]] + ([e["addr"]] if "addr" in e else []) for e in device.snapshot()["device_traces"][0]]
    assert events == [[a, s, t] + ([x] if a != "oom" else []) for a, x, s, t in trace]
    left = [[s["address"], s["total_size"], s["stream"], s["is_expandable"], [[b["size"], b["requested_size"], b["state"]] for b in s["blocks"]]] for s in device.snapshot()["segments"]]
    assert left == found["segs"]


# ---------------------------------------------------------------------------------------------- whole recordings
@pytest.mark.cost(0.3)
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_is_followed_to_its_last_counter(name):
    found = follow(snapshot(f"{name}.snapshot"))
    assert found.mismatch is None
    assert found.model.stats() == facts(name)["stats"]


@pytest.mark.cost(0.7)
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_counters_at_every_checkpoint(name):
    """The trace has a moment at which every counter is that of the checkpoint, peaks included; moments come in the order of checkpoints."""
    capture = mp.load(snapshot(f"{name}.snapshot"))
    whole = follow(snapshot(f"{name}.snapshot"))
    recording = whole.recording
    model = Model(whole.settings, rules_of(None), limit_bytes=whole.limit_bytes)
    trace = recording.bind(model)
    rows = np.zeros(2 * recording.rows.height, np.int64)
    moments = np.full(2 * capture.events.height + 2, -1, np.int64)
    model.m[M.MODE], model.m[M.INFER], model.m[M.END] = M.FED, 1, len(trace)
    asks = np.cumsum(recording.kind == M.ALLOC)
    for point in facts(name)["checkpoints"]:
        wanted = {k: v for k, v in point.items() if k != "ops"}
        begin = int(np.searchsorted(asks, wanted["allocation.all.allocated"])) + 1  # behind that many allocs
        for stop in range(begin, recording.events.height + 1):
            model.m[M.STOP] = stop * M.WORDS
            model.run(trace, trace, rows, moments, work=0)
            stats = model.stats()
            if {k: stats[k] for k in wanted} == wanted:
                break
            assert stats["allocation.all.allocated"] == wanted["allocation.all.allocated"], f"no moment is that of checkpoint {point['ops']}"


@pytest.mark.cost(0.5)
def test_a_training_run_with_expandable_segments_has_its_peaks():
    recorded, peak = of_trace("gpt2_varlen_b8_expand")
    found = follow(recorded)
    stats = found.model.stats()
    assert found.exact
    assert {"allocated": stats["allocated_bytes.all.peak"], "reserved": stats["reserved_bytes.all.peak"]} == peak


@pytest.mark.cost(0.3)
@pytest.mark.parametrize("name", ["default_lim", "exp_lim"])
def test_a_limit_that_no_file_tells_is_found_from_what_was_refused(name):
    found = requests(name)
    followed = follow(of_requests(found))
    assert followed.mismatch is None
    last = dict(zip(found["keys"], found["ops"][-1][-1], strict=True))
    stats = followed.model.stats()
    assert stats["num_ooms"] == last["num_ooms"] > 0
    assert stats["reserved_bytes.all.current"] == last["reserved_bytes"]
    assert any("memory limit" in text for text in followed.inferred)


def test_a_known_limit_is_not_inferred():
    followed = follow(of_requests(requests("default_lim")), limit_bytes=requests("default_lim")["limit"])
    assert followed.exact
    assert not any("memory limit" in text for text in followed.inferred)
    last = dict(zip(requests("default_lim")["keys"], requests("default_lim")["ops"][-1][-1], strict=True))
    counted = [k for k in last if k.startswith("num_") and k != "num_sync_all_streams"]  # an empty_cache() that found nothing leaves no event
    assert {k: followed.model.stats()[k] for k in counted} == {k: last[k] for k in counted}


def test_a_trace_that_lost_its_beginning_starts_from_the_heap_walked_back():
    whole = snapshot("expand-tight.snapshot")
    whole["device_traces"][0] = whole["device_traces"][0][7001:]
    found = follow(whole)
    assert found.exact
    assert "middle of a run" in " ".join(found.inferred)


def test_a_trace_that_begins_in_the_middle_of_a_free():
    whole = snapshot("mempool.snapshot")
    trace = whole["device_traces"][0]
    first = next(i for i in range(600, len(trace)) if trace[i]["action"] == "free_completed")
    whole["device_traces"][0] = trace[first:]
    assert follow(whole).exact


# ---------------------------------------------------------------------------------------------- lost events
def without(name: str, action: str, which: int) -> tuple[dict, int]:
    whole = snapshot(name)
    trace = whole["device_traces"][0]
    at = [i for i, e in enumerate(trace) if e["action"] == action][which]
    whole["device_traces"][0] = trace[:at] + trace[at + 1 :]
    return whole, at


@pytest.mark.cost(0.3)
@pytest.mark.parametrize("which", [0, 2, -1])
@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("mempool.snapshot", "segment_alloc"), ("mempool.snapshot", "free_requested"), ("mempool.snapshot", "free_completed"),
        ("expand-tight.snapshot", "segment_map"), ("expand-tight.snapshot", "segment_unmap"),
        ("split20-gc80-tight.snapshot", "segment_alloc"), ("split20-gc80-tight.snapshot", "segment_free"),
    ],
)  # fmt: skip
def test_a_lost_event_turns_the_verdict_false_at_that_event(name, action, which):
    damaged, at = without(name, action, which)
    told = verdict(mp.load(damaged))
    assert not told["exact"]
    assert told["first_mismatch"]["index"] == at
    assert told["text"].startswith("not exact")


def test_a_wrong_setting_is_no_verdict_but_a_difference():
    told = verdict(mp.load(snapshot("mempool.snapshot") | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "roundup_power2_divisions:4"}}))
    assert not told["exact"]
    assert told["first_mismatch"]["expected"] is not None


def test_a_changed_address_is_seen_where_it_is():
    whole = snapshot("mempool.snapshot")
    trace = whole["device_traces"][0]
    at = next(i for i, e in enumerate(trace) if i > 500 and e["action"] == "alloc")
    trace[at] = trace[at] | {"addr": trace[at]["addr"] + 512}
    mismatch = verdict(mp.load(whole))["first_mismatch"]
    assert (mismatch["index"], mismatch["expected"]["addr"], mismatch["found"]["addr"]) == (at, trace[at]["addr"] - 512, trace[at]["addr"])


def test_segments_cached_before_a_recording_with_stacks_are_no_lost_event():
    """A warm-up leaves a segment behind; the recording begins later, with stacks, and that segment has none."""
    stack = [{"filename": "train.py", "line": 1, "name": "f"}]
    device = Device()
    device.free(device.malloc(1))
    before = len(device.snapshot()["device_traces"][0])
    held = [device.malloc(700), device.malloc(30 << 20)]
    whole = device.snapshot()
    whole["device_traces"][0] = [e | {"frames": stack} for e in whole["device_traces"][0][before:]]
    told = verdict(mp.load(whole))
    assert held
    assert told["exact"], told
    assert "middle of a run" in told["inferred"][-1]


def test_what_cannot_be_read_in_a_configuration_is_said():
    device = Device()
    device.malloc(1)
    whole = device.snapshot()
    whole["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"] = "<script>"
    told = verdict(mp.load(whole))
    assert told["exact"]
    assert any("can't be read" in text for text in told["inferred"])


# ---------------------------------------------------------------------------------------------- what comes back
def test_an_exact_replay_is_the_recording_with_its_verdict():
    capture = mp.load(snapshot("default-streams.snapshot"))
    again = mp.replay(capture)
    assert again.meta["origin"] == "replayed"
    assert again.meta["verdict"]["exact"]
    assert again.events.equals(capture.events)
    assert set(mp.summary(again)["origin"]) == {"replayed"}
    columns = ["peak_allocated_bytes", "peak_reserved_bytes", "peak_requested_bytes", "end_pending_bytes", "segments", "events"]
    assert mp.summary(again).select(columns).equals(mp.summary(capture).select(columns))


def test_a_marked_empty_cache_is_used_and_not_inferred():
    whole = of_requests(requests("msplit"))
    capture = mp.load(whole)
    inferred = follow(whole)
    found = inferred.moments[: int(inferred.model.m[M.FOUND]) : 2] // M.WORDS
    assert len(found) > 0
    marks = schema.fill("marks", {"device": 0, "seq": pl.Series(found - 1 + int(capture.events["seq"][0])), "kind": "empty_cache"}, len(found))
    marked = mp.Capture.build({n: capture.tables[n] for n in capture.tables if n != "marks"} | {"marks": marks}, **capture.meta)
    told = verdict(marked)
    assert told["exact"]
    assert not any("empty_cache" in text for text in told["inferred"])


def test_nothing_to_replay_is_said():
    with pytest.raises(mp.NbmemprofError, match="Nothing to replay"):
        mp.replay(mp.Capture.build({}))
    assert not verdict(mp.Capture.build({}))["exact"]


def test_a_pool_made_without_splits_is_found_out():
    device = Device()
    pool = device.mem_pool(no_split=True)
    device.free(device.malloc(40 << 20, pool=pool))
    held = device.malloc(3 << 20, pool=pool)
    device.malloc(5 << 20)
    told = verdict(mp.load(device.snapshot()))
    assert held
    assert told["exact"], told
    assert any("no_split: 0_1" in text for text in told["inferred"])
    again = mp.replay(mp.load(device.snapshot()))
    assert again.allocations.filter(pl.col("free_seq").is_null())["size_bytes"].to_list() == [40 << 20, 5 << 20]


def test_a_pool_that_was_dropped_is_found_out():
    """Its segments are gone at the end, so only what they did not serve tells that they were a pool's."""
    device = Device()
    pool, other = device.mem_pool(), device.mem_pool()
    device.free(device.malloc(30 << 20))  # cached, and not used by the pools
    with device.use_pool(pool):
        device.free(device.malloc(30 << 20))
    device.malloc(30 << 20, pool=other)
    device.drop_pool(pool)
    device.malloc(25 << 20)
    told = verdict(mp.load(device.snapshot()))
    assert told["exact"], told
    assert any("dropped by the last user" in text for text in told["inferred"])
    assert any("private pools'" in text for text in told["inferred"])


def test_a_threshold_without_a_limit_is_no_collector():
    """empty_cache() right before new memory looks like the collector's doing; where no limit explains the rest too, there is none."""
    device = Device("garbage_collection_threshold:0.5")
    kept = [device.malloc(n << 20) for n in (30, 12, 50)]
    device.free(kept.pop())
    device.empty_cache()
    device.malloc(60 << 20)
    device.free(device.malloc(70 << 20))
    device.free(device.malloc(11 << 20))
    device.malloc(90 << 20)  # with more reserved than at that call, and cached segments: a collector would have run
    told = verdict(mp.load(device.snapshot()))
    assert told["exact"], told
    assert any("1 empty_cache() call" in text for text in told["inferred"])
    assert not any("memory limit" in text for text in told["inferred"])
