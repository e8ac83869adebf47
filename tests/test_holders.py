"""Who holds it: every sort of holder is found by the bytes it holds, named by its shortest chain, without running its code or keeping it."""

from __future__ import annotations

import collections
import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from types import ModuleType, SimpleNamespace

import leaky
import numpy as np
import polars as pl
import pytest
import torch

import nbmemprof as mp
from nbmemprof.errors import NbmemprofError
from nbmemprof.holding import _objects, grouped, held_by_traceback

MIB = 1 << 20
CALLED: list[str] = []


def own(kib: int) -> torch.Tensor:
    return torch.empty(kib << 10, dtype=torch.uint8)


class Loud:
    """Says which of its code is run; a look must run none."""

    def __init__(self, tensor):
        self.payload = tensor

    def __getattribute__(self, name):
        CALLED.append(f"__getattribute__ {name}")
        return object.__getattribute__(self, name)

    def __getattr__(self, name):
        CALLED.append(f"__getattr__ {name}")
        raise AttributeError(name)

    def _say(self, *args):
        CALLED.append("a special method")
        raise RuntimeError

    __repr__ = __eq__ = __len__ = __bool__ = __iter__ = __getitem__ = __contains__ = __dir__ = _say
    __hash__ = object.__hash__

    @property
    def __class__(self):
        CALLED.append("__class__")
        return dict

    @property
    def value(self):
        CALLED.append("a property")


class LoudDict(dict):
    def items(self):
        CALLED.append("items")
        return super().items()

    __iter__ = keys = values = get = __getitem__ = items


class LoudTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if LoudTensor.armed:
            CALLED.append(f"__torch_function__ {func}")
        return super().__torch_function__(func, types, args, kwargs or {})

    armed = False


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor):
        self.tensor = tensor

    def method(self):
        return self.tensor


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.extra = own(21)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad


def closure(tensor):
    def captures():
        return tensor

    return captures


def numbers(tensor):
    local = tensor
    yield 1
    yield local.sum()


async def waits(tensor):
    await _Never()
    return tensor


class _Never:
    def __await__(self):
        yield


def hooked(kib):
    module, kept = torch.nn.ReLU(), own(kib)
    module.register_forward_hook(lambda m, a, out: kept.sum() and None)
    return torch.nn.Sequential(module)


def tensor_hooked(kib):
    leaf, kept = torch.ones(1, requires_grad=True), own(kib)
    leaf.register_hook(lambda grad: grad * kept[0])
    return leaf


def packed(kib):
    def unpack(index):
        CALLED.append("unpack hook")
        return kept[index]

    kept = [own(kib).float().requires_grad_()]
    with torch.autograd.graph.saved_tensors_hooks(Slotted, unpack):
        return (torch.ones(kib << 10, requires_grad=True) * 2).exp().sum()


def graph(rows):
    x = torch.ones(rows, 256)
    weight = torch.ones(256, 100, requires_grad=True)
    return (x @ weight).sum()


def cycle(kib):
    ring = Slotted(None)
    ring.tensor = [own(kib), ring]


def coroutine(tensor):
    it = waits(tensor)
    it.send(None)
    return it


def running(tensor, go, done):
    go.set()
    done.wait(60)


def world() -> dict:
    """Variables; what each holds has a size of its own, in KiB."""
    leaf = torch.ones(8 << 8, requires_grad=True)  # 8 KiB
    (leaf * 3).sum().backward()
    generator = numbers(own(11))
    next(generator)
    loud_tensor = own(17).as_subclass(LoudTensor)
    storage = own(18).untyped_storage()
    values = torch.ones(19 << 8)
    sparse = torch.sparse_coo_tensor(torch.zeros(1, 19 << 8, dtype=torch.long), values, (5,), check_invariants=False)
    del values
    return {
        "plain": own(1), "listed": [0, [own(2)]], "keyed": {("a", 1): own(3)}, "model": torch.nn.Sequential(torch.nn.Linear(1024, 1, bias=False)), "leaf": leaf,
        "dq": collections.deque([own(5)]), "bag": {own(6)}, "slotted": Slotted(own(7)), "fn": closure(own(9)), "part": functools.partial(print, own(10)), "gen": generator,
        "coro": coroutine(own(12)), "hooks": hooked(13), "thook": tensor_hooked(14), "loss": graph(15), "loud": Loud(own(16)), "loud_tensor": loud_tensor, "store": storage,
        "sparse": sparse, "louddict": LoudDict(x=own(20)), "fact": Keeps.apply(torch.ones(1, requires_grad=True)), "packed": packed(22), "method": Slotted(own(24)).method,
        "view": own(2500)[: 25 << 10], "cls": type("Configured", (), {"table": own(26)}), "handles": torch,
    }  # fmt: skip


