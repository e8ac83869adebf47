"""The ledger: every byte that the driver reports has a line of its own measurement, or is unexplained."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from typing import Any

import polars as pl
import pytest
from fake_cuda import FakeCuda
from strategies import MIB
from support import ROOT

import nbmemprof as mp
from nbmemprof import heap, schema
from nbmemprof.analyses._overheads import table_of
from nbmemprof.capture import Capture
from nbmemprof.sources import _device_sampler, torch_history

H200 = {"0": {"name": "NVIDIA H200"}}
CONTEXT, KERNELS, CUBLAS = 552_402_944, 97 * MIB, 66 * MIB  # of the table


def capture(readings: list[tuple[float, str, str, float | None]], *, kind: str = "device", workspaces: int = 0, **meta: Any) -> Capture:
    """Readings ``time source gauge value`` of device 0, and torch's memory with so many cuBLAS workspaces in it."""
    rows = {"device": 0, "kind": kind, "unit": "bytes", "time_us": [r[0] for r in readings], "source": [r[1] for r in readings], "gauge": [r[2] for r in readings], "value": pl.Series([r[3] for r in readings], dtype=pl.Float64)}
    segments = schema.fill("segments", {"device": 0, "kind": "device", "source": "torch", "snapshot_id": 0, "addr": [1 << 30], "size_bytes": [64 * MIB]})
    made = {"device": 0, "kind": "device", "source": "torch", "alloc_seq": list(range(workspaces)), "addr": list(range(workspaces)), "requested_bytes": 32 * MIB, "size_bytes": 32 * MIB, "category": "workspace", "evidence": "operator", "at_start": False, "size_exact": True}
    tables = {"samples": schema.fill("samples", rows, len(readings)), "segments": segments, "allocations": schema.fill("allocations", made, workspaces)}
    used = {"module_loading": "LAZY", "cudnn": False, "cufft": False, "cusolver": False, "nccl": False}
    return Capture.build(tables, **{"source": "torch_history", "origin": "measured", "devices": H200, "libraries": used, "recording": {}, **meta})


def torch_rows(asked: int, active: int, held: int, at: float = 1.0) -> list[tuple[float, str, str, float | None]]:
    return [(at, "torch", "in_use_bytes", asked), (at, "torch", "active_bytes", active), (at, "torch", "held_bytes", held)]


def lines(frame: pl.DataFrame) -> dict[str, int | None]:
    return dict(zip(frame["line"], frame["size_bytes"], strict=True))


def test_the_lines_of_a_device_add_up_to_what_the_driver_reports() -> None:
    used = CONTEXT + KERNELS + CUBLAS + 64 * MIB + 5 * MIB
    made = mp.ledger(capture([(1.0, "driver", "used_bytes", used), (1.0, "driver", "others_bytes", 0), *torch_rows(33 * MIB, 34 * MIB, 64 * MIB)], workspaces=1))
    assert lines(made) == {
        "torch in use": 33 * MIB, "torch rounding": MIB, "torch cached": 30 * MIB, "CUDA context": CONTEXT, "kernel images": KERNELS, "cuBLAS": CUBLAS,
        "other processes": 0, "unexplained": 5 * MIB,
    }  # fmt: skip
    assert made["size_bytes"].sum() == used == made["reported_bytes"].unique().item()


def test_a_strangers_allocation_is_unexplained_and_nowhere_else() -> None:
    rows = [(1.0, "driver", "others_bytes", 0.0), *torch_rows(33 * MIB, 34 * MIB, 64 * MIB)]
    without, with_it = (lines(mp.ledger(capture([(1.0, "driver", "used_bytes", 900 * MIB + more), *rows]))) for more in (0, 300 * MIB))
    assert {line: (with_it[line] or 0) - (without[line] or 0) for line in without if with_it[line] != without[line]} == {"unexplained": 300 * MIB}


def test_the_pool_of_cupy_and_other_processes_have_lines() -> None:
    rows = [(1.0, "driver", "used_bytes", 4000.0 * MIB), (1.0, "driver", "others_bytes", 700.0 * MIB), (1.0, "cupy", "pool_bytes", 2048.0 * MIB), (1.0, "cupy", "pool_used_bytes", 48.0 * MIB)]
    found = lines(mp.ledger(capture([*rows, *torch_rows(0, 0, 0)])))
    assert (found["CuPy's pool in use"], found["CuPy's pool cached"], found["other processes"]) == (48 * MIB, 2000 * MIB, 700 * MIB)


def test_a_context_that_began_within_the_recording_is_measured() -> None:
    rows = [(1.0, "driver", "used_bytes", 900.0 * MIB), (1.0, "driver", "others_bytes", 0.0), (1.0, "driver", "context_bytes", 400.0 * MIB), *torch_rows(0, 0, 0)]
    made = mp.ledger(capture(rows, devices={"0": {"name": "NVIDIA T4"}})).filter(pl.col("line") == "CUDA context")
    assert made.select("size_bytes", "origin").row(0) == (400 * MIB, "measured")


