"""Whose memory is it, on a real GPU: recordings for tests/fixtures/h200/attribution, and what the attribution costs.

    python tests/gpu/record_attribution.py OUT [stage ...]

Each stage runs in a process of its own. ``OUT/STAGE.json`` has device, versions, date, command and the models' own
arithmetic; ``OUT/STAGE.raw.gz`` torch's snapshot and what the observer logged, from which tests make the capture again.
Without a GPU the stages run small on the CPU, to see that the script works.
"""

from __future__ import annotations

import contextlib
import gzip
import pickle
import statistics
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _recording import Stages, versions, without_paths

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
stage = Stages(
    __file__, lambda: {"versions": versions("transformers", "timm", "peft")}, limits={"": 150}, jobs=6 if ON_GPU else 1, alone=("cost", "others"),  # timed, so nothing else may run
)  # fmt: skip


def small(large: Any, tiny: Any) -> Any:
    return large if ON_GPU else tiny


# ---------------------------------------------------------------------- truth
def bytes_of(tensors: Any) -> int:
    """Bytes of the different storages of these tensors that are on the device."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == DEVICE}.values())


def saved_bytes(forward: Callable[[], Any], known: list[Any]) -> int:
    """What autograd saves in a forward: bytes by storage, those of known tensors (parameters, inputs) left out."""
    own = {t.untyped_storage().data_ptr() for t in known}
    seen: dict[int, int] = {}
    held = []

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if tensor.device.type == DEVICE and storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage.nbytes()
            held.append(storage)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        kept = forward()
    del kept
    return sum(seen.values())


def state_tensors(optimizer: Any) -> list[Any]:
    return [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)]


# ---------------------------------------------------------------------- recording
def keep(out: Path, name: str, start: Any, begin_us: float) -> dict[str, Any]:
    """Write the allocator's snapshot and the observer's log as they are now; returns the counters that go with them."""
    from nbmemprof import recording
    from nbmemprof.sources import _placing

    (recorder,) = recording._recorders.values()
    observer = recorder.source._observer
    observer.look(everywhere=True)
    log = _placing.Log.of(observer)
    end = torch._C._cuda_memoryStats(0)
    snapshot = without_paths(torch.cuda.memory._snapshot())
    plain = {k: v.tolist() if hasattr(v, "tolist") else v for k, v in vars(log).items()}
    plain["caches"] = [(record, clock, tuple(shape), padded) for record, clock, shape, padded in log.caches]
    plain["routing"] = [tuple(call) for call in log.routing]
    entries = snapshot["device_traces"][0]
    raw = {"start": start, "end": end, "snapshot": snapshot, "log": plain, "noted": observer.noted, "begin_us": begin_us, "faults": observer.faults}
    (out / f"{name}.raw.gz").write_bytes(gzip.compress(pickle.dumps(raw, protocol=4), 9, mtime=0))
    return {"faults": observer.faults, "calls": observer.calls, "observer_ms": observer.spent_ns / 1e6, "noted": observer.noted, "owners": len(observer.owners), "entry": sorted(entries[0]) if entries else [], "with_note": sum(bool(e.get("user_metadata")) for e in entries), "entries": len(entries), "snapshot": sorted(snapshot)}


def record(out: Path, name: str, work: Callable[[], Any], truth: Callable[[], dict[str, Any]], **options: Any) -> dict[str, Any]:
    import nbmemprof as mp

    start: Any = None
    if ON_GPU:
        torch.zeros(1, device=DEVICE)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = torch._C._cuda_memoryStats(0)
    begin_us = time.time() * 1e6
    found: dict[str, Any] = {}
    with mp.record(source="torch_history" if ON_GPU else "torch_cpu", title=name, **options) as rec:
        held = work()
        if ON_GPU:
            torch.cuda.synchronize()
            found["torch"] = {"peak_allocated_bytes": torch.cuda.max_memory_allocated(), "end_allocated_bytes": torch.cuda.memory_allocated()}
            found["kept"] = keep(out, name, start, begin_us)
    found["truth"] = truth()
    capture = rec.capture
    for at in ("peak", "end"):
        found[at] = [[r["category"], r["requested_bytes"], r["size_bytes"], round(r["share"], 5), r["evidence"]] for r in mp.breakdown(capture, at=at).to_dicts()]
    found["warnings"], found["recording"] = capture.meta["warnings"], capture.meta["recording"]
    del held
    return found


def gpt2(layers: int | None = None, **more: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tiny = {"n_embd": 64, "n_head": 2, "vocab_size": 500, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(n_layer=layers or small(12, 2), **({} if ON_GPU else tiny), **more)).to(DEVICE)


def train(out: Path, name: str, build: Callable[[], tuple[Any, Any, Callable[[], Any], list[Any]]], *, steps: int = 2, micro: int = 1, zero: bool = True, before: int = 0, **options: Any) -> dict[str, Any]:
    """Model, optimizer and inputs made within the window, or before it with some steps; ``forward`` gives the loss."""
    made: dict[str, Any] = {}
    if before:
        made["all"] = build()
        for _ in range(before):
            made["all"][2]().backward()
            made["all"][1].step()
            made["all"][1].zero_grad()

    def work() -> Any:
        if not before:
            made["all"] = build()
        model, optimizer, forward, inputs = made["all"]
        for _ in range(steps):
            for _ in range(micro):
                forward().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=zero)
        forward().backward()  # the last one stays without a step: weights, gradients and state at the end
        return model, optimizer, inputs

    def truth() -> dict[str, Any]:
        model, optimizer, forward, inputs = made["all"]
        parameters = list(model.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        told = {"weights": bytes_of(parameters), "gradients": bytes_of(grads), "optimizer_state": bytes_of(state_tensors(optimizer)), "buffers": bytes_of(model.buffers()), "inputs": bytes_of(inputs)}
        told |= {"saved": saved_bytes(forward, [*parameters, *inputs, *model.buffers()])}
        return told | ({"experts": routed(model, forward)} if options.get("experts") else {})

    return record(out, name, work, truth, **options)


def routed(model: Any, forward: Callable[[], Any]) -> list[list[int]]:
    """Tokens of each expert of each layer, as the routers choose in a forward."""
    chosen: list[list[int]] = []
    layers = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    hooks = [m.register_forward_pre_hook(lambda m, args: chosen.append(torch.bincount(args[1].reshape(-1), minlength=m.num_experts).tolist())) for m in layers]
    with torch.no_grad():
        forward()
    for hook in hooks:
        hook.remove()
    return chosen


def _gpt2(*, batch: int, autocast: bool = False, checkpointed: bool = False) -> tuple[Any, Any, Callable[[], Any], list[Any]]:
    model = gpt2()
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, small(50257, 500), (batch, small(1024, 64)), device=DEVICE)

    def forward() -> Any:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            return model(input_ids=tokens, labels=tokens).loss

    return model, optimizer, forward, [tokens]


# ---------------------------------------------------------------------- stages
@stage
def gpt2_fp32(out: Path) -> dict[str, Any]:
    """GPT-2 small, batch 8, 1024 tokens, fp32, AdamW: two steps and one more backward."""
    return train(out, "gpt2_fp32", lambda: _gpt2(batch=small(8, 2)))


@stage
def gpt2_autocast(out: Path) -> dict[str, Any]:
    """The same under bf16 autocast."""
    return train(out, "gpt2_autocast", lambda: _gpt2(batch=small(8, 2), autocast=True))


@stage
def gpt2_checkpointed(out: Path) -> dict[str, Any]:
    """The same with every block checkpointed (non-reentrant)."""
    return train(out, "gpt2_checkpointed", lambda: _gpt2(batch=small(8, 2), checkpointed=True))


@stage
def gpt2_accumulated(out: Path) -> dict[str, Any]:
    """GPT-2 small, batch 2, four micro-batches a step, gradients kept and zeroed."""
    return train(out, "gpt2_accumulated", lambda: _gpt2(batch=2), micro=4, zero=False)


@stage
def gpt2_midrun(out: Path) -> dict[str, Any]:
    """As the first, model and optimizer from before the window: nothing has an event."""
    return train(out, "gpt2_midrun", lambda: _gpt2(batch=small(8, 2)), steps=1, before=1)


@stage
def resnet50(out: Path) -> dict[str, Any]:
    """ResNet-50 (timm), batch 32, fp32, SGD with momentum."""
    import timm

    def build() -> tuple[Any, Any, Callable[[], Any], list[Any]]:
        torch.manual_seed(0)
        model = timm.create_model("resnet50", num_classes=1000).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        side = small(224, 32)
        x, y = torch.randn(small(32, 2), 3, side, side, device=DEVICE), torch.randint(0, 1000, (small(32, 2),), device=DEVICE)
        return model, optimizer, lambda: torch.nn.functional.cross_entropy(model(x), y), [x, y]

    return train(out, "resnet50", build)


def _llama(**more: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    with torch.device(DEVICE):
        return LlamaForCausalLM._from_config(LlamaConfig(**(more if ON_GPU else tiny)), dtype=torch.bfloat16)


@stage
def llama1b_lora(out: Path) -> dict[str, Any]:
    """Llama of 1.24 B parameters, bf16 and frozen, fp32 LoRA r=16 on q and v; batch 4, 1024 tokens, AdamW."""
    from peft import LoraConfig, get_peft_model

    def build() -> tuple[Any, Any, Callable[[], Any], list[Any]]:
        base = _llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True)
        model = get_peft_model(base, LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.float()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
        tokens = torch.randint(0, small(128256, 500), (small(4, 2), small(1024, 32)), device=DEVICE)

        def forward() -> Any:
            with torch.autocast(DEVICE, torch.bfloat16):
                return model(input_ids=tokens, labels=tokens).loss

        return model, optimizer, forward, [tokens]

    return train(out, "llama1b_lora", build, steps=1)


@stage
def llama8b_generate(out: Path) -> dict[str, Any]:
    """Llama of 8 B parameters, bf16: generate, batch 4, 1024 tokens and 8 more."""
    made: dict[str, Any] = {}

    def work() -> Any:
        shape = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
        made["model"] = model = _llama(**shape).eval()
        tokens = torch.randint(5, small(128256, 500), (4, small(1024, 16)), device=DEVICE)
        mask = torch.ones_like(tokens)
        made["out"] = model.generate(tokens, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0, return_dict_in_generate=True)
        return tokens, mask

    def truth() -> dict[str, Any]:
        model, config = made["model"], made["model"].config
        length = made["out"].sequences.shape[1] - 1
        per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * (config.hidden_size // config.num_attention_heads) * 2
        layers = made["out"].past_key_values.layers
        return {"weights": bytes_of(model.parameters()), "kv_cache": 4 * length * per_token, "kv_cache_held": bytes_of([t for layer in layers for t in (layer.keys, layer.values)]), "buffers": bytes_of(model.buffers())}

    return record(out, "llama8b_generate", work, truth)


@stage
def mixtral_small(out: Path) -> dict[str, Any]:
    """Mixtral of 8 layers, 8 experts, width 1024, bf16; batch 4, 1024 tokens, AdamW."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def build() -> tuple[Any, Any, Callable[[], Any], list[Any]]:
        torch.manual_seed(0)
        wide = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000}
        tiny = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
        with torch.device(DEVICE):
            model = MixtralForCausalLM._from_config(MixtralConfig(num_local_experts=8, **small(wide, tiny)), dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, small(32000, 500), (small(4, 2), small(1024, 32)), device=DEVICE)
        return model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss, [tokens]

    return train(out, "mixtral_small", build, steps=1, experts=True)


