"""What recording CPU memory costs, against the same code unrecorded, in turns: ``python tests/benchmarks/bench_torch_cpu.py [--large]``.

``--large`` takes BERT-base at batch 4 x 128 tokens (about 2.5 GB, a minute); without it a small encoder is used.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from nbmemprof.sources import torch_cpu

Cell = Callable[[], object]


class Encoder(torch.nn.Module):
    """An encoder with a head; its layers checkpointed if asked."""

    def __init__(self, width: int, layers: int, vocabulary: int, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.embed = torch.nn.Embedding(vocabulary, width)
        heads = max(width // 64, 1)
        self.layers = torch.nn.ModuleList(torch.nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True) for _ in range(layers))
        self.head = torch.nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits of every token."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return self.head(x)


def mlp() -> Cell:
    """MNIST-sized MLP, 20 steps of 128."""
    model = torch.nn.Sequential(torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    return training(model, torch.randn(128, 784), torch.randint(0, 10, (128,)), steps=20)


def tiny_mlp() -> Cell:
    """An MLP so small that Python is all the cost, 100 steps of 8."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    return training(model, torch.randn(8, 16), torch.randint(0, 4, (8,)), steps=100)


def training(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> Cell:
    """Steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())

    def cell() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(x)
            torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten()).backward()
            optimizer.step()

    return cell


def encoder(large: bool, checkpointed: bool = False, train: bool = True) -> Cell:
    """BERT-base or a small sister of it."""
    width, layers, vocabulary, batch, length = (768, 12, 30522, 4, 128) if large else (128, 4, 2000, 4, 64)
    model = Encoder(width, layers, vocabulary, checkpointed)
    tokens = torch.randint(0, vocabulary, (batch, length))
    if train:
        return training(model, tokens, tokens, steps=1 if large else 5)
    model.eval()

    def cell() -> None:
        with torch.inference_mode():
            for _ in range(1 if large else 10):
                model(tokens)

    return cell


def small_ops() -> Cell:
    """The worst there is: 20,000 additions of 8 numbers, each with a new result."""
    a = torch.ones(8)

    def cell() -> None:
        for _ in range(20_000):
            a + a

    return cell


def small_ops_in_place() -> Cell:
    """20,000 additions of 8 numbers that allocate nothing."""
    a = torch.ones(8)

    def cell() -> None:
        for _ in range(20_000):
            a.add_(a)

    return cell


def measure(cell: Cell, turns: int) -> tuple[float, float, float, float, int]:
    """Median seconds plain and recorded, of closing the recording, the cost that the capture tells, and its events."""
    plain, recorded, closing, told, events = [], [], [], [], 0
    cell()
    for _ in range(turns):
        begin = time.perf_counter()
        cell()
        plain.append(time.perf_counter() - begin)
        source = torch_cpu.source()
        source.start()
        begin = time.perf_counter()
        cell()
        end = time.perf_counter()
        capture = source.stop()
        recorded.append(end - begin)
        closing.append(time.perf_counter() - end)
        told.append(capture.meta["recording"]["cost_fraction"])
        events = capture.events.height
    return statistics.median(plain), statistics.median(recorded), statistics.median(closing), statistics.median(told), events


def main() -> None:
    """Print the table."""
    large = "--large" in sys.argv
    torch.manual_seed(0)
    begin = time.perf_counter()
    first = torch_cpu.source()
    first.start()
    first.stop()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; first recording of the process {1e3 * (time.perf_counter() - begin):.0f} ms")
    empty = []
    for _ in range(5):
        begin = time.perf_counter()
        source = torch_cpu.source()
        source.start()
        source.stop()
        empty.append(time.perf_counter() - begin)
    print(f"start and stop of an empty recording {1e3 * statistics.median(empty):.1f} ms")
    cells = {
        "MLP training": (mlp(), 7), "encoder training": (encoder(large), 3 if large else 7), "checkpointed": (encoder(large, checkpointed=True), 3 if large else 7),
        "inference": (encoder(large, train=False), 3 if large else 7), "tiny MLP (worst real)": (tiny_mlp(), 5),
        "20,000 a + a": (small_ops(), 5), "20,000 a.add_(a)": (small_ops_in_place(), 5),
    }  # fmt: skip
    print(f"{'cell':24s} {'plain':>10s} {'recorded':>10s} {'ratio':>6s} {'told':>6s} {'closing':>9s} {'events':>8s}")
    for name, (cell, turns) in cells.items():
        plain, recorded, closing, told, events = measure(cell, turns)
        print(f"{name:24s} {1e3 * plain:7.1f} ms {1e3 * recorded:7.1f} ms {recorded / plain:6.3f} {told:6.1%} {1e3 * closing:6.1f} ms {events:8d}")


if __name__ == "__main__":
    main()
