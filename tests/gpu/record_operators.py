"""Record what each operator of operator_cases.py and more_operator_cases.py asks of the caching allocator.

    python tests/gpu/record_operators.py OUT.jsonl [SECONDS] [SECTION ...]

One JSON object a line: section, name, and for forward and backward the requests in order: bytes when taken, minus bytes when given back.
The first line has the device and the versions. Stops by itself when the seconds are over.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import more_operator_cases
import operator_cases
from _recording import device


class History:
    """Requests since the last look."""

    def begin(self):
        torch.cuda.memory._record_memory_history(None)
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", max_entries=100000)

    def events(self):
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        return [e["size"] if e["action"] == "alloc" else -e["size"] for e in trace if e["action"] in ("alloc", "free_requested")]


def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for item in value for t in tensors(item)] if isinstance(value, (tuple, list)) else []


def record(history, name, build):
    torch.manual_seed(0)
    inputs, fn = build("cuda")
    grad = "_ng" not in name
    inputs = tuple(t.requires_grad_() if grad and t.is_floating_point() else t for t in inputs)
    row = {"name": name}
    if name.startswith("sdpa") and "gradmask" not in name:
        cells = {n: c.cell_contents for n, c in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)}
        row["choice"] = int(torch._fused_sdp_choice(*inputs, attn_mask=cells.get("mask"), **cells.get("extra", {})))
    for turn in ("first", "second"):
        history.begin()
        if grad:
            out = fn(*inputs)
        else:
            with torch.no_grad():
                out = fn(*inputs)
        forward = history.events()
        backward = None
        results = [t for t in tensors(out) if t.requires_grad]
        if grad and results:
            grads = [torch.ones_like(t) for t in results]
            history.begin()
            torch.autograd.backward(results, grads)
            backward = history.events()
            del grads
        del out, results
        for t in inputs:
            t.grad = None
        made = {"fwd": forward, "bwd": backward}
        if turn == "first":
            row |= made
        elif made != {"fwd": row["fwd"], "bwd": row["bwd"]}:
            row["again"] = made
    return row


def main(out, seconds=70.0, *wanted):
    start = time.monotonic()
    for _ in range(2):  # handles and workspaces come with the first products; these are known
        net = torch.nn.Linear(64, 64, device="cuda")
        net(torch.randn(64, 64, device="cuda")).sum().backward()
    torch.bmm(torch.randn(2, 64, 64, device="cuda"), torch.randn(2, 64, 64, device="cuda"))
    head = {"device": torch.cuda.get_device_name(), "smi": device(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d"), "command": "tests/gpu/record_operators.py"}
    history = History()
    sections = {}
    with Path(out).open("w") as file:
        file.write(json.dumps(head) + "\n")
        for section, name, build in chain(operator_cases.cases(torch), more_operator_cases.cases(torch)):
            if wanted and section not in wanted:
                continue
            if time.monotonic() - start > float(seconds):
                file.write(json.dumps({"stopped": name}) + "\n")
                break
            begun = time.monotonic()
            try:
                row = record(history, name, build)
            except Exception as error:
                row = {"name": name, "error": f"{type(error).__name__}: {str(error)[:200]}"}
            sections[section] = sections.get(section, 0.0) + time.monotonic() - begun
            file.write(json.dumps({"section": section} | row) + "\n")
            file.flush()
    torch.cuda.memory._record_memory_history(None)
    print({k: round(v, 1) for k, v in sections.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
