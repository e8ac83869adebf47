"""From counters to what a kernel did with memory, and to sentences; small captures written out."""

from __future__ import annotations

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nbmemprof import schema
from nbmemprof.analyses._counters import COUNTERS
from nbmemprof.analyses._kernel_rules import short
from nbmemprof.analyses._kernel_time import ORDINARY, START_US, bounds_us, mended, predicted_us, work_of
from nbmemprof.analyses.kernel_findings import kernel_findings
from nbmemprof.analyses.kernel_lines import SCHEMA, TABLE
from nbmemprof.analyses.kernels import COLUMNS, ceiling_bytes_per_s, kernels
from nbmemprof.capture import Capture

CEILINGS = {"read": 4.4e12, "triad": 4.3e12, "copy": 4.2e12, "write": 4.1e12}
# a copy of 1 GB by 4-byte accesses, at the ceiling
COPY = {
    "duration": 476_190.0, "sm_cycles": 132 * 900e3, "dram_read": 1e9, "dram_write": 1e9, "load_requests": 1e9 / 128, "store_requests": 1e9 / 128, "load_sectors": 1e9 / 32,
    "store_sectors": 1e9 / 32, "load_bytes": 1e9, "store_bytes": 1e9, "l1_hit": 0.0, "l2_sectors": 2e9 / 32, "l2_misses": 1e9 / 32, "lsu_wavefronts": 2e9 / 128,
    "local_load_sectors": 0.0, "local_store_sectors": 0.0, "host_sectors": 0.0, "stall_long_scoreboard": 20.0, "shared_load_instructions": 0.0, "shared_load_wavefronts": 0.0,
    "shared_store_instructions": 0.0, "shared_store_wavefronts": 0.0, "shared_load_cycles": 0.0, "shared_store_cycles": 0.0, "shared_load_conflicts": 0.0,
    "shared_store_conflicts": 0.0, "shared_load_bytes": 0.0, "shared_store_bytes": 0.0,
}  # fmt: skip
# the same loads a sector each: eight times the sectors, and the bytes of all of them from DRAM
STRIDED = COPY | {"duration": 2_200_000.0, "sm_cycles": 132 * 4e6, "load_sectors": 8e9 / 32, "dram_read": 8e9, "l2_sectors": 9e9 / 32, "lsu_wavefronts": 9e9 / 128}
CONFLICTS = COPY | {"duration": 5e6, "sm_cycles": 132 * 9.9e6, "shared_load_instructions": 4e7, "shared_load_wavefronts": 128e7, "shared_load_cycles": 128e7, "shared_load_conflicts": 124e7, "shared_load_bytes": 4e7 * 128, "lsu_wavefronts": 128e7 + 2e9 / 128}


def capture(*counted, lines=(), ceilings=CEILINGS, **columns):
    names = [f"k{i}" for i in range(len(counted))]
    flat = [(i, COUNTERS[name].metric, value) for i, row in enumerate(counted) for name, value in row.items()]
    tables = {
        "kernels": schema.fill("kernels", {"device": 0, "kernel_id": list(range(len(counted))), "name": names, "grid": "1,1,1", "block": "256,1,1"} | columns),
        "metrics": schema.fill("metrics", {"kernel_id": [f[0] for f in flat], "metric": [f[1] for f in flat], "value": [f[2] for f in flat]}),
    }
    if lines:
        tables[TABLE] = pl.DataFrame(list(lines), schema=SCHEMA)
    return Capture.build(tables, source="counters", ceilings=ceilings)


def row_of(counted, **options):
    return kernels(capture(counted, **options)).row(0, named=True)


# ---------------------------------------------------------------------- numbers
def test_a_copy_is_at_its_ceiling_with_four_sectors_where_four_do():
    row = row_of(COPY)
    assert row["bandwidth_bytes_per_s"] == pytest.approx(4.2e12, rel=1e-5)
    assert row["ceiling_share"] == pytest.approx(1.0, rel=1e-5)
    assert (row["load_sectors_per_request"], row["load_ideal_per_request"]) == (4.0, 4.0)
    assert row["l2_hit_share"] == 0.5


def test_strided_loads_need_an_eighth_of_what_they_touch():
    row = row_of(STRIDED)
    assert (row["load_sectors_per_request"], row["load_ideal_per_request"]) == (32.0, 4.0)
    assert row["store_sectors_per_request"] == row["store_ideal_per_request"] == 4.0


@pytest.mark.parametrize(
    ("wavefronts", "conflicts", "asked", "ways"),
    [(10, 0, 1280, 1.0), (320, 310, 1280, 32.0), (20, 0, 2560, 1.0), (40, 0, 5120, 1.0), (10, 0, 40, 1.0), (20, 0, 5120, 1.0), (32, 22, 320, 3.2), (0, 0, 0, None)],
)
def test_bank_ways_count_what_neither_bytes_nor_instructions_explain(wavefronts, conflicts, asked, ways):
    """8- and 16-byte words take two and four wavefronts without a conflict, a broadcast one, of 16 bytes two; half-empty warps ask for less."""
    row = row_of({"shared_load_wavefronts": wavefronts, "shared_load_cycles": wavefronts, "shared_load_conflicts": conflicts, "shared_load_bytes": asked})
    assert row["shared_load_ways"] == ways


