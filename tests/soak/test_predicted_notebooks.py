"""Whole notebooks predicted in a real kernel: ten cells with ``is_available`` and ``.cuda()``, and the first notebook unchanged."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent.parent

TEN = [
    "%load_ext nbmemprof",
    "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\ntorch.manual_seed(0)\ntorch.cuda.manual_seed_all(0)",
    "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\nprint('device:', device)",
    ("from torch.utils.data import DataLoader, TensorDataset\ndata = TensorDataset(torch.randn(256, 3, 32, 32), torch.randint(0, 10, (256,)))\n"
    "loader = DataLoader(data, batch_size=64, shuffle=True, num_workers=2, pin_memory=True)\nlen(loader)"),
    ("class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.body = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU())\n"
    "        self.head = nn.Linear(128, 10)\n    def forward(self, x):\n        return self.head(self.body(x).mean((2, 3)))"),
    "model = Net().to(device)\nsum(p.numel() for p in model.parameters())",
    "teacher = Net().cuda().eval()",
    "optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)\nscaler = torch.amp.GradScaler('cuda')",
    ("%%memprof --predict H200\nlosses = []\nfor epoch in range(2):\n    for x, y in loader:\n        x, y = x.to(device, non_blocking=True), y.cuda()\n"
    "        with torch.autocast('cuda', dtype=torch.float16):\n            with torch.no_grad():\n                soft = teacher(x)\n            out = model(x)\n"
    "            loss = F.cross_entropy(out, y) + F.mse_loss(out, soft)\n        scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update(); optimizer.zero_grad()\n        losses.append(loss.item())\n"
    "    print(epoch, sum(losses) / len(losses), torch.cuda.max_memory_allocated())\nlosses[-1]"),
    "print(device, 'losses' in dir(), _memprof.meta['origin'], next(model.parameters()).device)",
]


def played(notebook: nbformat.NotebookNode, folder: Path) -> list[nbformat.NotebookNode]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    NotebookClient(notebook, timeout=300, allow_errors=True, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def failures(cells: list[nbformat.NotebookNode]) -> list[str]:
    return [f"{cell.source[:40]}: {out.ename}: {out.evalue}" for cell in cells for out in cell.outputs if out.output_type == "error"]


def shown(cell: nbformat.NotebookNode) -> str:
    return "".join(out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs)


@pytest.mark.soak
def test_ten_cells_with_is_available_and_cuda(tmp_path):
    cells = played(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in TEN]), tmp_path)
    assert [text.split(":")[0] for text in failures(cells)] == ["teacher = Net().cuda().eval()"]  # here, for want of a GPU
    kinds = [out.output_type for out in cells[8].outputs]
    assert kinds[-2:] == ["execute_result", "display_data"]
    assert "predicted, not measured on NVIDIA H200" in shown(cells[8])
    assert shown(cells[9]) == "cpu False predicted cpu\n"


@pytest.mark.soak
def test_the_first_notebook_unchanged_in_a_fake_session():
    notebook = nbformat.read(ROOT / "notebooks" / "01_first_steps.ipynb", 4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%load_ext nbmemprof\n%memprof predict on H200"))
    cells = played(notebook, ROOT / "notebooks")
    assert failures(cells) == []
    text = "".join(map(shown, cells))
    assert "measured here on NVIDIA H200" in text  # what the notebook itself says where is_available() is true
    assert "predicted, not measured on NVIDIA H200" in text
    assert "each 4,194,304, peak 8,388,608, kept 4,194,304" in text  # CPU tensors asked for by name: for real
