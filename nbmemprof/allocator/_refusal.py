"""What a modelled device says when it refuses: torch's own sentence, and the class that ``except torch.OutOfMemoryError`` catches."""

from __future__ import annotations

import functools

from nbmemprof import _optional
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator import _rules
from nbmemprof.allocator._model import Model
from nbmemprof.errors import OutOfMemoryError
from nbmemprof.units import format_bytes

__all__ = ["UNSERVED", "out_of_memory"]

UNSERVED = 1 << 60  # bytes from which a request is refused unseen: the rules' sums stay below 2**63


def out_of_memory(model: Model, requested: int, *, device: int, torch: str, capacity_bytes: int | None) -> OutOfMemoryError:
    """Return the error of a request that can't be served; the words are those of ``CUDACachingAllocator.cpp``, the last sentence is ours."""
    m, limit = model.m, model.limit_bytes
    rounded = requested if requested >= UNSERVED else _segment(model, requested)
    live, reserved = int(m[M.ALLOCATED_BYTES]), int(m[M.RESERVED_BYTES])
    text = f"CUDA out of memory. Tried to allocate {_mib(rounded)}. GPU {device} (modelled by nbmemprof, torch {torch})"
    if capacity_bytes is not None:
        text += f" has a total capacity of {_mib(capacity_bytes)} of which {_mib(max(0, capacity_bytes - reserved))} is free."
    else:
        text += " has no stated capacity."
    if limit is not None:
        text += f" {_mib(limit)} allowed;"
    text += f" Of the allocated memory {_mib(live)} is allocated by PyTorch, and {_mib(reserved - live)} is reserved by PyTorch but unallocated."
    if reserved - live >= rounded and not model.settings.expandable_segments:
        text += " If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    loaded = _optional.loaded("torch")
    return _class(getattr(loaded, "OutOfMemoryError", None))(f"{text} Nothing real was refused: {format_bytes(requested)} were asked of a model.")


@functools.cache
def _class(base: type | None) -> type[OutOfMemoryError]:
    """An error that ``except torch.OutOfMemoryError`` catches too, where torch is loaded."""
    if base is None:
        return OutOfMemoryError
    return type("OutOfMemoryError", (OutOfMemoryError, base), {"__module__": "nbmemprof", "__doc__": OutOfMemoryError.__doc__})


def _segment(model: Model, requested: int) -> int:
    return int(_rules.segment_size(model.m.data, _rules.round_size(model.m.data, requested)))  # type: ignore[arg-type]


def _mib(size: int) -> str:
    """As torch prints sizes: two digits and the largest unit that leaves them above 1."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << scale:
            return f"{size / (1 << scale):.2f} {unit}"
    return f"{size} bytes"
