"""One try: two full steps, recorded, whatever they raise; on a GPU, or on a modelled one with CPU tensors."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, Self

from nbmemprof import _optional, recording
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.searching.refusals import let_go, memory_error
from nbmemprof.searching.state import Keeper, convolves
from nbmemprof.searching.stream import Stream
from nbmemprof.sources import torch_history
from nbmemprof.sources._cuda_api import Cuda
from nbmemprof.units import format_bytes

__all__ = ["Bench", "CudaBench", "HostBench", "LiveBench", "Room", "Try", "VirtualBench"]

STEPS = 2  # optimizer state appears in the first step; the second is the first with everything alive
_HOST_BYTES = 1 << 20  # CPU tensors of a step whose memory is elsewhere, such as a counter
_SHORT_BYTES = 256 << 20  # less than this free: a library's vague error is taken for a lack of memory


@dataclass(frozen=True)
class Room:
    """What there is for the step: torch's own limit, what the driver can give to this process, the card."""

    limit_bytes: int | None = None
    capacity_bytes: int | None = None
    card_bytes: int | None = None

    @property
    def bytes(self) -> int | None:
        """The smaller of the two; None where neither is known."""
        known = [size for size in (self.limit_bytes, self.capacity_bytes) if size is not None]
        return min(known) if known else None


@dataclass(frozen=True)
class Try:
    """Two steps at one batch size and how they ended; peaks are None where nothing was recorded."""

    batch: int
    fits: bool
    purpose: str
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    retries: int | None
    seconds: float
    error: str | None
    origin: str


class Bench(Protocol):
    """Where tries are made."""

    origin: str
    policy: str
    plans: bool  # whether convolutions are among the step's modules
    kept_bytes: int

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def room(self) -> Room:
        """What there is now."""

    def run(self, batch: int, purpose: str) -> tuple[Try, Stream | None]:
        """Run two full steps."""


class LiveBench:
    """Steps run for real in this process; what they change is put back after each try."""

    origin = "measured"
    policy = "windows"
    plans = False
    kept_bytes = 0  # what stayed allocated after a try though everything was put back

    def __init__(self, step: Callable[..., Any], setup: Callable[[], Any] | None) -> None:
        self.step, self.setup = step, setup
        self._keeper: Keeper | None = None

    def __enter__(self) -> Self:
        self.clear()
        self._keeper = Keeper(self.step, self.setup)
        self.plans = self._keeper.convolves()
        return self

    def __exit__(self, *_: object) -> None:
        self._keeper = None

    def room(self) -> Room:
        """Nothing is known of a plain callable."""
        return Room()

    # what a device adds
    def clear(self) -> None:
        """Leave nothing of the try before."""
        gc.collect()

    def wait(self) -> None:
        """Let what was asked of the device happen."""

    def short(self) -> bool:
        """Whether memory is short now."""
        return False

    def counters(self) -> tuple[int, int] | None:
        """Retries and refusals until now."""
        return None

    def window(self) -> Any:
        """A recording, or None where none can be made."""
        return None

    def stream(self, capture: Capture | None, batch: int, fits: bool) -> Stream | None:
        """What was asked of the allocator."""
        return Stream.of(capture, batch, complete=fits)

    def run(self, batch: int, purpose: str) -> tuple[Try, Stream | None]:
        """Run two full steps; state, random numbers and memory are as before afterwards.

        Raises
        ------
        Exception
            Any error of the step that is not about memory, as it is.
        """
        before, begin = self.counters(), time.perf_counter()
        window = self.window()
        try:
            with window or contextlib.nullcontext():
                error = self._steps(batch)
                after = self.counters()
                pressed = error is not None and (self.short() or (before is not None and after is not None and after != before))
        finally:
            seconds = time.perf_counter() - begin
            if self._keeper is not None:
                self._keeper.put_back()
        why = None if error is None else memory_error(error, pressed=pressed)
        if error is not None:
            if why is None:
                self.clear()
                raise error
            let_go(error)
            error = None
        self.clear()
        capture = window.capture if window is not None else None
        stream = self.stream(capture, batch, why is None)
        peaks = _peaks(capture)
        retries = after[0] - before[0] if before is not None and after is not None else None
        return Try(batch, why is None, purpose, *peaks, retries, seconds, why, self.origin), stream

    def _steps(self, batch: int) -> Exception | None:
        try:
            if self.setup is None:
                for _ in range(STEPS):
                    self.step(batch)
                    self.wait()
            else:
                state = self.setup()
                self.plans = self.plans or convolves(state)
                for _ in range(STEPS):
                    self.step(state, batch)
                    self.wait()
        except Exception as error:
            return error
        return None


def _peaks(capture: Capture | None) -> tuple[int | None, int | None]:
    rows = summary(capture).sort("peak_allocated_bytes", descending=True, nulls_last=True).to_dicts() if capture is not None else []
    return (rows[0]["peak_allocated_bytes"], rows[0]["peak_reserved_bytes"]) if rows else (None, None)


class _Bare(Cuda):
    """Records without watching the program for phases and owners: only requests are wanted."""

    def observer(self, *, notes: bool) -> Any:
        return None


