"""When storages begin and end in a fake run: to the byte as the real CPU allocator saw them, and as torch's own tracker counts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import nbmemprof as mp
from nbmemprof.prediction.catalogue import find
from nbmemprof.prediction.kernels import indexing, losses
from nbmemprof.prediction.patches import Changes, _apply
from nbmemprof.prediction.recorder import Allocation, Record, recorder_class
from nbmemprof.prediction.rules import Rules
from nbmemprof.prediction.shadows import Shadows
from nbmemprof.prediction.where import Where


def number(record: Record) -> int:
    """C++ makes a tensor of 8 bytes, in the CPU's memory, of a Python number that stands where an operator takes a tensor."""
    record.made.append(Allocation(8, "number", None, None, 0))
    record.events.append(len(record.made) - 1)
    return len(record.made) - 1


def with_numbers(recorder: type) -> type:
    """The recorder, and the numbers as long as their operator runs."""

    class Numbers(recorder):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            declared = getattr(getattr(func, "_schema", None), "arguments", ())
            made = [number(self.record) for given, one in zip(args, declared, strict=False) if isinstance(given, (int, float)) and one.type.kind() == "TensorType"]
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self.record.events += [~index for index in made]
            return out

    return Numbers


class KeptNumbers(TorchFunctionMode):
    """A product's number is kept for its backward, as the other factor would be."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") in PRODUCTS and any(isinstance(one, (int, float)) for one in args[:2]) and out.grad_fn is not None:
            index = number(self.record)
            out.grad_fn.register_hook(lambda *_: self.record.events.append(~index))
        return out


PRODUCTS = ("mul", "__mul__", "__rmul__", "div", "__truediv__", "__rtruediv__")


@contextlib.contextmanager
def fake_cpu() -> Iterator[Record]:
    """Fakes on the CPU, written down: no kernel's scratch, no GPU's rules."""
    record = Record()
    rules = Rules(torch, find("H200"), "2.11", record)
    rules.emit[torch.ops.aten.add.Tensor] = losses._sum
    indexing.install(torch, rules)
    rules.emit = {torch.ops.aten.add.Tensor: losses._sum}
    rules.order.clear()
    where, changes = Where(torch, record), Changes()
    changes.put(nn.Module, "_apply", _apply(torch))
    recorder = with_numbers(recorder_class(torch))(record, where, Shadows(torch, record), rules, kind="cpu")
    try:
        with torch.autograd.set_multithreading_enabled(False), where.watching(), FakeTensorMode(allow_non_fake_inputs=True), recorder, KeptNumbers(record):
            yield record
    finally:
        changes.undo()


def peak(record: Record, *, numbers: bool = True) -> int:
    now = most = 0
    for event in record.events:
        if not numbers and record.made[event if event >= 0 else ~event].op == "number":
            continue
        now += record.made[event].nbytes if event >= 0 else -record.made[~event].nbytes
        most = max(most, now)
    return most


def train(model: nn.Module, loss_of: Callable[[nn.Module], Any], steps: int = 2) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(steps):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


def mlp() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
    train(model, lambda m: F.cross_entropy(m(torch.randn(64, 256)), torch.randint(0, 10, (64,))))


def lora() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.a, self.b = nn.Linear(256, 256), nn.Parameter(torch.zeros(8, 256)), nn.Parameter(torch.zeros(256, 8))
            self.base.requires_grad_(requires_grad=False)

        def forward(self, x: Any) -> Any:
            return F.gelu(self.base(x) + F.linear(F.linear(x, self.a), self.b))

    train(nn.Sequential(*(Adapted() for _ in range(4))), lambda m: m(torch.randn(32, 256)).square().mean())


def _of_transformers(cls: str, config: Any, inputs: Callable[[], dict[str, Any]]) -> None:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, cls)(config)
    model.train()
    train(model, lambda m: m(**inputs()).loss)


def _ids(vocabulary: int) -> Any:
    return torch.randint(0, vocabulary, (2, 24))


def llama() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}

    def inputs() -> dict[str, Any]:
        ids = _ids(300)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    _of_transformers("LlamaForCausalLM", transformers.LlamaConfig(attn_implementation="eager", **sizes), inputs)


def bert() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 300}

    def inputs() -> dict[str, Any]:
        ids = _ids(300)
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    _of_transformers("BertForMaskedLM", transformers.BertConfig(attn_implementation="eager", **sizes), inputs)


def t5() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 300}

    def inputs() -> dict[str, Any]:
        return {"input_ids": _ids(300), "labels": _ids(300)}

    _of_transformers("T5ForConditionalGeneration", transformers.T5Config(decoder_start_token_id=0, pad_token_id=0, attn_implementation="eager", **sizes), inputs)


def gpt2() -> None:
    transformers = pytest.importorskip("transformers")

    def inputs() -> dict[str, Any]:
        ids = _ids(300)
        return {"input_ids": ids, "labels": ids, "use_cache": False}

    _of_transformers("GPT2LMHeadModel", transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=300, n_positions=64, attn_implementation="eager"), inputs)


@pytest.mark.cost(2)
@pytest.mark.parametrize("run", [mlp, lora, llama, bert, t5, gpt2])
def test_the_peak_is_the_real_cpu_allocators_to_the_byte(run):
    run()  # what is made once for a process is there
    with mp.record() as recording:
        run()
    rows = mp.summary(recording.capture)
    real = rows.filter(rows["kind"] == "host")["peak_requested_bytes"].item()
    with fake_cpu() as record:
        run()
    assert peak(record) == real


@pytest.mark.cost(0.6)
def test_the_peak_is_that_of_torchs_own_tracker():
    def run() -> None:
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10))
        train(model, lambda m: F.cross_entropy(m(torch.randn(64, 256)), torch.randint(0, 10, (64,))), steps=1)  # it follows one iteration

    tracker = pytest.importorskip("torch.distributed._tools.mem_tracker")
    with fake_cpu() as record:
        run()
    with FakeTensorMode(allow_non_fake_inputs=True), tracker.MemTracker() as tracked:
        run()
    known = tracked.get_tracker_snapshot("peak")
    assert sum(part for device, parts in known.items() if device.type == "cpu" for name, part in parts.items() if str(name).lower().endswith("total")) == peak(record, numbers=False)  # which it does not see
