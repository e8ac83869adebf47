"""Small versions of leaks as people meet them: each function leaks on the line that ends in its mark."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

BATCHES, FOLDS, KEPT = 8, 4, 6
BEST: list[torch.Tensor] = []
ACTS: list[torch.Tensor] = []
DATA = None
PROBED = torch.nn.Sequential(torch.nn.Identity(), torch.nn.ReLU())


def line(mark: str) -> str:
    """``leaky.py:12``: the line that ends in ``# mark``."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text.rstrip().endswith(f"# {mark}"):
            return f"leaky.py:{number}"
    raise LookupError(mark)


def evaluate(batch: int = 128, wide: int = 256, hidden: int = 1024):
    """No no_grad, and a running sum: every batch's graph stays."""
    net = torch.nn.Sequential(torch.nn.Linear(wide, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1))
    total = torch.zeros(())
    for _ in range(BATCHES):
        x = torch.randn(batch, wide)  # input
        y = net(x)  # graph
        total = total + y.pow(2).mean()
    return net, total


def probe(batch: int = 64, wide: int = 512):
    """One more hook at each run of the cell."""

    def keep(module, args, out):
        ACTS.append(out.detach().clone())  # hook

    PROBED[1].register_forward_hook(keep)
    with torch.no_grad():
        x = torch.ones(batch, wide)
        for _ in range(BATCHES):
            PROBED(x)


def _inner(batch):
    work = torch.empty(3 << 20, dtype=torch.uint8)  # work
    if work.numel() > batch.numel():
        raise ValueError("label 7 is not in range(5)")


def fail():
    batch = torch.empty(2 << 20, dtype=torch.uint8)  # batch
    _inner(batch)


class Scorer(torch.nn.Module):
    """A cache on a method keeps every instance."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Parameter(torch.zeros(256, 512))  # parameter

    @functools.cache  # noqa: B019 - the leak
    def mask(self, n):
        return torch.ones(n, n, dtype=torch.bool).tril()  # mask


def folds():
    for _ in range(FOLDS):
        model = Scorer()
        model.mask(256)
        del model


def best(rows: int = 64, wide: int = 1024):
    """A slice keeps all rows."""
    for _ in range(KEPT):
        scores = torch.rand(rows, wide)  # scores
        BEST.append(scores[:1])


def train(wide: int = 128, layers: int = 4):
    """The optimizer makes its state in the first step."""
    net = torch.nn.Sequential(*[torch.nn.Linear(wide, wide, bias=False) for _ in range(layers)])
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    for _ in range(3):
        net(torch.randn(16, wide)).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return net, opt


def make_trainer(state_bytes: int = 600 << 10, sample_bytes: int = 32 << 10):
    """Its state exists only after the first step."""
    state = []

    def step(batch):
        acts = [torch.empty(sample_bytes, dtype=torch.uint8) for _ in range(batch)]
        del acts
        if not state:
            state.append(torch.empty(state_bytes, dtype=torch.uint8))

    return step


def load(size: int = 4 << 20):
    global DATA
    DATA = torch.empty(size, dtype=torch.uint8)  # load
