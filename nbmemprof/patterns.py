"""Small tools against leaks, for notebooks, servers and tests: memory that must come back, growth.

They count tensors: torch's own counters on GPUs, the CPU's storages elsewhere.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, Self

import polars as pl

from nbmemprof import _optional
from nbmemprof.errors import MemoryKept, NbmemprofError, NotRecording
from nbmemprof.recording import Recording, record
from nbmemprof.units import format_bytes

__all__ = ["LeakTracker", "assert_no_growth", "temporary"]

_P = ParamSpec("_P")
_SITES = 5


class _Meter:
    """How many bytes of tensors came to stay between start and stop: by a GPU's counter, or by a recording of the CPU's allocator."""

    def __init__(self, device: Any = None, stacks: str = "none") -> None:
        self._device, self._stacks = device, stacks
        self._before: int | None = None
        self.window: Recording | None = None

    def start(self) -> None:
        """Begin."""
        self._before = _counter(self._device)
        if self._before is None:
            self.window = record("torch_cpu", stacks=self._stacks, attribution=False)
            self.window.start()

    def stop(self) -> int:
        """Bytes more than at the start; negative where more was given back."""
        if self._before is not None:
            return (_counter(self._device) or 0) - self._before
        if self.window is None:
            return 0
        capture = self.window.stop()
        if capture.meta.get("source") == "none" and _optional.loaded("torch") is not None:
            raise NotRecording(f"CPU memory can't be counted here: {'; '.join(capture.meta['warnings'])}. Use a GPU, or see %memprof doctor.")
        rows = capture.allocations
        came = rows.filter(~pl.col("at_start") & pl.col("free_seq").is_null())["size_bytes"].sum()
        went = rows.filter(pl.col("at_start") & pl.col("free_seq").is_not_null())["size_bytes"].sum()
        return int(came) - int(went)

    def discard(self) -> None:
        """End without a result."""
        if self.window is not None:
            self.window.discard()


def _counter(device: Any) -> int | None:
    """Bytes by the counter of a GPU, or of all; None where the CPU is to be counted."""
    torch = _optional.loaded("torch")
    if torch is None or (device is not None and torch.device(device).type != "cuda"):
        return None
    if device is not None:
        return int(torch.cuda.memory_allocated(device))
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return sum(int(torch.cuda.memory_allocated(i)) for i in range(torch.cuda.device_count()))


# ---------------------------------------------------------------------- temporary
@contextmanager
def temporary(*, tolerance_bytes: int = 0, action: str = "raise", collect: bool = True) -> Iterator[Recording]:
    """Verify that what is allocated in a ``with`` block is given back by its end.

    Parameters
    ----------
    tolerance_bytes
        So much may stay.
    action
        ``"raise"`` or ``"warn"`` where more stays. An error of the block itself is raised as it is.
    collect
        Collect garbage before counting, so that cycles don't count as kept.

    Yields
    ------
    The recording; its ``capture`` is there after the block.

    Raises
    ------
    MemoryKept
        How many bytes stayed and which lines allocated them.
    NbmemprofError
        For an action that is none.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.temporary(tolerance_bytes=1 << 20):
    ...     total = (torch.ones(1 << 18) + 1).sum()
    """
    if action not in ("raise", "warn"):
        raise NbmemprofError(f"action can't be {action!r}. Use 'raise' or 'warn'.")
    window = record(title="temporary")
    with window:
        yield window
        if collect:
            gc.collect()
    kept = _kept(window)
    size = int(kept["size_bytes"].sum())
    if size > tolerance_bytes:
        text = f"{format_bytes(size)} allocated in this block are still alive at its end: {_lines(kept)}. Return or delete them inside the block, or allow for them with tolerance_bytes."
        if action == "raise":
            raise MemoryKept(text)
        warnings.warn(text, MemoryKeptWarning, stacklevel=3)


class MemoryKeptWarning(UserWarning):
    """What :func:`temporary` says with ``action="warn"``."""


def _kept(window: Recording) -> pl.DataFrame:
    """What was allocated in the window and is alive at its end, by line; largest first."""
    from nbmemprof.analyses._sites import with_site

    capture = window.capture
    if capture is None:
        return pl.DataFrame(schema={"site": pl.String, "size_bytes": pl.Int64, "count": pl.UInt32})
    alive = capture.allocations.filter(~pl.col("at_start") & pl.col("alloc_seq").is_not_null() & pl.col("free_seq").is_null())
    return (
        with_site(alive, capture.stacks)
        .group_by("site", maintain_order=True)
        .agg(pl.col("size_bytes").sum(), pl.len().alias("count"))
        .sort("size_bytes", descending=True, maintain_order=True)
    )


def _lines(kept: pl.DataFrame) -> str:
    parts = [f"{format_bytes(size)} in {count} block{'s'[: count != 1]} from {site or 'a line that was not recorded'}" for site, size, count in kept.head(_SITES).iter_rows()]
    return ", ".join(parts) + (f" ({_SITES} of {kept.height} lines)" if kept.height > _SITES else "")


# ---------------------------------------------------------------------- growth
class LeakTracker:
    """Follow the bytes alive over batches, by label; cheap enough for every batch.

    ``tracker.baseline()`` once, then ``tracker.step("train")`` after each batch, or ``with tracker.batch("train")``.
    ``tracker.frame`` has a row a step, ``tracker.growth()`` says what a step of each label adds. On a GPU a step reads
    torch's counter; on the CPU a recording without stacks is open between steps, until ``close()`` or the end of
    ``with LeakTracker() as tracker``.

    Parameters
    ----------
    device
        The GPU that is counted, ``"cpu"``, or all GPUs (the CPU where no GPU is in use) by default.
    warmup
        Steps of a label that ``growth`` leaves out: first-step memory (optimizer state, caches) is no leak.

    Raises
    ------
    NbmemprofError
        For a negative ``warmup``.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> kept = []
    >>> with mp.LeakTracker("cpu", warmup=1) as tracker:
    ...     for _ in range(4):
    ...         with tracker.batch("train"):
    ...             kept.append(torch.ones(1 << 10))
    >>> tracker.growth().select("label", "bytes_per_step").rows()
    [('train', 4096.0)]
    """

    def __init__(self, device: Any = None, *, warmup: int = 2) -> None:
        if warmup < 0:
            raise NbmemprofError(f"warmup is {warmup}. Use a number of steps, 0 or more.")
        self.device, self.warmup = device, warmup
        self._rows: list[tuple[int, str, int, int, int]] = []
        self._steps: dict[str, int] = {}
        self._above = 0
        self._meter: _Meter | None = None

    def baseline(self) -> None:
        """Take what is alive now as the start, and forget the steps before."""
        self.close()
        self._rows.clear()
        self._steps.clear()
        self._above = 0
        self._open()

    def step(self, label: str = "step") -> int:
        """Count at the end of a batch.

        Parameters
        ----------
        label
            What kind of batch it was; :meth:`growth` has a row a label.

        Returns
        -------
        Bytes above the baseline, which the first step takes where there is none.
        """
        change = self._meter.stop() if self._meter is not None else 0
        self._open()
        self._above += change
        number = self._steps[label] = self._steps.get(label, 0) + 1
        self._rows.append((len(self._rows), label, number, change, self._above))
        return self._above

    @contextmanager
    def batch(self, label: str = "step") -> Iterator[None]:
        """``with tracker.batch("eval"): ...``: a step at the end of the block, also where it raised; what happens between blocks is the next one's."""
        if self._meter is None:
            self._open()
        try:
            yield
        finally:
            self.step(label)

    def close(self) -> None:
        """Stop counting; the steps stay."""
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.discard()

    def __enter__(self) -> Self:
        self.baseline()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _open(self) -> None:
        self._meter = _Meter(self.device)
        self._meter.start()

    @property
    def frame(self) -> pl.DataFrame:
        """A row a step: ``index label step change_bytes above_bytes`` (above the baseline)."""
        return pl.DataFrame(self._rows, schema={"index": pl.Int64, "label": pl.String, "step": pl.Int64, "change_bytes": pl.Int64, "above_bytes": pl.Int64}, orient="row")

    def growth(self) -> pl.DataFrame:
        """What does a step of each label add, its first steps left out?

        Returns
        -------
        ``label steps bytes_per_step`` (the median of the changes: a leak adds every time, a cache that fills does not)
        ``total_bytes``, largest first.
        """
        later = self.frame.filter(pl.col("step") > self.warmup)
        return (
            later.group_by("label", maintain_order=True)
            .agg(pl.len().alias("steps"), pl.col("change_bytes").median().alias("bytes_per_step"), pl.col("change_bytes").sum().alias("total_bytes"))
            .sort("bytes_per_step", descending=True, maintain_order=True)
        )

    def __repr__(self) -> str:
        return f"<LeakTracker: {len(self._rows)} steps, {format_bytes(self._above)} above the baseline>"


