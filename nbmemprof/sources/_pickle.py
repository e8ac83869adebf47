"""Read the data of a pickle without running a pickle: no class, function or name in it is ever looked up.

:func:`decode` turns bytes into a :class:`Tape`, arrays of 64-bit values that are gathered column by
column. An opcode that names, calls or builds anything is refused, whatever its arguments.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmemprof import _jit
from nbmemprof.errors import InputRefused
from nbmemprof.sources import _pickle_kernel as k

__all__ = ["Ints", "Tape", "decode"]

Array = npt.NDArray[Any]
Ints = npt.NDArray[np.int64]

_CHUNK = 32 << 20  # pages of a mapped file are given back every so many bytes
_ROOM = 96 << 20, 10  # arrays may take so many bytes, plus so many times the file
_MAX_LINKS = 256  # parts in which one row's dict may have been written
_WORST = 1 << 31
_OPCODES = {
    0x63: "GLOBAL", 0x93: "STACK_GLOBAL", 0x69: "INST", 0x6F: "OBJ", 0x81: "NEWOBJ", 0x92: "NEWOBJ_EX", 0x52: "REDUCE", 0x62: "BUILD", 0x82: "EXT1",
    0x83: "EXT2", 0x84: "EXT4", 0x50: "PERSID", 0x51: "BINPERSID", 0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER",
}  # fmt: skip
# array: (dtype, entries per byte of the file, entries at least)
_SIZES: dict[str, tuple[str, float, int]] = {
    "stack": ("i8", 0, 4096),
    "memo": ("i8", 1 / 48, 1024),
    "tape": ("i8", 1 / 14, 4096),
    "node_shape": ("i4", 1 / 64, 1024),
    "node_run": ("i4", 1 / 64, 1024),
    "node_next": ("i4", 1 / 64, 1024),
    "node_tail": ("i4", 1 / 64, 1024),
    "node_depth": ("i1", 1 / 64, 1024),
    "run_start": ("i8", 1 / 120, 1024),
    "run_count": ("i4", 1 / 120, 1024),
    "run_depth": ("i1", 1 / 120, 1024),
    "run_hash": ("i4", 0, 0),
    "string_start": ("i8", 0, 1024),
    "string_size": ("i4", 0, 1024),
    "string_hash": ("i4", 0, 0),
    "shape_start": ("i8", 0, 64),
    "shape_count": ("i4", 0, 64),
    "shape_hash": ("i4", 0, 0),
    "keys": ("i8", 0, 1024),
}
_NODES = ("node_shape", "node_run", "node_next", "node_tail", "node_depth")
_MORE = {
    k.MORE_STACK: (("stack",), k.SP),
    k.MORE_MEMO: (("memo",), k.MEMO),
    k.MORE_TAPE: (("tape",), k.TAPE),
    k.MORE_NODES: (_NODES, k.NODES),
    k.MORE_RUNS: (("run_start", "run_count", "run_depth"), k.RUNS),
    k.MORE_STRINGS: (("string_start", "string_size"), k.STRINGS),
    k.MORE_SHAPES: (("shape_start", "shape_count"), k.SHAPES),
    k.MORE_KEYS: (("keys",), k.KEYS),
}


def decode(data: bytes | bytearray | memoryview | mmap.mmap, name: str = "the file", seed: int | None = None) -> Tape:
    """Decode a pickle of plain data: None, bool, int, float, str, bytes, tuple, list, set, dict.

    Parameters
    ----------
    data
        The pickle. Of a mapped file the pages are given back while it is read.
    name
        What messages call it.
    seed
        Seed of the hashes, for tests; random otherwise, so that collisions can't be prepared.

    Raises
    ------
    InputRefused
        It is not a pickle, is truncated or damaged, nests too deep, would take far more room than a
        snapshot of its size, or has an opcode that names or calls something.
    """
    raw = np.frombuffer(data, dtype=np.uint8)
    raw.flags.writeable = False
    size = len(raw)
    if size >= 1 << 36:
        raise InputRefused(f"{name} has {size} bytes, which is too large to read. Record with a smaller max_entries.")
    seed = int.from_bytes(os.urandom(4), "little") if seed is None else seed
    arrays = {key: np.zeros(int(size * share) + least, dtype) for key, (dtype, share, least) in _SIZES.items()}
    for key, share, most in (("run_hash", 128, 1 << 22), ("string_hash", 256, 1 << 20), ("shape_hash", 4096, 1 << 14)):
        arrays[key] = np.zeros(1 << max(8, min(most, size // share + 1).bit_length()), "i4")
    state = np.zeros(k.STATE_FIELDS, np.int64)
    state[k.LAST_MARK] = -1
    while True:
        state[k.PAUSE] = state[k.POS] + _CHUNK if isinstance(data, mmap.mmap) else size + 1
        code = _jit.run(k.decode, size, raw, size, seed, *arrays.values(), state)
        if code == k.PAUSED:
            _give_back(data, int(state[k.POS]))
        elif code in _MORE:
            _grow(arrays, code, state, size, name)
        elif code == k.DONE:
            break
        else:
            raise _refusal(code, int(state[k.POS]), int(state[k.FAULT_OP]), raw, name)
    _give_back(data, size)
    return Tape(
        name=name, data=raw, used=int(state[k.POS]) + 1, root=int(state[k.RESULT]), tape=arrays["tape"][: state[k.TAPE]],
        **{key: arrays[key][: state[k.NODES]] for key in ("node_shape", "node_run", "node_next")},
        **{key: arrays[key][: state[k.RUNS]] for key in ("run_start", "run_count")},
        **{key: arrays[key][: state[k.STRINGS]] for key in ("string_start", "string_size")},
        **{key: arrays[key][: state[k.SHAPES]] for key in ("shape_start", "shape_count")},
        keys=arrays["keys"][: state[k.KEYS]],
    )  # fmt: skip


def _give_back(data: Any, until: int) -> None:
    if isinstance(data, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED") and until >= mmap.PAGESIZE:
        data.madvise(mmap.MADV_DONTNEED, 0, until // mmap.PAGESIZE * mmap.PAGESIZE)


def _grow(arrays: dict[str, Array], code: int, state: Ints, size: int, name: str) -> None:
    names, field = _MORE[code]
    now, used, done = len(arrays[names[0]]), int(state[field]), max(1, int(state[k.POS]))
    wanted = max(now + now // 3 + 1024, int(used * size / done * 1.05) if done * 8 > size else 0)
    if code == k.MORE_MEMO:
        wanted = max(wanted, int(state[k.FAULT_OP]) + 2)
    for key in names:
        arrays[key].resize(wanted, refcheck=False)
    room, times = _ROOM
    if sum(a.nbytes for a in arrays.values()) > room + times * size or wanted >= _WORST:
        raise InputRefused(f"{name} would take far more memory than a snapshot of {size} bytes does, at byte {done}. It is not a snapshot that torch wrote; record it again.")


def _refusal(code: int, pos: int, op: int, raw: Array, name: str) -> InputRefused:
    if code == k.UNSAFE:
        doubt = "is not a snapshot, and" if pos == 0 else "is"  # a text may begin with any letter
        return InputRefused(
            f"{name} {doubt} unsafe: the pickle opcode {_OPCODES.get(op, hex(op))} at byte {pos} is not allowed, as it can run code. "
            "A genuine snapshot holds plain data only; nothing of it was run. Get the file from its author again, or record it anew."
        )
    if code == k.TRUNCATED and raw[0] == 0x80:
        return InputRefused(f"{name} is truncated or incomplete: it ends within the value at byte {pos} of {len(raw)}. Copy it again, or let the program finish writing it.")
    if code == k.TOO_DEEP:
        return InputRefused(f"{name} is nested too deep: more than {k.MAX_DEPTH} levels at byte {pos}; a snapshot has about eight. Record it again.")
    if raw[0] != 0x80 or pos < 2:
        return InputRefused(f"{name} is not a snapshot: it does not begin like a pickle (first bytes {bytes(raw[:8])!r}). Give a file written by torch.cuda.memory._dump_snapshot.")
    what = {k.BAD_MEMO: "a memo index out of range", k.UNKNOWN: f"the unknown opcode {op:#04x}"}.get(code, "an operation without its operands")
    return InputRefused(f"{name} is damaged or corrupt: {what} at byte {pos}. Copy it again, or record it anew.")


def _read_line(opcode: bytes) -> int | float | None:
    """A number that protocol 0 writes as a line of text."""
    text = opcode[1:].partition(b"\n")[0].removesuffix(b"L")
    try:
        return float(text) if opcode[:1] == b"F" else int(text)
    except ValueError:
        return None


def ranges(starts: Array, counts: Array) -> Ints:
    """Concatenate ``arange(start, start + count)`` of each pair."""
    counts = counts.astype(np.int64)
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts.astype(np.int64) - (ends - counts), counts) + np.arange(total, dtype=np.int64)


@dataclass
class Tape:
    """The decoded values. ``root`` is the value of the whole pickle; a value is an int64, see the kernel."""

    name: str
    data: Array
    used: int
    root: int
    tape: Ints
    node_shape: Array
    node_run: Array
    node_next: Array
    run_start: Array
    run_count: Array
    string_start: Array
    string_size: Array
    shape_start: Array
    shape_count: Array
    keys: Ints

    # ------------------------------------------------------------------ single values
    def text(self, value: int) -> str | None:
        """A string; what is not valid UTF-8 is written as escapes, so that different names stay different."""
        if value & 7 != k.STRING:
            return None
        start, size = int(self.string_start[value >> 3]), int(self.string_size[value >> 3])
        if size >= 0:
            return self.data[start : start + size].tobytes().decode("utf-8", "backslashreplace")
        line = self.data[start : start - size].tobytes()  # protocol 0
        if self.data[start - 1] == 0x56:
            text = line.decode("raw_unicode_escape", "replace")
        else:
            text = line.strip()[1:-1].decode("unicode_escape", "replace")
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "backslashreplace")

    def number(self, value: int) -> int | float | None:
        """An int or a float; None for anything else and for ints of more than 16 bytes."""
        tag = value & 7
        if tag == k.INT:
            return value >> 3
        if tag != k.NUMBER:
            return None
        at = value >> 3
        if self.data[at] == 0x47:
            return float(struct.unpack(">d", self.data[at + 1 : at + 9].tobytes())[0])
        if self.data[at] in b"ILF":
            return _read_line(self.data[at : at + 64].tobytes())
        width = 1 if self.data[at] == 0x8A else 4
        size = int.from_bytes(self.data[at + 1 : at + 1 + width].tobytes(), "little")
        return int.from_bytes(self.data[at + 1 + width : at + 1 + width + size].tobytes(), "little", signed=True) if size <= 16 else None

    def is_dict(self, value: int) -> bool:
        """Whether it is a dict."""
        return value & 7 == k.NODE and int(self.node_shape[value >> 3]) >= k.EMPTY

    def is_list(self, value: int) -> bool:
        """Whether it is a list or a tuple."""
        return value & 7 == k.NODE and int(self.node_shape[value >> 3]) in (k.LIST, k.TUPLE)

    def fields(self, value: int) -> dict[str, int]:
        """A dict's entries that have text keys; of equal keys the last counts."""
        found: dict[str, int] = {}
        for link in self.links(value >> 3) if self.is_dict(value) else []:
            run, shape = int(self.node_run[link]), int(self.node_shape[link])
            if run >= 0:
                start, count = int(self.run_start[run]), int(self.run_count[run])
                names = self.keys[self.shape_start[shape] :][:count].tolist()
                for key, item in zip(names, self.tape[start : start + count].tolist(), strict=True):
                    if (text := self.text(key)) is not None:
                        found[text] = item
        return found

    def plain(self, value: int, depth: int = 4, most: int = 1000) -> Any:
        """The value as Python objects, cut at a depth and at so many entries a container."""
        if value & 7 == k.SPECIAL:
            return {k.TRUE: True, k.FALSE: False}.get(value)
        if value & 7 == k.STRING:
            return self.text(value)
        if value & 7 != k.NODE:
            return self.number(value)
        if depth <= 0:
            return None
        if self.is_dict(value):
            return {name: self.plain(item, depth - 1, most // 10) for name, item in list(self.fields(value).items())[:most]}
        return [self.plain(item, depth - 1, most // 10) for item in self.items(value)[:most].tolist()]

    def links(self, node: int) -> list[int]:
        """The node and the further parts in which the container was written."""
        found = [node]
        following = self.node_next.data
        while (node := following[node]) >= 0:
            found.append(node)
        return found

    def items(self, value: int) -> Ints:
        """The values of a list or tuple; nothing for anything else."""
        return self.flatten(np.array([value], np.int64), len(self.data))[0]

    # ------------------------------------------------------------------ many values
    def flatten(self, values: Ints, most: int | None = None) -> tuple[Ints, Ints]:
        """The values of many lists one after the other, and for each the row of the list that it is in.

        Raises
        ------
        InputRefused
            Shared references make more of them than ``most``; by default twice the containers in the file, as each row is a dict of its own.
        """
        rows = np.flatnonzero((values & 7) == k.NODE)
        nodes = values[rows] >> 3
        wanted = np.isin(self.node_shape[nodes], (k.LIST, k.TUPLE)) & (self.node_run[nodes] >= 0)
        rows, nodes = rows[wanted], nodes[wanted]
        unique, inverse = np.unique(nodes, return_inverse=True)
        links, parts = unique, np.ones(len(unique), np.int64)
        if (self.node_next[unique] >= 0).any():
            chains = [self.links(int(node)) if more >= 0 else [int(node)] for node, more in zip(unique, self.node_next[unique], strict=True)]
            links, parts = np.array([link for chain in chains for link in chain], np.int64), np.array([len(chain) for chain in chains], np.int64)
        first = np.cumsum(parts) - parts
        runs = self.node_run[links]
        each = np.add.reduceat(self.run_count[runs].astype(np.int64), first) if len(first) else first
        total = int(each[inverse].astype(np.float64).sum()) if len(inverse) else 0
        if total > (2 * len(self.node_shape) + 4096 if most is None else most):
            raise InputRefused(f"{self.name} expands to {total} rows by shared references, far more than it holds ({len(self.node_shape)}): a bomb, not a snapshot. Record it again.")
        order = ranges(first[inverse], parts[inverse])
        at = ranges(self.run_start[runs[order]], self.run_count[runs[order]])
        return self.tape[at], np.repeat(rows, each[inverse])

    def columns(self, values: Ints, names: tuple[str, ...]) -> tuple[dict[str, Ints], npt.NDArray[np.bool_]]:
        """The values of some keys of many dicts (``ABSENT`` where a key is missing), and which rows are dicts."""
        is_node = (values & 7) == k.NODE
        nodes = np.where(is_node, values >> 3, 0)
        is_row = is_node & (self.node_shape[nodes] >= k.EMPTY) if len(self.node_shape) else is_node
        found = {name: np.zeros(len(values), np.int64) for name in names}
        rows = np.flatnonzero(is_row)
        nodes = nodes[rows]
        for _ in range(_MAX_LINKS):
            self._gather(nodes, rows, found)
            nodes = self.node_next[nodes] if len(nodes) else nodes
            more = nodes >= 0
            if not more.any():
                return found, is_row
            rows, nodes = rows[more], nodes[more]
        is_row[rows] = False
        return found, is_row

    def _gather(self, nodes: Array, rows: Ints, found: dict[str, Ints]) -> None:
        shapes = self.node_shape[nodes]
        present = np.flatnonzero(np.bincount(shapes + 1, minlength=1))[0:] - 1
        starts = self.run_start[self.node_run[nodes]] if len(self.run_start) else rows
        for shape in present.tolist():
            if shape < 0:
                continue
            first, count = int(self.shape_start[shape]), int(self.shape_count[shape])
            position = {self.text(key): i for i, key in enumerate(self.keys[first : first + count].tolist())}
            mine = slice(None) if len(present) == 1 else shapes == shape
            at, where = starts[mine], rows[mine]
            whole = len(where) == len(next(iter(found.values())))
            for name, column in found.items():
                if name in position:
                    if whole:
                        np.take(self.tape, at + position[name], out=column)
                    else:
                        column[where] = self.tape[at + position[name]]
