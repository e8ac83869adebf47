"""Damaged snapshots, the same for the same seed, and a child process that tries to open them under a memory limit.

``python tests/mutants.py FIRST COUNT PROGRESS [KIND]`` opens COUNT mutants (of one kind of file: ``snapshot``, ``nbmem``; or of
both) and prints one JSON line for each that failed; the number of the mutant at work goes to the file PROGRESS, so that a
parent knows which one it was that hung or crashed.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import pickle
import random
import resource
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

SNAPSHOTS = Path(__file__).parent / "fixtures" / "snapshots"
LIMIT_BYTES = 2 << 30
LIMIT_S = 20
ANALYSES = ("summary", "breakdown", "leaks", "fragmentation", "sites", "timeline", "oom", "lifetimes", "layers", "pools", "stalls")
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 511, 1 << 31, 1 << 52, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 70, -(1 << 65), 1.5, float("nan"), float("inf"), -0.0, "", "alloc", "x" * 300, "\ud800",
    b"bytes", [], {}, (), [[]], [None], {"a": 1}, (0, 0), (1 << 70, -1), {1: 2}, [{"filename": 3, "line": "x", "name": None}],
)  # fmt: skip


@cache
def originals() -> tuple[tuple[str, bytes], ...]:
    """Good files, unpacked, the small ones."""
    names = [p for p in sorted(SNAPSHOTS.iterdir()) if p.name.endswith((".pickle", ".pickle.gz")) and p.stat().st_size and "torch-2.11-r" not in p.name]
    return tuple((p.name, gzip.decompress(p.read_bytes()) if p.suffix == ".gz" else p.read_bytes()) for p in names)


@cache
def objects() -> tuple[Any, ...]:
    """The good files as Python objects; plain data only, as an unpickler without globals gives them."""

    class Plain(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            raise pickle.UnpicklingError(name)

    found = []
    for name, data in originals():
        if len(data) < 100_000 and "bomb" not in name:
            try:
                found.append(Plain(io.BytesIO(data)).load())
            except (pickle.UnpicklingError, EOFError):
                continue
    return tuple(found)


@cache
def captures() -> tuple[bytes, ...]:
    """Two saved captures."""
    import nbmemprof as mp

    out = []
    for name in ("s01_plain_leak.pickle", "s21_oom_with_private_pool.pickle"):
        with tempfile.TemporaryDirectory() as folder:
            out.append(mp.load(SNAPSHOTS / name).save(Path(folder) / "a.nbmem").read_bytes())
    return tuple(out)


# ---------------------------------------------------------------------- ways to damage
def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def write(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(len(out))] = rng.choice((rng.randrange(256), *b"]}()u(esat.h\x8c\x8a\x94R\x93c"))
    return bytes(out)


def splice(data: bytes, rng: random.Random) -> bytes:
    other = rng.choice(originals())[1]
    at, to = rng.randrange(len(other)), rng.randrange(len(data))
    piece = other[at : at + rng.choice((1, 4, 40, 400, 4000))]
    return data[:to] + piece + data[to + rng.choice((0, len(piece))) :]


def remove(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice((1, 2, 8, 100, 1000)) :]


def repeat(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at : at + rng.choice((1, 8, 100))] * rng.choice((2, 10, 300)) + data[at:]


def pack(data: bytes, rng: random.Random) -> bytes:
    return flip(gzip.compress(data, 1, mtime=0), rng)


def odd_object(data: bytes, rng: random.Random) -> bytes:
    """A well-formed pickle with strange values in it."""
    snapshot = copy.deepcopy(rng.choice(objects()))
    for _ in range(rng.choice((1, 2, 5, 20))):
        disturb(snapshot, rng)
    return pickle.dumps(snapshot, protocol=rng.choice((2, 3, 4, 5)))


def disturb(node: Any, rng: random.Random) -> None:
    """Go down at random and change one thing."""
    while True:
        if not isinstance(node, (dict, list)) or not node:
            return
        keys = list(node) if isinstance(node, dict) else range(len(node))
        key = rng.choice(list(keys)) if rng.random() < 0.8 or isinstance(node, list) else rng.choice([k for k in ("segments", "device_traces", "blocks") if k in node] or list(keys))
        below = node[key]
        if isinstance(below, (dict, list)) and below and rng.random() < 0.93:
            node = below
            continue
        what = rng.random()
        if what < 0.6:
            node[key] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.75:
            del node[key]
        elif what < 0.85 and isinstance(node, list):
            node.insert(rng.randrange(len(node) + 1), copy.deepcopy(rng.choice(node)))
        elif isinstance(below, int):
            node[key] = below + rng.choice((-512, 512, 1, -below * 2, below, 1 << 40))
        else:
            node[key] = [node[key]]
        return


def odd_capture(data: bytes, rng: random.Random) -> bytes:
    """A saved capture, its zip damaged or one of its members damaged inside a sound zip."""
    whole = rng.choice(captures())
    if rng.random() < 0.3:
        return rng.choice((cut, flip, write, remove))(whole, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(whole)) as source, zipfile.ZipFile(out, "w") as target:
        names = source.namelist()
        victim = rng.choice(names)
        for name in names:
            member = source.read(name)
            if name == victim:
                member = rng.choice((cut, flip, flip, write, write, remove))(member, rng)
            target.writestr(name, member)
    return out.getvalue()


WAYS: tuple[Callable[[bytes, random.Random], bytes], ...] = (cut, flip, flip, write, splice, splice, remove, repeat, pack, odd_object, odd_object, odd_object, odd_object, odd_capture)

KINDS = {"both": WAYS, "snapshot": tuple(way for way in WAYS if way is not odd_capture), "nbmem": (odd_capture,)}


def mutant(number: int, kind: str = "both") -> tuple[str, bytes]:
    """How it was made, and the bytes."""
    rng = random.Random(number)
    name, data = rng.choice(originals())
    way = rng.choice(KINDS[kind])
    return f"{number} {way.__name__} {name}", way(data, rng)


# ---------------------------------------------------------------------- trying them
def attempt(data: bytes) -> str:
    """Load and ask every question; returns ``ok`` or ``refused``."""
    import nbmemprof as mp

    try:
        capture = mp.load(data)
        capture.tables["allocations"]
    except mp.NbmemprofError:
        return "refused"
    for name in ANALYSES:
        try:
            question = getattr(mp, name)
        except (AttributeError, ImportError):
            continue
        try:
            question(capture)
        except mp.NbmemprofError:
            continue
    return "ok"


def main(first: int, count: int, progress: str, kind: str = "both") -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    Path(progress).write_text("start")
    results = {"ok": 0, "refused": 0}
    for number in range(first, first + count):
        name, data = mutant(number, kind)
        Path(progress).write_text(name)
        begin = time.perf_counter()
        try:
            results[attempt(data)] += 1
        except BaseException as error:  # a panic of Polars is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            print(json.dumps({"mutant": name, "error": "".join(traceback.format_exception(error))[-1500:]}), flush=True)
        if (took := time.perf_counter() - begin) > LIMIT_S:
            print(json.dumps({"mutant": name, "error": f"took {took:.1f} s"}), flush=True)
    Path(progress).write_text(f"done {results['ok']} {results['refused']}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
