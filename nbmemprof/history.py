"""A history of runs in a folder of the user's: captures as Parquet, and a list that is quick however long it gets."""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof.capture import Capture, load, whole_file
from nbmemprof.errors import CantWrite, NbmemprofError

__all__ = ["RUNS", "captures", "keep", "listed"]

RUNS: dict[str, Any] = {
    "name": pl.String, "title": pl.String, "kind": pl.String, "started": pl.String, "seconds": pl.Float64, "peak_bytes": pl.Int64, "end_bytes": pl.Int64,
    "steps": pl.Float64, "alarms": pl.Int64, "end": pl.String, "origin": pl.String,
}  # fmt: skip
_INDEX = ".runs.json"  # rows that were made once, each with the time and size of what it is of


def keep(capture: Capture, folder: Path, name: str | None = None) -> Path:
    """Write a capture into a folder as Parquet; made if need be.

    Parameters
    ----------
    name
        The time and the capture's title by default; one that is taken gets a number.

    Raises
    ------
    CantWrite
        Where the folder can't be written.
    """
    cell = capture.meta.get("cell")
    title = capture.meta.get("title") or (f"In{cell}" if cell is not None else "run")
    wanted = name or f"{time.strftime('%Y%m%dT%H%M%S')}-{title}"
    words = re.sub(r"[^\w.-]+", "-", wanted).strip("-.") or "run"
    number = 1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while True:  # the folder is made by who gets the name: several processes may write at a time
            target = folder / (words if number == 1 else f"{words}-{number}")
            with suppress(FileExistsError):
                target.mkdir()
                break
            number += 1
        capture.to_parquet(target)
    except OSError as error:
        raise CantWrite(f"{folder} can't take a run: {error.strerror or error}. Give a folder that this process may write to.") from error
    return target


def captures(folder: Path) -> list[Path]:
    """Captures saved into a folder; the folder itself where it is one."""
    if (folder / "meta.json").is_file():
        return [folder]
    found = [path for path in folder.iterdir() if (path.is_dir() and (path / "meta.json").is_file()) or (path.is_file() and path.suffix in (".nbmem", ".pickle", ".pkl"))]
    return sorted(found)


def listed(folder: Path) -> list[dict[str, Any]]:
    """A row (``RUNS``) for each capture of a folder; each is opened once, its row is then kept in the folder."""
    known = _read(folder / _INDEX)
    rows: dict[str, dict[str, Any]] = {}
    fresh = False
    for path in captures(folder):
        before, stamp = known.get(path.name), _stamp(path)
        if isinstance(before, dict) and before.get("stamp") == stamp and isinstance(before.get("row"), dict) and set(before["row"]) == set(RUNS):
            rows[path.name] = before
        else:
            rows[path.name], fresh = {"stamp": stamp, "row": _row(path)}, True
    if fresh and not (folder / "meta.json").is_file():
        with suppress(OSError, NbmemprofError), whole_file(folder / _INDEX) as part:  # a folder that can't be written is listed all the same
            part.write_text(json.dumps(rows))
    return [entry["row"] for entry in rows.values()]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(path: Path) -> list[int]:
    told = (path / "meta.json" if path.is_dir() else path).stat()
    return [told.st_mtime_ns, told.st_size]


def _row(path: Path) -> dict[str, Any]:
    """The row of a capture; one that can't be read says why in ``end``."""
    empty: dict[str, Any] = dict.fromkeys(RUNS) | {"name": path.name, "kind": "capture"}
    try:
        capture = load(path)
        from nbmemprof.analyses.summary import summary

        rows = summary(capture)
    except NbmemprofError as error:
        return empty | {"end": f"not readable: {error}"[:200]}
    meta = capture.meta
    first = rows.sort("device", nulls_last=True).row(0, named=True) if rows.height else {}
    duration = meta.get("duration_us")
    return empty | {
        "title": meta.get("title"), "started": meta.get("started"), "seconds": duration / 1e6 if duration is not None else None,
        "peak_bytes": first.get("peak_allocated_bytes"), "end_bytes": first.get("end_allocated_bytes"), "end": "whole", "origin": meta.get("origin"),
    }  # fmt: skip
