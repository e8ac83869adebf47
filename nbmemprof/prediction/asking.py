"""The user's own questions about memory in a fake run, answered from the allocator's model: ``memory_allocated``, ``memory_summary``, ``mem_get_info``.

The requests so far are put through the model when they are asked for, each once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from nbmemprof.allocator import Device
from nbmemprof.allocator import _memory as M
from nbmemprof.prediction.feed import outside_bytes
from nbmemprof.prediction.patches import Changes
from nbmemprof.prediction.recorder import EMPTY_CACHE

__all__ = ["Answers", "memory"]


class Answers:
    """A modelled device that follows a record."""

    def __init__(self, session: Any, conf: str = "") -> None:
        self._session, self._at = session, 0
        self._rows = np.zeros(0, np.int64)
        self.device = Device(conf, torch=session.version, limit_bytes=session.limit_bytes, capacity_bytes=session.gpu.capacity_bytes, history=False)

    def follow(self) -> Device:
        """The device now."""
        record = self._session.record
        events = np.asarray(record.events[self._at :], np.int64)
        self._at += len(events)
        if len(events):
            made = record.made
            rows = np.zeros(2 * len(made), np.int64)
            rows[: len(self._rows)] = self._rows
            self._rows = rows
            operations = np.zeros((len(events), M.WORDS), np.int64)
            empty = events == EMPTY_CACHE
            is_alloc = (events >= 0) & ~empty
            row = np.where(empty, 0, np.where(events >= 0, events, ~events))
            operations[:, M.T_KIND] = np.where(empty, M.EMPTY, np.where(is_alloc, M.ALLOC, M.FREE_REQUESTED))
            operations[:, M.T_SIZE] = [made[i].nbytes if asked else 0 for i, asked in zip(row.tolist(), is_alloc.tolist(), strict=True)]
            operations[:, M.T_ROW] = row
            model = self.device._model
            operations[:, M.T_POOL] = np.where(is_alloc, model.default, 0)
            model.m[M.NOW], model.m[M.STOP], model.m[M.NEXT_GIVEN] = 0, operations.size, 0
            self.device._trace = model.run(self.device._trace, operations.reshape(-1), rows, work=len(events))
        return self.device

    def stats(self, *_: Any, **__: Any) -> dict[str, int]:
        """``torch.cuda.memory_stats``."""
        return self.follow().stats()

    def asker(self, name: str) -> Any:
        """A function that gives one of the counters."""
        return lambda *_args, **_kwargs: self.stats()[name]

    def reset_peak(self, *_: Any, **__: Any) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self.follow().reset_peak_stats()

    def free_total(self, *_: Any, **__: Any) -> tuple[int, int]:
        """``torch.cuda.mem_get_info``: what torch reserved and the context take away."""
        gpu = self._session.gpu
        taken = self.stats()["reserved_bytes.all.current"] + outside_bytes(gpu, self._session.record)
        return max(0, gpu.capacity_bytes - taken), gpu.capacity_bytes

    def snapshot(self, *_: Any, **__: Any) -> dict[str, Any]:
        """``torch.cuda.memory._snapshot``, without a trace."""
        return self.follow().snapshot()


def memory(torch: Any, session: Any, changes: Changes) -> None:
    """Put the answers in place."""
    answers = session.answers = Answers(session)
    names = {
        "memory_allocated": "allocated_bytes.all.current", "max_memory_allocated": "allocated_bytes.all.peak", "memory_reserved": "reserved_bytes.all.current",
        "max_memory_reserved": "reserved_bytes.all.peak", "memory_cached": "reserved_bytes.all.current", "max_memory_cached": "reserved_bytes.all.peak",
    }  # fmt: skip
    functions: dict[str, Any] = {name: answers.asker(counter) for name, counter in names.items()}
    functions |= dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), answers.reset_peak)
    functions |= {"memory_stats": answers.stats, "mem_get_info": answers.free_total, "list_gpu_processes": lambda *_: "no processes are running", "memory_snapshot": lambda *_, **__: answers.snapshot()["segments"]}
    for name, function in functions.items():
        for module in (torch.cuda, torch.cuda.memory):
            if hasattr(module, name):
                changes.put(module, name, function)
    changes.put(torch.cuda, "memory_summary", torch.cuda.memory.memory_summary)  # torch's own text, from our counters
    for module in (torch.cuda, torch.cuda.memory):
        changes.put(module, "get_allocator_backend", lambda: "native")
    changes.put(torch.cuda.memory, "_get_device_index", lambda *_args, **_kwargs: 0)
    changes.put(torch.cuda.memory, "_record_memory_history", lambda *_args, **_kwargs: None)
    changes.put(torch.cuda.memory, "_snapshot", answers.snapshot)
    changes.put(torch.cuda.memory, "_dump_snapshot", lambda *_args, **_kwargs: session.record.assume("a memory snapshot was not written to its file"))
    for name, function in functions.items():
        if hasattr(torch.accelerator, name):
            changes.put(torch.accelerator, name, function)
    for name in ("memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats"):
        module = getattr(torch.accelerator, "memory", None)
        if module is not None and hasattr(module, name):
            changes.put(module, name, functions[name])