def assert_no_growth(
    function: Callable[[], object] | None = None, *, repeats: int = 5, warmup: int = 2, tolerance_bytes: int = 0, device: Any = None
) -> Any:
    """Fail where calling a function again and again leaves more memory alive each time; for tests.

    ``assert_no_growth(step)`` calls it now. ``@assert_no_growth(repeats=3)`` decorates a test, which then runs
    ``warmup + repeats`` times. ``with assert_no_growth(): ...`` compares the end of one block with its start.

    Parameters
    ----------
    function
        What is repeated; its result is let go each time.
    repeats, warmup
        Calls that are compared, and calls before them that may allocate what then stays (optimizer state, caches).
    tolerance_bytes
        What all the repeats together may add.
    device
        As for :class:`LeakTracker`.

    Raises
    ------
    MemoryKept
        (an ``AssertionError``) Bytes a call, all together, and, where it can be recorded, which lines allocated them.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> mp.assert_no_growth(lambda: torch.ones(1 << 10).sum(), device="cpu")
    """
    if repeats < 1 or warmup < 0 or tolerance_bytes < 0:
        raise NbmemprofError(f"repeats is {repeats}, warmup {warmup}, tolerance_bytes {tolerance_bytes}. Use repeats >= 1 and no negative numbers.")
    if function is not None and not callable(function):
        raise NbmemprofError(f"assert_no_growth repeats a function, and {function!r} can't be called. Use @mp.assert_no_growth(repeats=3), or mp.assert_no_growth(step, repeats=3).")
    check = _NoGrowth(repeats, warmup, tolerance_bytes, device)
    if function is None:
        return check
    check.run(function)
    return None


