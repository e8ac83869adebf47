"""Probes on a GPU made of NumPy: what is launched, verified, chosen and reported; and what ships where there is no GPU."""

from __future__ import annotations

import json
import sys

import polars as pl
import pytest
from fake_gpu import FakeGpu
from support import ROOT

from nbmemprof.errors import FlagError, NbmemprofError
from nbmemprof.gpu import _device, probes, twins
from nbmemprof.gpu.probes import _bandwidth, _banks, _coalescing, _frame, _latency, _transfers
from nbmemprof.views import probes as view

sys.path.append(str(ROOT / "tests" / "gpu"))
import record_probes

MIB = 1 << 20


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(_banks, "SIDE", 128)
    monkeypatch.setattr(_transfers, "SIZES", (1 << 16, 16 * MIB))
    monkeypatch.setattr(_transfers.measure, "__defaults__", ((1 << 16, 16 * MIB), 10))
    monkeypatch.setattr(_latency, "SIZES", (("L1", 1 << 14, "walk"), ("L2", 1 << 20, "all"), ("L2", 1 << 18, "walk")))
    monkeypatch.setattr(_latency, "SETS", (1, 2))


def measured(name: str, gpu: FakeGpu | None = None, **options) -> probes.ProbeFrame:
    if name in ("bandwidth", "coalescing", "unified_memory"):
        options.setdefault("size_bytes", MIB)
    return probes.run(name, gpu=gpu or FakeGpu(), **options)


@pytest.mark.cost(0.3)
@pytest.mark.parametrize("name", probes.NAMES)
def test_every_probe_says_where_its_numbers_come_from_and_draws_itself(name):
    frame = measured(name)
    assert (frame.origin, frame.device, frame.probe) == ("measured", "NVIDIA H200", name)
    assert frame.height > 0
    assert frame.about["command"] == f"mp.probes.{name}()"
    bundle = frame._repr_mimebundle_()
    assert "measured here on NVIDIA H200" in bundle["text/plain"]
    assert 'src="data:image/svg+xml;base64,' in bundle["text/html"]
    assert sum(len(part) for part in bundle.values()) < 40_000
    chart = frame.chart().to_dict()
    assert "measured here on NVIDIA H200" in json.dumps(chart["title"])


@pytest.mark.cost(0.25)
@pytest.mark.parametrize(
    ("name", "kernel", "row"),
    [
        ("bandwidth", "triad", {"what": "triad"}),
        ("bandwidth", "read", {"what": "read"}),
        ("coalescing", "gather", {"what": "gather, random places"}),
        ("bank_conflicts", "shared_loads", {"what": "stride 1"}),
        ("bank_conflicts", "transpose_padded", {"what": "transpose, padded"}),
        ("latency", "chase", {"what": "L1"}),
        ("working_set", "reread", {"size_bytes": MIB}),
        ("unified_memory", "touch", {"what": "host reads pages on the GPU"}),
        ("transfers", "copy to host", {"what": "pageable"}),
    ],
)
def test_one_wrong_bit_is_not_verified(name, kernel, row):
    right, wrong = measured(name), measured(name, FakeGpu(broken=kernel))
    same = [pl.col(column) == value for column, value in row.items()]
    assert right.filter(same)["verified"].all()
    assert not wrong.filter(same)["verified"].any()
    if kernel == "triad":
        assert wrong.filter(pl.col("what") != "triad")["verified"].all()
        assert "6 of 36 rows gave a wrong result; their times mean nothing." in wrong._repr_mimebundle_()["text/plain"]