@stage
def compiled(out: Path) -> dict[str, Any]:
    """Four layers of GPT-2 small, batch 4, 1024 tokens, torch.compile, AdamW; the model is compiled within the window."""

    def build() -> tuple[Any, Any, Callable[[], Any], list[Any]]:
        model = gpt2(small(4, 1))
        fast = torch.compile(model, backend="inductor" if ON_GPU else "aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        tokens = torch.randint(0, small(50257, 500), (small(4, 2), small(1024, 64)), device=DEVICE)
        return model, optimizer, lambda: fast(input_ids=tokens, labels=tokens).loss, [tokens]

    return train(out, "compiled", build)


@stage
def graphed(out: Path) -> dict[str, Any]:
    """A training step captured in a CUDA graph and replayed."""
    if not ON_GPU:
        return {}
    made: dict[str, Any] = {}

    def work() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[m for _ in range(4) for m in (torch.nn.Linear(2048, 2048), torch.nn.ReLU())]).to(DEVICE)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, capturable=True)
        x = torch.randn(4096, 2048, device=DEVICE)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()
        for _ in range(3):
            graph.replay()
        made["all"] = model, optimizer, graph, x
        return made["all"]

    def truth() -> dict[str, Any]:
        model, optimizer, _, x = made["all"]
        return {"weights": bytes_of(model.parameters()), "optimizer_state": bytes_of(state_tensors(optimizer)), "gradients": bytes_of([p.grad for p in model.parameters()]), "inputs": bytes_of([x])}

    return record(out, "graphed", work, truth)


