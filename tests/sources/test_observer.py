"""Hooks that watch a program leave it as it was: what it computes, its own hooks, its errors, the compiler, and nothing behind."""

from __future__ import annotations

import copy
import gc
import sys
import traceback
import warnings
import weakref
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from cuda_like import CudaLike, live_before_backward, saved_bytes

import nbmemprof as mp
from nbmemprof import tags
from nbmemprof.capture import Capture
from nbmemprof.sources._observer import Observer

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


def tables() -> list[int]:
    """How much stands in torch's tables of global hooks."""
    modules, optim = sys.modules["torch.nn.modules.module"], sys.modules["torch.optim.optimizer"]
    return [len(v) for m in (modules, optim) for n, v in sorted(vars(m).items()) if n.startswith("_global_") and hasattr(v, "__len__")]


def functions() -> list[Any]:
    modules = sys.modules["torch.nn.modules.module"]
    names = [(torch._C, "_stash_obj_in_tls"), (torch._C, "_remove_obj_from_tls"), (torch, "compile"), (modules, "_has_any_global_hook")]
    return [getattr(owner, name, None) for owner, name in names]


def by_category(capture: Capture, rows: pl.DataFrame | None = None) -> dict[str, int]:
    rows = capture.allocations if rows is None else rows
    return dict(rows.group_by(pl.col("category").cast(pl.String)).agg(pl.col("requested_bytes").sum()).iter_rows())


def mlp(width: int = 64, depth: int = 3) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())])


def bytes_of(tensors: Any) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


class Trained:
    """A model that is made and trained within the recording."""

    def __init__(self, model: Any, x: Any, steps: int = 2, **options: Any) -> None:
        self.model, self.x = model, x
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with CudaLike(**options) as self.run:
            for _ in range(steps):
                self.forward().backward()
                optimizer.step()
                optimizer.zero_grad()
            self.forward().backward()
        self.capture, self.optimizer = self.run.capture, optimizer

    def forward(self) -> Any:
        return self.model(self.x).square().mean()


# ---------------------------------------------------------------------- what it finds
@pytest.mark.cost(0.6)
@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize("kind", ["mlp", "attention", "convolution"])
def test_categories_are_the_models_arithmetic_and_activations_what_autograd_saves(kind: str, notes: bool) -> None:
    torch.manual_seed(0)
    make: dict[str, Any] = {
        "mlp": lambda: (mlp(), torch.randn(32, 64)),
        "attention": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 2, 64, batch_first=True), 2), torch.randn(4, 16, 32)),
        "convolution": lambda: (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 7 * 7, 10)), torch.randn(4, 3, 16, 16)),
    }
    model, x = make[kind]()
    seen = Trained(model, x, notes=notes)
    assert seen.run.observer.faults == {}
    made = by_category(seen.capture, seen.capture.allocations.filter(pl.col("free_seq").is_null() & pl.col("alloc_seq").is_not_null()))
    assert made["gradients"] == bytes_of(p.grad for p in model.parameters())
    assert made["optimizer_state"] == bytes_of(t for s in seen.optimizer.state.values() for t in s.values())
    truth = saved_bytes(seen.forward, [*model.parameters(), *model.buffers(), x])
    for step in (0, 1, 2):
        live = live_before_backward(seen.capture, step)
        assert live.filter(pl.col("evidence").cast(pl.String) == "saved")["requested_bytes"].sum() == truth
    rows = seen.capture.allocations
    assert rows.filter(pl.col("phase").cast(pl.String) == "optimizer")["category"].cast(pl.String).unique().sort().to_list() == ["optimizer_state", "temporary"]
    assert rows.filter(pl.col("category").cast(pl.String) == "unknown", pl.col("alloc_seq").is_not_null()).is_empty()


def test_recomputed_activations_are_told_from_kept_ones() -> None:
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([mlp(64, 2) for _ in range(3)])

        def forward(self, x: Any) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    seen = Trained(Net(), torch.randn(16, 64, requires_grad=True), steps=1)
    rows = seen.capture.allocations.filter(pl.col("category").cast(pl.String) == "activations")
    assert set(rows["phase"].cast(pl.String).unique().to_list()) >= {"forward", "recompute"}
    again = rows.filter(pl.col("phase").cast(pl.String) == "recompute")
    assert again["layer"].cast(pl.String).str.starts_with("Net.blocks.").all()