def test_of_an_unknown_card_a_range_and_the_reason_are_told() -> None:
    rows = [(1.0, "driver", "used_bytes", 900.0 * MIB), (1.0, "driver", "others_bytes", 0.0), *torch_rows(10 * MIB, 10 * MIB, 20 * MIB)]
    made = mp.ledger(capture(rows, devices={"0": {"name": "NVIDIA T4"}}))
    context, rest = (made.filter(pl.col("line") == line).row(0, named=True) for line in ("CUDA context", "unexplained"))
    assert context["size_bytes"] is None and context["low_bytes"] < context["high_bytes"] and "NVIDIA T4" in context["reason"]
    assert rest["size_bytes"] is None and "CUDA context" in rest["reason"]
    assert rest["low_bytes"] < 0 < rest["high_bytes"] == 900 * MIB - 20 * MIB - made.filter(pl.col("line") != "unexplained", ~pl.col("line").str.starts_with("torch"))["low_bytes"].sum()


def test_processes_that_cannot_be_told_apart_leave_the_rest_open() -> None:
    made = mp.ledger(capture([(1.0, "driver", "used_bytes", 900.0 * MIB), (1.0, "driver", "others_bytes", None), (1.0, "driver", "processes", 3.0), *torch_rows(0, 0, 0)]))
    others, rest = (made.filter(pl.col("line") == line).row(0, named=True) for line in ("other processes", "unexplained"))
    assert others["size_bytes"] is None and "host's ids" in others["reason"]
    assert rest["size_bytes"] is None and rest["low_bytes"] is None and rest["high_bytes"] is not None


def test_pinned_host_memory_stands_apart() -> None:
    """Eight shards of 65 MiB: each takes 128 MiB of page-locked memory."""
    readings = [(1.0, "torch", "locked_bytes", 1280.0 * MIB), (1.0, "torch", "requested_bytes", 520.0 * MIB), (1.0, "torch", "rounded_bytes", 1024.0 * MIB)]
    made = mp.ledger(capture(readings, kind="pinned")).filter(pl.col("kind") == "pinned")
    assert made["device"].to_list() == [None, None, None]
    assert lines(made) == {"pinned host memory in use": 520 * MIB, "pinned host memory rounding": 504 * MIB, "pinned host memory cached": 256 * MIB}


def test_at_the_peak_the_highest_reading_counts() -> None:
    rows = [(0.0, "driver", "used_bytes", 800.0 * MIB), *torch_rows(MIB, MIB, 64 * MIB, 0.0), (1.0, "driver", "used_bytes", 1500.0 * MIB), *torch_rows(500 * MIB, 500 * MIB, 600 * MIB), (2.0, "driver", "used_bytes", 900.0 * MIB), *torch_rows(MIB, MIB, 64 * MIB, 2.0), (2.0, "driver", "others_bytes", 0.0)]
    made = mp.ledger(capture(rows), at="peak")
    assert made["reported_bytes"].unique().item() == 1500 * MIB and lines(made)["torch in use"] == 500 * MIB
    assert mp.ledger(capture(rows))["reported_bytes"].unique().item() == 900 * MIB


def test_a_file_and_a_cpu_say_that_the_driver_was_not_asked() -> None:
    cpu = heap.build({"blocks": schema.fill("blocks", {"kind": "host", "source": "torch", "snapshot_id": 0, "addr": [1], "segment_addr": [1], "size_bytes": [100], "requested_bytes": [100], "state": "active_allocated"})}, source="torch_cpu", origin="measured")
    for made, word in ((mp.ledger(capture([], libraries=None, recording=None)), "file"), (mp.ledger(cpu), "host memory")):
        rest = made.filter(pl.col("line") == "unexplained").row(0, named=True)
        assert rest["size_bytes"] is None and word in rest["reason"] and rest["reported_bytes"] is None
    assert lines(mp.ledger(cpu))["torch in use"] == 100


def test_a_recording_without_readings_has_its_process_as_the_whole() -> None:
    """Its meta has what the process held beside torch: 1000 bytes here."""
    cuda = FakeCuda()
    source = torch_history.TorchHistory(cuda, clock=cuda.clock)
    source.start()
    cuda.malloc(3 * MIB)
    recording = source.stop()
    made = mp.ledger(recording)
    reserved = mp.summary(recording)["end_reserved_bytes"].item()
    assert made["reported_bytes"].unique().item() == reserved + 1000
    assert made.filter(pl.col("line").str.starts_with("torch"))["size_bytes"].sum() == reserved
    assert "other processes" not in made["line"].to_list()


