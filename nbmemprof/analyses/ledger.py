"""Who holds the device's memory, line by line, up to what the driver reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._overheads import NOT_CHARGED, Entry, table_of
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["ledger"]

_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "rank": pl.Int64, "kind": pl.String, "line": pl.String, "size_bytes": pl.Int64, "low_bytes": pl.Int64, "high_bytes": pl.Int64,
    "share": pl.Float64, "evidence": pl.String, "origin": pl.String, "reason": pl.String, "reported_bytes": pl.Int64,
}  # fmt: skip
_WORKSPACES = (32 << 20, 4096 * 1024 * 2 + 16 * 1024 * 8)  # torch's cuBLAS workspaces, see nbmemprof.attribution
_MIB = 1 << 20
_PAGE = 4096
_ANY_CONTEXT = (100 * _MIB, 1400 * _MIB)  # from small cards with lazy loading to an H200 with eager loading
_ANY_KERNELS = (0, 600 * _MIB)
_ANY_LIBRARY = {"cuBLAS": 600 * _MIB, "cuDNN": 320 * _MIB, "cuFFT": 16 * _MIB, "cuSOLVER": 260 * _MIB, "NCCL": 800 * _MIB}


@dataclass
class _Line:
    """One line: a size, or a range and the reason why there is no size."""

    line: str
    size: int | None
    low: int | None
    high: int | None
    evidence: str
    origin: str
    reason: str | None = None
    kind: str = "device"

    @classmethod
    def exact(cls, line: str, size: float, evidence: str, origin: str, kind: str = "device") -> _Line:
        return cls(line, int(size), int(size), int(size), evidence, origin, None, kind)

    @classmethod
    def entry(cls, line: str, entry: Entry, where: str, reason: str | None = None) -> _Line:
        return cls(line, entry.size, entry.low, entry.high, where, "recorded", reason)


@dataclass
class _Moment:
    """Readings of one device at one moment: (source, gauge) to bytes; those of other moments fill what was read less often."""

    values: dict[tuple[str, str], float] = field(default_factory=dict)

    def of(self, source: str, gauge: str) -> float | None:
        return self.values.get((source, gauge))


def ledger(capture: Capture, at: str = "end") -> pl.DataFrame:
    """Who holds the device's memory, up to what the driver reports?

    Each line is measured for itself or taken from a table with its error; none is the rest of the others. What the lines don't explain
    is the last of them, ``unexplained``: below 0 where the table says more than there was.

    Parameters
    ----------
    capture
        Any capture. One of a file or of a CPU doesn't know what the driver reports, and says so.
    at
        ``"end"``; or ``"peak"``: when the driver's number was highest of those read while the cell ran (every 50 ms).

    Returns
    -------
    ``device rank kind line size_bytes low_bytes high_bytes share evidence origin reason reported_bytes``. ``size_bytes`` is null where only a
    range can be told; ``reason`` says why. ``origin``: ``measured`` here, or ``recorded`` in the table. ``reported_bytes``: what the driver reports for the
    device (all processes), the same in each of its rows, null where it was not asked; the lines of a device add up to it. Page-locked host
    memory has rows of its own, with a null device and ``kind`` ``pinned``; it is not in any device's sum.

    Raises
    ------
    NbmemprofError
        For another ``at``.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.ledger(capture).select("line", "size_bytes").rows()[:3]
    [('torch in use', 10485760), ('torch rounding', 0), ('torch cached', 10485760)]
    """
    if at not in ("end", "peak"):
        raise NbmemprofError(f"at={at!r} is not a moment of the ledger. Use 'end' or 'peak'.")
    rows: list[dict[str, Any]] = []
    for curve in heap.curves(capture):
        rank, device, kind = curve.key
        if kind != "device":
            rows += _host(capture, curve)
            continue
        moment = _moment(capture, device, at)
        reported, basis = _reported(capture, curve, moment, at)
        lines = [*_torch(capture, curve, moment, at), *_pools(capture, moment), *_libraries(capture, curve, moment, basis), *_others(moment, basis)]
        lines.append(_unexplained(capture, lines, reported))
        rows += [_row(line, device, rank, reported) for line in lines]
    rows += [_row(line, None, None, None) for line in _pinned(capture)]
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row")


def _row(line: _Line, device: int | None, rank: int | None, reported: int | None) -> dict[str, Any]:
    share = line.size / reported if line.size is not None and reported else None
    return {
        "device": device, "rank": rank, "kind": line.kind, "line": line.line, "size_bytes": line.size, "low_bytes": line.low, "high_bytes": line.high,
        "share": share, "evidence": line.evidence, "origin": line.origin, "reason": line.reason, "reported_bytes": reported,
    }  # fmt: skip


# ---------------------------------------------------------------------- what was read
def _moment(capture: Capture, device: int | None, at: str) -> _Moment:
    """The reading to look at: all of its gauges, and of the rarer ones the nearest reading."""
    samples = capture.tables["samples"].filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)) & (pl.col("unit").cast(pl.String) == "bytes"))
    samples = samples.with_columns(pl.col("source", "gauge").cast(pl.String))
    used = samples.filter((pl.col("source") == "driver") & (pl.col("gauge") == "used_bytes")).drop_nulls("value").sort("time_us", maintain_order=True)
    if used.is_empty():
        return _Moment()
    when = used["time_us"][-1 if at == "end" else int(used["value"].arg_max() or 0)]
    near = samples.with_columns((pl.col("time_us") - when).abs().alias("_far")).sort("_far", maintain_order=True).unique(["source", "gauge"], keep="first", maintain_order=True)
    return _Moment({(source, gauge): value for source, gauge, value in near.select("source", "gauge", "value").iter_rows() if value is not None})


def _reported(capture: Capture, curve: heap.Curve, moment: _Moment, at: str) -> tuple[int | None, str]:
    """What the driver reports, and of what: ``device``, or of this ``process`` alone; ``""`` where it was not asked."""
    if capture.meta["origin"] == "predicted":  # there is no driver
        return None, ""
    used = moment.of("driver", "used_bytes")
    if used is not None:
        return int(used), "device"
    outside = capture.meta.get("outside_bytes")
    outside = outside.get(str(curve.key[1])) if isinstance(outside, dict) else outside
    if at == "end" and isinstance(outside, (int, float)):
        return int(outside) + int(heap.last_picture(capture.tables["segments"]).filter(heap.matches(curve.key))["size_bytes"].sum()), "process"
    return None, ""


# ---------------------------------------------------------------------- the lines
def _torch(capture: Capture, curve: heap.Curve, moment: _Moment, at: str) -> list[_Line]:
    read = [moment.of("torch", gauge) for gauge in ("in_use_bytes", "active_bytes", "held_bytes")]
    evidence, origin = "torch's counters", capture.meta["origin"]
    if None in read:
        if at != "end":
            return [_Line("torch in use", None, 0, None, "none", origin, "the driver was not read while the cell ran; ask for at='end'")]
        mine = heap.matches(curve.key)
        blocks = heap.last_picture(capture.tables["blocks"]).filter(mine, pl.col("state").cast(pl.String).is_in(["active_allocated", "active_pending_free"]))
        segments = heap.last_picture(capture.tables["segments"]).filter(mine)
        evidence = "torch's picture of the heap"
        asked_for = blocks.select(pl.coalesce("requested_bytes", "size_bytes").sum()).item()
        read = [float(asked_for), float(blocks["size_bytes"].sum()), float(segments["size_bytes"].sum())]
    asked, active, held = (value or 0.0 for value in read)
    sizes = {"torch in use": asked, "torch rounding": active - asked, "torch cached": held - active}
    return [_Line.exact(line, size, evidence, origin) for line, size in sizes.items()]


def _pools(capture: Capture, moment: _Moment) -> list[_Line]:
    lines = []
    for source, name in (("cupy", "CuPy's pool"), ("cudaMallocAsync", "cudaMallocAsync's pool")):
        total, used = moment.of(source, "pool_bytes"), moment.of(source, "pool_used_bytes")
        if total:
            evidence = f"{name}, asked" if source == "cupy" else "the driver's default pool, asked"
            lines += [_Line.exact(f"{name} in use", used or 0, evidence, capture.meta["origin"]), _Line.exact(f"{name} cached", total - (used or 0), evidence, capture.meta["origin"])]
    return lines


def _libraries(capture: Capture, curve: heap.Curve, moment: _Moment, basis: str) -> list[_Line]:
    """Context, kernel images and libraries: measured, from the table, or a range."""
    used: dict[str, Any] = capture.meta.get("libraries") or {}
    device = (capture.meta.get("devices") or {}).get(str(curve.key[1]), {}).get("name") or capture.meta.get("device")
    table, where = table_of(device, str(used.get("module_loading") or "LAZY"))
    lines, took = [], moment.of("driver", "context_bytes")
    if took is not None:
        error = NOT_CHARGED
        lines.append(_Line("CUDA context", int(took), int(took) - error, int(took) + error, "the driver's number before and after CUDA began", "measured", "other processes may have come or gone meanwhile"))
    elif table is not None:
        less = NOT_CHARGED if basis == "process" else 0
        entry = Entry(table.context.size - less, table.context.low - less, table.context.high - less)
        lines.append(_Line.entry("CUDA context", entry, where))
    else:
        lines.append(_Line("CUDA context", None, *_ANY_CONTEXT, "none", "modelled", where))
    if table is None:
        lines.append(_Line("kernel images", None, *_ANY_KERNELS, "none", "modelled", where))
    else:
        lines.append(_Line.entry("kernel images", table.kernels, where, "how many kernels a program loads is its own"))
    handles, maybe = _handles(capture, curve)
    known = {"cuBLAS": True if handles + maybe else False if used else None, "cuDNN": used.get("cudnn"), "cuFFT": used.get("cufft"), "cuSOLVER": used.get("cusolver"), "NCCL": used.get("nccl")}
    for name, there in known.items():
        if there is False:
            continue
        if there is None:
            lines.append(_Line(name, None, 0, _ANY_LIBRARY[name], "none", "modelled", "the capture does not say whether it was used"))
        elif table is None:
            lines.append(_Line(name, None, 0, _ANY_LIBRARY[name], "none", "modelled", where))
        elif name == "cuBLAS":
            entry = table.cublas.plus(table.another_cublas, handles + maybe - 1)
            low = table.cublas.plus(table.another_cublas, handles - 1).low if handles else 0
            why = f"{maybe} block{'s' if maybe > 1 else ''} of a workspace's size {'were' if maybe > 1 else 'was'} there before the recording" if maybe else None
            count = handles + maybe
            lines.append(_Line.entry(name, Entry(entry.size, low, entry.high), f"{where}; {count} handle{'s' if count > 1 else ''} by their workspaces", why))
        else:
            entry = {"cuDNN": table.cudnn, "cuFFT": table.cufft, "cuSOLVER": table.cusolver, "NCCL": table.nccl}[name]
            lines.append(_Line.entry(name, entry, where, "of one communicator; further ones and more ranks take more" if name == "NCCL" else None))
    return lines


def _handles(capture: Capture, curve: heap.Curve) -> tuple[int, int]:
    """Handles of cuBLAS by their workspaces in torch's memory: those known, and blocks of the same size that may be some."""
    rows = capture.tables["allocations"].filter(heap.matches(curve.key), pl.col("free_seq").is_null(), pl.col("requested_bytes").is_in(_WORKSPACES))
    words = rows["category"].cast(pl.String)
    return int((words == "workspace").sum()), int(((words == "unknown") & rows["at_start"]).sum())


