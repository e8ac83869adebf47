"""Read a PyTorch CUDA memory snapshot: a file of any version, its bytes, or the live dict. No code of it is ever run.

The format is that of ``torch.cuda.memory._snapshot`` (``torch/cuda/memory.py``), from the bare list of segments of
torch 1.x and the block ``history`` of torch 2.0 on. What can't be used is left out, counted and named in the warnings.
"""

from __future__ import annotations

import gzip
import mmap
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import polars as pl

from nbmemprof import heap
from nbmemprof.capture import Capture
from nbmemprof.errors import InputRefused
from nbmemprof.sources import _pickle
from nbmemprof.sources._snapshot_rows import File, ObjectFile, TapeFile
from nbmemprof.sources._snapshot_tables import SnapshotTables
from nbmemprof.units import format_bytes, format_count

__all__ = ["INFLATED_LIMIT", "from_bytes", "from_object", "from_path"]

INFLATED_LIMIT = 8 << 30
_RATIO_LIMIT = 400  # a real snapshot with shared stacks deflates to a thirtieth; zeros to a thousandth
_STEP = 16 << 20


Made = tuple[dict[str, pl.DataFrame], dict[str, Any]]  # tables and meta


# ---------------------------------------------------------------------- doors
def from_path(path: str | os.PathLike[str], *, inflated_limit: int = INFLATED_LIMIT, **meta: Any) -> Capture:
    """Read a snapshot file, plain or gzip.

    Parameters
    ----------
    path
        A file written by ``torch.cuda.memory._dump_snapshot``; ``.gz`` of one.
    inflated_limit
        Bytes that a gzip file may unpack to.
    meta
        Goes to the capture's ``meta``; ``rank`` is written to the tables.

    Raises
    ------
    InputRefused
        It is no snapshot, damaged, too large, or a pickle that could run code.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise InputRefused(f"{path} is empty (0 bytes), so it is not a snapshot. Write it again: the program may have been stopped before it had written it.")
            if file.read(2) == b"\x1f\x8b":
                file.seek(0)
                return _build(*_of_pickle(_inflate(file, str(path), inflated_limit), str(path), meta))
            return _build(*_of_pickle(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path), meta))  # unmapped when the last array over it goes
    except OSError as error:
        raise InputRefused(f"{path} can't be read: {error.strerror or error}. Check the path, and that it is a file.") from error


def from_bytes(data: bytes | bytearray, name: str = "the bytes given", *, inflated_limit: int = INFLATED_LIMIT, **meta: Any) -> Capture:
    """Read a snapshot from bytes, plain or gzip; see :func:`from_path`."""
    if not data:
        raise InputRefused(f"{name} are empty (0 bytes), so they are not a snapshot. Read the file that _dump_snapshot wrote.")
    if data[:2] == b"\x1f\x8b":
        import io

        data = _inflate(io.BytesIO(data), name, inflated_limit)
    return _build(*_of_pickle(data, name, meta))


def from_object(snapshot: Mapping[str, Any] | list[Any], **meta: Any) -> Capture:
    """Read what ``torch.cuda.memory._snapshot()`` or ``memory_snapshot()`` returned; see :func:`from_path`."""
    return _build(*_of_file(ObjectFile(snapshot), "the snapshot given", meta))


def _of_pickle(data: Any, name: str, meta: dict[str, Any]) -> Made:
    try:
        tape = _pickle.decode(data, name)
        left = len(tape.data) - tape.used
        warnings = [f"malformed: {format_count(left)} bytes after the end of the pickle were not read"] if left else []
        return _of_file(TapeFile.open(tape), name, {"title": os.path.basename(name)} | meta, warnings)
    except MemoryError as error:
        raise _too_large(name) from error


def _build(tables: dict[str, pl.DataFrame], meta: dict[str, Any]) -> Capture:
    """Follow the heap, once the decoded file is out of memory."""
    try:
        return heap.build(tables, **meta)
    except MemoryError as error:
        raise _too_large("The snapshot") from error


def _too_large(name: str) -> InputRefused:
    return InputRefused(f"{name} needs more memory than this process may have. Record with a smaller max_entries, or open it on a larger machine.")


def _inflate(file: IO[bytes], name: str, limit: int) -> bytes | bytearray:
    """Unpack gzip, several members too, never beyond the limit."""
    whole, read = bytearray(), 0
    unpack = zlib.decompressobj(wbits=31)
    pending = b""
    try:
        while True:
            if not pending:
                pending = file.read(_STEP)
                read += len(pending)
                if not pending:
                    break
            if unpack.eof:
                if not pending.startswith(b"\x1f\x8b"):
                    break  # padding after the last member
                unpack = zlib.decompressobj(wbits=31)
            whole += unpack.decompress(pending, _STEP)
            pending = unpack.unconsumed_tail or unpack.unused_data
            if len(whole) > min(limit, max(64 << 20, read * _RATIO_LIMIT)):
                raise InputRefused(
                    f"{name} is too large when inflated: {format_bytes(read)} of gzip had given {format_bytes(len(whole))} and was not at its end. If you trust it, unpack it with gunzip and open the result."
                )
        while not unpack.eof and (more := unpack.decompress(unpack.unconsumed_tail, _STEP)):
            whole += more
    except (zlib.error, gzip.BadGzipFile) as error:
        raise InputRefused(f"{name} is damaged or corrupt: its gzip data can't be unpacked ({error}). Copy it again.") from error
    if not unpack.eof:
        raise InputRefused(f"{name} is truncated or incomplete: its gzip data ends early. Copy it again, or let the program finish writing it.")
    if whole[:4] == b"PK\x03\x04":
        raise InputRefused(f"{name} is a gzip file of a zip, as an .nbmem file is. Unpack it with gunzip and open the result.")
    if not whole:
        raise InputRefused(f"{name} unpacks to nothing: it is empty, not a snapshot. Write it again: the program may have been stopped before it had written it.")
    return whole


# ---------------------------------------------------------------------- the whole
def _of_file(file: File, name: str, meta: dict[str, Any], warnings: list[str] | None = None) -> Made:
    lists = {key: file.has_list(key) for key in ("segments", "device_traces")}
    if not any(lists.values()):
        raise InputRefused(f"{name} is not a snapshot: it has no list 'segments' and no list 'device_traces'. Give what torch.cuda.memory._dump_snapshot or _snapshot() made.")
    reader = SnapshotTables(file, meta.pop("rank", None), list(warnings or []))
    for key, is_list in lists.items():
        if is_list is False:
            reader.warnings.append(f"malformed: {key!r} is not a list and was left out")
    tables, times = reader.events()
    tables |= reader.heap()
    if not reader.rows_seen and reader.dropped:
        raise InputRefused(f"{name} is not a snapshot: of the {sum(reader.dropped.values())} rows in its lists none is a segment or an event. Give what torch.cuda.memory._dump_snapshot made.")
    tables |= reader.marks(tables["events"], times)
    stacks = reader.stacks(tables)
    reader.judge(tables, stacks)
    settings = file.top("allocator_settings")
    settings = _settings(settings) if isinstance(settings, Mapping) else {}
    conf = settings.get("PYTORCH_CUDA_ALLOC_CONF", settings.get("PYTORCH_ALLOC_CONF"))
    known: dict[str, Any] = {
        "origin": "measured", "source": "torch_snapshot", "conf": conf if isinstance(conf, str) else None, "settings": settings, "start_unix_us": reader.start,
        "warnings": reader.warnings, "dropped": reader.dropped,
    }  # fmt: skip
    return tables | {"stacks": stacks}, known | meta


def _settings(found: Mapping[Any, Any], depth: int = 4) -> dict[str, Any]:
    """Texts, flags, sensible numbers and dicts of them."""
    kept: dict[str, Any] = {}
    for key, value in list(found.items())[:1000]:
        if isinstance(value, Mapping):
            kept[str(key)] = _settings(value, depth - 1) if depth else {}
        elif value is None or isinstance(value, (str, bool)) or (isinstance(value, (int, float)) and abs(value) < 1 << 53):
            kept[str(key)] = value
    return kept
