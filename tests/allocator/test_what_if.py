"""Other settings for a recording's requests: the truth lies in the range, nothing is lost, every view works on the answer."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recorded import facts, of_trace, snapshot

import nbmemprof as mp
from nbmemprof.allocator import ConfError, Device, Settings, _link, _run
from nbmemprof.allocator._model import Model
from nbmemprof.allocator.versions import rules_of
from nbmemprof.allocator.what_if import CONFS

MIB = 1 << 20


def rows(frame: pl.DataFrame) -> dict[str, dict]:
    return {r["conf"]: r for r in frame.iter_rows(named=True)}


@pytest.mark.cost(0.8)
def test_a_training_run_of_changing_length_default_to_expandable_and_back():
    """GPT-2 small, eight steps of changing sequence length, run both ways on an H200: each predicts the other."""
    recorded, truth = of_trace("gpt2_varlen_b8_expand")
    classic = mp.load(snapshot("snap_gpt2_varlen_b8"))
    expandable = mp.load(recorded)
    there = rows(mp.what_if(classic, ["", "expandable_segments:True"]))
    assert there[""]["origin"] == "measured"
    assert there["expandable_segments:True"]["peak_reserved_low_bytes"] <= truth["reserved"] <= there["expandable_segments:True"]["peak_reserved_high_bytes"]
    assert there["expandable_segments:True"]["peak_allocated_low_bytes"] == truth["allocated"]
    back = rows(mp.what_if(expandable, [""]))[""]
    reserved = there[""]["peak_reserved_low_bytes"]
    assert reserved == mp.summary(classic)["peak_reserved_bytes"][0]
    assert back["peak_reserved_low_bytes"] <= reserved <= back["peak_reserved_high_bytes"]
    assert back["origin"] == "replayed"
    assert back["peak_reserved_high_bytes"] - back["peak_reserved_low_bytes"] <= 0.02 * reserved


def test_an_answer_is_a_capture_like_any_other():
    capture = mp.load(snapshot("mempool.snapshot"))
    made = mp.replay(capture, "expandable_segments:True")
    stats = made.meta["stats"]["0"]
    row = mp.summary(made).row(0, named=True)
    assert row["origin"] == "replayed"
    assert row["peak_allocated_bytes"] == stats["allocated_bytes.all.peak"]
    assert row["peak_reserved_bytes"] == stats["reserved_bytes.all.peak"]
    assert row["end_reserved_bytes"] == stats["reserved_bytes.all.current"]
    assert row["retries"] == 0
    assert mp.breakdown(made)["size_bytes"].sum() == row["peak_allocated_bytes"]
    assert set(made.allocations["pool_id"].cast(pl.String).unique()) == {None}  # as recorded: this torch's events name no pool
    assert set(made.blocks["pool_id"].cast(pl.String).unique()) == {"0_0", "0_1"}
    assert made.meta["verdict"]["exact"]


def test_no_request_is_lost_and_refused_ones_are_counted():
    capture = mp.load(snapshot("default-streams.snapshot"))
    asked = capture.events.filter(pl.col("action").cast(pl.String) == "alloc").height
    for limit in (None, "1GiB"):
        made = mp.replay(capture, "", limit_bytes=limit)
        assert made.allocations.height + made.meta["refused"]["requests"] == asked
        assert (made.meta["refused"]["requests"] > 0) == (limit is not None)
        assert made.events.filter(pl.col("action").cast(pl.String) == "oom").height == made.meta["refused"]["requests"]
        assert made.meta["limit_bytes"] == (None if limit is None else 1 << 30)


def test_a_request_that_was_refused_is_asked_again_under_every_setting():
    """Recorded with classic segments under a limit: expandable ones serve it; the same setting refuses it again."""
    device = Device(limit_bytes=45 * MIB)
    kept = [device.malloc(9 * MIB) for _ in range(4)]  # two to a segment of 20 MiB
    device.free(kept[1])
    device.free(kept[2])  # beside it, where segments have no border
    with pytest.raises(mp.OutOfMemoryError):
        device.malloc(16 * MIB)
    capture = mp.load(device.snapshot())
    frame = rows(mp.what_if(capture, ["", "expandable_segments:True", "max_split_size_mb:128"]))
    got = {conf: (row["origin"], row["ooms"], row["asked_again"], row["served_again"], row["refused_bytes"]) for conf, row in frame.items()}
    assert got == {
        "": ("measured", 1, 1, 0, 16 * MIB), "expandable_segments:True": ("replayed", 0, 1, 1, 0), "max_split_size_mb:128": ("replayed", 1, 1, 0, 16 * MIB),
    }  # fmt: skip
    assert frame["expandable_segments:True"]["peak_allocated_high_bytes"] == 4 * 9 * MIB
    made = mp.replay(capture, "expandable_segments:True")
    assert made.meta["refused"] == {"requests": 0, "bytes": 0}
    assert made.allocations.height == 5
    assert made.meta["stats"]["0"]["allocated_bytes.all.current"] == 18 * MIB  # given back at once


@pytest.mark.cost(1.5)
@given(st.lists(st.tuples(st.integers(1, 40 * MIB), st.integers(0, 6)), min_size=1, max_size=25), st.sampled_from([None, 60 * MIB, 100 * MIB]), st.sampled_from(CONFS))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_if_loses_no_request(sizes, limit, conf):
    """Every request of the recording, refused ones too, is served or refused under the other setting."""
    device, live, refused = Device(limit_bytes=limit), [], 0
    for size, free in sizes:
        if free and live:
            device.free(live.pop(free % len(live)))
        try:
            live.append(device.malloc(size))
        except mp.OutOfMemoryError:
            refused += 1
    capture = mp.load(device.snapshot())
    row = mp.what_if(capture, [conf], limit_bytes=limit).row(0, named=True)
    made = mp.replay(capture, conf, limit_bytes=limit)
    asked = capture.events["action"].cast(pl.String).is_in(["alloc", "oom"]).sum()
    assert asked == len(sizes)
    assert row["asked_again"] == refused
    stats = made.meta["stats"]["0"]
    assert stats["allocation.all.allocated"] + stats["num_ooms"] == asked
    assert row["ooms"] <= row["ooms_high"]
    assert row["served_again_low"] <= row["served_again"] <= refused
    if row["origin"] == "replayed":
        assert made.meta["refused"]["requests"] == stats["num_ooms"]


def test_a_replay_of_a_replay_is_exact():
    """What a replay writes is a recording again, and the rules give it."""
    capture = mp.load(snapshot("split20-gc80-tight.snapshot"))
    made = mp.replay(capture, "expandable_segments:True", limit_bytes="3GiB")
    again = mp.replay(made)
    assert again.meta["verdict"]["exact"], again.meta["verdict"]
    assert again.meta["stats"] == {d: s | {"num_sync_all_streams": again.meta["stats"][d]["num_sync_all_streams"]} for d, s in made.meta["stats"].items()}


def test_under_a_limit_ranges_hold_what_was_counted():
    """Recorded under max_split and GC with a limit of 2.5 GiB: the same setting without the recorded addresses comes near."""
    capture = mp.load(snapshot("split20-gc80-tight.snapshot"))
    truth = facts("split20-gc80-tight")["stats"]
    recorded = mp.what_if(capture, [facts("split20-gc80-tight")["conf"]]).row(0, named=True)
    assert (recorded["origin"], recorded["ooms"], recorded["retries"]) == ("measured", truth["num_ooms"], truth["num_alloc_retries"])
    assert recorded["peak_reserved_high_bytes"] == truth["reserved_bytes.all.peak"]
    assert recorded["device_calls"] == truth["num_device_alloc"] + truth["num_device_free"]


def test_the_order_of_addresses_matters_only_where_there_are_ties():
    capture = mp.load(snapshot("mempool.snapshot"))
    frame = rows(mp.what_if(capture, ["expandable_segments:True", "roundup_power2_divisions:4"]))
    assert frame["expandable_segments:True"]["runs"] == 1
    assert frame["roundup_power2_divisions:4"]["runs"] > 1
    for row in frame.values():
        assert row["peak_reserved_low_bytes"] <= row["peak_reserved_high_bytes"]


@pytest.mark.cost(0.6)
def test_by_default_every_setting_that_a_person_would_try():
    frame = mp.what_if(mp.load(snapshot("mempool.snapshot")))
    assert {"", "expandable_segments:True"} <= set(frame["conf"])
    assert frame.height >= 8
    assert frame["recorded"].sum() == 1


def test_a_cold_start_asks_for_what_was_live():
    whole = snapshot("expand-tight.snapshot")
    whole["device_traces"][0] = whole["device_traces"][0][9001:]
    capture = mp.load(whole)
    made = mp.replay(capture, "")
    live = capture.allocations.filter(pl.col("at_start"))
    assert live.height > 0
    assert made.allocations.height == capture.allocations.height
    assert made.meta["stats"]["0"]["allocation.all.allocated"] == capture.allocations.height


def test_settings_that_torch_would_refuse_are_refused():
    with pytest.raises(ConfError):
        mp.what_if(mp.load(snapshot("mempool.snapshot")), ["max_split_size_mb:1"])
    with pytest.raises(mp.NbmemprofError, match="Nothing to replay"):
        mp.what_if(mp.Capture.build({}))


@pytest.mark.cost(15)  # the compiler's time, where nothing is on disk yet
def test_compiled_and_interpreted_rules_are_the_same(monkeypatch):
    if _link.linked(_run.run) is None:
        pytest.skip("numba does not work here")
    capture = mp.load(snapshot("split20-gc80-tight.snapshot"))
    ways = []
    for form in (_link.linked(_run.run), None):
        monkeypatch.setattr("nbmemprof.allocator._model.worth", lambda *_, form=form: form)
        made = mp.replay(mp.Capture.build(dict(capture.tables.items()), **capture.meta), "max_split_size_mb:64,roundup_power2_divisions:8", limit_bytes="2GiB")
        device = Device(limit_bytes=100 * MIB, addresses=5)
        addresses = [device.malloc(n * MIB // 3) for n in range(1, 15)]
        ways.append((made.events.drop("seq").to_dict(as_series=False), made.meta["stats"], made.meta["verdict"], addresses))
    assert ways[0] == ways[1]


def test_the_name_of_compiled_code_changes_with_the_rules(monkeypatch):
    before = _link._named(_run.run)
    monkeypatch.setattr("nbmemprof.allocator._rules.MIN_BLOCK", 1024)
    assert _link._named(_run.run) != before


def test_a_model_grows_with_its_blocks():
    model = Model(Settings(), rules_of(None), records=8)
    before = len(model.m)
    pools = [model.add_pool() for _ in range(20)]
    assert len(model.m) > before
    assert len(set(pools)) == 20
    device = Device()
    assert len({device.malloc(1 + n % 2000) for n in range(3000)}) == 3000
