"""A model's memory by formula, from its Hugging Face config: a first number, and the explanation of a predicted one.

Formulas of what eager PyTorch keeps, each derived from the operators that save it (they give the coefficients that fake runs and an H200
gave: 114.1 bytes a token, unit of width and layer for GPT-2 in fp32, 53.1 and 49.0 for Llama 1B and 8B in bf16, 2.0 checkpointed); for other code
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022): ``34·s·b·h + 5·a·s²·b`` in 16 bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction.catalogue import GPU, find
from nbmemprof.prediction.shapes import Shape, shape_of

__all__ = ["OPTIMIZERS", "QUANTIZED", "Setting", "kv_cache_bytes", "model_table", "total_bytes"]

_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "autocast": 4, "fp8": 1, "int8": 1}
# state tensors by torch's names, and the temporaries of step() as a fraction of all trainable bytes (H200, torch 2.11: 46 settings measured)
OPTIMIZERS: dict[str, tuple[tuple[str, ...], float]] = {
    "sgd": ((), 0.0), "sgd_momentum": (("momentum_buffer",), 0.0), "adam": (("exp_avg", "exp_avg_sq"), 1.0), "adamw": (("exp_avg", "exp_avg_sq"), 1.0),
    "adamw_fused": (("exp_avg", "exp_avg_sq"), 0.0), "amsgrad": (("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), 1.0), "rmsprop": (("square_avg",), 1.0), "adagrad": (("sum",), 2.0),
    "adadelta": (("square_avg", "acc_delta"), 2.0), "adamax": (("exp_avg", "exp_inf"), 1.0), "nadam": (("exp_avg", "exp_avg_sq"), 1.0), "radam": (("exp_avg", "exp_avg_sq"), 1.0),
    "none": ((), 0.0),
}  # fmt: skip
# bytes of a weight in the layers' matrices, its scales included: int8 one scale a row (left out), 4 bits one fp32 scale for 64 weights
QUANTIZED = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 64, "nf4": 0.5 + 4 / 64}


@dataclass(frozen=True)
class Setting:
    """How a model is used.

    Attributes
    ----------
    batch, seq
        Sequences and tokens of each.
    dtype
        ``fp32 bf16 fp16``, or ``autocast``: fp32 weights, bf16 copies and activations.
    optimizer
        A key of :data:`OPTIMIZERS`; ``none`` for inference.
    checkpointing
        Whether each layer is recomputed in backward.
    attention
        ``fused`` (flash, memory-efficient, cuDNN) or ``eager``, which keeps scores.
    quantize
        Of the frozen matrices: a key of :data:`QUANTIZED`.
    tp, fsdp
        Ranks of tensor parallelism and of fully sharded data parallelism.
    tokens, block
        Tokens in the KV cache of inference (None: ``seq``), and tokens of a page; None: one piece.
    """

    batch: int = 1
    seq: int = 1024
    dtype: str = "bf16"
    optimizer: str = "adamw"
    checkpointing: bool = False
    attention: str = "fused"
    quantize: str | None = None
    tp: int = 1
    fsdp: int = 1
    tokens: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _BYTES:
            raise NbmemprofError(f"dtype={self.dtype!r} is not known here. It is one of: {', '.join(_BYTES)}.")
        if self.optimizer not in OPTIMIZERS:
            raise NbmemprofError(f"optimizer={self.optimizer!r} is not known here. It is one of: {', '.join(OPTIMIZERS)}.")
        if self.quantize is not None and self.quantize not in QUANTIZED:
            raise NbmemprofError(
                f"quantize={self.quantize!r} is not known here. It is one of: {', '.join(QUANTIZED)}; pruning single weights is none of them, since zeros take as much room as other numbers."
            )
        for name in ("batch", "seq", "tp", "fsdp"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise NbmemprofError(f"{name}={getattr(self, name)!r} is not a whole number of 1 or more.")

    @property
    def weight_bytes(self) -> int:
        """Of a weight."""
        return _BYTES[self.dtype]

    @property
    def activation_bytes(self) -> int:
        """Of what a layer puts out."""
        return 2 if self.dtype == "autocast" else _BYTES[self.dtype]


# ---------------------------------------------------------------------- KV cache
def kv_cache_bytes(config: Any, tokens: int, batch: int = 1, *, dtype: str = "bf16", block: int | None = None) -> int:
    """How large is the KV cache?

    ``2 · layers · kv_heads · head_dim · bytes`` a token; DeepSeek's latent attention keeps ``kv_lora_rank + rope_head_dim`` numbers a
    layer instead; layers with a sliding window keep no more tokens than it has; ``block``: tokens of a page (vLLM: 16), of which the last is paid whole.
    """
    shape = config if isinstance(config, Shape) else shape_of(config)
    each = _kv_of_layer(shape, _BYTES[dtype])
    near = min(tokens, shape.window) if shape.window else tokens
    held = [_paged(near, block)] * shape.window_layers + [_paged(tokens, block)] * (shape.layers - shape.window_layers)
    return each * sum(held) * batch


def _kv_of_layer(shape: Shape, size: int) -> int:
    return size * (shape.latent.kv_rank + shape.latent.rope if shape.latent is not None else 2 * shape.kv_heads * shape.head_dim)


def _paged(tokens: int, block: int | None) -> int:
    return tokens if block is None else -(-tokens // block) * block


# ---------------------------------------------------------------------- activations
def _layer_bytes(shape: Shape, s: Setting) -> tuple[float, str]:
    """What autograd keeps of one layer, and the formula in words."""
    b, t, h, w = s.batch, s.seq, shape.hidden, s.activation_bytes
    unit = b * t * h
    if s.checkpointing:
        return w * unit, f"{w}·s·b·h: its input, the rest is recomputed"
    scores = shape.heads * t * t * b
    if shape.kind == "gpt2" and s.dtype == "fp32":
        width = shape.inter / h
        kept = (
            4 + 4 + 12 + 4 + 1 + 4 + 4 + 1 + 5 * 4 * width
        )  # norms, q k v, attention's output, dropout masks, tanh-GELU written in Python keeps four, the MLP's output layer its input
        return kept * unit + (
            9 * scores if s.attention == "eager" else 4 * scores / t
        ), f"{kept:g}·s·b·h + {'9·a·s²·b' if s.attention == 'eager' else '4·a·s·b'}"
    if shape.gated:
        kv = shape.kv_heads / shape.heads if shape.latent is None else 1.0
        q = shape.heads * shape.head_dim / h if shape.latent is None else shape.heads * (shape.latent.nope + shape.latent.rope) / h
        wide = (shape.active_experts + shape.shared_experts) * shape.expert_inter if shape.experts else shape.inter
        kept = 2 * (4 + 2 * w) + w * q * (2 + 2 * kv) + 4 * w * wide / h  # two norms in fp32 with both their outputs; q, k, v, output; SwiGLU's four
        return kept * unit + (
            (2 * w + 1) * scores if s.attention == "eager" else 4 * scores / t
        ), f"{kept:.1f}·s·b·h + {'(2w+1)·a·s²·b' if s.attention == 'eager' else '4·a·s·b'}"
    textbook = 34 * w / 2
    return textbook * unit + (
        5 * w / 2 * scores if s.attention == "eager" else 4 * scores / t
    ), f"{textbook:g}·s·b·h (textbook) + {'5·a·s²·b' if s.attention == 'eager' else '4·a·s·b'}"


def _kept_share(s: Setting) -> float:
    """Of a layer's activations on one rank of tensor parallelism without sequence parallelism: ``(10 + 24/t) / 34``."""
    return (10 + 24 / s.tp) / 34