@pytest.mark.parametrize(("device", "loading", "size"), [("NVIDIA H200", "LAZY", CONTEXT), ("NVIDIA H200", "EAGER", 1_319_960_576), ("NVIDIA A100", "LAZY", None), (None, "LAZY", None)])
def test_the_table_knows_what_was_measured(device: str | None, loading: str, size: int | None) -> None:
    table, why = table_of(device, loading)
    assert (table.context.size if table else None) == size and why


# ---------------------------------------------------------------------- recorded on an H200 by tests/gpu/record_ledger.py
LEDGERS = ROOT / "tests" / "fixtures" / "h200" / "ledger"
RECORDED = sorted(path.name.removesuffix(".nbmem.gz") for path in LEDGERS.glob("*.nbmem.gz"))


@lru_cache(None)
def recorded(name: str) -> Capture:
    return mp.load(gzip.decompress((LEDGERS / f"{name}.nbmem.gz").read_bytes()))


def open_bytes(name: str, at: str = "end") -> tuple[int, int]:
    """What is unexplained, and what the driver reports."""
    row = mp.ledger(recorded(name), at=at).filter(pl.col("line") == "unexplained").row(0, named=True)
    return row["size_bytes"], row["reported_bytes"]


@pytest.mark.parametrize("name", [n for n in RECORDED if n != "foreign"])
@pytest.mark.parametrize("at", ["end", "peak"])
def test_on_an_h200_less_than_two_percent_is_unexplained(name: str, at: str) -> None:
    size, reported = open_bytes(name, at)
    assert abs(size) <= 0.02 * reported
    made = mp.ledger(recorded(name), at=at)
    assert made.filter(pl.col("kind") == "device")["size_bytes"].sum() == reported
    rest = made.filter(pl.col("line") == "unexplained").row(0, named=True)
    assert rest["low_bytes"] <= 0 <= rest["high_bytes"]  # nothing there that the table's errors do not cover


def test_on_an_h200_the_context_was_measured_as_cuda_began() -> None:
    """524 MiB, where the table of another day says 527."""
    for name, origin in (("gpt2_train", "measured"), ("foreign", "measured"), ("generation", "recorded")):  # the last began after CUDA
        row = mp.ledger(recorded(name)).filter(pl.col("line") == "CUDA context").row(0, named=True)
        assert row["origin"] == origin and abs(row["size_bytes"] - CONTEXT) < 5 * MIB


@pytest.mark.parametrize("host", ["cost", "cost_quiet"])
def test_on_an_h200_recording_a_cpu_bound_step_costs_less_than_ten_percent(host: str) -> None:
    """Of the 12-layer encoder, without call stacks, in turns with the plain step; the others cost half the step and more."""
    told = json.loads((LEDGERS / f"{host}.json").read_text())["numbers"]
    assert told["wall"]["recorded"]["ratio"] <= 1.10 and told["processor"]["recorded"]["ratio"] <= 1.10
    plain = told["wall"]["plain"]["ms"]
    assert told["others"]["MemTracker"]["wall_ms"] > 10 * plain and told["others"]["torch.profiler"]["wall_ms"] > 1.5 * plain


@pytest.mark.parametrize("name", RECORDED)
def test_on_an_h200_the_driver_and_torch_said_the_same_right_after(name: str) -> None:
    """``cudaMemGetInfo`` and torch's counters, asked by the script when the recording had ended."""
    told = json.loads((LEDGERS / ("generation.json" if name == "generation" else "ledger.json")).read_text())["numbers"][name]
    found, (_, reported) = lines(mp.ledger(recorded(name))), open_bytes(name)
    assert reported == told["mem_get_info_used"]
    assert found["torch in use"] == told["torch"]["requested"]
    assert sum(found[line] or 0 for line in ("torch in use", "torch rounding")) == told["torch"]["active"]
    assert sum(found[line] or 0 for line in ("torch in use", "torch rounding", "torch cached")) == told["torch"]["reserved"]


def test_on_an_h200_a_cudamalloc_of_300_mib_is_unexplained_and_nowhere_else() -> None:
    before, after = (lines(mp.ledger(recorded(name))) for name in ("before_foreign", "foreign"))
    changed = {line: (after[line] or 0) - (before[line] or 0) for line in after if after[line] != before[line]}
    assert changed == {"unexplained": 300 * MIB}


def test_on_an_h200_cupys_pool_pinned_memory_and_another_process_have_their_lines() -> None:
    cupy, pinned, gone, other = (lines(mp.ledger(recorded(name))) for name in ("cupy", "pinned", "pinned_after", "other_process"))
    assert (cupy["CuPy's pool in use"], cupy["CuPy's pool cached"]) == (2 * 64 * MIB, 6 * 64 * MIB)
    assert (pinned["pinned host memory in use"], pinned["pinned host memory rounding"]) == (520 * MIB, 504 * MIB)
    assert (gone["pinned host memory in use"], gone["pinned host memory cached"]) == (0, 1024 * MIB)  # locked for good
    assert 1000 * MIB < (other["other processes"] or 0) < 1100 * MIB  # its 500 MiB and its context


