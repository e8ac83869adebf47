"""Recording: windows on one reference-counted recorder a source.

``%%memprof``, ``%memprof auto``, ``record`` and ``profile`` open a window each. Windows nest and overlap
in any order; the source starts with the first and stops with the last, whatever happens in between.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import polars as pl

from nbmemprof import _optional, _torch_import, heap, schema, sources
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError, NotRecording
from nbmemprof.units import parse_bytes

__all__ = ["Recording", "record", "snapshot"]

STACKS = ("python", "none", "all")
RING_BYTES = 512 << 20
_AUTO = ("prediction", "torch_history", "torch_cpu")  # the first that can record here

_lock = threading.RLock()
_PROCESS = os.getpid()
_recorders: dict[object, _Recorder] = {}


class _Recorder:
    """A started source and the windows on it."""

    def __init__(self, key: object, source: Any, options: dict[str, Any]) -> None:
        self.key, self.source, self.options = key, source, options
        self.windows: list[Recording] = []
        self.cuts = hasattr(source, "mark") and hasattr(source, "cut")


class Recording:
    """One window of a recording, from ``start`` to ``stop``; ``capture`` afterwards.

    Use it as a context manager, through :func:`record`.
    """

    def __init__(self, source: Any = "auto", *, stacks: str = "python", ring_bytes: int | str = RING_BYTES, title: str | None = None, history: str | os.PathLike[str] | None = None, **options: Any) -> None:
        if isinstance(source, str):
            sources.check_options(options)
        if words := options.pop("as_device", None) or options.pop("as", None):  # the latter is how the magic's line says it
            source = _virtual(source, words)
        if isinstance(source, str):
            if source != "auto":
                sources.find(source)
        elif not (hasattr(source, "start") and hasattr(source, "stop")):
            raise NbmemprofError(f"{source!r} can't record: it lacks start() or stop(). Use one of: {', '.join(sources.names())}; or an object with both.")
        if stacks not in STACKS:
            raise NbmemprofError(f"stacks can't be {stacks!r}. It is one of: {', '.join(STACKS)}.")
        self.source, self.title, self.cell = source, title, options.get("cell")
        self.options = {"stacks": stacks, "ring_bytes": parse_bytes(ring_bytes), **options}
        self.history = Path(history).expanduser() if history is not None else None
        self.capture: Capture | None = None
        self.warnings: list[str] = []
        self._recorder: _Recorder | None = None
        self._beside: list[sources.Companion] = []
        self._since: Any = None
        self._first = False
        self._started = ""
        self._began = self._opened = 0.0
        self._ended: float | None = None

    def __repr__(self) -> str:
        state = "not started" if not self._opened else "open" if self._ended is None else repr(self.capture)
        return f"<Recording {self.source if isinstance(self.source, str) else type(self.source).__name__}: {state}>"

    # ------------------------------------------------------------------ the window
    def start(self) -> Recording:
        """Open the window. Where nothing can be recorded the reason is kept and stands in the capture's warnings."""
        if self._opened:
            raise NbmemprofError("This recording was started before. Make a new one with record().")
        if os.getpid() != _PROCESS:
            raise NotRecording("This process was forked from one that uses nbmemprof: the threads of Polars do not live on in it. Record in a process of its own (multiprocessing's 'spawn', subprocess).")
        self._started = datetime.now(UTC).astimezone().isoformat(timespec="seconds")
        self._opened = self._began = time.perf_counter()
        try:
            with _lock:
                late = (self.source == "auto" or self.source.startswith("torch_")) if isinstance(self.source, str) else getattr(self.source, "needs_torch", False)
                if late and not _torch_import.is_here():
                    _torch_import.when_imported(self._begin_late)
                else:
                    self._begin()
            self._begin_beside()
        except BaseException:
            self.discard()
            raise
        return self

    def stop(self) -> Capture:
        """Close the window and give its capture; a second call gives the same."""
        if self.capture is None:
            if not self._opened:
                raise NbmemprofError("This recording was never started. Use it in a with statement, or call start().")
            self._end_beside()
            end = self._close()
            try:
                with _lock:
                    capture = self._cut()
            finally:
                self._leave()
            self.capture = self._label(capture, end)
            for companion in self._beside:
                companion.attach(self.capture, self._began)
            self._keep(self.capture)
        return self.capture

    def _keep(self, capture: Capture) -> None:
        """Add the run to the user's history; what a full disk does to it must not reach the cell."""
        if self.history is None or capture.meta.get("source") == "none":
            return
        from nbmemprof import history

        try:
            history.keep(capture, self.history)
        except Exception as error:
            capture.meta["warnings"].append(f"not added to the history: {error or type(error).__name__}")

    def discard(self) -> None:
        """Close the window without making a capture."""
        self._end_beside()
        self._close()
        self._leave()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _close(self) -> float:
        if self._ended is None:
            self._ended = time.perf_counter()
        return self._ended

    # ------------------------------------------------------------------ what records beside the source
    def _begin_beside(self) -> None:
        """Start what the options ask for beside the source; where it can't, its reason stands in the capture's warnings."""
        for companion in sources.companions(self.options):
            try:
                companion.start()
                self._beside.append(companion)
            except Exception as error:  # as a source: the cell runs all the same
                self.warnings.append(f"{companion.name}: {error or type(error).__name__}")

    def _end_beside(self) -> None:
        for companion in list(self._beside):
            try:
                companion.stop()
            except Exception as error:
                self._beside.remove(companion)
                self.warnings.append(f"{companion.name}: {error or type(error).__name__}")

    # ------------------------------------------------------------------ between window and source
    def _begin_late(self) -> None:
        with _lock:
            if self._ended is None:
                self._begin()

    def _begin(self) -> None:
        """Join the recorder of this source, or start one. Called under the lock."""
        try:
            key, make = _choose(self.source)
            recorder = _recorders.get(key)
            if recorder is None:
                recorder = _Recorder(key, make(), self.options)
                self._first = True
                _recorders[key] = recorder
                recorder.windows.append(self)
                self._recorder = recorder
                recorder.source.start(**self.options)
            else:
                recorder.windows.append(self)
                self._recorder = recorder
                self._compare(recorder)
            if recorder.cuts:
                self._since = recorder.source.mark()
        except Exception as error:  # the cell runs all the same; its report says why there is nothing
            self._leave()
            self.warnings.append(f"recording was not possible: {error or type(error).__name__}")
        self._began = time.perf_counter()

    def _compare(self, recorder: _Recorder) -> None:
        for name in ("stacks", "ring_bytes"):
            mine, theirs = self.options[name], recorder.options[name]
            if mine != theirs:
                self.warnings.append(f"recorded with {name}={theirs}, not {mine}: a recording with that was open already")

    def _cut(self) -> Capture:
        recorder = self._recorder
        if recorder is None:
            if not self.warnings:
                self.warnings.append("empty: torch was not imported, so no torch memory was allocated")
            return _nothing()
        try:
            alone = recorder.windows == [self]
            if recorder.cuts and not (alone and self._first):
                made = recorder.source.cut(self._since)
            elif alone:
                made = recorder.source.stop()
            else:
                raise NbmemprofError("this source can't give a part of a recording (no mark() and cut()), and another window is open on it")  # noqa: TRY301 - told as any other failure of a source
            if isinstance(made, Capture):
                return made
            self.warnings.append(f"nothing was recorded: the source gave a {type(made).__name__}, not a Capture")
        except Exception as error:  # a source that fails must not take the cell's own result with it
            self.warnings.append(f"the recording was lost: {error or type(error).__name__}")
        return _nothing()

    def _leave(self) -> None:
        """Give up the place on the recorder; the last one stops the source."""
        with _lock:
            _torch_import.cancel(self._begin_late)
            recorder, self._recorder = self._recorder, None
            if recorder is None or self not in recorder.windows:
                return
            recorder.windows.remove(self)
            if not recorder.windows:
                _recorders.pop(recorder.key, None)
                try:
                    recorder.source.stop()
                except Exception as error:
                    self.warnings.append(f"the source did not stop in order: {error or type(error).__name__}")

    def _label(self, capture: Capture, end: float) -> Capture:
        """Write into a fresh capture which window it is."""
        duration_us = (end - self._opened) * 1e6
        name = self.title or (f"In[{self.cell}]" if self.cell is not None else "record")
        mark = schema.fill("marks", {"time_us": 0.0, "end_us": (end - self._began) * 1e6, "kind": "cell", "name": name}, height=1)
        capture.tables["marks"] = pl.concat([capture.tables["marks"], mark], how="diagonal")
        capture.meta["warnings"] = [*capture.meta.get("warnings", ()), *self.warnings]
        capture.meta.update(cell=self.cell, title=self.title, started=self._started, duration_us=duration_us)
        return capture


