"""The three pictures of a first look: memory over time, what held it at the peak, which lines did."""

from __future__ import annotations

import math
from collections.abc import Sequence

import polars as pl

from nbmemprof.units import format_bytes, format_time_us
from nbmemprof.views import _theme, text
from nbmemprof.views._facts import Device, Facts, Stack
from nbmemprof.views.svg import Svg, clean, middle, nice_step, shorten, text_width

__all__ = ["bounds", "breakdown", "peak_words", "sites", "ticks", "timeline"]

WIDTH, HALF = 740, 368  # JupyterLab gives an output about 748 pixels in a window of 1,200; wider pictures are scaled down
_LEFT, _RIGHT, _LANE, _PLOT = 62, 212, 15, 190
_LANES = (("phase", "range"), ("step",), ("cell",))
_SPANS = 60


def timeline(known: Facts, device: Device, stack: Stack) -> tuple[Svg, str]:
    """Draw memory over time; returns the picture and the sentence that says the same."""
    sentence = _timeline_sentence(device, stack)
    marks = known.marks(device)
    lanes = [lane for lane in _LANES if stack.axis == "time" and marks.filter(pl.col("kind").is_in(lane) & pl.col("end_us").is_not_null()).height]
    top = 36 + _LANE * len(lanes) + 12
    svg = Svg(WIDTH, top + _PLOT + 40, sentence)
    name = f"{device.label}: memory over time" if device.label else "Memory over time"
    how = {"category": "stacked by what it is for", "site": "stacked by the line that asked", "total": "all allocations together"}[stack.by]
    svg.text(12, 20, name, size=13, bold=True)
    svg.text(12 + text_width(name, 14) + 10, 20, f"{how} · {text.origin(known.meta)}", fill=_theme.MUTED)
    frame = _Frame(known, device, stack, top)
    frame.grid(svg)
    frame.areas(svg)
    frame.spans(svg, marks, lanes)
    frame.moments(svg, marks)
    frame.peak(svg)
    frame.legend(svg)
    return svg, sentence


def _timeline_sentence(device: Device, stack: Stack) -> str:
    where = f"{device.label}: m" if device.label else "M"
    peak, reserved = device.number("peak_allocated_bytes"), device.number("peak_reserved_bytes")
    text_ = f"{where}emory over time, peak {format_bytes(peak)}"
    if stack.axis == "time" and stack.xs:
        text_ += f" at {format_time_us(stack.xs[stack.top])} of {format_time_us(stack.end)}"
    text_ += f", reserved {format_bytes(reserved)}" if reserved else ""
    text_ += f", {format_bytes(device.number('end_allocated_bytes'))} at the end."
    parts = [
        f"{_theme.word(middle(n))} {format_bytes(v[stack.top])}"
        for n, v in sorted(zip(stack.names, stack.values, strict=True), key=lambda s: -s[1][stack.top])
        if v[stack.top]
    ]
    return clean(text_ + (f" At the peak: {', '.join(parts[:6])}{', …' if len(parts) > 6 else ''}." if stack.by != "total" and parts else ""))


