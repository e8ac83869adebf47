"""Which attention kernel a GPU and a torch take, as data; and the operator that makes the same choice in a fake run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbmemprof.prediction.catalogue import GPU

__all__ = ["TABLE", "Choice", "choose", "run"]


@dataclass(frozen=True)
class Choice:
    """Order in which torch tries the kernels for one generation of GPUs and one version of torch.

    Attributes
    ----------
    half, single
        Kernels tried for half precision (float16, bfloat16) and for float32, best first.
    flash_head_dim
        Largest head dimension of flash attention.
    cudnn_head_dim
        Largest head dimension of cuDNN's.
    source
        Where that is from.
    """

    half: tuple[str, ...]
    single: tuple[str, ...]
    flash_head_dim: int
    cudnn_head_dim: int
    source: str


_SOURCE = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"
TABLE: dict[tuple[str, str], Choice] = {
    ("hopper", "2.11"): Choice(("cudnn", "flash", "efficient", "math"), ("efficient", "math"), 256, 256, "measured: H200, torch 2.11.0+cu130"),
    ("hopper", "2.13"): Choice(("cudnn", "flash", "efficient", "math"), ("efficient", "math"), 256, 256, _SOURCE),
    ("blackwell", "2.11"): Choice(("cudnn", "flash", "efficient", "math"), ("efficient", "math"), 256, 256, _SOURCE),
    # cuDNN comes first on compute capability 9.0 and 10.x only; flash needs 8.0
    **{(name, "2.11"): Choice(("flash", "efficient", "math"), ("efficient", "math"), 256, 0, _SOURCE) for name in ("ampere", "ada", "blackwell-rtx")},
    ("turing", "2.11"): Choice(("efficient", "math"), ("efficient", "math"), 0, 0, _SOURCE),
}


def choose(torch: Any, gpu: GPU, version: str, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, gqa: bool) -> str:
    """Name the kernel: ``cudnn flash efficient math``."""
    table = TABLE.get((gpu.generation, version)) or TABLE.get((gpu.generation, "2.11")) or TABLE["hopper", "2.11"]
    half = query.dtype in (torch.float16, torch.bfloat16)
    for kernel in table.half if half else table.single:
        if _enabled(torch, kernel) and _fits(torch, table, kernel, query, key, value, mask, dropout, causal, gqa):
            return kernel
    return "math"


def _enabled(torch: Any, kernel: str) -> bool:
    asked = {"cudnn": "_get_cudnn_sdp_enabled", "flash": "_get_flash_sdp_enabled", "efficient": "_get_mem_efficient_sdp_enabled", "math": "_get_math_sdp_enabled"}[kernel]
    return bool(getattr(torch._C, asked)())


def _fits(torch: Any, table: Choice, kernel: str, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, gqa: bool) -> bool:
    if kernel == "math":
        return True
    if not (query.dim() == key.dim() == value.dim() == 4) or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return False
    if any(t.stride(-1) != 1 and t.shape[-1] != 1 for t in (query, key, value)) or 0 in (query.shape[2], key.shape[2], query.shape[0]):
        return False
    if mask is not None and mask.stride(-1) != 1 and mask.shape[-1] != 1:
        return False
    if not (query.shape[0] == key.shape[0] == value.shape[0]) or (not gqa and not query.shape[1] == key.shape[1] == value.shape[1]):
        return False  # none of them broadcasts (check_batch_size_and_num_heads_dense)
    width = max(query.shape[-1], value.shape[-1])
    grouped = gqa and query.shape[1] != key.shape[1]
    needs = torch.is_grad_enabled() and mask is not None and mask.requires_grad
    if kernel == "flash":
        return mask is None and width <= table.flash_head_dim and query.shape[-1] == value.shape[-1]
    if kernel == "efficient":  # rows of 16 bytes (minimum_gemm_alignment)
        step = 4 if query.dtype == torch.float32 else 8
        return not grouped and query.shape[1] == key.shape[1] == value.shape[1] and query.shape[-1] % step == 0 and value.shape[-1] % step == 0
    return not needs and query.shape[-1] % 8 == 0 and value.shape[-1] % 8 == 0 and width <= table.cudnn_head_dim


def run(torch: Any, gpu: GPU, version: str, record: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    """Do what ``scaled_dot_product_attention`` does in C++ after the choice (aten/src/ATen/native/transformers/attention.cpp)."""
    aten = torch.ops.aten
    kernel = choose(torch, gpu, version, query, key, value, mask, dropout, causal, gqa)
    record.kernels[kernel] = record.kernels.get(kernel, 0) + 1
    if mask is not None and mask.dtype == torch.bool:
        mask = _additive(torch, mask, query)
    if kernel == "math":
        return _math(torch, query, key, value, mask, dropout, causal, scale, gqa)
    lse = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention(query, key, value, mask, lse, dropout, causal, False, scale=scale)[0]
    if kernel == "flash":
        width = query.shape[-1]
        scale = scale if scale is not None else width**-0.5
        query, key, value = (_padded(torch, t, 8) for t in (query, key, value))
        out = aten._scaled_dot_product_flash_attention(query, key, value, dropout, causal, False, scale=scale)[0]
        return out if out.shape[-1] == width else out[..., :width]
    if mask is not None:
        size = mask.shape[-1]
        if size % 8 and size == key.shape[2]:
            mask = torch.nn.functional.pad(mask, (0, 8 - size % 8))[..., :size]
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, lse, dropout, causal, scale=scale)[0]


def _additive(torch: Any, mask: Any, query: Any) -> Any:
    """A mask of truth values as one that is added."""
    nothing = torch.zeros((), dtype=query.dtype, device=query.device)
    never = torch.full((), float("-inf"), dtype=query.dtype, device=query.device)
    return torch.where(mask, nothing, never)


def _math(torch: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float, causal: bool, scale: float | None, gqa: bool) -> Any:
    """``_scaled_dot_product_attention_math``, which adds the mask out of place for fakes only."""
    dtype = query.dtype
    wide, wide_key, wide_value = query, key, value
    if dtype in (torch.float16, torch.bfloat16) and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        wide, wide_key, wide_value = query.to(torch.float32), key.to(torch.float32), value.to(torch.float32)
    factor = abs(scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scaled = wide * (-factor if scale is not None and scale < 0 else factor)
    if causal:
        mask = torch.ones((query.shape[-2], key.shape[-2]), dtype=torch.bool, device=query.device).tril()
        mask = _additive(torch, mask, wide)
    every_key, every_value = wide_key, wide_value
    if gqa:
        every_key = wide_key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        every_value = wide_value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    scores = torch.matmul(scaled, every_key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = torch.ops.aten._safe_softmax(scores, -1)
    if dropout > 0.0:
        scores = torch.dropout(scores, dropout, train=True)
    if dtype == scores.dtype:
        return torch.matmul(scores, every_value)
    returned = scores.to(dtype)  # the scores are a result too
    out = torch.matmul(scores, every_value)
    out, scores = out.to(dtype), returned
    return out


def _padded(torch: Any, tensor: Any, to: int) -> Any:
    rest = tensor.shape[-1] % to
    return tensor if rest == 0 else torch.nn.functional.pad(tensor, (0, to - rest))
