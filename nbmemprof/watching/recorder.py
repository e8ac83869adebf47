"""Watch a process over days: counters in a bounded ring on disk, a trend, an alarm ahead of the limit."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import platform
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_count, parse_bytes
from nbmemprof.watching import gauges
from nbmemprof.watching.alarm import Alarm
from nbmemprof.watching.series import Series
from nbmemprof.watching.store import Log, start_of
from nbmemprof.watching.trend import Trend, judge

__all__ = ["Watch", "watch"]

_JUDGED = {gauges.HOST: "rss_bytes"}  # on a device: what is allocated
_ON_DEVICE = "allocated_bytes"
_COST = {"read": 0.005, "judge": 0.003, "sites": 0.002}  # of one core; the pauses are made long enough
_MOST_GAUGES, _MOST_LABELS, _MOST_NOTES, _MOST_SITES = 64, 256, 500, 40
_FRESH = 64
_log = logging.getLogger("nbmemprof.watch")
_alive: weakref.WeakSet[Watch] = weakref.WeakSet()


class Watch:
    """A watch on this process, from its making to :meth:`stop`; made by :func:`watch`."""

    def __init__(
        self, folder: str | os.PathLike[str], *, interval_s: float = 1.0, limit_bytes: int | str | None = None, host_limit_bytes: int | str | None = None,
        on_alarm: Callable[[Alarm], Any] | None = None, stacks: bool = False, stacks_every_s: float = 30.0, warmup_s: float = 30.0, trust: float = 1.0,
        ring_bytes: int | str = "16MiB", title: str | None = None,
    ) -> None:  # fmt: skip
        if not interval_s > 0:
            raise NbmemprofError(f"interval_s={interval_s} is not a time between readings. Give seconds above zero.")
        if on_alarm is not None and not callable(on_alarm):
            raise NbmemprofError(f"on_alarm={on_alarm!r} can't be called. Give a function that takes an alarm.")
        self.folder, self.title, self.interval_s, self.warmup_s, self.trust = Path(folder), title, float(interval_s), float(warmup_s), float(trust)
        self._wanted = tuple(None if limit is None else parse_bytes(limit) for limit in (limit_bytes, host_limit_bytes))
        self._hook, self._stacks, self._stacks_every_s = on_alarm, stacks, max(float(stacks_every_s), self.interval_s)
        self.alarms: list[Alarm] = []
        self.cost_s = 0.0
        self._steps = 0.0
        self._labels: dict[str, float] = {}
        self._own: dict[str, tuple[float, float | None]] = {}
        self._series: dict[tuple[str, str], Series] = {}
        self._fresh: list[tuple[float, float, gauges.Readings]] = []  # not in the series yet
        self._notes: list[dict[str, Any]] = []
        self._raised: dict[str, float] = {}
        self._sites: dict[tuple[str, str], list[float]] = {}
        self._opened = False  # the lines at the beginning have been seen
        self._lock, self._writing, self._settling = threading.Lock(), threading.Lock(), threading.Lock()
        self._done = threading.Event()
        self._pid, self._unix, self._begin = os.getpid(), time.time(), time.monotonic()
        self._recording: Any = None
        self.name = f"{int(self._unix * 1000):013d}-{socket.gethostname()[:40].replace('.', '-')}-{self._pid}"
        self._head = self._about()
        try:
            self._store = Log(self.folder, self.name, parse_bytes(ring_bytes), self._state)
            self._store.append(self._head, sync=True)
        except OSError as error:
            raise NbmemprofError(f"{self.folder} can't be written ({error.strerror or error}). Give mp.watch a folder that this process may write to.") from error
        if stacks:
            from nbmemprof.recording import record

            self._recording = record(stacks="python", ring_bytes=64 << 20).start()
        self._read(time.monotonic() - self._begin)
        self._thread = threading.Thread(target=self._run, name="nbmemprof-watch", daemon=True)
        self._thread.start()
        _alive.add(self)
        atexit.register(self.stop)

    def __repr__(self) -> str:
        state = "stopped" if self._done.is_set() else "watching"
        return f"<Watch {self.folder}: {state}, {format_count(self._steps)} steps, {len(self.alarms)} alarms, cost {self.cost_fraction:.2%} of a core>"

    # ------------------------------------------------------------------ what the program tells
    def step(self, label: str | None = None, count: float = 1) -> None:
        """Count a request, a training step, or ``count`` of them: growth is then told for each, whatever the load (below 1 µs)."""
        with self._lock:
            self._steps += count
            if label is not None:
                if label not in self._labels and len(self._labels) >= _MOST_LABELS:
                    label = "(other)"
                self._labels[label] = self._labels.get(label, 0) + count

    def gauge(self, name: str, value: float, *, limit: float | None = None) -> None:
        """Tell a number of the program's own (bytes of a cache, length of a queue); kept with the next reading, judged where it has a limit."""
        with self._lock:
            if name in self._own or len(self._own) < _MOST_GAUGES:
                self._own[name] = (float(value), limit)

    def mark(self, name: str) -> None:
        """Note that something happened now: a new model, a new version of the data."""
        self._note({"k": "mark", "name": str(name)[:200]})

    # ------------------------------------------------------------------ what it knows
    @property
    def cost_fraction(self) -> float:
        """CPU time of the watch as a share of one core's."""
        return self.cost_s / max(time.monotonic() - self._begin, 1e-9)

    def trends(self) -> dict[tuple[str, str], Trend]:
        """The trend of each judged series now; key: device ("host", "0") and gauge."""
        self._settle()
        limits = gauges.limits(*self._wanted)
        with self._lock:
            limits_of_own = {name: limit for name, (_, limit) in self._own.items()}
        found = {}
        for (device, gauge), series in list(self._series.items()):
            if gauge == _JUDGED.get(device, _ON_DEVICE):
                found[device, gauge] = judge(series, limits.get(device), trust=self.trust, after_s=self.warmup_s)
            elif device == "own" and limits_of_own.get(gauge):
                found[device, gauge] = judge(series, limits_of_own[gauge], trust=self.trust, after_s=self.warmup_s)
        return found

    # ------------------------------------------------------------------ begin and end
    def stop(self) -> None:
        """Take a last reading, write that the watch ended, and close the files. A second call does nothing."""
        if self._done.is_set() or os.getpid() != self._pid:
            return
        self._done.set()
        atexit.unregister(self.stop)
        if self._thread is not threading.current_thread():
            self._thread.join()
        try:
            self._read(time.monotonic() - self._begin)
            if self._recording is not None:
                self._look_at_sites(self._now())
            with self._writing:
                self._store.append({"k": "end", "t": self._now(), "cost_s": round(self.cost_s, 4), "steps": self._steps}, sync=True)
                self._store.close()
        except (OSError, ValueError) as error:  # a full disk must not stop the program's own end
            _log.warning("nbmemprof: the end of the watch could not be written to %s (%s)", self.folder, error)
        finally:
            if self._recording is not None:
                self._recording.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.mark(f"ended by {type(error).__name__}")
        self.stop()

    def _abandon(self) -> None:
        self._lock, self._writing, self._settling, self._done = threading.Lock(), threading.Lock(), threading.Lock(), threading.Event()  # their owner may be a thread that is not here
        self._done.set()
        self._store.abandon()

    def _about(self) -> dict[str, Any]:
        torch = _optional.loaded("torch")
        return {
            "k": "begin", "v": 1, "pid": self._pid, "host": socket.gethostname(), "unix": self._unix, "started": datetime.now(UTC).astimezone().isoformat(timespec="seconds"),
            "rank": int(os.environ["RANK"]) if os.environ.get("RANK", "").isdigit() else None, "title": self.title, "script": Path(sys.argv[0]).name if sys.argv else None,
            "interval_s": self.interval_s, "limits": gauges.limits(*self._wanted), "python": platform.python_version(), "torch": getattr(torch, "__version__", None), "start": start_of(self._pid),
        }  # fmt: skip

    def _state(self) -> dict[str, Any]:
        """What stands for the segments that went."""
        self._settle()
        series = [[device, gauge, made.dump()] for (device, gauge), made in self._series.items()]
        return {"head": self._head, "series": series, "notes": self._notes, "cost_s": self.cost_s}

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        _warm_up()
        self.cost_s += time.thread_time()
        failures, due = 0, {"read": self.interval_s, "judge": 10 * self.interval_s, "sites": 0.0 if self._recording is not None else math.inf}
        work = {"read": self._read, "judge": self._judge, "sites": self._look_at_sites}
        while not self._done.wait(max(min(due.values()) - (time.monotonic() - self._begin), 0.0005)):
            since = time.monotonic() - self._begin
            what = min(due, key=lambda name: due[name])
            spent = time.thread_time()
            try:
                work[what](since)
                failures = 0
            except Exception as error:  # the program goes on without it
                failures += 1
                if failures == 3:
                    _log.warning("nbmemprof: the watch on %s can't %s (%s: %s)", self.folder, what, type(error).__name__, error)
                if failures > 100:
                    return
            spent = time.thread_time() - spent
            self.cost_s += spent
            usual = {"read": self.interval_s, "judge": max(10 * self.interval_s, since / 500), "sites": self._stacks_every_s}[what]
            due[what] = since + max(usual, spent / _COST[what])  # pauses so long that each stays within its share of a core

    def _now(self) -> float:
        return round(time.monotonic() - self._begin, 4)

    def _read(self, since: float) -> None:
        found = gauges.read()
        with self._lock:
            steps, labels = self._steps, dict(self._labels)
            own = {name: value for name, (value, _) in self._own.items()}
        if own:
            found["own"] = own
        since = round(since, 4)
        self._fresh.append((since, steps, found))
        if len(self._fresh) >= _FRESH:
            self._settle()
        record: dict[str, Any] = {"k": "s", "t": since, "n": steps, "g": {d: {n: _plain(v) for n, v in row.items()} for d, row in found.items()}}
        if labels:
            record["l"] = {name: _plain(value) for name, value in labels.items()}
        with self._writing:
            self._store.append(record)

    def _settle(self) -> None:
        """Put fresh readings into their series: many at a time cost what one does."""
        with self._settling:
            fresh, self._fresh = self._fresh, []
            keys = dict.fromkeys((device, gauge) for _, _, found in fresh for device, row in found.items() for gauge in row)
            for device, gauge in keys:
                rows = [(since, row[gauge], steps) for since, steps, found in fresh if (row := found.get(device)) is not None and gauge in row]
                if (device, gauge) not in self._series:
                    self._series[device, gauge] = Series(self.interval_s)
                self._series[device, gauge].extend(*np.asarray(rows, np.float64).T)

    def _note(self, record: dict[str, Any], *, sync: bool = False) -> None:
        whole = {"t": self._now()} | record
        with self._writing:
            if self._done.is_set():
                return
            self._notes = [*self._notes, whole][-_MOST_NOTES:]
            self._store.append(whole, sync=sync)

    # ------------------------------------------------------------------ the alarm
    def _judge(self, since: float = 0.0) -> None:
        for (device, gauge), trend in self.trends().items():
            key = f"{device}/{gauge}"
            if not trend.in_sight or trend.lead_s is None or trend.limit_bytes is None:
                continue
            # told again when only half of that time is left
            if key in self._raised and (trend.lead_s > self._raised[key] / 2 or self._raised[key] == 0):
                continue
            self._raised[key] = trend.lead_s
            self._raise(device, gauge, trend)

    def _raise(self, device: str, gauge: str, trend: Trend) -> None:
        if self._recording is not None:
            with contextlib.suppress(Exception):  # an alarm comes with its lines or without them
                self._look_at_sites(self._now())
        alarm = Alarm.of(device, gauge, trend, self._now(), self._grown_sites())
        self.alarms = [*self.alarms, alarm][-_MOST_NOTES:]
        self._note({"k": "alarm"} | asdict(alarm), sync=True)
        _log.warning("nbmemprof: %s", alarm.text)
        if self._hook is not None:
            try:
                self._hook(alarm)
            except Exception as error:  # the hook is the user's
                self._note({"k": "mark", "name": f"on_alarm failed: {type(error).__name__}: {error}"[:200]})
                _log.warning("nbmemprof: on_alarm failed", exc_info=True)

    # ------------------------------------------------------------------ which lines hold it
    def _look_at_sites(self, since: float) -> None:
        from nbmemprof.recording import record
        from nbmemprof.watching.sites import live_sites

        with record(stacks="python") as look:
            pass
        if look.capture is None:
            return
        rows = live_sites(look.capture)
        opening, self._opened = not self._opened, True
        for held in self._sites.values():
            held[1] = 0.0
        for device, site, size, _ in rows[:_MOST_SITES]:
            self._sites.setdefault((device, site), [size if opening else 0.0, size])[1] = size
        with self._writing:
            self._store.append({"k": "sites", "t": round(since, 4), "n": self._steps, "s": rows[:_MOST_SITES], "of": len(rows)})

    def _grown_sites(self) -> list[tuple[str, float]]:
        grown = sorted(((site, last - first) for (_, site), (first, last) in self._sites.items() if last > first), key=lambda row: -row[1])
        return grown[:3]


