"""The user's own questions about memory in a fake run, answered from the allocator's model: ``memory_allocated``, ``memory_summary``, ``mem_get_info``.

The requests so far are put through the model when they are asked for, each once.
"""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.patches import Changes
from nbmemprof.prediction.room import outside_bytes

__all__ = ["Answers", "memory"]


class Answers:
    """What the session's modelled device tells."""

    def __init__(self, session: Any) -> None:
        self._session, self.room = session, session.room
        self.follow = self.room.follow

    def stats(self, *_: Any, **__: Any) -> dict[str, int]:
        """``torch.cuda.memory_stats``."""
        told: dict[str, int] = self.follow().stats()
        return told

    def asker(self, name: str) -> Any:
        """A function that gives one of the counters."""
        return lambda *_args, **_kwargs: self.stats()[name]

    def reset_peak(self, *_: Any, **__: Any) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self.follow().reset_peak_stats()

    def free_total(self, *_: Any, **__: Any) -> tuple[int, int]:
        """``torch.cuda.mem_get_info``: what torch reserved and the context take away."""
        taken = self.stats()["reserved_bytes.all.current"] + outside_bytes(self._session.gpu, self._session.record)
        card = min(self.room.card, self._session.gpu.capacity_bytes)  # a search gives room for everything
        return max(0, card - taken), card

    def set_fraction(self, fraction: float, *_: Any, **__: Any) -> None:
        """``torch.cuda.set_per_process_memory_fraction``."""
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        self.room.set_limit(int(fraction * self.room.card))

    def snapshot(self, *_: Any, **__: Any) -> dict[str, Any]:
        """``torch.cuda.memory._snapshot``, without a trace."""
        told: dict[str, Any] = self.follow().snapshot()
        return told


def memory(torch: Any, session: Any, changes: Changes) -> None:
    """Put the answers in place."""
    answers = session.answers = Answers(session)
    names = {
        "memory_allocated": "allocated_bytes.all.current", "max_memory_allocated": "allocated_bytes.all.peak", "memory_reserved": "reserved_bytes.all.current",
        "max_memory_reserved": "reserved_bytes.all.peak", "memory_cached": "reserved_bytes.all.current", "max_memory_cached": "reserved_bytes.all.peak",
    }  # fmt: skip
    functions: dict[str, Any] = {name: answers.asker(counter) for name, counter in names.items()}
    functions |= dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"), answers.reset_peak)
    functions |= {"set_per_process_memory_fraction": answers.set_fraction, "memory_stats": answers.stats, "mem_get_info": answers.free_total, "list_gpu_processes": lambda *_: "no processes are running", "memory_snapshot": lambda *_, **__: answers.snapshot()["segments"]}
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
