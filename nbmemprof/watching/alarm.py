"""An alarm: memory grows towards its limit, in numbers and in a sentence."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

from nbmemprof.units import format_bytes, format_count
from nbmemprof.watching.trend import Trend

__all__ = ["Alarm"]


@dataclass(frozen=True)
class Alarm:
    """Memory grows towards the limit: what, how fast, and how long it lasts.

    ``text`` is the whole as a sentence. ``device`` is ``"0"``, ``"1"``, ``"host"``, or ``"own"`` for a gauge of the program's; ``time_s`` counts
    from the watch's start. Levels and slopes are bytes; ``slope_bytes_per_step`` and ``lead_steps`` are None where no steps were counted.
    """

    text: str
    device: str
    gauge: str
    time_s: float
    level_bytes: float
    limit_bytes: float
    slope_bytes_per_s: float
    slope_bytes_per_step: float | None
    lead_s: float
    lead_steps: float | None
    sites: list[tuple[str, float]] = field(default_factory=list)  # lines that grew most and by how many bytes, where stacks are recorded

    @classmethod
    def of(cls, device: str, gauge: str, trend: Trend, time_s: float, sites: list[tuple[str, float]]) -> Self:
        """Make the alarm of a trend that meets its limit."""
        return cls(
            text=_sentence(device, gauge, trend, sites), device=device, gauge=gauge, time_s=time_s, level_bytes=trend.level_bytes, limit_bytes=float(trend.limit_bytes or 0),
            slope_bytes_per_s=trend.slope_per_s, slope_bytes_per_step=trend.slope if trend.per == "step" else None, lead_s=float(trend.lead_s or 0), lead_steps=trend.lead_steps,
            sites=sites,
        )  # fmt: skip


def _sentence(device: str, gauge: str, trend: Trend, sites: list[tuple[str, float]]) -> str:
    where = {"host": "host memory of this process", "own": gauge}.get(device, f"memory allocated on device {device}")
    per = f"{format_bytes(trend.slope)} a step" if trend.per == "step" else f"{format_bytes(trend.slope * 60)} a minute"
    text = f"{where} is at {format_bytes(trend.level_bytes)} and grows by {per}; its peaks meet the limit of {format_bytes(trend.limit_bytes)} in about {_duration(trend.lead_s)}"
    if trend.lead_steps is not None:
        text += f" ({format_count(trend.lead_steps)} steps)"
    if sites:
        text += "; lines that grew most: " + ", ".join(f"{site} (+{format_bytes(size)})" for site, size in sites)
    return text + "."


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "an unknown time"
    for unit, length in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds"
