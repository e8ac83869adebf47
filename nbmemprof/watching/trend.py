"""Does it grow, how fast, and when does it meet the limit?

Daily load, caches that fill, heavy tails and restarts all make memory rise for a while. What is asked is the slope of
the *lower envelope* (the least that was held in each stretch of time) against the work done, with the load
taken out, after the warm-up. Whether it grows at all is judged by a robust line, whose interval comes from leaving out one eighth of
the run at a time, which makes no assumption on how long the noise remembers. How fast is told by :mod:`nbmemprof.watching.drift`, which
knows of growth in jumps; the interval is the wider of the two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from nbmemprof.watching.drift import drift
from nbmemprof.watching.series import Array, Series

__all__ = ["Trend", "judge"]

MIN_ROWS = 12  # stretches in the part that is judged
_BLOCKS = 8
_T99 = 3.499  # Student's t, 7 degrees of freedom, 99 % two-sided
_Z99 = 2.576  # the same of a normal distribution
_T99_HALVES = 4.604  # 4 degrees of freedom
_SLOWING = 0.8
_LEAST_BYTES = 64 << 10


@dataclass(frozen=True)
class Trend:
    """What a series does. Slopes are bytes per step, or per second where no steps were counted (``per``)."""

    verdict: str  # "unknown" (too short), "flat", "growing", "filling" (grows ever more slowly), "falling"
    per: str = "step"
    slope: float = math.nan
    low: float = math.nan
    high: float = math.nan
    slope_per_s: float = math.nan
    level_bytes: float = math.nan
    peak_bytes: float = math.nan  # where the peaks of the last stretches reach
    growth_bytes: float = math.nan  # since the level was lowest
    seen_s: float = 0.0  # since then
    steps: float = 0.0
    limit_bytes: float | None = None
    lead_s: float | None = None  # until the peaks meet the limit; None: not in sight
    lead_steps: float | None = None
    in_sight: bool = False  # the limit comes before as much time has passed again as the growth was watched

    def __bool__(self) -> bool:
        return self.verdict == "growing"


def judge(series: Series, limit_bytes: float | None = None, *, trust: float = 1.0, last_epoch: bool = True, after_s: float = 0.0) -> Trend:
    """Does it grow, how fast, and when does it meet the limit?

    Parameters
    ----------
    series
        What was read.
    limit_bytes
        Where it has to stay below.
    trust
        A trend is carried on for as long as it was seen, times this. With 1, an even growth is told when half of the
        room is used up: a cache that fills evenly can't be told from a leak until it is full.
    last_epoch
        Judge the last process alone; else one slope for all, each with a level of its own.
    after_s
        Leave out what came earlier in an epoch.

    Returns
    -------
    A :class:`Trend`. ``growing``: the 99 % interval of the slope lies above zero, both halves of what is judged grew, the growth does
    not slow down, and is more than the usual ups and downs.
    """
    epochs = np.unique(series.rows["epoch"]) if len(series) else np.zeros(0)
    parts = [part for epoch in (epochs[-1:] if last_epoch else epochs) if (part := _Part.of(series, epoch, after_s)) is not None]
    parts = [part for part in parts if 4 * (part.x[-1] - part.x[0]) >= max(p.x[-1] - p.x[0] for p in parts)]
    if not parts or sum(len(part.x) for part in parts) < MIN_ROWS:
        return Trend("unknown", limit_bytes=limit_bytes)
    last = parts[-1]
    stepwise = all(part.stepwise for part in parts)
    slope, error = _slope(parts, _BLOCKS)
    half = _T99 * error
    grows = slope > half
    if grows:
        slope, jumps = drift(_settled(parts))
        half = max(half, _Z99 * jumps)
    low, high = slope - half, slope + half
    keeps, steady = _keeps_on(parts)
    level, peak = last.now()
    # growth that is smaller than the ups and downs is not told from them
    flat = not grows or low <= 0 or not steady or slope * last.seen_x < max(peak - level, last.swing(slope), _LEAST_BYTES)
    verdict = "falling" if high < 0 else "flat" if flat else "filling" if keeps < _SLOWING else "growing"
    rate = last.rate
    found = Trend(
        verdict, per="step" if stepwise else "second", slope=slope, low=low, high=high, slope_per_s=slope * rate if stepwise else slope,
        level_bytes=level, peak_bytes=peak, growth_bytes=max(0.0, slope) * last.seen_x, seen_s=last.seen_s, steps=last.seen_x if stepwise else 0.0, limit_bytes=limit_bytes,
    )  # fmt: skip
    if limit_bytes is None or verdict not in ("growing", "filling"):
        return found
    lead = _lead(limit_bytes - peak, slope, keeps, float(last.x[-1] - last.x[0]) / 2)
    if lead is None:
        return found
    told = {"lead_s": lead / rate if stepwise else lead, "lead_steps": lead if stepwise else None, "in_sight": lead <= trust * last.seen_x}
    return Trend(**{**found.__dict__, **told})


def _since(low: Array) -> int:
    """Where to look from: what was kept for good at any earlier time is in the lowest level since.

    A level that comes back twice and more is where it always goes back to (a cache that is emptied, a list that is sent
    off): then from the first time on.
    """
    least, spread = float(low.min()), float(np.ptp(low))
    state = np.where(low <= least + 0.1 * spread, 0, np.where(low >= least + 0.5 * spread, 1, -1))
    told = state[state >= 0]
    if int(((told[1:] == 0) & (told[:-1] == 1)).sum()) >= 2:
        return int(np.argmax(state == 0))
    return len(low) - 1 - int(np.argmin(low[::-1]))


class _Part:
    """The later half of one epoch since its level was lowest: work, least held, load."""

    def __init__(self, x: Array, low: Array, high: Array, load: Array, stepwise: bool, rate: float, seen_x: float, seen_s: float) -> None:
        self.x, self.low, self.high, self.load = x, low, high, load
        self.stepwise, self.rate, self.seen_x, self.seen_s = stepwise, rate, seen_x, seen_s

    @classmethod
    def of(cls, series: Series, epoch: float, after_s: float) -> _Part | None:
        mine = series.rows["epoch"] == epoch
        time, steps, low, high = (series.rows[name][mine] for name in ("time_s", "steps", "low", "high"))
        if len(time) < 4:
            return None
        # the last stretch is not over: its least is not known
        settled = slice(int(np.searchsorted(time, time[0] + after_s)), len(time) - 1)
        time, steps, low, high = time[settled], steps[settled], low[settled], high[settled]
        if len(time) < 4 or time[-1] <= time[0]:
            return None
        lowest = _since(low)
        time, steps, low, high = time[lowest:], steps[lowest:], low[lowest:], high[lowest:]
        stepwise = bool(len(steps) and steps[-1] - steps[0] >= len(steps))
        x = steps if stepwise else time
        later = x >= (x[0] + x[-1]) / 2  # caches fill in the earlier half
        if later.sum() < MIN_ROWS // 2 or x[-1] <= x[0]:
            return None
        work = np.diff(steps, prepend=steps[0]) / np.maximum(np.diff(time, prepend=time[0] - series.width_s), 1e-9)
        load = work if stepwise else np.zeros(len(x))
        seconds = time[-1] - time[0]
        rate = max(float(steps[-1] - steps[0]) / float(seconds), 1e-12)
        return cls(x[later], low[later], high[later], load[later], stepwise, rate, float(x[-1] - x[0]), float(seconds))

    def now(self) -> tuple[float, float]:
        """The level at the end, and where its peaks reach (all but the highest hundredth)."""
        level = float(np.median(self.low[-5:]))
        return level, level + float(np.quantile(self.high - self.low, 0.99))

    def swing(self, slope: float) -> float:
        """How far the least held goes up and down beside the slope."""
        rest = self.low - slope * (self.x - self.x[0])
        return float(np.quantile(rest, 0.95) - np.quantile(rest, 0.05))

    def cut(self, keep: Array) -> _Part:
        return _Part(self.x[keep], self.low[keep], self.high[keep], self.load[keep], self.stepwise, self.rate, self.seen_x, self.seen_s)


def _settled(parts: list[_Part]) -> list[tuple[Array, Array, Array]]:
    """Work, least held and load of each part, from half of the longest part's work on: what was warm-up in one process was it in another."""
    warm = max(part.seen_x for part in parts) / 2
    found = []
    for part in parts:
        late = part.x - (part.x[-1] - part.seen_x) >= warm
        if int(late.sum()) >= MIN_ROWS // 2:
            found.append((part.x[late], part.low[late], part.load[late]))
    return found


