"""Who holds the device's memory, on a real GPU: recordings for tests/fixtures/h200/ledger, and what recording costs a CPU-bound step.

    python tests/gpu/record_ledger.py OUT [stage ...]

Each stage runs in a process of its own. ``OUT/STAGE.json`` has device, versions, date, command and numbers; ``OUT/WINDOW.nbmem`` a recording
with what the ledger needs (readings, segments, live allocations), from which tests make it again. Without a GPU the stages run small on the CPU,
to see that the script works.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
MIB = 1 << 20
STAGES: dict[str, Callable[[Path], dict[str, Any]]] = {}


def stage(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
    STAGES[function.__name__] = function
    return function


def small(large: Any, tiny: Any) -> Any:
    return large if ON_GPU else tiny


def sync() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


# ---------------------------------------------------------------------- windows
def window(out: Path, name: str, work: Callable[[], Any], **options: Any) -> dict[str, Any]:
    """Record some work; write the recording and its ledger, with the driver's number asked again right after."""
    import nbmemprof as mp
    from nbmemprof.capture import Capture

    begin = time.perf_counter()
    with mp.record(source="torch_history" if ON_GPU else "torch_cpu", title=name, **options) as rec:
        held = work()
        sync()
    capture = rec.capture
    found: dict[str, Any] = {"seconds": time.perf_counter() - begin}
    if ON_GPU:
        free, total = torch.cuda.mem_get_info()
        found["mem_get_info_used"] = total - free
        found["torch"] = {"requested": torch.cuda.memory_stats()["requested_bytes.all.current"], "active": torch.cuda.memory_stats()["active_bytes.all.current"], "reserved": torch.cuda.memory_reserved()}
    for at in ("end", "peak"):
        found[at] = mp.ledger(capture, at=at).to_dicts()
    found["warnings"], found["trouble"], found["libraries"] = capture.meta["warnings"], capture.meta.get("driver_trouble"), capture.meta.get("libraries")
    found["readings"] = capture.samples.height
    allocations = capture.allocations
    kept = {n: capture.tables[n] for n in ("samples", "segments", "blocks")} | {"allocations": allocations.filter(allocations["free_seq"].is_null())}
    Capture.build(kept, **capture.meta).save(out / f"{name}.nbmem")
    del held
    return found


