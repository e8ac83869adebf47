"""Tries that ``tests/gpu/record_max_batch.py`` recorded on an H200, read back as captures and streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof import heap, schema
from nbmemprof.capture import Capture
from nbmemprof.searching.stream import Stream
from nbmemprof.searching.trying import Room

FOLDER = Path(__file__).parents[1] / "fixtures" / "h200" / "max_batch"


def capture(name: str, number: int, folder: Path = FOLDER) -> Capture:
    """The capture of a try."""
    tables = {}
    for table in ("events", "segments", "blocks", "marks"):
        path = folder / f"{name}-{number}-{table}.parquet"
        if path.exists():
            frame = pl.read_parquet(path)
            tables[table] = schema.fill(table, {c: frame[c] for c in frame.columns if c in schema.TABLES[table]}, frame.height)
    return heap.build(tables, **json.loads((folder / f"{name}-{number}-meta.json").read_text()))


def told(name: str, folder: Path = FOLDER) -> dict[str, Any]:
    """What the ways answered, and what fresh processes said."""
    return json.loads((folder / f"{name}.json").read_text())


def tries(name: str, folder: Path = FOLDER) -> list[tuple[dict[str, Any], Stream | None, Room]]:
    """Each try whose requests are kept: its row, its requests, what there was."""
    found = told(name, folder)["nbmemprof"]
    kept = [(row, Room(*room)) for row, room in zip(found["log"], found["rooms"], strict=True) if (folder / f"{name}-{row['number']}-events.parquet").exists()]
    return [(row, Stream.of(capture(name, row["number"], folder), row["batch"], complete=row["fits"]), room) for row, room in kept]
