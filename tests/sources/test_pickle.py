"""The pickle decoder: reads data as pickle does, refuses all else, and is not hurt by hostile files."""

from __future__ import annotations

import collections
import datetime
import os
import pickle
import random
import struct
import sys
import time

import numpy as np
import pytest

from nbmemprof import _jit
from nbmemprof.errors import InputRefused
from nbmemprof.sources import _pickle
from nbmemprof.sources import _pickle_kernel as k

PROTO = b"\x80\x04"


def plain(data: bytes):
    """The whole pickle as Python objects."""
    tape = _pickle.decode(data)
    return tape.plain(tape.root, depth=60, most=10**30)


VALUES = [
    None, True, False, 0, 1, -1, 255, 256, 65535, 65536, -(1 << 31), 1 << 31, (1 << 60) - 1, 1 << 60, -(1 << 60), -(1 << 60) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -(1 << 63), -(1 << 64),
    1.5, -0.0, 1e300, "", "a", "é ノート 𝄞", "x" * 300, "y" * 70000, [], {}, [1], [1, 2, 3], {"a": 1}, {"a": 1, "b": [{"c": 2}]}, [[1, 2], [1, 2], [2, 1]], list(range(2500)),
    {str(i): i for i in range(2500)}, [{"k": i, "v": [i]} for i in range(1500)],
]  # fmt: skip


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=lambda v: repr(v)[:20])
def test_data_comes_back_as_pickle_gives_it(value, protocol):
    assert plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("value", [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((1, 2), (1, 2))], ids=repr)
def test_tuples_come_back_as_lists(value):
    assert plain(pickle.dumps(value)) == pickle.loads(pickle.dumps([list(v) if isinstance(v, tuple) else v for v in value]))


@pytest.mark.parametrize("protocol", [0, 1])
def test_the_oldest_protocols_are_read_too(protocol):
    value = {"a": [1, -2.5, "x\\y\n", "é\u30ce", 1 << 80, {"a": [], "b": {}}], "b": list(range(300))}
    assert plain(pickle.dumps(value, protocol)) == value
    assert plain(b"(S'it\\'s'\nS\"two\"\nl.") == ["it's", "two"]


def test_shared_and_changed_later():
    """A list that is put in two places and then grows is the same list in both."""
    shared = [1, 2]
    assert plain(pickle.dumps([shared, shared, [shared]])) == [[1, 2], [1, 2], [[1, 2]]]
    assert plain(PROTO + b"]\x94]\x94ah\x01K\x07ah\x01(K\x08K\te00.") == [[7, 8, 9]]


def test_equal_stacks_are_stored_once():
    frames = [{"filename": "a.py", "line": i, "name": "f"} for i in range(24)]
    tape = _pickle.decode(pickle.dumps([{"frames": list(frames), "n": i} for i in range(1000)]))
    assert len(np.unique(tape.node_run[tape.columns(tape.items(tape.root), ("frames",))[0]["frames"] >> 3])) == 1
    assert len(tape.tape) < 24 + 2 * 1000 + 1000 + 3 * 24 + 10


def test_the_last_of_equal_keys_counts():
    data = PROTO + b"}(\x8c\x01aK\x01\x8c\x01aK\x02u\x8c\x01aK\x03s."
    tape = _pickle.decode(data)
    assert tape.plain(tape.root) == {"a": 3}
    columns, rows = tape.columns(np.array([tape.root]), ("a",))
    assert columns["a"].tolist() == [3 * 8 + k.INT]
    assert rows.tolist() == [True]


def test_text_that_is_not_utf8_is_escaped_and_stays_distinct():
    tape = _pickle.decode(PROTO + b"](\x8c\x02\xff\xfe\x8c\x02\xff\xfd\x8c\x03\xed\xa0\x80e.")
    texts = [tape.text(v) for v in tape.items(tape.root).tolist()]
    assert texts == ["\\xff\\xfe", "\\xff\\xfd", "\\xed\\xa0\\x80"]


@pytest.mark.cost(11)  # compiles, where no earlier run has
def test_compiled_and_interpreted_agree():
    """The kernel gives the same arrays either way, and over many small steps of growth."""
    rng = random.Random(3)
    value = [{"action": rng.choice("abc"), "addr": rng.randrange(1 << 47), "stack": [rng.randrange(40) for _ in range(rng.randrange(6))], "t": (0, rng.randrange(3))} for _ in range(3000)]
    data = pickle.dumps(value)
    calls = []
    original = _jit.run

    def forced(function, work, *arguments):
        calls.append(1)
        return original(function, 1 << 40, *arguments)

    slow = _pickle.decode(data, seed=1)
    try:
        _jit.run = forced
        fast = _pickle.decode(data, seed=1)
    finally:
        _jit.run = original
    assert len(calls) > 3
    for name in ("tape", "node_shape", "node_run", "node_next", "run_start", "run_count", "string_start", "string_size", "shape_start", "shape_count", "keys"):
        assert np.array_equal(getattr(slow, name), getattr(fast, name)), name
    assert slow.root == fast.root


