"""A capture: a handful of tidy tables and what is known about where they come from."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import polars as pl

from nbmemprof import schema
from nbmemprof.errors import CantWrite, InputRefused, NbmemprofError
from nbmemprof.units import format_count

__all__ = ["Capture", "Tables", "load"]

META_KEYS = ("origin", "source", "device", "capacity_bytes", "limit_bytes", "conf", "torch", "versions", "warnings", "dropped")
_OTHER_FILES = {
    ".html": "a page is written by cap.to_html(path)",
    ".parquet": "Parquet is a folder of tables, written by cap.to_parquet(folder)",
    **dict.fromkeys((".pickle", ".pkl", ".pt", ".pth"), "a pickle is what torch writes; this package reads it and writes none"),
    **dict.fromkeys((".png", ".svg", ".pdf", ".json", ".csv", ".gz"), "it writes the tables of a capture"),
}
# how files begin that are given by mistake
_BEGINNINGS = {
    b"\x89PNG": "a PNG picture", b"\xff\xd8\xff": "a JPEG picture", b"%PDF": "a PDF", b"<!do": "an HTML page", b"<!DO": "an HTML page", b"<htm": "an HTML page",
    b"PAR1": "a single Parquet file (cap.to_parquet writes a folder of them: give the folder)", b"ARRO": "an Arrow file", b"\x7fELF": "a program",
}  # fmt: skip
_LIMIT_META = 16 << 20
_LIMIT_MEMBER = 64 << 30
_LIMIT_MEMBERS = 256


class Tables(dict[str, pl.DataFrame]):
    """Table name to frame. A value may be made on first use and is then kept."""

    def __init__(self, frames: Mapping[str, pl.DataFrame], lazy: Mapping[str, Callable[[], pl.DataFrame]] | None = None) -> None:
        super().__init__(frames)
        self._lazy = dict(lazy or {})
        for name in schema.TABLES:
            if not super().__contains__(name) and name not in self._lazy:
                super().__setitem__(name, schema.empty(name))

    def __missing__(self, name: str) -> pl.DataFrame:
        if name not in self._lazy:
            raise KeyError(name)
        frame = self._lazy[name]()
        super().__setitem__(name, frame)
        del self._lazy[name]
        return frame

    def names(self) -> list[str]:
        """Names in the schema's order, then those that the schema doesn't know."""
        here = dict.fromkeys([*self._lazy, *super().keys()])
        return [n for n in schema.TABLES if n in here] + sorted(n for n in here if n not in schema.TABLES)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._lazy

    def keys(self) -> Any:  # noqa: D102 - as dict's
        return self.names()

    def values(self) -> Any:  # noqa: D102 - as dict's
        return [self[n] for n in self.names()]

    def items(self) -> Any:  # noqa: D102 - as dict's
        return [(n, self[n]) for n in self.names()]

    def get(self, name: str, default: Any = None) -> Any:  # noqa: D102 - as dict's
        return self[name] if name in self else default

    def is_ready(self, name: str) -> bool:
        """Whether a table has been made already."""
        return super().__contains__(name)


@dataclass(frozen=True, eq=False, repr=False)
class Capture:
    """What one recording, file, replay or prediction brought home: ``tables`` and ``meta``.

    ``tables`` are those of :mod:`nbmemprof.schema`; each is an attribute too. ``meta`` has ``origin
    source device capacity_bytes limit_bytes conf torch versions warnings dropped`` and may have more.
    The value is not changed after it was made; ``allocations`` is derived on first use and kept.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> address = device.malloc("3MiB")
    >>> capture = mp.load(device.snapshot())
    >>> capture.blocks.filter(state="active_allocated")["size_bytes"].to_list()
    [3145728]
    """

    tables: Tables
    meta: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def build(cls, tables: Mapping[str, pl.DataFrame], lazy: Mapping[str, Callable[[], pl.DataFrame]] | None = None, **meta: Any) -> Capture:
        """Check the tables, complete them with empty ones, and set up what is derived.

        Parameters
        ----------
        tables
            By name; those of :mod:`nbmemprof.schema` must fit it, others are kept as they are.
        lazy
            Tables that are made when they are first asked for.
        meta
            What the capture's ``meta`` has beside its defaults (origin ``measured``).

        Raises
        ------
        NbmemprofError
            For a table that does not fit the schema, or an origin that does not exist.
        """
        for name, frame in tables.items():
            if name in schema.TABLES:
                schema.check(name, frame)
        origin = meta.get("origin", "measured")
        if origin not in schema.ORIGINS:
            raise NbmemprofError(f"{origin!r} is not an origin. Use one of: {', '.join(schema.ORIGINS)}.")
        whole: dict[str, Any] = dict.fromkeys(META_KEYS) | {"origin": origin, "warnings": [], "dropped": {}, "versions": {}} | meta
        thunks = dict(lazy or {})
        capture = cls(Tables(tables, thunks), whole)
        if "allocations" not in tables and "allocations" not in thunks:
            dict.pop(capture.tables, "allocations", None)
            capture.tables._lazy["allocations"] = lambda: _derive(capture)
        return capture

    def __getattr__(self, name: str) -> pl.DataFrame:
        tables = self.__dict__.get("tables")
        if tables is not None and not name.startswith("_") and name in tables:
            frame: pl.DataFrame = tables[name]
            return frame
        raise AttributeError(f"A capture has no {name!r}. Its tables: {', '.join(tables or schema.TABLES)}.")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.tables]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Capture):
            return NotImplemented
        return self is other or (
            self.meta == other.meta and list(self.tables) == list(other.tables) and all(self.tables[n].equals(other.tables[n]) for n in self.tables)
        )

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {format_count(frame.height)}" for name, frame in dict.items(self.tables) if frame.height)
        return f"<Capture {self.meta.get('origin')} by {self.meta.get('source')}: {rows or 'empty'}>"

    # ------------------------------------------------------------------ what a person sees
    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        from nbmemprof.views import first

        return first.bundle(self)

    def show(self) -> None:
        """Display the first view in a notebook, print it elsewhere."""
        from nbmemprof.views import first

        first.show(self)

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one HTML page that needs nothing from outside (below 2 MB); returns its path."""
        from nbmemprof.views import report

        return report.write(self, Path(path))

    # ------------------------------------------------------------------ files
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a ``.nbmem`` file: a stored zip of Arrow IPC members and ``meta.json``; returns its path.

        The file appears whole or not at all.

        Raises
        ------
        CantWrite
            For a suffix that stands for something else (``.html``, ``.parquet``, ``.pickle``), or a path that can't be written.
        """
        suffix = Path(path).suffix.lower()
        if not str(path) or suffix in _OTHER_FILES:
            what = _OTHER_FILES.get(suffix, "cap.save(path) writes an .nbmem file")
            raise CantWrite(f"{str(path)!r} can't be what save() writes: {what}. Use cap.save('run.nbmem').")
        with whole_file(path) as part, zipfile.ZipFile(part, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            archive.writestr("meta.json", json.dumps({"schema": schema.SCHEMA_VERSION, "tables": list(self.tables), "meta": self.meta}, default=str))
            for name, frame in self.tables.items():
                with archive.open(f"{name}.arrow", "w", force_zip64=True) as member:
                    frame.write_ipc(member, compression="lz4")
        return Path(path)

    def to_parquet(self, folder: str | os.PathLike[str]) -> Path:
        """Write a folder with one Parquet file a table and ``meta.json``; returns its path.

        Raises
        ------
        CantWrite
            Where the folder can't be made.
        """
        target = Path(folder)
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CantWrite(f"{target} can't be made a folder: {error.strerror or error}. Give a folder that is there or can be made.") from error
        for name, frame in self.tables.items():
            frame.write_parquet(target / f"{name}.parquet")
        (target / "meta.json").write_text(json.dumps({"schema": schema.SCHEMA_VERSION, "tables": list(self.tables), "meta": self.meta}, default=str))
        return target


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to; when the block ends well it becomes the file, else nothing is left of it.

    Raises
    ------
    CantWrite
        Where the file's folder is not there, or where the path is a folder itself.
    """
    target = Path(path)
    if target.is_dir():
        raise CantWrite(f"{target} is a folder. Give the name of a file in it.")
    if not target.parent.is_dir():
        raise CantWrite(f"{target} can't be written: the folder {target.parent} is not there. Make it first.")
    part = target.with_name(target.name + ".part")
    try:
        yield part
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _derive(capture: Capture) -> pl.DataFrame:
    from nbmemprof import heap

    return heap.allocations(capture)