EXPECTED = {  # KiB: (kind, holder, root)
    1: ("variable", "plain", "plain"), 2: ("variable", "listed[1][0]", "listed"), 3: ("variable", "keyed[('a', 1)]", "keyed"), 4: ("variable", "model.0.weight", "model"),
    5: ("variable", "dq[0]", "dq"), 6: ("variable", "bag{…}", "bag"), 7: ("variable", "slotted.tensor", "slotted"), 9: ("closure", "closure.captures: fn closure tensor", "fn"),
    10: ("variable", "part.args[0]", "part"), 11: ("generator", "gen: local tensor (generator numbers)", "gen"), 12: ("generator", "coro: local tensor (coroutine waits)", "coro"),
    16: ("variable", "loud.payload", "loud"), 17: ("variable", "loud_tensor", "loud_tensor"), 18: ("variable", "store", "store"), 19: ("variable", "sparse", "sparse"),
    20: ("variable", "louddict['x']", "louddict"), 21: ("graph", "fact.grad_fn.extra", "fact"), 24: ("variable", "method.__self__.tensor", "method"), 2500: ("variable", "view", "view"),
    26: ("variable", "cls.table", "cls"), 15: ("graph", "loss.grad_fn", "loss"),
}  # fmt: skip


@pytest.fixture(scope="module")
def seen():
    """The world, looked at once, with a thread and a garbage cycle beside it."""
    CALLED.clear()
    gc.collect()
    strangers = mp.holders({}, device="cpu")["addr"]  # what other tests left in this process
    space = world()
    go, done = threading.Event(), threading.Event()
    thread = threading.Thread(target=running, args=(own(27), go, done), name="loader")
    thread.start()
    go.wait(10)
    gc.collect()
    gc.disable()
    cycle(28)
    LoudTensor.armed = True
    try:
        frame = mp.holders(space, device="cpu").filter(~pl.col("addr").is_in(strangers.implode()))
        assert not gc.isenabled()
    finally:
        gc.enable()
        LoudTensor.armed = False
        done.set()
        thread.join()
    return frame, list(CALLED)


def of(frame: pl.DataFrame, kib: int) -> dict:
    rows = frame.filter(pl.col("size_bytes") == kib << 10).to_dicts()
    assert rows, f"nothing of {kib} KiB"
    return rows[0]


@pytest.mark.parametrize("kib", EXPECTED)
def test_each_holder_is_named_by_its_chain(seen, kib):
    row = of(seen[0], kib)
    assert (row["kind"], row["holder"], row["name"]) == EXPECTED[kib]


def test_what_hooks_hold_is_theirs(seen):
    row = of(seen[0], 13)
    assert row["kind"] == "hook"
    assert row["holder"].startswith("forward hook of hooks.0: ")
    assert "handle.remove()" in row["advice"]
    row = of(seen[0], 14)
    assert row["kind"] == "hook"
    assert "thook" in row["holder"]


def test_gradients_are_found_through_their_leaf(seen):
    rows = seen[0].filter(pl.col("size_bytes") == 8 << 10)["holder"].to_list()
    assert sorted(rows) == ["leaf", "leaf.grad"]


def test_what_a_hook_packed_is_found_and_not_unpacked(seen):
    rows = seen[0].filter(pl.col("name") == "packed")
    assert rows.filter(pl.col("chain").list.contains(".tensor"))["size_bytes"].to_list() == [4 * 22 << 10]
    assert "unpack hook" not in seen[1]


def test_another_thread_is_named(seen):
    row = of(seen[0], 27)
    assert (row["kind"], row["name"]) == ("thread", "tensor")
    assert "running (test_holders.py:" in row["holder"]
    assert "in thread loader" in row["holder"]