# ---------------------------------------------------------------------- what can run code
class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_a_pickle_that_runs_a_command_is_refused_and_runs_nothing(tmp_path, protocol):
    marker = tmp_path / "marker"
    with pytest.raises(InputRefused, match="unsafe.*not allowed"):
        _pickle.decode(pickle.dumps({"segments": [Evil(marker)]}, protocol))
    assert not marker.exists()


NAMING = {
    "GLOBAL": b"cos\nsystem\n", "STACK_GLOBAL": b"\x8c\x02os\x8c\x06system\x93", "INST": b"(ios\nsystem\n", "OBJ": b"(cos\nsystem\no", "REDUCE": b"]]R", "BUILD": b"]}b",
    "NEWOBJ": b"])\x81", "NEWOBJ_EX": b"])}\x92", "EXT1": b"\x82\x01", "EXT2": b"\x83\x01\x00", "EXT4": b"\x84\x01\x00\x00\x00", "PERSID": b"Pabc\n", "BINPERSID": b"K\x01Q",
    "NEXT_BUFFER": b"\x97", "READONLY_BUFFER": b"\x98",
}  # fmt: skip


@pytest.mark.parametrize("opcode", NAMING)
def test_every_opcode_that_names_or_calls_is_refused_by_name(opcode):
    expected = "GLOBAL" if opcode == "OBJ" else opcode
    with pytest.raises(InputRefused, match=rf"unsafe: the pickle opcode {expected} at byte \d+ is not allowed"):
        _pickle.decode(PROTO + NAMING[opcode] + b".")


@pytest.mark.parametrize("value", [datetime.datetime(2026, 1, 1), collections.OrderedDict(a=1), complex(1, 2), range(3), slice(1)], ids=lambda v: type(v).__name__)
def test_objects_are_refused(value):
    with pytest.raises(InputRefused, match="unsafe"):
        _pickle.decode(pickle.dumps([value]))


# ---------------------------------------------------------------------- hostile
def le(width: int, number: int) -> bytes:
    return number.to_bytes(width, "little")