def test_other_moments_are_refused() -> None:
    with pytest.raises(mp.NbmemprofError, match="'end' or 'peak'"):
        mp.ledger(capture([]), at="noon")


# ---------------------------------------------------------------------- what fills it
class Outside:
    """A driver: ``free`` bytes outside torch, a context that comes with CUDA."""

    def __init__(self, cuda: CudaWithDriver) -> None:
        self.cuda, self.broken, self.touched = cuda, False, cuda.is_initialized

    def everywhere(self) -> dict[str, int]:
        return {"a": self.cuda.foreign}

    def used(self, device: int, uuid: str | None) -> int | None:
        if self.broken:
            raise OSError("the driver is gone")
        return self.cuda.foreign + (500 if self.touched else 0) + self.cuda.heap.reserved

    def touch(self, device: int) -> None:
        self.touched = True

    def rows(self, device: int, uuid: str | None) -> list[tuple[str, str, str, float | None]]:
        return [("device", "driver", "others_bytes", 0.0)]

    def pinned(self) -> list[tuple[str, str, str, float | None]]:
        return []

    def libraries(self) -> dict[str, Any]:
        return {"module_loading": "LAZY", "cudnn": False, "cufft": False, "cusolver": False, "nccl": False}


class CudaWithDriver(FakeCuda):
    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.foreign = 0
        self.asked = Outside(self)

    def outside(self) -> Any:
        return self.asked

    def stats(self, device: int) -> dict[str, Any]:
        active = sum(b.size for s in self.heap.segments for b in s.blocks if b.state != "inactive")
        return super().stats(device) | {"active_bytes": {"all": {"current": active, "peak": active}}}

    def device_facts(self, device: int) -> dict[str, Any]:
        return super().device_facts(device) | {"uuid": "a"}


@pytest.fixture(autouse=True)
def _no_context_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_sampler, "_context", {})


def test_a_recording_measures_context_and_torch_and_leaves_a_strangers_bytes_open() -> None:
    cuda = CudaWithDriver(initialized=False)
    source = torch_history.TorchHistory(cuda, clock=cuda.clock)
    source.start()
    cuda.init()
    cuda.malloc(3 * MIB)
    cuda.foreign = 300 * MIB
    made = mp.ledger(source.stop())
    found = lines(made)
    assert (found["torch in use"], found["CUDA context"]) == (3 * MIB, 500)
    assert made["reported_bytes"].unique().item() == 300 * MIB + 500 + cuda.heap.reserved
    rest = made.filter(pl.col("line") == "unexplained").row(0, named=True)
    assert rest["high_bytes"] >= 300 * MIB


def test_a_driver_that_fails_does_not_break_the_recording() -> None:
    cuda = CudaWithDriver()
    source = torch_history.TorchHistory(cuda, clock=cuda.clock)
    source.start()
    cuda.malloc(3 * MIB)
    cuda.asked.broken = True
    made = source.stop()
    assert made.events.height == len(cuda.heap.trace)
    assert "the driver is gone" in made.meta["driver_trouble"]


def test_while_a_program_runs_the_driver_is_asked_where_torch_takes_more_and_now_and_then() -> None:
    cuda, now, asked = CudaWithDriver(), [0.0], []
    sampler = _device_sampler.DeviceSampler(cuda.asked, cuda.stats, lambda: now[0])
    used = cuda.asked.used
    cuda.asked.used = lambda *a: (asked.append(now[0]), used(*a))[1]  # type: ignore[method-assign]
    sampler.begin({0: "a"})
    for milliseconds in range(0, 1000, 50):
        now[0] = milliseconds / 1e3
        if milliseconds == 100:
            cuda.malloc(3 * MIB)
        if milliseconds == 350:
            cuda.malloc(30 * MIB)
        sampler.tick(sparing=True)
    assert asked == [0.1, 0.3, 0.35, 0.55, 0.75, 0.95]


def test_a_later_window_has_its_own_readings() -> None:
    cuda = CudaWithDriver()
    source = torch_history.TorchHistory(cuda, clock=cuda.clock)
    source.start()
    cuda.malloc(3 * MIB)
    mark = source.mark()
    cuda.malloc(30 * MIB)
    made = source.cut(mark)
    used = made.samples.filter(pl.col("gauge").cast(pl.String) == "used_bytes")
    assert (used["time_us"] >= 0).all() and used["value"].to_list()[-1] == 500 + cuda.heap.reserved
    source.stop()
