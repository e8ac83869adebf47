"""Columns of a snapshot's rows, alike for a decoded file (:class:`TapeFile`) and for Python objects (:class:`ObjectFile`).

Rows are lists of dicts of unknown quality. Each column comes with what is wrong in it, nothing raises,
and shared stacks are met once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from nbmemprof.errors import InputRefused
from nbmemprof.sources import _pickle_kernel as k
from nbmemprof.sources._pickle import Ints, Tape, ranges

__all__ = ["BAD", "MAX_DEPTH", "MAX_DEVICES", "MISSING", "OK", "WIDE", "File", "ObjectFile", "Rows", "TapeFile"]

Array = npt.NDArray[Any]
OK, MISSING, BAD, WIDE = range(4)  # WIDE: an unsigned number from 2**63 on, its bits kept
MAX_DEPTH = 1024  # frames kept of a stack
_MAX_FRAMES = 1 << 23  # of all different stacks together; beyond it stacks are cut
MAX_DEVICES = 256
_NO_WORD, _BAD_WORD = -1, -2


class Rows(Protocol):
    """Dicts in a row; what was no dict is left out and counted in ``strays``."""

    count: int
    strays: int
    kept: Ints  # position of each row among the values that it came from

    def ints(self, name: str) -> tuple[Ints, Array]:
        """Whole numbers, and for each OK, MISSING (no key, or None), BAD or WIDE."""

    def flags(self, name: str) -> Array:
        """Booleans as int8; -1 where there is none."""

    def words(self, name: str) -> tuple[Array, list[str]]:
        """Texts as numbers into a list; -1 where there is none, -2 where it is no text."""

    def pairs(self, name: str) -> tuple[Array, list[str]]:
        """Pairs of ints as texts ``a_b``, numbered as words are."""

    def stacks(self, name: str) -> Ints:
        """A key for each stack of frames, to be resolved by :meth:`File.frames`; -1 where there is none."""

    def children(self, name: str, names: tuple[str, ...]) -> tuple[Rows, Ints]:
        """The rows of a list in each row, and for each child its parent's position."""


class File(Protocol):
    """The document."""

    depth: int  # frames kept of a stack, innermost first

    def top(self, name: str) -> Any:
        """A top-level entry as plain Python, cut to a sensible size; None where there is none."""

    def has_list(self, name: str) -> bool | None:
        """Whether a top-level entry is a list; None where there is no such entry."""

    def rows(self, name: str, names: tuple[str, ...]) -> Rows:
        """Rows of a top-level list of dicts."""

    def traces(self, names: tuple[str, ...]) -> tuple[Rows, Ints, int, int]:
        """Events of all devices, the device of each, how many devices there are, and how many of their lists were none."""

    def frames(self, keys: Ints) -> tuple[Rows, Ints, Ints, Ints]:
        """Unique frames as rows; then for the stacks one after the other: their frames' positions among these (-1: not a dict), and each stack's first entry and length."""


