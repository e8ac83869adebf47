"""Everything that the CUDA recording asks of torch, in one place, so that tests can put another in its stead."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable
from functools import partial, wraps
from operator import call
from typing import Any

from nbmemprof import _optional
from nbmemprof.sources import _nvml
from nbmemprof.sources._observer import Observer
from nbmemprof.sources._outside import Outside

__all__ = ["Cuda", "unavailable"]

_CACHING_OFF = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "PYTORCH_NO_HIP_MEMORY_CACHING")
_CONF = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def unavailable() -> str | None:
    """Why CUDA memory can't be recorded here now; never makes a context, never imports torch."""
    torch = _optional.loaded("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return "torch is not imported in this process"
    if hasattr(torch.cuda, "_nbmemprof_predicted"):
        return f"cells are predicted here, for {torch.cuda._nbmemprof_predicted}: no GPU is asked"
    if not hasattr(torch._C, "_cuda_memorySnapshot"):
        return "this torch is built without CUDA"
    try:
        if torch.cuda.is_initialized():
            return None
        # asks NVML while CUDA is not initialised: no context, and a later fork still works
        return None if torch.cuda.device_count() > 0 else "torch sees no CUDA device"
    except Exception as error:  # a broken driver must not break the user's cell
        return f"torch can't ask the driver ({error})"


class Cuda:
    """Torch's CUDA allocator, as far as the recording needs it. Nothing here makes a CUDA context."""

    def __init__(self) -> None:
        self._torch: Any = _optional.require("torch", feature="recording CUDA memory")
        self._patched: list[tuple[str, Any, Any]] = []

    def initialized(self) -> bool:
        """Whether CUDA has begun in this process."""
        return bool(self._torch.cuda.is_initialized())

    def on_init(self, function: Callable[[], None]) -> None:
        """Call once CUDA begins, before the first allocation (torch's own queue of such calls)."""
        self._torch.cuda._queued_calls.append((function, []))

    def forget(self, function: Callable[[], None]) -> None:
        """Take a call back that CUDA's begin has not made."""
        queue = self._torch.cuda._queued_calls
        queue[:] = [entry for entry in queue if entry[0] != function]  # a bound method is a new object each time

    def devices(self) -> range:
        """Ordinals of the visible devices; CUDA must have begun."""
        return range(int(self._torch.cuda.device_count()))

    def no_history(self) -> str | None:
        """Why this allocator keeps no history, if so."""
        if any(os.environ.get(name) == "1" for name in _CACHING_OFF):
            return "caching is switched off (PYTORCH_NO_CUDA_MEMORY_CACHING=1)"
        backend = self._torch.cuda.get_allocator_backend()
        return None if backend == "native" else f"the allocator's backend is {backend}, which keeps no history"

    def history_on(self) -> bool:
        """Whether somebody has switched the allocator's history on. CUDA must have begun: before, torch 2.11 crashes here."""
        ask = getattr(self._torch._C, "_cuda_isHistoryEnabled", None)
        return bool(ask()) if ask is not None else False

    def record(self, stacks: str, max_entries: int, *, clear: bool = False) -> None:
        """Switch the history on, or empty it: stacks "python", "all" or "none"."""
        # stacks of releases ("all") are not asked for: a release while an exception passes through C++ would lose the exception, as in
        # checkpointing, which ends a recomputation by one (torch 2.11: "returned NULL without setting an exception")
        context = None if stacks == "none" else "alloc"
        more = {"clear_history": True} if clear else {}
        self._torch.cuda.memory._record_memory_history("all", context=context, stacks="all" if stacks == "all" else "python", max_entries=max_entries, **more)

    def stop(self) -> None:
        """Switch the history off; torch clears it."""
        self._torch.cuda.memory._record_memory_history(None)

    def stats(self, device: int) -> dict[str, Any]:
        """Counters, nested as torch's C function gives them (about 20 µs)."""
        found: dict[str, Any] = self._torch._C._cuda_memoryStats(device)
        return found

    def snapshot(self, devices: range) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Counters of each device and the snapshot, with no other Python thread getting in between."""
        core = self._torch._C
        asks = [*(partial(core._cuda_memoryStats, d) for d in devices), partial(core._cuda_memorySnapshot, None)]
        *stats, snapshot = map(call, asks)  # C calls from C: the interpreter lock is not given up between them
        return stats, snapshot

    def picture(self) -> dict[str, Any]:
        """The heap now, without the trace where torch can leave it out."""
        try:
            found: dict[str, Any] = self._torch._C._cuda_memorySnapshot((0, 0, False))
        except TypeError:  # torch before 2.11
            found = self._torch.cuda.memory._snapshot()
        return found | {"device_traces": []}

    def device_facts(self, device: int) -> dict[str, Any]:
        """Name, uuid, total bytes and the process's limit (null where there is none) of one device."""
        properties = self._torch.cuda.get_device_properties(device)
        fraction = 1.0
        ask = getattr(self._torch.cuda.memory, "get_per_process_memory_fraction", None)
        if ask is not None and self.no_history() is None:
            fraction = float(ask(device))
        total = int(properties.total_memory)
        return {
            "name": properties.name,
            "uuid": str(getattr(properties, "uuid", "")) or None,
            "capacity_bytes": total,
            "limit_bytes": int(fraction * total) if fraction < 1 else None,
        }

    def observer(self, *, notes: bool) -> Observer:
        """What watches the program for phases, modules and owners; ``notes``: it may attach notes to allocations."""
        note = getattr(self._torch._C, "_cuda_setMemoryMetadata", None) if notes else None
        core = self._torch._C

        def peak() -> int:
            """Highest bytes of the current device so far, by torch's counter."""
            return int(core._cuda_memoryStats(core._cuda_getDevice())["allocated_bytes"]["all"]["peak"])

        return Observer(self._torch, "cuda", note, peak=peak)

    def outside(self) -> Outside | None:
        """What tells of the device beside torch's allocator."""
        return Outside(self._torch)

    def process_bytes(self, uuid: str | None) -> int | None:
        """Bytes that this process holds on a device, as the driver counts them."""
        return _nvml.process_bytes(uuid)

    def busy_fraction(self, uuid: str | None, since_us: float) -> float | None:
        """Share of the time since then in which the device ran kernels."""
        return _nvml.busy_fraction(uuid, since_us)

    def conf(self) -> str:
        """The allocator's configuration as the environment gives it."""
        return next((os.environ[name] for name in _CONF if os.environ.get(name)), "")

    def versions(self) -> dict[str, str | None]:
        """Versions of torch and of the CUDA that it was built with."""
        return {"torch": str(self._torch.__version__), "cuda": self._torch.version.cuda, "hip": getattr(self._torch.version, "hip", None)}

    def stack_cost_us(self, cpp: bool) -> float | None:
        """What taking one call stack costs here, as the allocator takes it: the median of 15 tries from this depth."""
        gather = getattr(getattr(self._torch._C, "_profiler", None), "gather_traceback", None)
        if gather is None:
            return None
        tries = []
        for _ in range(15):
            begin = time.perf_counter()
            gather(python=True, script=True, cpp=cpp)
            tries.append(time.perf_counter() - begin)
        return sorted(tries)[7] * 1e6

    def can_clear(self) -> bool:
        """Whether this torch can empty the history while it goes on."""
        ask = getattr(self._torch.cuda.memory, "_record_memory_history_impl", None)
        return ask is not None and "clear_history" in inspect.signature(ask).parameters

    # ------------------------------------------------------------------ calls that leave no event
    def watch(self, before: dict[str, Callable[..., None]], after: dict[str, Callable[..., None]]) -> None:
        """Have functions of ``torch._C`` tell when they are called; ``unwatch`` puts the originals back."""
        core = self._torch._C
        for name in dict.fromkeys([*before, *after]):
            original = getattr(core, name, None)
            if original is None:
                continue
            made = _telling(original, before.get(name), after.get(name))
            setattr(core, name, made)
            self._patched.append((name, original, made))

    def unwatch(self) -> None:
        """Put back what ``watch`` replaced; what somebody has replaced since then is left alone."""
        for name, original, made in reversed(self._patched):
            if getattr(self._torch._C, name, None) is made:
                setattr(self._torch._C, name, original)
        self._patched.clear()


def _telling(original: Callable[..., Any], before: Callable[..., None] | None, after: Callable[..., None] | None) -> Callable[..., Any]:
    @wraps(original, updated=())
    def told(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if after is not None:
            after(*args)
        return result

    return told
