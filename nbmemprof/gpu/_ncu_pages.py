"""Reads what ``ncu --csv`` prints (2025.3): the page ``raw``, a row a launch, and the page ``source``, machine instructions under their source lines."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof.analyses.kernel_lines import SCHEMA
from nbmemprof.errors import NotRecording
from nbmemprof.gpu._launches import Launch, Triple
from nbmemprof.gpu._strides import stride_of

__all__ = ["kernels", "lines"]

_KEYS = ("kernel_id", "name", "file", "line", "text", "space", "operation", "width_bytes")
# column of the page -> ours
_SUMS = {
    "Instructions Executed": "instructions",
    "L2 Theoretical Sectors Global": "sectors",
    "L2 Theoretical Sectors Global Ideal": "ideal_sectors",
    "L1 Wavefronts Shared": "wavefronts",
    "L1 Wavefronts Shared Ideal": "ideal_wavefronts",
    "# Samples": "stall_samples",
}
_UNREADABLE = "<Unable to open source file>"


def kernels(text: str, wanted: Sequence[str]) -> tuple[list[dict[str, float]], list[Launch], str | None]:
    """Counters and launches of the page ``raw``, and the device's name.

    Raises
    ------
    NotRecording
        There is no table in it.
    """
    table = list(csv.reader(line for line in io.StringIO(text) if line.startswith('"')))  # other lines are ncu's own remarks
    if len(table) < 3:
        raise NotRecording(f"ncu's report holds no kernel ({text.strip()[:200] or 'it is empty'}). Give a function that launches one.")
    head = table[0]
    rows, launches, device = [], [], None
    for line in table[2:]:  # the second holds units
        row = dict(zip(head, line, strict=False))
        rows.append({name: value for name in wanted if (value := _number(row.get(name))) is not None})
        launches.append(Launch(row["Kernel Name"], _triple(row["Grid Size"]), _triple(row["Block Size"]), None, int(_number(row.get("Stream")) or 0), ()))
        device = row.get("device__attribute_display_name") or device
    return rows, launches, device


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _triple(text: str) -> Triple | None:
    found = [int(part) for part in re.findall(r"\d+", text)]
    return (found[0], found[1], found[2]) if len(found) == 3 else None


def lines(text: str, launches: Sequence[Launch], sources: Path | None = None) -> pl.DataFrame:
    """Memory instructions of the page ``source``, summed a kernel, line, space, operation and width.

    Parameters
    ----------
    launches
        The kernels in launch order; the page has one section or more a launch, in that order.
    sources
        Folder below which sources lie that ncu could not open itself.
    """
    found = [row | {"kernel_id": number, "name": launches[number].name if number < len(launches) else row["function"]} for number, row in _instructions(text, sources)]
    frame = pl.DataFrame(found, schema={**SCHEMA, "function": pl.String}, orient="row").drop("function")
    summed = frame.group_by(*_KEYS, maintain_order=True).agg(pl.col(*_SUMS.values()).sum())
    strides = [_stride(row, launches, sources) for row in summed.iter_rows(named=True)]
    return summed.with_columns(pl.Series("stride", strides, dtype=pl.String)).select(*SCHEMA)


def _stride(row: dict[str, Any], launches: Sequence[Launch], sources: Path | None) -> str | None:
    block = launches[row["kernel_id"]].block if row["kernel_id"] < len(launches) else None
    source = _source_of(row["file"], sources)
    if block is None or not source or row["operation"] not in ("load", "store") or row["space"] not in ("global", "shared") or not row["instructions"]:
        return None
    each = row["wavefronts" if row["space"] == "shared" else "sectors"] / row["instructions"]
    return stride_of(source, row["line"], operation=row["operation"], space=row["space"], width_bytes=row["width_bytes"], block=block, each=each)


def _instructions(text: str, sources: Path | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every load and store with its line: (number of the launch, row)."""
    number, file, function, line, code = -1, "", "", None, ""
    head: list[str] = []
    seen: set[str] = set()
    told: set[str] = set()  # addresses: ncu tells some instructions twice
    for cells in csv.reader(io.StringIO(text)):
        if not cells:
            continue
        if cells[0] == "File Path":
            file, head = cells[1], []
        elif cells[0] == "Function Name":
            if cells[1] != function or file in seen:
                number, seen, told = number + 1, set(), set()
            function = cells[1]
            seen.add(file)
        elif cells[0] == "Line No":
            head = cells
        elif head and cells[0].isdigit():
            line, code = int(cells[0]), cells[1]
            if code == _UNREADABLE:
                code = _line_of(file, line, sources)
        elif head and len(cells) == len(head) and cells[2] not in told:
            told.add(cells[2])
            row = dict(zip(head, cells, strict=True))
            if row.get("Address Space", "-") not in ("", "-") and line is not None:
                yield number, {
                    "function": function, "file": file, "line": line, "text": code.strip(), "space": row["Address Space"].lower(), "operation": row["Access Operation"].lower(),
                    "width_bytes": (int(_number(row["Access Size"]) or 0)) // 8, **{ours: int(_number(row.get(theirs)) or 0) if theirs in row else None for theirs, ours in _SUMS.items()},
                }  # fmt: skip


def _source_of(file: str, sources: Path | None) -> str:
    """Text of a source that lies somewhere below ``sources`` under the same name, or at its own path."""
    found = next(iter(sources.rglob(Path(file).name)), None) if sources is not None else None
    for path in (found, Path(file)):
        try:
            if path is not None:
                return path.read_text(errors="replace")
        except OSError:
            continue
    return ""


def _line_of(file: str, line: int, sources: Path | None) -> str:
    rows = _source_of(file, sources).splitlines()
    return rows[line - 1] if 0 < line <= len(rows) else ""
