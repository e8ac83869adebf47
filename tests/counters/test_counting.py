"""A counting session against a libcupti that answers, and one that refuses."""

from __future__ import annotations

import pytest
from counters.fake_cupti import FakeCupti, machine

from nbmemprof.analyses._counters import COUNTERS, SETS, metrics_of
from nbmemprof.analyses.kernels import kernels
from nbmemprof.errors import NbmemprofError, NotRecording
from nbmemprof.gpu._counting import Counting
from nbmemprof.gpu._cupti import CuptiRefused

DURATION = COUNTERS["duration"].metric


def counted(fake, work, **options):
    counting = Counting(**options, **machine(fake))
    counting.start()
    try:
        work()
        return counting.stop()
    finally:
        counting.close()


def test_every_launch_becomes_a_row_with_its_name_grid_and_values():
    fake = FakeCupti([{DURATION: 2000.0, COUNTERS["dram_read"].metric: 64.0}, {DURATION: 3000.0}])

    def work():
        fake.launch("first", (4, 2, 1), (256, 1, 1))
        fake.launch("_Z6secondv", cbid=652)

    capture = counted(fake, work)
    assert capture.kernels.select("kernel_id", "name", "grid", "block", "duration_us").rows() == [
        (0, "first", "4,2,1", "256,1,1", 2.0),
        (1, "second()", "1,1,1", "32,1,1", 3.0),
    ]
    assert kernels(capture)["dram_read_bytes"].to_list() == [64.0, None]
    assert capture.meta["counters"]["passes"] == 6
    assert capture.meta["warnings"] == []


def test_the_line_that_launched_is_known():
    fake = FakeCupti([{DURATION: 1.0}])
    capture = counted(fake, lambda: fake.launch("k"))
    assert kernels(capture)["site"][0].startswith("fake_cupti.py:")


def test_everything_is_given_back_after_a_session():
    fake = FakeCupti([{DURATION: 1.0}])
    counted(fake, lambda: fake.launch("k"))
    assert fake.calls.count("cuptiRangeProfilerEnable") == fake.calls.count("cuptiRangeProfilerDisable") == 1
    assert fake.calls.count("cuptiProfilerHostInitialize") == fake.calls.count("cuptiProfilerHostDeinitialize")
    assert fake.callback is None
    assert not fake.counting


def test_a_second_session_in_the_process_is_refused_until_the_first_ends():
    fake = FakeCupti()
    first = Counting(**machine(fake))
    first.start()
    with pytest.raises(NotRecording, match="already"):
        Counting(**machine(fake)).start()
    first.close()
    counted(fake, lambda: None)


@pytest.mark.parametrize(
    ("function", "code", "words"),
    [
        ("cuptiProfilerInitialize", 39, "Another profiler holds CUPTI in this process"),
        ("cuptiProfilerGetCounterAvailability", 26, "in use by another process"),
        ("cuptiProfilerGetCounterAvailability", 35, "allows them to administrators only"),
        ("cuptiRangeProfilerEnable", 40, "administrators of the host"),
        ("cuptiRangeProfilerSetConfig", 8, "Free GPU memory"),
        ("cuptiRangeProfilerStart", 999, "Restart the kernel"),
        ("cuptiDeviceGetChipName", 46, "newer nvidia-cuda-cupti"),
    ],
)
def test_a_refusal_is_one_line_with_what_to_do_and_leaves_nothing_behind(function, code, words):
    fake = FakeCupti(refusals={function: code})
    counting = Counting(**machine(fake))
    with pytest.raises(CuptiRefused, match=words) as caught:
        counting.start()
    assert f"CUPTI error {code}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert fake.callback is None
    fake.refusals.clear()
    counted(fake, lambda: None)  # the way is free again


@pytest.mark.parametrize(("member", "code"), [("vgpu", 33), ("wsl", 45), ("cmp", 42), ("confidential", 41), ("architecture", 38)])
def test_a_device_that_gives_no_counters_is_told_by_its_reason(member, code):
    fake = FakeCupti(support={"supported": 1, member: 1})
    with pytest.raises(CuptiRefused) as caught:
        Counting(**machine(fake)).start()
    assert caught.value.code == code


def test_without_the_subscription_kernels_are_counted_and_have_no_names():
    fake = FakeCupti([{DURATION: 5000.0}], refusals={"cuptiSubscribe": 39})
    capture = counted(fake, lambda: fake.launch("k"))
    assert capture.kernels.select("name", "duration_us").rows() == [(None, 5.0)]
    assert "kernels have no names and no lines: Another profiler holds CUPTI" in capture.meta["warnings"][0]


