"""What a first look needs to know about a capture, asked once and kept: a row a device, its peak, its sites.

A view must come even where one analysis can't answer: what failed is a note that the view shows.
"""

from __future__ import annotations

import importlib
import weakref
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.views import _theme

__all__ = ["Device", "Facts", "Stack", "facts"]

_SERIES = 8  # areas in one picture; the rest is "other"
_RESERVED = "\0reserved"  # a column name that no series has
_KNOWN = 0.1  # share of the peak whose category must be known before it is stacked by category
_RISE = 32 << 20  # of the driver's number within a cell in which torch did nothing
_kept: weakref.WeakKeyDictionary[Capture, Facts] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Stack:
    """Series over time, bottom first: ``values[i][k]`` bytes of ``names[i]`` from ``xs[k]`` on, ``reserved`` likewise or empty."""

    by: str
    axis: str
    xs: list[float]
    names: list[str]
    values: list[list[int]]
    reserved: list[int] = field(default_factory=list)

    @property
    def totals(self) -> list[int]:
        """Bytes of all series together at each point."""
        return [sum(column) for column in zip(*self.values, strict=True)] if self.values else []

    @property
    def top(self) -> int:
        """Index of the highest point; 0 where there is none."""
        totals = self.totals
        return max(range(len(totals)), key=totals.__getitem__) if totals else 0

    @property
    def is_drawn(self) -> bool:
        """Whether there is anything above zero to draw."""
        return bool(self.xs) and (any(map(any, self.values)) or any(self.reserved))

    @property
    def end(self) -> float:
        """Right end of the x axis."""
        return self.xs[-1] if self.xs else 0.0


@dataclass(frozen=True)
class Device:
    """One device (and rank, and kind of memory) of a capture."""

    rank: int | None
    device: int | None
    kind: str | None
    row: dict[str, Any]
    breakdown: pl.DataFrame
    sites: pl.DataFrame
    start_bytes: int | None
    label: str

    def number(self, name: str) -> int | None:
        """Return one number of the summary row, None where it isn't known."""
        value = self.row.get(name)
        return None if value is None else int(value)

    @property
    def peak(self) -> int:
        """Highest allocated bytes, 0 where it isn't known."""
        return self.number("peak_allocated_bytes") or self.number("end_allocated_bytes") or 0

    @property
    def kept(self) -> int | None:
        """Bytes that stay allocated because of this window; None where its start isn't known."""
        end = self.number("end_allocated_bytes")
        return None if end is None or self.start_bytes is None else end - self.start_bytes

    @property
    def by(self) -> str:
        """What this capture can be stacked by: category, site, or total."""
        if self.breakdown.height:
            known = int(self.breakdown.filter(pl.col("category") != "unknown")["size_bytes"].sum())
            if known >= _KNOWN * max(int(self.breakdown["size_bytes"].sum()), 1):
                return "category"
        return "site" if self.sites.height and self.sites["site"].drop_nulls().len() else "total"

    def parts(self) -> list[tuple[str, int]]:
        """Return (name, bytes at the peak), largest first, by what this capture knows."""
        frame, name = (self.breakdown, "category") if self.by == "category" else (self.sites, "site")
        if not frame.height:
            return []
        summed = frame.group_by(pl.col(name).cast(pl.String).fill_null("no stack"), maintain_order=True).agg(pl.col("size_bytes").sum())
        return [(n, b) for n, b in summed.sort("size_bytes", descending=True, maintain_order=True).iter_rows() if b]