class _Frame:
    """Scales of one timeline, and what is drawn in them."""

    def __init__(self, known: Facts, device: Device, stack: Stack, top: float) -> None:
        self.device, self.stack = device, stack
        self.x0, self.x1, self.y0, self.y1 = float(_LEFT), float(WIDTH - _RIGHT), top, top + _PLOT
        self.from_ = stack.xs[0] if stack.xs else 0.0
        # the state after the last event is held for a little, so that it can be seen
        self.to = self.from_ + max(stack.end - self.from_, 1e-3) * 1.015
        used = max([*stack.totals, *stack.reserved, device.peak, 1])
        self.bounds = bounds(known, device, used)
        self.high = max([used * 1.1, *(size * 1.04 for size, _ in self.bounds)])

    def x(self, value: float) -> float:
        return self.x0 + (self.x1 - self.x0) * min(max((value - self.from_) / (self.to - self.from_), 0.0), 1.0)

    def y(self, size: float) -> float:
        return self.y1 - (self.y1 - self.y0) * size / self.high

    def grid(self, svg: Svg) -> None:
        for size in ticks(self.high, 5):
            svg.line(self.x0, self.y(size), self.x1, self.y(size), _theme.GRID)
            svg.text(self.x0 - 6, self.y(size) + 4, format_bytes(size, 2), anchor="end", fill=_theme.MUTED)
        if self.stack.axis == "time":
            unit, factor = next((u, f) for u, f in (("s", 1e6), ("ms", 1e3), ("µs", 1.0)) if self.to >= 2 * f or u == "µs")
        else:
            unit, factor = "", 1.0
        step = nice_step((self.to - self.from_) / factor, 7)
        first = math.ceil(self.from_ / factor / step)
        for k in range(first, int(self.to / factor / step + 1e-6) + 1):
            at = self.x(k * step * factor)
            svg.line(at, self.y1, at, self.y1 + 4, _theme.MUTED)
            svg.text(at, self.y1 + 16, f"{k * step:.10g}", anchor="middle", fill=_theme.MUTED)
        svg.text(
            (self.x0 + self.x1) / 2,
            self.y1 + 31,
            f"time since the capture's start ({unit})" if unit else "events, in order (this source has no clock)",
            anchor="middle",
            fill=_theme.MUTED,
        )

    def areas(self, svg: Svg) -> None:
        xs = [self.x(v) for v in self.stack.xs]
        below = self.stack.totals
        for i in range(len(self.stack.names) - 1, -1, -1):  # from the whole stack down: each covers the one above it
            svg.steps(xs, [self.y(v) for v in below], self.x1, base=self.y1, fill=self.colour(i))
            below = [total - own for total, own in zip(below, self.stack.values[i], strict=True)]
        svg.steps(xs if self.stack.reserved else [], [self.y(v) for v in self.stack.reserved], self.x1, stroke=_theme.LINE)
        for size, name in self.bounds:
            svg.line(self.x0, self.y(size), self.x1, self.y(size), _theme.MARK, 1.2, "6 4")
            svg.text(self.x0 + 4, self.y(size) + (-4 if self.y(size) > self.y0 + 12 else 12), f"{name} {format_bytes(size)}", fill=_theme.MARK, halo=True)
        svg.line(self.x0, self.y1, self.x1, self.y1, _theme.MUTED)

    def colour(self, i: int) -> str:
        return "#7fa8c9" if self.stack.by == "total" else _theme.colour(self.stack.names[i], i)

    def spans(self, svg: Svg, marks: pl.DataFrame, lanes: Sequence[tuple[str, ...]]) -> None:
        for n, lane in enumerate(lanes):
            y = 30 + _LANE * n
            rows = marks.filter(pl.col("kind").is_in(lane) & pl.col("end_us").is_not_null()).sort("time_us")
            svg.text(self.x0 - 6, y + 10, lane[0] + "s", anchor="end", fill=_theme.MUTED, size=10)
            spans, unnamed = rows.select("time_us", "end_us", "name").rows(), dict[str, None]()
            for i, (start, end, name) in enumerate(spans[:_SPANS]):
                a, b = self.x(start), self.x(end)
                svg.rect(a, y, max(b - a - 0.6, 0.6), _LANE - 3, "#d9dde3" if i % 2 else "#e8eaee")
                label = shorten(clean(name or ""), (b - a - 2) * 1.1, 9.5)
                if label == clean(name or "") or len(label) > 8:
                    svg.text((a + b) / 2, y + 9.5, label, size=9.5, anchor="middle")
                else:
                    unnamed.setdefault(clean(name or ""))
            aside = f"{_SPANS} of {len(spans)} drawn" if len(spans) > _SPANS else ", ".join(unnamed)
            svg.text(self.x1 + 14, y + 10, shorten(aside, _RIGHT - 28, 10), fill=_theme.MUTED, size=10)

    def moments(self, svg: Svg, marks: pl.DataFrame) -> None:
        """Mark out-of-memory errors and emptied caches."""
        right = -1.0
        position = "time_us" if self.stack.axis == "time" else "seq"
        rows = marks.filter(pl.col("kind").is_in(["oom", "empty_cache"]) & pl.col(position).is_not_null()).sort(position)
        for at, kind in rows.select(position, "kind").head(_SPANS).iter_rows():
            x, word, fill = self.x(at), {"oom": "OOM"}.get(kind, "cache emptied"), _theme.MARK if kind == "oom" else _theme.MUTED
            svg.line(x, self.y0 - 2, x, self.y1, fill, 1, "2 3")
            svg.path(f"M{x:.1f} {self.y0:.1f}l-4-7h8z", fill)
            start = min(x + 6, self.x1 - text_width(word, 10))
            if start > right:
                svg.text(start, self.y0 - 1, word, fill=fill, size=10, bold=kind == "oom", halo=True)
                right = start + text_width(word, 10) + 4

    def peak(self, svg: Svg) -> None:
        if not self.stack.xs:
            return
        at, size = self.stack.xs[self.stack.top], self.stack.totals[self.stack.top]
        x, y = self.x(at), self.y(size)
        words = peak_words(self.device, size) + (f" at {format_time_us(at)}" if self.stack.axis == "time" else "")
        wide = text_width(words, 11.5) + 10
        right = x + wide < self.x1
        svg.line(x, y, x, self.y1, _theme.INK, 1, "1.5 3")
        svg.circle(x, y, 4, _theme.INK)
        svg.text(x + 8 if right else x - 8, max(y - 5, self.y0 + 10), words, anchor="start" if right else "end", bold=True, halo=True, size=11.5)

    def legend(self, svg: Svg) -> None:
        """Name the areas in stacking order, with their bytes at the peak."""
        x, y, top = self.x1 + 14, self.y0 + 4, self.stack.top
        rows = [(n, v[top], self.colour(i)) for i, (n, v) in enumerate(zip(self.stack.names, self.stack.values, strict=True)) if max(v)]
        svg.text(x, y, "at the peak", fill=_theme.MUTED, size=10)
        shown = rows[-9:]
        for name, size, fill in reversed(shown):
            y += 17
            svg.rect(x, y - 9, 10, 10, fill, "#00000033")
            value = format_bytes(size)
            label = "allocated" if self.stack.by == "total" else _theme.word(clean(name))
            svg.text(x + 15, y, shorten(label, _RIGHT - 45 - text_width(value, 11), 11))
            svg.text(WIDTH - 12, y, value, anchor="end", fill=_theme.MUTED)
        if self.stack.reserved:
            y += 17
            svg.line(x, y - 4, x + 10, y - 4, _theme.LINE, 1.6)
            svg.text(x + 15, y, "reserved, highest")
            svg.text(WIDTH - 12, y, format_bytes(self.device.number("peak_reserved_bytes") or max(self.stack.reserved)), anchor="end", fill=_theme.MUTED)