def record(source: Any = "auto", *, stacks: str = "python", ring_bytes: int | str = RING_BYTES, title: str | None = None, history: str | os.PathLike[str] | None = None, **options: Any) -> Recording:
    """Record memory in a ``with`` block; the library form of ``%%memprof``.

    Parameters
    ----------
    source
        A name (``auto`` takes CUDA's allocator history where there is a device, CPU tensors elsewhere), or any
        object with ``start(**options)`` and ``stop() -> Capture``.
    stacks
        Frames kept for each allocation: ``python``, ``none`` or ``all`` (C++ too, where the source can).
    ring_bytes
        Bound of the history kept while recording; bytes or text like ``"512MiB"``.
    title
        A short name for the capture.
    history
        A folder of yours that the capture is added to, as Parquet; ``mp.open_run(folder)`` lists them, ``mp.diff`` compares them. None: nothing is written.
    options
        ``as_device="H200:8GiB"`` puts CPU tensors on a modelled GPU (see :mod:`nbmemprof.sources.virtual`); ``counters=True``
        counts what every GPU kernel does with memory (see :mod:`nbmemprof.sources.counters`); others go to the source.

    Returns
    -------
    A :class:`Recording`; its ``capture`` is there after the block, also when the block raised.

    Raises
    ------
    NbmemprofError
        For a source or option that does not exist. A source that can't record here raises nothing: the block runs
        and the capture's warnings say why.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     model = torch.nn.Linear(1000, 1000)
    ...     model(torch.ones(8, 1000)).sum().backward()
    >>> recording.capture.meta["source"], mp.summary(recording.capture)["peak_allocated_bytes"].item() >= 8008000
    ('torch_cpu', True)
    """
    return Recording(source, stacks=stacks, ring_bytes=ring_bytes, title=title, history=history, **options)


