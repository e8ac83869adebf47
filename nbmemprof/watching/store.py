"""Files of a watch: readable after ``kill -9`` at any moment, bounded, in the folder alone.

A record is one line: checksum (CRC-32, hex), length, JSON. It is written by one unbuffered ``write``, so it is the system's
once the call returns and a killed process loses at most the line it was writing; ``fsync`` (what a power cut needs) comes with
alarms, at the end, and with each full segment. Segments ``NAME.00001.watch`` … make the ring. Before the oldest one goes, the
thinned series of the whole run is written to ``NAME.state`` (a temporary file, then ``os.replace``) with the number of the last segment that it
stands for; a reader leaves those out, so it makes no difference when the process dies between the two.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

__all__ = ["Log", "Story", "names", "read", "start_of"]

_SEGMENTS = 8
_LONGEST = 64 << 20  # no record is longer; a damaged length is not believed


def _line(record: dict[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":"), default=str).encode()
    return b"%08x %d %s\n" % (zlib.crc32(body), len(body), body)


class Log:
    """Append records; ``state`` gives what stands for the segments that are dropped.

    Parameters
    ----------
    folder, name
        Files are ``folder/name.*``; one writer a name.
    ring_bytes
        Bound of all segments together.
    state
        Called when the oldest segment goes.
    """

    def __init__(self, folder: Path, name: str, ring_bytes: int, state: Callable[[], dict[str, Any]]) -> None:
        self.folder, self.name, self.state = folder, name, state
        self.segment_bytes = max(ring_bytes // _SEGMENTS, 4096)
        self.number, self.first = 1, 1
        folder.mkdir(parents=True, exist_ok=True)
        self._open()

    def _open(self) -> None:
        self._file: IO[bytes] = (self.folder / f"{self.name}.{self.number:05d}.watch").open("ab", buffering=0)
        self._size = 0

    def append(self, record: dict[str, Any], *, sync: bool = False) -> None:
        """Write one record."""
        line = _line(record)
        if self._size and self._size + len(line) > self.segment_bytes:
            self._turn()
        self._file.write(line)
        self._size += len(line)
        if sync:
            os.fsync(self._file.fileno())

    def _turn(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()
        self.number += 1
        self._open()
        if self.number - self.first >= _SEGMENTS:
            oldest, self.first = self.first, self.number - _SEGMENTS + 1
            self._write_state(self.first - 1)
            for number in range(oldest, self.first):
                (self.folder / f"{self.name}.{number:05d}.watch").unlink(missing_ok=True)

    def _write_state(self, through: int) -> None:
        part = self.folder / f"{self.name}.state.part"
        with part.open("wb") as file:
            file.write(_line(self.state() | {"through": through}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.folder / f"{self.name}.state")

    def close(self) -> None:
        """Sync and close."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def abandon(self) -> None:
        """Close without a word: a forked child is not the writer."""
        self._file.close()


# ---------------------------------------------------------------------- reading
@dataclass
class Story:
    """What one process wrote: ``state`` (empty where nothing was dropped yet), ``records``, and lines that are damaged or torn."""

    name: str
    state: dict[str, Any] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    damaged: int = 0
    torn: bool = False  # the very last line is not whole: the process died while it wrote, or is writing now
    changed_s: float = 0.0  # when a file was last written (Unix time)


def names(folder: Path) -> list[str]:
    """Each process that wrote here, the oldest first."""
    found = {path.name.rsplit(".", 2)[0] for path in folder.glob("*.watch")} | {path.name.removesuffix(".state") for path in folder.glob("*.state")}
    return sorted(found)


def read(folder: Path, name: str) -> Story:
    """Everything that a process has written so far; works while it goes on writing."""
    for _ in range(20):
        try:
            return _read(folder, name)
        except FileNotFoundError:  # a segment went while we read: its state is there now
            continue
    return _read(folder, name)


def _read(folder: Path, name: str) -> Story:
    segments = {int(path.name.rsplit(".", 2)[1]): path for path in folder.glob(f"{name}.*.watch")}
    story, state = Story(name), folder / f"{name}.state"
    if state.is_file():
        story.changed_s = state.stat().st_mtime
        story.state = next((record for record in _lines(state.read_bytes(), story)), {})
    gone = int(story.state.get("through", 0))
    wanted = sorted(number for number in segments if number > gone)
    if wanted and wanted[0] > gone + 1:
        raise FileNotFoundError(segments[wanted[0]])  # segments went after we looked for the state
    for number in wanted:
        story.torn = False
        data = segments[number].read_bytes()
        story.changed_s = max(story.changed_s, segments[number].stat().st_mtime)
        story.records += _lines(data, story)
    return story


def _lines(data: bytes, story: Story) -> Iterator[dict[str, Any]]:
    at = 0
    while at < len(data):
        stop = data.find(b"\n", at)
        if stop < 0:
            story.torn = True
            return
        record = _checked(data[at:stop])
        if record is None:
            story.damaged += 1
        else:
            yield record
        at = stop + 1


def _checked(line: bytes) -> dict[str, Any] | None:
    if len(line) > _LONGEST:
        return None
    head, _, rest = line.partition(b" ")
    length, _, body = rest.partition(b" ")
    try:
        if int(length) != len(body) or int(head, 16) != zlib.crc32(body):
            return None
        record = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def start_of(pid: int) -> int | None:
    """When a process began, in ticks since the machine did: tells it from a later one of the same number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None
