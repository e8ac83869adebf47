"""Losses and pointwise kernels with temporaries of their own."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels import reduction

__all__ = ["install"]


def install(torch: Any, rules: Any) -> None:
    """Follow them."""
    aten = torch.ops.aten
    rules.after[aten._softmax_backward_data.default] = _like_output
    rules.order[aten.native_dropout.default] = lambda out: (out[1], out[0])  # the mask first
    for op in (aten.mse_loss.default, aten.smooth_l1_loss.default):
        rules.emit[op] = _reduced_loss
    rules.emit[aten.huber_loss.default] = _huber
    for op in (aten.binary_cross_entropy.default, aten.soft_margin_loss.default):
        rules.emit[op] = _loss_in_place
    rules.emit[aten.binary_cross_entropy_with_logits.default] = _with_logits
    rules.before[aten.sub.Tensor] = _in_place_of(torch, aten.sub_.Tensor)
    rules.before[aten.mul.Tensor] = _in_place_of(torch, aten.mul_.Tensor)
    for name in ("upsample_nearest1d_backward", "upsample_nearest2d_backward", "upsample_nearest3d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"):
        rules.after[getattr(aten, name).default] = _contiguous_gradient
    rules.emit[aten.logsumexp.default] = _logsumexp
    for name in ("_softmax", "_log_softmax", "reflection_pad2d", "rrelu_with_noise"):
        rules.after[getattr(aten, name).default] = _contiguous_source
    rules.emit[aten.add.Tensor] = _sum
    rules.after[aten._safe_softmax.default] = _safe_softmax
    rules.after[aten.abs.default] = _complex_size


def _contiguous_gradient(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """A gradient that does not lie in a row, a part of a concatenation, is copied."""
    grad, torch = args[0], recorder.rules.torch
    if not grad.is_contiguous() and not (grad.dim() == 4 and grad.is_contiguous(memory_format=torch.channels_last)):
        recorder.temporary(grad.numel() * grad.element_size(), func._schema.name, "temporary")


def _contiguous_source(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """An input that does not lie in a row is copied."""
    source = args[0]
    if source.device.type == "cuda" and not source.is_contiguous():
        recorder.temporary(source.numel() * source.element_size(), func._schema.name, "temporary")


def _like_output(recorder: Any, func: Any, _args: Any, _kwargs: Any, out: Any) -> None:
    recorder.temporary(out.untyped_storage().nbytes(), func._schema.name, "temporary")


def _in_place_of(torch: Any, inplace: Any) -> Any:
    """What C++ does in place in these nodes, but not for a tensor subclass, which fakes are."""
    nodes = ("BinaryCrossEntropyWithLogitsBackward0",)

    def run(recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
        node = recorder.where.current()
        if node is None or node.name() not in nodes or not recorder.made_in_this_node(args[0]):
            return NotImplemented
        with recorder:
            return inplace(*args, **kwargs)

    del torch
    return run


def _mean_bytes(recorder: Any, count: int, op: str) -> None:
    """The buffer of the mean over all elements."""
    buffer, semaphores = reduction.buffer_bytes((count,), (1,), (0,), sms=recorder.rules.gpu.sms, acc_bytes=4)
    if buffer:
        held = recorder.begin(buffer, op, "workspace", "operator")
        recorder.temporary(semaphores, op)
        recorder.end(held)


def _reduction_of(func: Any, args: Any, kwargs: Any) -> int:
    names = [a.name for a in func._schema.arguments]
    return int((dict(zip(names, args, strict=False)) | kwargs).get("reduction", 1))


def _reduced_loss(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """The result is first as large as the input and only then reduced: its block stays that large."""
    if _reduction_of(func, args, kwargs) == 0:
        recorder.note(func, out)
        return
    op, source = func._schema.name, args[0]
    size = source.numel() * source.element_size()
    loss = recorder.begin(size, op)
    again = recorder.begin(size, op, "temporary", "operator")
    _mean_bytes(recorder, source.numel(), op)
    recorder.end(again)
    recorder.adopt(out.untyped_storage(), loss)


def _loss_in_place(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """The same, with a result of one number in between."""
    if _reduction_of(func, args, kwargs) == 0:
        recorder.note(func, out)
        return
    op, source = func._schema.name, args[0]
    loss = recorder.begin(source.numel() * source.element_size(), op)
    number = recorder.begin(source.element_size(), op, "temporary", "operator")
    _mean_bytes(recorder, source.numel(), op)
    recorder.end(number)
    recorder.adopt(out.untyped_storage(), loss)


def _huber(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    if _reduction_of(func, args, kwargs) == 0:
        recorder.note(func, out)
        return
    op, source = func._schema.name, args[0]
    loss = recorder.begin(source.numel() * source.element_size(), op, "temporary", "operator")
    recorder.note(func, out)
    _mean_bytes(recorder, source.numel(), op)
    recorder.end(loss)


def _with_logits(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Two tensors of the input's size on the way."""
    op, source = func._schema.name, args[0]
    size = source.numel() * source.element_size()
    held = [recorder.begin(size, op, "temporary", "operator")]
    if _reduction_of(func, args, kwargs) == 0:
        recorder.note(func, out)
    else:
        held.append(recorder.begin(size, op, "temporary", "operator"))
        recorder.note(func, out)
        _mean_bytes(recorder, source.numel(), op)
    for index in reversed(held):
        recorder.end(index)


def _logsumexp(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Largest elements, where they are infinite, exponentials, their sums."""
    op, source = func._schema.name, args[0]
    recorder.note(func, out)
    small = out.numel() * out.element_size()
    dims = reduction._dims(func, args, kwargs, source.dim())
    reduction.emit(recorder, source, dims, source.element_size(), op)
    largest = recorder.begin(small, op, "temporary", "operator")
    infinite = recorder.begin(out.numel(), op, "temporary", "operator")
    recorder.end(infinite)
    recorder.end(largest)
    exponentials = recorder.begin(source.numel() * source.element_size(), op, "temporary", "operator")
    sums = recorder.begin(small, op, "temporary", "operator")
    reduction.emit(recorder, source, dims, 4, op)
    recorder.end(exponentials)
    recorder.end(sums)


def _complex_size(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Sizes of complex numbers are computed as complex numbers."""
    source = args[0]
    if source.is_complex() and out.device.type == "cuda":
        recorder.temporary(source.numel() * source.element_size(), func._schema.name, "temporary")


def _safe_softmax(recorder: Any, func: Any, _args: Any, _kwargs: Any, out: Any) -> None:
    """Which elements are masked, which rows are masked altogether, and what these become."""
    op, count = func._schema.name, out.numel()
    elements = recorder.begin(count, op, "temporary", "operator")
    rows = recorder.begin(count // max(1, out.shape[-1]), op, "temporary", "operator")
    recorder.temporary(out.element_size(), op, "temporary")
    recorder.end(rows)
    recorder.end(elements)


def _sum(recorder: Any, func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """A sum in backward may be the engine's own, of two gradients of one tensor."""
    recorder.note(func, out)
    if kwargs or not recorder.where.in_backward or not hasattr(args[1], "shape") or args[0].shape != args[1].shape:
        return
    if args[0]._is_view():  # a view holds its base, and so the storage twice
        return
    old, new = recorder.index_of(args[0]), recorder.index_of(out)
    if old is not None and new is not None and recorder.node_of.get(old) != recorder.where.number():
        recorder.sum_in_place(new, old)
