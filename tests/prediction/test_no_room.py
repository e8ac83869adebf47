"""A request that finds no room raises torch's error inside the predicted code, at that very request; what would be needed is known all the same."""

from __future__ import annotations

import os
import time
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import nbmemprof as mp
from nbmemprof.allocator import Device
from nbmemprof.errors import OutOfMemoryError
from nbmemprof.prediction import feed
from nbmemprof.prediction.beyond import Beyond
from nbmemprof.prediction.catalogue import find
from nbmemprof.prediction.recorder import EMPTY_CACHE, Allocation, Record
from nbmemprof.prediction.room import Room, Terms, change, outside_bytes
from nbmemprof.views import findings, text

GIB, MIB = 1 << 30, 1 << 20
H200 = find("H200")


def train(batch: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4096, 16384), torch.nn.GELU(), torch.nn.Linear(16384, 4096)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(batch, 4096, device="cuda")).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def halving(batch: int) -> None:
    while True:
        try:
            return train(batch)
        except torch.cuda.OutOfMemoryError as error:
            print("too large:", batch, error)
            batch //= 2


@pytest.fixture(scope="module")
def whole() -> mp.Capture:
    """The same with room for everything."""
    return mp.predict(train, 1 << 20, capacity_bytes=1 << 50)


@pytest.mark.cost(0.9)
def test_code_that_catches_the_error_runs_on_as_on_the_device(whole, capsys):
    made = mp.predict(halving, 1 << 20)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == mp.summary(made)["ooms"].item() > 0
    assert said[0].startswith("too large: 1048576 CUDA out of memory. Tried to allocate 64.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which ")
    assert said[0].endswith("(predicted by nbmemprof for NVIDIA H200, not measured)")
    fits = mp.predict(train, (1 << 20) >> len(said))
    assert "needs" not in fits.meta  # what it came to does fit
    last = max(mark["seq"] for mark in made.marks.iter_rows(named=True) if mark["kind"] == "oom")
    asked = [one.events.filter(pl.col("action") == "alloc", pl.col("seq") > at)["requested_bytes"].tail(40).to_list() for one, at in ((made, last), (fits, -1))]
    assert asked[0] == asked[1]
    assert text.headline(made).startswith("does not fit at first, and the code caught the error: refused at gelu in Sequential.1 (asked 64 GiB); with nothing refused it needs at least about ")
    assert made.meta["needs"]["peak_reserved_bytes"] == mp.summary(whole)["peak_reserved_bytes"].item()


@pytest.mark.cost(0.5)
def test_an_error_that_is_not_caught_ends_the_capture_and_the_need_is_that_of_the_whole_run(whole):
    made = mp.predict(train, 1 << 20)
    needs, peaks = made.meta["needs"], mp.summary(whole).row(0, named=True)
    assert (needs["raised"], needs["caught"], needs["refused"]) == (True, False, 1)
    assert (needs["peak_allocated_bytes"], needs["peak_reserved_bytes"]) == (peaks["peak_allocated_bytes"], peaks["peak_reserved_bytes"])
    assert made.events["action"].to_list()[-1] == "oom" and not any("not raised" in one["what"] for one in made.meta["assumptions"])
    row = mp.oom(made).row(0, named=True)
    assert row["site"] == f"test_no_room.py:{train.__code__.co_firstlineno + 4}" and "truly full" in row["reason"]
    assert "unrecorded" not in text.report(made) and not any("goes on" in one for one in findings.findings(made))


@pytest.mark.cost(0.3)
def test_a_refusal_after_a_backward_leaves_a_copy_that_goes_backward_too():
    def step() -> None:
        train(1 << 10)
        train(1 << 20)

    needs = mp.predict(step).meta["needs"]
    assert needs["phase"] == "forward" and needs["peak_allocated_bytes"] > 200 * GIB


