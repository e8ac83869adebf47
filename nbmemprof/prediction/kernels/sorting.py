"""Sorting, selecting and scanning: what CUB's device-wide algorithms ask for beside keys and values."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels.reduction import ceil_div

__all__ = ["install", "keys_bytes", "pairs_bytes", "scan_bytes"]


TILE = {4: 5376, 8: 4608}  # elements that a block of CUB's onesweep radix sort takes, by size of the key, with values of 8 bytes
BLOCKS = 21_503  # temporary of a reduction over the whole device


def _aligned(size: int) -> int:
    return ceil_div(size, 256) * 256


def pairs_bytes(count: int, key_bytes: int, value_bytes: int, *, passes: int | None = None) -> int:
    """Temporary of ``cub::DeviceRadixSort``: a second copy of keys and values, histograms, one row of counters a tile (exact on an H200)."""
    passes = key_bytes if passes is None else passes
    tiles = ceil_div(count, TILE.get(key_bytes, 5376))
    if passes == 1:  # nothing to swap
        return 2048 + 1024 * tiles + 511
    return _aligned(count * key_bytes) + _aligned(count * value_bytes) + passes * 2048 + 1024 * tiles + 511


def keys_bytes(count: int, key_bytes: int) -> int:
    """The same without values."""
    return pairs_bytes(count, key_bytes, 0)


def scan_bytes(count: int) -> int:
    """Temporary of a scan or a selection over so many elements (measured on an H200 at small counts)."""
    return 1279 + 512 * (count // 200_000)


def install(torch: Any, rules: Any) -> None:
    """Follow them."""
    aten = torch.ops.aten
    rules.emit[aten.cumsum.default] = _cumsum
    rules.emit[aten._foreach_norm.Scalar] = _foreach_norm
    for op in (aten.sort.default, aten.sort.stable):
        rules.after[op] = _sort
    rules.emit[aten.nonzero.default] = _nonzero
    rules.after[aten.multinomial.default] = _multinomial
    for op in (aten.median.default, aten.nanmedian.default):
        rules.after[op] = _median
    rules.before[aten.index.Tensor] = _index


def _sort(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Short rows count their places; one long row, or all rows at once, goes through the radix sort."""
    values, op = out[0], func._schema.name
    if not values.numel() or values.device.type != "cuda":
        return
    names = [argument.name for argument in func._schema.arguments]
    dim = (dict(zip(names, args, strict=False)) | kwargs).get("dim", -1)
    columns, count = values.shape[dim] if values.dim() else 1, values.numel()
    places = recorder.begin(8 * columns, op, "workspace", "operator") if columns <= 1024 or columns == count else None
    if columns > 1024 and columns == count:
        recorder.temporary(pairs_bytes(count, values.element_size(), 8), op)
    elif columns > 1024:  # twice: by key, then by row
        held = [recorder.begin(8 * count, op, "workspace", "operator") for _ in range(2)]
        keys = recorder.begin(values.element_size() * count, op, "workspace", "operator")
        recorder.temporary(pairs_bytes(count, values.element_size(), 8), op)
        recorder.end(keys)
        for index in held:
            recorder.end(index)
    if places is not None:
        recorder.end(places)


def _nonzero(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """How many there are is counted first."""
    if out.device.type != "cuda":
        return
    op = func._schema.name
    number = recorder.begin(4, op, "workspace", "operator")
    recorder.temporary(BLOCKS, op)
    recorder.note(func, out)
    recorder.temporary(1023 + 1024 * (args[0].numel() // 600_000), op)
    recorder.end(number)


def _multinomial(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """Probabilities are divided by exponential random numbers."""
    recorder.temporary(args[0].numel() * args[0].element_size(), func._schema.name, "temporary")


def _median(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """Everything is sorted."""
    op, count, size = func._schema.name, args[0].numel(), args[0].element_size()
    held = [recorder.begin(each * count, op, "workspace", "operator") for each in (size, 8, 8)]
    recorder.temporary(pairs_bytes(count, size, 8), op)
    for index in reversed(held):
        recorder.end(index)


def _index(recorder: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A mask is turned into places first."""
    torch = recorder.rules.torch
    indices = args[1]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return NotImplemented
    with recorder:
        places = places_of(torch, indices)
        return func(args[0], places, *args[2:], **kwargs)


def places_of(torch: Any, indices: Any) -> list[Any]:
    """Indices with every mask in them replaced by the places that it selects."""
    found: list[Any] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found.extend(torch.ops.aten.nonzero.default(index).unbind(1))
        else:
            found.append(index)
    return found


def _cumsum(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Truth values and small integers are widened first; a single row is scanned by the whole device."""
    source = args[0]
    op = func._schema.name
    if source.dtype != out.dtype:
        recorder.note(func, out)
        recorder.temporary(out.numel() * out.element_size(), op, "temporary")
        return
    recorder.note(func, out)
    if out.dim() and out.numel() == out.shape[args[1]] and out.device.type == "cuda":
        recorder.temporary(1023 + out.numel() // 256, op)


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