def load(source: str | os.PathLike[str] | bytes | IO[bytes] | Mapping[str, Any] | list[Any], **options: Any) -> Capture:
    """Open a torch snapshot (any version, pickle protocol 2 to 5, gzip), a ``.nbmem`` file or a folder of Parquet.

    Never runs code from the file.

    Parameters
    ----------
    source
        A path, the bytes, an open binary file, or a snapshot that is a dict or a list already.
    options
        For snapshots: ``inflated_limit``, bytes that a gzip file may unpack to; all others go to the capture's ``meta`` (``rank`` to its tables).

    Returns
    -------
    A :class:`Capture`. What a snapshot lacks or contradicts itself in stands in ``meta["warnings"]``.

    Raises
    ------
    InputRefused
        What the input is not, or what in it is unsafe or damaged, and what to do.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> address = device.malloc("3MiB")
    >>> mp.load(device.snapshot()).events["action"].to_list()
    ['segment_alloc', 'alloc']
    """
    from nbmemprof.sources import torch_snapshot

    if isinstance(source, (Mapping, list)):
        return torch_snapshot.from_object(source, **options)
    if isinstance(source, (bytes, bytearray, memoryview)):
        data = bytes(source)
        return (
            _load_zip(io.BytesIO(data), "the bytes given") if data[:4] == b"PK\x03\x04" else torch_snapshot.from_bytes(data, name="the bytes given", **options)
        )
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        if not str(source):
            raise InputRefused("The path is empty. Give the name of a snapshot, an .nbmem file or a folder of Parquet.")
        try:
            if path.is_dir():
                return _load_folder(path)
            with path.open("rb") as file:
                head = file.read(4)
        except (OSError, ValueError) as error:
            raise InputRefused(f"{str(path)[:200]!r} can't be opened: {getattr(error, 'strerror', None) or error}. Check the path.") from error
        if head in _BEGINNINGS or head[:3] in _BEGINNINGS:
            raise InputRefused(f"{path} is {_BEGINNINGS.get(head) or _BEGINNINGS[head[:3]]}, not a snapshot or capture. Give what torch.cuda.memory._dump_snapshot or cap.save wrote.")
        return _load_zip(path, str(path)) if head == b"PK\x03\x04" else torch_snapshot.from_path(path, **options)
    if hasattr(source, "read"):
        data = source.read()
        if not isinstance(data, bytes):
            raise InputRefused("The file was opened as text. Open it with mode 'rb'.")
        return load(data, **options)
    raise InputRefused(f"A {type(source).__name__} is not something to load. Give a path, bytes, a binary file, or a snapshot's dict.")


