"""What a Hugging Face config says of a model's shape, and how many parameters that makes, without building the model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbmemprof.errors import NbmemprofError

__all__ = ["Latent", "Shape", "shape_of"]


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek): ranks and head widths."""

    kv_rank: int
    rope: int
    nope: int
    value: int
    query_rank: int | None


@dataclass(frozen=True)
class Shape:
    """The numbers that memory hangs on.

    Attributes
    ----------
    layers, hidden, heads, kv_heads, head_dim, inter, vocab
        As usual; ``inter`` is the width of the MLP.
    gated
        Whether the MLP has three matrices (SwiGLU) or two.
    experts, active_experts, shared_experts, expert_inter, dense_layers
        Of a mixture; ``dense_layers`` come first and have a plain MLP. 0 experts: none.
    window
        Sliding window of attention in tokens on ``window_layers`` layers; None: none.
    """

    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    tied: bool
    gated: bool
    positions: int = 0
    types: int = 0
    norm_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    expert_inter: int = 0
    dense_layers: int = 0
    window: int | None = None
    window_layers: int = 0
    latent: Latent | None = None

    # ------------------------------------------------------------------ parameters
    @property
    def norm(self) -> int:
        """Of one normalization."""
        return self.hidden * (2 if self.norm_bias else 1)

    @property
    def attention(self) -> int:
        """Of one layer's attention, its normalization included."""
        h, d = self.hidden, self.head_dim
        if self.latent is not None:
            m = self.latent
            wide = self.heads * (m.nope + m.rope)
            query = h * wide if m.query_rank is None else h * m.query_rank + m.query_rank + m.query_rank * wide
            return query + h * (m.kv_rank + m.rope) + m.kv_rank + m.kv_rank * self.heads * (m.nope + m.value) + self.heads * m.value * h + self.norm
        q, kv = self.heads * d, self.kv_heads * d
        bias = (q + 2 * kv if self.qkv_bias else 0) + (h if self.out_bias else 0)
        return h * q + 2 * h * kv + q * h + bias + (2 * d if self.qk_norm else 0) + self.norm

    def mlp(self, layer: int) -> int:
        """Of one layer's MLP or experts, its normalization included."""
        h, matrices = self.hidden, 3 if self.gated else 2
        if self.experts and layer >= self.dense_layers:
            return matrices * h * self.expert_inter * (self.experts + self.shared_experts) + h * self.experts + self.norm
        bias = (self.inter * (matrices - 1) + h) if self.mlp_bias else 0
        return matrices * h * self.inter + bias + self.norm

    @property
    def embeddings(self) -> int:
        """Tokens, positions, token types, and their normalization where there is one (BERT)."""
        return (self.vocab + self.positions + self.types) * self.hidden + (self.norm if self.kind == "bert" else 0)

    @property
    def head(self) -> int:
        """The last normalization and the output matrix, where it is not the embedding's; BERT's transform and bias."""
        if self.kind == "bert":
            return self.hidden * self.hidden + self.hidden + self.norm + self.vocab
        return self.norm + (0 if self.tied else self.vocab * self.hidden)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.embeddings + self.head + sum(self.attention + self.mlp(i) for i in range(self.layers))

    @property
    def linear_parameters(self) -> int:
        """Those in matrices of the layers, which quantization takes."""
        norms = 2 * self.norm * self.layers
        return sum(self.attention + self.mlp(i) for i in range(self.layers)) - norms


def shape_of(config: Any) -> Shape:
    """Read a config: an object of transformers, a dict, or the path of a ``config.json`` or its folder.

    Raises
    ------
    NbmemprofError
        It lacks a number, which is named; or its kind of model has no closed form here.
    """
    known = _read(config)
    kind = str(known.get("model_type") or "")
    known = known.get("text_config") or known if "hidden_size" not in known and "n_embd" not in known else known
    if kind == "gpt2":
        return _gpt2(known)
    if kind == "bert":
        return _bert(known)
    if "hidden_size" in known and "num_attention_heads" in known and ("rms_norm_eps" in known):
        return _llama(kind, known)
    raise NbmemprofError(
        f"There is no closed form for model_type={kind!r}. Those with one: llama, mistral, qwen2, qwen3, mixtral, deepseek_v2/v3 and their like, gpt2, bert. Predict a step of it with mp.predict(...) instead."
    )


