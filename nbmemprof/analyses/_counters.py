"""The hardware counters that this package reads: short names, the metric library's names, and the sets in which they are asked for.

Every name is accepted for GH100 by the metric library of CUDA 13.0.85; ``tests/gpu/test_metric_host.py`` asks it again, for other chips too.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COUNTERS", "PATCHED", "SETS", "Counter", "metrics_of"]


@dataclass(frozen=True)
class Counter:
    """One counter: its name in the metric library, the unit of its value, what it counts."""

    metric: str
    unit: str
    meaning: str


def _stall(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


COUNTERS: dict[str, Counter] = {
    "duration": Counter("gpu__time_duration.sum", "ns", "time on the GPU"),
    "sm_cycles": Counter("sm__cycles_elapsed.sum", "cycles", "cycles of all SMs together"),
    "clock": Counter("sm__cycles_elapsed.avg.per_second", "Hz", "clock of the SMs"),
    "dram_read": Counter("dram__bytes_read.sum", "bytes", "read from DRAM"),
    "dram_write": Counter("dram__bytes_write.sum", "bytes", "written to DRAM"),
    "load_requests": Counter("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum", "requests", "warp instructions that load from global memory, as L1 sees them"),
    "store_requests": Counter("l1tex__t_requests_pipe_lsu_mem_global_op_st.sum", "requests", "the same, stores"),
    "load_sectors": Counter("l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "sectors", "32-byte sectors that those loads touch"),
    "store_sectors": Counter("l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum", "sectors", "the same, stores"),
    "l1_hit": Counter("l1tex__t_sector_hit_rate.pct", "%", "sectors found in L1"),
    "l2_sectors": Counter("lts__t_sectors_srcunit_tex.sum", "sectors", "asked of L2 by the SMs"),
    "l2_misses": Counter("lts__t_sectors_srcunit_tex_lookup_miss.sum", "sectors", "of those, not found in L2"),
    "host_sectors": Counter("lts__t_sectors_srcunit_tex_aperture_sysmem.sum", "sectors", "of host memory, asked by the SMs"),
    "shared_load_cycles": Counter("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "wavefronts", "of shared-memory loads; arbitration with other traffic counts too"),
    "shared_store_cycles": Counter("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum", "wavefronts", "the same, stores"),
    "shared_load_conflicts": Counter("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum", "wavefronts", "of those, bank conflicts; arbitration counts too"),
    "shared_store_conflicts": Counter("l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum", "wavefronts", "the same, stores"),
    "shared_load_instructions": Counter("smsp__inst_executed_op_shared_ld.sum", "instructions", "warp instructions that load from shared memory"),
    "shared_store_instructions": Counter("smsp__inst_executed_op_shared_st.sum", "instructions", "the same, stores"),
    "local_load_sectors": Counter("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum", "sectors", "of local memory: spilled registers, arrays indexed by a variable"),
    "local_store_sectors": Counter("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum", "sectors", "the same, stores"),
    "instructions": Counter("smsp__inst_executed.sum", "instructions", "warp instructions"),
    "active_warps": Counter("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "warps on an SM, of those that have room"),
    "stall_long_scoreboard": Counter(_stall("long_scoreboard"), "warps", "that wait for global or local memory, each time an instruction is issued"),
    "stall_short_scoreboard": Counter(_stall("short_scoreboard"), "warps", "that wait for shared memory"),
    "stall_mio_throttle": Counter(_stall("mio_throttle"), "warps", "that wait for room in the queue to shared memory"),
    "stall_lg_throttle": Counter(_stall("lg_throttle"), "warps", "that wait for room in the queue to global and local memory"),
    "load_bytes": Counter("smsp__sass_data_bytes_mem_global_op_ld.sum", "bytes", "that the threads' global loads ask for"),
    "store_bytes": Counter("smsp__sass_data_bytes_mem_global_op_st.sum", "bytes", "the same, stores"),
    "shared_load_wavefronts": Counter("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld.sum", "wavefronts", "that the addresses of shared-memory loads need"),
    "shared_store_wavefronts": Counter("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st.sum", "wavefronts", "the same, stores"),
    "shared_load_bytes": Counter("smsp__sass_data_bytes_mem_shared_op_ld.sum", "bytes", "that the threads' shared-memory loads ask for"),
    "shared_store_bytes": Counter("smsp__sass_data_bytes_mem_shared_op_st.sum", "bytes", "the same, stores"),
    "lsu_wavefronts": Counter("l1tex__data_pipe_lsu_wavefronts.sum", "wavefronts", "cycles of the L1 data stage; an SM does one a cycle"),  # last: so GH100 gathers all in 6 passes, in its own place 7
}

# gathered by patching the kernel's code: slower at a kernel's first count, and refused by some set-ups
PATCHED = tuple(name for name, counter in COUNTERS.items() if "_sass_" in counter.metric)
_TIME = ("duration", "sm_cycles", "clock")
SETS: dict[str, tuple[str, ...]] = {
    "all": tuple(COUNTERS),
    "unpatched": tuple(name for name in COUNTERS if name not in PATCHED),
    "dram": (*_TIME, "dram_read", "dram_write"),
    "global": (*_TIME, "load_requests", "store_requests", "load_sectors", "store_sectors", "load_bytes", "store_bytes"),
    "shared": (*_TIME, *(name for name in COUNTERS if name.startswith("shared_"))),
}


def metrics_of(names: tuple[str, ...]) -> list[str]:
    """The metric library's names of a set."""
    return [COUNTERS[name].metric for name in names]
