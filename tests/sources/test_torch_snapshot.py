"""Snapshots of every age and state: numbers found, oddities named, hostile files refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import random
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import nbmemprof as mp
from nbmemprof.errors import InputRefused
from nbmemprof.sources import torch_snapshot

FOLDER = Path(__file__).parent.parent / "fixtures" / "snapshots"
CASES = json.loads((FOLDER / "manifest.json").read_text())["cases"]
GOOD = [case for case in CASES if case["load"] != "refuse"]


def events(*rows, **more):
    """A snapshot of one device with these events."""
    return {"segments": [], "device_traces": [list(rows)]} | more


def event(action="alloc", addr=0x1000, size=512, **more):
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 1_700_000_000_000_000, "frames": []} | more


def segment(*blocks, **more):
    """A segment tiled by ``(size, state)`` blocks."""
    made, at = [], 0x7F0000000000
    for size, state in blocks:
        made.append({"address": at, "size": size, "requested_size": size, "state": state, "frames": []})
        at += size
    live = sum(size for size, state in blocks if state == "active_allocated")
    return {
        "device": 0, "address": 0x7F0000000000, "total_size": at - 0x7F0000000000, "allocated_size": live, "active_size": live, "stream": 0, "segment_type": "large",
        "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": made,
    } | more  # fmt: skip


def both(snapshot):
    """The capture from a file and from the object; they must agree in all but the numbering of stacks."""
    from_file, from_object = torch_snapshot.from_bytes(pickle.dumps(snapshot)), torch_snapshot.from_object(snapshot)
    assert_same(from_file, from_object)
    return from_file


def assert_same(a, b):
    assert a.meta["warnings"] == b.meta["warnings"]
    assert a.meta["dropped"] == b.meta["dropped"]
    assert a.meta["settings"] == b.meta["settings"]
    texts = [spelled(c) for c in (a, b)]
    for name in ("events", "segments", "blocks", "allocations", "marks"):
        one, other = (written(c, t)[name] for c, t in zip((a, b), texts, strict=True))
        assert one.equals(other), name


def spelled(capture):
    """stack_id to text."""
    rows = capture.stacks.sort("stack_id", "depth").with_columns(text=pl.format("{}:{} {}", "filename", pl.col("line").cast(pl.String).fill_null("?"), "function"))
    return dict(rows.group_by("stack_id").agg(pl.col("text").str.join("|")).iter_rows())


def written(capture, texts):
    """The tables with stacks spelled out."""
    out = {}
    for name in ("events", "segments", "blocks", "allocations", "marks"):
        frame = capture.tables[name]
        ids = [c for c in frame.columns if c.endswith("stack_id")]
        out[name] = frame.with_columns(pl.Series(c, [texts.get(i) for i in frame[c].to_list()], dtype=pl.String) for c in ids)
    return out


def warned(capture, beginning):
    return [w for w in capture.meta["warnings"] if w.startswith(beginning)]


# ---------------------------------------------------------------------- the files of the manifest
@pytest.mark.parametrize("case", CASES, ids=lambda c: c["file"])
def test_each_file_loads_or_is_refused_as_the_manifest_says(case):
    marker = Path(tempfile.gettempdir())
    before = set(marker.glob("nbmemprof_snapshot_marker*"))
    try:
        capture = mp.load(FOLDER / case["file"])
    except InputRefused as error:
        assert case["load"] in ("refuse", "either")
        assert not case["warn"] or any(word in str(error) for word in case["warn"])
    else:
        assert case["load"] in ("ok", "either")
        assert not case["warn"] or any(word in " ".join(capture.meta["warnings"]) for word in case["warn"])
    assert set(marker.glob("nbmemprof_snapshot_marker*")) == before


@pytest.mark.parametrize("case", [c for c in GOOD if c["expect"]], ids=lambda c: c["file"])
def test_the_numbers_of_each_file_are_those_of_the_manifest(case):
    capture = mp.load(FOLDER / case["file"])
    rows = {row["device"]: row for row in mp.summary(capture).to_dicts()}
    leaks = mp.leaks(capture)
    for device, expect in case["expect"].get("devices", {"0": case["expect"]}).items():
        check(rows[int(device)], expect, capture, int(device))
        if "leak_site" in expect:
            found = leaks.filter(pl.col("device") == int(device)).sort("leak_bytes", descending=True).row(0, named=True)
            assert found["site"].startswith(expect["leak_site"])
            assert found["leak_count"] == expect["leak_count"]
            assert found["leak_bytes"] == expect["leak_bytes"]
            assert found["bytes_per_iteration"] == expect["leak_bytes_per_iter"]


def check(row, expect, capture, device):
    names = {
        "live": "end_allocated_bytes", "live_blocks": "live_blocks", "pending": "end_pending_bytes", "reserved": "end_reserved_bytes", "segments": "segments", "events": "events",
        "peak_live": "peak_allocated_bytes", "largest_hole": "largest_free_bytes", "live_bytes_without_alloc_event": "unrecorded_bytes", "unknown_state_bytes": "unknown_state_bytes",
        "unknown_events": "unknown_events",
    }  # fmt: skip
    for key, column in names.items():
        if key in expect:
            assert row[column] == expect[key], key
    mine = capture.events.filter(pl.col("device") == device)
    if "alloc_events" in expect:
        assert mine.filter(pl.col("action").cast(pl.String) == "alloc").height == expect["alloc_events"]
    if "oom_requested" in expect:
        oom = mine.filter(pl.col("action").cast(pl.String) == "oom").row(0, named=True)
        mark = capture.marks.filter(pl.col("kind").cast(pl.String) == "oom").row(0, named=True)
        assert (oom["requested_bytes"], oom["addr"]) == (expect["oom_requested"], None)
        assert (mark["value"], mark["seq"]) == (expect["oom_device_free"], oom["seq"])
        free = capture.blocks.filter(pl.col("state").cast(pl.String) == "inactive").group_by(pl.col("pool_id").cast(pl.String) == "0_0").agg(pl.col("size_bytes").sum())
        assert dict(free.iter_rows()) == {True: expect["free_outside_private"], False: expect["free_in_private"]}


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.iterdir() if p.name in {c["file"] for c in GOOD} or p.name.startswith("torch-")))
@pytest.mark.cost(0.5)
def test_a_file_and_its_object_give_the_same_tables(name):
    data = (FOLDER / name).read_bytes()
    data = gzip.decompress(data) if name.endswith(".gz") else data
    if "bomb" in name:
        return
    assert_same(torch_snapshot.from_bytes(data), torch_snapshot.from_object(pickle.loads(data)))


@pytest.mark.cost(0.6)
def test_a_real_recording_is_what_pickle_says_it_is():
    """ResNet-50 on an H200 under torch 2.11: every event, block and stack."""
    data = gzip.decompress((FOLDER / "torch-2.11-resnet50.pickle.gz").read_bytes())
    truth = pickle.loads(data)
    capture = mp.load(FOLDER / "torch-2.11-resnet50.pickle.gz")
    trace = truth["device_traces"][0]
    assert capture.events["action"].cast(pl.String).to_list() == [e["action"] for e in trace]
    assert capture.events["addr"].to_list() == [e["addr"] for e in trace]
    start = trace[0]["time_us"]
    assert capture.meta["start_unix_us"] == start
    assert capture.events["time_us"].to_list() == [float(e["time_us"] - start) for e in trace]
    segment_event = capture.events["action"].cast(pl.String).str.starts_with("segment")
    asked = capture.events.select(pl.when(segment_event).then("size_bytes").otherwise("requested_bytes")).to_series().to_list()
    assert asked == [e["size"] for e in trace]
    texts = spelled(capture)
    assert [texts.get(i) for i in capture.events["stack_id"].to_list()] == ["|".join(f"{f['filename']}:{f['line']} {f['name']}" for f in e["frames"]) or None for e in trace]
    blocks = [b for s in truth["segments"] for b in s["blocks"]]
    assert capture.blocks["addr"].to_list() == [b["address"] for b in blocks]
    assert capture.blocks["state"].cast(pl.String).to_list() == [b["state"] for b in blocks]
    assert capture.blocks["requested_bytes"].to_list() == [None if b["state"] == "inactive" else b["requested_size"] for b in blocks]
    assert capture.segments["size_bytes"].sum() == sum(s["total_size"] for s in truth["segments"])
    spans = capture.marks.filter(pl.col("kind").cast(pl.String) == "range")
    assert spans.height == len(truth["external_annotations"]) // 2
    assert (spans["end_us"] > spans["time_us"]).all()
    assert capture.meta["warnings"] == []


def test_the_configuration_is_kept():
    capture = mp.load(FOLDER / "torch-2.11-oom-max-split.pickle.gz")
    assert capture.meta["conf"] == "max_split_size_mb:20,garbage_collection_threshold:0.8"
    assert capture.meta["settings"]["max_split_size"] == 20 << 20
    assert capture.meta["torch"] is None
    assert capture.marks.filter(pl.col("kind").cast(pl.String) == "oom").height == 16


# ---------------------------------------------------------------------- forms
def test_a_bare_list_of_segments_is_a_snapshot():
    capture = both([segment((512, "active_allocated"), (1536, "inactive"))])
    assert capture.blocks["size_bytes"].to_list() == [512, 1536]
    assert warned(capture, "no events")


def test_a_dict_without_traces_and_one_without_segments_load():
    assert warned(both({"segments": [segment((512, "active_allocated"))]}), "no events")
    assert both({"device_traces": [[event()]]}).events.height == 1


def test_nothing_at_all_is_called_empty():
    assert warned(both({"segments": [], "device_traces": []}), "empty")
    assert warned(both([]), "empty")


def test_blocks_without_addresses_get_them_by_summing_sizes():
    """torch 2.0 and before; what the history says of a block is its request and its stack."""
    frames = [{"filename": "a.py", "line": 1, "name": "f"}]
    old = {
        "device": 0, "address": 4096, "total_size": 4096, "allocated_size": 1024, "active_size": 1024, "stream": 0, "segment_type": "small",
        "blocks": [{"size": 512, "state": "active_allocated", "history": [{"addr": 4096, "real_size": 500, "frames": frames}, {"addr": 4096, "real_size": 7, "frames": []}]},
                   {"size": 512, "state": "active_allocated"}, {"size": 3072, "state": "inactive", "history": [{"addr": 5120, "real_size": 9, "frames": frames}]}],
    }  # fmt: skip
    capture = both([old, old | {"address": 1 << 20}])
    assert capture.blocks["addr"].to_list() == [4096, 4608, 5120, (1 << 20), (1 << 20) + 512, (1 << 20) + 1024]
    assert capture.blocks["requested_bytes"].to_list() == [500, None, None] * 2
    assert capture.blocks["stack_id"].to_list() == [0, None, None] * 2
    assert capture.segments["pool_id"].null_count() == 2


def test_old_events_without_times_streams_or_frames_keep_nulls():
    capture = both({"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 3}]]})
    assert capture.events.select("time_us", "stream", "pool_id", "stack_id").row(0) == (None, None, None, None)
    assert capture.meta["start_unix_us"] is None
    assert warned(capture, "no frames")


def test_devices_keep_their_own_events_and_addresses():
    snapshot = {"segments": [segment((512, "active_allocated"), device=d) for d in (0, 2, 3)], "device_traces": [[], [], [event(), event()], []]}
    capture = both(snapshot)
    assert capture.events["device"].to_list() == [2, 2]
    assert capture.events["seq"].to_list() == [0, 1]
    assert warned(capture, "device without events") == [w for w in capture.meta["warnings"] if "cuda:0, cuda:3" in w]


def test_awaiting_free_is_pending_free():
    assert both([segment((512, "active_awaiting_free"), (512, "active_pending_free"))]).blocks["state"].cast(pl.String).to_list() == ["active_pending_free"] * 2


def test_addresses_of_64_bits_are_kept():
    high = (1 << 64) - (4 << 20)
    capture = both(events(event("segment_alloc", high, 2 << 20), event("alloc", high, 512), segments=[segment((2 << 20, "inactive"), address=high) | {"blocks": []}]))
    assert capture.events["addr"].to_list() == [high, high]
    assert capture.segments["addr"].to_list() == [high]


def test_a_private_pool_is_named_by_its_two_numbers():
    capture = both(events(event(pool_id=(0, 3)), event(pool_id=[1, 0]), event(pool_id=None), event(pool_id="x"), event(pool_id=(1, -1)), segments=[segment((512, "inactive"), segment_pool_id=(0, 3))]))
    assert capture.events["pool_id"].cast(pl.String).to_list() == ["0_3", "1_0", None, None, None]
    assert capture.blocks["pool_id"].cast(pl.String).to_list() == ["0_3"]


def test_unknown_keys_are_ignored():
    assert both(events(event(new={"deep": [1]}), format_version=99, future={"a": [()]})).events.height == 1


# ---------------------------------------------------------------------- oddities, counted and named
BAD_EVENTS = {
    "no dict": 7, "no address": {"action": "alloc", "size": 1}, "no size": {"action": "alloc", "addr": 1}, "negative size": event(size=-512), "size of 2**70": event(size=1 << 70),
    "size as text": event(size="512"), "size as flag": event(size=True), "half a byte": event(size=0.5), "not a number": event(size=float("nan")), "negative address": event(addr=-1),
    "address of 2**64": event(addr=1 << 64), "range beyond the numbers": event(addr=(1 << 63) - 100, size=512), "action as number": event(action=5),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD_EVENTS)
def test_malformed_events_are_skipped_and_counted(what):
    capture = both(events(event(), BAD_EVENTS[what], event("free_requested"), event("free_completed")))
    assert capture.events["action"].cast(pl.String).to_list() == ["alloc", "free_requested", "free_completed"]
    assert capture.meta["dropped"] == {"malformed events": 1}
    assert len(warned(capture, "malformed: 1 of 4 events")) == 1


def test_unknown_and_missing_actions_are_kept_and_counted():
    capture = both(events(event("segment_promote"), event(None), {"addr": 1, "size": 2, "frames": []}, event("alloc")))
    assert capture.events["action"].cast(pl.String).to_list() == ["segment_promote", None, None, "alloc"]
    assert warned(capture, "unknown")[0].startswith("unknown actions are kept but not followed: no action 2×, 'segment_promote' 1×")


def test_unknown_states_keep_their_bytes_and_their_name():
    capture = both([segment((512, "quarantined"), (1024, "quarantined"), (512, "active_allocated"))])
    assert capture.blocks["state"].cast(pl.String).to_list() == ["unknown", "unknown", "active_allocated"]
    assert "'quarantined' 2×" in warned(capture, "unknown block states, 1.5 KiB")[0]


def test_malformed_segments_and_blocks_are_skipped_and_counted():
    good = segment((512, "active_allocated"), (512, "inactive"))
    bad_block = segment((512, "active_allocated"), (512, "inactive"), address=1 << 40)
    bad_block["blocks"] = [None, {"size": -1, "state": "inactive"}, {"address": 1 << 40, "size": 512, "state": "inactive"}]
    capture = both([good, 3, {}, segment(total_size=-5), segment(device="x"), bad_block])
    assert capture.segments.height == 2
    assert capture.blocks.height == 3
    assert capture.meta["dropped"] == {"malformed segments": 4, "malformed blocks": 2}


def test_sums_that_do_not_match_are_inconsistent():
    assert "do not add up to the segment's size" in warned(both([segment((512, "inactive"), total_size=4096)]), "inconsistent")[0]
    assert "another allocated size" in warned(both([segment((512, "active_allocated"), allocated_size=0)]), "inconsistent")[0]
    doubled = segment((512, "active_allocated"), (512, "active_allocated"))
    doubled["blocks"][1]["address"] -= 256
    assert "overlap" in warned(both([doubled]), "inconsistent")[0]


def test_times_that_go_back_are_said_and_kept():
    capture = both(events(*(event("snapshot", 0, 0, time_us=1_700_000_000_000_000 + t) for t in (0, 50, 20, 20, 60))))
    assert capture.events["time_us"].to_list() == [0, 50, 20, 20, 60]
    assert "1 events are dated earlier" in warned(capture, "time order")[0]


def test_the_recorders_own_word_on_overflow_is_passed_on():
    capture = both(events(event(), allocator_settings={"trace_alloc_overflowed": True, "trace_alloc_max_entries": 100_000}))
    assert "max_entries 100000" in warned(capture, "history truncated")[0]
    assert len(warned(capture, "history truncated")) == 1


def test_annotations_are_paired_by_name_and_device():
    def note(stage, name, at, device=0):
        return {"stage": stage, "name": name, "device": device, "time_us": 1_700_000_000_000_000 + at}

    notes = [note("START", "a", 0), note("START", "a", 1), note("END", "a", 2), note("START", "b", 3, 1), note("END", "a", 4), note("END", "stray", 5), {"stage": "START"}, 7]
    capture = both(events(event(), external_annotations=notes))
    assert capture.marks.select("device", "name", "time_us", "end_us").rows() == [(0, "a", 0.0, 4.0), (0, "a", 1.0, 2.0), (1, "b", 3.0, None)]


def test_what_users_note_becomes_a_mark():
    capture = both(events(event("user_defined", 0, 0, user_metadata="epoch 3"), event("user_defined", 0, 0, user_metadata="")))
    assert capture.marks.select("kind", "name", "seq").with_columns(pl.col("kind").cast(pl.String)).rows() == [("note", "epoch 3", 0)]


# ---------------------------------------------------------------------- names
def test_names_stay_exact_and_apart():
    """Letters of any script, markup, newlines, lone surrogates, and names that differ only there."""
    names = ["été à l'île.py", "ノート/学習.py", "<b>&amp;</b>.py", "a\nb.py", "a\\nb.py", "\ud800.py", "\udfff.py", "x" * 5000, ""]
    frames = [[{"filename": name, "line": 1, "name": "f"}] for name in names]
    capture = both(events(*(event(addr=512 * i, frames=f) for i, f in enumerate(frames))))
    assert capture.events["stack_id"].n_unique() == len(names)
    assert capture.stacks["filename"].n_unique() == len(names)
    assert set(names[:5]) <= set(capture.stacks["filename"])


def test_equal_stacks_have_one_number_however_they_are_stored():
    """Shared lists, equal lists of shared frames, and equal frames written out each time."""
    def made(line):
        return [{"filename": "a.py", "line": line, "name": "f"}, {"name": "main", "filename": "b.py", "line": 2}]

    shared, frame = made(1), made(1)[0]
    rows = [event(frames=shared), event(frames=shared), event(frames=made(1)), event(frames=[frame, *made(1)[1:]]), event(frames=made(2)), event(frames=made(1)[:1]), event(frames=made(1)[::-1])]
    capture = both(events(*rows))
    assert capture.events["stack_id"].to_list()[:4] == [0, 0, 0, 0]
    assert capture.events["stack_id"].n_unique() == 4
    assert capture.stacks.filter(pl.col("stack_id") == 0).sort("depth").select("depth", "function", "filename", "line").rows() == [(0, "f", "a.py", 1), (1, "main", "b.py", 2)]


def test_strange_frames_do_no_harm():
    frames = [{"filename": None, "line": "x", "name": 3}, "text", None, {}, {"filename": "a.py", "line": 1 << 70, "name": "f"}]
    capture = both(events(event(frames=frames), event(frames="text"), event(frames=[None]), event(frames=None)))
    assert capture.stacks.select("filename", "line", "function").rows() == [("", None, ""), ("", None, ""), ("a.py", None, "f")]
    assert capture.events["stack_id"].to_list() == [0, None, None, None]


def test_very_deep_stacks_are_cut():
    capture = both(events(event(frames=[{"filename": "a.py", "line": i, "name": "f"} for i in range(3000)])))
    assert capture.stacks.height == 1024


# ---------------------------------------------------------------------- doors
SNAPSHOT = events(event("segment_alloc", 1 << 21, 2 << 20), event("alloc", 1 << 21, 512))


def test_path_bytes_file_and_object_are_all_taken(tmp_path):
    data = pickle.dumps(SNAPSHOT)
    path = tmp_path / "a.pickle"
    path.write_bytes(data)
    made = [mp.load(path), mp.load(str(path)), mp.load(data), mp.load(io.BytesIO(data)), mp.load(SNAPSHOT), mp.load(gzip.compress(data))]
    for capture in made[1:]:
        assert_same(made[0], capture)
    assert made[0].meta["title"] == "a.pickle"
    assert made[0].meta["origin"] == "measured"


def test_a_rank_is_written_to_the_tables():
    capture = torch_snapshot.from_object(SNAPSHOT, rank=3)
    assert capture.events["rank"].to_list() == [3, 3]


@pytest.mark.parametrize("what", [{}, {"a": 1}, {"segments": 3}, [1, 2], [[]], [{"x": 1}], "text", 5, None, {"segments": None, "device_traces": "x"}], ids=repr)
def test_data_that_is_no_snapshot_is_refused(what):
    with pytest.raises(InputRefused, match="not a snapshot"):
        torch_snapshot.from_bytes(pickle.dumps(what))


def test_a_missing_file_and_a_folder_say_so(tmp_path):
    with pytest.raises(InputRefused, match="can't be"):
        torch_snapshot.from_path(tmp_path / "none.pickle")
    with pytest.raises(InputRefused, match="can't be"):
        torch_snapshot.from_path(tmp_path)


def test_bytes_after_the_pickle_are_said():
    assert warned(torch_snapshot.from_bytes(pickle.dumps(SNAPSHOT) + b"more"), "malformed: 4 bytes after the end")


def test_gzip_of_several_members_and_with_padding_is_read():
    data = pickle.dumps(SNAPSHOT)
    packed = gzip.compress(data[:100]) + gzip.compress(data[100:]) + bytes(64)
    assert_same(torch_snapshot.from_bytes(packed), torch_snapshot.from_bytes(data))


def test_damaged_gzip_is_refused():
    data = gzip.compress(pickle.dumps(SNAPSHOT))
    with pytest.raises(InputRefused, match="truncated or incomplete"):
        torch_snapshot.from_bytes(data[:-20])
    with pytest.raises(InputRefused, match="damaged or corrupt"):
        torch_snapshot.from_bytes(data[:40] + bytes([data[40] ^ 255]) + data[41:-8] + bytes(8))
    with pytest.raises(InputRefused, match="empty"):
        torch_snapshot.from_bytes(gzip.compress(b""))


@pytest.mark.cost(1)
def test_a_gzip_bomb_stops_early():
    """A gibibyte of zeros in a megabyte is given up after its first part; a limit of the user's holds too."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(bytes(16 << 20)) for _ in range(16)) + packer.flush()
    with pytest.raises(InputRefused, match="too large when inflated"):
        torch_snapshot.from_bytes(bomb)
    noise = random.Random(1).randbytes(300_000)
    with pytest.raises(InputRefused, match="too large when inflated"):
        torch_snapshot.from_bytes(gzip.compress(noise), inflated_limit=100_000)


