"""What a try changes is put back; what an error means and holds; the search with real tensors on a modelled device."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest

import nbmemprof as mp
from nbmemprof.errors import NbmemprofError
from nbmemprof.searching.batch import searched
from nbmemprof.searching.refusals import let_go, memory_error
from nbmemprof.searching.state import Keeper, convolves
from nbmemprof.searching.trying import CudaBench, HostBench, LiveBench, VirtualBench

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.cost(0.1)
MIB = 1 << 20


def trained() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def snapshot(model: Any, optimizer: Any) -> list[Any]:
    return [t.clone() for t in (*model.parameters(), *model.buffers())] + [
        v.clone() for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)
    ]


@pytest.mark.parametrize("steps_before", [0, 2])
def test_model_optimizer_and_random_numbers_are_as_before(steps_before):
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    losses: list[float] = []

    def step(batch):
        loss = model(torch.randn(batch, 8)).sum() + random.random()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))

    for _ in range(steps_before):
        step(4)
    before = (
        snapshot(model, optimizer),
        torch.get_rng_state(),
        random.getstate(),
        scheduler.state_dict(),
        list(losses),
        [p.grad is None for p in model.parameters()],
    )
    rates = [g["lr"] for g in optimizer.param_groups]
    keeper = Keeper(step)
    step(4)
    model.eval()
    step(4)
    keeper.put_back()
    after = (
        snapshot(model, optimizer),
        torch.get_rng_state(),
        random.getstate(),
        scheduler.state_dict(),
        list(losses),
        [p.grad is None for p in model.parameters()],
    )
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert torch.equal(before[1], after[1])
    assert before[2:] == after[2:]
    assert [g["lr"] for g in optimizer.param_groups] == rates
    assert model.training


def test_gradients_that_were_there_come_back_with_their_values():
    layer = torch.nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    kept = layer.weight.grad
    value = kept.clone()
    keeper = Keeper(lambda batch: layer(torch.ones(batch, 3)).sum().backward())
    layer(torch.ones(5, 3)).sum().backward()
    keeper.put_back()
    assert layer.weight.grad is kept
    assert torch.equal(kept, value)


def test_attributes_of_a_bound_object_and_names_of_a_closure_come_back():
    class Trainer:
        def __init__(self) -> None:
            self.done, self.seen = 0, []

        def step(self, batch: int) -> None:
            self.done += 1
            self.seen.append(batch)

    trainer, count = Trainer(), 0

    def step(batch: int) -> None:
        nonlocal count
        count += 1
        trainer.step(batch)

    keeper = Keeper(step, trainer.step)
    step(3)
    keeper.put_back()
    assert (count, trainer.done, trainer.seen) == (0, 0, [])


def test_convolutions_are_found_in_what_setup_returns():
    layer = torch.nn.Conv2d(1, 1, 1)
    assert convolves({"model": [torch.nn.Sequential(layer)]})
    assert not convolves((torch.nn.Linear(1, 1), object()))


# ---------------------------------------------------------------------- errors
def raised(kind: type[Exception], text: str) -> Exception:
    try:
        raise kind(text)
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("error", "pressed", "means_memory"),
    [
        (raised(torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2 MiB"), False, True),
        (raised(RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False, True),
        (raised(RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), False, True),
        (raised(RuntimeError, "[enforce fail at alloc_cpu.cpp:75] err == 0. DefaultCPUAllocator: can't allocate memory"), False, True),
        (raised(MemoryError, ""), False, True),
        (raised(RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True, True),
        (raised(RuntimeError, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), False, False),
        (raised(RuntimeError, "GET was unable to find an engine to execute this computation"), True, True),
        (raised(RuntimeError, "GET was unable to find an engine to execute this computation"), False, False),
        (raised(RuntimeError, "mat1 and mat2 shapes cannot be multiplied"), True, False),
        (raised(ValueError, "CUDNN_STATUS_NOT_SUPPORTED is a name"), True, False),
    ],
)
def test_which_errors_mean_memory(error, pressed, means_memory):
    assert (memory_error(error, pressed=pressed) is not None) == means_memory


def test_an_error_that_came_from_a_lack_of_memory_means_it():
    try:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as inner:
            raise RuntimeError("step failed") from inner
    except RuntimeError as outer:
        assert memory_error(outer, pressed=False) == "OutOfMemoryError: CUDA out of memory."


def test_nothing_is_kept_by_an_error_that_was_let_go():
    class Held:
        pass

    def fails() -> weakref.ref[Held]:
        held = Held()
        places.append(weakref.ref(held))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    places: list[weakref.ref[Held]] = []
    try:
        fails()
    except torch.OutOfMemoryError as error:
        kept = error
    assert places[0]() is not None
    let_go(kept)
    assert places[0]() is None


# ---------------------------------------------------------------------- real steps
@pytest.mark.cost(4)
def test_real_steps_on_a_modelled_device_are_exact_and_leave_nothing():
    model, optimizer = torch.nn.Linear(256, 256), None
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch):
        model(torch.randn(batch, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    before, seed = [p.clone() for p in model.parameters()], torch.get_rng_state()
    result = searched(VirtualBench(step, None, capacity_bytes=48 * MIB), 64, None)
    assert result.exact
    assert result.origin == "modelled"
    assert len(result.made) <= 8
    assert result.ooms <= 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert torch.equal(seed, torch.get_rng_state())
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_an_error_that_is_not_memory_is_raised_with_its_traceback_and_the_state_put_back():
    seen: list[int] = []

    def step(batch):
        seen.append(batch)
        if batch > 1:
            raise ValueError("shapes differ")

    with pytest.raises(ValueError, match="shapes differ") as caught:
        searched(LiveBench(step, None), 1, None)
    assert caught.traceback[-1].name == "step"
    assert seen == []


@pytest.mark.cost(2)
def test_the_field_case_is_answered_by_its_own_errors():
    """Without a GPU the case keeps its budget by a counter: 64 units, 18.75 of state after the first step."""
    used = [0]

    def make_trainer():
        state = []

        def step(batch):
            if used[0] + 16 * batch > 1024:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 16 bytes")
            if not state:
                state.append(300)
                used[0] += 300

        used[0] = 0
        return step

    result = searched(LiveBench(lambda state, batch: state(batch), make_trainer), 1, None)
    assert (result.batch, result.exact) == (45, True)


def test_a_step_of_cpu_tensors_needs_a_limit():
    with pytest.raises(NbmemprofError, match="Give limit_bytes="):
        searched(HostBench(lambda batch: torch.ones(batch, 1 << 19), None), 1, None)


# ---------------------------------------------------------------------- arguments
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("not a function",), "needs a function"), ((print, 0), "low=0 is not a batch size"), ((print, 4, 2), "high=2 is below low=4"), ((print, True), "low=True"),
    ],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(arguments, words):
    with pytest.raises(NbmemprofError, match=words):
        mp.max_batch(*arguments)


# ---------------------------------------------------------------------- the GPU's side, with a torch that is played
class Played:
    """Torch as far as a bench on the GPU asks it, with a limit and settings that can be looked at."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.cuda = self._C = self.memory = self
        self.nn = torch.nn

    def init(self) -> None: ...
    def synchronize(self) -> None: ...
    def empty_cache(self) -> None:
        self.calls.append("empty_cache")

    def _cuda_clearCublasWorkspaces(self) -> None:
        self.calls.append("clear workspaces")

    def current_device(self) -> int:
        return 0

    def get_device_properties(self, device: int) -> Any:
        return type("Properties", (), {"total_memory": 1000 * MIB})

    def mem_get_info(self) -> tuple[int, int]:
        return 700 * MIB, 1000 * MIB

    def memory_reserved(self) -> int:
        return 100 * MIB

    def memory_allocated(self) -> int:
        return 50 * MIB

    def memory_stats(self) -> dict[str, int]:
        return {"num_alloc_retries": 0, "num_ooms": 0}

    def set_per_process_memory_fraction(self, fraction: float, device: int) -> None:
        self.calls.append(("fraction", round(fraction, 4)))

    def _accelerator_setAllocatorSettings(self, conf: str) -> None:
        self.calls.append(("conf", conf))

    def _snapshot(self) -> dict[str, Any]:
        return {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "expandable_segments": False}}


