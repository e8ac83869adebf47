"""What Python code asks of CUDA, answered from the catalogue while a fake run lasts; everything is put back at its end."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from nbmemprof import _optional
from nbmemprof.prediction import lazies, unsupported
from nbmemprof.prediction.catalogue import GPU

__all__ = ["Changes", "patched", "when_imported"]

_MISSING = object()


class Changes:
    """Attributes that were replaced, to be put back newest first."""

    def __init__(self) -> None:
        self._old: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace ``owner.name``."""
        self._old.append((owner, name, owner.__dict__.get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back."""
        while self._old:
            owner, name, value = self._old.pop()
            if value is _MISSING:
                with contextlib.suppress(AttributeError):
                    delattr(owner, name)
            else:
                setattr(owner, name, value)


@contextlib.contextmanager
def patched(gpu: GPU, memory: Any) -> Iterator[Changes]:
    """Let ``torch.cuda`` speak of ``gpu``; ``memory`` answers ``allocated() peak_allocated() reserved() peak_reserved() reset_peak() empty() free_total() stats()``."""
    torch = _optional.require("torch", feature="a prediction")
    changes = Changes()
    try:
        _cuda(torch, gpu, memory, changes)
        _fakes(torch, changes)
        unsupported.install(torch, changes, memory.record)
        lazies.install(torch, changes)
        yield changes
    finally:
        changes.undo()


# ---------------------------------------------------------------------- torch.cuda
def _cuda(torch: Any, gpu: GPU, memory: Any, changes: Changes) -> None:
    cuda = torch.cuda
    properties = types.SimpleNamespace(
        name=gpu.title, major=gpu.capability[0], minor=gpu.capability[1], total_memory=gpu.capacity_bytes, multi_processor_count=gpu.sms, is_integrated=0,
        is_multi_gpu_board=0, warp_size=32, max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152, gcnArchName="",
    )  # fmt: skip

    def constant(value: Any) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: value

    stream: Any = _stream_class(torch)

    def generator_state(*_args: Any, **_kwargs: Any) -> Any:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    answers: dict[str, Any] = {
        "is_available": constant(value=True), "is_initialized": constant(value=True), "_is_compiled": constant(value=True), "_lazy_init": constant(None), "init": constant(None),
        "device_count": constant(1), "current_device": constant(0), "set_device": constant(None), "get_device_name": constant(gpu.title), "_lazy_call": constant(None),
        "get_device_capability": constant(gpu.capability), "get_device_properties": constant(properties), "is_bf16_supported": constant(gpu.capability >= (8, 0)),
        "get_arch_list": constant([f"sm_{gpu.capability[0]}{gpu.capability[1]}"]), "can_device_access_peer": constant(value=False), "synchronize": constant(None),
        "ipc_collect": constant(None), "empty_cache": memory.empty, "memory_allocated": memory.allocated, "max_memory_allocated": memory.peak_allocated,
        "memory_reserved": memory.reserved, "max_memory_reserved": memory.peak_reserved, "reset_peak_memory_stats": memory.reset_peak,
        "reset_accumulated_memory_stats": constant(None), "mem_get_info": memory.free_total, "memory_stats": memory.stats, "memory_summary": constant(""),
        "set_per_process_memory_fraction": memory.set_fraction, "utilization": constant(0), "manual_seed": torch.manual_seed, "manual_seed_all": torch.manual_seed,
        "seed": constant(None), "seed_all": constant(None), "initial_seed": constant(0), "get_rng_state": generator_state, "set_rng_state": constant(None),
        "get_rng_state_all": lambda: [generator_state()], "set_rng_state_all": constant(None), "Stream": stream, "ExternalStream": stream, "Event": _event_class(),
        "current_stream": lambda *_args, **_kwargs: stream(), "default_stream": lambda *_args, **_kwargs: stream(), "set_stream": constant(None),
        "stream": _Nothing, "StreamContext": _Nothing, "device": _Nothing, "device_of": _Nothing, "_DeviceGuard": _Nothing,
        "_exchange_device": constant(0), "_maybe_exchange_device": constant(0),
        "is_current_stream_capturing": constant(value=False), "_sleep": constant(None), "default_generators": (torch.default_generator,),
    }  # fmt: skip
    for name, value in answers.items():
        changes.put(cuda, name, value)
    changes.put(cuda, "_nbmemprof_predicted", gpu.title)  # for those of us who would ask the driver
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats", "empty_cache", "mem_get_info", "memory_stats"):
        changes.put(cuda.memory, name, answers[name])
    for name in ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all"):
        changes.put(cuda.random, name, answers[name])
    nothing = types.SimpleNamespace(range_push=constant(0), range_pop=constant(0), mark=constant(None), range=lambda *_a, **_k: contextlib.nullcontext())
    changes.put(cuda, "nvtx", nothing)
    changes.put(cuda.amp.common, "amp_definitely_not_available", constant(value=False))
    backends = torch.backends
    changes.put(backends.cuda, "is_built", constant(value=True))
    changes.put(backends.cudnn, "is_acceptable", lambda tensor: tensor.device.type == "cuda" and tensor.dtype in (torch.float32, torch.float16, torch.float64))
    changes.put(backends.cudnn, "is_available", constant(value=True))
    changes.put(backends.cudnn, "version", constant(91900))
    changes.put(importlib.import_module("torch.backends.cudnn.rnn"), "get_cudnn_mode", lambda mode: {"RNN_RELU": 0, "RNN_TANH": 1, "LSTM": 2, "GRU": 3}[mode])
    changes.put(torch, "_use_cudnn_rnn_flatten_weight", constant(value=True))
    changes.put(torch, "Generator", _generator_class(torch.Generator))
    changes.put(torch.accelerator, "is_available", constant(value=True))
    changes.put(torch.accelerator, "device_count", constant(1))
    for name in ("synchronize", "set_device_index", "empty_cache"):
        if hasattr(torch.accelerator, name):
            changes.put(torch.accelerator, name, answers["empty_cache"] if name == "empty_cache" else constant(None))
    for name in ("current_device_index", "current_device_idx"):
        if hasattr(torch.accelerator, name):
            changes.put(torch.accelerator, name, constant(0))
    changes.put(torch.Tensor, "pin_memory", lambda self, *_args, **_kwargs: self)
    changes.put(torch.Tensor, "is_pinned", constant(value=False))
    changes.put(torch.Tensor, "record_stream", constant(None))


def _generator_class(real: Any) -> type:
    class Kind(type):
        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, real)

    class Generator(metaclass=Kind):
        """A generator of random numbers, on the CPU whatever device is asked for."""

        def __new__(cls, device: Any = "cpu") -> Any:
            del device
            return real(device="cpu")

    return Generator


def _stream_class(torch: Any) -> type:
    class Stream:
        """A stream without a device: work on it is in order with all other work."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            self.cuda_stream = self.stream_id = self.device_index = 0
            self.device = torch.device("cuda", 0)
            self.priority = 0

        def synchronize(self) -> None:
            """Nothing is under way."""

        wait_event = wait_stream = lambda _self, _other: None

        def query(self) -> bool:
            return True

        def record_event(self, event: Any = None) -> Any:
            return event if event is not None else _event_class()()

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def __eq__(self, other: object) -> bool:
            return type(other).__name__ == "Stream"

        __hash__ = object.__hash__

    return Stream


class _Nothing(contextlib.nullcontext):  # type: ignore[type-arg]
    """A context in which nothing changes, whatever it is made with."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        super().__init__()


def _event_class() -> type:
    class Event:
        """An event without a device: it has always happened, no time has passed."""

        def __init__(self, *_args: Any, **_kwargs: Any) -> None:
            pass

        record = wait = lambda _self, _stream=None: None

        def query(self) -> bool:
            return True

        def elapsed_time(self, _other: Any) -> float:
            return 0.0

        def synchronize(self) -> None:
            """Nothing is under way."""

    return Event


# ---------------------------------------------------------------------- fakes are taken for what they are not
def _fakes(torch: Any, changes: Changes) -> None:
    from torch._subclasses import fake_tensor
    from torch.optim import optimizer
    from torch.utils import _foreach_utils

    fake = fake_tensor.FakeTensor
    changes.put(fake_tensor, "init_gpu_context", lambda _device: None)
    changes.put(fake_tensor, "run_fallback_kernel", _no_device(fake_tensor.run_fallback_kernel))
    if not hasattr(fake_tensor, "FakeTensorDeviceMismatchError"):  # torch up to 2.12 says it in words of its own
        changes.put(fake, "_find_common_device", staticmethod(_in_torchs_words(fake._find_common_device)))
    changes.put(optimizer, "_foreach_supported_types", [*optimizer._foreach_supported_types, fake])
    changes.put(_foreach_utils, "_foreach_supported_types", [*_foreach_utils._foreach_supported_types, fake])
    changes.put(torch.nn.Module, "_apply", _apply(torch))
    changes.put(fake, "data_ptr", lambda self: self.untyped_storage()._cdata + self.storage_offset() * self.element_size())  # one number for one place
    when_imported("transformers.utils.import_utils", changes, lambda module: changes.put(module, "is_fake_tensor", lambda _tensor: False) if hasattr(module, "is_fake_tensor") else None)


def _no_device(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Where an operator has no fake kernel it is run on zeros; there is no device for those: the error that led there is raised."""

    def run(mode: Any, func: Any, flat_args: Any, spec: Any, error: RuntimeError) -> Any:
        if any(mode.is_our_fake(one) and one.fake_device.type == "cuda" for one in flat_args):
            raise error
        return plain(mode, func, flat_args, spec, error)

    return run


def _in_torchs_words(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors on two devices are told as a GPU's kernels and torch since 2.13 tell them."""

    def find(func: Any, flat_args: Any) -> Any:
        try:
            return plain(func, flat_args)
        except RuntimeError as error:
            found = re.search(r"two different devices (\S+), (\S+)$", str(error))
            if found is None:
                raise
            raise RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {found[1]} and {found[2]}!") from None

    return find


def when_imported(name: str, changes: Changes, change: Callable[[Any], None]) -> None:
    """Change a module now where it is loaded, else as soon as it is."""
    module = _optional.loaded(name)
    if module is not None:
        change(module)
        return

    class Finder(importlib.abc.MetaPathFinder):
        busy = False

        def find_spec(self, fullname: str, _path: Any, _target: Any = None) -> Any:
            if fullname != name or self.busy:
                return None
            self.busy = True
            try:
                spec = importlib.util.find_spec(fullname)
            finally:
                self.busy = False
            if spec is None or spec.loader is None:
                return None
            run = spec.loader.exec_module

            def execute(loaded: Any) -> None:
                run(loaded)
                change(loaded)

            spec.loader.exec_module = execute  # type: ignore[method-assign, assignment]
            return spec

    changes.put(sys, "meta_path", [Finder(), *sys.meta_path])


def _apply(torch: Any) -> Callable[..., Any]:
    """``Module._apply`` that puts a new parameter in place of a fake one; a parameter that several modules share stays shared."""
    plain = torch.nn.Module._apply
    fake = torch._subclasses.fake_tensor.FakeTensor
    shared: dict[int, tuple[Any, Any]] = {}

    def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
        mine = [p for p in [*self._parameters.values(), *self._buffers.values()] if p is not None]
        active = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if not active and not any(isinstance(p, fake) for p in mine):
            return plain(self, fn, recurse)
        if recurse:
            for module in self.children():
                module._apply(fn)
        for key, param in self._parameters.items():
            if param is None or lazies.move(torch, param, fn):
                continue
            known = shared.get(id(param))
            if known is not None and known[0]() is param and (kept := known[1]()) is not None:
                self._parameters[key] = kept
                continue
            with torch.no_grad():
                applied = fn(param)
            if applied is param:
                continue
            made = param if _same_place(param, applied) else torch.nn.Parameter(applied, requires_grad=param.requires_grad)
            if made is not param and param.grad is not None:
                with torch.no_grad():
                    made.grad = fn(param.grad).requires_grad_(param.grad.requires_grad)
            if made is not param:
                made.__dict__.update({k: v for k, v in param.__dict__.items() if k not in made.__dict__})
                shared[id(param)] = (weakref.ref(param), weakref.ref(made))
                self._parameters[key] = made
        for key, buffer in self._buffers.items():
            if buffer is not None and not lazies.move(torch, buffer, fn):
                self._buffers[key] = fn(buffer)
        return self

    return apply


def _same_place(one: Any, other: Any) -> bool:
    return bool(one.device == other.device and one.dtype == other.dtype and one.untyped_storage()._cdata == other.untyped_storage()._cdata)
