"""Distances of all pairs: what torch's C++ makes on the way (aten/src/ATen/native/Distance.cpp, cuda/DistanceKernel.cu)."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels import reduction

__all__ = ["install"]


def install(torch: Any, rules: Any) -> None:
    """Follow them."""
    aten = torch.ops.aten
    rules.before[aten._euclidean_dist.default] = _euclidean
    rules.emit[aten._cdist_backward.default] = _cdist_backward
    rules.emit[aten._pdist_backward.default] = _pdist_backward


def _euclidean(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """As one product of matrices, with the squares as two columns more; for fakes it would be one operator (exact on an H200)."""
    torch = recorder.rules.torch
    one, other = args
    if one.device.type != "cuda":
        return NotImplemented
    with recorder:
        first = one.pow(2).sum(-1, keepdim=True)
        ones = torch.ones_like(first)
        second = other.pow(2).sum(-1, keepdim=True)
        others = torch.ones_like(second)
        left = torch.cat([one.mul(-2), first, ones], -1)
        del first, ones
        right = torch.cat([other, others, second], -1)
        del second, others
        out = left.matmul(right.mT)
        del right, left
        return out.clamp_min_(0).sqrt_()


def _pairs(recorder: Any, func: Any, out: Any, shape: tuple[int, ...]) -> None:
    """The part of every pair, and then their sum over the second points."""
    recorder.note(func, out)
    if out.device.type != "cuda":
        return
    op, size, strides = func._schema.name, out.element_size(), []
    for n in reversed(shape):
        strides.append(size)
        size *= n
    held = recorder.begin(size, op, "temporary", "operator")
    elements = tuple(s // out.element_size() for s in reversed(strides))
    buffer, semaphores = reduction.buffer_bytes(shape, elements, (len(shape) - 3,), sms=recorder.rules.gpu.sms, acc_bytes=4)
    if buffer:
        inner = recorder.begin(buffer, op, "workspace", "operator")
        recorder.temporary(semaphores, op)
        recorder.end(inner)
    recorder.end(held)


def _cdist_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    first, second = args[1], args[2]
    _pairs(recorder, func, out, (*out.shape[:-2], second.shape[-2], first.shape[-2], first.shape[-1]))


def _pdist_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    source = args[1]
    _pairs(recorder, func, out, (max(1, source.shape[0] - 1), *source.shape))