def _read(config: Any) -> dict[str, Any]:
    if isinstance(config, Mapping):
        return dict(config)
    if isinstance(config, (str, Path)):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise NbmemprofError(f"{str(config)!r} is no config.json and no folder with one. Give a config of transformers, a dict, or such a file.")
        return dict(json.loads(path.read_text()))
    if callable(getattr(config, "to_dict", None)):
        made: dict[str, Any] = config.to_dict()
        return made | {name: getattr(config, name) for name in ("head_dim", "num_key_value_heads") if getattr(config, name, None) is not None}
    raise NbmemprofError(f"{type(config).__name__} is not a config. Give a config of transformers, a dict, or the path of a config.json.")


def _number(known: dict[str, Any], name: str) -> int:
    value = known.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise NbmemprofError(f"The config has {name}={value!r}; a whole number is needed. Add it, or give the whole config.json.")
    return value


def _gpt2(known: dict[str, Any]) -> Shape:
    h, heads = _number(known, "n_embd"), _number(known, "n_head")
    return Shape(
        "gpt2", _number(known, "n_layer"), h, heads, heads, h // heads, known.get("n_inner") or 4 * h, _number(known, "vocab_size"), tied=bool(known.get("tie_word_embeddings", True)),
        gated=False, positions=_number(known, "n_positions"), norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip


def _bert(known: dict[str, Any]) -> Shape:
    h, heads = _number(known, "hidden_size"), _number(known, "num_attention_heads")
    return Shape(
        "bert", _number(known, "num_hidden_layers"), h, heads, heads, h // heads, _number(known, "intermediate_size"), _number(known, "vocab_size"), tied=True, gated=False,
        positions=_number(known, "max_position_embeddings"), types=_number(known, "type_vocab_size"), norm_bias=True, qkv_bias=True, out_bias=True, mlp_bias=True,
    )  # fmt: skip


def _llama(kind: str, known: dict[str, Any]) -> Shape:
    h, heads, layers = _number(known, "hidden_size"), _number(known, "num_attention_heads"), _number(known, "num_hidden_layers")
    experts = known.get("num_local_experts") or known.get("n_routed_experts") or known.get("num_experts") or 0
    shared = known.get("n_shared_experts") or 0
    latent = None
    if known.get("kv_lora_rank"):
        latent = Latent(
            _number(known, "kv_lora_rank"),
            _number(known, "qk_rope_head_dim"),
            _number(known, "qk_nope_head_dim"),
            _number(known, "v_head_dim"),
            known.get("q_lora_rank"),
        )
    window = known.get("sliding_window") if known.get("use_sliding_window", True) else None
    types = known.get("layer_types") or []
    return Shape(
        kind, layers, h, heads, known.get("num_key_value_heads") or heads, known.get("head_dim") or h // heads, _number(known, "intermediate_size"), _number(known, "vocab_size"),
        tied=bool(known.get("tie_word_embeddings", False)), gated=True, qkv_bias=bool(known.get("attention_bias", kind == "qwen2")), out_bias=bool(known.get("attention_bias", False)) and kind == "llama",
        mlp_bias=bool(known.get("mlp_bias", False)), qk_norm=kind in ("qwen3", "qwen3_moe"), experts=experts, active_experts=known.get("num_experts_per_tok") or 0, shared_experts=shared,
        expert_inter=known.get("moe_intermediate_size") or (_number(known, "intermediate_size") if experts else 0), dense_layers=known.get("first_k_dense_replace") or 0, window=window,
        window_layers=sum(t == "sliding_attention" for t in types) if types else (layers if window else 0), latent=latent,
    )  # fmt: skip
