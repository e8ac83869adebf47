"""The memory that a fake run has: its requests go through the allocator's model while it runs, and the one that finds no room raises torch's error.

The model need not be looked at for each request. Since it was looked at last, reserved memory can have grown by no more than one segment for each request;
as long as that many bytes are left, none can have been refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nbmemprof import _optional
from nbmemprof.allocator import Device, _refusal
from nbmemprof.allocator import _memory as M
from nbmemprof.prediction.catalogue import GPU
from nbmemprof.prediction.recorder import EMPTY_CACHE, Record

__all__ = ["Room", "Terms", "Words", "change", "operations", "outside_bytes"]

Words = np.ndarray[Any, np.dtype[np.int64]]
_OURS = "_predicted"  # on an error: how many there had been
_DOCUMENTED = " See documentation for Memory Management  (https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"


@dataclass(frozen=True)
class Terms:
    """Under which a fake run has memory: allocator's settings, the card's bytes (None: the catalogue's), torch's own limit; how long its copy may run."""

    conf: str = ""
    capacity_bytes: int | None = None
    limit_bytes: int | None = None
    seconds: float = 600.0


def outside_bytes(gpu: GPU, record: Record) -> int:
    """Context and libraries that the run met, from the catalogue."""
    table, used = gpu.outside, record.used
    reached = [table.kernels if record.made else table.context]
    reached += [getattr(table, name) for name in ("blas", "second_blas", "cudnn", "fft", "solver") if name in used]
    return max(reached) << 20


def operations(events: Words, sizes: Words, pool: int) -> Words:
    """Events of a record as operations of the model, rows of six words; ``sizes``: bytes of each event's request. No bytes are no request."""
    made = np.zeros((len(events), M.WORDS), np.int64)
    empty = events == EMPTY_CACHE
    asks = (events >= 0) & ~empty
    made[:, M.T_KIND] = np.where(empty, M.EMPTY, np.where(sizes == 0, M.OTHER, np.where(asks, M.ALLOC, M.FREE_REQUESTED)))
    made[:, M.T_SIZE] = np.where(asks, sizes, 0)
    made[:, M.T_ROW] = np.where(empty, 0, np.where(asks, events, ~events))
    made[:, M.T_POOL] = np.where(asks, pool, 0)
    return made


def change(device: Device, capacity: int | None, limit: int | None, card: int) -> None:
    """Let a device have other limits from now on; ``card`` sets the reach of its expandable segments."""
    model = device._model
    model.m[M.CAPACITY] = M.NO_LIMIT if capacity is None else capacity
    model.configure(model.settings, limit, card)


class Room:
    """A modelled device that follows a record.

    Parameters
    ----------
    terms
        None: nothing is refused.
    beyond
        Tells what would be needed: a copy of the process in which the request is granted (:mod:`nbmemprof.prediction.beyond`).
    """

    def __init__(self, record: Record, gpu: GPU, version: str, terms: Terms | None, beyond: Any = None) -> None:
        self.record, self.gpu, self.beyond = record, gpu, beyond
        self.refuses = terms is not None
        terms = terms or Terms()
        self.card = gpu.capacity_bytes if terms.capacity_bytes is None else terms.capacity_bytes
        self.device = Device(terms.conf, torch=version, limit_bytes=terms.limit_bytes, capacity_bytes=self.card, history=False)
        self.limit = self.device.limit_bytes
        self._at = 0  # events that the model has seen
        self._rows = np.zeros(2 << 10, np.int64)
        self._met = -1  # libraries
        self._left = 0
        self._segments: dict[int, int] = {}

    # ------------------------------------------------------------------ the model
    def follow(self, upto: int | None = None) -> Device:
        """Let the model see what was asked for and given back until now; returns the device."""
        record = self.record
        events = np.asarray(record.events[self._at : upto], np.int64)
        if len(events):
            made, model = record.made, self.device._model
            if 2 * len(made) > len(self._rows):
                self._rows = np.concatenate([self._rows, np.zeros(2 * len(made), np.int64)])
            sizes = np.asarray([0 if e == EMPTY_CACHE else made[e if e >= 0 else ~e].nbytes for e in events.tolist()], np.int64)
            words = operations(events, sizes, model.default).reshape(-1)
            self._at += len(events)
            model.m[M.NOW], model.m[M.STOP], model.m[M.NEXT_GIVEN] = 0, len(words), 0
            self.device._trace = model.run(self.device._trace, words, self._rows, work=self._at)
        return self.device

    def seen(self, events: int) -> bool:
        """Whether the model has seen the last of so many events: then it can't be taken back."""
        return self._at >= events

    # ------------------------------------------------------------------ requests
    def asks(self, index: int, nbytes: int, *, may_be_undone: bool, spared: bool = False) -> None:
        """A request was written down: raise where the device has no room for it.

        Parameters
        ----------
        may_be_undone
            It may turn out to be none (a sum of gradients in place): looked at with the next.
        spared
            Where it is refused its operator goes on without: noted, and no error.

        Raises
        ------
        torch.OutOfMemoryError
            As torch raises it on the device, and says that it is predicted.
        """
        if not self.refuses:
            return
        if self._met != len(self.record.used):
            self._libraries()
        segment = self._segments.get(nbytes)
        if segment is None:
            segment = self._segments[nbytes] = self._most(nbytes)
        self._left -= segment
        if self._left < 0 and not may_be_undone:
            self._look(index, spared=spared)

    def _most(self, nbytes: int) -> int:
        """The most that reserved memory grows by a request: its segment; where segments grow, its pages and a begun one."""
        model = self.device._model
        segment = _refusal._segment(model, nbytes) if nbytes else 0
        return segment + 2 * int(model.m[M.LARGE]) if segment and model.m[M.EXPANDABLE] else segment

    def _libraries(self) -> None:
        """A library was met that takes memory of its own: from this request on there is less."""
        self._met = len(self.record.used)
        self._set(len(self.record.events) - 1)

    def set_limit(self, limit: int | None) -> None:
        """Torch's own limit, from now on."""
        self.limit = limit
        self._set(len(self.record.events))

    def _set(self, upto: int) -> None:
        if not self.refuses:
            return
        self.follow(upto)
        capacity = max(0, self.card - outside_bytes(self.gpu, self.record))
        change(self.device, capacity, self.limit, self.card)
        self.record.rooms.append((upto, capacity, self.limit))
        self._measure()

    def _measure(self) -> None:
        m = self.device._model.m
        self._left = int(min(m[M.LIMIT], m[M.CAPACITY]) - m[M.RESERVED])

    def _look(self, index: int, *, spared: bool) -> None:
        before = self._at
        self.follow()
        rows, events = self._rows, self.record.events
        asked = [e for e in events[before:] if 0 <= e != EMPTY_CACHE]
        refused = next((e for e in asked if rows[2 * e] == -1), None)
        if refused is None:
            self._measure()
            return
        if spared and refused == index:
            self.record.refused.append(index)
            self.record.spared.append(index)
            self.record.assume("a convolution's workspace was refused: cuDNN was taken to go on with a plan that needs none")
            self._measure()
            return
        if self.beyond is not None and self.beyond.go_on(len(events) - 1):  # in the copy nothing is refused any more
            self.refuses = False
            change(self.device, None, None, self.card)
            return
        self.record.refused.append(refused)
        for other in asked[asked.index(refused) + 1 :]:  # their operators end with the error, too
            if rows[2 * other] != -1:
                events.append(~other)
        self._measure()
        raise self._error(self.record.made[refused].nbytes)

    def _error(self, nbytes: int) -> BaseException:
        """Torch's error in torch's words (``CUDACachingAllocator.cpp``); the last sentence is ours."""
        torch = _optional.require("torch", feature="a prediction")
        model, say = self.device._model, _refusal._mib
        live, reserved = int(model.m[M.ALLOCATED_BYTES]), int(model.m[M.RESERVED_BYTES])
        outside = self.card - int(model.m[M.CAPACITY])
        asked = _refusal._segment(model, nbytes)
        allowed = "" if self.limit is None else f"{say(self.limit)} allowed; "
        text = (
            f"CUDA out of memory. Tried to allocate {say(asked)}. GPU 0 has a total capacity of {say(self.card)} of which {say(max(0, self.card - outside - reserved))} is free. "
            f"Including non-PyTorch memory, this process has {say(outside + reserved)} memory in use. {allowed}Of the allocated memory {say(live)} is allocated by PyTorch, and "
            f"{say(reserved - live)} is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "
            f"to avoid fragmentation. {_DOCUMENTED} (predicted by nbmemprof for {self.gpu.title}, not measured)"
        )
        made: BaseException = torch.OutOfMemoryError(text)
        vars(made)[_OURS] = len(self.record.refused)
        return made

    def ended(self, error: BaseException | None) -> bool:
        """Whether this is the error that was raised last. It is not kept here: it would keep the tensors of its frames."""
        return error is not None and vars(error).get(_OURS) == len(self.record.refused) > 0