# ---------------------------------------------------------------------- the table
def model_table(config: Any, *, device: str | GPU = "H200", trainable: float = 1.0, **setting: Any) -> pl.DataFrame:
    """What does this model take, part by part?

    Parameters
    ----------
    config
        A Hugging Face config (object, dict, ``config.json``); nothing is built or run.
    device
        For the size of cuBLAS workspaces.
    trainable
        Share of the parameters that are trained; the others have no gradient and no state.
    setting
        As :class:`Setting`: ``batch seq dtype optimizer checkpointing attention quantize tp fsdp tokens block``.

    Returns
    -------
    One row a part: ``part component layer size_bytes count at_peak formula origin`` (``modelled``): weights, gradients, each moment of the optimizer by name, activations by
    layer, logits, workspaces, KV cache. ``at_peak``: whether it takes part in the highest moment, which is either in backward or in the optimizer's step;
    the sum of those rows is :func:`total_bytes`. A rank's own share where ``tp`` or ``fsdp`` is above 1.
    """
    shape, s = shape_of(config), Setting(**setting)
    rows = list(_training(shape, s, find(device), trainable) if s.optimizer != "none" else _inference(shape, s, find(device)))
    columns = {
        "part": pl.String,
        "component": pl.String,
        "layer": pl.Int64,
        "size_bytes": pl.Int64,
        "count": pl.Int64,
        "at_peak": pl.Boolean,
        "formula": pl.String,
    }
    return pl.DataFrame([(*row[:3], round(row[3]), *row[4:]) for row in rows], schema=columns, orient="row").with_columns(origin=pl.lit("modelled"))


def total_bytes(table: pl.DataFrame) -> int:
    """Highest sum of a :func:`model_table`."""
    return int(table.filter("at_peak")["size_bytes"].sum())


_Row = tuple[str, str, int | None, float, int, bool, str]


