"""Server traces with a known truth: daily load, caches that fill, heavy tails, restarts, and a leak or none.

``chunks(Plan(...))`` gives the events of a server in the order of time: each request takes memory at its start and gives it
back at its end, entries of caches stay, a leak keeps a share of what requests took. Memory needed is that of one chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from nbmemprof.watching.series import Series
from nbmemprof.watching.trend import Trend, judge

MIB = 1 << 20
DAY_S = 86_400.0


@dataclass(frozen=True)
class Cache:
    """Entries that stay: ``capacity`` bytes in all; evenly until full, or ever more slowly (keys that repeat)."""

    capacity: float
    requests: float  # until full, or until 63 % are there
    evenly: bool

    def bytes_after(self, requests: np.ndarray) -> np.ndarray:
        share = np.minimum(requests / self.requests, 1.0) if self.evenly else -np.expm1(-requests / self.requests)
        entries = max(1.0, self.capacity / (256 << 10))
        return np.floor(share * entries) * (self.capacity / entries)


@dataclass(frozen=True)
class Plan:
    """A server: what it holds, what comes in, and what is not given back."""

    events: int = 200_000
    days: float = 4.0
    swing: float = 0.6  # of the load over the day, 0 to 1
    base: float = 2048 * MIB
    request: float = 4 * MIB  # mean
    tail: float = 1.6  # Pareto's alpha of the sizes
    together: float = 12.0  # requests at a time, on average
    caches: tuple[Cache, ...] = ()
    restarts: tuple[float, ...] = ()  # as shares of the run
    leak: float = 0.0  # share of what requests take that is never given back
    whole: bool = False  # one request in 1 / leak is kept whole; else a piece of each
    seed: int = 0

    @property
    def requests(self) -> int:
        return self.events // 2


@dataclass
class Chunk:
    """Events in the order of time; ``restart``: a new process begins before the first."""

    time_s: np.ndarray
    change: np.ndarray
    requests: np.ndarray  # begun so far, in this process
    restart: bool = False


@dataclass
class Truth:
    """What was leaked, request by request, in all processes together."""

    leaked: float = 0.0
    requests: int = 0
    marks: list[tuple[int, int, float]] = field(default_factory=list, repr=False)  # process, requests begun in it, leaked in all

    @property
    def slope(self) -> float:
        return self.leaked / max(self.requests, 1)

    @property
    def judged_slope(self) -> float:
        """Of each process from half of the longest one's requests on: what a trend that leaves the warm-up out can know."""
        parts = {p: np.asarray([(n, b) for q, n, b in self.marks if q == p]) for p in {mark[0] for mark in self.marks}}
        longest = max(rows[-1, 0] for rows in parts.values())
        later = [late for rows in parts.values() if len(late := rows[rows[:, 0] >= longest / 2]) > 1]
        return float(sum(rows[-1, 1] - rows[0, 1] for rows in later) / sum(rows[-1, 0] - rows[0, 0] for rows in later))


def leak_free(seed: int, events: int = 200_000) -> Plan:
    """A server of its own kind for each seed; caches and peaks take less than half of the room above the base (8 GiB)."""
    rng = np.random.default_rng(seed)
    room = 8192 * MIB
    shares = rng.dirichlet(np.ones(4)) * room * rng.uniform(0.05, 0.3)
    many = int(rng.integers(0, 5))
    # full soon, half-way through, or not before the end
    until = events / 2 * 10 ** rng.uniform(-2.0, 0.3, many)
    caches = tuple(Cache(float(s), float(u), bool(rng.random() < 0.5)) for s, u in zip(shares[:many], until, strict=True))
    restarts = tuple(sorted(rng.uniform(0.1, 0.9, int(rng.integers(0, 4)))))
    return Plan(
        events=events, days=float(10 ** rng.uniform(-1.0, 1.0)), swing=float(rng.uniform(0.0, 0.9)), base=float(rng.uniform(256, 8192)) * MIB,
        request=float(10 ** rng.uniform(-1.0, 0.8)) * MIB, tail=float(rng.uniform(1.3, 3.0)), together=float(10 ** rng.uniform(0.0, 1.7)), caches=caches, restarts=restarts, seed=seed,
    )  # fmt: skip


def limit_of(plan: Plan) -> float:
    """Where the server of ``leak_free`` has to stay below."""
    return plan.base + 8192 * MIB


