"""The search itself: small probes, a prediction through the allocator's rules, a jump, and two tries that confirm it."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from nbmemprof.searching.scaling import Family, grown
from nbmemprof.searching.trying import Bench, Room, Try

__all__ = ["Search"]

_CAP = 1 << 24  # beyond this a step does not grow with its batch
_FAR = 3  # a prediction this many times the largest probe is looked at nearer first
_NEAR = 0.7
_BELIEVED = 2
_BEYOND = 1.25


class Search:
    """Tries at one bench; ``lo`` is the largest batch that fitted, ``hi`` the smallest that did not.

    Parameters
    ----------
    bench
        Where tries are made.
    low, high
        Smallest and largest batch that are asked for; high None: none.
    seconds
        After these no further try begins.
    told
        Called before each try with the tries so far and the batch that comes.
    """

    def __init__(
        self, bench: Bench, low: int = 1, high: int | None = None, *, seconds: float | None = None, told: Callable[[list[Try], int, Room], None] | None = None
    ) -> None:
        self.bench, self.low, self.high, self.seconds, self.told = bench, low, high, seconds, told
        self.tries: list[Try] = []
        self.family = Family()
        self.lo: int | None = None
        self.hi: int | None = None
        self.room = Room()
        self.stopped: str | None = None
        self.predicted: int | None = None
        self._begin = time.perf_counter()
        self._misses = 0  # jumps that failed since one fitted
        self._doubts = 0  # batches that fitted though the model said no
        self._wide = 1  # how far to go where the prediction is of no use
        self.by_peaks = False

    # ------------------------------------------------------------------ tries
    def ask(self, batch: int, purpose: str) -> bool:
        """Try a batch size and learn from it."""
        self.room = self.bench.room()
        if self.told is not None:
            self.told(self.tries, batch, self.room)
        made, stream = self.bench.run(batch, purpose)
        self.tries.append(made)
        self.family.add(stream)
        if made.fits:
            self.lo = batch if self.lo is None else max(self.lo, batch)
        else:
            self.hi = batch if self.hi is None else min(self.hi, batch)
        return made.fits

    def done(self) -> bool:
        """Whether the answer is known, or no more time is left."""
        if self.lo is None or self.stopped:
            return True
        if self.lo == self.high or (self.hi is not None and self.hi - self.lo == 1):
            return True
        if self.seconds is not None and time.perf_counter() - self._begin + self.tries[-1].seconds > self.seconds:
            self.stopped = f"the time limit of {self.seconds:g} s was reached after {len(self.tries)} tries"
        elif self.lo >= _CAP:
            self.stopped = f"it still fits at {self.lo}: memory does not grow with this number; give high="
        return self.stopped is not None

    # ------------------------------------------------------------------ the plan
    def run(self, *, confirm: bool = True) -> None:
        """Search until the answer and the answer + 1 have been tried, or predict from two probes."""
        self.probe()
        if not confirm:
            if self.lo is not None:
                self.predicted = self.predict()
            return
        while not self.done():
            self.next()

    def probe(self) -> None:
        """Two small tries that tell how the requests grow."""
        if self.ask(self.low, "probe") and not self.done():
            self.ask(min(max(self.low + 1, 2 * self.low), self.high or _CAP), "probe")

    def next(self) -> None:
        """The try that tells most."""
        assert self.lo is not None  # noqa: S101 - the first probe fitted
        guess = self.predict()
        if guess is None:  # nothing was recorded: double, then halve
            self.ask(min(2 * self.lo, self.high or _CAP) if self.hi is None else (self.lo + self.hi) // 2, "search")
            return
        if self.hi is None and self.bench.plans and not self.family.tolerant():
            # convolutions go on with another plan where a workspace is refused: beyond the first refusal, but not far
            guess = max(guess, min(self.predict(tolerant=True) or 0, int(_BEYOND * guess)))
        self.predicted = guess
        largest = max(t.batch for t in self.tries if t.fits)
        if self.hi is None and guess >= _FAR * largest and largest < _NEAR * guess and not any(t.purpose == "nearer" for t in self.tries):
            self._misses += not self.ask(max(self.lo + 1, int(_NEAR * guess)), "nearer")
            return
        if guess > self.lo:
            # a prediction that failed twice from the same point is not believed a third time
            self._misses = 0 if self.ask(guess if self._misses < _BELIEVED or self.hi is None else (self.lo + self.hi) // 2, "jump") else self._misses + 1
            return
        # the model says that the next one fails: that is what the second confirming try is for
        if self.hi is None:
            ahead = min(self.lo + max(1, self._wide // 2), self.high or _CAP)  # 1, 1, 2, 4 …
            self._wide *= 2
        else:
            ahead = self.lo + 1 if self._doubts < _BELIEVED else (self.lo + self.hi) // 2
        self._doubts += self.ask(ahead, "confirm")

    # ------------------------------------------------------------------ the prediction
    def predict(self, *, tolerant: bool = False) -> int | None:
        """Largest batch between what fitted and what did not that the rules serve; ``lo`` where it is the next one that fails, None where nothing is known."""
        assert self.lo is not None  # noqa: S101 - the first probe fitted
        if self.room.bytes is None:
            return None
        fits = self._judge(tolerant=tolerant or self.family.tolerant())
        if fits is None:
            return None
        top = min(self.high if self.high is not None else _CAP, self.hi - 1 if self.hi is not None else _CAP)
        good, bad = self.lo, self.lo + 1
        reach = 1
        while bad <= top and fits(bad):
            good, reach = bad, 2 * reach
            bad = min(bad + reach, top) if bad < top else top + 1
        bad = min(bad, top + 1)
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        return good

    def _judge(self, *, tolerant: bool) -> Callable[[int], bool] | None:
        """Whether a batch fits, by its requests under the limit; by its peak where runs can't be matched."""
        assert self.lo is not None  # noqa: S101 - the first probe fitted
        if self.family.steady() and self.family.at(self.lo + 1) is not None:
            room = self.room

            def by_requests(batch: int) -> bool:
                found = self.family.at(batch)
                if found is None:
                    return False
                stream, sizes = found
                return stream.serve(
                    sizes, limit_bytes=room.limit_bytes, capacity_bytes=room.capacity_bytes, card_bytes=room.card_bytes, policy=self.bench.policy, tolerant=tolerant, runs=12
                ).fits

            return by_requests
        # allocated bytes are the least that is needed; where that promised too much, what was reserved is the second opinion
        named = "peak_reserved_bytes" if self._misses else "peak_allocated_bytes"
        known = sorted(((t.batch, getattr(t, named)) for t in self.tries if t.fits and getattr(t, named)), reverse=True)
        if len({b for b, _ in known}) < 2:
            return None
        self.by_peaks = True
        here, *others = [(b, np.asarray([float(p or 0)])) for b, p in known]
        most = self.room.bytes or 0
        return lambda batch: bool(grown(batch, here, others)[0] <= most)
