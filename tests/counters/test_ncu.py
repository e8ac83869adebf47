"""ncu as a child process: what it prints is read, what it refuses is one line; ncu itself is played by a small script."""

from __future__ import annotations

import stat
import sys
import time
from pathlib import Path

import polars as pl
import pytest

import nbmemprof as mp
from nbmemprof.analyses._counters import COUNTERS
from nbmemprof.analyses.kernel_findings import kernel_findings
from nbmemprof.errors import NbmemprofError, NotRecording
from nbmemprof.gpu import _ncu, _ncu_pages
from nbmemprof.gpu._launches import Launch

RECORDED = Path(__file__).parents[1] / "fixtures" / "h200" / "counters"
BLOCK = (256, 1, 1)


@pytest.fixture
def sources(tmp_path):
    """Where CuPy leaves its sources: a folder of its cache, by the name that ncu tells."""
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "explored.cubin.cu").write_text((RECORDED / "explored.cu").read_text())
    return tmp_path


def launches(*names):
    return [Launch(name, (1, 1, 1), BLOCK, None, 0, ()) for name in names]


# ---------------------------------------------------------------------- pages that ncu 2025.3 printed
def test_the_raw_page_gives_every_launch_its_counters():
    rows, found, device = _ncu_pages.kernels((RECORDED / "ncu_raw.csv").read_text(), [COUNTERS[name].metric for name in ("duration", "load_requests", "load_sectors")])
    assert device == "NVIDIA H200"
    assert [(launch.name, launch.grid, launch.block) for launch in found] == [
        ("strided", (16384, 1, 1), BLOCK), ("even", (16384, 1, 1), BLOCK), ("bank32", (64, 1, 1), BLOCK),
    ]  # fmt: skip
    assert rows[0] == {COUNTERS["duration"].metric: 31328.0, COUNTERS["load_requests"].metric: 131072.0, COUNTERS["load_sectors"].metric: 4194304.0}


def test_a_page_without_kernels_is_told():
    with pytest.raises(NotRecording, match="holds no kernel"):
        _ncu_pages.kernels("==WARNING== nothing\n", [])


def test_the_source_page_gives_every_line_its_sectors_its_code_and_its_stride(sources):
    frame = _ncu_pages.lines((RECORDED / "ncu_source.csv").read_text(), launches("strided", "even", "bank32"), sources)
    told = frame.select("kernel_id", "line", "space", "operation", "width_bytes", "instructions", "sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts", "stride").rows()
    assert told[:4] == [
        (0, 3, "global", "load", 4, 131072, 4194304, 524288, 0, 0, "32"),
        (0, 3, "global", "store", 4, 131072, 524288, 524288, 0, 0, "1"),
        (1, 5, "global", "load", 4, 131072, 524288, 262144, 0, 0, "1"),
        (1, 5, "global", "store", 4, 131072, 524288, 262144, 0, 0, "1"),
    ]
    shared = frame.filter((pl.col("space") == "shared") & (pl.col("operation") == "load")).row(0, named=True)
    assert (shared["wavefronts"], shared["ideal_wavefronts"], shared["width_bytes"]) == (131072, 16384, 16)
    assert frame["text"][0].startswith('extern "C" __global__ void strided(')


def test_without_the_source_lines_have_numbers_and_no_code():
    frame = _ncu_pages.lines((RECORDED / "ncu_source.csv").read_text(), launches("strided", "even", "bank32"))
    assert set(frame["text"]) == {""}
    assert frame["stride"].null_count() == frame.height


def test_one_kernel_launched_twice_is_two_kernels():
    once = (RECORDED / "ncu_source.csv").read_text().split('"File Path"')[1]
    frame = _ncu_pages.lines('"File Path"' + once + '"File Path"' + once, launches("strided", "strided"))
    assert frame["kernel_id"].unique(maintain_order=True).to_list() == [0, 1]


