"""``mp.counters(fn, *args)``: hardware counters of every kernel that a call launches, in this process or under ncu in a child."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof.analyses.kernel_findings import kernel_findings
from nbmemprof.analyses.kernel_lines import kernel_lines
from nbmemprof.analyses.kernels import kernels
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu import _ceilings, _ncu
from nbmemprof.gpu._counting import MAX_KERNELS, Counting

__all__ = ["Counted", "counters"]

_WAYS = ("cupti", "ncu")


class Counted(pl.DataFrame):
    """A row a kernel, as :func:`nbmemprof.analyses.kernels.kernels` gives it; what is derived from it is a plain frame.

    Attributes
    ----------
    capture
        The capture with the tables ``kernels`` and ``metrics``; it can be saved, loaded and shown.
    findings
        What deserves attention, a row a sentence, with the time that mending it would win (:func:`nbmemprof.analyses.kernel_findings.kernel_findings`).
    lines
        Which source lines touch more than they need (:func:`nbmemprof.analyses.kernel_lines.kernel_lines`); only from ``how="ncu"`` and code compiled
        with ``-lineinfo``.
    value
        What the function returned (``how="cupti"``).
    """

    capture: Capture
    value: Any = None

    @classmethod
    def of(cls, capture: Capture, value: Any = None, ceilings: dict[str, Any] | None = None) -> Counted:
        """The frame of a capture's kernels, held against these ceilings or the capture's own."""
        if ceilings is not None:
            capture = Capture(capture.tables, {**capture.meta, "ceilings": ceilings})
        frame = cls(kernels(capture))
        frame.capture, frame.value = capture, value
        return frame

    @property
    def origin(self) -> str:
        """``measured`` here, or ``recorded`` elsewhere."""
        return str(self.capture.meta["origin"])

    @property
    def passes(self) -> int | None:
        """How often each kernel was run."""
        passes = (self.capture.meta.get("counters") or {}).get("passes")
        return int(passes) if passes is not None else None

    @property
    def findings(self) -> pl.DataFrame:
        """What deserves attention, a row a sentence."""
        return kernel_findings(self.capture)

    @property
    def lines(self) -> pl.DataFrame:
        """Which source lines touch more than they need."""
        return kernel_lines(self.capture)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return self.capture._repr_mimebundle_()


def counters(
    target: Callable[..., Any] | Capture | str | Path,
    *args: Any,
    how: str = "cupti",
    metrics: str | Sequence[str] = "all",
    warmup: int = 0,
    max_kernels: int = MAX_KERNELS,
    ceilings: pl.DataFrame | None = None,
    timeout_s: float = 300.0,
) -> Counted:
    """Count what every kernel of a call does with memory.

    The function is called once. CUPTI runs each kernel as often as it needs passes (``.passes``), with the device memory that it writes put back in
    between (managed and pinned memory too: tried on an H200 with atomic additions): results are those of a single run. What a kernel does beyond
    memory (a message that it prints, a wait for the host or another kernel) happens in every pass; a kernel that waits for another one hangs. Kernels run one after the
    other while they are counted, so their durations are not the call's wall time. Caches are left as they are: where arrays fit the L2, hit rates and DRAM bytes
    depend on what lies there, and putting memory back changes that. Measured on an H200: 0.4 s to begin, then 0.03 s a kernel and pass.

    Parameters
    ----------
    target
        What launches the kernels (CuPy, torch, Triton, numba, anything in this process); a capture with counters gives its frame;
        with ``how="ncu"`` also the path of a Python script.
    args
        Its arguments, given by position.
    how
        ``cupti``: in this process. ``ncu``: in a child process under Nsight Compute, with lines; the function and its arguments are copied there.
    metrics
        A set (``all``, ``unpatched``, ``dram``, ``global``, ``shared``), or names of counters, ours or the metric library's.
    warmup
        Calls before the one that is counted.
    max_kernels
        Kernels beyond it run and are not counted.
    ceilings
        What ``mp.probes.bandwidth()`` measured on this card, for the shares of the ceiling and the predictions. None takes the shipped
        recording of such a card; where there is none, shares are null and nothing is predicted.
    timeout_s
        Limit of the child process.

    Returns
    -------
    A :class:`Counted` frame, a row a kernel, in launch order.

    Raises
    ------
    NotRecording
        There is no GPU here, or a profiler is on.
    CuptiRefused
        The counters can't be had: why, and what to do.

    Examples
    --------
    >>> import nbmemprof as mp, cupy  # doctest: +SKIP
    >>> x = cupy.ones(1 << 24, cupy.float32)  # doctest: +SKIP
    >>> mp.counters(lambda: x * 2).select("name", "duration_us", "load_sectors_per_request")  # doctest: +SKIP
    """
    best = _ceilings.measured(ceilings) if ceilings is not None else None
    if isinstance(target, Capture):
        return Counted.of(target, ceilings=best)
    if how not in _WAYS:
        raise NbmemprofError(f"how can't be {how!r}. It is one of: {', '.join(_WAYS)}.")
    if how == "ncu":
        return Counted.of(_ncu.profile(target, args, metrics=metrics, timeout_s=timeout_s), ceilings=best)
    if not callable(target):
        raise NbmemprofError(f"{target!r} can't be called. Give a function that launches kernels; a script's path goes with how='ncu'.")
    plain_s = _warm(target, args, warmup)
    counting = Counting(metrics, max_kernels)
    counting.start()
    try:
        value = target(*args)
        capture = counting.stop()
    finally:
        counting.close()
    capture.meta["counters"]["plain_s"] = plain_s
    return Counted.of(capture, value, best)


def _warm(target: Callable[..., Any], args: tuple[Any, ...], times: int) -> float | None:
    """Call it uncounted; seconds of the last call with its kernels, None where there was none."""
    if times < 1:
        return None
    from nbmemprof.gpu import _context

    context = _context.current()
    began = 0.0
    for _ in range(times):
        context.synchronize()
        began = time.perf_counter()
        target(*args)
        context.synchronize()
    return time.perf_counter() - began
