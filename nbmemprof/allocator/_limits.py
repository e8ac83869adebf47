"""The memory limit that no event tells, from what was granted and what was refused."""

from __future__ import annotations

import numpy as np
import polars as pl

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._model import Words
from nbmemprof.allocator._recording import Recording
from nbmemprof.allocator.conf import Settings
from nbmemprof.allocator.rounding import MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE, round_sizes
from nbmemprof.units import format_bytes

__all__ = ["Bounds", "roundest"]


class Bounds:
    """What the recorded outcomes say about the memory limit: granted new memory lies below it, refused above."""

    def __init__(self, recording: Recording, settings: Settings) -> None:
        self.recording, self.settings = recording, settings
        kind = recording.kind
        self.ooms = np.flatnonzero(kind == M.OOM)

    def limit(self) -> tuple[int | None, list[str]]:
        """Return a limit that fits all outcomes, None where nothing shows one; and what was concluded."""
        r = self.recording
        if not len(self.ooms):
            return None, []
        free = self._device_free()
        nominal = self._nominal(r.size[self.ooms])
        by_limit = np.asarray([f is None or f >= n for f, n in zip(free, nominal.tolist(), strict=True)])
        if not by_limit.any():
            return None, []
        reserved = r.reserved[self.ooms]
        high = int((reserved + nominal)[by_limit].min())
        low = self._granted()
        if low >= high:
            return None, [f"no single limit explains every refusal (memory was granted up to {format_bytes(low)} and refused at {format_bytes(high)}): refusals are read from the trace"]
        for needed in self._bursts():
            if low < needed < high:
                high = needed
        chosen = roundest(low, high)
        return chosen, [f"a memory limit of {format_bytes(chosen, 3)} ({chosen} B), from what was refused: anything from {low} B to {high - 1} B refuses the same"]

    def widest(self) -> tuple[int, int]:
        """Any limit at all."""
        return 1, int(self.recording.reserved.max()) + int(self._nominal(self.recording.size).max()) + ROUND_LARGE

    def physical(self) -> int | None:
        """What the driver could give, where it refused: the least of reserved and free at a refusal."""
        free = self._device_free()
        known = [int(self.recording.reserved[at]) + f for at, f in zip(self.ooms.tolist(), free, strict=True) if f is not None]
        return min(known) if known else None

    def _device_free(self) -> list[int | None]:
        marks = self.recording.capture.tables["marks"]
        rows = marks.filter((pl.col("kind").cast(pl.String) == "oom") & pl.col("value").is_not_null())
        free = dict(zip(rows["seq"].to_list(), rows["value"].to_list(), strict=True))
        return [None if (v := free.get(int(self.recording.curve.seq[at]))) is None else int(v) for at in self.ooms.tolist()]

    def _nominal(self, requested: Words) -> Words:
        rounded = round_sizes(requested, list(self.settings.roundup_power2_divisions))
        large = np.where(rounded < MIN_LARGE_ALLOC, self.settings.large_segment_size, (rounded + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE)
        return np.where(rounded <= SMALL_SIZE, SMALL_BUFFER, large)

    def _request_after(self, at: Words) -> Words:
        """Nominal size of the request after each of these events."""
        r = self.recording
        asks = np.flatnonzero((r.kind == M.ALLOC) | (r.kind == M.OOM))
        place = np.minimum(np.searchsorted(asks, at), max(len(asks) - 1, 0))
        return self._nominal(r.size[asks[place]])

    def _granted(self) -> int:
        r = self.recording
        new = (r.kind == M.SEGMENT_ALLOC) | (r.kind == M.SEGMENT_MAP)
        first = np.flatnonzero(new & ~np.concatenate([[False], new[:-1]]))
        if not len(first):
            return 0
        before = np.where(first > 0, r.reserved[np.maximum(first - 1, 0)], r.start_reserved)
        return int((before + self._request_after(first)).max())

    def _bursts(self) -> list[int]:
        """Bytes that were needed where memory was given back right before new memory was taken, smallest last."""
        r = self.recording
        back = (r.kind == M.SEGMENT_FREE) | (r.kind == M.SEGMENT_UNMAP)
        first = np.flatnonzero(back & ~np.concatenate([[False], back[:-1]]))
        after = np.searchsorted(np.flatnonzero(~back), first)
        rest = np.flatnonzero(~back)
        first, after = first[after < len(rest)], after[after < len(rest)]
        if not len(first):
            return []
        new = np.isin(r.kind[rest[after]], (M.SEGMENT_ALLOC, M.SEGMENT_MAP))
        first = first[new]
        before = np.where(first > 0, r.reserved[np.maximum(first - 1, 0)], r.start_reserved)
        needed: list[int] = (before + self._request_after(first)).tolist()
        return sorted(needed, reverse=True)


def roundest(low: int, high: int) -> int:
    """Return the number in [low, high) with the most trailing zero bits: limits are set as round numbers more often than not."""
    for bit in range(50, -1, -1):
        candidate = -(-low >> bit) << bit
        if low <= candidate < high:
            return candidate
    return low