# ---------------------------------------------------------------------- a decoded file
class TapeFile:
    """A decoded pickle."""

    def __init__(self, tape: Tape, root: Mapping[str, int]) -> None:
        self.tape, self._root, self.depth = tape, root, MAX_DEPTH

    @classmethod
    def open(cls, tape: Tape) -> TapeFile:
        """Find the snapshot in a pickle: a dict, or the bare list of segments of old files."""
        if tape.is_dict(tape.root):
            return cls(tape, tape.fields(tape.root))
        if tape.is_list(tape.root):
            return cls(tape, {"segments": tape.root})
        raise InputRefused(f"{tape.name} is not a snapshot: the pickle holds neither a dict nor a list. Give a file written by torch.cuda.memory._dump_snapshot.")

    def top(self, name: str) -> Any:
        value = self._root.get(name)
        return None if value is None else self.tape.plain(value)

    def has_list(self, name: str) -> bool | None:
        return self.tape.is_list(self._root[name]) if name in self._root else None

    def rows(self, name: str, names: tuple[str, ...]) -> Rows:
        return TapeRows(self.tape, self.tape.flatten(np.array([self._root.get(name, k.NONE)], np.int64))[0], names)

    def traces(self, names: tuple[str, ...]) -> tuple[Rows, Ints, int, int]:
        lists = self.tape.items(self._root.get("device_traces", k.NONE))[:MAX_DEVICES]
        odd = sum(not self.tape.is_list(value) for value in lists.tolist())
        values, device = self.tape.flatten(lists)
        rows = TapeRows(self.tape, values, names)
        return rows, device if rows.count == len(device) else device[rows.kept], len(lists), odd

    def frames(self, keys: Ints) -> tuple[Rows, Ints, Ints, Ints]:
        tape, runs = self.tape, len(self.tape.run_start)
        plain = keys < runs
        whole = np.minimum(tape.run_count[keys[plain]], MAX_DEPTH).astype(np.int64)
        while self.depth > 4 and int(np.minimum(whole, self.depth).sum()) > _MAX_FRAMES:
            self.depth //= 2
        whole = np.minimum(whole, self.depth)
        flat, lengths = tape.tape[ranges(tape.run_start[keys[plain]], whole)], np.zeros(len(keys), np.int64)
        lengths[plain] = whole
        order = np.flatnonzero(plain)
        if not plain.all():  # stacks written in several parts
            more, owner = tape.flatten((keys[~plain] - runs) * 8 + k.NODE, len(tape.data))
            rank = np.arange(len(more)) - np.searchsorted(owner, owner, side="left")
            more, owner = more[rank < self.depth], owner[rank < self.depth]
            lengths[~plain] = np.bincount(owner, minlength=int((~plain).sum()))
            flat, order = np.concatenate([flat, more]), np.concatenate([order, np.flatnonzero(~plain)])
        if len(flat) > 4 * _MAX_FRAMES:
            raise InputRefused(f"{tape.name} has {len(keys)} different stacks with {len(flat)} frames together, too many to keep. Record with stacks='python' or a smaller max_entries.")
        first = np.zeros(len(keys), np.int64)
        first[order] = np.cumsum(lengths[order]) - lengths[order]
        rows, where = self._unique_rows(flat, ("name", "filename", "line"))
        return rows, where, first, lengths

    def _unique_rows(self, values: Ints, names: tuple[str, ...]) -> tuple[Rows, Ints]:
        """Rows of the different dicts among values, and each value's position among them."""
        tape = self.tape
        nodes = np.where((values & 7) == k.NODE, values >> 3, -1)
        seen = np.zeros(len(tape.node_shape) + 1, bool)
        seen[nodes] = True
        unique = np.flatnonzero(seen[:-1])
        alike = tape.node_run[unique].astype(np.int64) * (len(tape.shape_start) + 8) + tape.node_shape[unique] + 8
        alike = np.where(tape.node_next[unique] >= 0, -1 - unique, alike)
        _, example, group = np.unique(alike, return_index=True, return_inverse=True)
        rows = TapeRows(tape, unique[example] * 8 + k.NODE, names)
        place = np.full(len(example), -1, np.int64)
        place[rows.kept] = np.arange(rows.count)
        table = np.full(len(seen), -1, np.int64)
        table[unique] = place[group]
        return rows, table[nodes]


