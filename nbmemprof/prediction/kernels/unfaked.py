"""Operators of CUDA alone, which fakes have no kernel for: CTC losses, GRU cells, masks of sparse tensors."""

from __future__ import annotations

from typing import Any

__all__ = ["install"]

_MANY = 450  # above it the gradient is collected by one block for each step (LossCTC.cu)
_CUDNN_MAX = 256  # lengths that cuDNN's CTC takes (aten/src/ATen/native/cudnn/LossCTC.cpp)


def install(torch: Any, rules: Any) -> None:
    """Answer them."""
    aten = torch.ops.aten
    for overload in ("default", "Tensor"):
        rules.before[getattr(aten._use_cudnn_ctc_loss, overload)] = _use_cudnn
        rules.before[getattr(aten._ctc_loss, overload)] = _ctc
        rules.before[getattr(aten._ctc_loss_backward, overload)] = _ctc_backward
        rules.before[getattr(aten._cudnn_ctc_loss, overload)] = _cudnn_ctc
        if hasattr(aten, "_use_miopen_ctc_loss"):
            rules.before[getattr(aten._use_miopen_ctc_loss, overload)] = lambda *_: False
    rules.before[aten._thnn_fused_gru_cell.default] = _gru_cell
    rules.before[aten._thnn_fused_gru_cell_backward.default] = _gru_cell_backward
    rules.before[aten.sparse_mask.default] = _sparse_mask
    rules.before[aten.linalg_lstsq.default] = _least_squares


# ---------------------------------------------------------------------- CTC
def _lengths(recorder: Any, value: Any, most: int) -> list[int]:
    if not hasattr(value, "shape"):
        return [int(n) for n in value]
    known = recorder.shadows.of(value)
    if known is None:
        recorder.record.assume("unknown lengths of sequences were taken as the longest")
        return [most] * value.numel()
    with recorder.shadows._outside():
        return [int(n) for n in known.flatten().tolist()]


