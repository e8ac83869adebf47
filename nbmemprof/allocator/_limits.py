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
        """Any limit that could show, by a refusal or by what the collector frees above its share of it."""
        most = int(self.recording.reserved.max()) + int(self._nominal(self.recording.size).max()) + ROUND_LARGE
        share = self.settings.garbage_collection_threshold
        return 1, int(most / share) if share > 0 else most

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

    def collected(self) -> tuple[int | None, list[str]]:
        """Return a limit under which the garbage collector would have run where the trace gives memory back for new memory, and nowhere else; None where it has no share of one.

        It runs when more is reserved than its share of the limit (allocator rules 1.8); the limit itself need not be met.
        """
        share = self.settings.garbage_collection_threshold
        at, taken = self._given_back_for_new()
        if share <= 0 or not len(at):
            return None, []
        r = self.recording
        before = np.concatenate([[r.start_reserved], r.reserved[:-1]])
        high = int(before[at].min())  # collected above the share, so the share is below
        quiet = before[taken]
        low = int(quiet[quiet < high].max(initial=0))
        least, most = int(np.ceil(low / share)), int(np.ceil(high / share))
        chosen = roundest(least, most)
        return chosen, [f"a memory limit of about {format_bytes(chosen, 3)} ({chosen} B), from what the garbage collector gave back: from {least} B to {most - 1} B it does so at the same places"]

    def _given_back_for_new(self) -> tuple[Words, Words]:
        """Events at which memory begins to be given back right before new memory is taken; and those that take new memory without."""
        r = self.recording
        back, new = (r.kind == M.SEGMENT_FREE) | (r.kind == M.SEGMENT_UNMAP), (r.kind == M.SEGMENT_ALLOC) | (r.kind == M.SEGMENT_MAP)
        before = np.concatenate([[False], back[:-1]])
        first = np.flatnonzero(back & ~before)
        rest = np.flatnonzero(~back)
        after = np.searchsorted(rest, first)
        first, after = first[after < len(rest)], after[after < len(rest)]
        return first[new[rest[after]]] if len(first) else first, np.flatnonzero(new & ~before)

    def _bursts(self) -> list[int]:
        """Bytes that were needed where memory was given back right before new memory was taken, smallest last."""
        r = self.recording
        first, _ = self._given_back_for_new()
        if not len(first):
            return []
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