def _warm_up() -> None:
    """A first judgement loads LAPACK (10 ms); the pauses are to follow what the later ones cost."""
    made, count = Series(), np.arange(64.0)
    made.extend(count, count**2, count * 2)
    judge(made, 1e6)


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) else round(value, 3)


def watch(folder: str | os.PathLike[str], **options: Any) -> Watch:
    """Watch the memory of this process from now on: a training script, a server; no notebook is needed.

    A thread reads counters (host memory; torch's of each device once CUDA is in use), keeps them in a bounded ring of files, follows the trend,
    and tells when the limit comes in sight. It takes 1 % of a core at most. ``mp.open_run(folder)`` reads it, also
    while it runs and after ``kill -9``. A process that is started again may use the same folder, and so may several at a time.

    Parameters
    ----------
    folder
        Where the files go; made if need be.
    interval_s
        Seconds between readings (1).
    limit_bytes, host_limit_bytes
        Where memory of each device, and of the process on the host, must stay below; bytes or ``"20GiB"``. By default what torch may use of
        the card, and what the container or machine has.
    on_alarm
        Called with an :class:`~nbmemprof.watching.alarm.Alarm` from the watch's thread; a line goes to the logger ``nbmemprof.watch`` in any case.
    stacks
        Record allocations with their lines as well, and keep live bytes by line every ``stacks_every_s`` (30).
    warmup_s
        Seconds at the beginning that are not judged (30): loading a model is growth too.
    trust
        An alarm is raised when the limit comes before the growth has gone on for this many times the time that it was seen (1).
    ring_bytes
        Bound of the files (16 MiB); what is older is kept as lowest, highest and last value of 1024 stretches.
    title
        A short name.

    Returns
    -------
    The :class:`Watch`: a context manager, or call ``stop()``. Tell it of each request: ``watch.step()``, ``watch.step("chat")``.

    Raises
    ------
    NbmemprofError
        For a folder that can't be written, or an option that makes no sense.

    Examples
    --------
    >>> import nbmemprof as mp, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with mp.watch(folder, title="example") as watch:
    ...     watch.step()
    >>> mp.open_run(folder).runs["steps"].to_list()
    [1.0]
    """
    return Watch(folder, **options)


def _after_fork() -> None:
    for child in list(_alive):  # the thread is the parent's, and so are the files
        child._abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
