"""Attention kernels: the order of their outputs, and what they need on the way back."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels.reduction import ceil_div

__all__ = ["install"]


def install(torch: Any, rules: Any) -> None:
    """Follow cuDNN's, the memory-efficient and the flash kernels."""
    aten = torch.ops.aten
    rules.order[aten._scaled_dot_product_cudnn_attention.default] = lambda out: (out[6], out[7], out[0], out[1])  # seed and offset of the random numbers first
    rules.after[aten._scaled_dot_product_cudnn_attention.default] = _cudnn
    rules.after[aten._scaled_dot_product_cudnn_attention_backward.default] = _cudnn_backward
    rules.order[aten._scaled_dot_product_efficient_attention.default] = lambda out: (out[0], out[1])  # seed and offset lie on the CPU
    rules.after[aten._scaled_dot_product_efficient_attention_backward.default] = _efficient_backward


def _cudnn(recorder: Any, func: Any, _args: Any, _kwargs: Any, _out: Any) -> None:
    recorder.record.used.add("cudnn")
    recorder.temporary(256, func._schema.name)


def _cudnn_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """fp32 gradient of the queries and the row sums; with grouped heads gradients of every head's keys and values (exact on an H200)."""
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    size = 4 * batch * heads * rows * width + 4 * batch * heads * rows + 256
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * width * query.element_size()
    recorder.temporary(size, func._schema.name)


def _efficient_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """Row sums of out · grad, made from their fp32 product, and the accumulators of the queries' gradient, one a tile of 64 rows (exact on an H200)."""
    op = func._schema.name
    query, key, value = args[1], args[2], args[3]
    batch, heads, rows, width = query.shape
    sums = 4 * batch * heads * rows
    product = recorder.begin(4 * batch * heads * rows * value.shape[3], op, "workspace", "operator")
    first = recorder.begin(sums, op, "workspace", "operator")
    delta = recorder.begin(sums, op, "workspace", "operator")
    recorder.end(first)
    recorder.end(product)
    columns = 64 if width <= 64 else 128
    tiles = ceil_div(rows, 64) * ceil_div(width, columns)
    if query.element_size() == 4 or key.shape[2] > 0:
        space = recorder.begin(batch * heads * tiles * (16 + 64 * columns * 4), op, "workspace", "operator")
        recorder.end(delta)
        recorder.end(space)
