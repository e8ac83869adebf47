"""Folders of runs: what a watch wrote (also while it runs, also after ``kill -9``), and a history of captures."""

from __future__ import annotations

import os
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof import history, schema
from nbmemprof.capture import Capture, load
from nbmemprof.errors import InputRefused, NbmemprofError
from nbmemprof.units import format_bytes, format_count
from nbmemprof.watching import store
from nbmemprof.watching.process import TRENDED, Process, joined
from nbmemprof.watching.trend import judge

__all__ = ["Run", "open_run"]

_TREND = {
    "device": pl.Int64, "rank": pl.Int64, "series": pl.String, "verdict": pl.String, "per": pl.String, "slope_bytes": pl.Float64, "slope_low_bytes": pl.Float64, "slope_high_bytes": pl.Float64,
    "slope_bytes_per_s": pl.Float64, "level_bytes": pl.Float64, "growth_bytes": pl.Float64, "limit_bytes": pl.Float64, "lead_s": pl.Float64, "steps": pl.Float64, "seconds": pl.Float64, "origin": pl.String,
}  # fmt: skip
_SITES = {"rank": pl.Int64, "device": pl.Int64, "process": pl.String, "time_us": pl.Float64, "steps": pl.Float64, "site": pl.String, "size_bytes": pl.Int64, "count": pl.Int64}
_ALARMS = {"rank": pl.Int64, "device": pl.Int64, "process": pl.String, "time_us": pl.Float64, "gauge": pl.String, "level_bytes": pl.Float64, "limit_bytes": pl.Float64, "lead_s": pl.Float64, "text": pl.String}
_UNITS = {"live_blocks": "blocks", "ooms": "times", "retries": "times", "steps": "steps"}


def open_run(folder: str | os.PathLike[str]) -> Run:
    """Open a folder of runs: what :func:`mp.watch` and ``mp.record(history=folder)`` wrote, and captures saved into it (Parquet folders, ``.nbmem``, snapshots).

    Works while the watch runs and after ``kill -9``; nothing in the files is run. Opened again it is newer.

    Parameters
    ----------
    folder
        The folder; nothing is written to it.

    Returns
    -------
    A :class:`Run`: ``runs`` (a row a process or capture), ``trend()``, ``alarms``, ``capture`` with the samples.

    Raises
    ------
    InputRefused
        Where there is no such folder.

    Examples
    --------
    >>> import nbmemprof as mp, tempfile
    >>> folder = tempfile.mkdtemp()
    >>> with mp.watch(folder) as watch:
    ...     watch.step()
    >>> mp.open_run(folder).runs["end"].to_list()
    ['stopped']
    """
    path = Path(folder)
    if not path.is_dir():
        raise InputRefused(f"{path} is not a folder. Give the folder that mp.watch(folder), mp.record(history=folder) or cap.to_parquet(folder/name) wrote.")
    return Run(path)


