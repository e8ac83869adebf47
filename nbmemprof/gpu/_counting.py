"""From a start to a stop: the counters of every kernel launched in between, as a capture with the tables ``kernels``, ``metrics`` and ``stacks``."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Any

from nbmemprof import _optional, schema
from nbmemprof._cells import cell_names
from nbmemprof.analyses._counters import COUNTERS, SETS, metrics_of
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError, NotRecording
from nbmemprof.gpu import _ceilings, _context, _cupti
from nbmemprof.gpu._context import Context
from nbmemprof.gpu._cupti import Cupti
from nbmemprof.gpu._launches import Frame, Launch, LaunchNames, demangle
from nbmemprof.gpu._metric_host import MetricHost
from nbmemprof.gpu._ranges import RangeSession

__all__ = ["MAX_KERNELS", "Counting", "asked", "tables"]

MAX_KERNELS = 128  # about 0.03 s a kernel and pass on an H200: a cell of many kernels takes 20 s more at most
_lock = threading.Lock()
_holder: list[Counting] = []  # who counts now
_UNITS = {counter.metric: counter.unit for counter in COUNTERS.values()}


def asked(metrics: str | Sequence[str]) -> list[str]:
    """Metric names of a set (``all``, ``unpatched``, ``dram``, ``global``, ``shared``) or of a list of short or whole names.

    Raises
    ------
    NbmemprofError
        For a set that doesn't exist, or an empty list.
    """
    if isinstance(metrics, str):
        if metrics not in SETS:
            raise NbmemprofError(f"There is no set of counters {metrics!r}. Use one of: {', '.join(SETS)}; or a list of names.")
        return metrics_of(SETS[metrics])
    names = [COUNTERS[name].metric if name in COUNTERS else name for name in metrics]
    if not names:
        raise NbmemprofError(f"metrics=[] asks for no counter. Use a set ({', '.join(SETS)}) or a list of names.")
    return list(dict.fromkeys([COUNTERS["duration"].metric, *names]))


class Counting:
    """Counts from ``start`` to ``stop``; ``close`` lets go of everything, whatever happened.

    Parameters
    ----------
    metrics
        As :func:`asked`.
    max_kernels
        How many kernels are counted; what comes after them runs as always.
    cupti, context
        Given by tests; found otherwise.
    """

    def __init__(self, metrics: str | Sequence[str] = "all", max_kernels: int = MAX_KERNELS, cupti: Cupti | None = None, context: Context | None = None) -> None:
        self.wanted, self.max_kernels = asked(metrics), max_kernels
        self.is_set = isinstance(metrics, str)
        self._cupti, self._context = cupti, context
        self._session: RangeSession | None = None
        self._names: LaunchNames | None = None
        self.setup_s = self.began = 0.0

    def start(self) -> None:
        """Take hold of the counters.

        Raises
        ------
        NotRecording
            No driver, no GPU, or another profiler is on.
        CuptiRefused
            What CUPTI said, with what to do.
        """
        begun = time.perf_counter()
        _refuse_profiler()
        _hold(self)
        try:
            context = self._context = self._context or _context.current()
            cupti = self._cupti = self._cupti or _cupti.open_library()
            context.synchronize()
            cupti.call("cuptiProfilerInitialize")
            self._names = LaunchNames(cupti, context.handle, self.max_kernels, self._enough)
            self._names.start()
            self._session = RangeSession(cupti, context.handle, context.device, self._known(cupti, context), self.max_kernels)
            self._session.start()
        except BaseException:
            self.close()
            raise
        self.began = time.perf_counter()
        self.setup_s = self.began - begun

    def _known(self, cupti: Cupti, context: Context) -> list[str]:
        """Of a set, the counters that this chip has; a list of the user's is asked for as it is."""
        if not self.is_set:
            return self.wanted
        from nbmemprof.gpu._ranges import chip_name

        with MetricHost(cupti, chip_name(cupti, context.device), [COUNTERS["duration"].metric]) as host:
            return [name for name in self.wanted if host.knows(name)]

    def _enough(self) -> None:
        """No room for another kernel: from here on they run as always."""
        if self._session is not None:
            self._session.pause()

    def stop(self) -> Capture:
        """Wait for the GPU, end, and bring home what was counted."""
        session, names, context = self._session, self._names, self._context
        if session is None or names is None or context is None:
            raise NotRecording("Nothing is being counted. Call start() first.")
        try:
            if code := context.synchronize():
                raise NotRecording(f"The GPU reported CUDA error {code} while its kernels were counted. Run them without counting first; compute-sanitizer names the access.")
            counted_s = time.perf_counter() - self.began
            rows = session.stop()
            ended_s = time.perf_counter() - self.began
            launches, left_out, warnings = _matched(names, len(rows), session.dropped, self.max_kernels)
            lacking = [name for name in self.wanted if session.host is not None and name not in session.host.metrics]
            told = {
                "how": "cupti", "chip": session.chip, "passes": session.passes, "kernels": len(rows), "not_counted": left_out, "lacking": lacking,
                "setup_s": self.setup_s, "counted_s": counted_s, "total_s": self.setup_s + ended_s, "gpu_s": sum(row.get(COUNTERS["duration"].metric, 0.0) for row in rows) / 1e9,
            }  # fmt: skip
            version = self._cupti.version if self._cupti else None
            return Capture.build(
                tables(rows, launches, device=context.device, began=self.began),
                source="counters", origin="measured", device=context.name, versions={"cupti": version}, warnings=warnings, dropped={}, counters=told, ceilings=_ceilings.of(context.name),
            )  # fmt: skip
        finally:
            self.close()

    def close(self) -> None:
        """Give the counters and the subscription back; a second call does nothing."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        names, self._names = self._names, None
        if names is not None:
            names.stop()
        if _holder and _holder[0] is self:
            _holder.clear()


def _hold(counting: Counting) -> None:
    """One session a process: CUPTI allows no second one."""
    with _lock:
        if _holder and _holder[0] is not counting:
            raise NotRecording("Kernels are being counted in this process already (by %%memprof --counters or mp.counters around this). End that first.")
        _holder[:] = [counting]


def _refuse_profiler() -> None:
    torch = _optional.loaded("torch")
    enabled = getattr(getattr(getattr(torch, "_C", None), "_autograd", None), "_profiler_enabled", None)
    if enabled is not None and enabled():
        raise NotRecording("torch.profiler is on, and the driver gives counters to one profiler at a time. Leave its with block (or stop it), then count again.")


def _matched(names: LaunchNames, counted: int, dropped: int, room: int) -> tuple[list[Launch | None], int, list[str]]:
    """A launch for every counted kernel where they can be told apart, how many kernels were not counted, and what has to be said."""
    launches: list[Launch | None] = list(names.launches)
    graphs = [at for at, launch in enumerate(names.launches) if launch.graph]
    warnings = []
    if len(graphs) == 1 and counted >= len(launches):  # the one graph launched what is too many
        launches[graphs[0] : graphs[0] + 1] = [launches[graphs[0]]] * (counted - len(launches) + 1)
        warnings.append("what a CUDA graph launched has no names and may be told as one kernel: it is called 'graph'. Count the code without the graph to tell its kernels apart")
    left_out, full = max(len(launches) - counted, dropped), counted >= room
    mixed_up = bool(left_out) and not full and not graphs
    if left_out:
        why = (
            f"there was room for {counted} kernels. Give max_kernels=, or count a smaller part" if full
            else "CUPTI can't count one of the CUDA graphs, and stopped there. Count the code without the graph" if graphs
            else "a launch that fails, or that is captured into a CUDA graph, is no kernel. Count after the graph is made"
        )  # fmt: skip
        warnings.append(f"{left_out} of {counted + left_out} launches were not counted: {why}")
    if names.refused is not None:
        warnings.append(f"kernels have no names and no lines: {names.refused}")
    elif len(graphs) > 1 or len(launches) < counted or mixed_up:
        warnings.append(f"kernels have no names: {len(names.launches)} launches, {len(graphs)} of them of CUDA graphs, started {counted} kernels, and which is whose can't be told")
    else:
        return launches[:counted], left_out, warnings
    return [None] * counted, left_out, warnings


# ---------------------------------------------------------------------- tables
def tables(rows: Sequence[dict[str, float]], launches: Sequence[Launch | None], *, device: int | None, began: float) -> dict[str, Any]:
    """``kernels``, ``metrics`` and ``stacks`` of counted kernels.

    Parameters
    ----------
    rows
        Metric name to value, a mapping a kernel; a value that is not a number becomes null.
    launches
        What is known of each kernel's launch.
    began
        ``time.perf_counter()`` at the capture's start.
    """
    numbers: dict[tuple[Frame, ...], int] = {}
    ids = [numbers.setdefault(launch.stack, len(numbers) + 1) if launch is not None and launch.stack else None for launch in launches]
    clock = COUNTERS["duration"].metric
    kernels = schema.fill("kernels", {
        "device": device,
        "kernel_id": list(range(len(rows))),
        "name": [demangle(launch.name) if launch is not None else None for launch in launches],
        "stream": [launch.stream if launch is not None else None for launch in launches],
        "time_us": [(launch.time_s - began) * 1e6 if launch is not None and launch.time_s is not None else None for launch in launches],
        "duration_us": [row[clock] / 1e3 if clock in row else None for row in rows],
        "grid": [_triple(launch.grid) if launch is not None else None for launch in launches],
        "block": [_triple(launch.block) if launch is not None else None for launch in launches],
        "stack_id": ids,
    }, height=len(rows))  # fmt: skip
    flat = [(number, name, value) for number, row in enumerate(rows) for name, value in row.items()]
    metrics = schema.fill("metrics", {
        "kernel_id": [number for number, _, _ in flat],
        "metric": [name for _, name, _ in flat],
        "value": [value if math.isfinite(value) else None for _, _, value in flat],
        "unit": [_UNITS.get(name) for _, name, _ in flat],
    }, height=len(flat))  # fmt: skip
    return {"kernels": kernels, "metrics": metrics, "stacks": _stacks(numbers)}


def _stacks(numbers: dict[tuple[Frame, ...], int]) -> Any:
    cells = cell_names()
    flat = [(number, depth, code, line) for stack, number in numbers.items() for depth, (code, line) in enumerate(stack)]
    return schema.fill("stacks", {
        "stack_id": [number for number, _, _, _ in flat],
        "depth": [depth for _, depth, _, _ in flat],
        "function": [code.co_name for _, _, code, _ in flat],
        "filename": [cells.get(code.co_filename, code.co_filename) for _, _, code, _ in flat],
        "line": [line for _, _, _, line in flat],
    }, height=len(flat))  # fmt: skip


def _triple(sizes: tuple[int, int, int] | None) -> str | None:
    return ",".join(map(str, sizes)) if sizes is not None else None