HOSTILE = {
    "memo index 2**31": (PROTO + b"]r" + le(4, (1 << 31) - 1) + b".", "damaged.*memo"),
    "memo index read before it is written": (PROTO + b"h\x05.", "damaged.*memo"),
    "text of 2**62 bytes": (PROTO + b"\x8d" + le(8, 1 << 62) + b"abc", "truncated"),
    "text of 2**64-1 bytes": (PROTO + b"\x8d" + le(8, (1 << 64) - 1) + b"abc", "truncated"),
    "bytearray of 2**63 bytes": (b"\x80\x05\x96" + le(8, 1 << 63) + b"abc", "truncated"),
    "bytes of 4 GiB": (PROTO + b"B" + le(4, 0xFFFFFFFF) + b"abc", "truncated"),
    "int of 2**31 bytes": (PROTO + b"\x8b" + le(4, 0x7FFFFFFF) + b"\x01", "truncated"),
    "int of -1 bytes": (PROTO + b"\x8b" + le(4, 0xFFFFFFFF) + b"\x01", "truncated"),
    "frame longer than the file": (PROTO + b"\x95" + le(8, 1 << 40) + b"N.", "truncated"),
    "frame of 2**64-1": (PROTO + b"\x95" + le(8, (1 << 64) - 1) + b"N.", "truncated"),
    "no end": (PROTO + b"]", "truncated"),
    "stack underflow": (PROTO + b"a.", "damaged"),
    "tuple from nothing": (PROTO + b"\x87.", "damaged"),
    "append to a dict": (PROTO + b"}K\x01a.", "damaged"),
    "item of a list": (PROTO + b"]K\x01K\x02s.", "damaged"),
    "odd number of items": (PROTO + b"}(K\x01u.", "damaged"),
    "appends without mark": (PROTO + b"]K\x01e.", "damaged"),
    "mark as a value": (PROTO + b"](a.", "damaged"),
    "end within a mark": (PROTO + b"(.", "damaged"),
    "two values at the end": (PROTO + b"NN.", "damaged"),
    "nothing at the end": (PROTO + b".", "damaged"),
    "unknown opcode": (PROTO + b"\xff.", "damaged.*unknown opcode"),
    "protocol 77": (b"\x80\x4dN.", "not a snapshot|damaged"),
    "text": (b"Page not found", "not a snapshot"),
    "words": (b"Invalid request: the file is gone\n", "not a snapshot"),
    "memo index of a line": (b"(lp99999999999\n.", "not a snapshot|damaged"),
    "memo index that is no number": (b"(lpabc\n.", "not a snapshot|damaged"),
    "html": (b"<!DOCTYPE html><html></html>", "not a snapshot"),
    "json": (b'{"segments": []}', "not a snapshot"),
    "zip": (b"PK\x03\x04" + bytes(100), "not a snapshot"),
    "zeros": (bytes(100), "not a snapshot"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_damaged_and_hostile_bytes_are_refused_at_once(what):
    data, words = HOSTILE[what]
    begin = time.perf_counter()
    with pytest.raises(InputRefused, match=words):
        _pickle.decode(data)
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("end", range(2, 200))
def test_every_truncation_is_refused(end):
    data = pickle.dumps({"segments": [{"address": 1 << 40, "blocks": [(1, 2.5, "text", True)]}], "device_traces": [[]]})
    if end < len(data):
        with pytest.raises(InputRefused, match="truncated or incomplete"):
            _pickle.decode(data[:end])


@pytest.mark.cost(0.6)
def test_a_million_levels_are_refused_as_too_deep():
    """Whether the nest is closed bottom up by single appends or lies open under marks."""
    n = 10**6
    with pytest.raises(InputRefused, match="too deep"):
        _pickle.decode(PROTO + b"]" * n + b"a" * (n - 1) + b".")
    with pytest.raises(InputRefused, match="too deep"):
        _pickle.decode(PROTO + b"](" * n + b"e" * n + b".")


def test_a_deep_tuple_as_a_key_costs_nothing():
    """Hashing such a key is what blows Python's stack."""
    with pytest.raises(InputRefused, match="too deep"):
        _pickle.decode(PROTO + b"})" + b"\x85" * 100_000 + b"K\x01s.")


@pytest.mark.cost(0.6)
def test_keys_that_collide_in_a_dict_of_pythons_cost_nothing():
    """Ints that are equal modulo 2**61-1 make a Python dict quadratic; here no dict is made."""
    keys = b"".join(b"\x8a\x0a" + (i * ((1 << 61) - 1)).to_bytes(10, "little", signed=True) + b"N" for i in range(1, 20_000))
    begin = time.perf_counter()
    tape = _pickle.decode(PROTO + b"}(" + keys + b"u.")
    assert tape.fields(tape.root) == {}
    assert time.perf_counter() - begin < 3


def test_more_strings_than_the_table_has_cells_are_still_told_apart():
    """After a bounded number of probes a string is kept without being looked up again."""
    texts = [f"name {i}" for i in range(3000)]
    tape = _pickle.decode(pickle.dumps(texts * 2, 4))  # 3,000 strings in a table of 256 cells
    assert [tape.text(v) for v in tape.items(tape.root).tolist()] == texts * 2


def test_a_bomb_of_shared_lists_expands_nowhere():
    """Ten levels of a hundred references: 10**20 items in 300 bytes."""
    data = PROTO + b"]\x94(" + b"K\x01" * 100 + b"e"
    for level in range(9):
        data += b"]\x94(" + b"h" + bytes([level]) + (b"h" + bytes([level])) * 99 + b"e"
    tape = _pickle.decode(data + b"0" * 9 + b".")
    assert len(tape.tape) < 2000
    data = PROTO + b"]\x94(" + b"}" * 1000 + b"e](" + b"h\x00" * 5000 + b"e\x86."
    tape = _pickle.decode(data)
    with pytest.raises(InputRefused, match="bomb"):
        tape.flatten(tape.items(int(tape.items(tape.root)[1])))


def test_a_list_that_holds_itself_is_read():
    tape = _pickle.decode(PROTO + b"]\x94h\x00a.")
    assert tape.items(tape.root).tolist() == [tape.root]
    assert tape.plain(tape.root, depth=3) == [[[None]]]


@pytest.mark.cost(0.6)
def test_containers_beyond_all_measure_are_refused():
    """A file of nothing but empty dicts would need twenty times its size."""
    with pytest.raises(InputRefused, match="far more memory"):
        _pickle.decode(PROTO + b"(" + b"}" * 12_000_000 + b"l.")


def test_bytes_after_the_end_are_seen():
    data = pickle.dumps([1])
    assert _pickle.decode(data + b"trailing").used == len(data)


def test_floats_and_long_ints_keep_their_value():
    tape = _pickle.decode(pickle.dumps([1.25, 1 << 100, -(1 << 80), 1 << 2000]))
    assert [tape.number(v) for v in tape.items(tape.root).tolist()] == [1.25, 1 << 100, -(1 << 80), None]


def test_no_pickle_module_is_needed_to_read():
    """The reader imports no unpickler: what isn't there can't be tricked."""
    import ast
    import inspect

    for module in (_pickle, k, sys.modules["nbmemprof.sources._pickle"]):
        names = {a.name for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, (ast.Import, ast.ImportFrom)) for a in node.names}
        assert not names & {"pickle", "_pickle", "pickletools", "cloudpickle", "marshal", "dill"}


def test_struct_of_a_state_matches_the_kernel():
    """The numbers written out in the kernel are those that it exports."""
    assert (k.POS, k.SP, k.MEMO, k.TAPE, k.NODES, k.RUNS, k.STRINGS, k.SHAPES, k.KEYS, k.LAST_MARK, k.PAUSE, k.RESULT, k.FAULT_OP) == tuple(range(13))
    assert struct.calcsize("q") == 8
