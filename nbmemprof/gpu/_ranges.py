"""One counting session of CUPTI's range profiler: automatic ranges, so every kernel is a row, and kernel replay, so CUPTI runs each as often as it needs passes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any

from nbmemprof.errors import NotRecording
from nbmemprof.gpu import _structs
from nbmemprof.gpu._cupti import Cupti, CuptiRefused
from nbmemprof.gpu._metric_host import MetricHost

__all__ = ["RangeSession", "chip_name", "supported"]

_RANGE_API = 0  # CUPTI_PROFILER_RANGE_PROFILING
_REFUSALS = {"vgpu": 33, "sli": 44, "confidential": 41, "cmp": 42, "wsl": 45, "architecture": 38}  # member of the block -> result with the same meaning


def chip_name(cupti: Cupti, device: int) -> str:
    """Chip of a device, as ``GH100``."""
    return bytes(cupti.call("cuptiDeviceGetChipName", index=device).chip).decode()


def supported(cupti: Cupti, device: int) -> None:
    """Return where the device can be counted.

    Raises
    ------
    CuptiRefused
        With the result that names the reason (virtual GPU, WSL, an old architecture …).
    """
    function = "cuptiProfilerDeviceSupported"
    told = cupti.call(function, device=device, api=_RANGE_API)
    if told.supported != _structs.SUPPORTED:
        reason = next((code for member, code in _REFUSALS.items() if getattr(told, member) not in (0, _structs.SUPPORTED)), 27)
        raise CuptiRefused(function, reason, cupti.word(reason))


class RangeSession:
    """Counts every kernel of one context between ``start`` and ``stop``; the caller has initialised the profiler.

    Parameters
    ----------
    cupti
        The library.
    context
        ``CUcontext`` as an integer.
    device
        Ordinal of the context's device.
    metrics
        Counter names.
    max_kernels
        Room in the counter image; what is launched beyond it is run and not counted (``dropped`` says how many).
    """

    def __init__(self, cupti: Cupti, context: int, device: int, metrics: Sequence[str], max_kernels: int = 256) -> None:
        self.cupti, self.max_kernels = cupti, max_kernels
        self.dropped = 0
        self.started = False
        self._profiler: Any = None
        self.host: MetricHost | None = None
        try:
            supported(cupti, device)
            self.chip = chip_name(cupti, device)
            self.host = MetricHost(cupti, self.chip, metrics, self._availability(context))
            self._profiler = cupti.call("cuptiRangeProfilerEnable", context=context).profiler
            self._data = self._image(self.host)
            self._configure(self.host)
        except BaseException:
            self.close()
            raise

    @property
    def passes(self) -> int:
        """How often a kernel is run to fill all counters."""
        return self.host.passes if self.host else 0

    def _availability(self, context: int) -> Any:
        """What of the chip's counters this device has to give."""
        function = "cuptiProfilerGetCounterAvailability"
        size = self.cupti.call(function, context=context).size
        image = (ctypes.c_uint8 * size)()
        self.cupti.call(function, context=context, size=size, image=ctypes.addressof(image))
        return image

    def _image(self, host: MetricHost) -> Any:
        """The counter data image, empty, with room for ``max_kernels`` rows."""
        asked = self.cupti.call(
            "cuptiRangeProfilerGetCounterDataSize",
            profiler=self._profiler, metrics=host._names, count=len(host.metrics), ranges=self.max_kernels, nodes=self.max_kernels,
        )  # fmt: skip
        data = (ctypes.c_uint8 * asked.size)()
        self.cupti.call("cuptiRangeProfilerCounterDataImageInitialize", profiler=self._profiler, size=len(data), data=ctypes.addressof(data))
        return data

    def _configure(self, host: MetricHost) -> None:
        self.cupti.call(
            "cuptiRangeProfilerSetConfig",
            profiler=self._profiler, config_size=len(host.config), config=ctypes.addressof(host.config), size=len(self._data), data=ctypes.addressof(self._data),
            range=_structs.AUTO_RANGE, replay=_structs.KERNEL_REPLAY, ranges=self.max_kernels, levels=1, first_level=1, pass_index=0, target_level=1,
        )  # fmt: skip

    def start(self) -> None:
        """From here on kernels are counted."""
        self.cupti.call("cuptiRangeProfilerStart", profiler=self._profiler)
        self.started = True

    def stop(self) -> list[dict[str, float]]:
        """End, and give the counters of every kernel in launch order. The caller has synchronised the context."""
        host = self.host
        if host is None:
            raise NotRecording("This counting session is closed already. Make a new one.")
        self._stop()
        self.dropped = int(self.cupti.call("cuptiRangeProfilerDecodeData", profiler=self._profiler).dropped)
        found = self.cupti.call("cuptiRangeProfilerGetCounterDataInfo", size=len(self._data), data=ctypes.addressof(self._data)).ranges
        return [host.evaluate(self._data, index) for index in range(found)]

    def pause(self) -> None:
        """Count nothing more; what was counted stays. May be called from a launch's callback."""
        with contextlib.suppress(CuptiRefused):  # then the rest is run several times too, and the image has no room for it
            self._stop()

    def _stop(self) -> None:
        if self.started:
            self.started = False
            self.cupti.call("cuptiRangeProfilerStop", profiler=self._profiler)

    def close(self) -> None:
        """Let go of the hardware, whatever happened; a second call does nothing."""
        with contextlib.suppress(CuptiRefused):
            self._stop()
        profiler, self._profiler = self._profiler, None
        if profiler:
            with contextlib.suppress(CuptiRefused):
                self.cupti.call("cuptiRangeProfilerDisable", profiler=profiler)
        host, self.host = self.host, None
        if host is not None:
            with contextlib.suppress(CuptiRefused):
                host.close()