# ---------------------------------------------------------------------- the child process
def ncu(folder, monkeypatch, body):
    """An ncu that does what ``body`` says, first on the PATH."""
    place = folder / "bin"
    place.mkdir()
    path = place / "ncu"
    path.write_text(f"#!{sys.executable}\nimport sys, pathlib, time\nargs = sys.argv[1:]\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(place), prepend=":")
    return path


WORKS = f"""
if "--import" in args:
    sys.stdout.write(pathlib.Path({str(RECORDED)!r}, "ncu_raw.csv" if args[args.index("--page") + 1] == "raw" else "ncu_source.csv").read_text())
else:
    pathlib.Path(args[args.index("-o") + 1] + ".ncu-rep").write_text("report")
    print('==PROF== Profiling "strided" - 0: 0%....50%....100% - 9 passes\\n==PROF== Profiling "even" - 1: 0%....100% - 33 passes\\n==PROF== Disconnected')
    pathlib.Path({{folder!r}}, "line.txt").write_text("\\n".join(args))
"""


def launcher():
    """Stands for a function that launches kernels; importable, so that it can be sent."""


@pytest.mark.cost(0.6)
def test_a_function_is_counted_in_a_child_with_its_lines(tmp_path, monkeypatch):
    ncu(tmp_path, monkeypatch, WORKS.replace("{folder!r}", repr(str(tmp_path))))
    counted = mp.counters(len, "ab", how="ncu")
    assert counted["name"].to_list() == ["strided", "even", "bank32"]
    assert counted.passes == 33
    assert counted.lines.height
    assert kernel_findings(counted.capture)["line"][0] == 3
    line = (tmp_path / "line.txt").read_text().split("\n")
    assert line[line.index("--clock-control") + 1] == "none"
    assert line[line.index("--profile-from-start") + 1] == "off"
    assert "SourceCounters" in line
    assert line[-3:-1] == ["-m", "nbmemprof.gpu._ncu_child"]


def test_code_without_line_numbers_is_counted_and_told_how_to_have_them(tmp_path, monkeypatch):
    ncu(tmp_path, monkeypatch, WORKS.replace("{folder!r}", repr(str(tmp_path))).replace('"ncu_source.csv"', '"README.md"'))
    counted = mp.counters(len, "ab", how="ncu")
    assert counted.lines.is_empty()
    assert "-lineinfo" in counted.capture.meta["warnings"][0]


@pytest.mark.cost(0.6)
def test_a_script_is_counted_from_its_start(tmp_path, monkeypatch):
    ncu(tmp_path, monkeypatch, WORKS.replace("{folder!r}", repr(str(tmp_path))))
    assert mp.counters(tmp_path / "train.py", "--steps", 3, how="ncu").height == 3
    line = (tmp_path / "line.txt").read_text().split("\n")
    assert line[line.index("--profile-from-start") + 1] == "on"
    assert line[-3:] == [str(tmp_path / "train.py"), "--steps", "3"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "allows them to administrators only"),
        ("==WARNING== No kernels were profiled.", "ncu saw no kernel"),
        ("==ERROR== Cuda driver is not compatible", "ncu made no report: Cuda driver is not compatible"),
        ("Traceback\nValueError: in the function", "ValueError: in the function"),
        ("", "it said nothing"),
    ],
)
def test_what_ncu_refuses_is_one_line_with_what_to_do(tmp_path, monkeypatch, said, words):
    ncu(tmp_path, monkeypatch, f"print({said!r})")
    with pytest.raises(NotRecording, match=words):
        mp.counters(len, "ab", how="ncu")


@pytest.mark.cost(1)
def test_a_child_that_takes_too_long_is_ended_with_all_it_started(tmp_path, monkeypatch):
    later = f"import time, pathlib; time.sleep(1.2); pathlib.Path({str(tmp_path / 'lived')!r}).touch()"
    ncu(tmp_path, monkeypatch, f"import subprocess\nsubprocess.Popen([sys.executable, '-c', {later!r}])\ntime.sleep(60)")
    with pytest.raises(NbmemprofError, match="longer than 0.5 s and was ended"):
        mp.counters(len, "ab", how="ncu", timeout_s=0.5)
    time.sleep(1)
    assert not (tmp_path / "lived").exists()


def test_without_ncu_it_is_said_where_it_comes_from(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(_ncu, "_PLACES", ())
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(NotRecording, match="no ncu was found"):
        mp.counters(len, "ab", how="ncu")


def test_what_can_not_be_sent_to_a_child_is_told(tmp_path, monkeypatch):
    ncu(tmp_path, monkeypatch, "")
    with pytest.raises(NbmemprofError, match="can't be sent to another process"):
        mp.counters(len, (i for i in range(3)), how="ncu")


def test_a_notebooks_function_needs_cloudpickle(tmp_path, monkeypatch):
    ncu(tmp_path, monkeypatch, "")
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    monkeypatch.setattr(launcher, "__module__", "__main__")
    with pytest.raises(NbmemprofError, match="pip install cloudpickle"):
        mp.counters(launcher, how="ncu")


def test_arguments_beyond_the_limit_are_refused(tmp_path, monkeypatch):
    ncu(tmp_path, monkeypatch, "")
    monkeypatch.setattr(_ncu, "_PAYLOAD_BYTES", 100)
    with pytest.raises(NbmemprofError, match="a child process is sent 100 B at most"):
        mp.counters(len, b"x" * 1000, how="ncu")
