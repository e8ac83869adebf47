"""The driver's view of a recording: readings at its begin and end, and on every tick of the recorder's thread between them.

Each reading has torch's own counters beside it, so that the two can be compared at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import polars as pl

from nbmemprof import schema
from nbmemprof.sources._cuda_trace import Reading

__all__ = ["DeviceSampler"]

_MOST = 4000  # readings that are kept; then every second of the older ones is let go
_QUIET_US = 1e6  # a reading that says nothing new is kept this often
_CALM_US = 2e5  # the driver is asked this often where torch takes and gives nothing
_TRIES = 3  # to read driver and torch with nothing taken or given back between
_context: dict[str, int] = {}  # bytes that CUDA's context took, by the device's uuid: measured once a process, when CUDA began


def _quiet(method: Callable[..., None]) -> Callable[..., None]:
    """A driver that fails must not break the cell: the readings end there, and ``trouble`` says why."""

    @wraps(method)
    def quiet(self: DeviceSampler, *args: Any, **kwargs: Any) -> None:
        if not self.trouble:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self.trouble = f"{type(error).__name__}: {error}"

    return quiet


class DeviceSampler:
    """Readings of one recording. ``outside`` is asked (:class:`nbmemprof.sources._outside.Outside`), ``stats`` gives torch's counters."""

    def __init__(self, outside: Any, stats: Callable[[int], dict[str, Any]], clock: Callable[[], float]) -> None:
        self.outside, self.stats, self.clock = outside, stats, clock
        self.uuids: dict[int, str | None] = {}
        self.trouble = ""
        self._before: dict[str, int] = {}
        self._rows: list[list[tuple[Any, ...]]] = []  # one list a reading: clock, device, kind, source, gauge, value
        self._last: dict[int, tuple[float, tuple[float | None, ...]]] = {}
        self._asked: dict[int, float] = {}  # when the driver was

    @_quiet
    def before_cuda(self) -> None:
        """CUDA has not begun: what is in use now is not this process's context."""
        self._before = self.outside.everywhere()

    @_quiet
    def begin(self, uuids: dict[int, str | None]) -> None:
        """CUDA has begun (just now, where ``before_cuda`` was called)."""
        self.uuids = dict(uuids)
        for device, uuid in uuids.items():
            before = self._before.get(str(uuid).removeprefix("GPU-"))
            if before is not None and len(uuids) == 1:
                self.outside.touch(device)  # CUDA has begun, and the only device there is will be used: its context comes now rather than with the first tensor
            now = self.outside.used(device, uuid) if before is not None else None
            if before is not None and now is not None and now > before and not Reading.of(self.stats(device)).reserved:
                _context[str(uuid)] = now - before

    @_quiet
    def tick(self, *, sparing: bool = False) -> None:
        """Read what is quick to read; a reading that says nothing new is let go.

        ``sparing``: while a program runs, which waits for the interpreter each time that the driver has been asked. It is asked
        when torch holds other bytes than at the last reading, and some times a second for what others do.
        """
        for device, uuid in self.uuids.items():
            last = self._last.get(device)
            if last is None or sparing:
                held = self._counters(device)[2]
                if last is None and not held:
                    continue  # nothing of torch is there
                if last is not None and held == last[1][3] and self.clock() * 1e6 - self._asked[device] < _CALM_US:
                    continue
            clock, values = self._read(device, uuid)
            if values[0] is None or (last is not None and last[1] == values and clock - last[0] < _QUIET_US):
                continue
            self._keep(device, clock, values, ())

    @_quiet
    def read(self, devices: Iterable[int], *, pinned: bool = True) -> None:
        """Read everything: processes, other pools and, if asked, pinned memory, whose tensors are searched for where there is any (some 20 ms)."""
        for device in devices:
            uuid = self.uuids.get(device)
            more = list(self.outside.rows(device, uuid))
            if str(uuid) in _context:
                more.append(("device", "driver", "context_bytes", float(_context[str(uuid)])))
            clock, values = self._read(device, uuid)
            self._keep(device, clock, values, more)
        now = self.clock() * 1e6
        if found := [(now, None, *row) for row in self.outside.pinned()] if pinned else []:
            self._rows.append(found)

    def _read(self, device: int, uuid: str | None) -> tuple[float, tuple[float | None, ...]]:
        """The driver's number between two readings of torch's that hold the same bytes, if the program lets it be for that long."""
        before = self._counters(device)
        for _ in range(_TRIES):
            used, clock = self.outside.used(device, uuid), self.clock() * 1e6
            after = self._counters(device)
            if after[2] == before[2]:  # what torch has of the driver; what it gives out meanwhile moves nothing there
                break
            before = after
        self._asked[device] = clock
        return clock, (used, *after)

    def _counters(self, device: int) -> tuple[float, float, float]:
        stats = self.stats(device)
        return tuple(float(stats.get(name, {}).get("all", {}).get("current", 0)) for name in ("requested_bytes", "active_bytes", "reserved_bytes"))  # type: ignore[return-value]

    def _keep(self, device: int, clock: float, values: tuple[float | None, ...], more: Iterable[tuple[str, str, str, float | None]]) -> None:
        self._last[device] = (clock, values)
        rows = [("device", "driver", "used_bytes", values[0])]
        rows += [("device", "torch", name, value) for name, value in zip(("in_use_bytes", "active_bytes", "held_bytes"), values[1:], strict=True)]
        self._rows.append([(clock, device, *row) for row in (*rows, *more)])
        if len(self._rows) > _MOST:
            del self._rows[1 : _MOST // 2 : 2]

    def frame(self, start_us: float) -> pl.DataFrame:
        """Readings from a moment on (Unix µs), as ``samples``."""
        rows = [row for reading in self._rows for row in reading if row[0] >= start_us]
        columns: list[Any] = list(zip(*rows, strict=True)) if rows else [()] * 6
        types: tuple[Any, ...] = (pl.Float64, pl.Int64, pl.String, pl.String, pl.String, pl.Float64)
        made: dict[str, Any] = {n: pl.Series(n, columns[i], dtype=t) for i, (n, t) in enumerate(zip(("time_us", "device", "kind", "source", "gauge", "value"), types, strict=True))}
        made["time_us"] -= start_us
        return schema.fill("samples", made | {"unit": "bytes"}, len(rows)).sort("time_us", maintain_order=True)

    def facts(self) -> dict[str, Any]:
        """What has been used in this process, for the capture's meta."""
        found: dict[str, Any] = self.outside.libraries()
        return found