def _others(moment: _Moment, basis: str) -> list[_Line]:
    if basis != "device":
        return []
    others, count = moment.of("driver", "others_bytes"), moment.of("driver", "processes")
    if others is not None:
        return [_Line.exact("other processes", others, "NVML, by process", "measured")]
    why = "the driver lists processes by the host's ids, and this one can't be told from the others" if count else "the driver doesn't tell which processes use the device"
    return [_Line("other processes", None, 0, None, "none", "measured", why)]


def _unexplained(capture: Capture, lines: list[_Line], reported: int | None) -> _Line:
    if capture.meta["origin"] == "predicted":
        return _Line("unexplained", None, None, None, "none", "predicted", "a prediction has no driver to report anything")
    if reported is None:
        why = "the file does not hold what the driver reports; record live" if capture.meta.get("recording") is None else "the driver was not asked or did not answer"
        return _Line("unexplained", None, None, None, "none", capture.meta["origin"], why)
    open_ended = [line.line for line in lines if line.high is None]
    low = None if open_ended else reported - sum(line.high or 0 for line in lines)
    high = reported - sum(line.low or 0 for line in lines)
    unsized = [line.line for line in lines if line.size is None]
    if unsized:
        return _Line("unexplained", None, low, high, "what the driver reports less the lines above", "measured", f"no size is known for {', '.join(unsized)}")
    return _Line("unexplained", reported - sum(line.size or 0 for line in lines), low, high, "what the driver reports less the lines above", "measured")