def _meta(text: bytes, where: str) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputRefused(f"{where}: meta.json is damaged ({error}). Save the capture again.") from error
    if not isinstance(head, dict) or not isinstance(head.get("meta"), dict) or not isinstance(head.get("schema"), int):
        raise InputRefused(f"{where}: meta.json is not a capture's. Give what cap.save('run.nbmem') wrote.")
    if head["schema"] > schema.SCHEMA_VERSION:
        raise InputRefused(
            f"{where} was written with schema version {head['schema']}; this nbmemprof reads up to {schema.SCHEMA_VERSION}. Install a newer nbmemprof."
        )
    meta: dict[str, Any] = head["meta"]
    if meta.get("origin") not in schema.ORIGINS or not isinstance(meta.get("warnings"), list) or not isinstance(meta.get("dropped"), dict):
        raise InputRefused(f"{where}: meta.json is not a capture's (origin {meta.get('origin')!r}). Save the capture again.")
    return meta


def _load_zip(file: Path | IO[bytes], where: str) -> Capture:
    try:
        with zipfile.ZipFile(file) as archive:
            infos = {i.filename: i for i in archive.infolist()}
            if len(infos) > _LIMIT_MEMBERS:
                raise InputRefused(f"{where} has {len(infos)} members; a capture has a few: it is not an .nbmem file. Give what cap.save('run.nbmem') wrote.")
            if any(name.endswith("data.pkl") for name in infos):
                raise InputRefused(f"{where} was written by torch.save: weights or other tensors, with no history of memory. A snapshot is what torch.cuda.memory._dump_snapshot writes.")
            if "meta.json" not in infos:
                raise InputRefused(f"{where} is a zip without meta.json: not an .nbmem file. Save a capture with cap.save('run.nbmem').")
            for info in infos.values():
                limit = _LIMIT_META if info.filename == "meta.json" else _LIMIT_MEMBER
                if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.file_size > limit:
                    raise InputRefused(f"{where}: the member {info.filename!r} is not stored as cap.save stores it. Save the capture again.")
            meta = _meta(archive.read("meta.json"), where)
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, RuntimeError, ValueError, NotImplementedError, OverflowError, MemoryError) as error:
        raise InputRefused(f"{where} is damaged or incomplete ({error}). Save or copy it again.") from error
    names = [n.removesuffix(".arrow") for n in infos if n.endswith(".arrow")]
    lacking = [n for n in schema.TABLES if n not in names]
    if lacking:
        raise InputRefused(f"{where} lacks the table {lacking[0]!r}. Save or copy it again.")

    def member(name: str) -> Callable[[], pl.DataFrame]:
        return lambda: _checked(name, where, lambda: pl.read_ipc(_read_member(file, name, where)))

    return Capture.build({}, {name: member(name) for name in names}, **meta)


