"""Sorting, selecting and scanning: what CUB's device-wide algorithms ask for beside keys and values."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels.reduction import ceil_div

__all__ = ["install", "keys_bytes", "pairs_bytes", "scan_bytes"]


TILE = {4: 5376, 8: 4608}  # elements that a block of CUB's onesweep radix sort takes, by size of the key, with values of 8 bytes
BLOCK_SORT = 4096  # longest row that one block sorts in place (should_use_small_sort in aten/src/ATen/native/cuda/Sort.h)
# (rows from, rows below, shortest row) for which several blocks search a row (should_use_multiblock in TensorTopK.cu)
_BLOCKS_FROM = ((1, 21, 20_000), (21, 41, 10_000), (41, 81, 8000), (81, 200, 5000), (200, 800, 3000), (800, 4001, 800), (4001, 1 << 32, 400))
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
    rules.after[aten.topk.default] = _topk
    rules.emit[aten.nonzero.default] = _nonzero
    rules.after[aten.multinomial.default] = _multinomial
    for op in (aten.median.default, aten.nanmedian.default):
        rules.after[op] = _median
    rules.before[aten.index.Tensor] = _index
    rules.before[aten.masked_select.default] = _masked_select
    rules.emit[aten._unique2.default] = _unique
    rules.after[aten.mode.default] = _mode
    rules.emit[aten.roll.default] = _roll


def _sort(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Rows that fit a block are sorted in place; a long row, or all rows at once, go through the radix sort (exact on an H200)."""
    values = out[0]
    if values.numel() and values.device.type == "cuda":
        _sorted(recorder, func._schema.name, values, _dim(func, args, kwargs))


def _dim(func: Any, args: Any, kwargs: Any) -> int:
    names = [argument.name for argument in func._schema.arguments]
    return int((dict(zip(names, args, strict=False)) | kwargs).get("dim", -1))


def _sorted(recorder: Any, op: str, values: Any, dim: int) -> None:
    """``launch_stable_sort_kernel`` in aten/src/ATen/native/cuda/SortStable.cu."""
    columns, count = values.shape[dim] if values.dim() else 1, values.numel()
    size, rows = values.element_size(), count // max(1, columns)

    def begin(nbytes: int) -> int:
        return int(recorder.begin(nbytes, op, "workspace", "operator"))

    if columns <= BLOCK_SORT or rows == 1 or columns >= 1_000_000:
        places = begin(8 * columns)
        if columns > BLOCK_SORT or (rows == 1 and columns > 1024):
            for _ in range(rows):
                recorder.temporary(pairs_bytes(columns, size, 8), op)
        recorder.end(places)
    elif rows >= 128:  # by CUB's segmented sort
        places = begin(8 * count)
        recorder.temporary(_aligned(size * count) + _aligned(8 * count) + 255, op)
        recorder.end(places)
    else:  # twice: by key, then by row
        held = [begin(8 * count), begin(8 * count)]
        keys = begin(size * count)
        recorder.temporary(pairs_bytes(count, size, 8), op)
        recorder.end(keys)
        recorder.temporary(2559 + 1024 * ceil_div(count, 5760), op)
        for index in held:
            recorder.end(index)


def _searched(recorder: Any, op: str, source: Any, columns: int) -> None:
    """Long rows are searched by several blocks, digit by digit (``mbtopk`` in aten/src/ATen/native/cuda/TensorTopK.cu; exact on an H200)."""
    rows, size = source.numel() // max(1, columns), source.element_size()
    if not any(low <= rows < high and columns >= least for low, high, least in _BLOCKS_FROM):
        return
    each = min(64, max(4, ceil_div(rows * columns, recorder.rules.gpu.sms * 6 * 256)))
    blocks = rows * ceil_div(columns, each * 256)
    held = [recorder.begin(nbytes, op, "workspace", "operator") for nbytes in (size * rows, 8 * rows, max(8, 2 * size) * rows, 512 * blocks, 1024 * rows, 4 * blocks, 4 * blocks)]
    recorder.temporary(scan_bytes(blocks), op)
    recorder.temporary(scan_bytes(blocks), op)
    for index in reversed(held):
        recorder.end(index)


