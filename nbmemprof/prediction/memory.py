"""What the user's own questions about memory are answered from while the fake run goes on."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.catalogue import GPU
from nbmemprof.prediction.recorder import EMPTY_CACHE, Record

__all__ = ["Memory"]

ROUND = 512


class Memory:
    """Counts what the record holds; reserved is taken as allocated here, the exact replay comes after the run."""

    def __init__(self, gpu: GPU, record: Record, limit_bytes: int | None) -> None:
        self.gpu, self.record, self.limit = gpu, record, limit_bytes
        self._at = self._now = self._peak = 0

    def _follow(self) -> None:
        events, made = self.record.events, self.record.made
        now, peak = self._now, self._peak
        for index in events[self._at : len(events)]:
            if index == EMPTY_CACHE:
                continue
            if index >= 0:
                now += -(-made[index].nbytes // ROUND) * ROUND
                peak = max(peak, now)
            else:
                now -= -(-made[~index].nbytes // ROUND) * ROUND
        self._at, self._now, self._peak = len(events), now, peak

    def allocated(self, *_: Any, **__: Any) -> int:
        """``torch.cuda.memory_allocated``."""
        self._follow()
        return self._now

    def peak_allocated(self, *_: Any, **__: Any) -> int:
        """``torch.cuda.max_memory_allocated``."""
        self._follow()
        return self._peak

    reserved = allocated
    peak_reserved = peak_allocated

    def reset_peak(self, *_: Any, **__: Any) -> None:
        """``torch.cuda.reset_peak_memory_stats``."""
        self._follow()
        self._peak = self._now

    def empty(self, *_: Any, **__: Any) -> None:
        """``torch.cuda.empty_cache``."""
        self.record.events.append(EMPTY_CACHE)

    def free_total(self, *_: Any, **__: Any) -> tuple[int, int]:
        """``torch.cuda.mem_get_info``."""
        self._follow()
        return max(0, self.gpu.capacity_bytes - self._now - (self.gpu.outside.kernels << 20)), self.gpu.capacity_bytes

    def stats(self, *_: Any, **__: Any) -> dict[str, int]:
        """``torch.cuda.memory_stats``."""
        self._follow()
        names = {"current": self._now, "peak": self._peak}
        return {f"{what}_bytes.all.{when}": value for what in ("allocated", "reserved", "active", "requested") for when, value in names.items()} | {"num_ooms": 0, "num_alloc_retries": 0}

    def set_fraction(self, fraction: float, *_: Any, **__: Any) -> None:
        """``torch.cuda.set_per_process_memory_fraction``."""
        self.limit = int(fraction * self.gpu.capacity_bytes)