# ---------------------------------------------------------------------- cost
def _encoder() -> Callable[[], None]:
    layer = torch.nn.TransformerEncoderLayer(512, 8, small(2048, 64), batch_first=True)
    model = torch.nn.TransformerEncoder(layer, small(12, 2), enable_nested_tensor=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(small(16, 2), small(256, 8), 512, device=DEVICE)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sync() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def _timed(step: Callable[[], None], steps: int, on: contextlib.AbstractContextManager[Any]) -> float:
    with on:
        step()
        _sync()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        _sync()
        return (time.perf_counter() - begin) / steps * 1e3


@stage
def cost(out: Path) -> dict[str, Any]:
    """Step time: plain, recorded, recorded without attribution, in turns."""
    import nbmemprof as mp
    from nbmemprof.sources import torch_history

    observe = torch_history.TorchHistory._observe

    def recorded(stacks: str, *, attributed: bool) -> contextlib.AbstractContextManager[Any]:
        torch_history.TorchHistory._observe = observe if attributed else lambda self: None  # type: ignore[method-assign]
        return mp.record(stacks=stacks)

    _, _, forward, _ = made = _gpt2(batch=small(8, 2))

    def step() -> None:
        forward().backward()
        made[1].step()
        made[1].zero_grad()

    found: dict[str, Any] = {}
    for name, work, steps, rounds in (("gpt2_b8_fp32", step, small(4, 1), 5), ("encoder", _encoder(), small(20, 2), 5)):
        for stacks in ("python", "none") if name == "encoder" else ("python",):
            times: dict[str, list[float]] = {"plain": [], "attributed": [], "recorded": []}
            work()
            for _ in range(rounds):
                times["plain"].append(_timed(work, steps, contextlib.nullcontext()))
                times["attributed"].append(_timed(work, steps, recorded(stacks, attributed=True)))
                times["recorded"].append(_timed(work, steps, recorded(stacks, attributed=False)))
            middle = {k: statistics.median(v) for k, v in times.items()}
            found[f"{name} stacks={stacks}"] = middle | {"overhead": middle["attributed"] / middle["plain"] - 1, "of_attribution": (middle["attributed"] - middle["recorded"]) / middle["plain"], "all_ms": times}
    return found


@stage
def others(out: Path) -> dict[str, Any]:
    """The same GPT-2 step under MemTracker and under torch.profiler with memory, shapes and stacks."""
    model, optimizer, forward, _ = _gpt2(batch=small(8, 2))

    def step() -> None:
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    found: dict[str, Any] = {"plain": _timed(step, 4, contextlib.nullcontext())}
    import nbmemprof as mp

    found["nbmemprof"] = _timed(step, 4, mp.record())
    try:
        from torch.distributed._tools.mem_tracker import MemTracker

        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            _sync()
            begin = time.perf_counter()
            step()
            _sync()
            found["MemTracker"] = (time.perf_counter() - begin) * 1e3
    except Exception as error:
        found["MemTracker"] = f"{type(error).__name__}: {error}"
    profiler = torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True)
    found["torch.profiler"] = _timed(step, 2, profiler)
    return found


# ---------------------------------------------------------------------- running them
def main(arguments: list[str]) -> int:
    """All stages' files go into one archive, unless one stage runs here."""
    code = stage.main(arguments)
    if len(arguments) != 2:
        out = Path(arguments[0])
        with tarfile.open(out / "attribution.tar", "w") as tar:
            for path in sorted([*out.glob("*.json"), *out.glob("*.raw.gz")]):
                tar.add(path, path.name)
                path.unlink()
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