# ---------------------------------------------------------------------- which source
def _virtual(source: Any, words: str) -> Any:
    from nbmemprof.sources import virtual

    if source not in ("auto", "torch_cpu"):
        raise NbmemprofError(f"as_device={words!r} takes the CPU tensors of this process; it can't be combined with source={source!r}. Leave one of the two out.")
    return virtual.VirtualDevice(words)


def _nothing() -> Capture:
    return Capture.build({}, source="none", origin="measured")


def _choose(source: Any) -> tuple[object, Callable[[], Any]]:
    if not isinstance(source, str):
        return ("object", id(source)), lambda: source
    modules = sources.recorders()
    reasons = []
    for name in _AUTO if source == "auto" else (source,):
        if name in modules:
            reason: str | None = modules[name].unavailable()
            if reason is None:
                return name, modules[name].source
            reasons.append(f"{name}: {reason}")
    raise NbmemprofError("; ".join(reasons) or "no source is installed")


# ---------------------------------------------------------------------- a picture
def snapshot(*, title: str | None = None) -> Capture:
    """Take a picture of the heap now; no recording is needed.

    Parameters
    ----------
    title
        A short name for the capture.

    Returns
    -------
    A :class:`Capture` of ``segments`` and ``blocks`` (CUDA), or of the living CPU tensors where there is no device.
    What has no recording has no stacks and no events.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> held = torch.ones(1 << 18)
    >>> mp.snapshot().meta["origin"]
    'measured'
    """
    torch = _optional.loaded("torch")
    if torch is None:
        capture = _nothing()
        capture.meta["warnings"].append("empty: torch is not imported in this process, so it holds no torch memory")
    else:
        try:
            from nbmemprof.sources import torch_history

            capture = torch_history.picture()
        except NotRecording:  # no CUDA in use here
            capture = _living_tensors(torch)
    capture.meta.update(title=title, cell=None, started=datetime.now(UTC).astimezone().isoformat(timespec="seconds"))
    return capture


def _living_tensors(torch: Any) -> Capture:
    from nbmemprof.sources._owners import host_storages

    sizes = host_storages(torch)
    addr, size = list(sizes), list(sizes.values())
    columns = {"kind": "host", "source": "torch", "snapshot_id": 0, "segment_addr": addr, "addr": addr, "size_bytes": size, "requested_bytes": size, "state": "active_allocated", "pool_id": "0_0"}
    warnings = ["no events: a picture has only what is there now. Record with %%memprof or mp.record()."]
    return heap.build({"blocks": schema.fill("blocks", columns, height=len(sizes))}, source="torch_cpu", origin="measured", device="CPU", torch=torch.__version__, warnings=warnings)