def test_accumulated_gradients_are_gradients_for_all_their_life() -> None:
    model, x = mlp(), torch.randn(8, 64)
    with CudaLike() as run:
        for _ in range(3):
            model(x).sum().backward()
    rows = run.capture.allocations.filter(pl.col("category").cast(pl.String) == "gradients", pl.col("evidence").cast(pl.String) == "storage", pl.col("alloc_seq").is_not_null())
    assert rows["requested_bytes"].sum() == bytes_of(model.parameters())
    assert rows["free_seq"].null_count() == rows.height


def test_inference_keeps_nothing_for_backward() -> None:
    model, x = mlp(), torch.randn(8, 64)
    with CudaLike() as run, torch.no_grad():
        kept = model(x)
    found = by_category(run.capture, run.capture.allocations.filter(pl.col("alloc_seq").is_not_null()))
    assert found["activations"] == kept.untyped_storage().nbytes()
    assert set(found) == {"activations", "temporary"}


@pytest.mark.cost(0.2)
@pytest.mark.parametrize("notes", [True, False])
def test_what_a_steps_closure_runs_is_a_forward_and_a_backward(notes: bool) -> None:
    model, x = mlp(64, 2), torch.randn(32, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with CudaLike(notes=notes) as run:
        for _ in range(2):
            optimizer.step(closure)
    rows = run.capture.allocations.filter(pl.col("requested_bytes") == 64 * 64 * 4, pl.col("alloc_seq").is_not_null())
    assert rows.height >= 8
    assert set(rows["phase"].cast(pl.String)) == {"backward"}
    assert set(rows["category"].cast(pl.String)) == {"gradients"}
    phases = set(run.capture.allocations["phase"].cast(pl.String).drop_nulls())
    assert {"forward", "backward", "optimizer"} <= phases


def test_a_tag_and_a_named_phase_are_what_the_user_says() -> None:
    with CudaLike() as run:
        with mp.phase("rollout"):
            blocks = mp.tag([torch.zeros(1000), torch.zeros(2000)], "kv_cache", "block table")
        other = torch.zeros(3000)
    rows = run.capture.allocations.filter(pl.col("alloc_seq").is_not_null()).sort("requested_bytes")
    assert rows["category"].cast(pl.String).to_list() == ["kv_cache", "kv_cache", "unknown"]
    assert rows["evidence"].cast(pl.String).to_list() == ["tag", "tag", "none"]
    assert rows["phase"].cast(pl.String).to_list() == ["rollout", "rollout", None]
    del blocks, other
    gc.collect()
    assert list(tags.tagged()) == []


@pytest.mark.cost(0.6)
@pytest.mark.parametrize("views", [False, True])
def test_the_buckets_of_ddp_are_named_and_take_what_the_gradients_take(views: bool, tmp_path: Path) -> None:
    """One rank. Where gradients are views of the buckets, they are gradients."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        with mp.record(source="torch_cpu") as rec:
            net = mlp()
            model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=views)
            for _ in range(3):
                model(torch.randn(8, 64)).square().mean().backward()
            dist.barrier()  # gloo's thread has let go of the buckets' order, 28 bytes
        rows = rec.capture.allocations.with_columns(pl.col("op", "category").cast(pl.String))
        buckets = rows.filter((pl.col("op") == "DDP bucket") & pl.col("free_seq").is_null())
        assert buckets["requested_bytes"].sum() == sum(p.grad.nbytes for p in net.parameters())
        assert buckets["category"].unique().to_list() == ["gradients" if views else "framework"]
        del model
    finally:
        dist.destroy_process_group()


def test_ranges_of_nvtx_are_named_phases_and_zero_grad_is_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    before, zero = (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop), (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with CudaLike() as run:
        torch.cuda.nvtx.range_push("outer")
        one = torch.zeros(1000)
        torch.cuda.nvtx.range_push("inner")
        two = torch.zeros(2000)
        torch.cuda.nvtx.range_pop()
        three = torch.zeros(3000)
        torch.cuda.nvtx.range_pop()
        loss = model(torch.randn(8, 64)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.zero_grad()
    named = dict(run.capture.allocations.filter(pl.col("requested_bytes").is_in([4000, 8000, 12000])).select("requested_bytes", pl.col("phase").cast(pl.String)).iter_rows())
    assert named == {4000: "outer", 8000: "inner", 12000: "outer"}
    assert said == ["outer", "inner", "pop", "pop"]
    phases = run.capture.tables["contexts"]["phase"].cast(pl.String)
    assert {"forward", "backward", "zero_grad"} <= set(phases.drop_nulls())
    assert by_category(run.capture)["activations"] > 0  # the zero_grad between loss and backward has not cut them apart
    assert (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop) == before and (torch.optim.Optimizer.zero_grad, nn.Module.zero_grad) == zero
    del one, two, three


def test_a_wrong_category_is_refused_with_those_that_exist() -> None:
    with pytest.raises(mp.NbmemprofError, match="weights, gradients"):
        mp.tag(torch.zeros(1), "kvcache")


def test_steps_end_with_the_last_of_several_optimizers() -> None:
    a, b, x = mlp(8, 1), mlp(8, 1), torch.randn(2, 8)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (a, b))
    with CudaLike() as run:
        for _ in range(3):
            for model, optimizer in ((a, first), (b, second)):
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert run.capture.tables["contexts"]["step"].max() in (2, 3)
    assert run.capture.allocations.filter(pl.col("phase").cast(pl.String) == "forward")["step"].unique().sort().to_list() == [0, 1, 2]


# ---------------------------------------------------------------------- what it leaves alone
def test_nothing_stays_behind() -> None:
    before, patched, listening = tables(), functions(), len(tags.listeners)
    with CudaLike() as run:
        mlp()(torch.randn(2, 64)).sum().backward()
    assert (tables(), functions(), len(tags.listeners)) == (before, patched, listening)
    assert run.said[-1][2] == ""  # the thread's note
    with pytest.raises(ZeroDivisionError), CudaLike():
        1 / 0  # noqa: B018
    assert (tables(), functions()) == (before, patched)


def test_models_and_tensors_die_when_they_would() -> None:
    with CudaLike():
        model = mlp()
        out = model(torch.randn(2, 64))
        out.sum().backward()
        gone = [weakref.ref(model), weakref.ref(out), weakref.ref(next(model.parameters()))]
        del model, out
        gc.collect()
        assert [ref() for ref in gone] == [None, None, None]


def test_hooks_of_the_users_own_copies_slots_functional_call_and_vmap_work_as_ever() -> None:
    class Slotted:
        __slots__ = ("net",)

        def __init__(self, net: Any) -> None:
            self.net = net

    def work() -> list[Any]:
        model, calls, x = mlp(8, 1), [], torch.arange(16.0).reshape(2, 8)
        handles = [model.register_forward_hook(lambda m, a, o: calls.append("forward") or o * 2), model.register_full_backward_hook(lambda m, i, o: calls.append("backward"))]
        model(x).sum().backward()
        for handle in handles:
            handle.remove()
        twin = copy.deepcopy(model)
        parameters = dict(model.named_parameters())
        slotted = Slotted(twin)
        per_sample = torch.func.vmap(torch.func.grad(lambda p, s: torch.func.functional_call(model, p, (s,)).sum()), in_dims=(None, 0))(parameters, x)
        return [calls, slotted.net(x), torch.func.functional_call(model, parameters, (x,)), *per_sample.values(), *(p.grad for p in model.parameters())]

    plain = work()
    with CudaLike() as run:
        watched = work()
    assert watched[0] == plain[0] == ["forward", "backward"]
    assert all(torch.equal(a, b) for a, b in zip(watched[1:], plain[1:], strict=True))
    assert run.observer.faults == {}


def test_an_error_in_a_forward_shows_no_frame_of_ours_and_the_next_forward_has_its_place() -> None:
    class Fails(nn.Module):
        def forward(self, x: Any) -> Any:
            raise ValueError("mine")

    model = nn.Sequential(nn.Linear(8, 8), Fails())
    with warnings.catch_warnings(), CudaLike() as run:
        warnings.simplefilter("error")
        try:
            model(torch.randn(2, 8))
        except ValueError as error:
            shown = "".join(traceback.format_exception(error))
        kept = nn.Sequential(nn.Linear(4, 4))(torch.randn(2, 4))
    assert "nbmemprof" not in shown
    assert run.observer.faults == {}
    row = run.capture.allocations.filter((pl.col("requested_bytes") == kept.untyped_storage().nbytes()) & (pl.col("phase").cast(pl.String) == "forward"))
    assert row["layer"].cast(pl.String).str.ends_with(".0").to_list() == [True]


def test_an_error_in_backward_shows_no_frame_of_ours() -> None:
    class Breaks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            raise ValueError("mine")

    with CudaLike() as run:
        try:
            Breaks.apply(torch.ones(3, requires_grad=True)).sum().backward()
        except ValueError as error:
            shown = "".join(traceback.format_exception(error))
        after = torch.zeros(777)
    tells = "_stash_obj_in_tls" in torch.autograd.graph._engine_run_backward.__code__.co_names  # since 2.13; before, the call itself is wrapped
    assert shown.count("in _engine_run_backward") == (1 if tells else 2)
    assert shown.count("sources/_observer.py") == (0 if tells else 1)
    assert run.capture.allocations.filter(pl.col("requested_bytes") == after.untyped_storage().nbytes())["phase"].to_list() == [None]


def test_lazy_and_fake_modules_have_no_memory_and_disturb_nothing() -> None:
    lazy, model = nn.LazyLinear(3), mlp()
    with torch._subclasses.fake_tensor.FakeTensorMode():
        fake = nn.Linear(3, 3)
    with CudaLike(everywhere=True) as run:
        model(torch.randn(2, 64))
    assert run.observer.faults == {}
    assert not any(owner[3] == 0 for owner in run.observer.owned.rows) and fake.weight.shape == (3, 3)
    assert mp.snapshot().blocks.height and mp.holders(device="cpu").height
    with mp.record() as rec:
        lazy(torch.randn(2, 64))
    assert not any("uninitialized" in said for said in rec.capture.meta["warnings"])


def test_notes_of_the_users_own_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_setMemoryMetadata", said.append, raising=False)
    observer = Observer(torch, "cpu", torch._C._cuda_setMemoryMetadata)  # type: ignore[attr-defined]
    observer.open()
    torch._C._cuda_setMemoryMetadata("the user's")  # type: ignore[attr-defined]
    mlp()(torch.randn(2, 64))
    observer.close()
    assert said[-1] == "the user's"


@pytest.mark.cost(3)
@pytest.mark.parametrize("when", ["before", "within"])
def test_the_compiler_sees_nothing_of_it(when: str) -> None:
    """No graph break, no second compilation, no warning; whether compiled before the window or within it."""
    from torch._dynamo.utils import counters

    def stats() -> dict[str, Any]:
        return {name: dict(counters[name]) for name in ("stats", "graph_break")}

    torch._dynamo.reset()
    counters.clear()
    model, x = mlp(8, 1), torch.randn(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observer = Observer(torch, "cpu", lambda _: None)
        if when == "within":
            observer.open()
        whole, function = torch.compile(model, backend="eager", fullgraph=True), torch.compile(lambda t: model(t).sum(), backend="eager", fullgraph=True)
        whole(x)
        function(x)
        first = stats()
        if when == "within":
            observer.close()
        whole(x)
        function(x)
        observer = Observer(torch, "cpu", lambda _: None)
        observer.open()
        try:
            whole(x)
            function(x)
        finally:
            observer.close()
    assert stats() == first
    assert first["graph_break"] == {}
    assert observer.faults == {}


# ---------------------------------------------------------------------- analyses on it
@pytest.mark.cost(3)
def test_compare_tells_what_autograd_keeps() -> None:
    """Equal to the arithmetic of saved tensors, on two models."""
    torch.manual_seed(0)
    for model, x in ((mlp(64, 3), torch.randn(32, 64)), (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)), torch.randn(4, 3, 8, 8))):

        def train(model: Any = model, x: Any = x) -> None:
            model.zero_grad()
            model(x).square().mean().backward()

        def quiet(model: Any = model, x: Any = x) -> None:
            with torch.no_grad():
                model(x).square().mean()

        frame = mp.compare(train=train, no_grad=quiet, source="torch_cpu")
        truth = saved_bytes(lambda model=model, x=x: model(x).square().mean(), [*model.parameters(), x])
        assert frame["function"].to_list() == ["train", "no_grad"]
        assert frame["saved_bytes"].to_list() == [truth, 0]
        grads = sum(p.grad.nbytes for p in model.parameters())
        assert frame["accumulators_bytes"][0] == grads
        assert 0 < frame["autograd_share"][0] <= 1 and frame["autograd_share"][1] == 0
        assert frame["slack_bytes"].null_count() == 2  # a CPU reserves nothing
        model.zero_grad()  # the other model's count begins without them


def test_compare_needs_functions() -> None:
    with pytest.raises(mp.NbmemprofError, match="functions by name"):
        mp.compare()


def test_layers_sum_to_the_whole_and_parents_hold_their_children() -> None:
    seen = Trained(nn.Sequential(mlp(64, 2), nn.Sequential(nn.Linear(64, 64))), torch.randn(32, 64))
    frame, whole = mp.layers(seen.capture, at="end"), mp.breakdown(seen.capture, at="end")
    title = frame.filter(pl.col("layer").str.ends_with(".0.2"))["layer"][0].removesuffix(".0.2")  # several models of a class have numbers
    top = frame.filter(pl.col("parent").is_null())
    assert top["size_bytes"].sum() == whole["size_bytes"].sum()
    assert frame["own_bytes"].sum() == whole["size_bytes"].sum()
    inner = frame.filter(pl.col("layer") == f"{title}.0").row(0, named=True)
    children = frame.filter(pl.col("parent") == f"{title}.0")
    assert inner["size_bytes"] == children["size_bytes"].sum() + inner["own_bytes"]
    assert inner["gradients_bytes"] == bytes_of(seen.model[0].parameters())
    assert title in mp.layers(seen.capture, at="end", depth=0)["layer"].to_list()
    assert inner["forward_us"] >= children["forward_us"].sum() > 0  # a module that asks once takes its time all the same
    with pytest.raises(mp.NbmemprofError, match="below 0"):
        mp.layers(seen.capture, depth=-1)
    with pytest.raises(mp.NbmemprofError, match="no whole number"):
        mp.layers(seen.capture, depth="deep")  # type: ignore[arg-type]


def test_parts_sum_to_the_model_and_quantizing_is_arithmetic() -> None:
    """Two linear layers by their names: attention and MLP; one byte a weight and two for each row's scale."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn, self.mlp, self.norm = nn.Linear(64, 64, bias=False), nn.Linear(64, 32), nn.LayerNorm(32)

        def forward(self, x: Any) -> Any:
            return self.norm(self.mlp(self.attn(x)))

    with mp.record(source="torch_cpu") as rec:
        net = Net()
        out = net(torch.randn(8, 64))
    parts = mp.layers(rec.capture, at="end", by="part").filter(pl.col("parent") == "Net")
    weights = dict(parts.select("name", "weights_bytes").iter_rows())
    assert weights == {"attention": 4 * 64 * 64, "MLP": 4 * (64 * 32 + 32), "norm": 4 * 64}
    saved = dict(parts.select("name", "int8_saves_bytes").iter_rows())
    assert saved == {"attention": 3 * 64 * 64 - 2 * 64, "MLP": 3 * 64 * 32 - 2 * 32, "norm": 0}
    row = mp.layers(rec.capture, at="end").filter(pl.col("layer") == "Net.attn").row(0, named=True)
    assert row["int4_saves_bytes"] == 4 * 64 * 64 - 64 * 64 // 2 - 4 * 64
    with pytest.raises(mp.NbmemprofError, match="'path', 'part' or 'expert'"):
        mp.layers(rec.capture, by="colour")
    del out