@pytest.mark.cost(0.2)
def test_torchs_own_limit_refuses_from_where_it_is_set():
    def step() -> None:
        held = [torch.zeros(GIB, dtype=torch.uint8, device="cuda")]
        torch.cuda.set_per_process_memory_fraction(0.05)
        for _ in range(20):
            held.append(torch.zeros(GIB, dtype=torch.uint8, device="cuda"))

    made = mp.predict(step)
    assert mp.summary(made)["peak_allocated_bytes"].item() == 6 * GIB
    assert made.meta["needs"]["peak_allocated_bytes"] == 21 * GIB


@pytest.mark.cost(0.2)
def test_a_convolution_whose_workspace_is_refused_goes_on_without():
    def step() -> None:
        net = torch.nn.Conv2d(64, 64, 3, padding=1, device="cuda")
        images = torch.zeros(32, 64, 64, 64, device="cuda")
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 33 * MIB) / torch.cuda.mem_get_info()[1])
        with torch.no_grad():
            net(images)

    made = mp.predict(step)
    assert mp.summary(made)["ooms"].item() == 1 and mp.oom(made)["requested_bytes"].item() > 0
    assert "needs" not in made.meta and any("cuDNN was taken to go on" in one["what"] for one in made.meta["assumptions"])


# ---------------------------------------------------------------------- the rules, and the copy
CALLS = st.lists(st.tuples(st.sampled_from([512, 300 << 10, 3 * MIB, 11 * MIB, 33 * MIB, 70 * MIB]), st.integers(0, 9), st.booleans()), max_size=60)


@pytest.mark.cost(0.5)
@settings(max_examples=25, deadline=None)
@given(CALLS, st.sampled_from(["", "expandable_segments:True", "roundup_power2_divisions:4"]), st.sampled_from([None, 120 * MIB]))
def test_a_request_is_refused_where_the_allocator_refuses_it_call_by_call(calls, conf, limit):
    record = Record()
    capacity = (H200.outside.kernels << 20) + 200 * MIB
    room = Room(record, H200, "2.11", Terms(conf, capacity, limit))
    device = Device(conf, torch="2.11", limit_bytes=limit, capacity_bytes=200 * MIB)
    change(device, 200 * MIB, limit, capacity)  # an expandable segment reaches as far as the card is large
    live: list[tuple[int, int]] = []
    for nbytes, place, empties in calls:
        if live and place < 4:
            index, addr = live.pop(place % len(live))
            record.events.append(~index)
            device.free(addr)
        if empties and place == 9:
            record.events.append(EMPTY_CACHE)
            device.empty_cache()
        index = len(record.made)
        record.made.append(Allocation(nbytes, "empty", None, None, 0))
        record.events.append(index)
        try:
            addr = device.malloc(nbytes)
        except OutOfMemoryError:
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                room.asks(index, nbytes, may_be_undone=False)
        else:
            room.asks(index, nbytes, may_be_undone=False)
            live.append((index, addr))
    served = feed.capture_of(record, H200, conf=conf, torch="2.11", limit_bytes=limit, capacity_bytes=capacity, meta={})
    assert outside_bytes(H200, record) == H200.outside.kernels << 20 or not calls
    assert served.events.filter(pl.col("action") == "oom")["requested_bytes"].len() == len(record.refused)
    assert mp.summary(served)["end_reserved_bytes"].sum() == device.stats()["reserved_bytes.all.current"]


def test_a_copy_that_takes_too_long_is_ended_and_the_need_is_a_lower_bound():
    beyond = Beyond(0.2)
    if beyond.go_on(0):
        time.sleep(60)
        os._exit(0)
    assert beyond.answer() is None and not beyond.go_on(1)  # one for each run
    made: list[Any] = [Allocation(100 * GIB, "empty", None, None, 0), Allocation(60 * GIB, "empty", None, None, 0)]
    record = Record(events=[0, 1], made=made, refused=[1], needs=[(1, None)], rooms=[(0, 139 * GIB, None)])
    capture = feed.capture_of(record, H200, conf="", torch="2.11", limit_bytes=None, capacity_bytes=None, meta={})
    assert capture.meta["needs"]["peak_allocated_bytes"] == 160 * GIB and not capture.meta["needs"]["whole"]
    assert set(mp.cards(capture)["fits"]) == {"no", "maybe"} and mp.cards(capture)["evidence"].str.contains("needs more").all()
