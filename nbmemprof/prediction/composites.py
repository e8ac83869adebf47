"""Operators whose C++ composite code would choose differently for a fake: what the dispatcher is given in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from nbmemprof.prediction import attention
from nbmemprof.prediction.kernels import normalization, recurrent

__all__ = ["registered"]


@contextlib.contextmanager
def registered(torch: Any, rules: Any, record: Any) -> Iterator[None]:
    """Register the kernels for CUDA while the block runs."""
    library = torch.library.Library("aten", "IMPL")

    def sdpa(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False, *, scale: Any = None, enable_gqa: bool = False) -> Any:
        return attention.run(torch, rules.gpu, rules.version, record, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)

    aten_linear = torch.ops.aten.linear.default

    def linear(source: Any, weight: Any, bias: Any = None) -> Any:
        if bias is None or source.dim() < 3 or source.is_contiguous():
            return aten_linear.decompose(source, weight, bias)
        return torch.matmul(source, weight.t()).add_(bias)  # for fakes C++ would add out of place

    def one_hot(source: Any, num_classes: int = -1) -> Any:
        if num_classes < 0:
            num_classes = int(source.max().item()) + 1
        return torch.zeros((*source.shape, num_classes), dtype=source.dtype, device=source.device).scatter_(-1, source.unsqueeze(-1), 1)

    def pack_backward(grad: Any, input_size: Any, _batch_sizes: Any, batch_first: bool) -> Any:
        size = [int(n) for n in input_size]
        if batch_first:
            return grad.new_zeros((size[1], size[0], *size[2:])).transpose(0, 1)
        return grad.new_zeros(size)

    def ctc(probabilities: Any, targets: Any, inputs: Any, lengths: Any, blank: int = 0, reduction: int = 1, zero_infinity: bool = False) -> Any:
        """``ctc_loss`` of aten/src/ATen/native/LossCTC.cpp; for fakes C++ would look into the lengths' memory."""
        known = [[int(n) for n in (value.flatten().tolist() if isinstance(value, torch.Tensor) else value)] for value in (inputs, lengths)]
        single = probabilities.dim() == 2
        given = probabilities.unsqueeze(1) if single else probabilities
        aten = torch.ops.aten
        if aten._use_cudnn_ctc_loss.default(given, targets, *known, blank):
            losses = aten._cudnn_ctc_loss.default(given, targets, *known, blank, torch.backends.cudnn.deterministic, zero_infinity)[0]
        else:
            losses = aten._ctc_loss.default(given, targets, *known, blank, zero_infinity)[0]
        if zero_infinity:
            losses = torch.where(losses == float("inf"), torch.zeros((), dtype=losses.dtype, device=losses.device), losses)
        if reduction == 1:
            return (losses / torch.tensor(known[1], dtype=losses.dtype, device=losses.device).clamp_min(1)).mean()
        losses = losses.sum() if reduction == 2 else losses
        return losses.squeeze(0) if single and reduction == 0 else losses

    def never(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError

    try:
        # these have a composite kernel beside their CUDA one and would fall apart where there is no CUDA kernel; the fake mode answers before this one is reached
        for name in ("silu_backward", "mish_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
            if hasattr(torch.ops.aten, name) and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                library.impl(name, never, "CUDA")
        library.impl("scaled_dot_product_attention", sdpa, "AutogradCUDA")
        library.impl("linear", linear, "AutogradCUDA")
        library.impl("one_hot", one_hot, "AutogradCUDA")
        if not torch._C._has_cudnn:
            batch_norm = normalization.by_backend(torch)
            library.impl("batch_norm", batch_norm, "AutogradCUDA")
            rules.before[torch.ops.aten.batch_norm.default] = _Again(batch_norm)
        library.impl("ctc_loss.Tensor", ctc, "AutogradCUDA")
        library.impl("ctc_loss.IntList", ctc, "AutogradCUDA")
        library.impl("_pack_padded_sequence_backward", pack_backward, "AutogradCUDA")
        for name, net in recurrent.composites(torch).items():
            library.impl(name, net, "AutogradCUDA")
            packet, _, overload = name.partition(".")
            rules.before[getattr(getattr(torch.ops.aten, packet), overload)] = _Again(net)
        rules.before[torch.ops.aten.scaled_dot_product_attention.default] = _Again(sdpa)  # inference mode skips the autograd keys
        yield
    finally:
        library._destroy()


class _Again:
    """Call the replacement where the dispatcher went past it."""

    def __init__(self, replacement: Any) -> None:
        self.replacement = replacement

    def __call__(self, recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
        with recorder:
            return self.replacement(*args, **kwargs)
