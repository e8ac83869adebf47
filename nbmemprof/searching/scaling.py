"""From the requests at a few batch sizes to those at any other: each request is a fixed part and a part that grows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nbmemprof.searching.align import partners
from nbmemprof.searching.stream import Stream

__all__ = ["Family", "grown"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
_SPARE = 0.2  # of the requests may come or go, as workspaces and the buffers of reductions do
_SLACK = 4096  # bytes: workspaces are padded


class Family:
    """Streams of one step at several batch sizes."""

    def __init__(self) -> None:
        self.streams: dict[int, Stream] = {}
        self._pairs: dict[tuple[int, int], Ints | None] = {}

    def add(self, stream: Stream | None) -> None:
        """Take a stream in; one that ran to its end replaces one that did not."""
        if stream is not None and (stream.complete or stream.batch not in self.streams):
            self.streams[stream.batch] = stream
            self._pairs = {key: pair for key, pair in self._pairs.items() if stream.batch not in key}

    def tolerant(self) -> bool:
        """Whether a run was seen to go on after a refusal."""
        return any(s.survived for s in self.streams.values() if s.complete)

    def steady(self) -> bool:
        """Whether the number of requests stays as it is when the batch grows; a loop over samples asks more often instead of for more."""
        whole = sorted((s for s in self.streams.values() if s.complete), key=lambda s: s.batch)[-2:]
        if len(whole) < 2:
            return True
        few, many = sorted((len(whole[0].sizes), len(whole[1].sizes)))
        return many - few <= max(1, _SPARE * many, (whole[1].batch - whole[0].batch) / 2)

    def at(self, batch: int) -> tuple[Stream, Ints] | None:
        """The stream whose structure is used for this batch, and the bytes of its requests there; None where two runs can't be matched."""
        whole = [s for s in self.streams.values() if s.complete]
        if not whole:
            return None
        template = min(whole, key=lambda s: (abs(s.batch - batch), -s.batch))
        if template.batch == batch:
            return template, template.sizes
        points: list[tuple[int, Floats]] = []
        for other in sorted(self.streams.values(), key=lambda s: -s.batch):
            pair = self._pair(template, other) if other is not template else None
            if pair is not None:
                points.append((other.batch, np.where(pair >= 0, other.sizes[np.maximum(pair, 0)], np.nan).astype(float)))
        if not any(self.streams[b].complete for b, _ in points):
            return None
        return template, np.maximum(np.rint(grown(batch, (template.batch, template.sizes.astype(float)), points)), 1).astype(np.int64)

    def _pair(self, template: Stream, other: Stream) -> Ints | None:
        key = (template.batch, other.batch)
        if key not in self._pairs:
            self._pairs[key] = partners(template.tokens, other.tokens) if other.complete else _beginning(template, other)
        return self._pairs[key]


def _beginning(template: Stream, other: Stream) -> Ints:
    """The requests before a refusal are the same ones in the same order, as long as none is clearly another."""
    n = min(len(template.sizes), other.asked)
    ratio = other.sizes[:n] / np.maximum(template.sizes[:n], 1)
    low, high = sorted((1.0, other.batch / template.batch))
    strange = np.flatnonzero((ratio < 0.7 * low) | (ratio > 1.4 * high))
    n = int(strange[0]) if len(strange) else n
    found = np.full(len(template.sizes), -1, np.int64)
    found[:n] = np.arange(n)
    return found


def grown(batch: int, here: tuple[int, Floats], points: list[tuple[int, Floats]]) -> Floats:
    """Bytes of each request at a batch size.

    Straight through the two nearest known sizes; where that would begin below zero the request grows faster than the
    batch (attention scores over a sequence): then a parabola through zero, or through three sizes.

    Parameters
    ----------
    batch
        Where it is asked.
    here
        Batch and bytes of the stream whose structure is used.
    points
        Batch and bytes of others, those to be preferred first; NaN where a request has no partner.
    """
    b0, s0 = here
    b1, s1, b2, s2 = (np.full(len(s0), np.nan) for _ in range(4))
    for b, s in points:
        known = ~np.isnan(s)
        first = known & np.isnan(s1)
        second = known & ~first & np.isnan(s2)
        b1[first], s1[first] = b, s[first]
        b2[second], s2[second] = b, s[second]
    with np.errstate(invalid="ignore", divide="ignore"):
        slope = (s0 - s1) / (b0 - b1)
        straight = s0 + slope * (batch - b0)
        start = s0 - slope * b0
        bent = (s0 / b0 - s1 / b1) / (b0 - b1)  # s = bent·b² + c·b
        through_zero = (s1 / b1 - bent * b1) * batch + bent * batch * batch
        second = (slope - (s1 - s2) / (b1 - b2)) / (b0 - b2)  # of Newton's divided differences
        parabola = straight + second * (batch - b0) * (batch - b1)
        at_zero = start + second * b0 * b1
        off = np.abs(s0 + slope * (b2 - b0) - s2) > np.maximum(_SLACK, 0.01 * s2)
    alone = np.where((s0 % b0 == 0) & (s0 > _SLACK), s0 / b0 * batch, s0)
    with np.errstate(invalid="ignore"):  # what an error of 2 % of the sizes would make of the beginning
        slack = np.maximum(_SLACK, 0.02 * np.maximum(np.minimum(s0, s1), s0 * np.abs(b1 / (b0 - b1))))
    faster = (start < -slack) & (bent > 0)
    made = np.where(faster, through_zero, straight)
    curved = ~np.isnan(s2) & off & (second > 0) & (at_zero > -slack) & faster
    made = np.where(curved, parabola, made)
    made = np.where(np.isnan(s1), alone, made)
    return np.maximum(made, 0)
