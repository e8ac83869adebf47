"""What one process wrote, as frames and series: readings, thinned ones before them, notes, and how it ended."""

from __future__ import annotations

import json
import math
import socket
import time
from functools import cached_property
from typing import Any

import polars as pl

from nbmemprof.watching.series import Series
from nbmemprof.watching.store import Story, start_of

__all__ = ["TRENDED", "Process", "joined"]

TRENDED = ("rss_bytes", "allocated_bytes")  # of what is read, that which a leak makes grow


class Process:
    """What one process wrote."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.head: dict[str, Any] = story.state.get("head") or next(iter(self.of("begin")), {})
        kept = {json.dumps(n, sort_keys=True): n for n in [*story.state.get("notes", ()), *self.of("alarm"), *self.of("mark")]}
        self.notes = sorted(kept.values(), key=lambda n: float(n["t"]))
        self._from = min((float(r["t"]) for r in self.of("s")), default=math.inf)
        self.thinned = {(str(d), str(g)): Series.load(made) for d, g, made in story.state.get("series", ())}

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Records of a kind, in order."""
        return [record for record in self.story.records if record.get("k") == kind]

    @property
    def unix(self) -> float:
        """When it began (Unix time); of a process whose head is lost, by its file's name."""
        begun = self.head.get("unix")
        return float(begun) if begun is not None else float(self.story.name.partition("-")[0] or 0) / 1000

    @property
    def rank(self) -> int | None:
        """Rank of the process; None where ranks were not set."""
        return self.head.get("rank")

    @cached_property
    def seconds(self) -> float:
        """From its begin to its last word."""
        return max([float(r["t"]) for r in self.story.records if "t" in r] + [float(s.rows["time_s"][-1]) for s in self.thinned.values() if len(s)], default=0.0)

    @property
    def cost_s(self) -> float:
        """CPU seconds that the watch took."""
        return float(next((r["cost_s"] for r in self.of("end")), self.story.state.get("cost_s", 0.0)))

    def state(self) -> str:
        """``stopped``, ``running`` or ``killed``."""
        if self.of("end"):
            return "stopped"
        quiet = time.time() - self.story.changed_s
        if self.head.get("host") == socket.gethostname() and self.head.get("start") is not None:
            return "running" if start_of(int(self.head["pid"])) == self.head["start"] else "killed"
        return "running" if quiet < 10 * float(self.head.get("interval_s", 1.0)) + 60 else "killed"

    def warnings(self) -> list[str]:
        """What is not whole, in the capture's words."""
        found = []
        if self.state() == "killed":
            found.append(f"history truncated: {self.story.name} ended without a word (killed) after {self.seconds:.1f} s; what it wrote until then is here")
        if self.story.damaged:
            found.append(f"malformed: {self.story.damaged} records of {self.story.name} are damaged and were left out")
        if self.story.state:
            found.append(f"history truncated: of {self.story.name} the first {min(self._from, self.seconds):.0f} s are thinned to lowest, highest and last values (ring_bytes)")
        return found

    @cached_property
    def _long(self) -> pl.DataFrame:
        """Readings as they stand in the segments."""
        rows: dict[str, list[Any]] = {"device": [], "gauge": [], "time_s": [], "steps": [], "value": []}
        for record in self.of("s"):
            steps = float(record.get("n") or 0)
            for device, gauges in record["g"].items():
                for gauge, value in gauges.items():
                    for column, item in zip(rows.values(), (device, gauge, record["t"], steps, value), strict=True):
                        column.append(item)
            for name, value in {"steps": steps, **{f"steps {label}": n for label, n in record.get("l", {}).items()}}.items():
                for column, item in zip(rows.values(), ("steps", name, record["t"], steps, value), strict=True):
                    column.append(item)
        types = {"device": pl.String, "gauge": pl.String, "time_s": pl.Float64, "steps": pl.Float64, "value": pl.Float64}
        return pl.DataFrame({name: pl.Series(name, column, dtype=types[name], strict=False) for name, column in rows.items()})

    def samples(self) -> pl.DataFrame:
        """``device gauge time_s value``: each reading; before those, lowest, highest and last of each stretch."""
        parts = [self._long.drop("steps")]
        for (device, gauge), series in self.thinned.items():
            early = series.rows["time_s"] < self._from
            for what in ("low", "high", "last"):
                parts.append(
                    pl.DataFrame({"time_s": series.rows["time_s"][early], "value": series.rows[what][early]}).select(
                        pl.lit(device).alias("device"), pl.lit(gauge).alias("gauge"), "time_s", "value"
                    )
                )
        for series in list(self.thinned.values())[:1]:
            early = series.rows["time_s"] < self._from
            steps = pl.DataFrame({"time_s": series.rows["time_s"][early], "value": series.rows["steps"][early]})
            parts.append(steps.select(pl.lit("steps").alias("device"), pl.lit("steps").alias("gauge"), "time_s", "value"))
        return pl.concat(parts).sort("time_s", maintain_order=True)

    def highest(self) -> dict[tuple[str, str], float]:
        """The highest value of each gauge, thinned ones too."""
        found = {(d, g): float(v) for d, g, v in self._long.group_by("device", "gauge").agg(pl.col("value").max()).iter_rows() if v is not None}
        for key, series in self.thinned.items():
            if len(series):
                found[key] = max(found.get(key, 0.0), float(series.rows["high"].max()))
        return found

    def series(self) -> dict[tuple[str, str], Series]:
        """One series a gauge, for the trend: thinned rows and the readings after them."""
        found = {}
        detail = self._long.filter(pl.col("device") != "steps").partition_by("device", "gauge", as_dict=True, maintain_order=True)
        for device, gauge in dict.fromkeys([*self.thinned, *((str(d), str(g)) for d, g in detail)]):
            rows, kept = detail.get((device, gauge), self._long.head(0)), self.thinned.get((device, gauge))
            series = Series.load(kept.dump()) if kept is not None else Series(float(self.head.get("interval_s", 1.0)))
            last = float(series.rows["time_s"][-1]) if len(series) else -1.0
            fresh = rows.filter(pl.col("time_s") > last)
            series.extend(fresh["time_s"].to_numpy(), fresh["value"].to_numpy(), fresh["steps"].to_numpy())
            found[device, gauge] = series
        return found

    def row(self) -> dict[str, Any]:
        """Its row in ``runs``."""
        top, last = self.highest(), {key: float(series.rows["last"][-1]) for key, series in self.thinned.items() if len(series)}
        last["steps", "steps"] = max((float(series.rows["steps"][-1]) for series in self.thinned.values() if len(series)), default=0.0)
        for device, gauge, value in self._long.group_by("device", "gauge", maintain_order=True).agg(pl.col("value").last()).iter_rows():
            last[device, gauge] = value
        device = min((d for d, _ in last if d.isdigit()), default="host")
        gauge = "allocated_bytes" if device != "host" else "rss_bytes"
        peak = max((top.get((device, name), 0.0) for name in (gauge, "allocated_peak_bytes")), default=0.0)
        return {
            "name": self.story.name, "title": self.head.get("title") or self.head.get("script"), "kind": "watch", "started": self.head.get("started"), "seconds": self.seconds,
            "peak_bytes": int(peak) or None, "end_bytes": int(last[device, gauge]) if (device, gauge) in last else None, "steps": last.get(("steps", "steps")),
            "alarms": sum(n["k"] == "alarm" for n in self.notes), "end": self.state(), "origin": "measured",
        }  # fmt: skip


def joined(processes: list[Process], by: str) -> dict[tuple[str, str], Series]:
    """One series a name over several processes, an epoch each."""
    found: dict[tuple[str, str], list[Series]] = {}
    for process in processes:
        made = process.series() if by == "gauge" else _site_series(process)
        for (device, name), series in made.items():
            if by == "site" or name in TRENDED or device == "own":
                found.setdefault((device, name), []).append(series)
    joined = {}
    for key, many in found.items():
        whole = many[-1]
        for number, series in enumerate(many):
            series.rows["epoch"] = series.rows["epoch"] * 0 + number
        whole.rows = {name: pl.concat([pl.Series(s.rows[name]) for s in many]).to_numpy() for name in whole.rows}
        joined[key] = whole
    return joined


def _site_series(process: Process) -> dict[tuple[str, str], Series]:
    found: dict[tuple[str, str], Series] = {}
    for record in process.of("sites"):
        for device, site, size, _ in record["s"]:
            series = found.setdefault((str(device), str(site)), Series(float(process.head.get("interval_s", 1.0))))
            series.add(float(record["t"]), float(size), float(record.get("n") or 0))
    return found
