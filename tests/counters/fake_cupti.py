"""A libcupti of Python: what the range profiler, the metric library and the launch callbacks answer, and what they can be told to refuse."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from nbmemprof.gpu import _structs
from nbmemprof.gpu._context import Context
from nbmemprof.gpu._cupti import Cupti

WORDS = {0: "CUPTI_SUCCESS", 26: "CUPTI_ERROR_HARDWARE_BUSY", 35: "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES", 39: "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"}


class FakeCupti:
    """Answers as libcupti does.

    Parameters
    ----------
    rows
        What each kernel counts, by metric name; a metric that a row lacks is NaN.
    refusals
        Function name to the result that it gives.
    unknown
        Metrics that the chip does not have.
    support
        Members of the device's support block that are not 3.
    """

    def __init__(self, rows: list[dict[str, float]] | None = None, refusals: dict[str, int] | None = None, unknown: tuple[str, ...] = (), support: dict[str, int] | None = None) -> None:
        self.rows, self.refusals, self.unknown, self.support = rows or [], refusals or {}, unknown, support or {}
        self.calls: list[str] = []
        self.callback: Callable[..., None] | None = None
        self.counting = False
        self.counted = 0
        self.dropped = 0
        self.room: int | None = None

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("cupti"):
            return lambda *arguments: self._answer(name, arguments)
        raise AttributeError(name)

    def _answer(self, name: str, arguments: tuple[Any, ...]) -> int:
        self.calls.append(name)
        if name in self.refusals:
            return self.refusals[name]
        if name in _structs.BLOCKS:
            params = arguments[0]._obj
            if params.structSize != _structs.block_size(name):
                return 1
            return int(getattr(self, name.removeprefix("cupti").lower(), lambda _: 0)(params) or 0)
        return int(getattr(self, name.removeprefix("cupti").lower())(*arguments) or 0)

    # ------------------------------------------------------------------ the metric library
    def profilerdevicesupported(self, params: Any) -> None:
        for member in ("supported", "architecture", "sli", "vgpu", "confidential", "cmp", "wsl"):
            setattr(params, member, self.support.get(member, 3))

    def devicegetchipname(self, params: Any) -> None:
        params.chip = b"GH100"

    def profilergetcounteravailability(self, params: Any) -> None:
        params.size = 16

    def profilerhostinitialize(self, params: Any) -> None:
        params.host = 7

    def profilerhostgetmetricproperties(self, params: Any) -> int:
        return 17 if params.metric.decode() in self.unknown else 0

    def profilerhostconfigaddmetrics(self, params: Any) -> int:
        return 17 if {params.metrics[i].decode() for i in range(params.count)} & set(self.unknown) else 0

    def profilerhostgetconfigimagesize(self, params: Any) -> None:
        params.size = 8

    def profilerhostgetnumofpasses(self, params: Any) -> None:
        params.passes = 6

    def profilerhostevaluatetogpuvalues(self, params: Any) -> None:
        row = self.rows[params.range]
        for i in range(params.count):
            params.values[i] = row.get(params.metrics[i].decode(), float("nan"))

    # ------------------------------------------------------------------ ranges
    def rangeprofilerenable(self, params: Any) -> None:
        params.profiler = 9

    def rangeprofilergetcounterdatasize(self, params: Any) -> None:
        params.size, self.room = 64, params.ranges

    def rangeprofilerstart(self, params: Any) -> None:
        self.counting = True

    def rangeprofilerstop(self, params: Any) -> None:
        self.counting = False

    def rangeprofilerdecodedata(self, params: Any) -> None:
        params.dropped = self.dropped

    def rangeprofilergetcounterdatainfo(self, params: Any) -> None:
        params.ranges = min(self.counted, self.room or 0)

    # ------------------------------------------------------------------ callbacks
    def subscribe(self, handle: Any, callback: Any, user: Any) -> None:
        handle._obj.value, self.callback = 5, callback

    def enablecallback(self, *arguments: Any) -> None:
        """Every launch function is told."""

    def unsubscribe(self, handle: Any) -> None:
        self.callback = None

    def getresultstring(self, code: int, text: Any) -> None:
        text._obj.value = WORDS.get(code, "CUPTI_ERROR_UNKNOWN").encode()

    def getversion(self, number: Any) -> None:
        number._obj.value = 130001

    # ------------------------------------------------------------------ the GPU
    def launch(self, name: str, grid: tuple[int, int, int] = (1, 1, 1), block: tuple[int, int, int] = (32, 1, 1), *, kernels: int = 1, cbid: int = 307, context: int = 1) -> None:
        """Start a kernel (or a graph of several, by its callback id) as the driver would."""
        if self.callback is not None:
            if cbid in (652, 653):
                config = _structs.LaunchConfig(grid=grid, block=block, shared_bytes=0, stream=None)
                params: Any = ctypes.pointer(config)
            else:
                params = _structs.LaunchParams(function=1, grid=grid, block=block, shared_bytes=0, stream=None)
            data = _structs.LaunchData(site=0, params=ctypes.cast(ctypes.pointer(params), ctypes.c_void_p), symbol=name.encode(), context=context)
            for site in (0, 1):
                data.site = site
                self.callback(None, 1, cbid, ctypes.addressof(data))
        self.counted += kernels if self.counting and context == 1 else 0


class FakeDriver:
    """A libcuda that has nothing to wait for."""

    def __init__(self, code: int = 0) -> None:
        self.code = code

    def cuCtxSynchronize(self) -> int:
        return self.code


def machine(fake: FakeCupti, name: str = "NVIDIA H200", code: int = 0) -> dict[str, Any]:
    """``cupti=`` and ``context=`` of :class:`nbmemprof.gpu._counting.Counting`."""
    return {"cupti": Cupti(fake, "libcupti of the tests"), "context": Context(1, 0, name, FakeDriver(code))}