def bench(monkeypatch, **options) -> tuple[CudaBench, Played]:
    from nbmemprof.searching import trying

    played = Played()
    made = CudaBench(lambda batch: None, None, **options)
    made._torch = played
    monkeypatch.setattr(trying, "Cuda", lambda: type("Facts", (), {"device_facts": lambda self, device: {"limit_bytes": None}})())
    return made, played


def test_a_limit_and_settings_hold_during_the_search_and_are_put_back(monkeypatch):
    made, played = bench(monkeypatch, limit_bytes=500 * MIB, conf="expandable_segments:True")
    with made:
        room = made.room()
        assert (room.limit_bytes, room.capacity_bytes, room.bytes) == (500 * MIB, 800 * MIB, 500 * MIB)
        assert [c for c in played.calls if isinstance(c, tuple)] == [("conf", "expandable_segments:True"), ("fraction", 0.5)]
    assert [c for c in played.calls if isinstance(c, tuple)][2:] == [("fraction", 1.0), ("conf", "max_split_size_mb:64,expandable_segments:False")]


def test_a_smaller_card_is_a_limit_on_what_the_allocator_can_have(monkeypatch):
    made, _ = bench(monkeypatch, capacity_bytes=600 * MIB)
    with made:
        assert made.room().limit_bytes == 400 * MIB  # 200 MiB are held outside the allocator


def test_workspaces_and_cache_are_let_go_between_tries(monkeypatch):
    made, played = bench(monkeypatch)
    with made:
        played.calls.clear()
        made.clear()
        assert played.calls == ["clear workspaces", "empty_cache"]


def test_a_step_that_keeps_memory_out_of_reach_is_told():
    from simulated import Simulated, Training

    made = Simulated(Training([8 * MIB] * 4, [3 * MIB] * 4), 300 * MIB)
    made.kept_bytes = 5 * MIB
    assert "keeps 5 MiB on the device" in repr(searched(made, 1, 3))
