"""Gathering and scattering: embeddings, indices, and what torch does out of place for fakes only."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels import sorting

__all__ = ["install"]

FEW = 3072  # indices that the embedding's backward takes without sorting (aten/src/ATen/native/cuda/Embedding.cu)
_OUT_OF_PLACE = frozenset(("ScatterReduceBackward0", "IndexReduceBackward0"))  # nodes that count ties out of place on a device too (FunctionsManual.cpp)
_LARGEST = 2  # mode of an embedding bag: its gradient goes to the places that were kept
ROWS = 10  # NROWS_PER_THREAD there


def install(torch: Any, rules: Any) -> None:
    """Do in place what the device does in place, and sort where it sorts."""
    aten = torch.ops.aten
    for plain, inplace in (
        (aten.index_add.default, aten.index_add_.default), (aten.scatter_add.default, aten.scatter_add_.default), (aten.scatter.src, aten.scatter_.src),
        (aten.index_put.default, aten.index_put_.default), (aten.scatter.value, aten.scatter_.value), (aten.masked_scatter.default, aten.masked_scatter_.default),
    ):  # fmt: skip
        rules.before[plain] = _InPlace(inplace)
    rules.emit[aten.embedding_dense_backward.default] = _embedding_backward
    rules.emit[aten._embedding_bag_backward.default] = _bag_backward
    for bag in (aten._embedding_bag.default, aten._embedding_bag_forward_only.default):
        rules.order[bag] = lambda out: (out[2], out[1], out[0], out[3])
    for reduce in (aten.scatter_reduce.two, aten.scatter_reduce_.two):
        rules.emit[reduce] = _scatter_reduce
    for put in (aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default):
        rules.emit[put] = _index_put


def _scatter_reduce(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A mean counts what it added up."""
    recorder.note(func, out)
    source, op = args[3], func._schema.name
    if (args[4] if len(args) > 4 else kwargs.get("reduce")) != "mean" or out.device.type != "cuda":
        return
    ones = recorder.begin(source.numel() * source.element_size(), op, "temporary", "operator")
    counts = recorder.begin(out.numel() * out.element_size(), op, "temporary", "operator")
    recorder.temporary(out.numel(), op, "temporary")
    recorder.end(counts)
    recorder.end(ones)


class _InPlace:
    """Call the in-place operator where a node of the graph asks for the other on zeros it made itself."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
        node = recorder.where.current()
        if node is None or node.name() in _OUT_OF_PLACE or recorder.made_in_this_node(args[0]) is False:
            return NotImplemented
        with recorder:
            return self.op(*args, **kwargs)


def _embedding_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    count = args[1].numel()
    if count <= FEW and not args[4]:
        recorder.note(func, out)
        return
    _sorted_rows(recorder, func, args[1], int(args[2]), out, few=count >= 32 * int(args[2]))


def _bag_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    if out.layout is recorder.rules.torch.strided and args[8] != _LARGEST:
        _sorted_rows(recorder, func, args[1], int(args[6]), out, few=False)
    else:
        recorder.note(func, out)


def _sorted_rows(recorder: Any, func: Any, indices: Any, vocabulary: int, out: Any, *, few: bool) -> None:
    """Indices are sorted, runs of equal ones are cut into segments, partial sums of these are kept in fp32; not where rows are few (exact on an H200)."""
    op, count = func._schema.name, indices.numel()
    size, width = indices.element_size(), out.shape[-1]
    each = size * count

    def begin(nbytes: int) -> int:
        return int(recorder.begin(nbytes, op, "workspace", "operator"))

    ordered, original = begin(each), begin(each)
    counting = begin(each)
    recorder.temporary(sorting.pairs_bytes(count, size, size), op)
    recorder.end(counting)
    recorder.note(func, out)
    starts, number = begin(each), begin(8)
    dummy = begin(each)
    recorder.temporary(sorting.scan_bytes(count), op)
    recorder.end(dummy)
    segments = min(count, vocabulary)
    partials, offsets = begin(size * segments), begin(size * segments)
    recorder.temporary(sorting.scan_bytes(segments), op)
    most = count // ROWS + segments
    whole = begin(8)
    positions = begin(size * most)
    recorder.temporary(size * most if few else max(4, out.element_size()) * most * width, op)
    for index in (positions, whole, offsets, partials, number, starts, original, ordered):
        recorder.end(index)


def _index_put(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Adding up at places that may be equal: they are put in a row and sorted (exact on an H200)."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    recorder.note(func, out)
    if not given.get("accumulate") or out.device.type != "cuda":
        return
    op = func._schema.name
    indices = [i for i in given["indices"] if i is not None]
    count = max((i.numel() for i in indices), default=0)
    rows = 1
    for i, size in zip(given["indices"], out.shape, strict=False):
        rows *= size if i is not None else 1
    first, places = recorder.begin(8 * count, op, "workspace", "operator"), recorder.begin(8 * count, op, "workspace", "operator")
    recorder.end(first)
    held = [recorder.begin(8 * count, op, "workspace", "operator") for _ in range(3)]
    bits = max(1, (rows - 1).bit_length())
    recorder.temporary(sorting.pairs_bytes(count, 8, 8, passes=-(-bits // 8)) if count > 2048 else 1, op)
    for index in (*reversed(held), places):
        recorder.end(index)