@pytest.mark.cost(0.3)
def test_bandwidth_takes_the_fastest_of_all_geometries_and_names_it():
    gpu = FakeGpu()
    frame = measured("bandwidth", gpu)
    row = frame.filter((pl.col("what") == "copy") & (pl.col("width") == 16) & (pl.col("form") == "one-shot")).row(0, named=True)
    assert (row["unroll"], row["tried"]) == (8, len(_bandwidth.geometries(gpu, MIB // 16)))  # the fake is faster with more in flight
    assert row["moved_bytes"] == 2 * MIB
    assert row["achieved_bytes_per_s"] == pytest.approx(2 * MIB / row["median_us"] * 1e6)
    assert frame["achieved_bytes_per_s"].max() == frame["ceiling_bytes_per_s"][0]
    assert frame.group_by("what").agg(pl.col("best").sum()).filter(pl.col("best") < 1).is_empty()
    launched = {(kernel, macros["WIDTH"], macros["STREAM"]) for _, kernel, _, _, macros in gpu.launches}
    assert launched == {(kernel, width, stream) for kernel in _bandwidth.ARRAYS for width in (4, 8, 16) for stream in (0, 1)}


def test_a_one_shot_launch_covers_all_elements_and_a_persistent_one_fills_the_multiprocessors():
    for geometry in _bandwidth.geometries(FakeGpu(), 100_001):
        if geometry.form == "one-shot":
            assert 0 <= geometry.grid * geometry.block * geometry.unroll - 100_001 < geometry.block * geometry.unroll
        else:
            assert geometry.grid * geometry.block in (4 * 2048, 2 * 4 * 2048)


def test_arrays_that_the_l2_could_hold_are_refused():
    with pytest.raises(NbmemprofError, match="would be answered by the L2"):
        measured("bandwidth", size_bytes=FakeGpu.l2_bytes * 3)


def test_managed_memory_is_bounded():
    with pytest.raises(NbmemprofError, match=r"at most 64 MiB; 65 MiB were asked for"):
        measured("unified_memory", size_bytes=65 * MIB)


def test_coalescing_puts_the_model_beside_the_measurement():
    frame = measured("coalescing")
    known = dict(frame.select("what", "sectors").iter_rows())
    assert [known[f"stride {s}"] for s in _coalescing.STRIDES] == [4, 8, 12, 16, 32, 32, 32, 32]
    assert [known[f"offset {o}"] for o in (1, 8)] == [5, 4]
    assert known["gather, random places"] > 31


def test_bank_conflicts_shows_both_cures():
    frame = measured("bank_conflicts")
    for width, ways in ((4, 32), (8, 16), (16, 8)):
        of = dict(frame.filter(pl.col("width") == width).select("what", "ways").unique(keep="last").iter_rows())
        assert (of["column of rows of 128 B"], of["… padded by one element"], of["… swizzled, column ^ row"]) == (ways, 1, 1)
    assert frame.filter(pl.col("what") == "reduction, strided")["ways"].item() > 1
    assert frame.filter(pl.col("what") == "reduction, halves")["ways"].item() == 1


def test_probes_leave_nothing_behind():
    gpu = FakeGpu()
    measured("allocators", gpu)
    measured("transfers", gpu)
    assert (gpu.held, gpu.locked) == ({}, [])


def test_a_long_probe_tells_how_far_it_is_and_takes_memory_of_its_own():
    gpu, heard = FakeGpu(), []
    probes.run("bandwidth", gpu=gpu, size_bytes=MIB, told=heard.append)
    assert heard[0] == "probe bandwidth: measuring on NVIDIA H200 …"
    assert len(heard) == 1 + 18
    assert heard[-1].endswith("geometries (18 of 18)")
    assert gpu.inside is False


def test_times_have_a_median_and_quartiles():
    times = _device.Times((5.0, 1.0, 9.0, 3.0, 7.0))
    assert (times.low_us, times.median_us, times.high_us) == (3.0, 5.0, 7.0)
    assert (_device.Times((2.0,)).low_us, _device.Times((2.0,)).high_us) == (2.0, 2.0)


def test_every_kernel_has_a_twin():
    import re

    from nbmemprof.gpu import _loader

    kernels = {(file, name) for file in _loader.names() for name in re.findall(r'extern "C" __global__ void (\w+)\(', _loader.source(file))}
    assert kernels - set(twins.TWINS) == {("access_patterns", "access_patterns")}  # its twin is the warp model: tests/gpu/record_patterns.py
    assert set(twins.TWINS) <= kernels


# ---------------------------------------------------------------------- what ships
@pytest.mark.parametrize("name", probes.NAMES)
def test_the_shipped_recordings_are_an_h200_s_and_all_verified(name):
    frame = probes.run(name, recorded=True)
    assert (frame.origin, frame.device, frame.about["versions"]["driver"]) == ("recorded", "NVIDIA H200", "580.159.04")
    assert frame.about["command"] == f"python tests/gpu/record_probes.py OUT {name}"
    if "verified" in frame.columns:
        assert frame["verified"].all()
    assert len(frame._repr_mimebundle_()["text/html"]) < 40_000


def test_recorded_latencies_are_those_of_another_h200_within_3_percent():
    frame = probes.latency(recorded=True)
    for size, cycles in record_probes.LATENCIES.items():
        brought = "walk" if size < 1 << 20 else "all"
        assert frame.filter((pl.col("size_bytes") == size) & (pl.col("brought_by") == brought))["cycles"].item() == pytest.approx(cycles, rel=0.03)


def test_recorded_bandwidth_is_at_least_99_percent_of_the_best_public_kernel_in_the_same_run():
    kept = json.loads((ROOT / "tests" / "fixtures" / "h200" / "probes" / "versus.json").read_text())
    for what, found in kept["kernels"].items():
        assert found["verified"], what
        ours = found["contenders"][found["ours"]]
        others = [c for name, c in found["contenders"].items() if name != found["ours"]]
        assert len(ours["runs"]) == record_probes.RUNS
        assert ours["median_bytes_per_s"] >= 0.99 * max(c["median_bytes_per_s"] for c in others), what
        assert max(c["spread"] for c in (ours, *others)) < 0.01
    assert {"torch copy_", "cudaMemcpyAsync"} <= set(kept["kernels"]["copy"]["contenders"])


def test_recorded_strides_cost_what_the_model_says_and_conflicts_a_cycle_each():
    found = {row["what"]: row for row in probes.coalescing(recorded=True).iter_rows(named=True)}
    for stride in (1, 2, 3, 4, 8):
        assert found[f"stride {stride}"]["share_of_ceiling"] == pytest.approx(found[f"stride {stride}"]["modelled_share"], rel=0.01)
    loops = probes.bank_conflicts(recorded=True).filter(pl.col("wavefronts") > 1, pl.col("cycles_per_load").is_not_null())
    assert loops.height > 15
    assert ((loops["cycles_per_load"] / loops["wavefronts"] - 1).abs() < 0.05).all()


# ---------------------------------------------------------------------- without a GPU
def test_a_recording_is_what_was_measured(tmp_path, monkeypatch):
    frame = measured("latency")
    (tmp_path / "latency.json").write_text(_frame.to_json(frame))
    monkeypatch.setattr(_frame, "_FOLDER", tmp_path)
    _frame._read.cache_clear()
    back = probes.latency(recorded=True)
    _frame._read.cache_clear()
    assert (back.origin, back.device, back.about["date"]) == ("recorded", "NVIDIA H200", frame.about["date"])
    assert back.drop("ns").equals(pl.DataFrame(frame).drop("ns"))
    assert "recorded on NVIDIA H200" in back.said()
    assert "not measured here" in back.said()


def test_without_gpu_and_recording_it_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(_frame, "_FOLDER", tmp_path)
    monkeypatch.setattr(_device, "find", lambda: None)
    _frame._read.cache_clear()
    with pytest.raises(NbmemprofError, match=r"no recording of 'latency' ships .*nbmemprof\[cupy\]"):
        probes.latency()


def test_a_machine_without_cupy_or_device_has_no_gpu(monkeypatch):
    import types

    monkeypatch.setitem(sys.modules, "cupy", None)
    assert _device.find() is None

    class Runtime:
        def getDeviceCount(self):
            raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=Runtime())))
    assert _device.find() is None


def test_the_verb_takes_the_probe_by_name():
    from nbmemprof.flags import parse
    from nbmemprof.verbs import probe

    args = parse("latency --recorded", probe.FLAGS, prog="%memprof probe")
    assert (args.name, args.recorded) == ("latency", True)
    with pytest.raises(FlagError, match="Did you mean 'latency'"):
        parse("latencies", probe.FLAGS, prog="%memprof probe")


def test_rates_are_written_as_data_sheets_write_them():
    assert [view.format_rate(r) for r in (4.4e12, 55.1e9, 2.5e6, None)] == ["4.4 TB/s", "55.1 GB/s", "2.5 MB/s", "unknown"]
