"""Which errors mean that memory ran out: torch's own, those of libraries that hide it, and what errors hold on to."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

__all__ = ["let_go", "memory_error"]

# Texts that always mean it. Sources: c10/cuda/CUDACachingAllocator.cpp, CUDAException.cpp; the status names of the cuBLAS, cuDNN, cuSOLVER,
# cuSPARSE, cuFFT and NCCL manuals; c10/core/CPUAllocator.cpp; cupy.cuda.memory; numba.cuda.cudadrv.
_CERTAIN = (
    "out of memory", "cublas_status_alloc_failed", "cudnn_status_alloc_failed", "cudnn_status_internal_error_device_allocation_failed",
    "cudnn_status_internal_error_host_allocation_failed", "cusolver_status_alloc_failed", "cusparse_status_alloc_failed", "cusparse_status_insufficient_resources",
    "cufft_alloc_failed", "cuda_error_out_of_memory", "cudaerrormemoryallocation", "can't allocate memory", "not enough memory: you tried to allocate",
)  # fmt: skip
# Texts that mean it where memory is short, and a wrong call elsewhere: a handle or workspace that could not be made, an engine that found no room.
_PRESSED = (
    "cublas_status_not_initialized", "cublas_status_internal_error", "cublas_status_execution_failed", "cudnn_status_not_initialized", "cudnn_status_not_supported",
    "cudnn_status_internal_error", "cudnn_status_execution_failed", "unable to find an engine", "cusolver_status_internal_error", "cusolver_status_not_initialized",
    "cufft_internal_error", "cufft_setup_failed", "no valid convolution algorithms", "unhandled cuda error", "unspecified launch failure", "cuda error: initialization error",
)  # fmt: skip
_NAMES = ("OutOfMemoryError", "MemoryError", "AcceleratorOutOfMemoryError")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and what it came from."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, None if one.__suppress_context__ else one.__context__]
        waiting += getattr(one, "exceptions", ())


def memory_error(error: BaseException, *, pressed: bool) -> str | None:
    """First line of the error that says memory ran out; None where it is another error.

    Parameters
    ----------
    error
        What a step raised; causes and groups are looked at too.
    pressed
        Whether memory was short when it was raised: refusals were counted, or nearly nothing was free. Some library errors mean
        a lack of memory only then.
    """
    for one in _chain(error):
        if not isinstance(one, Exception):
            continue
        text = str(one).lower()
        if any(name in _NAMES for name in (c.__name__ for c in type(one).__mro__)) or any(word in text for word in _CERTAIN):
            return _line(one)
        if pressed and isinstance(one, RuntimeError) and any(word in text for word in _PRESSED):
            return _line(one)
    return None


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def let_go(error: BaseException) -> None:
    """Drop what an error's frames hold, and the chain of errors behind it; frames that still run are left alone."""
    for one in list(_chain(error)):
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = one.__cause__ = one.__context__ = None
    for name in ("last_value", "last_exc"):
        if getattr(sys, name, None) is error:
            setattr(sys, name, None)
            sys.last_traceback = None
