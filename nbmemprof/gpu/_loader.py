"""Device code: where ``kernels/*.cu`` lie, and a kernel of them compiled for the GPU at hand (NVRTC, through CuPy)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError

__all__ = ["folder", "kernel", "names", "options", "source"]

_PACKAGE = Path(__file__).parents[1]
# as a wheel has them, and as a checkout does: an editable install doesn't show the files that the wheel is given
_FOLDERS = (_PACKAGE / "_kernels", _PACKAGE.parent / "kernels")


def folder() -> Path:
    """Return the folder of the device code.

    Raises
    ------
    NbmemprofError
        The installation has none.
    """
    for path in _FOLDERS:
        if any(path.glob("*.cu")):
            return path
    raise NbmemprofError(f"No device code in {' or '.join(str(path) for path in _FOLDERS)}: this installation is incomplete. Install nbmemprof from its wheel or its checkout.")


def names() -> list[str]:
    """Return the names of the files of device code, without suffix."""
    return sorted(path.stem for path in folder().glob("*.cu"))


@cache
def source(name: str) -> str:
    """Return the text of one file of device code.

    Raises
    ------
    NbmemprofError
        There is no such file; lists those that are there.
    """
    path = folder() / f"{name}.cu"
    if not path.is_file():
        raise NbmemprofError(f"No device code named {name!r}. There are: {', '.join(names())}.")
    return path.read_text(encoding="utf-8")


def options(macros: Mapping[str, int] | None = None) -> tuple[str, ...]:
    """Return NVRTC's options: C++17, line numbers for the profilers, the macros."""
    return ("-std=c++17", "-lineinfo", *(f"-D{name}={value}" for name, value in sorted((macros or {}).items())))


def kernel(file: str, name: str, **macros: int) -> Any:
    """Return a CuPy ``RawKernel`` of ``extern "C"`` device code, compiled once a process and set of macros.

    Raises
    ------
    MissingPackage
        CuPy is not installed.
    NbmemprofError
        There is no such file.
    """
    return _module(file, tuple(sorted(macros.items()))).get_function(name)


@cache
def _module(file: str, macros: tuple[tuple[str, int], ...]) -> Any:
    cupy = _optional.require("cupy", feature="Running device code")
    return cupy.RawModule(code=source(file), options=options(dict(macros)), backend="nvrtc")