def test_kernels_beyond_the_room_run_uncounted_and_their_number_is_told():
    fake = FakeCupti([{DURATION: 1.0}] * 2)
    capture = counted(fake, lambda: [fake.launch(name) for name in "abcde"], max_kernels=2)
    assert capture.kernels["name"].to_list() == ["a", "b"]
    assert fake.counted == 2
    assert capture.meta["counters"]["not_counted"] == 3
    assert "3 of 5 launches were not counted" in capture.meta["warnings"][0]


def test_kernels_of_the_only_graph_are_called_so():
    fake = FakeCupti([{DURATION: 1.0}] * 4)

    def work():
        fake.launch("before")
        fake.launch("", kernels=2, cbid=514)
        fake.launch("after")

    capture = counted(fake, work)
    assert capture.kernels["name"].to_list() == ["before", "graph", "graph", "after"]


def test_a_graph_that_can_not_be_counted_ends_the_counting_and_is_told():
    """As on an H200: graphs of three kernels and more, and all that came after, were not counted."""
    fake = FakeCupti([{DURATION: 1.0}])

    def work():
        fake.launch("before")
        fake.counting = False
        fake.launch("", kernels=3, cbid=514)
        fake.launch("after")

    capture = counted(fake, work)
    assert capture.kernels["name"].to_list() == ["before"]
    assert "2 of 3 launches were not counted: CUPTI can't count one of the CUDA graphs, and stopped there" in capture.meta["warnings"][0]


def test_kernels_of_another_gpu_are_neither_counted_nor_named():
    fake = FakeCupti([{DURATION: 1.0}])
    capture = counted(fake, lambda: [fake.launch("there", context=2), fake.launch("here")])
    assert capture.kernels["name"].to_list() == ["here"]
    assert capture.meta["warnings"] == []


def test_a_launch_that_is_no_kernel_leaves_all_without_names():
    """Which of the launches was captured into a graph can't be told, so none gets a name that may be another's."""
    fake = FakeCupti([{DURATION: 1.0}])
    capture = counted(fake, lambda: [fake.launch("captured", kernels=0), fake.launch("ran")])
    assert capture.kernels["name"].to_list() == [None]
    assert any("Count after the graph is made" in warning for warning in capture.meta["warnings"])


def test_with_two_graphs_no_kernel_gets_a_name_that_may_be_anothers():
    fake = FakeCupti([{DURATION: 1.0}] * 4)
    capture = counted(fake, lambda: [fake.launch("", kernels=2, cbid=514) for _ in range(2)])
    assert capture.kernels["name"].to_list() == [None] * 4
    assert "can't be told" in capture.meta["warnings"][0]


def test_of_a_set_the_chips_own_counters_are_asked_and_the_others_are_named():
    fake = FakeCupti([{DURATION: 1.0}], unknown=(COUNTERS["host_sectors"].metric,))
    capture = counted(fake, lambda: fake.launch("k"))
    assert capture.meta["counters"]["lacking"] == [COUNTERS["host_sectors"].metric]
    assert capture.metrics.height == len(COUNTERS) - 1


def test_of_a_list_an_unknown_counter_is_refused_by_its_name():
    fake = FakeCupti(unknown=("made__up.sum",))
    with pytest.raises(NbmemprofError, match="GH100 has no counter 'made__up.sum'"):
        Counting(["dram_read", "made__up.sum"], **machine(fake)).start()


def test_a_value_that_is_not_a_number_is_null():
    fake = FakeCupti([{DURATION: 1.0}])
    capture = counted(fake, lambda: fake.launch("k"), metrics="dram")
    assert dict(capture.metrics.select("metric", "value").rows()) == {name: 1.0 if name == DURATION else None for name in metrics_of(SETS["dram"])}


def test_a_gpu_that_failed_meanwhile_is_told_and_everything_given_back():
    fake = FakeCupti()
    counting = Counting(**machine(fake, code=700))
    counting.start()
    with pytest.raises(NotRecording, match="CUDA error 700"):
        counting.stop()
    assert fake.callback is None
    counted(fake, lambda: None)


@pytest.mark.parametrize(("metrics", "words"), [("everything", "no set of counters 'everything'"), ([], "asks for no counter")])
def test_what_can_not_be_asked_for_is_told(metrics, words):
    with pytest.raises(NbmemprofError, match=words):
        Counting(metrics)
