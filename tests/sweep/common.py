"""A training loop and small blocks that the workloads share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

DEVICE = "cuda"


def train(loss_of: Callable[[], Any], optimizer: Any, *, steps: int = 3, autocast: Any = None, scaled: bool = False, clip: float | None = None) -> None:
    """Some steps as most scripts have them."""
    scaler = torch.amp.GradScaler("cuda", enabled=scaled)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        with torch.autocast("cuda", autocast or torch.bfloat16, enabled=autocast is not None):
            loss = loss_of()
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(parameters, clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def ids(vocabulary: int, *shape: int) -> torch.Tensor:
    """Random tokens."""
    return torch.randint(0, vocabulary, shape, device=DEVICE)


def randn(*shape: int, **options: Any) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(*shape, device=DEVICE, **options)


def conv_norm(cin: int, cout: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """A convolution without bias, batch norm, an activation."""
    return nn.Sequential(nn.Conv2d(cin, cout, kernel, stride, kernel // 2, groups=groups, bias=False), nn.BatchNorm2d(cout), act(inplace=True) if act in (nn.ReLU, nn.SiLU, nn.Hardswish) else act())