def test_arbitration_with_other_traffic_is_no_conflict():
    """Counted on an H200: a padded transpose, whose loads also wait for the stores of others."""
    row = row_of({"shared_load_wavefronts": 8388608, "shared_load_cycles": 8678150, "shared_load_conflicts": 289542, "shared_load_bytes": 8388608 * 128})
    assert row["shared_load_ways"] == 1.0


def test_bank_ways_without_patched_counters_come_from_the_conflicts():
    assert row_of({"shared_store_instructions": 10, "shared_store_cycles": 80, "shared_store_conflicts": 70})["shared_store_ways"] == 8.0


def test_what_was_not_counted_is_null():
    row = row_of({"duration": 1000.0})
    assert {name for name, value in row.items() if value is None} >= {"dram_read_bytes", "load_sectors_per_request", "l1_hit_share", "ceiling_share"}
    assert row["duration_us"] == 1.0


def test_a_capture_without_kernels_has_the_columns_and_no_rows():
    frame = kernels(Capture.build({}))
    assert frame.columns[: len(COLUMNS)] == list(COLUMNS)
    assert frame.height == 0


@given(st.floats(0, 1))
def test_a_ceiling_lies_between_the_measured_ones(share):
    assert CEILINGS["write"] <= ceiling_bytes_per_s(CEILINGS, share) <= CEILINGS["read"]


def test_ceilings_are_met_at_the_measured_mixes():
    assert [ceiling_bytes_per_s(CEILINGS, share) for share in (0, 0.5, 2 / 3, 1)] == [4.1e12, 4.2e12, 4.3e12, 4.4e12]
    assert ceiling_bytes_per_s({}, 0.5) is None


# ---------------------------------------------------------------------- predictions
def test_mended_strides_leave_the_copy():
    after = mended(row_of(STRIDED), {"loads"})
    assert (after.dram_read, after.dram_write) == (1e9, 1e9)
    assert after.l2_bytes == pytest.approx(2e9)
    assert predicted_us(row_of(STRIDED), {"loads"}, CEILINGS) == pytest.approx(2e9 / 4.2e12 / ORDINARY * 1e6 + START_US)


def test_mended_conflicts_leave_one_wavefront_an_instruction():
    row = row_of(CONFLICTS)
    assert row["shared_load_ways"] == 32.0
    assert mended(row, {"shared"}).wavefronts == pytest.approx(4e7 + 2e9 / 128)


ROWS = [row_of(counted) for counted in (COPY, STRIDED, CONFLICTS)]


@given(st.sets(st.sampled_from(["loads", "stores", "narrow", "shared", "local"])), st.sampled_from(ROWS))
def test_mending_never_adds_work_or_time(faults, row):
    before, after = work_of(row), mended(row, faults)
    assert after.dram_read <= before.dram_read
    assert after.dram_write <= before.dram_write
    assert after.l2_bytes <= before.l2_bytes
    assert after.wavefronts <= before.wavefronts * (1 + 1e-12)
    assert predicted_us(row, faults, CEILINGS) <= row["duration_us"]


def test_time_follows_the_wavefronts_where_the_l1_stage_was_busy_and_the_rest_stays_where_it_was_not():
    """Counted on an H200: a reduction with strides took 1725 µs, the same without conflicts 1351."""
    reduction = COPY | {
        "duration": 1_725_504.0, "sm_cycles": 132 * 1725.504e-6 * 1.9807e9, "dram_read": 1.075e9, "dram_write": 1e7, "shared_load_cycles": 106_851_873.0, "shared_load_conflicts": 73_330_209.0,
        "shared_load_bytes": 2.1705e9, "shared_store_cycles": 58_674_541.0, "shared_store_conflicts": 37_723_501.0, "shared_store_bytes": 1.6e9, "lsu_wavefronts": 357_300_000.0,
        "shared_load_wavefronts": 106_851_873.0, "shared_store_wavefronts": 58_674_541.0,
    }  # fmt: skip
    assert predicted_us(row_of(reduction), {"shared"}, CEILINGS) == pytest.approx(1351, rel=0.05)
    assert predicted_us(row_of(CONFLICTS), {"shared"}, CEILINGS) == pytest.approx(max(5000 * 55.625 / 1295.6, 2e9 / 4.2e12 / ORDINARY * 1e6) + START_US, rel=1e-3)


def test_no_prediction_without_ceilings_or_of_a_kernel_that_is_all_start():
    assert predicted_us(row_of(STRIDED), {"loads"}, {}) is None
    assert predicted_us(row_of(STRIDED | {"duration": 3000.0}), {"loads"}, CEILINGS) is None


