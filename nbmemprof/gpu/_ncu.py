"""Counters by Nsight Compute in a child process: the second way, with the excess of every source line."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nbmemprof.analyses import kernel_lines
from nbmemprof.analyses._counters import COUNTERS
from nbmemprof.capture import Capture
from nbmemprof.errors import MissingPackage, NbmemprofError, NotRecording
from nbmemprof.gpu import _ceilings, _ncu_pages
from nbmemprof.gpu._counting import asked, tables
from nbmemprof.gpu._cupti import advice
from nbmemprof.units import format_bytes

__all__ = ["command", "find", "profile"]

_PLACES = ("/usr/local/cuda*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu")
_PAYLOAD_BYTES = 1 << 30
_LOCKED = "ERR_NVGPUCTRPERM"
_PASSES = re.compile(r"(\d+) pass(?:es)?\s*$", re.MULTILINE)  # the end of each line about a kernel
_NO_LINES = "no kernel tells its source lines: compile with line numbers, as cupy.RawKernel(code, name, options=('-lineinfo',)); kernels of libraries have none"


def find() -> str:
    """Path of ncu: on the PATH, in CUDA_HOME, in the usual places.

    Raises
    ------
    NotRecording
        There is none; says where it comes from.
    """
    homes = [str(Path(home) / "bin" / "ncu") for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
    usual = [str(path) for place in _PLACES for path in sorted(Path("/").glob(place.lstrip("/")), reverse=True)]
    for name in ("ncu", *homes, *usual):
        if found := shutil.which(name):
            return found
    raise NotRecording("how='ncu' needs Nsight Compute, and no ncu was found (PATH, CUDA_HOME, /usr/local/cuda*/bin). It comes with the CUDA toolkit; how='cupti' needs none.")


def command(ncu: str, report: Path, metrics: Sequence[str], program: Sequence[str], *, bracketed: bool, lines: bool = True, cold: bool = False) -> list[str]:
    """The line that counts a program: the GPU's clocks are left alone, its caches too unless ``cold``.

    Parameters
    ----------
    bracketed
        Whether the program starts and stops the profiler itself (``cuProfilerStart``).
    lines
        Whether the excess of every source line is wanted: more passes.
    cold
        Whether the caches are flushed before every pass.
    """
    source = ["--section", "SourceCounters", "--import-source", "yes"] if lines else []
    return [
        ncu, "--clock-control", "none", "--cache-control", "all" if cold else "none", "--target-processes", "all", "--profile-from-start", "off" if bracketed else "on", "-f", "-o", str(report),
        "--metrics", ",".join(metrics), *source, *program,
    ]  # fmt: skip


def profile(target: Callable[..., Any] | str | Path, args: tuple[Any, ...], *, metrics: str | Sequence[str], timeout_s: float, lines: bool = True, cold: bool = False) -> Capture:
    """Count a function, or a script by its path, in a child process.

    Raises
    ------
    NotRecording
        No ncu, counters locked, no kernel launched, or the child failed: the last of what it said.
    NbmemprofError
        The function or its arguments can't be sent to another process, or it took longer than ``timeout_s``.
    """
    ncu, wanted = find(), asked(metrics)
    with tempfile.TemporaryDirectory(prefix="nbmemprof-ncu-") as folder:
        place, report = Path(folder), Path(folder, "report")
        script = isinstance(target, (str, Path))
        program = [sys.executable, str(target), *map(str, args)] if script else [sys.executable, "-m", "nbmemprof.gpu._ncu_child", str(_packed(target, args, place))]
        began = time.perf_counter()
        said = _run(command(ncu, report, wanted, program, bracketed=not script, lines=lines, cold=cold), timeout_s, env=_environment(place))
        ran_s = time.perf_counter() - began
        full = report.with_suffix(".ncu-rep")
        if not full.is_file():
            raise NotRecording(_why_nothing(said))
        page = [ncu, "--import", str(full), "--csv", "--print-units", "base", "--page"]
        rows, launches, device = _ncu_pages.kernels(_run([*page, "raw"], timeout_s), wanted)
        made = tables(rows, launches, device=0, began=began)
        if lines:
            made[kernel_lines.TABLE] = _ncu_pages.lines(_run([*page, "source", "--print-source", "cuda,sass"], timeout_s), launches, place)
    warnings = [_NO_LINES] if lines and made[kernel_lines.TABLE].is_empty() else []
    told: dict[str, Any] = {
        "how": "ncu", "chip": None, "passes": max(map(int, _PASSES.findall(said)), default=None), "kernels": len(rows), "not_counted": 0, "lacking": [], "setup_s": None, "counted_s": ran_s, "total_s": time.perf_counter() - began,
        "gpu_s": sum(row.get(COUNTERS["duration"].metric, 0.0) for row in rows) / 1e9,
    }  # fmt: skip
    return Capture.build(made, source="counters", origin="measured", device=device, versions={}, warnings=warnings, counters=told, ceilings=_ceilings.of(device or ""))


def _packed(target: Any, args: tuple[Any, ...], place: Path) -> Path:
    """The function and its arguments in a file that the child opens."""
    try:
        import cloudpickle as pickler  # type: ignore[import-not-found,import-untyped,unused-ignore]  # takes functions of a notebook too
    except ImportError:
        pickler = pickle
    if pickler is pickle and getattr(target, "__module__", None) == "__main__":
        raise MissingPackage(f"how='ncu' runs {getattr(target, '__name__', target)!r} in another process, and a function defined in the notebook gets there only with cloudpickle. Install it with: pip install cloudpickle; or put the function into a file and import it.")
    try:
        data = pickler.dumps((target, args))
    except Exception as error:
        raise NbmemprofError(f"The function or its arguments can't be sent to another process ({type(error).__name__}: {error}). Make compiled kernels inside the function, and pass arrays and numbers; or use how='cupti'.") from error
    if len(data) > _PAYLOAD_BYTES:
        raise NbmemprofError(f"The arguments are {format_bytes(len(data))}; a child process is sent {format_bytes(_PAYLOAD_BYTES)} at most. Make the arrays inside the function, or use how='cupti'.")
    path = place / "call.pickle"
    path.write_bytes(data)
    return path


def _environment(place: Path) -> dict[str, str]:
    """The child's: CuPy compiles anew and leaves its sources where the lines can be read; our own package is found."""
    home = str(Path(__file__).parents[2])
    paths = [home, *(entry for entry in sys.path if entry)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "CUPY_CACHE_DIR": str(place / "cupy"), "CUPY_CACHE_SAVE_CUDA_SOURCE": "1"}


def _run(line: Sequence[str], timeout_s: float, env: dict[str, str] | None = None) -> str:
    """Output of a command in a process group of its own, ended whole when it takes too long."""
    child = subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", env=env, start_new_session=True)  # noqa: S603 - ncu, found above
    try:
        said, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise NbmemprofError(f"ncu took longer than {timeout_s:g} s and was ended. Count a smaller part, fewer metrics, or give timeout_s=.") from error
    finally:
        with contextlib.suppress(ProcessLookupError):  # what it started may live on when it is gone itself
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    return said


def _why_nothing(said: str) -> str:
    if _LOCKED in said:
        return advice(35, "ncu", _LOCKED)
    if "No kernels were profiled" in said:
        return "ncu saw no kernel. Does the function launch one, and does the child reach the same GPU? Its arguments are copies: arrays on the GPU stay on the GPU."
    errors = [line.removeprefix("==ERROR==").strip() for line in said.splitlines() if line.startswith("==ERROR==")]
    last = [line for line in said.splitlines() if line.strip() and not line.startswith("==")][-3:]
    return f"ncu made no report: {'; '.join(errors[:2] or last) or 'it said nothing'}. Run it by hand to see more, or use how='cupti'."