class Run:
    """A folder of runs; made by :func:`open_run`. ``runs`` lists processes that were watched and captures that were saved, the oldest first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stories = [Process(store.read(folder, name)) for name in store.names(folder)]
        self._stories.sort(key=lambda process: process.unix)
        self._zero = self._stories[0].unix if self._stories else 0.0

    # ------------------------------------------------------------------ frames
    @cached_property
    def runs(self) -> pl.DataFrame:
        """A row a process or capture: ``name title kind started seconds peak_bytes end_bytes steps alarms end origin``.

        Bytes are of the first device in use, else of the host. ``end``: "running", "stopped", or "killed" (it ended without a word).
        """
        rows = [process.row() for process in self._stories]
        rows += history.listed(self.folder)
        return pl.DataFrame(rows, schema=history.RUNS, orient="row").sort("started", "name", nulls_last=True)

    @cached_property
    def alarms(self) -> pl.DataFrame:
        """What was told: ``rank device process time_us gauge level_bytes limit_bytes lead_s text``."""
        rows = [
            {"rank": p.rank, "device": _ordinal(n["device"]), "process": p.story.name, "time_us": self._us(p, n["t"]), **{k: n.get(k) for k in list(_ALARMS)[4:]}}
            for p in self._stories
            for n in p.notes
            if n["k"] == "alarm"
        ]
        return pl.DataFrame(rows, schema=_ALARMS, orient="row")

    @cached_property
    def live_sites(self) -> pl.DataFrame:
        """Live bytes by line at each look, where the watch had ``stacks=True``: ``rank device process time_us steps site size_bytes count``."""
        rows = [
            (p.rank, _ordinal(device), p.story.name, self._us(p, r["t"]), float(r.get("n") or 0), site, int(size), count)
            for p in self._stories
            for r in p.of("sites")
            for device, site, size, count in r["s"]
        ]
        return pl.DataFrame(rows, schema=_SITES, orient="row")

    @cached_property
    def capture(self) -> Capture:
        """All processes as one capture: ``samples`` (thinned where the ring went round: lowest, highest, last), ``marks``, and the tables ``alarms`` and ``live_sites``.

        In a folder without a watch, the newest capture.
        """
        if not self._stories:
            found = history.captures(self.folder)
            if not found:
                raise InputRefused(f"{self.folder} has neither a watch nor a capture. Write one with mp.watch(folder) or cap.to_parquet(folder/name).")
            return load(max(found, key=lambda path: path.stat().st_mtime))
        samples = [self._samples(process) for process in self._stories]
        tables = {"samples": pl.concat(samples), "marks": self._marks(), "alarms": self.alarms, "live_sites": self.live_sites}
        first, last = self._stories[0], self._stories[-1]
        return Capture.build(
            tables, source="watch", origin="measured", device=None, torch=last.head.get("torch"), versions={"python": last.head.get("python"), "torch": last.head.get("torch")},
            limit_bytes={d: v for d, v in (last.head.get("limits") or {}).items() if d != "host"} or None, title=last.head.get("title"), started=first.head.get("started"),
            warnings=["no events: a watch keeps counters. open_run(folder).trend() says what grows", *(text for p in self._stories for text in p.warnings())],
            dropped={"damaged records": sum(p.story.damaged for p in self._stories)} if any(p.story.damaged for p in self._stories) else {},
            peaks=self._peaks(), recording={"seconds": last.seconds, "events": 0, "cost_us": last.cost_s * 1e6, "cost_fraction": last.cost_s / max(last.seconds, 1e-9), "cost_text": "", "stacks": "none"},
        )  # fmt: skip

    def load(self, name: str) -> Capture:
        """A capture of this folder by its ``name`` in ``runs``."""
        found = {path.name: path for path in history.captures(self.folder)}
        if name not in found:
            raise NbmemprofError(f"{self.folder} has no capture {name!r}. It has: {', '.join(sorted(found)) or 'none'}.")
        return load(found[name])

    def add(self, capture: Capture, name: str | None = None) -> Path:
        """Keep a capture in this folder as Parquet; returns where. The name is the time and its title by default."""
        target = history.keep(capture, self.folder, name)
        self.__dict__.pop("runs", None)
        return target

    # ------------------------------------------------------------------ does it grow
    def trend(self, by: str = "gauge", *, trust: float = 1.0, warmup_s: float = 0.0, last_process: bool = True) -> pl.DataFrame:
        """Does it grow, how fast, and when does it meet the limit?

        Parameters
        ----------
        by
            ``gauge``: host memory, memory allocated on each device, and numbers of the program's own; ``site``: live bytes by
            line (``watch(stacks=True)``).
        trust
            How long a trend is carried on, in times that it was seen.
        warmup_s
            Left out at the beginning of each process.
        last_process
            Judge the newest process of each rank alone; else one slope for all of them.

        Returns
        -------
        A row a series, the fastest first: ``device rank series verdict`` (``growing``, ``filling``: ever more slowly, ``flat``, ``falling``, ``unknown``: too
        short) ``per`` ("step" or "second") ``slope_bytes slope_low_bytes slope_high_bytes`` (99 % interval) ``slope_bytes_per_s level_bytes growth_bytes limit_bytes lead_s``
        (until the peaks meet the limit; null: not in sight) ``steps seconds origin``.
        """
        if by not in ("gauge", "site"):
            raise NbmemprofError(f"by={by!r} is not a way to split a watch. Use one of: gauge, site.")
        rows = []
        for rank, processes in self._by_rank(last_process).items():
            for (device, name), series in joined(processes, by).items():
                limits = processes[-1].head.get("limits") or {}
                limit = limits.get(device) if by == "gauge" and name in TRENDED else None
                t = judge(series, limit, trust=trust, last_epoch=last_process, after_s=warmup_s)
                rows.append((
                    _ordinal(device), rank, name, t.verdict, t.per, t.slope, t.low, t.high, t.slope_per_s, t.level_bytes, t.growth_bytes, t.limit_bytes, t.lead_s, t.steps, t.seen_s, "measured",
                ))  # fmt: skip
        frame = pl.DataFrame(rows, schema=_TREND, orient="row").with_columns(pl.col(pl.Float64).fill_nan(None))
        return frame.sort("growth_bytes", "series", descending=[True, False], nulls_last=True)

    def _by_rank(self, last_process: bool) -> dict[int | None, list[Process]]:
        found: dict[int | None, list[Process]] = {}
        for process in self._stories:
            found.setdefault(process.rank, []).append(process)
        return {rank: processes[-1:] if last_process else processes for rank, processes in found.items()}

    # ------------------------------------------------------------------ tables
    def _us(self, process: Process, since_s: float) -> float:
        return (process.unix - self._zero + since_s) * 1e6

    def _samples(self, process: Process) -> pl.DataFrame:
        shift = (process.unix - self._zero) * 1e6
        rows = process.samples()
        device = pl.Series([_ordinal(d) for d in rows["device"]], dtype=pl.Int64)
        columns = {
            "rank": process.rank, "device": device, "kind": pl.Series(["device" if d.isdigit() else "host" for d in rows["device"]], dtype=pl.String),
            "source": pl.Series(["torch" if d.isdigit() else "program" if d == "own" else "process" for d in rows["device"]], dtype=pl.String),
            "time_us": rows["time_s"] * 1e6 + shift, "gauge": rows["gauge"], "value": rows["value"],
            "unit": pl.Series([_UNITS.get(g, "bytes" if g.endswith("_bytes") else "steps" if g.startswith("steps") else "") for g in rows["gauge"]], dtype=pl.String),
        }  # fmt: skip
        return schema.fill("samples", columns, rows.height)

    def _marks(self) -> pl.DataFrame:
        rows: list[tuple[int | None, float, float | None, str, str, float | None]] = []
        for p in self._stories:
            end = self._us(p, p.seconds) if p.state() != "running" else None
            rows.append((p.rank, self._us(p, 0.0), end, "range", f"process {p.head.get('pid')}", None))
            rows += [(p.rank, self._us(p, n["t"]), None, "note", str(n.get("text") or n.get("name")), n.get("lead_s")) for n in p.notes]
        names = ("rank", "time_us", "end_us", "kind", "name", "value")
        frame = pl.DataFrame(rows, schema=dict.fromkeys(names), orient="row")
        return schema.fill("marks", {name: frame[name] for name in names}, frame.height)

    def _peaks(self) -> dict[str, dict[str, Any]]:
        highest: dict[str, dict[str, Any]] = {}
        for process in self._stories:
            for (device, gauge), value in process.highest().items():
                word = {"allocated_peak_bytes": "peak_allocated_bytes", "allocated_bytes": "peak_allocated_bytes", "reserved_bytes": "peak_reserved_bytes"}.get(gauge)
                if device.isdigit() and word:
                    row = highest.setdefault(device, {})
                    row[word] = max(int(value), row.get(word, 0))
        return highest

    # ------------------------------------------------------------------ what a person sees
    def text(self) -> str:
        """What is known, in sentences."""
        lines = [f"{self.folder}: {format_count(len(self._stories))} processes watched, {format_count(len(history.captures(self.folder)))} captures saved"]
        if self._stories:
            last = self._stories[-1]
            row = last.row()
            lines.append(f"{row['name']}: {row['end']}, {last.seconds:.0f} s, {format_count(row['steps'])} steps, {format_bytes(row['end_bytes'])} now, at most {format_bytes(row['peak_bytes'])}")
            for t in self.trend().iter_rows(named=True):
                if t["verdict"] in ("growing", "filling"):
                    unit = "a step" if t["per"] == "step" else "a second"
                    until = f", the limit of {format_bytes(t['limit_bytes'])} is {t['lead_s']:.0f} s away" if t["lead_s"] is not None else ""
                    what = "grows" if t["verdict"] == "growing" else "fills ever more slowly"
                    lines.append(f"  {t['series']} {what}: {format_bytes(t['slope_bytes'])} {unit} ({format_bytes(t['slope_low_bytes'])} to {format_bytes(t['slope_high_bytes'])}){until}")
            lines += [f"  alarm: {text}" for text in self.alarms["text"].tail(3)]
            lines += [f"  {text}" for text in last.warnings()]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return f"<pre>{escape(self.text())}</pre>{self.runs._repr_html_()}"


def _ordinal(device: str) -> int | None:
    return int(device) if str(device).isdigit() else None
