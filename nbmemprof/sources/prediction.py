"""``--predict H200``: the cell under fake tensors in a child process, and the fake session as a source of its own.

The flag never reaches a recorder: the magics hand such a cell to :mod:`nbmemprof.prediction.notebook`. Inside a lasting session
(``%memprof predict on H200``) this is the source that records: a window of the fake run, through the allocator's model.
"""

from __future__ import annotations

import sys
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.errors import FlagError, NbmemprofError, NotRecording
from nbmemprof.flags import Flag
from nbmemprof.prediction.catalogue import find
from nbmemprof.units import parse_bytes

__all__ = ["FLAGS", "PredictionSource", "seconds", "source", "unavailable"]


def _device(text: str) -> str:
    name, colon, size = text.partition(":")
    try:
        find(name)
        if colon:
            parse_bytes(size)
    except NbmemprofError as error:
        raise FlagError(str(error)) from error
    return text


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except NbmemprofError as error:
        raise FlagError(str(error)) from error


def seconds(text: str) -> float:
    """A time limit, as it is written."""
    value = float(text)
    if not value > 0:
        raise FlagError(f"{text!r} is no time to run. Give seconds above 0.")
    return value


FLAGS = [
    Flag("--predict", "run the cell under fake tensors in a child process, for this GPU: nothing here changes, no GPU is needed", type=_device, metavar="DEVICE[:SIZE]"),
    Flag("--limit", "torch's own memory limit in a prediction, as 8GiB", type=_size, metavar="SIZE"),
    Flag("--conf", "PYTORCH_CUDA_ALLOC_CONF in a prediction", metavar="CONF"),
    Flag("--calibrate", "where this very GPU is here: look at it, and correct what lies outside the allocator and which attention kernels are taken", action="store_true", default=False),
    Flag("--predict-seconds", "longest time of a prediction (default: 600)", type=seconds, metavar="S"),
    Flag("--predict-host", "most memory that a prediction may take here (default: 8 GiB, at most half of what is free)", type=_size, metavar="SIZE"),
]


def unavailable() -> str | None:
    """Why it can't record here."""
    from nbmemprof import _optional

    serving = _optional.loaded("nbmemprof.prediction.serving")
    return None if serving is not None and serving.current is not None else "no fake session runs in this process. %memprof predict on H200 begins one"


def source() -> PredictionSource:
    """The source."""
    return PredictionSource()


class PredictionSource:
    """Windows of the fake run that goes on in this process."""

    name = "prediction"
    needs_torch = True

    def __init__(self) -> None:
        self._start: Any = None
        self._made: Capture | None = None

    def start(self, **_options: Any) -> None:
        """Begin."""
        self._start = self.mark()

    def mark(self) -> Any:
        """The position now: number of events, and what was assumed so far."""
        from nbmemprof.prediction import serving

        if serving.current is None:
            raise NotRecording(f"{unavailable()}.")
        record = serving.current.session.record
        return len(record.events), dict(record.assumptions), dict(record.kernels)

    def cut(self, since: Any) -> Capture:
        """What happened from ``since`` until now."""
        from dataclasses import replace

        from nbmemprof.prediction import feed, serving

        here = serving.current
        if here is None or since is None:
            raise NotRecording("This prediction was never started. Call start() first.")
        at, assumptions, kernels = since
        record, setting = here.session.record, here.setting
        here.session.finish(at)
        record.caught = not any(here.session.room.ended(error) for error in (sys.exc_info()[1], getattr(sys, "last_value", None)))
        window = replace(record, assumptions=_more(record.assumptions, assumptions), kernels=_more(record.kernels, kernels))
        return feed.capture_of(
            window, setting.gpu, conf=setting.conf, torch=setting.gpu.torch, limit_bytes=setting.limit_bytes, capacity_bytes=setting.capacity_bytes, since=at, meta={"recording": feed.NOTHING_SPENT},
        )  # fmt: skip

    def stop(self) -> Capture:
        """Everything since ``start``."""
        if self._made is None:
            self._made = self.cut(self._start)
        return self._made


def _more(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Counts that came on top."""
    return {what: count - before.get(what, 0) for what, count in now.items() if count > before.get(what, 0)}
