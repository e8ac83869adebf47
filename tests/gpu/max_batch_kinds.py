"""The kinds of step of ``record_max_batch.py``: nets and a cache in training and generation, each under its limit; small where there is no GPU."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


def small(large: Any, tiny: Any) -> Any:
    return large if ON_GPU else tiny


@dataclass
class Kind:
    """A step with its state, the limit it runs under, and the allocator's settings."""

    setup: Callable[[], Any]
    step: Callable[[Any, int], None]
    limit: int
    conf: str = ""


def train(model: Any, optimizer: Any, loss_of: Callable[[Any, int], Any], autocast: Any = None) -> Any:
    model.train()
    return model, optimizer, loss_of, autocast


def one_step(state: Any, batch: int) -> None:
    model, optimizer, loss_of, autocast = state
    with torch.autocast(DEVICE, dtype=autocast) if autocast is not None else contextlib.nullcontext():
        loss = loss_of(model, batch)
    loss.backward()
    del loss
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def made(cls: Any, config: Any, dtype: Any = torch.float32) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return cls(config)
    finally:
        torch.set_default_dtype(before)


class Block(torch.nn.Module):
    def __init__(self, ins: int, outs: int, stride: int) -> None:
        super().__init__()
        nn = torch.nn
        self.body = nn.Sequential(
            nn.Conv2d(ins, outs, 3, stride, 1, bias=False), nn.BatchNorm2d(outs), nn.ReLU(inplace=True), nn.Conv2d(outs, outs, 3, 1, 1, bias=False), nn.BatchNorm2d(outs)
        )
        self.short = nn.Identity() if stride == 1 and ins == outs else nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Any) -> Any:
        return torch.relu(self.body(x) + self.short(x))


def cnn() -> Kind:
    """A residual net of 18 layers, fp32, SGD with momentum."""
    pixels, widths = small(128, 16), small((64, 64, 128, 256, 512), (8, 8, 16))

    def setup() -> Any:
        nn = torch.nn
        with torch.device(DEVICE):
            blocks = [Block(a, b, s) for i, (a, b) in enumerate(itertools.pairwise(widths)) for a, b, s in ((a, b, 1 if i == 0 else 2), (b, b, 1))]
            model = nn.Sequential(nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(inplace=True), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 100))

        def loss_of(model: Any, batch: int) -> Any:
            x, y = torch.randn(batch, 3, pixels, pixels, device=DEVICE), torch.randint(0, 100, (batch,), device=DEVICE)
            return nn.functional.cross_entropy(model(x), y)

        return train(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4), loss_of)

    return Kind(setup, one_step, 2 << 30)


def _words(vocab: int, lengths: tuple[int, ...]) -> Callable[[Any, int], Any]:
    def loss_of(model: Any, batch: int) -> Any:
        total: Any = 0.0
        for length in lengths:
            ids = torch.randint(0, vocab, (batch, length), device=DEVICE)
            total = total + model(input_ids=ids, labels=ids, use_cache=False).loss
        return total

    return loss_of


def gpt(lengths: tuple[int, ...] = (256,), limit: int = 4 << 30, conf: str = "") -> Kind:
    """GPT-2's blocks, fp32, AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    size = small({"n_layer": 4, "n_embd": 512, "n_head": 8, "vocab_size": 8192, "n_positions": 512}, {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 512})

    def setup() -> Any:
        model = made(GPT2LMHeadModel, GPT2Config(attn_implementation="sdpa", **size))
        return train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), _words(size["vocab_size"], lengths))

    return Kind(setup, one_step, limit, conf)


def expandable() -> Kind:
    """The same with two micro-batches of different length, under expandable segments."""
    return gpt((256, 192), 6 << 30, "expandable_segments:True")


def vit() -> Kind:
    """A vision transformer under bf16 autocast, fused AdamW."""
    from transformers import ViTConfig, ViTForImageClassification

    size = small(
        {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "intermediate_size": 1536, "image_size": 224, "patch_size": 16},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32, "patch_size": 16},
    )

    def setup() -> Any:
        model = made(ViTForImageClassification, ViTConfig(attn_implementation="sdpa", num_labels=100, **size))

        def loss_of(model: Any, batch: int) -> Any:
            pixels = torch.randn(batch, 3, size["image_size"], size["image_size"], device=DEVICE)
            return model(pixel_values=pixels, labels=torch.randint(0, 100, (batch,), device=DEVICE)).loss

        return train(model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ON_GPU), loss_of, torch.bfloat16)

    return Kind(setup, one_step, 3 << 30)


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = small(
        {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192},
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64},
    )
    return made(LlamaForCausalLM, LlamaConfig(attn_implementation="sdpa", tie_word_embeddings=True, max_position_embeddings=4096, **size, **more), torch.bfloat16), size


class Adapted(torch.nn.Module):
    def __init__(self, base: Any, rank: int = 16) -> None:
        super().__init__()
        self.base = base
        outs, ins = base.weight.shape
        self.a = torch.nn.Parameter(torch.zeros(rank, ins, device=base.weight.device))
        self.b = torch.nn.Parameter(torch.zeros(outs, rank, device=base.weight.device))

    def forward(self, x: Any) -> Any:
        linear = torch.nn.functional.linear
        return self.base(x) + linear(linear(x.to(self.a.dtype), self.a), self.b).to(x.dtype)


def lora() -> Kind:
    """Low-rank adapters in fp32 on a frozen bf16 model."""

    def setup() -> Any:
        model, size = _llama()
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj, layer.self_attn.v_proj = Adapted(layer.self_attn.q_proj), Adapted(layer.self_attn.v_proj)
        trained = [p for p in model.parameters() if p.requires_grad]
        return train(model, torch.optim.AdamW(trained, lr=1e-4), _words(size["vocab_size"], (256,)))

    return Kind(setup, one_step, 4 << 30)


def kv() -> Kind:
    """Inference: a prompt of 512 tokens and 8 more, with a growing KV cache."""
    prompt, more = small((512, 8), (16, 2))

    def setup() -> Any:
        model, size = _llama()
        return model.eval(), size["vocab_size"]

    def step(state: Any, batch: int) -> None:
        from transformers import DynamicCache

        model, vocab = state
        with torch.inference_mode():
            cache, ids = DynamicCache(), torch.randint(0, vocab, (batch, prompt), device=DEVICE)
            for _ in range(more + 1):
                out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                ids = out.logits[:, -1:].argmax(-1)

    return Kind(setup, step, 3 << 30)


def second_step() -> Kind:
    """The field case: activations of 32 MiB a sample; 600 MiB of state are there only after the first step."""
    sample, state_bytes = small((32 << 20, 600 << 20), (1 << 20, 2 << 20))

    def setup() -> Any:
        return []

    def step(state: Any, batch: int) -> None:
        held = [torch.empty(sample, dtype=torch.uint8, device=DEVICE) for _ in range(batch)]
        del held
        if not state:
            state.append(torch.empty(state_bytes, dtype=torch.uint8, device=DEVICE))

    return Kind(setup, step, (2 << 30) + 4096)


KINDS: dict[str, Callable[[], Kind]] = {"cnn": cnn, "vit": vit, "lora": lora, "kv": kv, "expandable": expandable, "gpt": gpt, "second_step": second_step}