def chunks(plan: Plan, truth: Truth | None = None, size: int = 100_000) -> Iterator[Chunk]:
    """The events, ``size`` requests at a time; ``truth`` is filled on the way."""
    rng, truth = np.random.default_rng((plan.seed, 1)), truth or Truth()
    stops = sorted({*(int(plan.requests * share) for share in plan.restarts), plan.requests})
    done, clock, process = 0, 0.0, 0
    per_s = plan.requests / (plan.days * DAY_S)
    held_s = plan.together / per_s
    for stop in stops:
        open_end, open_bytes = np.zeros(0), np.zeros(0)
        begun, cached, first = 0, 0.0, True
        while done < stop:
            many = min(size, stop - done)
            start = _arrivals(rng, plan, per_s, clock, many)
            clock = float(start[-1])
            taken = np.minimum(plan.request * (plan.tail - 1) / plan.tail * (1 + rng.pareto(plan.tail, many)), 512 * MIB)
            kept = _kept(rng, plan, taken)
            truth.leaked += float(kept.sum())
            truth.requests += many
            truth.marks.append((process, begun + many, truth.leaked))
            number = begun + np.arange(1, many + 1)
            in_caches = sum((c.bytes_after(number) for c in plan.caches), np.zeros(many))
            grown = np.diff(in_caches, prepend=cached)
            cached = float(in_caches[-1])
            open_end = np.concatenate([open_end, start + rng.exponential(held_s, many)])
            open_bytes = np.concatenate([open_bytes, taken - kept])
            over = open_end <= clock if done + many < stop else np.ones(len(open_end), bool)
            time = np.concatenate([start, open_end[over]])
            change = np.concatenate([taken + grown, -open_bytes[over]])
            count = np.concatenate([np.ones(many), np.zeros(int(over.sum()))])
            order = np.argsort(time, kind="stable")
            change = change[order]
            if first:
                change[0] += plan.base
            yield Chunk(time[order], np.rint(change), begun + np.cumsum(count[order]), restart=first and process > 0)
            open_end, open_bytes, first = open_end[~over], open_bytes[~over], False
            begun, done = begun + many, done + many
            clock = max(clock, float(time.max()) if done == stop else clock)
        process += 1


def _arrivals(rng: np.random.Generator, plan: Plan, per_s: float, clock: float, many: int) -> np.ndarray:
    """Times of the next requests: a Poisson stream whose rate follows the day."""
    work = np.cumsum(rng.exponential(1.0, many))
    grid = clock + np.linspace(0.0, 2.5 * many / per_s / max(1 - plan.swing, 0.05), 4096)
    turn = 2 * np.pi / DAY_S
    done = per_s * (grid - plan.swing / turn * np.sin(turn * grid))  # integral of per_s * (1 - swing * cos)
    return np.interp(work, done - done[0], grid)


def _kept(rng: np.random.Generator, plan: Plan, taken: np.ndarray) -> np.ndarray:
    if not plan.leak:
        return np.zeros(len(taken))
    return np.where(rng.random(len(taken)) < plan.leak, taken, 0.0) if plan.whole else np.full(len(taken), plan.leak * plan.request)


@dataclass
class Followed:
    """What a tracker said of a server: the first alarm and when, the common slope, the truth."""

    slope: Trend
    truth: Truth
    alarm: Trend | None = None
    alarm_requests: int | None = None
    growing_requests: int | None = None  # first told to be growing, caches that fill included
    events: int = 0


def follow(plan: Plan, limit: float, looks: int = 100) -> Followed:
    """Feed a server to the tracker of ``mp.watch`` and judge it ``looks`` times on the way, as a watch does."""
    series, truth, live = Series(plan.days * DAY_S / 20_000), Truth(), 0.0
    found = Followed(Trend("unknown"), truth)
    for chunk in chunks(plan, truth, max(plan.requests // looks, 1)):
        if chunk.restart:
            series.restart()
            live = 0.0
        values = live + np.cumsum(chunk.change)
        live = float(values[-1])
        found.events += len(values)
        series.extend(chunk.time_s, values, chunk.requests)
        trend = judge(series, limit)
        if trend and found.growing_requests is None:
            found.growing_requests = truth.requests
        if trend.in_sight and found.alarm is None:
            found.alarm, found.alarm_requests = trend, truth.requests
    found.slope = judge(series, limit, last_epoch=False)
    return found
