"""Train a small transformer for real under ``mp.record``, open a recorded H200 snapshot, say where the memory went.

    python examples/demo.py

Uses the GPU where torch finds one, else the CPU.
"""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import nbmemprof as mp
from nbmemprof.units import format_bytes
from nbmemprof.views.text import headline

ROOT = Path(__file__).resolve().parent.parent
SNAPSHOT = ROOT / "notebooks" / "data" / "h200_gpt2_small_batch4.pickle.gz"
OUT = ROOT / "out"
STEPS = 4


class Block(nn.Module):
    """Attention and MLP, each with a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, length: int = 256) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def text(names: tuple[str, ...] = ("argparse.py", "inspect.py", "typing.py")) -> torch.Tensor:
    """Bytes of real text that every machine has: Python's own sources."""
    data = b"".join(Path(sysconfig.get_path("stdlib"), name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def train(device: torch.device, batch: int, length: int = 256) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A few full training steps; returns what stays alive after them."""
    data = text()
    model = SmallGPT(length=length).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(STEPS):
        starts = torch.randint(len(data) - length - 1, (batch,))
        window = torch.stack([data[i : i + length + 1] for i in starts.tolist()]).to(device)
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"      step {step + 1}/{STEPS}  loss {loss.item():.3f}", flush=True)
    return model, optimizer


def tell(capture: mp.Capture, page: Path) -> None:
    """Headline, what the peak consists of, and the report."""
    print(f"      {headline(capture)}")
    for row in mp.breakdown(capture).head(5).iter_rows(named=True):
        print(f"      {format_bytes(row['size_bytes']):>10}  {row['category']}")
    capture.to_html(page)
    print(f"      report: {page.relative_to(ROOT)} ({format_bytes(page.stat().st_size)})", flush=True)


def main() -> int:
    """Both parts, with what they show."""
    started = time.perf_counter()
    OUT.mkdir(exist_ok=True)
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    what = torch.cuda.get_device_name() if gpu else "the CPU (no GPU here: CPU tensors are recorded instead)"
    print(f"[1/2] training a small transformer on {what} …", flush=True)
    with mp.record() as rec:
        kept = train(device, batch=64 if gpu else 8)  # noqa: F841 - alive until the recording ends, as in a notebook
    tell(rec.capture, OUT / "demo_training.html")
    print("[2/2] opening a snapshot recorded on an H200: GPT-2 small, three training steps …", flush=True)
    tell(mp.load(SNAPSHOT), OUT / "demo_h200.html")
    print(f"done in {time.perf_counter() - started:.0f} s. In a notebook: %load_ext nbmemprof, then %%memprof at the top of a cell; make lab opens one.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