def test_garbage_waits_for_the_collector(seen):
    row = of(seen[0], 28)
    assert (row["kind"], row["releasable"], row["advice"]) == ("cycle", True, "gc.collect()")
    assert "Slotted.tensor[0]" in row["holder"]


def test_a_view_shows_less_than_it_keeps(seen):
    row = of(seen[0], 2500)
    assert (row["tensor_bytes"], row["amplification"]) == (25 << 10, 100.0)
    assert ".clone()" in row["advice"]


def test_no_code_of_the_users_runs(seen):
    assert seen[1] == []


def test_each_storage_is_counted_once(seen):
    frame = seen[0]
    once = frame.unique("addr")
    assert frame["counted_bytes"].sum() == once["size_bytes"].sum()
    assert grouped(frame)["size_bytes"].sum() == frame["counted_bytes"].sum()


@pytest.mark.cost(0.8)
def test_a_look_keeps_nothing_alive():
    space = {"a": own(41), "b": [own(42)], "c": graph(43), "d": Loud(own(44)), "g": numbers(own(45))}
    next(space["g"])
    refs = [weakref.ref(space["a"]), weakref.ref(space["b"][0]), weakref.ref(space["d"]), weakref.ref(space["c"]), weakref.ref(space["a"].untyped_storage())]

    def locals_of_a_running_frame():
        tensor = own(46)
        refs.append(weakref.ref(tensor))
        frame = mp.holders({}, device="cpu")
        assert of(frame, 46)["holder"].startswith("tensor, local of ")
        del tensor
        return refs[-1]() is None

    assert locals_of_a_running_frame()
    objects = _objects.take()
    ref = weakref.ref(objects)
    del objects
    assert ref() is None
    mp.holders(space, device="cpu")
    space.clear()
    assert [r() for r in refs] == [None] * len(refs)


@pytest.mark.cost(0.8)
def test_locals_that_someone_asked_for_stay():
    def asked():
        mine, tensor = locals(), own(1)
        mp.holders({}, device="cpu")
        return mine, tensor

    mine, _ = asked()
    assert set(mine) == {"mine", "tensor"} or sys.version_info >= (3, 13)


# ---------------------------------------------------------------------- what people meet
@pytest.mark.cost(0.8)
def test_a_graph_kept_by_a_running_sum():
    with mp.record("torch_cpu") as rec:
        net, total = leaky.evaluate()
    frame = mp.holders({"net": net, "total": total}, device="cpu", by="holder")
    row = frame.filter(pl.col("kind") == "graph").row(0, named=True)
    each = 128 * 1024 * 4 + 128 * 256 * 4 + 128 * 4
    assert (row["holder"], row["name"], row["size_bytes"], row["count"]) == ("total.grad_fn", "total", leaky.BATCHES * each, 3 * leaky.BATCHES)
    assert "no_grad" in row["advice"]
    sites = mp.leaks(rec.capture).group_by("site").agg(pl.col("bytes_per_iteration").sum())
    assert dict(sites.iter_rows()) == {leaky.line("graph"): 128 * 1024 * 4 + 128 * 4, leaky.line("input"): 128 * 256 * 4}


@pytest.mark.cost(0.8)
def test_a_hook_registered_again_at_each_run():
    from nbmemprof.holding import look

    leaky.ACTS.clear()
    kept = []
    for _ in range(3):
        with mp.record("torch_cpu") as rec:
            leaky.probe()
        kept.append(rec.capture)
    each = 64 * 512 * 4
    assert [c.allocations.filter(pl.col("free_seq").is_null() & ~pl.col("at_start"))["size_bytes"].sum() for c in kept] == [r * leaky.BATCHES * each for r in (1, 2, 3)]
    assert mp.leaks(kept[2])["site"].to_list() == [leaky.line("hook")]
    scan = look({"PROBED": leaky.PROBED})
    assert ("PROBED.1", "forward hook", "probe.keep", 3) in scan.hooks
    assert sum(r.memory.size_bytes for r in scan.rows if r.link.text.startswith("leaky.ACTS")) == 6 * leaky.BATCHES * each
    leaky.ACTS.clear()
    leaky.PROBED[1]._forward_hooks.clear()