def test_bounds_name_what_is_known():
    row = row_of(COPY)
    assert set(bounds_us(work_of(row), row, CEILINGS)) == {"dram", "l1"}
    assert set(bounds_us(work_of(row), row, {**CEILINGS, "l2": 1e13})) == {"dram", "l2", "l1"}


# ---------------------------------------------------------------------- sentences
def rules(made):
    return kernel_findings(made)["rule"].to_list()


def test_a_good_copy_is_told_to_move_fewer_bytes():
    (finding,) = kernel_findings(capture(COPY)).iter_rows(named=True)
    assert finding["rule"] == "at_ceiling"
    assert "4.20 TB/s, 100 % of the best" in finding["finding"]
    assert finding["saving_us"] is None


def test_scattered_loads_are_told_with_their_gain():
    finding = kernel_findings(capture(STRIDED)).row(0, named=True)
    assert finding["finding"].startswith("k0: a warp's load touches 32 sectors where 4 would do; every thread reads a sector of its own")
    assert "about 498 µs in place of 2.2 ms (predicted" in finding["action"]
    assert finding["saving_us"] == pytest.approx(2200 - 498.03, abs=0.1)
    assert finding["origin"] == "predicted"


def line_row(**changes):
    known = {"kernel_id": 0, "name": "k0", "file": "k.cu", "line": 12, "text": "y[i] = x[i * 32];", "space": "global", "operation": "load", "width_bytes": 4, "instructions": 100}
    return dict.fromkeys(SCHEMA) | known | {"sectors": 3200, "ideal_sectors": 400, "stride": "32"} | changes


def test_with_lines_the_line_its_code_and_its_stride_are_told():
    finding = kernel_findings(capture(STRIDED, lines=[line_row()])).row(0, named=True)
    assert finding["line"] == 12
    assert finding["finding"] == "k0 line 12: 32 sectors where 4 would do in “y[i] = x[i * 32];”; threads read with stride 32 words."


def test_a_line_of_another_kernel_is_not_blamed():
    assert kernel_findings(capture(STRIDED, lines=[line_row(kernel_id=1)])).row(0, named=True)["line"] is None


def test_conflicts_on_a_line_tell_their_ways():
    line = line_row(space="shared", sectors=0, ideal_sectors=0, wavefronts=3200, ideal_wavefronts=100, text="sum += part[t * 32];")
    finding = kernel_findings(capture(CONFLICTS, lines=[line])).filter(pl.col("rule") == "bank_conflicts").row(0, named=True)
    assert finding["finding"] == "k0 line 12: 32-way bank conflicts in “sum += part[t * 32];”: 32 wavefronts where 1 would do; threads read with stride 32 words."


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"local_load_sectors": 1e6}, "local_memory"),
        ({"host_sectors": 1e7}, "host_memory"),
        ({"duration": 2e6}, "waits_for_memory"),
        ({"duration": 1e6, "load_requests": 1e9 / 32, "store_requests": 1e9 / 32}, "narrow_accesses"),
        ({"load_sectors": 1.25e9 / 32}, "scattered_loads"),
        ({"load_sectors": 2e9 / 32}, "scattered_loads"),
    ],
)
def test_each_fault_has_its_rule(changes, rule):
    assert rule in rules(capture(COPY | changes))


def test_a_broadcast_beside_full_loads_is_no_waste():
    """Half the requests ask for one word, half for 32: 2.5 sectors on average, the bytes of 2.06, and nothing to mend."""
    assert "scattered_loads" not in rules(capture(COPY | {"load_requests": 1e7, "load_sectors": 2.5e7, "load_bytes": 6.6e8}))


def test_a_start_off_the_grid_is_told_from_a_stride():
    finding = kernel_findings(capture(COPY | {"load_sectors": 1.25e9 / 32})).filter(pl.col("rule") == "scattered_loads").row(0, named=True)
    assert "5 sectors where 4 would do; threads read side by side but begin off the 32-byte grid" in finding["finding"]


def test_launches_of_one_kernel_are_one_finding():
    made = capture(STRIDED, STRIDED, STRIDED, name="same")
    finding = kernel_findings(made).row(0, named=True)
    assert (finding["launches"], finding["duration_us"]) == (3, 6600.0)


def test_a_kernel_that_hardly_takes_time_is_left_out():
    assert set(kernel_findings(capture(STRIDED, STRIDED | {"duration": 20_000.0}))["name"]) == {"k0"}


def test_nothing_to_say_is_a_frame_without_rows():
    assert kernel_findings(Capture.build({})).height == 0


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float> >(int, float)", "vectorized_elementwise_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 8>(float*)", "softmax_warp_forward"),
        ("my_kernel", "my_kernel"),
        ("__main__::step::_3clocals_3e::strided[abi:v1][abi:cw51cXTL](Array<float, 1, C, mutable, aligned>)", "strided"),  # numba's
        (None, ""),
    ],
)
def test_a_kernels_name_is_short_in_sentences(name, told):
    assert short(name) == told
