"""``%memprof doctor``: what can be recorded here, and what to do where it can't."""

from __future__ import annotations

import importlib.metadata
import platform
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from nbmemprof import _optional
from nbmemprof.flags import Flag

NAME = "doctor"
HELP = "What can be recorded here, with which versions, and what to do where something is missing."
FLAGS: list[Flag] = []


def run(args: Namespace, shell: Any) -> None:
    """Print a line a thing: its state and the next step."""
    rows = list(lines(shell))
    width = max(len(name) for name, _ in rows)
    print("\n".join(f"{name.ljust(width)}  {text}" for name, text in rows))  # noqa: T201 - what a magic says


def lines(shell: Any = None) -> Iterator[tuple[str, str]]:
    """Name and finding, in the order in which one would look."""
    from nbmemprof import __version__

    yield "nbmemprof", f"{__version__} on Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    yield "notebook", ", ".join(f"{name} {_version(name) or 'not installed'}" for name in ("ipython", "ipykernel"))
    yield from _torch()
    yield from _sources()
    yield "--counters", _counters()
    yield "speed", f"numba {_version('numba')}: large files are followed compiled" if _version("numba") else "numba is not installed: large files are slower. pip install numba"
    yield "pictures", _pictures()
    if shell is not None:
        yield "magics", _magics(shell)


def _torch() -> Iterator[tuple[str, str]]:
    torch = _optional.loaded("torch")
    if torch is None:
        version = _version("torch")
        yield "torch", f"{version} is installed and not imported yet: recording begins when a cell imports it" if version else "not installed: files open, nothing can be recorded. pip install 'nbmemprof[torch]'"
        return
    yield "torch", f"{torch.__version__}, imported"
    if hasattr(torch.cuda, "_nbmemprof_predicted"):
        yield "CUDA", f"none is asked: cells are predicted here, for {torch.cuda._nbmemprof_predicted}"
        return
    try:
        yield "CUDA", _cuda(torch)
        yield "allocator", _allocator(torch)
        if torch.cuda.is_available():
            yield "history", _history(torch)
    except Exception as error:  # a broken driver is what a doctor is asked about
        yield "CUDA", f"could not be asked ({type(error).__name__}: {error}). Restart the kernel; if it stays, check nvidia-smi."


def _cuda(torch: Any) -> str:
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return "this torch is built without CUDA: CPU tensors are recorded. For a GPU install torch's CUDA build"
    if not torch.cuda.is_available():
        return f"torch is built for CUDA {torch.version.cuda}, but no device is usable: CPU tensors are recorded. Check nvidia-smi and CUDA_VISIBLE_DEVICES"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"{torch.version.cuda}, {len(names)} device{'s' if len(names) > 1 else ''}: {', '.join(dict.fromkeys(names))}"


def _allocator(torch: Any) -> str:
    if not torch.cuda.is_available():
        return "no CUDA allocator in use here"
    backend = torch.cuda.get_allocator_backend()
    return f"{backend}: its history can be recorded" if backend == "native" else f"{backend}: it keeps no history; blocks and stacks are not known. Unset backend in PYTORCH_CUDA_ALLOC_CONF and restart"


def _history(torch: Any) -> str:
    on = bool(torch._C._cuda_isHistoryEnabled())
    return "on already, by somebody else: it is not touched, cells are cut from it by time" if on else "off: %%memprof switches it on for the cell and off again"


def _sources() -> Iterator[tuple[str, str]]:
    from nbmemprof import sources

    for name, reason in sources.available().items():
        yield f"--source {name}", "ready" if reason is None else f"not now: {reason}"


def _counters() -> str:
    from nbmemprof.gpu import _readiness

    why = _readiness.reason()
    return "ready" if why is None else f"not now: {why}"


def _pictures() -> str:
    altair, renderer = _version("altair"), _version("vl-convert-python")
    if altair is None:
        return "the report is drawn without Altair; charts of your own need it: pip install altair"
    return f"the report is drawn by nbmemprof itself; altair {altair}" + (f", vl-convert {renderer}" if renderer else "; static Altair charts need: pip install vl-convert-python")


def _magics(shell: Any) -> str:
    from nbmemprof import magics

    here = magics.of(shell)
    if here is None:
        return "not loaded in this shell. Run %load_ext nbmemprof"
    return f"loaded; auto is {'on (%memprof auto off ends it)' if here.auto else 'off (%memprof auto on records every cell)'}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
