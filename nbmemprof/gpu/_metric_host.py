"""CUPTI's metric library: which counters a chip has, in how many passes they are gathered, and values out of a counter image. Needs no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from nbmemprof.errors import NbmemprofError
from nbmemprof.gpu._cupti import Cupti, CuptiRefused

__all__ = ["MetricHost", "names_array"]

_RANGE_PROFILER = 0  # CUpti_ProfilerType


def names_array(metrics: Sequence[str]) -> Any:
    """``const char**`` of metric names; keep it alive as long as CUPTI reads it."""
    return (ctypes.c_char_p * len(metrics))(*(name.encode() for name in metrics))


class MetricHost:
    """The metrics of one chip, configured for one list of them.

    Parameters
    ----------
    cupti
        The library.
    chip
        As ``GH100``.
    metrics
        Names with their rollup (``dram__bytes_read.sum``).
    availability
        The device's counter availability image; None plans for the chip as such, which works without a GPU.

    Raises
    ------
    NbmemprofError
        For a name that the chip doesn't have: the name is told.
    """

    def __init__(self, cupti: Cupti, chip: str, metrics: Sequence[str], availability: Any = None) -> None:
        self.cupti, self.chip, self.metrics = cupti, chip, list(metrics)
        self._availability = availability
        self._names = names_array(self.metrics)
        pointer = ctypes.cast(availability, ctypes.c_void_p) if availability is not None else None
        made = cupti.call("cuptiProfilerHostInitialize", kind=_RANGE_PROFILER, chip=chip.encode(), availability=pointer)
        self._host: Any = made.host
        try:
            self.config = self._image()
        except BaseException:
            self.close()
            raise
        self.passes = int(cupti.call("cuptiProfilerHostGetNumOfPasses", size=len(self.config), image=ctypes.addressof(self.config)).passes)

    def _image(self) -> Any:
        """The config image: which counter is gathered in which pass."""
        try:
            self.cupti.call("cuptiProfilerHostConfigAddMetrics", host=self._host, metrics=self._names, count=len(self.metrics))
        except CuptiRefused as error:
            if bad := [name for name in self.metrics if not self.knows(name)]:
                raise NbmemprofError(f"{self.chip} has no counter {bad[0]!r}. Leave it out of metrics=, or write its rollup too (.sum, .pct, .ratio).") from error
            raise
        size = self.cupti.call("cuptiProfilerHostGetConfigImageSize", host=self._host).size
        image = (ctypes.c_uint8 * size)()
        self.cupti.call("cuptiProfilerHostGetConfigImage", host=self._host, size=size, image=ctypes.addressof(image))
        return image

    def knows(self, metric: str) -> bool:
        """Whether the chip has this metric."""
        try:
            self.properties(metric)
        except CuptiRefused:
            return False
        return True

    def properties(self, metric: str) -> dict[str, str]:
        """``description``, ``unit`` (hardware unit) and ``dimension`` of a metric."""
        told = self.cupti.call("cuptiProfilerHostGetMetricProperties", host=self._host, metric=metric.encode())
        return {name: (getattr(told, name) or b"").decode(errors="replace") for name in ("description", "unit", "dimension")}

    def evaluate(self, data: Any, index: int) -> dict[str, float]:
        """Values of all metrics for one range of a counter data image."""
        values = (ctypes.c_double * len(self.metrics))()
        self.cupti.call(
            "cuptiProfilerHostEvaluateToGpuValues",
            host=self._host, data=ctypes.addressof(data), size=len(data), range=index, metrics=self._names, count=len(self.metrics), values=values,
        )  # fmt: skip
        return dict(zip(self.metrics, (float(value) for value in values), strict=True))

    def close(self) -> None:
        """Give CUPTI's object back; a second call does nothing."""
        host, self._host = self._host, None
        if host:
            self.cupti.call("cuptiProfilerHostDeinitialize", host=host)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