def gpt2(batch: int) -> tuple[Any, Any, Callable[[], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tiny = {"n_embd": 64, "n_head": 2, "vocab_size": 500, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(n_layer=small(12, 2), **({} if ON_GPU else tiny))).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, small(50257, 500), (batch, small(1024, 64)), device=DEVICE)
    return model, optimizer, lambda: model(input_ids=tokens, labels=tokens).loss


def train(steps: int, batch: int) -> Any:
    _, optimizer, forward = made = gpt2(batch)
    for _ in range(steps):
        forward().backward()
        optimizer.step()
        optimizer.zero_grad()
    return made


@stage
def ledger(out: Path) -> dict[str, Any]:
    """One process: GPT-2 training from before CUDA began, then a foreign cudaMalloc, CuPy, other libraries, pinned memory, another process."""
    found: dict[str, Any] = {"gpt2_train": window(out, "gpt2_train", lambda: train(2, small(8, 2)))}
    if not ON_GPU:
        return found | {"pinned": window(out, "pinned", lambda: torch.empty(1 << 20))}
    at = ctypes.c_uint64()

    def raw(size: int) -> str:
        """Device memory past every allocator: cudaMalloc of the runtime that torch has loaded, else the driver's own call."""
        for name, function in (("libcudart.so.13", "cudaMalloc"), ("libcudart.so.12", "cudaMalloc"), ("libcuda.so.1", "cuMemAlloc_v2")):
            try:
                if getattr(ctypes.CDLL(name), function)(ctypes.byref(at), ctypes.c_size_t(size)) == 0:
                    return function
            except (OSError, AttributeError):
                continue
        raise RuntimeError("no way to allocate past torch")

    def foreign() -> Any:
        x = torch.ones(1 << 20, device=DEVICE)
        found["foreign_by"] = raw(300 * MIB)
        return x

    torch.cuda.empty_cache()
    found["before_foreign"] = window(out, "before_foreign", lambda: torch.ones(1 << 20, device=DEVICE))
    found["foreign"] = attempt(lambda: window(out, "foreign", foreign))
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuMemFree_v2(at)

    def in_cupy() -> Any:
        import cupy

        arrays = [cupy.zeros(64 * MIB, dtype=cupy.uint8) for _ in range(8)]
        cupy.cuda.Stream.null.synchronize()
        return torch.ones(1 << 20, device=DEVICE), arrays[:2]

    found["cupy"] = attempt(lambda: window(out, "cupy", in_cupy))

    def libraries() -> Any:
        x = torch.randn(8, 16, 64, 64, device=DEVICE)
        y = torch.nn.functional.conv2d(x, torch.randn(16, 16, 3, 3, device=DEVICE))
        return y, torch.fft.rfft2(x), torch.linalg.qr(x[0, 0])

    found["libraries"] = attempt(lambda: window(out, "libraries", libraries))

    def pinned() -> Any:
        shards = [torch.empty(65 * MIB, dtype=torch.uint8, pin_memory=True) for _ in range(8)]
        return torch.ones(1, device=DEVICE), shards

    found["pinned"] = attempt(lambda: window(out, "pinned", pinned))
    found["pinned_after"] = attempt(lambda: window(out, "pinned_after", lambda: torch.ones(1, device=DEVICE)))

    code = f"import torch,time; x = torch.empty({500 * MIB}, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); print('ready', flush=True); time.sleep(30)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        other.stdout.readline()
        found["other_process"] = attempt(lambda: window(out, "other_process", lambda: torch.ones(1, device=DEVICE)))
    finally:
        other.kill()
        other.wait()

    def nccl() -> Any:
        import torch.distributed as dist

        dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29531", rank=0, world_size=1)
        x = torch.ones(1 << 20, device=DEVICE)
        dist.all_reduce(x)
        sync()
        return x

    found["nccl"] = attempt(lambda: window(out, "nccl", nccl))
    return found


@stage
def generation(out: Path) -> dict[str, Any]:
    """Llama of 1.24 B parameters, bf16: generate, batch 8, 512 tokens and 32 more; CUDA begins before the recording."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500}
    torch.zeros(1, device=DEVICE)

    def work() -> Any:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            model = LlamaForCausalLM._from_config(LlamaConfig(**small(shape, tiny)), dtype=torch.bfloat16).eval()
        tokens = torch.randint(5, small(128256, 500), (small(8, 2), small(512, 16)), device=DEVICE)
        new = small(32, 4)
        return model, model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, return_dict_in_generate=True)

    return {"generation": window(out, "generation", work)}


# ---------------------------------------------------------------------- cases from the field
def said(capture: Any) -> dict[str, Any]:
    """What a capture's findings say, with the numbers that go with them."""
    import nbmemprof as mp
    from nbmemprof.views.findings import findings

    row = mp.summary(capture).sort("peak_allocated_bytes", descending=True).row(0, named=True)
    return {
        "findings": findings(capture), "advise": [[r["rule"], r["finding"], r["action"]] for r in mp.advise(capture, replay=False).to_dicts()], "leaks": mp.leaks(capture).height,
        "start": row["start_allocated_bytes"], "peak": row["peak_allocated_bytes"], "end": row["end_allocated_bytes"],
        "at the end": [[r["category"], r["requested_bytes"]] for r in mp.breakdown(capture, at="end").to_dicts()],
    }  # fmt: skip


def adam() -> Any:
    width = small(4096, 256)
    net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(8)]).to(DEVICE)
    opt = torch.optim.Adam(net.parameters(), lr=1e-4)
    for _ in range(3):
        net(torch.randn(16, width, device=DEVICE)).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)
    return net, opt


def sines(x: Any, blocks: int = 1) -> Any:
    for _ in range(4 * blocks):
        x = x.sin()
    return x


