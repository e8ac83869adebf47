"""What a search found: the batch, how sure it is, the tries, and what a sample costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.errors import NbmemprofError
from nbmemprof.searching.scaling import grown
from nbmemprof.searching.trying import Room, Try
from nbmemprof.units import format_bytes

__all__ = ["COLUMNS", "MaxBatch"]

COLUMNS: dict[str, Any] = {
    "number": pl.Int64, "batch": pl.Int64, "fits": pl.Boolean, "purpose": pl.String, "peak_allocated_bytes": pl.Int64, "peak_reserved_bytes": pl.Int64,
    "retries": pl.Int64, "seconds": pl.Float64, "error": pl.String, "origin": pl.String,
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class MaxBatch:
    """The largest batch that fits.

    Attributes
    ----------
    batch
        It; 0 where not even ``low`` fitted.
    exact
        It was tried and fitted, and the next one was tried and did not (or it is the highest that was asked for).
    origin
        ``measured`` on the device, ``predicted`` by fake runs, ``modelled`` by CPU runs on a modelled device.
    room
        Limit and capacity that held.
    predicted
        What the last prediction said before the tries that confirm; None where there was none.
    stopped
        Why the search ended early, as a sentence; None where it did not.
    notes
        What was assumed.
    """

    batch: int
    exact: bool
    origin: str
    made: list[Try]
    room: Room
    low: int
    high: int | None
    seconds: float
    device: str | None = None
    conf: str | None = None
    predicted: int | None = None
    stopped: str | None = None
    notes: tuple[str, ...] = field(default=())

    @cached_property
    def tries(self) -> pl.DataFrame:
        """One row a try, in order: ``number batch fits purpose peak_allocated_bytes peak_reserved_bytes retries seconds error origin``; null where not measured."""
        rows = [
            {"number": i, "batch": t.batch, "fits": t.fits, "purpose": t.purpose, "peak_allocated_bytes": t.peak_allocated_bytes, "peak_reserved_bytes": t.peak_reserved_bytes,
             "retries": t.retries, "seconds": t.seconds, "error": t.error, "origin": t.origin}
            for i, t in enumerate(self.made, 1)
        ]  # fmt: skip
        return pl.DataFrame(rows, schema=COLUMNS, orient="row")

    @property
    def ooms(self) -> int:
        """Tries that ran out of memory."""
        return sum(not t.fits for t in self.made)

    # ------------------------------------------------------------------ bytes a sample
    @cached_property
    def _points(self) -> list[tuple[int, int]]:
        """Batch and peak allocated bytes of what fitted, largest first."""
        return sorted({t.batch: int(t.peak_allocated_bytes) for t in self.made if t.fits and t.peak_allocated_bytes}.items(), reverse=True)

    @property
    def _fitted(self) -> list[tuple[int, int]]:
        upper = [p for p in self._points if 2 * p[0] >= self._points[0][0]]
        return upper if len(upper) > 1 else self._points

    @cached_property
    def _line(self) -> tuple[float, float, float] | None:
        """Slope, start and largest distance of the straight line through the peaks (least squares).

        Small batches can have their peak elsewhere in the step: those below half of the largest take part only where there is no other.
        """
        points = self._fitted
        if len(points) < 2:
            return None
        x, y = (np.asarray(column, float) for column in zip(*points, strict=True))
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())
        start = float(y.mean() - slope * x.mean())
        return slope, start, float(np.abs(y - start - slope * x).max())

    @property
    def per_sample_bytes(self) -> int | None:
        """Bytes that each further sample adds to the peak of allocated memory; None with fewer than two measured peaks."""
        return round(self._line[0]) if self._line else None

    @property
    def fixed_bytes(self) -> int | None:
        """Bytes of the peak that no sample causes, by the same line."""
        return round(self._line[1]) if self._line else None

    @property
    def residual_bytes(self) -> int | None:
        """Largest distance of a measured peak from the line: what ``per_sample_bytes`` does not explain."""
        return round(self._line[2]) if self._line else None

    def peak_bytes(self, batch: int) -> int | None:
        """Peak of allocated bytes at a batch size: as measured where it was tried, else between the nearest tries; None where too few were measured.

        Raises
        ------
        NbmemprofError
            For what is no batch size, and outside of the batches that were tried: other requests may make the peak there.
        """
        if isinstance(batch, bool) or not isinstance(batch, (int, np.integer)) or batch < 1:
            raise NbmemprofError(f"{batch!r} is not a batch size. Give a whole number of 1 or more.")
        low, high = min((t.batch for t in self.made), default=batch), max((t.batch for t in self.made), default=batch)
        if not low <= batch <= high:
            raise NbmemprofError(
                f"peak_bytes({batch}) is outside of the batches that were tried, {low} to {high}, and the peak may lie elsewhere in the step there. Predict it: mp.predict(step, {batch})."
            )
        if len(self._points) < 2:
            return dict(self._points).get(batch)
        near = sorted(self._points, key=lambda p: abs(p[0] - batch))
        here, *others = [(b, np.asarray([float(size)])) for b, size in near]
        return int(here[1][0]) if here[0] == batch else round(float(grown(batch, here, others)[0]))

    # ------------------------------------------------------------------ words
    @property
    def sentence(self) -> str:
        """The answer in a sentence."""
        size = self.room.bytes
        where = f" in {format_bytes(size)}" if size is not None else ""
        where += f" on {self.device}" if self.device else ""
        if self.batch == 0:
            return f"Not even {self.low} fits{where}: {self.made[-1].error if self.made else 'nothing was tried'}."
        if self.exact and self.batch == self.high:
            how = f"it is the highest that was asked for ({self.high})"
        elif self.exact:
            how = f"two full steps ran at {self.batch}, {self.batch + 1} ran out of memory"
        else:
            how = self.stopped or "not confirmed by a run"
        word = "" if self.origin == "measured" else f" ({self.origin})"
        count = len(self.made)
        return f"Largest batch {self.batch}{where}{word}: {how}. {count} {'try' if count == 1 else 'tries'}, {self.ooms} out of memory, {self.seconds:.1f} s."

    @property
    def cost(self) -> str | None:
        """What a sample costs, in a sentence."""
        if self._line is None:
            return None
        start = f" to {format_bytes(self.fixed_bytes)} that are there anyway" if self.fixed_bytes and self.fixed_bytes > 0 else ""
        return f"Each sample adds {format_bytes(self.per_sample_bytes)}{start} (a straight line through the peaks at {', '.join(str(b) for b, _ in reversed(self._fitted))}; the farthest is {format_bytes(self.residual_bytes)} off)."

    def __repr__(self) -> str:
        return "\n".join(filter(None, [self.sentence, self.cost, *self.notes]))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        from nbmemprof.views import max_batch

        return max_batch.bundle(self)