@dataclass
class Facts:
    """A capture and the answers that its views share; it doesn't keep the capture alive."""

    _capture: weakref.ref[Capture]
    devices: list[Device]
    silent: list[str]
    notes: list[str]
    _answers: dict[Any, pl.DataFrame] = field(default_factory=dict)

    @property
    def capture(self) -> Capture:
        """The capture; whoever shows it holds it."""
        capture = self._capture()
        if capture is None:
            raise NbmemprofError("The capture of this view is gone. Keep a reference to it while you show it.")
        return capture

    @property
    def meta(self) -> dict[str, Any]:
        """The capture's meta."""
        return self.capture.meta

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not self.devices

    @property
    def is_quiet(self) -> bool:
        """Whether it was recorded that nothing happened: memory is held, but none was given out or back."""
        return self.meta.get("recording") is not None and not self.capture.events.height

    @property
    def moves_outside(self) -> bool:
        """Whether others than torch's allocator hold or took memory: a pool, page-locked memory, a rise of what the driver reports."""
        read = self.capture.tables["samples"]
        if read.is_empty():
            return False
        gauge, value = pl.col("gauge").cast(pl.String), pl.col("value")
        used = value.filter((gauge == "used_bytes") & (pl.col("source").cast(pl.String) == "driver"))
        told = read.select(pool=value.filter(gauge.is_in(["pool_bytes", "locked_bytes"])).max().fill_null(0) > 0, rise=((used.max() - used.min()) >= _RISE).fill_null(value=False))
        return any(told.row(0))

    def ask(self, name: str, **options: Any) -> pl.DataFrame:
        """Run one analysis once; a failure is noted and gives an empty frame."""
        key = (name, *sorted(options.items()))
        if key not in self._answers:
            try:
                function = getattr(importlib.import_module(f"nbmemprof.analyses.{name}"), name)
                self._answers[key] = function(self.capture, **options)
            except NbmemprofError as error:
                self._answers[key] = pl.DataFrame()
                self.notes.append(str(error))
            except Exception as error:  # the report of a cell must come whatever one analysis meets
                self._answers[key] = pl.DataFrame()
                self.notes.append(f"The analysis {name} failed ({type(error).__name__}: {error}). The rest of this view doesn't need it; please report it.")
        return self._answers[key]

    def of(self, frame: pl.DataFrame, device: Device) -> pl.DataFrame:
        """Rows of one device."""
        return _only(frame, device.rank, device.device, device.kind)

    def stack(self, device: Device, max_points: int, by: str | None = None) -> Stack:
        """Return the timeline of one device, stacked by what its capture knows."""
        by = by or device.by
        if by == "total":
            total = self.of(self.ask("timeline", by="total", max_points=3 * max_points), device)
            return _stack(total, total, by, max_points)
        # the analysis counts rows, one a moment and series; both answers shall have the same moments
        rows = (_SERIES + 1) * max_points
        frame = self.of(self.ask("timeline", by=by, max_points=rows, top=_SERIES), device)
        moments = rows // max(frame["series"].n_unique() if frame.height else 1, 1)
        total = self.of(self.ask("timeline", by="total", max_points=3 * moments), device)
        return _stack(frame, total, by, max_points)

    def marks(self, device: Device) -> pl.DataFrame:
        """Return the marks that concern one device."""
        marks = self.capture.marks
        if not marks.height:
            return marks
        near = pl.col("device").is_null() | pl.col("device").eq_missing(device.device)
        return marks.filter(near & (pl.col("rank").is_null() | pl.col("rank").eq_missing(device.rank)))


def facts(capture: Capture) -> Facts:
    """Ask the analyses that a first look needs; the answer is kept as long as the capture lives."""
    known = _kept.get(capture)
    if known is None:
        known = _kept[capture] = _gather(capture)
    return known


def _gather(capture: Capture) -> Facts:
    found = Facts(weakref.ref(capture), [], [], [])
    if not any(capture.tables[name].height for name in ("events", "blocks", "segments")):
        return found
    summary = found.ask("summary")
    rows = list(summary.iter_rows(named=True))
    several = len(rows) > 1
    for row in rows:
        rank, device, kind = row.get("rank"), row.get("device"), row.get("kind")
        label = _label(rank, device, kind)
        if not any(row.get(n) for n in ("peak_allocated_bytes", "peak_reserved_bytes", "end_reserved_bytes", "end_allocated_bytes", "ooms")):
            found.silent.append(label)
            continue
        found.devices.append(
            Device(
                rank,
                device,
                kind,
                row,
                _only(pl.DataFrame() if found.is_quiet else found.ask("breakdown"), rank, device, kind),
                _only(pl.DataFrame() if found.is_quiet else found.ask("sites"), rank, device, kind),
                _start(capture, row),
                label if several or device != 0 or rank is not None else "",
            )
        )
    found.devices.sort(key=lambda d: -d.peak)
    return found


def _label(rank: int | None, device: int | None, kind: str | None) -> str:
    where = "CPU" if device is None else f"GPU {device}"
    where += f" ({kind})" if kind not in (None, "device", "host") else ""
    return where if rank is None else f"rank {rank}, {where}"


