"""Attention kernels: the order of their outputs, and what they need beside them. All exact on an H200 for 120 shapes."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels.reduction import ceil_div

__all__ = ["flash_splits", "install"]


def install(torch: Any, rules: Any) -> None:
    """Follow cuDNN's, the memory-efficient and the flash kernels."""
    aten = torch.ops.aten
    rules.emit[aten._scaled_dot_product_cudnn_attention.default] = _cudnn
    rules.after[aten._scaled_dot_product_cudnn_attention_backward.default] = _cudnn_backward
    rules.emit[aten._scaled_dot_product_efficient_attention.default] = _efficient
    rules.emit[aten._scaled_dot_product_efficient_attention_backward.default] = _efficient_backward
    rules.emit[aten._scaled_dot_product_flash_attention.default] = _flash
    rules.after[aten._scaled_dot_product_flash_attention_backward.default] = _flash_backward


def _cudnn(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Seed and offset of the random numbers come first; the row sums only where a gradient needs them; one query splits its keys."""
    recorder.record.used.add("cudnn")
    query, key, keep = args[0], args[1], args[4]
    op = func._schema.name
    recorder.note(func, (out[6], out[7], out[0], out[1]) if keep else (out[6], out[7], out[0]))
    batch, heads, rows, width = query.shape
    if rows > 1:
        recorder.temporary(256, op)
        return
    splits = 2 * _pow2(recorder.rules.gpu.sms // max(1, batch * key.shape[1])) if key.shape[2] > 512 else 1
    splits = min(splits, _pow2(key.shape[2] // 128))
    if splits > 1:
        recorder.temporary(splits * batch * heads * (width + 2) * 4 + 128, op)


def _pow2(n: int) -> int:
    return 1 << (n.bit_length() - 1) if n > 0 else 0


def _cudnn_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """fp32 gradient of the queries and the row sums; with grouped heads gradients of every head's keys and values."""
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    size = 4 * batch * heads * rows * width + 4 * batch * heads * rows + 256
    if key.shape[1] != heads:
        size += 2 * batch * heads * key.shape[2] * width * query.element_size()
    recorder.temporary(size, func._schema.name)


def _efficient(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Seed and offset lie on the CPU; heads wider than 128 add up in fp32."""
    recorder.note(func, (out[0], out[1]))
    value = args[2]
    if value.shape[-1] > 128 and out[0].element_size() < 4:
        recorder.temporary(4 * out[0].numel(), func._schema.name)


def _efficient_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Row sums of out · grad, in fp32 made from their product, and accumulators of the gradients."""
    recorder.note(func, out)
    op = func._schema.name
    query, key, value = args[1], args[2], args[3]
    batch, heads, rows, width = query.shape
    sums = 4 * batch * heads * rows
    if query.element_size() == 4:
        product = recorder.begin(4 * batch * heads * rows * value.shape[3], op, "workspace", "operator")
        first = recorder.begin(sums, op, "workspace", "operator")
        delta = first
        if heads > 1 and rows > 1:  # put into another order
            delta = recorder.begin(sums, op, "workspace", "operator")
            recorder.end(first)
        recorder.end(product)
    else:
        delta = recorder.begin(sums, op, "workspace", "operator")
    if width <= 128:
        columns = 64 if width <= 64 else 128
        each = ceil_div(rows, 64) * ceil_div(width, columns) * (16 + 64 * columns * 4)
    else:
        each = ceil_div(rows, 128) * ceil_div(width, 64) * (16 + 128 * 64 * 4)
        if query.element_size() < 4:
            keys = ceil_div(key.shape[2], 128) * 128
            each += 4 * keys * (ceil_div(width, 64) + ceil_div(value.shape[3], 64)) * 64
    space = recorder.begin(batch * heads * each, op, "workspace", "operator")
    recorder.end(delta)
    recorder.end(space)


def flash_splits(blocks: int, sms: int, columns: int) -> int:
    """In how many pieces flash attention cuts its keys so that all multiprocessors work (``num_splits_heuristic`` in flash_api.cpp)."""
    if blocks >= 0.8 * sms:
        return 1
    most = min(128, sms, columns)
    found: list[float] = []
    for splits in range(1, most + 1):
        if splits > 1 and ceil_div(columns, splits) == ceil_div(columns, splits - 1):
            found.append(0.0)
            continue
        waves = blocks * splits / sms
        found.append(waves / ceil_div(blocks * splits, sms))
    best = max(found, default=0.0)
    return next((i + 1 for i, good in enumerate(found) if good >= 0.85 * best and good > 0), 1)


def _flash(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Output and row sums; partial ones where keys are split; seed and offset last."""
    op = func._schema.name
    query, key = args[0], args[1]
    dropout = args[3] if len(args) > 3 else 0.0
    batch, heads, rows, width = query.shape
    groups = key.shape[1]
    if rows == 1 and heads > groups and not dropout:  # queries of one group become rows
        rows, heads = heads // groups, groups
    recorder.note(func, (out[0], out[1]))
    held = []
    if not dropout:
        block = 256 if width <= 64 else 128 if width <= 128 else 64
        splits = flash_splits(batch * heads * ceil_div(rows, 64), 2 * recorder.rules.gpu.sms, ceil_div(key.shape[2], block))
        if splits > 1:
            rounded = ceil_div(width, 32 if width <= 128 else 64) * (32 if width <= 128 else 64)
            held = [recorder.begin(4 * splits * batch * heads * rows * each, op, "workspace", "operator") for each in (1, rounded)]
    recorder.note(func, (out[6], out[7]))
    for index in held:
        recorder.end(index)


def _flash_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """Row sums and the fp32 gradient of the queries; with grouped heads gradients of every head's keys and values."""
    op = func._schema.name
    query, key = args[1], args[2]
    batch, heads, rows, width = query.shape
    padded = ceil_div(rows, 128) * 128
    rounded = ceil_div(width, 32 if width <= 128 else 64) * (32 if width <= 128 else 64)
    held = [recorder.begin(4 * batch * heads * padded, op, "workspace", "operator"), recorder.begin(4 * batch * heads * padded * rounded, op, "workspace", "operator")]
    if key.shape[1] != heads:
        held += [recorder.begin(batch * heads * key.shape[2] * width * query.element_size(), op, "workspace", "operator") for _ in range(2)]
    for index in held:
        recorder.end(index)