def checkpointed(*, each: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.zeros(small(16 * MIB, MIB) // 4, device=DEVICE, requires_grad=True)
    if each:
        for _ in range(8):
            x = checkpoint(sines, x, use_reentrant=False)
    else:
        x = checkpoint(sines, x, 8, use_reentrant=False)
    x.sum().backward()


@stage
def cases(out: Path) -> dict[str, Any]:
    """State of the first step, one checkpoint around everything and one a block, a loading cell run three times."""
    from IPython.core.interactiveshell import InteractiveShell

    import nbmemprof as mp

    found: dict[str, Any] = {}
    for name, work in (("first step", adam), ("one checkpoint", lambda: checkpointed(each=False)), ("one a block", lambda: checkpointed(each=True))):
        with mp.record(title=name) as rec:
            held = work()
            sync()
        found[name] = said(rec.capture)
        del held
        gc.collect()
    shell = InteractiveShell.instance()
    shell.run_line_magic("load_ext", "nbmemprof")
    shell.user_ns["DEVICE"], shell.user_ns["SIZE"] = DEVICE, small(512 * MIB, 4 * MIB)
    shell.run_cell("import torch")
    for turn in range(3):
        shell.run_cell("%%memprof -q\nDATA = torch.empty(SIZE, dtype=torch.uint8, device=DEVICE)")
        capture = shell.user_ns["_memprof"]
        found[f"loading, run {turn + 1}"] = said(capture) | {"replaced": capture.meta.get("replaced")}
    return found


@stage
def ddp(out: Path) -> dict[str, Any]:
    """DistributedDataParallel of one rank: its buckets are named, and take what the gradients take."""
    import torch.distributed as dist

    import nbmemprof as mp

    dist.init_process_group("nccl" if ON_GPU else "gloo", init_method="tcp://127.0.0.1:29532", rank=0, world_size=1)
    found: dict[str, Any] = {}
    for views in (False, True):
        width = small(2048, 64)
        with mp.record(source="torch_history" if ON_GPU else "torch_cpu", title="ddp") as rec:
            net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)]).to(DEVICE)
            model = torch.nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=views)
            for _ in range(3):
                model(torch.randn(8, width, device=DEVICE)).square().mean().backward()
            sync()
        rows = rec.capture.allocations
        buckets = rows.filter((rows["op"].cast(str) == "DDP bucket") & rows["free_seq"].is_null())
        found[f"views={views}"] = {
            "gradients": sum(p.grad.nbytes for p in net.parameters()), "buckets": int(buckets["requested_bytes"].sum()),
            "bucket_categories": buckets["category"].cast(str).unique().to_list(), "end": [[r["category"], r["requested_bytes"]] for r in mp.breakdown(rec.capture, at="end").to_dicts()],
        }  # fmt: skip
        del model, net, rec
        gc.collect()
    dist.destroy_process_group()
    return found


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception:
        return {"failed": traceback.format_exc()[-1500:]}


# ---------------------------------------------------------------------- cost
def encoder(batch: int = 16, length: int = 256) -> tuple[Any, Any, Callable[[], None]]:
    """The CPU-bound step of the project's cost table: 12 layers of 512, batch 16 x 256, AdamW without foreach. With less to compute nothing hides the CPU's time."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(512, 8, small(2048, 64), batch_first=True)
    model = torch.nn.TransformerEncoder(layer, small(12, 2), enable_nested_tensor=False).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.randn(small(batch, 2), small(length, 8), 512, device=DEVICE)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def steps_ms(step: Callable[[], None], count: int, around: contextlib.AbstractContextManager[Any]) -> list[tuple[float, float]]:
    """Milliseconds of each step: on the clock, and of this thread's processor time."""
    with around:
        step()
        sync()
        times = []
        for _ in range(count):
            wall, own = time.perf_counter(), time.thread_time()
            step()
            times.append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - own) * 1e3))
            if len(times) % 5 == 0:
                sync()
        sync()
    return times


@contextlib.contextmanager
def history_only() -> Any:
    """torch's own history without call stacks, and nothing of ours."""
    if ON_GPU:
        torch.cuda.memory._record_memory_history("all", context=None, stacks="python", max_entries=800_000)
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.memory._record_memory_history(None)


@contextlib.contextmanager
def patched(**changes: Any) -> Any:
    """A recording with parts of the recorder switched off."""
    import nbmemprof as mp
    from nbmemprof.sources import torch_history

    kind = torch_history.TorchHistory
    before = {name: getattr(kind, name) for name in changes}
    for name, value in changes.items():
        setattr(kind, name, value)
    try:
        with mp.record(stacks="none"):
            yield
    finally:
        for name, value in before.items():
            setattr(kind, name, value)