@pytest.mark.cost(0.8)
def test_a_failed_call_keeps_its_frames(monkeypatch):
    try:
        leaky.fail()
    except ValueError as error:
        for name, value in (("last_exc", error), ("last_value", error), ("last_traceback", error.__traceback__), ("last_type", ValueError)):
            monkeypatch.setattr(sys, name, value, raising=False)
    frame = mp.holders({}, device="cpu").filter(pl.col("kind") == "traceback")
    assert frame["size_bytes"].to_list() == [3 << 20, 2 << 20]
    assert [h.split(",")[0].split(":")[0] for h in frame["holder"]] == ["work in _inner (leaky.py", "batch in fail (leaky.py"]
    assert all(frame["releasable"])
    size, text = held_by_traceback()
    assert size == 5 << 20
    assert "work in _inner (leaky.py:" in text


@pytest.mark.cost(0.8)
def test_an_exception_being_handled_keeps_its_frames():
    try:
        leaky.fail()
    except ValueError:
        frame = mp.holders({}, device="cpu").filter(pl.col("kind") == "handled")
    assert frame["size_bytes"].to_list() == [3 << 20, 2 << 20]
    assert "leave the except block" in frame["advice"][0]


@pytest.mark.cost(0.8)
def test_a_cache_on_a_method():
    leaky.folds()
    row = mp.holders({}, device="cpu", by="holder").filter(pl.col("kind") == "lru_cache").row(0, named=True)
    assert row["holder"] == "lru_cache of Scorer.mask"
    assert (row["size_bytes"], row["count"]) == (leaky.FOLDS * (256 * 512 * 4 + 256 * 256), 2 * leaky.FOLDS)
    assert "Scorer.mask.cache_clear()" in row["advice"]
    leaky.Scorer.mask.cache_clear()


@pytest.mark.cost(0.8)
def test_a_slice_keeps_its_storage():
    leaky.BEST.clear()
    with mp.record("torch_cpu") as rec:
        leaky.best()
    row = mp.holders({"BEST": leaky.BEST}, device="cpu", by="holder").filter(pl.col("name") == "BEST").row(0, named=True)
    assert (row["size_bytes"], row["tensor_bytes"], row["amplification"], row["count"]) == (leaky.KEPT * 64 * 4096, leaky.KEPT * 4096, 64.0, leaky.KEPT)
    leaks = mp.leaks(rec.capture)
    assert leaks.select("site", "bytes_per_iteration").rows() == [(leaky.line("scores"), 64 * 4096)]
    leaky.BEST.clear()


@pytest.mark.cost(0.8)
def test_an_optimizers_state_is_its_own_and_the_weights_are_the_models():
    net, opt = leaky.train()
    frame = mp.holders({"opt": opt, "net": net}, device="cpu", by="holder")
    rows = {row["holder"]: row["size_bytes"] for row in frame.filter(pl.col("name").is_in(["opt", "net"])).to_dicts()}
    weights = 4 * 128 * 128 * 4
    assert rows["net.*.weight"] == rows["net.*.weight.grad"] == weights
    assert rows["opt.state[…][…]"] == 2 * weights + 4 * 4


@pytest.mark.cost(0.8)
def test_state_that_exists_after_the_first_step():
    step = leaky.make_trainer()
    step(4)
    row = of(mp.holders({"step": step}, device="cpu"), 600)
    assert (row["kind"], row["holder"]) == ("closure", "make_trainer.step: step closure state[0]")


# ---------------------------------------------------------------------- the search itself
@pytest.mark.cost(0.8)
def test_the_shortest_chain_wins_on_any_graph():
    """Against a plain search over the same objects, wide and narrow parts alike."""
    rng = np.random.default_rng(3)
    nodes = [[] for _ in range(6000)]
    for i, node in enumerate(nodes):
        node.extend(nodes[j] for j in rng.integers(0, len(nodes), 3 if i % 100 else 400))
    tail = last = []
    for _ in range(30_000):
        last.append([])
        last = last[0]
    nodes[-1].append(tail)
    objects = _objects.take()
    root = objects.index.one(nodes[0])
    objects.enter(root, -2, 0)
    reached = objects.spread(np.array([root]), 0)
    assert len(set(reached.tolist())) == len(reached) == (objects.tier == 0).sum()

    def depth(number: int) -> int:
        steps = 0
        while objects.parent[number] >= 0:
            number, steps = int(objects.parent[number]), steps + 1
        return steps

    depths, queue = {id(nodes[0]): 0}, collections.deque([nodes[0]])
    while queue:
        node = queue.popleft()
        for child in node:
            if id(child) not in depths:
                depths[id(child)] = depths[id(node)] + 1
                queue.append(child)
    assert [depth(objects.index.one(n)) for n in nodes[::500]] == [depths[id(n)] for n in nodes[::500]]
    assert depth(objects.index.one(last)) == depths[id(nodes[-1])] + 30_001


