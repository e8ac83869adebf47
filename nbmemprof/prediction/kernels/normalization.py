"""Normalisations: statistics and partial sums that their kernels keep for a moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nbmemprof.prediction.kernels.reduction import ceil_div, last_pow2

__all__ = ["by_backend", "install"]


def install(torch: Any, rules: Any) -> None:
    """Follow them."""
    aten = torch.ops.aten
    rules.emit[aten.native_batch_norm.default] = _batch_norm
    rules.emit[aten.cudnn_batch_norm.default] = _batch_norm
    rules.emit[aten.native_batch_norm_backward.default] = _batch_norm_backward
    rules.emit[aten.cudnn_batch_norm_backward.default] = _batch_norm_backward
    rules.after[aten.native_group_norm.default] = _group_norm
    rules.after[aten.native_group_norm_backward.default] = _group_norm_backward


def by_backend(torch: Any) -> Callable[..., Any]:
    """``batch_norm`` as a wheel for CUDA chooses (``_select_batch_norm_backend`` in aten/src/ATen/native/Normalization.cpp): one for the CPU knows no cuDNN."""
    aten = torch.ops.aten

    def batch_norm(x: Any, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, enabled: bool) -> Any:
        whole = weight is not None and bias is not None and ((mean is None) == (var is None)) and (mean is not None or training)
        if enabled and whole and x.dim() >= 3 and x.shape[0] <= (880801 if training else 65535) and _by_cudnn(torch, x, weight):
            x = x.contiguous(memory_format=torch._prims_common.suggest_memory_format(x))
            return aten.cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps)[0]
        return aten.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)[0]

    return batch_norm


def _last(torch: Any, x: Any) -> bool:
    return x.dim() in (4, 5) and not x.is_contiguous() and torch._prims_common.suggest_memory_format(x) in (torch.channels_last, torch.channels_last_3d)


def _rows(x: Any) -> int:
    return int(x.numel() // max(1, x.shape[1]))


def _blocks(rows: int, channels: int) -> tuple[int, int]:
    """Blocks along channels and rows of torch's channels-last batch norm (``flexible_launch_configs`` in Normalization.cuh)."""
    across = min(last_pow2(channels), 32)
    down = min(last_pow2(ceil_div(rows, 16)), 512 // across)
    if across * down != 512:
        across = min(last_pow2(channels), 512 // down)
    grid = min(ceil_div(rows, down * 16), 128)
    return ceil_div(channels, across), 1 if grid < 8 else grid


def _partial_sums(recorder: Any, x: Any, each: int, op: str) -> None:
    columns, grid = _blocks(_rows(x), x.shape[1])
    if grid > 1:
        held = recorder.begin(4 * each * x.shape[1] * grid, op, "workspace", "operator")
        recorder.temporary(4 * columns, op)
        recorder.end(held)


def _by_cudnn(torch: Any, x: Any, w: Any) -> bool:
    """CuDNN takes channels last in fp32 and fp16."""
    return w is not None and w.dtype == torch.float32 and x.dtype in (torch.float32, torch.float16)


def _batch_norm(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Statistics are kept in training only; channels last sums them up in parts."""
    x, w, training = args[0], args[1], args[5]
    torch, op = recorder.rules.torch, func._schema.name
    recorder.note(func, out if training else out[0])
    if not training or x.device.type != "cuda" or not _last(torch, x):
        return
    if _by_cudnn(torch, x, w):
        recorder.record.used.add("cudnn")
        recorder.temporary(_rows(x) * max(64, x.shape[1]) // 8 + 2700, op)  # measured: a bit an element and 2.6 KB
    else:
        _partial_sums(recorder, x, 4, op)


def _batch_norm_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Channels last: sums over rows first, the input's gradient after them."""
    cudnn = func._schema.name == "aten::cudnn_batch_norm_backward"
    x, w = (args[0], args[2]) if cudnn else (args[1], args[2])
    torch, op = recorder.rules.torch, func._schema.name
    if x.device.type != "cuda" or not _last(torch, x):
        recorder.note(func, out)
        return
    if _by_cudnn(torch, x, w):
        recorder.note(func, out)
        recorder.temporary(_rows(x) * max(64, x.shape[1]) // 12 + 1500, op)
        return
    held = [recorder.begin(4 * x.shape[1], op, "workspace", "operator") for _ in range(2)]
    recorder.note(func, (out[1], out[2]))
    _partial_sums(recorder, x, 2, op)
    recorder.note(func, out[0])
    for index in held:
        recorder.end(index)


def _group_norm(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """A scale and a shift for each sample and channel."""
    batch, channels = int(args[3]), int(args[4])
    first = recorder.begin(4 * batch * channels, func._schema.name, "workspace", "operator")
    recorder.temporary(4 * batch * channels, func._schema.name)
    recorder.end(first)


def _group_norm_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """Sums over each sample and channel, and over each group."""
    op = func._schema.name
    batch, channels, groups = int(args[5]), int(args[6]), int(args[8])
    sizes = [4 * batch * channels, 4 * batch * channels, 4 * batch * groups, 4 * batch * groups, 4 * batch * channels]
    held = [recorder.begin(size, op, "workspace", "operator") for size in sizes]
    for index in (held[2], held[3], held[4], held[1], held[0]):
        recorder.end(index)