def _read_member(file: Path | IO[bytes], name: str, where: str) -> bytes:
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.read(f"{name}.arrow")  # zipfile compares the checksum
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, KeyError, RuntimeError, ValueError, MemoryError) as error:
        raise InputRefused(f"{where}: the table {name!r} is damaged ({error}). Save or copy it again.") from error


def _load_folder(path: Path) -> Capture:
    file = path / "meta.json"
    if not file.is_file() or file.stat().st_size > _LIMIT_META:
        raise InputRefused(f"{path} has no meta.json of a capture. Write the folder with cap.to_parquet(folder); a folder of runs is opened by mp.open_run.")
    meta = _meta(file.read_bytes(), str(path))
    names = sorted(p.stem for p in path.glob("*.parquet"))
    lacking = [n for n in schema.TABLES if n not in names]
    if lacking:
        raise InputRefused(f"{path} lacks the table {lacking[0]!r}. Write it again with cap.to_parquet(folder).")

    def table(name: str) -> Callable[[], pl.DataFrame]:
        return lambda: _checked(name, str(path), lambda: pl.read_parquet(path / f"{name}.parquet"))

    return Capture.build({}, {name: table(name) for name in names}, **meta)


def _checked(name: str, where: str, read: Callable[[], pl.DataFrame]) -> pl.DataFrame:
    try:
        frame = read()
        if name in schema.TABLES:
            frame = frame.cast({n: t for n, t in schema.dtypes(name).items() if n in frame.columns and frame.schema[n] != t and t == pl.Categorical})
            schema.check(name, frame)
    except InputRefused:
        raise
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, NbmemprofError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputRefused(f"{where}: the table {name!r} can't be read ({str(error)[:200]}). Save or copy it again.") from error
    return frame