def _weights(shape: Shape, s: Setting) -> Iterator[_Row]:
    w, ranks = s.weight_bytes, s.tp * s.fsdp
    yield "weights", "embeddings", None, shape.embeddings * w / ranks, shape.embeddings, True, f"(V + positions)·h·{w}"
    inside, norms = shape.linear_parameters, 2 * shape.norm * shape.layers
    each = QUANTIZED[s.quantize] if s.quantize else w
    yield "weights", "matrices of the layers", None, inside * each / ranks, inside, True, f"{inside:,} parameters · {each:g}".replace(",", " ")
    yield "weights", "norms", None, norms * w / s.fsdp, norms, True, "2·h a layer"
    yield (
        "weights",
        "head",
        None,
        shape.head * w / ranks,
        shape.head,
        True,
        "tied to the embeddings: only the last norm" if shape.tied and shape.kind != "bert" else f"V·h·{w}",
    )
    if s.fsdp > 1:
        block = max(shape.attention + shape.mlp(i) for i in range(shape.layers))
        yield "weights", "gathered blocks", None, 2 * block * w / s.tp, 2 * block, True, "two blocks are whole at a time"
    if s.dtype == "autocast":
        yield "temporary", "bf16 copies of weights", None, inside * 2 / s.tp, inside, True, "autocast's cache, until its region ends"


def _training(shape: Shape, s: Setting, gpu: GPU, trainable: float) -> Iterator[_Row]:
    w, ranks = s.weight_bytes, s.tp * s.fsdp
    states, fraction = OPTIMIZERS[s.optimizer]
    trained = round(shape.parameters * trainable)
    size = (2 if s.quantize else w) * trained / ranks
    layers = [(_layer_bytes(shape, s)) for _ in range(shape.layers)]
    share = _kept_share(s)
    kept = sum(size_ for size_, _ in layers) * share
    logits = list(_logits(shape, s))
    replay = _layer_bytes(shape, replace(s, checkpointing=False))[0] * share if s.checkpointing else 0.0
    # the highest moment: backward begins (no gradient is there yet), its last layer is recomputed (all are), or the optimizer steps
    moments = {"loss": kept + sum(made for _, made, _ in logits) / s.tp, "recompute": replay + size if replay else 0.0, "step": (1 + fraction) * size}
    peak = max(moments, key=lambda name: moments[name])
    yield from _weights(shape, s)
    yield "gradients", "gradients", None, size, trained, peak != "loss", f"{w} bytes a trained parameter; none is there when backward begins"
    for name in states:
        yield "optimizer_state", name, None, size, trained, True, f"{s.optimizer}: {w} bytes a trained parameter"
    if fraction:
        yield "temporary", "optimizer's step", None, fraction * size, trained, peak == "step", f"{fraction:g} of the trained bytes, while step() runs"
    for i, (made, formula) in enumerate(layers):
        yield "activations", "layer", i, made * share, 1, peak == "loss", formula
    if replay:
        yield "activations", "recomputed layer", None, replay, 1, peak == "recompute", "one layer's activations while it is recomputed"
    for name, made, formula in logits:
        yield "activations", name, None, made / s.tp, 1, peak == "loss", formula
    yield "workspace", "cuBLAS", None, 2.0 * gpu.cublas_workspace_bytes, 2, True, "one for forward's thread, one for backward's"


def _logits(shape: Shape, s: Setting) -> Iterator[tuple[str, float, str]]:
    """What the loss of transformers makes of the logits, all alive as backward begins; the logits themselves are let go by then."""
    each = 4.0 * s.batch * s.seq * shape.vocab
    for name in ("log-softmax", "gradient of the loss", "gradient of the logits"):
        yield name, each, "4·s·b·V"


def _inference(shape: Shape, s: Setting, gpu: GPU) -> Iterator[_Row]:
    w = s.activation_bytes
    yield from _weights(shape, s)
    tokens = s.tokens or s.seq
    cache = kv_cache_bytes(shape, tokens, s.batch, dtype="bf16" if w == 2 else "fp32", block=s.block)
    each = kv_cache_bytes(shape, 1, dtype="bf16" if w == 2 else "fp32")
    yield (
        "kv_cache",
        "KV cache",
        None,
        cache / min(s.tp, shape.kv_heads),
        tokens * s.batch,
        True,
        f"{each} bytes a token{f', pages of {s.block}' if s.block else ''}{f', window {shape.window}' if shape.window else ''}",
    )
    wide = max(shape.inter, (shape.active_experts + shape.shared_experts) * shape.expert_inter)
    yield "activations", "widest layer of the prompt", None, 3 * s.batch * s.seq * wide * w / s.tp, 1, True, "3·b·s·i: gate, up and their product"
    yield "activations", "hidden states", None, s.batch * s.seq * shape.hidden * (2 * w + 4), 1, True, "b·s·h: the residual, its norm, and that in fp32"
    yield "activations", "logits of the last position", None, s.batch * shape.vocab * (w + 4) / s.tp, 1, True, "b·V, in fp32 too"
    yield "workspace", "cuBLAS", None, gpu.cublas_workspace_bytes, 1, True, "one handle"
