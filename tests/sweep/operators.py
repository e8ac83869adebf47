"""Attention with masks of every kind, linear attention, optimizers one after the other, complex numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sweep.common import DEVICE, ids, randn, train


class Attention(nn.Module):
    """One layer whose scores are changed by ``mask(scores' shape)``."""

    def __init__(self, width: int, heads: int, mask: Any, kv: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv, self.mask, self.size = heads, kv or heads, mask, width // heads
        self.norm, self.q, self.k, self.v, self.o = nn.RMSNorm(width), nn.Linear(width, width), nn.Linear(width, self.kv * self.size), nn.Linear(width, self.kv * self.size), nn.Linear(width, width)
        self.slopes = nn.Parameter(torch.rand(heads, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, (b, s, _) = self.norm(x), x.shape
        q, k, v = (p(h).view(b, s, -1, self.size).transpose(1, 2) for p in (self.q, self.k, self.v))
        made = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(self, b, s, x), enable_gqa=self.kv != self.heads)
        return x + self.o(made.transpose(1, 2).reshape(b, s, -1))


def _padding(_layer: Any, b: int, s: int, _x: torch.Tensor) -> torch.Tensor:
    return (torch.arange(s, device=DEVICE)[None] < torch.linspace(s // 2, s, b, device=DEVICE)[:, None])[:, None, None]


def _causal_padding(layer: Any, b: int, s: int, x: torch.Tensor) -> torch.Tensor:
    return _padding(layer, b, s, x) & torch.ones(s, s, dtype=torch.bool, device=DEVICE).tril()


def _slopes(layer: Any, _b: int, s: int, x: torch.Tensor) -> torch.Tensor:
    far = (torch.arange(s, device=DEVICE)[None] - torch.arange(s, device=DEVICE)[:, None]).abs()
    return (-layer.slopes * far).to(x.dtype)


def _masked(mask: Any, dtype: torch.dtype, kv: int | None = None, width: int = 512) -> None:
    net = nn.Sequential(nn.Embedding(4000, width), *(Attention(width, 8, mask, kv) for _ in range(3)), nn.Linear(width, 4000)).to(DEVICE, dtype)

    def loss() -> torch.Tensor:
        x = ids(4000, 8, 256)
        return F.cross_entropy(net(x).flatten(0, 1), x.flatten())

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-4))


def padded_attention_fp32() -> None:
    _masked(_padding, torch.float32)


def causal_padded_attention_bf16() -> None:
    _masked(_causal_padding, torch.bfloat16)


def learned_slopes_fp32() -> None:
    _masked(_slopes, torch.float32)


def grouped_queries_fp16() -> None:
    _masked(lambda *_: None, torch.float16, kv=2)


def odd_heads_bf16() -> None:
    _masked(_padding, torch.bfloat16, width=8 * 60)


def linear_attention() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(512), nn.Linear(512, 1536, bias=False), nn.Linear(512, 512)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 8, 64)).unbind(2)
            q, k = F.elu(q) + 1, F.elu(k) + 1
            kv = torch.einsum("bshd,bshe->bhde", k, v)
            z = 1 / (torch.einsum("bshd,bhd->bsh", q, k.sum(1)) + 1e-6)
            return x + self.out(torch.einsum("bshd,bhde,bsh->bshe", q, kv, z).flatten(2))

    net = nn.Sequential(*(Layer() for _ in range(4))).to(DEVICE)
    train(lambda: net(randn(8, 1024, 512)).square().mean(), torch.optim.RAdam(net.parameters(), lr=1e-4))


def optimizers_in_turn() -> None:
    o = torch.optim
    kinds = (
        lambda p: o.SGD(p, lr=0.1, momentum=0.9, foreach=False), lambda p: o.SGD(p, lr=0.1, momentum=0.9, fused=True), lambda p: o.Adam(p, amsgrad=True), lambda p: o.Adam(p, fused=True), lambda p: o.AdamW(p, foreach=False), o.Adagrad, o.Adadelta, o.Adamax,
        o.NAdam, o.RAdam, o.Rprop, o.ASGD, lambda p: o.RMSprop(p, centered=True, momentum=0.9), o.Adafactor,
    )  # fmt: skip
    for kind in kinds:
        net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).to(DEVICE)
        train(lambda net=net: net(randn(256, 1024)).square().mean(), kind(list(net.parameters())), steps=2)


def muon_and_adam() -> None:
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(1024, 1024), nn.ReLU()))).to(DEVICE)
    first = torch.optim.Muon([p for p in net.parameters() if p.dim() == 2], lr=1e-3)
    second = torch.optim.AdamW([p for p in net.parameters() if p.dim() != 2], lr=1e-3)
    for _ in range(2):
        net(randn(512, 1024)).square().mean().backward()
        first.step()
        second.step()
        net.zero_grad()


def complex_weights() -> None:
    first, second = (nn.Parameter(torch.randn(512, 512, dtype=torch.cfloat, device=DEVICE) / 512) for _ in range(2))

    def loss() -> torch.Tensor:
        z = torch.complex(randn(4096, 512), randn(4096, 512)) @ first
        z = torch.polar(F.relu(z.abs() - 0.1), z.angle()) @ second
        return (z * z.conj()).real.mean()

    train(loss, torch.optim.Adam([first, second], lr=1e-3))


WORKLOADS = (padded_attention_fp32, causal_padded_attention_bf16, learned_slopes_fp32, grouped_queries_fp16, odd_heads_bf16, linear_attention, optimizers_in_turn, muon_and_adam, complex_weights)
