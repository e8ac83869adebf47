"""NVIDIA's run-time compiler through ctypes: compiles device code on a machine without a GPU (wheel ``nvidia-cuda-nvrtc``)."""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.metadata import files
from pathlib import Path


@cache
def library() -> ctypes.CDLL:
    """libnvrtc of the wheel."""
    (path,) = [Path(str(f.locate())) for f in files("nvidia-cuda-nvrtc") or () if f.name.startswith("libnvrtc.so")]
    return ctypes.CDLL(str(path))


def compiled(text: str, options: list[str]) -> tuple[bytes, str]:
    """Machine code (or PTX for ``compute_…``) and the compiler's log; the code is empty where it refused."""
    nvrtc, program = library(), ctypes.c_void_p()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None) == 0
    args = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), args)
    log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    binary = any(o.startswith("-arch=sm_") for o in options)
    code = b"" if failed else _text(*((nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN) if binary else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)), program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code, log.rstrip(b"\0").decode(errors="replace").strip()


def _text(size_of, fill, program) -> bytes:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    buffer = ctypes.create_string_buffer(size.value)
    assert fill(program, buffer) == 0
    return buffer.raw[: size.value]