class CudaBench(LiveBench):
    """The current CUDA device, under torch's limit and settings, which are put back at the end."""

    def __init__(
        self,
        step: Callable[..., Any],
        setup: Callable[[], Any] | None,
        *,
        limit_bytes: int | None = None,
        capacity_bytes: int | None = None,
        conf: str | None = None,
    ) -> None:
        super().__init__(step, setup)
        self._torch: Any = _optional.require("torch", feature="max_batch")
        self._wanted, self._capacity, self._conf = limit_bytes, capacity_bytes, conf
        self._limit: int | None = None

    def __enter__(self) -> Self:
        torch = self._torch
        torch.cuda.init()
        super().__enter__()
        self._device = torch.cuda.current_device()
        self._card = int(torch.cuda.get_device_properties(self._device).total_memory)
        self._fraction = Cuda().device_facts(self._device)["limit_bytes"]
        self._limit = self._wanted if self._wanted is not None else self._fraction
        if self._capacity is not None:
            free, total = torch.cuda.mem_get_info()
            outside = total - free - torch.cuda.memory_reserved()
            self._limit = min([s for s in (self._limit, max(self._capacity - outside, 1 << 20)) if s is not None])
        self._settings = torch.cuda.memory._snapshot()["allocator_settings"] if self._conf is not None else None
        if self._conf is not None:
            self._set(self._conf)
        if self._limit != self._fraction:
            self._bound(self._limit)
        self._allocated = int(torch.cuda.memory_allocated())
        return self

    def run(self, batch: int, purpose: str) -> tuple[Try, Stream | None]:
        """Run two full steps, and look whether they left something."""
        made = super().run(batch, purpose)
        self.kept_bytes = max(self.kept_bytes, int(self._torch.cuda.memory_allocated()) - self._allocated)
        return made

    def __exit__(self, *_: object) -> None:
        if self._limit != self._fraction:
            self._bound(self._fraction)
        if self._settings is not None:
            self._set(_text_of(self._settings))
        super().__exit__()
        self.clear()

    def _bound(self, size: int | None) -> None:
        fraction = 1.0 if size is None else min((size + 0.5) / self._card, 1.0)
        self._torch.cuda.set_per_process_memory_fraction(fraction, self._device)

    def _set(self, conf: str) -> None:
        change = getattr(self._torch._C, "_accelerator_setAllocatorSettings", None) or self._torch.cuda.memory._set_allocator_settings
        change(conf)

    def room(self) -> Room:
        """Torch's limit, and what is free for this process now."""
        free, _ = self._torch.cuda.mem_get_info()
        return Room(self._limit, int(free) + int(self._torch.cuda.memory_reserved()), self._card)

    def clear(self) -> None:
        """Let go of workspaces and cached memory too: the next try finds the heap that this one found."""
        torch = self._torch
        gc.collect()
        with contextlib.suppress(RuntimeError):  # an earlier failure that the device reports late
            torch.cuda.synchronize()
        if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):
            torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def wait(self) -> None:
        """Let kernels end: an error of theirs belongs to this step."""
        self._torch.cuda.synchronize()

    def short(self) -> bool:
        """Whether less than a quarter of a GiB is free."""
        room = self.room().bytes
        return room is not None and room - int(self._torch.cuda.memory_reserved()) < _SHORT_BYTES

    def counters(self) -> tuple[int, int]:
        """Torch's own counts."""
        stats = self._torch.cuda.memory_stats()
        return int(stats.get("num_alloc_retries", 0)), int(stats.get("num_ooms", 0))

    def window(self) -> Any:
        """Torch's allocator history, without stacks; one that the user keeps is read, not touched."""
        return recording.record(source=torch_history.TorchHistory(_Bare()), stacks="none", title="max_batch")

    def stream(self, capture: Capture | None, batch: int, fits: bool) -> Stream | None:
        """Of the current device."""
        return Stream.of(capture, batch, complete=fits, device=self._device)


def _text_of(settings: dict[str, Any]) -> str:
    """The settings as they were, written out in full: an option that is left out would stay as it is now."""
    text = str(settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    if "expandable_segments" not in text:
        text = ",".join(filter(None, [text, f"expandable_segments:{bool(settings.get('expandable_segments'))}"]))
    return text


class VirtualBench(LiveBench):
    """CPU tensors on a modelled GPU: the steps run on the CPU, their requests are served by the allocator's model."""

    origin = "modelled"
    policy = "ascending"

    def __init__(self, step: Callable[..., Any], setup: Callable[[], Any] | None, *, name: str = "GPU", capacity_bytes: int, conf: str = "") -> None:
        super().__init__(step, setup)
        self._name, self._capacity, self._conf = name, capacity_bytes, conf

    def room(self) -> Room:
        """The modelled card is all there is."""
        return Room(None, self._capacity, self._capacity)

    def window(self) -> Any:
        """Put the requests to the model as they come."""
        from nbmemprof.sources.virtual import VirtualDevice

        return recording.record(source=VirtualDevice(f"{self._name}:{self._capacity}", self._conf), stacks="none", title="max_batch")


class HostBench(LiveBench):
    """A plain callable that tells by its own errors what fits; one that fills this machine's memory with tensors is stopped before that."""

    def window(self) -> Any:
        """CPU tensors, where torch is loaded."""
        return recording.record(source="torch_cpu", stacks="none", title="max_batch") if _optional.loaded("torch") is not None else None

    def stream(self, capture: Capture | None, batch: int, fits: bool) -> Stream | None:
        """Host memory is not served by rules that are known here.

        Raises
        ------
        NbmemprofError
            The step makes CPU tensors, and no limit was given for them.
        """
        peak = _peaks(capture)[0] or 0
        if peak > _HOST_BYTES:
            raise NbmemprofError(
                f"The step makes {format_bytes(peak)} of CPU tensors at {batch}, and nothing says how much they may take. Give limit_bytes= to put them on a modelled GPU, or let the step use 'cuda'."
            )
        return None