def _slope(parts: list[_Part], blocks: int) -> tuple[float, float]:
    """The common slope of all parts, and its error by leaving out a block at a time (of each part the same).

    Least held against work, a level for each part, the load taken out; outliers count less (Huber).
    """
    y = np.concatenate([part.low for part in parts])
    x = np.concatenate([part.x - part.x[0] for part in parts])
    load = np.concatenate([part.load for part in parts])
    span, offset, scale = max(float(x.max()), 1e-12), float(y.min()), max(float(np.ptp(y)), 1e-12)
    owner = np.repeat(np.arange(len(parts)), [len(part.x) for part in parts])
    columns = [x / span, *((owner == i).astype(np.float64) for i in range(len(parts)))]
    if np.ptp(load) > 0.1 * np.abs(load).mean():
        columns.append(load / np.abs(load).max())
    matrix, target, weight = np.stack(columns, axis=1), (y - offset) / scale, np.ones(len(y))
    number = np.concatenate([np.arange(len(part.x)) * blocks // len(part.x) for part in parts])
    order = np.argsort(number, kind="stable")
    matrix, target, begin = matrix[order], target[order], np.unique(number[order], return_index=True)[1]
    blocks = len(begin)  # short parts leave some out
    for _ in range(6):
        weighed = matrix * weight[:, None]
        found = _solve(weighed.T @ matrix, weighed.T @ target)
        rest = np.abs(target - matrix @ found)
        typical = 1.4826 * float(np.median(rest))
        if typical < 1e-9:
            break
        before, weight = weight, np.minimum(1.0, 1.345 * typical / np.maximum(rest, 1e-12))
        if float(np.abs(weight - before).max()) < 0.02:
            break
    weighed = matrix * weight[:, None]
    squares = np.add.reduceat(weighed[:, :, None] * matrix[:, None, :], begin)
    products = np.add.reduceat(weighed * target[:, None], begin)
    without = _solve(squares.sum(axis=0) - squares, products.sum(axis=0) - products)[:, 0]
    whole = _solve(squares.sum(axis=0), products.sum(axis=0))[0]
    error = math.sqrt((blocks - 1) / blocks * float(((without - without.mean()) ** 2).sum()))
    return float(whole) * scale / span, error * scale / span


def _solve(squares: Array, products: Array) -> Array:
    """Normal equations, one set or many; columns that say the same share their weight."""
    many = squares.shape[-1]
    small = 1e-12 * np.maximum(np.trace(squares, axis1=-2, axis2=-1), 1e-12)
    found: Array = np.linalg.solve(squares + np.multiply.outer(small, np.eye(many)), products[..., None])[..., 0]
    return found


def _keeps_on(parts: list[_Part]) -> tuple[float, bool]:
    """How much of its speed the growth keeps from the first half of what is judged to the second (1 where noise hides it), and whether it grew in both."""
    halves = []
    for side in (0, 1):
        cut = [part.cut((part.x >= (part.x[0] + part.x[-1]) / 2) == bool(side)) for part in parts]
        cut = [part for part in cut if len(part.x) >= 5]
        if not cut:
            return 1.0, False
        halves.append(_slope(cut, 5))
    (early, early_error), (late, late_error) = halves
    if early <= 0 or late <= 0:
        return 1.0, early + early_error > 0 and late + late_error > 0 and min(early, late) > -0.2 * max(early, late)
    if early - late <= _T99_HALVES / 2 * math.hypot(early_error, late_error):
        return 1.0, True
    return late / early, True


def _lead(room: float, slope: float, keeps: float, stretch: float) -> float | None:
    """Work until the room is used up, where each further stretch of work brings ``keeps`` times the growth of the one before."""
    if room <= 0:
        return 0.0
    if slope <= 0:
        return None
    if keeps >= 0.95:
        return room / slope
    next_growth = slope * stretch * keeps
    if room * (1 - keeps) >= next_growth:
        return None
    return stretch * math.log(1 - room * (1 - keeps) / next_growth) / math.log(keeps)
