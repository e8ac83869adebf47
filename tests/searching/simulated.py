"""Steps of a made-up training on the allocator's model: a device that runs out of memory truthfully, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from nbmemprof import load
from nbmemprof.allocator import Device
from nbmemprof.errors import OutOfMemoryError
from nbmemprof.searching.stream import Stream
from nbmemprof.searching.trying import Room, Try

Step = Callable[[Device, dict[str, Any], int], None]


@dataclass
class Training:
    """Layers with weights, activations that grow with the batch (bytes a sample, power), Adam-like state, a workspace, a saturating buffer."""

    weights: list[int]
    acts: list[int]
    power: int = 1
    temporaries: int = 0
    workspace: int = 0
    saturating: int = 0
    optimizer: bool = True
    keeps: list[int] = field(default_factory=list)

    def __call__(self, device: Device, state: dict[str, Any], batch: int) -> None:
        if "weights" not in state:
            state["weights"] = [device.malloc(w) for w in self.weights]
        size = batch**self.power
        held = []
        if self.workspace and "workspace" not in state:
            state["workspace"] = device.malloc(self.workspace)
        for act in self.acts:
            held.append(device.malloc(act * size))
            if self.temporaries:
                device.free(device.malloc(self.temporaries * size))
        grads = []
        for act, weight, addr in zip(reversed(self.acts), reversed(self.weights), reversed(held), strict=True):
            passing = device.malloc(act * size)
            if self.saturating:
                device.free(device.malloc(min(self.saturating * batch, 64 << 20)))
            grads.append(device.malloc(weight))
            device.free(addr)
            device.free(passing)
        if self.optimizer and "moments" not in state:
            state["moments"] = [device.malloc(w) for w in self.weights for _ in range(2)]
        if self.optimizer:
            roots = [device.malloc(w) for w in self.weights]
            for addr in roots:
                device.free(addr)
        for addr in grads:
            device.free(addr)


class Simulated:
    """A bench on a modelled device: each try on a fresh one."""

    origin = "modelled"
    policy = "windows"
    plans = False
    kept_bytes = 0

    def __init__(self, step: Step, limit: int | None, *, conf: str = "", capacity: int | None = None, recorded: bool = True) -> None:
        self.step, self.limit, self.conf, self.capacity, self.recorded = step, limit, conf, capacity, recorded

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def room(self) -> Room:
        return Room(self.limit, self.capacity, self.capacity) if self.recorded else Room()

    def truth(self, batch: int) -> bool:
        """Whether two steps run on a fresh device."""
        return self._steps(Device(self.conf, limit_bytes=self.limit, capacity_bytes=self.capacity, addresses="windows", history=False), batch) is None

    def _steps(self, device: Device, batch: int) -> OutOfMemoryError | None:
        state: dict[str, Any] = {}
        try:
            for _ in range(2):
                self.step(device, state, batch)
        except OutOfMemoryError as error:
            return error
        return None

    def run(self, batch: int, purpose: str) -> tuple[Try, Stream | None]:
        device = Device(self.conf, limit_bytes=self.limit, capacity_bytes=self.capacity, addresses="windows")
        error = self._steps(device, batch)
        capture = load(device.snapshot()) if self.recorded else None
        stats = device.stats()
        peaks = (stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]) if self.recorded else (None, None)
        made = Try(batch, error is None, purpose, *peaks, stats["num_alloc_retries"], 0.0, error and str(error), self.origin)
        return made, Stream.of(capture, batch, complete=error is None)