def _use_cudnn(recorder: Any, func: Any, args: Any, _kwargs: Any) -> bool:
    """CuDNN takes floats, labels as int32 in one row, blank 0, and short labels; lists of lengths only with labels on the CPU and full inputs."""
    torch = recorder.rules.torch
    probabilities, targets, inputs, lengths, blank = args
    if blank or targets.dim() != 1 or probabilities.dtype != torch.float32 or targets.dtype != torch.int32 or probabilities.device.type != "cuda" or probabilities.dim() != 3:
        return False
    if func._overloadname == "Tensor":
        if inputs.dtype != torch.int32 or lengths.dtype != torch.int32:
            return False
    elif targets.device.type != "cpu":
        return False
    steps = probabilities.shape[0]
    known, wanted = _lengths(recorder, inputs, steps), _lengths(recorder, lengths, targets.numel() // max(1, probabilities.shape[1]))
    if func._overloadname != "Tensor" and any(n != steps for n in known):
        return False
    return all(n < _CUDNN_MAX and n <= most for n, most in zip(wanted, known, strict=False))


def _longest(recorder: Any, targets: Any, lengths: Any) -> int:
    if targets.dim() > 1:
        return int(targets.shape[1])
    return max(_lengths(recorder, lengths, targets.numel()), default=0)


def _numbers(recorder: Any, batch: int, op: str) -> list[int]:
    """Lengths and offsets, 8 bytes each, on the device."""
    return [recorder.begin(8 * batch, op, "workspace", "operator") for _ in range(3)]


def _ctc(recorder: Any, func: Any, args: Any, _kwargs: Any) -> Any:
    """Probabilities of all beginnings for each step (aten/src/ATen/native/cuda/LossCTC.cu)."""
    probabilities, targets, _inputs, lengths = args[:4]
    if probabilities.device.type != "cuda":
        return NotImplemented
    steps, batch = probabilities.shape[:2]
    op = func._schema.name
    held = _numbers(recorder, batch, op)
    with recorder:
        alpha = probabilities.new_empty((batch, steps, 2 * _longest(recorder, targets, lengths) + 1))
        losses = probabilities.new_empty((batch,))
    for index in reversed(held):
        recorder.end(index)
    return losses, alpha


def _ctc_backward(recorder: Any, func: Any, args: Any, _kwargs: Any) -> Any:
    """The same of all ends, and the gradient."""
    probabilities, alpha = args[1], args[6]
    if probabilities.device.type != "cuda":
        return NotImplemented
    torch, op = recorder.rules.torch, func._schema.name
    held = _numbers(recorder, probabilities.shape[1], op)
    with recorder:
        beta = torch.empty_like(alpha)
        grad = torch.empty_like(probabilities, memory_format=torch.contiguous_format)
    steps, batch, labels = probabilities.shape
    if 2 * steps + 24 * batch // 10 + 2 * labels // 10 > _MANY:  # summed up a step at a time, in other tensors
        element = probabilities.element_size()
        each, row = element * batch * steps * ((alpha.shape[2] + 1) // 2), element * batch * steps
        held += [recorder.begin(nbytes, op, "temporary", "operator") for nbytes in (each, row, each, row)]
    del beta
    for index in reversed(held):
        recorder.end(index)
    return grad


def _cudnn_ctc(recorder: Any, func: Any, args: Any, _kwargs: Any) -> Any:
    """The gradient is made at once; the workspace is only bounded."""
    probabilities, targets, _inputs, lengths = args[:4]
    steps, batch = probabilities.shape[:2]
    op, torch = func._schema.name, recorder.rules.torch
    recorder.record.used.add("cudnn")
    with recorder:
        grad = torch.empty_like(probabilities, memory_format=torch.contiguous_format)
    size = 4 * steps * batch * (2 * _longest(recorder, targets, lengths) + 1)
    recorder.ranged(size, 0, 4 * size + grad.numel() * 8, op)
    with recorder:
        losses = probabilities.new_empty((batch,))
    return losses, grad


# ---------------------------------------------------------------------- cells
def _gru_cell(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """A workspace of five values a unit is kept for backward (aten/src/ATen/native/cuda/RNN.cu)."""
    hidden = args[2]
    with recorder:
        kept = hidden.new_empty((hidden.shape[0], 5 * hidden.shape[1]))
        return recorder.rules.torch.empty_like(hidden), kept


def _gru_cell_backward(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    grad, kept, has_bias = args
    batch, hidden = kept.shape[0], kept.shape[1] // 5
    with recorder:
        inputs, hiddens = kept.new_empty((batch, 3 * hidden)), kept.new_empty((batch, 3 * hidden))
        before = recorder.rules.torch.empty_like(grad)
        biases = (inputs.sum(0), hiddens.sum(0)) if has_bias else (None, None)
        return inputs, hiddens, before, *biases


# ---------------------------------------------------------------------- least squares
def _least_squares(recorder: Any, func: Any, args: Any, _kwargs: Any) -> Any:
    """The solution and the residuals; both matrices are copied, and the first one is decomposed."""
    matrix, other = args[:2]
    if matrix.device.type != "cuda":
        return NotImplemented
    op = func._schema.name
    recorder.record.used.add("solver")
    rows, columns = matrix.shape[-2:]
    vector = other.dim() == 1 or (matrix.dim() - 1 == other.dim() and matrix.shape[:-1] == other.shape)
    count = 1 if vector else other.shape[-1]
    with recorder:
        solution = matrix.new_empty((*matrix.shape[:-2], columns) if vector else (*matrix.shape[:-2], columns, count))
        residuals = matrix.new_empty((*matrix.shape[:-2], count) if rows > columns else (0,))
        rank, values = recorder.rules.torch.empty((0,), dtype=recorder.rules.torch.int64, device=matrix.device), matrix.new_empty((0,))
    held = [recorder.begin(t.numel() * t.element_size(), op, "temporary", "operator") for t in (matrix, other)]
    recorder.ranged(3 << 20, 0, 12 << 20, op)
    for index in reversed(held):
        recorder.end(index)
    return solution, residuals, rank, values


# ---------------------------------------------------------------------- sparse
def _sparse_mask(recorder: Any, _func: Any, args: Any, _kwargs: Any) -> Any:
    """The elements of a dense tensor at the places of a sparse one."""
    dense, mask = args
    torch = recorder.rules.torch
    if dense.layout is not torch.strided or mask.layout is not torch.sparse_coo:
        return NotImplemented
    with recorder:
        places, values = mask._indices(), mask._values()
        return torch.sparse_coo_tensor(places, torch.empty_like(values), mask.shape, is_coalesced=mask.is_coalesced())