def micro(count: int, around: contextlib.AbstractContextManager[Any]) -> dict[str, float]:
    """Microseconds of processor time: of an allocation with its release, of a call of a module that does nothing within another, and of an outermost one."""
    many = torch.nn.Sequential(*[torch.nn.Identity() for _ in range(200)])
    x, one = torch.zeros(1, device=DEVICE), torch.nn.Identity()

    def each(call: Callable[[], Any], times: int) -> float:
        begin = time.thread_time()
        for _ in range(times):
            call()
        return (time.thread_time() - begin) / times * 1e6

    with around, torch.no_grad():
        many(x), one(x)
        outermost = each(lambda: one(x), count // 10)
        return {"allocation": each(lambda: torch.empty(1000, device=DEVICE), count), "module": (each(lambda: many(x), count // 200) - outermost) / 200, "outermost": outermost}


def ratio(found: list[float]) -> dict[str, Any]:
    """Median, and the interval in which 95 % of the medians of resampled rounds lie."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(found, k=len(found))) for _ in range(2000))
    return {"ratio": round(statistics.median(found), 4), "interval": [round(medians[50], 4), round(medians[1949], 4)]}


def in_turns(step: Callable[[], None], ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]], count: int) -> dict[str, Any]:
    """Median step of each way in each of ``count`` rounds, and over the rounds: milliseconds, and the ratio to the plain one of the same round.

    The order of the ways is drawn anew in each round, since a way's neighbour in time shares its disturbance of the host.
    """
    rounds: list[dict[str, tuple[float, float]]] = []
    draw = random.Random(0)
    for _ in range(count):
        made: dict[str, tuple[float, float]] = {}
        for name in draw.sample(list(ways), len(ways)):
            rows = steps_ms(step, small(8, 2), ways[name]())
            made[name] = (statistics.median(r[0] for r in rows), statistics.median(r[1] for r in rows))
        rounds.append(made)
    found: dict[str, Any] = {"rounds": rounds}
    for which, word in ((0, "wall"), (1, "processor")):
        found[word] = {
            name: {"ms": round(statistics.median(r[name][which] for r in rounds), 3), "least_ms": round(min(r[name][which] for r in rounds), 3)} | ratio([r[name][which] / r["plain"][which] for r in rounds])
            for name in ways
        }
    return found


@stage
def cost(out: Path) -> dict[str, Any]:
    """Step time of the encoder in turns: plain, torch's history alone, recorded without and with attribution; then MemTracker and torch.profiler.

    ``ratio``: median over rounds of a way's median step over the plain one of the same round, with a 95 % bootstrap interval. ``small_batch``: the same
    model with 2 x 64, where the device waits for the CPU throughout.
    """
    import nbmemprof as mp

    nothing: Callable[..., Any] = lambda *_, **__: None
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "torch's history alone": history_only,
        "recorded without attribution": lambda: patched(_observe=nothing),
        "recorded": lambda: mp.record(stacks="none"),
        "recorded with stacks": lambda: mp.record(stacks="python"),
    }
    found: dict[str, Any] = {}
    for batch, length in ((2, 64), (16, 256)):
        model, optimizer, step = encoder(batch, length)
        for _ in range(3):
            step()
        with mp.record(stacks="none"):  # what is loaded and met once
            step()
        turns = in_turns(step, ways, small(32, 2))
        found |= turns if batch == 16 else {"small_batch": turns}
    found["micro_us"] = {name: micro(small(20000, 200), way()) for name, way in ways.items()}
    gc.collect()
    from torch.distributed._tools.mem_tracker import MemTracker

    others: dict[str, list[tuple[float, float]]] = {"MemTracker": [], "torch.profiler": []}
    for _ in range(small(3, 1)):  # one step each: it tracks no second one
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            sync()
            wall, own = time.perf_counter(), time.thread_time()
            step()
            others["MemTracker"].append(((time.perf_counter() - wall) * 1e3, (time.thread_time() - own) * 1e3))
            sync()
    others["torch.profiler"] = steps_ms(step, small(3, 1), torch.profiler.profile(profile_memory=True, record_shapes=True, with_stack=True))
    found["others"] = {name: {"wall_ms": statistics.median(r[0] for r in rows), "processor_ms": statistics.median(r[1] for r in rows)} for name, rows in others.items()}
    return found


# ---------------------------------------------------------------------- running them
def one(name: str, out: Path) -> int:
    begin = time.perf_counter()
    try:
        numbers, code = STAGES[name](out), 0
    except BaseException:
        numbers, code = {"failed": traceback.format_exc()}, 1
    driver = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False).stdout.strip() if ON_GPU else "CPU"
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]} | {n: sys.modules[n].__version__ for n in ("transformers", "cupy") if n in sys.modules}
    head = {"stage": name, "what": (STAGES[name].__doc__ or "").strip(), "command": f"python tests/gpu/record_ledger.py OUT {name}", "device": driver, "versions": versions, "date": datetime.now(UTC).date().isoformat()}
    (out / f"{name}.json").write_text(json.dumps(head | {"seconds": time.perf_counter() - begin, "numbers": numbers}, indent=1, default=str))
    print(f"== {name} ({time.perf_counter() - begin:.1f} s)\n{numbers['failed'][-1500:] if code else json.dumps(numbers, default=str)[:1500]}", flush=True)
    return code


def main(arguments: list[str]) -> int:
    out = Path(arguments[0])
    out.mkdir(parents=True, exist_ok=True)
    names = arguments[1:] or list(STAGES)
    if len(names) == 1:
        return one(names[0], out)
    codes = []
    for name in names:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        try:
            codes.append(subprocess.run([sys.executable, __file__, str(out), name], env=os.environ | {"PYTHONPATH": path}, check=False, timeout=60).returncode)
        except subprocess.TimeoutExpired:
            print(f"== {name}\nstopped", flush=True)
            codes.append(1)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