class TapeRows:
    """Rows of a tape; a column is taken once and then let go."""

    def __init__(self, tape: Tape, values: Ints, names: tuple[str, ...]) -> None:
        self._tape = tape
        self._columns, is_row = tape.columns(values, names)
        self.strays = int(len(values) - is_row.sum())
        if self.strays:
            self.kept = np.flatnonzero(is_row)
            self._columns = {name: column[is_row] for name, column in self._columns.items()}
        else:
            self.kept = np.arange(len(values))
        self.count = len(self.kept)

    def ints(self, name: str) -> tuple[Ints, Array]:
        column = self._columns.pop(name)
        tag = (column & 7).astype(np.uint8)
        status = np.full(self.count, BAD, np.uint8)
        numbers = column >> 3
        status[tag == k.INT] = OK
        status[(column == k.NONE) | (column == k.ABSENT)] = MISSING
        wide = np.flatnonzero(tag == k.NUMBER)
        if len(wide):
            unique, inverse = np.unique(column[wide], return_inverse=True)
            read = [_whole(self._tape.number(value)) for value in unique.tolist()]
            numbers[wide] = np.array([number for number, _ in read], np.int64)[inverse]
            status[wide] = np.array([state for _, state in read], np.uint8)[inverse]
        numbers[(status == MISSING) | (status == BAD)] = 0
        return numbers, status

    def flags(self, name: str) -> Array:
        column = self._columns.pop(name)
        return np.where(column == k.TRUE, 1, np.where(column == k.FALSE, 0, -1)).astype(np.int8)

    def words(self, name: str) -> tuple[Array, list[str]]:
        column = self._columns.pop(name)
        is_text = (column & 7) == k.STRING
        return self._numbered(np.where(is_text, column >> 3, -1), len(self._tape.string_start), column, lambda i: self._tape.text(i * 8 + k.STRING))

    def pairs(self, name: str) -> tuple[Array, list[str]]:
        column, tape = self._columns.pop(name), self._tape
        is_node = (column & 7) == k.NODE
        nodes = np.where(is_node, column >> 3, 0)
        if len(tape.node_run):
            simple = is_node & (tape.node_next[nodes] < 0) & np.isin(tape.node_shape[nodes], (k.LIST, k.TUPLE))
            runs = np.where(simple, tape.node_run[nodes], -1)
        else:
            runs = np.full(len(column), -1)

        def text(run: int) -> str | None:
            start, count = int(tape.run_start[run]), int(tape.run_count[run])
            return _pair([tape.number(value) for value in tape.tape[start : start + count].tolist()]) if count == 2 else None

        return self._numbered(runs, len(tape.run_start), column, text)

    def _numbered(self, ids: Array, size: int, column: Ints, text: Callable[[int], str | None]) -> tuple[Array, list[str]]:
        """Number ids (-1: none) in the order of their texts' first use."""
        seen = np.zeros(size + 1, bool)
        seen[ids] = True
        words: dict[str, int] = {}
        table = np.full(size + 1, _BAD_WORD, np.int32)
        for i in np.flatnonzero(seen[:-1]).tolist():
            if (word := text(i)) is not None:
                table[i] = words.setdefault(word, len(words))
        codes = table[ids]
        if seen[-1]:
            codes[(column == k.NONE) | (column == k.ABSENT)] = _NO_WORD
        return codes, list(words)

    def stacks(self, name: str) -> Ints:
        column, tape = self._columns.pop(name), self._tape
        if not len(tape.node_run):
            return np.full(len(column), -1, np.int64)
        is_node = (column & 7) == k.NODE
        nodes = np.where(is_node, column >> 3, 0)
        keys = np.where(is_node & np.isin(tape.node_shape[nodes], (k.LIST, k.TUPLE)), tape.node_run[nodes], -1).astype(np.int64)
        split = (keys >= 0) & (tape.node_next[nodes] >= 0)
        return np.where(split, len(tape.run_start) + nodes, keys)

    def children(self, name: str, names: tuple[str, ...]) -> tuple[Rows, Ints]:
        values, parent = self._tape.flatten(self._columns.pop(name))
        rows = TapeRows(self._tape, values, names)
        return rows, parent if rows.count == len(parent) else parent[rows.kept]


def _whole(number: float | None) -> tuple[int, int]:
    """An int64 and its status, of a number of any size."""
    if isinstance(number, float):
        number = int(number) if math.isfinite(number) and number == int(number) else None
    if number is None or not -(1 << 63) <= number < 1 << 64:
        return 0, BAD
    number = int(number)
    return (number, OK) if number < 1 << 63 else (number - (1 << 64), WIDE)


def _pair(items: Sequence[Any]) -> str | None:
    good = len(items) == 2 and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 64 for i in items)
    return f"{items[0]}_{items[1]}" if good else None


# ---------------------------------------------------------------------- Python objects
class ObjectFile:
    """A snapshot that is a dict or a list already."""

    def __init__(self, root: Mapping[str, Any] | list[Any]) -> None:
        self._root: Mapping[str, Any] = root if isinstance(root, Mapping) else {"segments": root}
        self.stack_of: dict[int, int] = {}
        self.stack_lists: list[Sequence[Any]] = []
        self.depth = MAX_DEPTH

    def top(self, name: str) -> Any:
        return self._root.get(name)

    def has_list(self, name: str) -> bool | None:
        return isinstance(self._root[name], (list, tuple)) if name in self._root else None

    def rows(self, name: str, names: tuple[str, ...]) -> Rows:
        return ObjectRows(self, _as_list(self._root.get(name)))

    def traces(self, names: tuple[str, ...]) -> tuple[Rows, Ints, int, int]:
        lists = _as_list(self._root.get("device_traces"))[:MAX_DEVICES]
        odd = sum(not isinstance(trace, (list, tuple)) for trace in lists)
        kept = [_as_list(trace) for trace in lists]
        rows = ObjectRows(self, [event for trace in kept for event in trace])
        return rows, np.repeat(np.arange(len(kept)), [len(trace) for trace in kept])[rows.kept], len(lists), odd

    def frames(self, keys: Ints) -> tuple[Rows, Ints, Ints, Ints]:
        lists = [self.stack_lists[key][:MAX_DEPTH] for key in keys.tolist()]
        lengths = np.array([len(frames) for frames in lists], np.int64)
        seen: dict[int, int] = {}
        unique: list[Any] = []
        where = np.empty(int(lengths.sum()), np.int64)
        at = 0
        for frames in lists:
            for frame in frames:
                place = seen.get(id(frame))
                if place is None:
                    place = seen[id(frame)] = len(unique)
                    unique.append(frame)
                where[at] = place
                at += 1
        rows = ObjectRows(self, unique)
        table = np.full(len(unique) + 1, -1, np.int64)
        table[rows.kept] = np.arange(rows.count)
        return rows, table[where], np.cumsum(lengths) - lengths, lengths


