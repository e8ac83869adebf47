"""The real metric library, which needs no GPU: every counter that is asked for exists, and in how many passes it is gathered."""

from __future__ import annotations

import pytest

from nbmemprof.analyses._counters import COUNTERS, SETS, metrics_of
from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _cupti, _structs
from nbmemprof.gpu._metric_host import MetricHost


@pytest.fixture(scope="module")
def cupti():
    if _cupti.find_library() is None:
        pytest.skip("needs a libcupti: pip install nvidia-cuda-cupti")
    return _cupti.open_library()


@pytest.mark.parametrize("chip", ["TU102", "GA100", "GA102", "AD102", "GH100"])  # compute capability 7.5 to 9.0
def test_every_counter_exists(cupti, chip):
    with MetricHost(cupti, chip, [COUNTERS["duration"].metric]) as host:
        assert [name for name, counter in COUNTERS.items() if not host.knows(counter.metric)] == []


@pytest.mark.parametrize(("name", "passes"), [("all", 6), ("unpatched", 5), ("global", 4), ("shared", 2), ("dram", 1)])
def test_passes_on_an_h200(cupti, name, passes):
    with MetricHost(cupti, "GH100", metrics_of(SETS[name])) as host:
        assert host.passes <= passes


def test_a_name_that_does_not_exist_is_told(cupti):
    with pytest.raises(NbmemprofError, match="GH100 has no counter 'dram__bytes_baked.sum'"):
        MetricHost(cupti, "GH100", [COUNTERS["duration"].metric, "dram__bytes_baked.sum"])


def test_a_counter_says_what_it_is(cupti):
    with MetricHost(cupti, "GH100", [COUNTERS["dram_read"].metric]) as host:
        assert host.properties(COUNTERS["dram_read"].metric)["unit"] == "dram"


def test_a_chip_that_does_not_exist_is_told(cupti):
    with pytest.raises(_cupti.CuptiRefused, match="CUPTI error"):
        MetricHost(cupti, "GX999", [COUNTERS["duration"].metric])


# CUpti_…_Params_STRUCT_SIZE, printed by a C++ program over the headers of CUPTI 13.0.85
SIZES = {
    "cuptiProfilerInitialize": 16, "cuptiProfilerDeInitialize": 16, "cuptiProfilerDeviceSupported": 52, "cuptiDeviceGetChipName": 32,
    "cuptiProfilerGetCounterAvailability": 40, "cuptiProfilerHostInitialize": 48, "cuptiProfilerHostDeinitialize": 24,
    "cuptiProfilerHostGetMetricProperties": 60, "cuptiProfilerHostConfigAddMetrics": 40, "cuptiProfilerHostGetConfigImageSize": 32,
    "cuptiProfilerHostGetConfigImage": 40, "cuptiProfilerHostGetNumOfPasses": 40, "cuptiProfilerHostEvaluateToGpuValues": 72,
    "cuptiRangeProfilerEnable": 32, "cuptiRangeProfilerDisable": 24, "cuptiRangeProfilerGetCounterDataSize": 64,
    "cuptiRangeProfilerCounterDataImageInitialize": 40, "cuptiRangeProfilerSetConfig": 90, "cuptiRangeProfilerStart": 24, "cuptiRangeProfilerStop": 41,
    "cuptiRangeProfilerDecodeData": 32, "cuptiRangeProfilerGetCounterDataInfo": 40, "cuptiRangeProfilerCounterDataGetRangeInfo": 56,
}  # fmt: skip


def test_every_block_has_the_size_that_the_headers_give_it():
    assert {name: _structs.block_size(name) for name in _structs.BLOCKS} == SIZES