def test_shared_traces_cannot_be_multiplied():
    """A thousand devices that share one trace of a thousand events that share one dict."""
    data = b"\x80\x04}(\x8c\x0ddevice_traces](](" + b"}\x94" + b"h\x00" * 5000 + b"e\x94" + b"h\x01" * 900 + b"eu."
    with pytest.raises(InputRefused, match="bomb"):
        torch_snapshot.from_bytes(data)


# ---------------------------------------------------------------------- damage
@pytest.mark.cost(8)
def test_three_hundred_mutants_load_or_are_refused():
    """The first of those that `make soak` tries; anything but a result or an InputRefused fails."""
    import mutants

    results = [mutants.attempt(mutants.mutant(number)[1]) for number in range(300)]
    assert 60 < results.count("ok") < 240


@pytest.mark.cost(3)
def test_a_big_file_reads_the_same_compiled():
    """Enough rows for the compiled kernel, and batches of a thousand many times over."""
    frames = [[{"filename": f"f{i}.py", "line": i, "name": "g"}, {"filename": "main.py", "line": 3, "name": "main"}] for i in range(50)]
    rng = np.random.default_rng(5)
    rows = [event("alloc", 512 * i, int(rng.integers(1, 512)), frames=frames[i % 50], time_us=1_700_000_000_000_000 + i, pool_id=(0, i % 2)) for i in range(25_000)]
    data = pickle.dumps(events(*rows))
    assert len(data) > 1_000_000
    assert_same(torch_snapshot.from_bytes(data), torch_snapshot.from_object(events(*rows)))


@pytest.mark.cost(1.5)
def test_traces_of_many_segments_are_followed_in_time():
    """Thirty thousand segments given back again, and as many mapped ranges that never touch: nothing is searched from end to end for each."""
    given = [event(action, (1 << 40) + i % 500 * (4 << 20), 2 << 20) for i in range(30_000) for action in ("segment_alloc", "segment_free")]
    apart = [event("segment_map", (1 << 41) + i * (4 << 20), 2 << 20) for i in range(30_000)]
    begin = time.perf_counter()
    for rows in (given, apart):
        assert torch_snapshot.from_bytes(pickle.dumps(events(*rows))).events.height == len(rows)
    assert time.perf_counter() - begin < 40  # cold and on a busy machine; a search would take many minutes


def test_no_place_of_this_machine_is_in_a_capture(tmp_path):
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    assert os.fspath(tmp_path) not in json.dumps(mp.load(path).meta, default=str)