class ObjectRows:
    """Rows that are Python dicts."""

    def __init__(self, file: ObjectFile, values: Sequence[Any]) -> None:
        self._file = file
        self._rows: list[Mapping[str, Any]] = [row for row in values if isinstance(row, dict)]
        self.strays = len(values) - len(self._rows)
        self.kept = np.array([i for i, row in enumerate(values) if isinstance(row, dict)], np.int64) if self.strays else np.arange(len(values))
        self.count = len(self._rows)

    def _column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def ints(self, name: str) -> tuple[Ints, Array]:
        column = self._column(name)
        if set(map(type, column)) == {int}:
            try:
                return np.fromiter(column, np.int64, len(column)), np.zeros(len(column), np.uint8)
            except OverflowError:
                pass
        read = [(0, MISSING) if v is None else _whole(v if isinstance(v, float) else int(v)) if isinstance(v, (int, float, np.integer)) and not isinstance(v, bool) else (0, BAD) for v in column]
        return np.array([number for number, _ in read], np.int64), np.array([status for _, status in read], np.uint8)

    def flags(self, name: str) -> Array:
        return np.array([int(v) if isinstance(v, bool) else -1 for v in self._column(name)], np.int8)

    def words(self, name: str) -> tuple[Array, list[str]]:
        words: dict[str, int] = {}
        codes = [words.setdefault(v, len(words)) if isinstance(v, str) else _NO_WORD if v is None else _BAD_WORD for v in self._column(name)]
        return np.array(codes, np.int32), [w if w.isascii() else w.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace") for w in words]

    def pairs(self, name: str) -> tuple[Array, list[str]]:
        words: dict[str, int] = {}
        known: dict[tuple[Any, ...], int] = {}
        codes = []
        for value in self._column(name):
            code = _NO_WORD if value is None else _BAD_WORD
            if isinstance(value, (list, tuple)) and len(value) == 2 and all(type(i) is int for i in value):
                pair = (value[0], value[1])
                if pair not in known:
                    text = _pair(pair)
                    known[pair] = _BAD_WORD if text is None else words.setdefault(text, len(words))
                code = known[pair]
            codes.append(code)
        return np.array(codes, np.int32), list(words)

    def stacks(self, name: str) -> Ints:
        of, lists = self._file.stack_of, self._file.stack_lists
        keys = []
        for frames in self._column(name):
            if not isinstance(frames, (list, tuple)) or not frames:
                keys.append(-1)
                continue
            key = of.get(id(frames))  # ids are unique as long as the lists live, and `lists` keeps them
            if key is None:
                key = of[id(frames)] = len(lists)
                lists.append(frames)
            keys.append(key)
        return np.array(keys, np.int64)

    def children(self, name: str, names: tuple[str, ...]) -> tuple[Rows, Ints]:
        lists = [_as_list(value) for value in self._column(name)]
        rows = ObjectRows(self._file, [child for children in lists for child in children])
        return rows, np.repeat(np.arange(len(lists)), [len(children) for children in lists])[rows.kept]


def _as_list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else []


def first_of_each(parent: Ints) -> Ints:
    """Positions at which an ascending column takes a new value."""
    return np.flatnonzero(np.diff(parent, prepend=-1)) if len(parent) else parent


def missing_words(words: Iterable[str], known: Iterable[str]) -> list[str]:
    """Words that are not known, in their order."""
    here = set(known)
    return [word for word in words if word not in here]
