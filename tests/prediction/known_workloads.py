"""Workloads whose peaks on an H200 are known (tests/fixtures/prediction/ground_truth.json), as they were run there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

DEVICE = "cuda"


def _train(model: nn.Module, optimizer: Any, batch: Callable[[int], Any], loss_of: Callable[[Any], Any], *, steps: int = 3, autocast: Any = None, clip: float | None = None) -> None:
    model.train()
    for step in range(steps):
        data = batch(step)
        if autocast is None:
            loss = loss_of(data) / 1
        else:
            with torch.autocast(DEVICE, dtype=autocast):
                loss = loss_of(data) / 1
        loss.backward()
        del loss
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        del data


def _made(cls: Any, config: Any, dtype: Any = None) -> Any:
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with torch.device(DEVICE):
            return cls(config)
    finally:
        torch.set_default_dtype(before)


def mlp_sgdm() -> None:
    """Eight layers of 4096, SGD with momentum."""
    layers: list[nn.Module] = []
    with torch.device(DEVICE):
        for i in range(8):
            layers += [nn.Linear(4096, 4096)] + ([nn.ReLU()] if i < 7 else [])
        model = nn.Sequential(*layers)
    _train(
        model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), lambda _: (torch.randn(2048, 4096, device=DEVICE), torch.randn(2048, 4096, device=DEVICE)), lambda b: F.mse_loss(model(b[0]), b[1])
    )


def lstm_b64() -> None:
    """A language model of two LSTM layers."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e, self.r, self.o = nn.Embedding(10000, 1024), nn.LSTM(1024, 1024, 2, batch_first=True, dropout=0.1), nn.Linear(1024, 10000)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.o(self.r(self.e(x))[0])

    with torch.device(DEVICE):
        model = Net()
    _train(model, torch.optim.Adam(model.parameters()), lambda _: torch.randint(0, 10000, (64, 128), device=DEVICE), lambda x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()), clip=1.0)


class _Bottleneck(nn.Module):
    def __init__(self, cin: int, mid: int, stride: int) -> None:
        super().__init__()
        cout = mid * 4
        self.conv1, self.bn1 = nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv2, self.bn2 = nn.Conv2d(mid, mid, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(mid)
        self.conv3, self.bn3 = nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout)
        self.relu, self.down = nn.ReLU(inplace=True), None
        if stride != 1 or cin != cout:
            self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, stride=stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        same = x if self.down is None else self.down(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += same
        return self.relu(y)


def resnet50_bf16_cl_b64() -> None:
    """ResNet-50 in channels last, bf16 autocast."""
    torch.backends.cudnn.benchmark = False
    cin = 64
    with torch.device(DEVICE):
        layers: list[nn.Module] = [nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))]
        for stage, count in enumerate((3, 4, 6, 3)):
            for i in range(count):
                layers.append(_Bottleneck(cin, 64 << stage, 2 if i == 0 and stage else 1))
                cin = 256 << stage
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(cin, 1000))
    model = model.to(memory_format=torch.channels_last)

    def batch(_: int) -> Any:
        return torch.randn(64, 3, 224, 224, device=DEVICE).to(memory_format=torch.channels_last), torch.randint(0, 10, (64,), device=DEVICE)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    _train(model, optimizer, batch, lambda b: F.cross_entropy(model(b[0]), b[1]), autocast=torch.bfloat16)


def _language_model(model: Any, vocabulary: int, batch: int, length: int, **kwargs: Any) -> None:
    def data(_: int) -> Any:
        ids = torch.randint(0, vocabulary, (batch, length), device=DEVICE)
        return {"input_ids": ids, "labels": ids}

    parameters = [p for p in model.parameters() if p.requires_grad]
    _train(model, torch.optim.AdamW(parameters, lr=1e-4), data, lambda b: model(**b, use_cache=False).loss, **kwargs)


def gpt2_fp32_b8() -> None:
    """GPT-2 small, AdamW."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _language_model(_made(GPT2LMHeadModel, GPT2Config(attn_implementation="sdpa")), 50257, 8, 1024)


def gpt2_bf16ac_b8() -> None:
    """The same under bf16 autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    _language_model(_made(GPT2LMHeadModel, GPT2Config(attn_implementation="sdpa")), 50257, 8, 1024, autocast=torch.bfloat16)


def llama1b_bf16_b2() -> None:
    """A Llama of 1.24 B parameters in pure bf16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True, head_dim=64,
        max_position_embeddings=8192, attn_implementation="sdpa",
    )  # fmt: skip
    _language_model(_made(LlamaForCausalLM, config, torch.bfloat16), 128256, 2, 2048)


def bert_base_b16() -> None:
    """BERT with padded batches."""
    from transformers import BertConfig, BertForMaskedLM

    model = _made(BertForMaskedLM, BertConfig(attn_implementation="sdpa"))

    def data(_: int) -> Any:
        ids = torch.randint(0, 30522, (16, 384), device=DEVICE)
        mask = torch.ones(16, 384, dtype=torch.long, device=DEVICE)
        mask[:, 336:] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    _train(model, torch.optim.AdamW(model.parameters(), lr=1e-4), data, lambda b: model(**b).loss)


KNOWN = {run.__name__: run for run in (mlp_sgdm, lstm_b64, resnet50_bf16_cl_b64, gpt2_fp32_b8, gpt2_bf16ac_b8, llama1b_bf16_b2, bert_base_b16)}