def _host(capture: Capture, curve: heap.Curve) -> list[dict[str, Any]]:
    """CPU tensors: no driver reports what PyTorch's CPU allocator gave out."""
    rank, device, kind = curve.key
    if device is not None:
        return []
    live = capture.tables["allocations"].filter(heap.matches(curve.key), pl.col("free_seq").is_null())
    why = "no driver reports host memory; the process's own figure (mp.stats()) also has Python, libraries and files in it"
    lines = [
        _Line.exact("torch in use", float(live["size_bytes"].sum()), "storages of CPU tensors", capture.meta["origin"], str(kind)),
        _Line("unexplained", None, None, None, "none", capture.meta["origin"], why, str(kind)),
    ]
    return [_row(line, None, rank, None) for line in lines]


def _pinned(capture: Capture) -> list[_Line]:
    """Page-locked host memory of torch: what its tensors asked for, what rounding up to a power of two adds, what is kept for later."""
    samples = capture.tables["samples"].filter(pl.col("kind").cast(pl.String) == "pinned").with_columns(pl.col("gauge").cast(pl.String)).drop_nulls("value")
    if samples.is_empty():
        return []
    value = dict(samples.sort("time_us", maintain_order=True).select("gauge", "value").iter_rows())  # the last of each
    locked, asked, rounded = (value.get(f"{name}_bytes") for name in ("locked", "requested", "rounded"))
    if not locked or asked is None or rounded is None or locked < _PAGE:
        return []
    origin, evidence = capture.meta["origin"], "torch's counter of locked bytes"
    return [
        _Line.exact("pinned host memory in use", asked, "storages of pinned tensors", origin, "pinned"),
        _Line.exact("pinned host memory rounding", rounded - asked, "their next powers of two", origin, "pinned"),
        _Line.exact("pinned host memory cached", locked - rounded, evidence, origin, "pinned"),
    ]
