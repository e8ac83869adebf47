"""CUPTI, reached through ctypes: the library that is in this process already, or the one of the wheel; and what its refusals mean.

``libcupti`` is taken where torch has mapped it, else from the wheel ``nvidia-cuda-cupti``, else from the CUDA toolkit. Its two
performance libraries are loaded before it, with global symbols, from the same folder.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path
from typing import Any

from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _structs

__all__ = ["LOCKED", "Cupti", "CuptiRefused", "advice", "find_library", "open_library"]

_HELPERS = ("libnvperf_host.so", "libnvperf_target.so")
_WHEELS = ("nvidia/cu13/lib", "nvidia/cuda_cupti/lib", "nvidia/cu12/lib")
_TOOLKITS = ("extras/CUPTI/lib64", "lib64", "targets/x86_64-linux/lib")
_opened: dict[str, Cupti] = {}


class CuptiRefused(NbmemprofError):
    """CUPTI said no. ``code`` is its result (``CUptiResult``), ``function`` what was called."""

    def __init__(self, function: str, code: int, word: str = "") -> None:
        self.function, self.code = function, code
        super().__init__(advice(code, function, word))


LOCKED = (
    "Hardware counters are locked on this machine: the NVIDIA driver allows them to administrators only. Everything else here still works. To unlock: run Jupyter as "
    "root or with CAP_SYS_ADMIN (containers: add that capability), or ask the administrator of the host to load the nvidia module with NVreg_RestrictProfilingToAdminUsers=0"
)
_TAKEN = (
    "Another profiler holds CUPTI in this process (torch.profiler, which keeps it until the process ends, ncu, nsys, cuda-gdb or compute-sanitizer; the driver allows "
    "one). Restart the kernel without that tool, then run this again"
)
# CUptiResult (cupti_result.h) -> one line: what it is, what to do
_ADVICE = {
    3: "There is no CUDA context on this thread yet. Put something on the GPU first (torch.zeros(1, device='cuda')), then run this again",
    8: "CUPTI has no memory left for its tables or for saving what a kernel writes. Free GPU memory, count fewer kernels at once, or smaller arrays",
    17: "This GPU doesn't know one of the counters that were asked for. Ask for fewer: metrics=[...]; nbmemprof's own sets are for compute capability 7.5 and later",
    23: _TAKEN,
    26: "The GPU's counters are in use by another process (another notebook that counts, DCGM, ncu). End it or wait until it is done, then run this again",
    33: "This virtual GPU gives no hardware counters. Use timed probes (mp.probes) and the access model (mp.access) instead",
    35: LOCKED,
    36: "An old CUPTI profiler (events, metrics) is on in this process. End it, then run this again",
    38: "This GPU is not supported by CUPTI's range profiler (it needs compute capability 7.0). Use how='ncu'",
    39: _TAKEN,
    40: "This virtual GPU allows counters to administrators of the host only. Ask the one of the host to enable profiling for it (vGPU: pciPassthru profiling parameters)",
    41: "Confidential computing is on, and with it hardware counters are off. Use timed probes (mp.probes) and the access model (mp.access) instead",
    42: "This card (CMP) gives no hardware counters. Use the access model (mp.access)",
    43: "The GPU is split by MIG, and CUPTI counts nothing on this slice. Use a slice with profiling allowed, or a whole GPU",
    44: "The GPU runs in SLI, which CUPTI can't count. Use a GPU without it",
    45: "This WSL set-up gives no hardware counters. Enable them for all users in the NVIDIA control panel of Windows (Developer, GPU performance counters)",
    46: "This CUPTI doesn't know this GPU: the library is older than the chip. Install a newer nvidia-cuda-cupti",
}


def advice(code: int, function: str, word: str = "") -> str:
    """What a refusal means and what to do, in one line, with the call and its result."""
    told = _ADVICE.get(code, "CUPTI refused for a reason that has no advice here. Restart the kernel and run this again; if it stays, use how='ncu'")
    return f"{told} ({function}: CUPTI error {code}{f', {word}' if word else ''})."


# ---------------------------------------------------------------------- finding it
def _mapped(maps: str = "/proc/self/maps") -> Path | None:
    """The libcupti that this process has loaded."""
    try:
        lines = Path(maps).read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        path = line.split(maxsplit=5)[-1]
        if re.search(r"/libcupti\.so[.\d]*$", path):
            return Path(path)
    return None


def _candidates() -> list[Path]:
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    toolkits = [Path(home) for home in homes if home] + sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    folders = [Path(entry) / wheel for wheel in _WHEELS for entry in sys.path if entry]
    folders += [home / part for home in toolkits for part in _TOOLKITS]
    return [path for folder in folders if folder.is_dir() for path in sorted(folder.glob("libcupti.so*"), reverse=True)]


def find_library() -> Path | None:
    """Path of libcupti: mapped, wheel, toolkit; None where there is none."""
    return _mapped() or next(iter(_candidates()), None)


def open_library(path: Path | None = None) -> Cupti:
    """CUPTI of this process, loaded once.

    Raises
    ------
    NbmemprofError
        Where there is no library, or it lacks the range profiler (older than CUDA 12.6).
    """
    found = path or find_library()
    if found is None:
        raise NbmemprofError("Hardware counters need CUPTI, and no libcupti was found (in this process, in a wheel, in a CUDA toolkit). Install it with: pip install 'nvidia-cuda-cupti>=13,<14' (CUDA 12: nvidia-cuda-cupti-cu12).")
    key = str(found)
    if key not in _opened:
        try:
            for helper in _HELPERS:
                if (found.parent / helper).exists():
                    ctypes.CDLL(str(found.parent / helper), mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(key, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise NbmemprofError(f"{found} can't be loaded ({error}). Install a CUPTI of the driver's CUDA version: pip install 'nvidia-cuda-cupti>=13,<14'.") from error
        _opened[key] = Cupti(library, key)
    return _opened[key]


class Cupti:
    """Calls into one libcupti: ``call(function, **members)`` fills a block, calls, and gives the block back.

    Parameters
    ----------
    library
        What has the functions: a ``ctypes.CDLL``, or in tests an object like one.
    path
        Where it came from, for messages.
    """

    def __init__(self, library: Any, path: str = "libcupti") -> None:
        self.library, self.path = library, path
        if not hasattr(library, "cuptiRangeProfilerEnable"):
            raise NbmemprofError(f"{path} has no range profiler: it is older than CUDA 12.6. Install a newer one: pip install 'nvidia-cuda-cupti>=13,<14'.")

    def call(self, function: str, *, accept: tuple[int, ...] = (), **members: Any) -> Any:
        """Call a function that takes one parameter block.

        Parameters
        ----------
        accept
            Results, beside 0, that are no failure here.

        Raises
        ------
        CuptiRefused
            For any other result.
        """
        params = _structs.block(function, **members)
        code = int(getattr(self.library, function)(ctypes.byref(params)))
        if code and code not in accept:
            raise CuptiRefused(function, code, self.word(code))
        return params

    def word(self, code: int) -> str:
        """CUPTI's own name of a result."""
        text = ctypes.c_char_p()
        try:
            self.library.cuptiGetResultString(code, ctypes.byref(text))
        except AttributeError:
            return ""
        return text.value.decode(errors="replace") if text.value else ""

    @property
    def version(self) -> int:
        """``cuptiGetVersion``, as 130001 for CUDA 13.0 update 1."""
        number = ctypes.c_uint32()
        self.library.cuptiGetVersion(ctypes.byref(number))
        return int(number.value)
