"""Tries on a GPU that is not here: two steps under fake tensors, their requests through the allocator's rules with the limit."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from typing import Any, Self

from nbmemprof.prediction.catalogue import GPU
from nbmemprof.prediction.run import NothingOnTheDevice, predict, quiet
from nbmemprof.searching.refusals import memory_error
from nbmemprof.searching.stream import Stream
from nbmemprof.searching.trying import STEPS, Room, Try
from nbmemprof.units import format_bytes

__all__ = ["FakeBench", "NothingOnTheDevice"]

_ALL = 1 << 50  # the run itself is never refused: its requests are judged afterwards


class FakeBench:
    """Two steps in a child process, under fake tensors; nothing of this process changes.

    ``outside``: context and libraries, from the catalogue; what the allocator can have is the card without them.
    """

    origin = "predicted"
    policy = "ascending"
    kept_bytes = 0
    plans = False  # a fake run has no refusals to survive

    def __init__(
        self,
        step: Callable[..., Any],
        setup: Callable[[], Any] | None,
        gpu: GPU,
        *,
        limit_bytes: int | None = None,
        capacity_bytes: int | None = None,
        conf: str | None = None,
    ) -> None:
        self.step, self.setup, self.gpu, self.conf = step, setup, gpu, conf or ""
        self._limit, self._card = limit_bytes, capacity_bytes or gpu.capacity_bytes
        self.outside = 0
        self.assumptions: dict[str, int] = {}

    def __enter__(self) -> Self:
        importlib.import_module("torch._subclasses.fake_tensor")  # once here, so that no child spends seconds on it
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def room(self) -> Room:
        """The limit, and the card without context and libraries."""
        return Room(self._limit, max(self._card - self.outside, 0), self._card)

    def run(self, batch: int, purpose: str) -> tuple[Try, Stream | None]:
        """Run two full steps under fake tensors and judge their requests.

        Raises
        ------
        NothingOnTheDevice
            There is nothing to judge. An error of the step that is not about memory is raised as it is.
        """
        begin = time.perf_counter()
        try:
            with quiet():  # what the step prints would be shown for each try
                capture = predict(_steps, self.step, self.setup, batch, device=self.gpu, capacity_bytes=_ALL, conf=self.conf)
        except Exception as error:
            why = memory_error(error, pressed=False)
            if why is None:
                raise
            return Try(batch, False, purpose, None, None, None, time.perf_counter() - begin, why, self.origin), None
        stream = Stream.of(capture, batch, complete=True)
        kinds = set(capture.allocations["category"].cast(str).unique().to_list())
        if stream is None or kinds <= {"workspace"}:
            raise NothingOnTheDevice(
                "The step asked for no memory of a CUDA device. Let it make its tensors on 'cuda', or give limit_bytes= to put its CPU tensors on a modelled GPU."
            )
        self.outside = max(self.outside, int(capture.meta.get("outside_bytes") or 0))
        for one in capture.meta.get("assumptions") or ():
            self.assumptions[one["what"]] = max(self.assumptions.get(one["what"], 0), int(one["count"]))
        room = self.room()
        found = stream.serve(limit_bytes=room.limit_bytes, capacity_bytes=room.capacity_bytes, card_bytes=room.card_bytes, policy=self.policy)
        why = None if found.fits else f"{found.refused} requests would be refused in {format_bytes(room.bytes)}"
        return Try(
            batch, found.fits, purpose, found.peak_allocated_bytes, found.peak_reserved_bytes, found.retries, time.perf_counter() - begin, why, self.origin
        ), stream


def _steps(step: Callable[..., Any], setup: Callable[[], Any] | None, batch: int) -> None:
    if setup is None:
        for _ in range(STEPS):
            step(batch)
    else:
        state = setup()
        for _ in range(STEPS):
            step(state, batch)
