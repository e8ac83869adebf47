"""Sorting, selecting and scanning: what CUB's device-wide algorithms ask for beside keys and values."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels.reduction import ceil_div

__all__ = ["install", "keys_bytes", "pairs_bytes", "scan_bytes"]


def pairs_bytes(count: int, key_bytes: int, value_bytes: int, *, passes: int | None = None) -> int:
    """Temporary of ``cub::DeviceRadixSort::SortPairs``: a second copy of keys and values, histograms, one row of counters a tile (measured on an H200)."""
    passes = key_bytes if passes is None else passes
    tile = 5376
    return count * (key_bytes + value_bytes) + passes * 2048 + 1024 * ceil_div(count, tile) + 511


def keys_bytes(count: int, key_bytes: int) -> int:
    """Temporary of ``cub::DeviceRadixSort::SortKeys``."""
    return pairs_bytes(count, key_bytes, 0)


def scan_bytes(count: int) -> int:
    """Temporary of a scan or a selection over so many elements (measured on an H200 at small counts)."""
    return 1279 + 16 * (count // 3840)


def install(torch: Any, rules: Any) -> None:
    """Follow them."""
    aten = torch.ops.aten
    rules.emit[aten.cumsum.default] = _cumsum
    rules.emit[aten._foreach_norm.Scalar] = _foreach_norm


def _cumsum(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Truth values and small integers are widened first."""
    recorder.note(func, out)
    source = args[0]
    if source.dtype != out.dtype:
        recorder.temporary(out.numel() * out.element_size(), func._schema.name, "temporary")


CHUNK = 65536  # elements that a block of a foreach kernel takes (aten/src/ATen/native/cuda/MultiTensorApply.cuh)


def _foreach_norm(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """A partial norm for each chunk of each tensor, as many as the largest has (exact on an H200)."""
    tensors = args[0]
    if not tensors or tensors[0].device.type != "cuda":
        recorder.note(func, out)
        return
    chunks = max(ceil_div(t.numel(), CHUNK) for t in tensors)
    partial = recorder.begin(4 * len(tensors) * chunks, func._schema.name, "workspace", "operator")
    recorder.note(func, out)
    recorder.end(partial)