class _NoGrowth:
    """A check to be called, used as a decorator or in a ``with`` statement."""

    def __init__(self, repeats: int, warmup: int, tolerance_bytes: int, device: Any) -> None:
        self._repeats, self._warmup, self._tolerance, self._device = repeats, warmup, tolerance_bytes, device
        self._meter: _Meter | None = None

    def __call__(self, function: Callable[_P, object]) -> Callable[_P, None]:
        @functools.wraps(function)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> None:
            self.run(lambda: function(*args, **kwargs))

        return wrapped

    def __enter__(self) -> Self:
        gc.collect()
        self._meter = _Meter(self._device, "python")
        self._meter.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        meter, self._meter = self._meter, None
        if meter is None:
            return
        gc.collect()
        if kind is not None:
            meter.discard()
        else:
            self._judge(meter.stop(), 1, meter.window)

    def run(self, function: Callable[[], object]) -> None:
        """Call it ``warmup + repeats`` times and compare; on a GPU, where it grew, once more with the lines recorded."""
        outer = _Meter(self._device, "python")  # on the CPU: what the warm-up left is known by size when it goes
        outer.start()
        try:
            for _ in range(self._warmup):
                function()
            gc.collect()
            meter = _Meter(self._device, "python")
            meter.start()
            try:
                for _ in range(self._repeats):
                    function()
                gc.collect()
                grown = meter.stop()
            except BaseException:
                meter.discard()
                raise
        finally:
            outer.discard()
        window = meter.window
        if grown > self._tolerance and window is None:
            with record(title="assert_no_growth", attribution=False) as window:
                function()
                gc.collect()
        self._judge(grown, self._repeats, window)

    def _judge(self, grown: int, calls: int, window: Recording | None) -> None:
        if grown <= self._tolerance:
            return
        kept = _kept(window) if window is not None else None
        lines = f" Allocated by: {_lines(kept)}." if kept is not None and kept.height else ""
        times = f", {format_bytes(grown / calls)} a call over {calls} calls" if calls > 1 else ""
        raise MemoryKept(f"Memory grew by {format_bytes(grown)}{times} (allowed: {format_bytes(self._tolerance)}).{lines} mp.holders() names who holds it.")
