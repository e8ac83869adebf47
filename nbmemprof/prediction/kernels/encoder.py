"""The fast paths of ``TransformerEncoder`` and ``MultiheadAttention`` in inference: one native operator that calls the kernels one after the other."""

from __future__ import annotations

from typing import Any

__all__ = ["install", "nested"]


def install(torch: Any, rules: Any) -> None:
    """Answer both operators with the calls that their C++ makes (exact on an H200 without a mask)."""
    aten = torch.ops.aten
    rules.before[aten._transformer_encoder_layer_fwd.default] = _layer
    rules.before[aten._native_multi_head_attention.default] = _attention_only


def _heads(torch: Any, query: Any, heads: int, weight: Any, bias: Any, out_weight: Any, out_bias: Any, mask: Any) -> Any:
    """Self-attention: one product for queries, keys and values, the kernel, the projection."""
    functional = torch.nn.functional
    batch, rows, width = query.shape
    together = functional.linear(query, weight, bias)
    parts = together.view(batch, rows, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    if mask is not None and mask.dim() == 2:
        mask = mask.logical_not()[:, None, None, :] if mask.shape[0] == batch and mask.shape[1] == rows and batch != rows else mask
    mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], attn_mask=mask)
    del parts, together
    merged = mixed.transpose(1, 2).reshape(batch, rows, width)
    del mixed
    return functional.linear(merged, out_weight, out_bias)


def _layer(recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
    names = (
        "src", "embed_dim", "num_heads", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "use_gelu", "norm_first", "eps", "norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2",
        "ffn_weight_1", "ffn_bias_1", "ffn_weight_2", "ffn_bias_2", "mask", "mask_type",
    )  # fmt: skip
    given: dict[str, Any] = dict.fromkeys(names) | dict(zip(names, args, strict=False)) | kwargs
    torch = recorder.rules.torch
    functional = torch.nn.functional
    x, width = given["src"], given["embed_dim"]

    def norm(value: Any, which: int) -> Any:
        return functional.layer_norm(value, (width,), given[f"norm_weight_{which}"], given[f"norm_bias_{which}"], given["eps"])

    with recorder:
        first = given["norm_first"]
        inner = norm(x, 1) if first else x
        mixed = _heads(torch, inner, given["num_heads"], given["qkv_weight"], given["qkv_bias"], given["proj_weight"], given["proj_bias"], given["mask"])
        del inner
        mixed.add_(x)
        middle = mixed if first else norm(mixed, 1)
        del mixed
        inner = norm(middle, 2) if first else middle
        wide = functional.linear(inner, given["ffn_weight_1"], given["ffn_bias_1"])
        if not given["use_gelu"]:
            wide.relu_()
        out = functional.linear(wide, given["ffn_weight_2"], given["ffn_bias_2"])
        del wide, inner
        out.add_(middle)
        del middle
        return out if first else norm(out, 2)


def _attention_only(recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
    names = ("query", "key", "value", "embed_dim", "num_head", "qkv_weight", "qkv_bias", "proj_weight", "proj_bias", "mask", "need_weights", "average_attn_weights", "mask_type")
    given: dict[str, Any] = dict.fromkeys(names) | {"need_weights": True, "average_attn_weights": True} | dict(zip(names, args, strict=False)) | kwargs
    torch, query = recorder.rules.torch, given["query"]
    with recorder:
        if given["need_weights"]:
            batch, rows = query.shape[0], query.shape[1]
            weights = query.new_empty((batch, rows, rows) if given["average_attn_weights"] else (batch, given["num_head"], rows, rows))
            every = query.new_empty((batch, given["num_head"], rows, rows))
            del every
        else:
            weights = query.new_empty(0)
        out = _heads(torch, query, given["num_head"], given["qkv_weight"], given["qkv_bias"], given["proj_weight"], given["proj_bias"], given["mask"])
        return out, weights


def nested(torch: Any, changes: Any, record: Any, shadows: Any) -> None:
    """Stand in for a nested tensor, which fakes can't be: all tokens that the mask leaves, as one row. Kernels ask for the same sizes."""

    def from_mask(source: Any, mask: Any, *_: Any, **__: Any) -> Any:
        known = shadows.of(mask)
        batch, rows, width = source.shape
        tokens = batch * rows
        if known is not None:
            with shadows._outside():
                tokens = int(known.sum())
        record.assume("nested tensors were taken as one row of all their tokens")
        return source.new_empty((1, tokens, width))

    def padded(self: Any, padding: float, output_size: Any = None) -> Any:
        del padding
        return self.new_zeros(tuple(output_size)) if output_size is not None else self

    changes.put(torch, "_nested_tensor_from_mask_left_aligned", lambda *_args: True)
    changes.put(torch, "_nested_tensor_from_mask", from_mask)
    changes.put(torch.Tensor, "to_padded_tensor", padded)