def _only(frame: pl.DataFrame, rank: int | None, device: int | None, kind: str | None) -> pl.DataFrame:
    if not frame.height or "device" not in frame.columns:
        return frame
    keep = pl.col("device").eq_missing(pl.lit(device, dtype=pl.Int64))
    if "rank" in frame.columns:
        keep &= pl.col("rank").eq_missing(pl.lit(rank, dtype=pl.Int64))
    if "kind" in frame.columns and kind is not None:
        keep &= pl.col("kind").cast(pl.String) == kind
    return frame.filter(keep)


def _start(capture: Capture, row: dict[str, Any]) -> int | None:
    counters = (capture.meta.get("counters") or {}).get(str(row.get("device"))) or {}
    start = counters.get("start_allocated_bytes", row.get("start_allocated_bytes"))
    return None if start is None else int(start)


def _stack(frame: pl.DataFrame, total: pl.DataFrame, by: str, max_points: int) -> Stack:
    if frame["seq"].null_count() == frame.height:  # no events, so nothing that changes over time
        return Stack(by, "time", [], [], [])
    timed = frame["time_us"].null_count() == 0 and frame["time_us"].n_unique() > 1
    x = "time_us" if timed else "seq"
    frame, total = (f.with_columns(pl.col("series").cast(pl.String)) for f in (frame, total))
    frame, total = (f.with_columns(pl.col("seq").fill_null(pl.col("seq").min() - 1), pl.col("series").replace(_theme.PLAIN)) for f in (frame, total))
    reserved = total.filter(pl.col("series") == "reserved").sort("seq", maintain_order=True)
    if by == "total":
        frame = frame.filter(pl.col("series") == "allocated")
    names = [str(n) for n in frame["series"].unique(maintain_order=True)]
    wide = frame.pivot(on="series", index=["seq", x] if x != "seq" else ["seq"], values="size_bytes", aggregate_function="last")
    wide = wide.join(reserved.select("seq", pl.col("size_bytes").alias(_RESERVED)), on="seq", how="left").sort("seq")
    wide = wide.with_columns(pl.col(names).forward_fill().fill_null(0), pl.col(_RESERVED).forward_fill().fill_null(0))
    wide = _thin(wide, names, max_points)
    totals = wide.select(pl.sum_horizontal(names).alias("t"))["t"]
    at = int(totals.arg_max() or 0)
    order = sorted(names, key=lambda n: (n == "other", n in _theme.OTHER_NAMES, _theme.rank_of(n) if by == "category" else 0, -wide[n][at], n))
    order = [n for n in order if wide[n].max() or by == "total"]
    columns = [wide[n].cast(pl.Int64).to_list() for n in order]
    small = max(int(totals[at]) // 300, 1)  # thinner than a pixel everywhere
    own = [i for i, n in enumerate(order) if n != "other" and max(columns[i]) >= small][: _SERIES - 1]
    if by not in ("category", "total") and len(own) < len(order):
        rest = [c for i, c in enumerate(columns) if i not in own]
        order, columns = [order[i] for i in own], [columns[i] for i in own]
        if any(map(any, rest)):
            order, columns = [*order, "other"], [*columns, [sum(v) for v in zip(*rest, strict=True)]]
    return Stack(
        by,
        "time" if timed else "event",
        wide[x].cast(pl.Float64).to_list(),
        order,
        columns,
        wide[_RESERVED].cast(pl.Int64).to_list() if reserved.height else [],
    )


def _thin(wide: pl.DataFrame, names: list[str], max_points: int) -> pl.DataFrame:
    """Keep the highest and lowest point of each stretch, and the ends."""
    if wide.height <= max_points:
        return wide
    stretch = -(-wide.height * 2 // max_points)
    marked = wide.with_row_index("_row").with_columns(pl.sum_horizontal(names).alias("_t"), (pl.col("_row") // stretch).alias("_bin"))
    chosen = marked.group_by("_bin").agg(pl.col("_row").get(pl.col("_t").arg_max()).alias("a"), pl.col("_row").get(pl.col("_t").arg_min()).alias("b"))
    rows = {*chosen["a"], *chosen["b"], 0, wide.height - 1}
    return wide[sorted(rows)]
