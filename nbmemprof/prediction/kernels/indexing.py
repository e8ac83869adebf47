"""Gathering and scattering: embeddings, indices, and what torch does out of place for fakes only."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels import sorting

__all__ = ["install"]

FEW = 3072  # indices that the embedding's backward takes without sorting (aten/src/ATen/native/cuda/Embedding.cu)
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


class _InPlace:
    """Call the in-place operator where a node of the graph asks for the other on zeros it made itself."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
        if not recorder.where.in_backward or recorder.made_in_this_node(args[0]) is False:
            return NotImplemented
        with recorder:
            return self.op(*args, **kwargs)


def _embedding_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Indices are sorted, runs of equal ones are cut into segments, partial sums of these are kept in fp32 (exact on an H200)."""
    indices, vocabulary = args[1], int(args[2])
    count = indices.numel()
    if count <= FEW and not args[4]:
        recorder.note(func, out)
        return
    op = func._schema.name
    width = out.shape[-1]
    each = indices.element_size() * count

    def begin(size: int) -> int:
        return int(recorder.begin(size, op, "workspace", "operator"))

    ordered, original = begin(each), begin(each)
    counting = begin(each)
    recorder.temporary(sorting.pairs_bytes(count, indices.element_size(), indices.element_size()), op)
    recorder.end(counting)
    recorder.note(func, out)
    starts, number = begin(each), begin(8)
    dummy = begin(each)
    recorder.temporary(sorting.scan_bytes(count), op)
    recorder.end(dummy)
    segments = min(count, vocabulary)
    partials, offsets = begin(each // count * segments), begin(each // count * segments)
    recorder.temporary(sorting.scan_bytes(segments), op)
    most = count // ROWS + segments
    whole = begin(8)
    positions = begin(indices.element_size() * most)
    recorder.temporary(max(4, out.element_size()) * most * width, op)
    for index in (positions, whole, offsets, partials, number, starts, original, ordered):
        recorder.end(index)