def bounds(known: Facts, device: Device, used: int) -> list[tuple[int, str]]:
    """Limit and capacity, where they are near enough to share the picture."""
    limit, capacity = known.meta.get("limit_bytes"), device.number("capacity_bytes") or known.meta.get("capacity_bytes")
    return [(size, name) for size, name in ((limit, "limit"), (capacity, "capacity")) if isinstance(size, int) and used * 0.5 < size <= used * 1.7]


def peak_words(device: Device, drawn: int) -> str:
    """Name the highest point drawn; where events were left out it may lie below the true peak, and says so."""
    if device.number("peak_allocated_bytes") is None or drawn >= 0.99 * device.peak:
        return f"peak {format_bytes(max(device.peak, drawn))}"
    return f"drawn up to {format_bytes(drawn)} (peak {format_bytes(device.peak)})"


def ticks(high: float, count: int) -> list[int]:
    """Sizes from 0 to ``high`` in about ``count`` steps; a power of two prints round in every binary unit."""
    step = 2 ** max(0, round(math.log2(max(high, 1) / count)))
    return list(range(0, int(high) + 1, step))


def breakdown(device: Device, height: int, width: int = HALF) -> tuple[Svg, str] | None:
    """Draw what held memory at the peak as bars; None where the source doesn't know categories."""
    when = _when(device)
    rows = [(str(c), int(s or 0)) for c, s in device.breakdown.select("category", "size_bytes").iter_rows()] if device.breakdown.height else []
    rows = sorted((r for r in rows if r[1] > 0), key=lambda r: -r[1])
    if not rows:
        return None
    return _bars(
        f"{device.label}: {when}, by what it is for" if device.label else f"{when.capitalize()}, by what it is for",
        [(_theme.word(n), s, _theme.colour(n)) for n, s in rows],
        height,
        width,
    )


def sites(device: Device, stack: Stack, height: int, width: int = HALF) -> tuple[Svg, str] | None:
    """Draw the lines that held most at the peak as bars."""
    if not device.sites.height or not device.sites["site"].drop_nulls().len():
        return None
    when = _when(device)
    names = {n: i for i, n in enumerate(stack.names)} if stack.by == "site" else {}
    rows = []
    for site, function, size in device.sites.select(
        "site", "function" if "function" in device.sites.columns else pl.lit(None).alias("function"), "size_bytes"
    ).iter_rows():
        if size:
            name = "no stack" if site is None else str(site)
            label = clean(f"{name} {function}" if function and function not in name else name)
            rows.append((label, int(size), _theme.colour(name, names[name]) if name in names else ("#7fa8c9" if not names else _theme.OTHER)))
    rows.sort(key=lambda r: -r[1])
    return _bars(f"{device.label}: {when}, by line" if device.label else f"{when.capitalize()}, by line", rows, height, width) if rows else None


def _when(device: Device) -> str:
    return "at the peak" if device.number("peak_allocated_bytes") is not None else "at the end"


def _bars(title: str, rows: list[tuple[str, int, str]], height: int, width: int) -> tuple[Svg, str]:
    room = (height - 34) // 26
    shown, cut = (rows, "") if len(rows) <= room else (rows[:room], f" ({room} of {len(rows)})")
    whole = sum(size for _, size, _ in rows)
    sentence = f"{title}: " + ", ".join(f"{middle(name, 60)} {format_bytes(size)} ({_percent(size / whole)})" for name, size, _ in shown[:8]) + cut + "."
    svg = Svg(width, height, sentence)
    svg.text(12, 20, title + cut, size=13, bold=True)
    for i, (name, size, fill) in enumerate(shown):
        y = 42 + 26 * i
        value = f"{format_bytes(size)} · {_percent(size / whole)}"
        svg.text(12, y, shorten(name, width - 40 - text_width(value, 11), 11))
        svg.text(width - 12, y, value, anchor="end", fill=_theme.MUTED)
        svg.rect(12, y + 4, width - 24, 7, "#eeeff1")
        svg.rect(12, y + 4, max((width - 24) * size / shown[0][1], 1), 7, fill)
    return svg, sentence


def _percent(share: float) -> str:
    return "< 1 %" if share < 0.005 else f"{share:.0%}".replace("%", " %")
