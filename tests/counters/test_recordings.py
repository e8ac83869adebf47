"""What an H200 counted: two ways agree, known faults are found, and what was promised for six kernels came true."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from counters.recorded import DETERMINISTIC, capture_of, compared, predictions

from nbmemprof.analyses._kernel_rules import short
from nbmemprof.analyses.kernel_findings import kernel_findings
from nbmemprof.analyses.kernel_lines import kernel_lines
from nbmemprof.analyses.kernels import kernels
from nbmemprof.gpu import _ceilings

RECORDED = Path(__file__).parents[1] / "fixtures" / "h200" / "counters"
PROMISED = {name: told for name, told in json.loads((RECORDED / "predictions.json").read_text()).items() if name != "made"}


@pytest.fixture(scope="module")
def two_ways() -> pl.DataFrame:
    return compared(RECORDED / "cupti_1.json", RECORDED / "ncu.json")


# ---------------------------------------------------------------------- in process and by ncu
def test_twenty_kernels_have_equal_counts_in_process_and_by_ncu(two_ways):
    assert two_ways.height == 20
    assert two_ways.filter(pl.col("differs").list.len() > 0)["name"].to_list() == []


def test_what_is_compared_was_counted():
    """Equal nulls would prove nothing: loads, stores, shared and local memory were each counted in some kernel."""
    frame = kernels(capture_of(RECORDED / "cupti_1.json"))
    assert [name for name in DETERMINISTIC if frame[name].null_count() or not frame[name].sum()] == []


@pytest.mark.parametrize("what", ["dram_read", "dram_write", "l2_sectors"])
def test_traffic_of_twenty_kernels_agrees_within_two_percent(two_ways, what):
    assert two_ways[what].abs().max() <= 0.02


@pytest.mark.parametrize("what", ["l1_hit", "l2_hit"])
def test_hit_rates_of_twenty_kernels_agree_within_two_points(two_ways, what):
    assert two_ways[what].abs().max() <= 2.0


def test_counting_twice_gives_equal_counts():
    again = compared(RECORDED / "cupti_1.json", RECORDED / "cupti_2.json")
    assert again["differs"].list.len().sum() == 0


def test_what_is_known_of_the_addresses_is_what_was_counted():
    frame = kernels(capture_of(RECORDED / "cupti_1.json"))
    told = {row["name"]: (row["load_sectors_per_request"], row["store_sectors_per_request"], row["shared_load_ways"]) for row in frame.iter_rows(named=True)}
    assert told["copy4"] == (4.0, 4.0, None)
    assert told["copy16"] == (16.0, 16.0, None)
    assert told["stride2"][:2] == (8.0, 4.0)
    assert told["stride8"][:2] == (32.0, 4.0)
    assert told["shifted"][0] == pytest.approx(5.0, abs=1e-6)  # the last warp's last lane is off
    assert told["scattered_store"][:2] == (4.0, 32.0)
    assert told["transpose_naive"][:2] == (4.0, 32.0)
    assert told["transpose_tiled"] == (4.0, 4.0, 32.0)


# ---------------------------------------------------------------------- diagnoses
def diagnosed(file: str) -> pl.DataFrame:
    capture = capture_of(RECORDED / file)
    capture.meta["ceilings"] = _ceilings.of("NVIDIA H200")
    calls = json.loads((RECORDED / file).read_text())["calls"]
    return kernel_findings(capture).with_columns(call=pl.col("kernel_id").replace_strict(dict(enumerate(calls))))


@pytest.mark.parametrize(
    ("call", "rule"),
    [("transpose_naive", "scattered_stores"), ("transpose_tiled", "bank_conflicts"), ("array of structures", "scattered_loads"), ("reduce_strided", "bank_conflicts")],
)
def test_the_faults_of_the_naive_kernels_are_found(call, rule):
    found = diagnosed("diagnose.json")
    assert found.filter((pl.col("call") == call) & pl.col("saving_us").is_not_null())["rule"].to_list() == [rule]


def test_what_mends_them_has_no_such_fault():
    found = diagnosed("diagnose.json")
    mended = found.filter(pl.col("call").is_in(["transpose_padded", "transpose_swizzled", "structure of arrays", "reduce_halves"]))
    assert set(mended["rule"]) & {"scattered_loads", "scattered_stores", "bank_conflicts"} == set()


@pytest.mark.parametrize(("slow", "fast"), [("transpose_naive", "transpose_padded"), ("transpose_tiled", "transpose_padded"), ("reduce_strided", "reduce_halves")])
def test_the_time_that_mending_gives_is_the_mended_kernels(slow, fast):
    found = diagnosed("diagnose.json")
    times = json.loads((RECORDED / "diagnose.json").read_text())["events_us"]
    promised = found.filter(pl.col("call") == slow)["predicted_us"][0]
    assert promised == pytest.approx(times[fast][len(times[fast]) // 2], rel=0.15)


def test_by_ncu_the_lines_at_fault_are_told_with_their_strides():
    capture = capture_of(RECORDED / "lines.json")
    capture.meta["ceilings"] = _ceilings.of("NVIDIA H200")
    told = {short(row["name"]): row["finding"] for row in kernel_findings(capture).filter(pl.col("line").is_not_null()).iter_rows(named=True)}
    assert told["transpose_naive"].startswith("transpose_naive line 12: 32 sectors where 4 would do in “for (int j = 0;")
    assert told["transpose_naive"].endswith("threads write with stride n words.")
    assert told["transpose_tiled"].startswith("transpose_tiled line 28: 32-way bank conflicts in “out[(long long)(y + j) * n + x] = tile")
    assert told["reduce_strided"].startswith("reduce_strided line 17: 3.9-way bank conflicts in “if (at < blockDim.x) part[at] += part[at + s];”")
    assert told["structures"].startswith("structures line 50: 16 sectors where 4 would do")


def test_lines_of_a_kernel_add_up_to_its_counters():
    capture = capture_of(RECORDED / "lines.json")
    loads = pl.col("operation") == "load"
    lines = kernel_lines(capture).group_by("kernel_id").agg(
        load_sectors=pl.col("sectors").filter(loads & (pl.col("space") == "global")).sum().cast(pl.Float64),
        shared_load_wavefronts=pl.col("wavefronts").filter(loads & (pl.col("space") == "shared")).sum().cast(pl.Float64),
    ).sort("kernel_id")  # fmt: skip
    whole = kernels(capture).select("kernel_id", "load_sectors", "shared_load_wavefronts")
    assert lines.equals(whole)


# ---------------------------------------------------------------------- promises
def test_the_promises_are_what_the_findings_say():
    """Within 1 %: the card's ceilings were recorded once more since."""
    now = predictions(RECORDED / "slow.json")
    assert {name: told["rules"] for name, told in now.items()} == {name: told["rules"] for name, told in PROMISED.items()}
    assert {name: told["predicted_us"] for name, told in now.items()} == pytest.approx({name: told["predicted_us"] for name, told in PROMISED.items()}, rel=0.01)


@pytest.mark.parametrize("name", PROMISED)
def test_the_rewritten_kernel_takes_what_was_promised(name):
    told = json.loads((RECORDED / "fast.json").read_text())
    events, counted = sorted(told["events_us"][name]), told["kernels"][told["calls"].index(name)]["duration_us"]
    assert PROMISED[name]["predicted_us"] == pytest.approx(events[len(events) // 2], rel=0.15)
    assert PROMISED[name]["predicted_us"] == pytest.approx(counted, rel=0.15)


def test_the_rewritten_kernels_have_nothing_left_to_win():
    left = diagnosed("fast.json").filter(pl.col("saving_us") > 0.05 * pl.col("duration_us"))
    assert left["call"].to_list() == []