@pytest.mark.cost(0.8)
def test_frozen_objects_are_found():
    space = {"frozen": [own(47)]}
    gc.collect()
    gc.freeze()
    try:
        assert of(mp.holders(space, device="cpu"), 47)["holder"] == "frozen[0]"
    finally:
        gc.unfreeze()


def test_the_state_of_modules_in_c_is_not_walked(monkeypatch):
    """Python 3.12's ``_asyncio`` shows the objects of its free list there: looked at twice, the list is a ring and the look never ends."""
    asked = []

    def get_referents(*things):
        asked.extend(thing for thing in things if isinstance(thing, ModuleType))
        return gc.get_referents(*things)

    monkeypatch.setattr(_objects, "gc", SimpleNamespace(**{name: getattr(gc, name) for name in ("get_objects", "is_tracked")}, get_referents=get_referents, get_freeze_count=lambda: 1))
    space = {"names": [own(53)]}
    graph = _objects.take(lambda: [space])
    assert asked == []
    at = graph.index.one(sys.modules["asyncio"])
    assert graph.after(at) == [graph.index.one(vars(sys.modules["asyncio"]))]


@pytest.mark.cost(0.8)
def test_an_address_that_is_none_of_ours_has_no_number():
    objects = _objects.take()
    assert objects.index.one(1 << 20) == -1
    assert objects.index.one([]) == -1


@pytest.mark.parametrize(("options", "text"), [({"device": "gpu"}, "not a device"), ({"device": "cuda:x"}, "not a device"), ({"by": "size"}, "can't be grouped")])
def test_what_can_not_be_asked_is_refused(options, text):
    with pytest.raises(NbmemprofError, match=text):
        mp.holders({}, **options)


@pytest.mark.cost(0.8)
def test_other_devices_have_their_own_rows():
    frame = mp.holders({"x": torch.empty(5, device="meta")}, device=0)
    assert frame.is_empty()
    assert frame.columns == mp.holders({}, device="cuda").columns


@pytest.mark.soak
def test_a_million_objects_take_two_seconds():
    many = [Slotted([{"i": i}]) for i in range(330_000)]
    tensors = [torch.empty(1) for _ in range(10_000)]
    took = []
    for _ in range(3):
        begin = time.process_time()
        frame = mp.holders({"many": many, "tensors": tensors}, device="cpu")
        took.append(time.process_time() - begin)
    print(f"{len(gc.get_objects()):,} objects, {frame.height:,} tensors: {min(took):.2f} s of CPU")
    assert frame.filter(pl.col("name") == "tensors").height == 10_000
    assert min(took) < 2.5


@pytest.mark.cost(4)
def test_a_later_cell_s_own_result_is_not_the_error_s() -> None:
    """In a shell of its own process: the failed cell keeps 8 MiB, the next cell's value another 64."""
    code = """
import torch
from IPython.core.interactiveshell import InteractiveShell
from nbmemprof.holding import held_by_traceback
shell = InteractiveShell.instance()
shell.user_ns["torch"] = torch
fail = "def run():\\n    batch = torch.empty(3 << 20, dtype=torch.uint8)\\n    work = torch.empty(5 << 20, dtype=torch.uint8)\\n    raise ValueError\\nrun()"
for cell in (fail, "torch.empty(64 << 20, dtype=torch.uint8)"):
    shell.run_cell(cell, store_history=True)
    print("KEPT", held_by_traceback(shell)[0])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert [line for line in done.stdout.splitlines() if line.startswith("KEPT")] == [f"KEPT {8 << 20}"] * 2
