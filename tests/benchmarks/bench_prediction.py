"""How long a prediction takes on this machine, imports aside, and what it needs: GPT-2, and Llama shapes of 8 and 70 billion parameters.

    python tests/benchmarks/bench_prediction.py

Seconds of wall clock and of processor, resident memory of the predicting process, peaks predicted for an H200.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
import warnings


def gpt2() -> None:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("cuda"):
        model = GPT2LMHeadModel(GPT2Config())
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 50257, (4, 1024), device="cuda")
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()


def llama(layers: int, hidden: int, inner: int, heads: int, steps: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8, vocab_size=128256))
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        ids = torch.randint(0, 128256, (1, 2048), device="cuda")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


JOBS = {
    "GPT-2 small, one step": gpt2, "Llama 8B, three steps": lambda: llama(32, 4096, 14336, 32, 3), "Llama 70B, three steps": lambda: llama(80, 8192, 28672, 64, 3),
}  # fmt: skip


def one(name: str) -> None:
    import torch
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401 - imports aside
    from torch._subclasses import fake_tensor  # noqa: F401
    from torch.distributed import tensor  # noqa: F401 - transformers asks for it at the first model

    from nbmemprof.prediction import feed
    from nbmemprof.prediction.catalogue import find
    from nbmemprof.prediction.engine import Session, fake_run

    warnings.simplefilter("ignore")
    with Session(find("H200")):
        torch.nn.Linear(2, 2, device="cuda")(torch.zeros(1, 2, device="cuda")).sum().backward()
    wall, cpu = time.perf_counter(), time.process_time()
    record = fake_run(JOBS[name], device_row=find("H200"))
    ran = time.perf_counter() - wall
    device = feed.served(record, history=False)
    stats = device.stats()
    total, busy = time.perf_counter() - wall, time.process_time() - cpu
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    gib = 2**30
    print(f"{name:24s} {ran:6.2f} s run, {total:6.2f} s with the allocator, {busy:6.2f} s of processor, {resident:6.0f} MiB, peak {stats['allocated_bytes.all.peak'] / gib:.2f} GiB allocated, {stats['reserved_bytes.all.peak'] / gib:.2f} reserved")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        one(sys.argv[1])
    else:
        for job in JOBS:
            subprocess.run([sys.executable, __file__, job], check=True)