def _topk(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """The largest are found, then sorted."""
    values, indices = out
    source, op = args[0], func._schema.name
    if not values.numel() or values.device.type != "cuda":
        return
    dim = _dim(func, args, kwargs)
    columns = source.shape[dim] if source.dim() else 1
    size = source.element_size()
    if not source.is_contiguous():
        copy = recorder.begin(source.numel() * size, op, "temporary", "operator")
    _searched(recorder, op, source, columns)
    wanted = args[4] if len(args) > 4 else kwargs.get("sorted", True)
    if wanted and values.numel() > 1 and (values.shape[dim] if values.dim() else 1) > BLOCK_SORT:
        places = recorder.begin(8 * indices.numel(), op, "workspace", "operator")
        again = recorder.begin(size * values.numel(), op, "workspace", "operator")
        _sorted(recorder, op, values, dim)
        recorder.temporary(8 * indices.numel(), op)
        recorder.end(again)
        recorder.end(places)
    if not source.is_contiguous():
        recorder.end(copy)


def _nonzero(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """How many there are is counted first."""
    if out.device.type != "cuda":
        return
    op, source = func._schema.name, args[0]
    copy = recorder.begin(source.numel() * source.element_size(), op, "temporary", "operator") if not source.is_contiguous() else None
    number = recorder.begin(4, op, "workspace", "operator")
    recorder.temporary(BLOCKS if source.numel() > 4096 else 1, op)
    recorder.note(func, out)
    recorder.temporary(1023 + 1024 * (source.numel() // 530_000), op)
    recorder.end(number)
    if copy is not None:
        recorder.end(copy)


def _masked_select(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """As indices of a mask (``masked_select_out_cuda_impl`` in aten/src/ATen/native/cuda/IndexKernel.cpp)."""
    torch = recorder.rules.torch
    source, mask = args
    if source.device.type != "cuda":
        return NotImplemented
    with recorder:
        source, mask = torch.broadcast_tensors(source, mask)
        return torch.ops.aten.index.Tensor(source, [mask])


def _multinomial(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Probabilities are divided by exponential random numbers, and the largest taken; with replacement they are summed up."""
    source, op, count = args[0], func._schema.name, args[1]
    size = source.numel() * source.element_size()
    held = [recorder.begin(size, op, "temporary", "operator")]
    if args[2] if len(args) > 2 else kwargs.get("replacement", False):
        held += [recorder.begin(size, op, "temporary", "operator") for _ in range(2)]
    elif count > 1:
        values = source.new_empty(())  # its type alone
        held.append(recorder.begin(out.numel() * values.element_size(), op, "temporary", "operator"))
        _searched(recorder, op, source, source.shape[-1])
    for index in reversed(held):
        recorder.end(index)


KEYS_TILE = {8: 5760, 4: 7296, 2: 9728}  # the same as TILE, without values


def _unique(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Everything is sorted; the results are first as long as the input, and their blocks stay so (aten/src/ATen/native/cuda/UniqueCub.cu; exact for values alone)."""
    source, op = args[0], func._schema.name
    count, size = source.numel(), source.element_size()
    if source.device.type != "cuda" or not count or source.dtype == recorder.rules.torch.bool:
        recorder.note(func, out)
        return
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    inverse, counts = bool(given.get("return_inverse")), bool(given.get("return_counts"))
    ordered = [recorder.begin(size * count, op, "workspace", "operator")]
    if inverse:
        ordered.append(recorder.begin(8 * count, op, "workspace", "operator"))
        places = recorder.begin(8 * count, op, "workspace", "operator")
        recorder.temporary(pairs_bytes(count, size, 8) if count > 2048 else 1, op)
        recorder.end(places)
    else:
        tiles = ceil_div(count, KEYS_TILE.get(size, 9728))
        recorder.temporary(_aligned(count * size) + size * 2048 + 1024 * tiles + 511 if count > 2048 else 1, op)
    recorder.adopt(out[0].untyped_storage(), recorder.begin(size * count, op))
    if inverse:
        recorder.adopt(out[1].untyped_storage(), recorder.begin(8 * count, op))
        recorder.temporary(8 * count, op)
    number = recorder.begin(8, op, "workspace", "operator")
    if counts:
        recorder.adopt(out[2].untyped_storage(), recorder.begin(8 * count, op))
    recorder.temporary(1023 + 512 * (count // 270_000), op)
    recorder.end(number)
    for index in reversed(ordered):
        recorder.end(index)


def _mode(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """Long rows are sorted one after the other."""
    source, op = args[0], func._schema.name
    columns, size = source.shape[-1], source.element_size()
    if columns <= 2048 or source.device.type != "cuda":
        return
    copy, places = recorder.begin(source.numel() * size, op, "temporary", "operator"), recorder.begin(8 * columns, op, "workspace", "operator")
    recorder.temporary(pairs_bytes(columns, size, 8), op)
    recorder.end(places)
    recorder.end(copy)


def _roll(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """One dimension after the other."""
    dims = args[2] if len(args) > 2 else kwargs.get("dims", ())
    held = []
    if out.device.type == "cuda" and out.numel():
        held = [recorder.begin(out.numel() * out.element_size(), func._schema.name, "temporary", "operator") for _ in range(len(dims) - 1)]
    recorder.note(func, out)
    for index in reversed(held):
        recorder.end(index)


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
