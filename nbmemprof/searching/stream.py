"""What two steps asked of the allocator, as a stream that is served again with other sizes under a limit.

The largest batch is reached only after the allocator has flushed its cache and asked again, so neither the peak of
reserved nor of allocated bytes tells it: the requests themselves are put through the rules, with the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._infer import recorded_settings
from nbmemprof.allocator._model import NOTHING, Model
from nbmemprof.allocator._recording import Recording, recordings
from nbmemprof.allocator.conf import Settings
from nbmemprof.allocator.versions import rules_of
from nbmemprof.capture import Capture

__all__ = ["Outcome", "Stream"]

Ints = npt.NDArray[np.int64]
_LONG = 4  # events between an alloc and its free from which both are just "far apart"


@dataclass(frozen=True)
class Outcome:
    """How the rules served a stream: whether every request, and the peaks."""

    fits: bool
    refused: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int


class Stream:
    """The requests of one try.

    Attributes
    ----------
    batch
        What was asked of the step.
    sizes
        Bytes of each alloc, in order.
    tokens
        What an alloc looks like whatever its size: frees before it, and how soon it is freed.
    complete
        Whether both steps ran to their end.
    """

    def __init__(self, recording: Recording, batch: int, settings: Settings, torch: str | None, *, complete: bool) -> None:
        self.batch, self.settings, self.torch, self.complete = batch, settings, torch, complete
        self._recording = recording
        table = recording.trace.reshape(-1, M.WORDS)
        kind, row = table[:, M.T_KIND], table[:, M.T_ROW]
        refused = kind == M.OOM
        ends = None if complete else (int(np.flatnonzero(refused)[-1]) if refused.any() else len(table))
        # a refusal that the run went on after is asked again: it flushes the cache, whether it is then granted or not
        again = refused if ends is None else refused & (np.arange(len(table)) < ends)
        self.survived = int(again.sum())
        self._at = np.flatnonzero((kind == M.ALLOC) | again)
        self._again = again[self._at]
        self.sizes: Ints = table[self._at, M.T_SIZE].copy()
        self.asked = len(self._at) if ends is None else int(np.searchsorted(self._at, ends))
        freed = np.full(recording.rows.height + 1, len(table), np.int64)
        frees = np.flatnonzero((kind == M.FREE_REQUESTED) & (row >= 0))
        freed[row[frees]] = frees
        counted = np.cumsum(kind == M.FREE_REQUESTED)
        asks = np.cumsum((kind == M.FREE_REQUESTED) | (kind == M.ALLOC))
        end = freed[row[self._at]]
        soon = np.where(end < len(table), np.minimum(asks[np.minimum(end, len(table) - 1)] - asks[self._at], _LONG), _LONG + 1)
        soon[self._again] = 1
        before = np.minimum(np.diff(counted[self._at], prepend=0), 3)
        self.tokens: Ints = (before * 8 + soon).astype(np.int64)
        self._passing = soon == 1

    @classmethod
    def of(cls, capture: Capture | None, batch: int, *, complete: bool, device: int | None = None) -> Stream | None:
        """The stream of a capture's device; None where nothing was asked or events are missing."""
        if capture is None or capture.meta.get("dropped"):
            return None
        found = [r for r in recordings(capture) if device is None or r.key[1] == device]
        if not found:
            return None
        recording = max(found, key=lambda r: r.events.height)
        torch = capture.meta.get("torch") or (capture.meta.get("versions") or {}).get("torch")
        made = cls(recording, batch, recorded_settings(capture.meta, torch)[0], torch, complete=complete)
        return made if len(made.sizes) else None

    def serve(
        self, sizes: Ints | None = None, *, limit_bytes: int | None = None, capacity_bytes: int | None = None, card_bytes: int | None = None, settings: Settings | None = None,
        policy: str = "windows", tolerant: bool = False, runs: int = 1,
    ) -> Outcome:  # fmt: skip
        """Put the requests, with these sizes, through the rules from the heap as it was when they began.

        Parameters
        ----------
        policy
            Where new segments lie, on which ties of the best fit hang; ``windows`` as the driver of an H200 was seen to put them.
        tolerant
            Whether a refusal of what is freed at once is survived, as cuDNN's workspaces are: it then takes another plan.
        """
        recording = self._recording
        model = Model(
            settings or self.settings, rules_of(self.torch), limit_bytes=limit_bytes, capacity_bytes=capacity_bytes, card_bytes=card_bytes or capacity_bytes,
            policy=policy, records=4096 + 4 * recording.segments.height,
        )  # fmt: skip
        operations, own = self._operations(recording.bind(model), self.sizes if sizes is None else sizes)
        rows = np.zeros(2 * max(recording.rows.height + self.survived, 1), np.int64)
        if not (recording.starts_empty or recording.may_be_whole):
            recording.lay_out(model, rows)
        m = model.m
        m[M.MODE], m[M.STOP] = M.MUTE, len(operations)
        model.run(np.zeros(0, np.int64), operations, rows, NOTHING, work=runs * len(operations) // M.WORDS)
        m = model.m
        refused = rows[2 * own] == -1
        fatal = int((refused & ~self._passing).sum()) if tolerant else int((refused & ~self._again).sum())
        return Outcome(fatal == 0, fatal, int(m[M.ALLOCATED_BYTES + 1]), int(m[M.RESERVED_BYTES + 1]), int(m[M.RETRIES]))

    def _operations(self, trace: Ints, sizes: Ints) -> tuple[Ints, Ints]:
        """The trace with these sizes, survived refusals as requests that are given back at once; and the row of each request."""
        table = trace.copy().reshape(-1, M.WORDS)
        table[self._at, M.T_SIZE] = sizes
        own = table[self._at, M.T_ROW].copy()
        if self.survived:
            at = self._at[self._again]
            own[self._again] = self._recording.rows.height + np.arange(self.survived)
            table[at, M.T_KIND], table[at, M.T_ROW] = M.ALLOC, own[self._again]
            back = table[at].copy()
            back[:, M.T_KIND], back[:, M.T_POOL] = M.FREE_REQUESTED, 0
            table = np.insert(table, at + 1, back, axis=0)
        return table.reshape(-1), own
