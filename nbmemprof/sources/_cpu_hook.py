"""Native observers of PyTorch's CPU memory: every allocation and release, and the operator around it.

Two places are watched, both without a change in what PyTorch computes or allocates (a dispatch mode changes both:
composite operators take other paths under it, gradients are no longer summed in place):

- ``posix_memalign`` and ``free`` as ``libc10.so`` calls them: the entries of its table of imported functions
  (``.got.plt``) are pointed to ours, which call the real ones and write 32 bytes into a ring.
- ``at::addGlobalCallback``: PyTorch's own interface for observers of operators, the one that its profiler uses.
  Ours tells which allocations happen inside which operator, and calls Python once at the end of an
  operator that has allocated, to take the stack.

The observers are compiled at the first recording by llvmlite, which numba brings along. Linux on x86-64 or arm64.
"""

from __future__ import annotations

import atexit
import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmemprof.errors import NotRecording

__all__ = ["EVENT", "SERIAL", "Hook", "unsupported"]

EVENT = np.dtype([("addr", "u8"), ("size", "i8"), ("time", "i8"), ("tag", "u8")])  # size < 0: released, minus what malloc gave; tag: thread's slot, serial of its operator
SERIAL = (1 << 48) - 1
_RING, _SLOTS, _NAMES = 1 << 18, 1024, 1 << 14  # entries
_RELOCATIONS = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT
_FNV, _PRIME = 0xCBF29CE484222325, 0x100000001B3

_IR = """
define internal i64 @slot_of(i64 %tid) {{
entry:
  %mixed = lshr i64 %tid, 8
  br label %look
look:
  %i = phi i64 [ 0, %entry ], [ %next, %other ]
  %at = add i64 %mixed, %i
  %index = and i64 %at, {slots_mask}
  %place = shl i64 %index, 6
  %address = add i64 %place, {slots}
  %slot = inttoptr i64 %address to ptr
  %owner = load atomic i64, ptr %slot monotonic, align 8
  %mine = icmp eq i64 %owner, %tid
  br i1 %mine, label %found, label %free
free:
  %empty = icmp eq i64 %owner, 0
  br i1 %empty, label %take, label %other
take:
  %pair = cmpxchg ptr %slot, i64 0, i64 %tid monotonic monotonic
  %won = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %won, label %found, label %look_again
look_again:
  br label %other
other:
  %next = add i64 %i, 1
  %full = icmp ugt i64 %next, {slots_mask}
  br i1 %full, label %found, label %look
found:
  ret i64 %address
}}

define internal i64 @my_slot() {{
  %tid = call i64 inttoptr (i64 {pthread_self} to ptr)()
  %address = call i64 @slot_of(i64 %tid)
  ret i64 %address
}}

define internal i64 @field(i64 %slot, i64 %which) {{
  %off = shl i64 %which, 3
  %address = add i64 %slot, %off
  %p = inttoptr i64 %address to ptr
  %value = load i64, ptr %p
  ret i64 %value
}}

define internal void @set(i64 %slot, i64 %which, i64 %value) {{
  %off = shl i64 %which, 3
  %address = add i64 %slot, %off
  %p = inttoptr i64 %address to ptr
  store i64 %value, ptr %p
  ret void
}}

define internal void @put(i64 %addr, i64 %size, i64 %slot) {{
  %now = alloca [2 x i64]
  %ignored = call i32 inttoptr (i64 {clock} to ptr)(i32 1, ptr %now)
  %seconds = load i64, ptr %now
  %second = getelementptr [2 x i64], ptr %now, i64 0, i64 1
  %nanos = load i64, ptr %second
  %whole = mul i64 %seconds, 1000000000
  %time = add i64 %whole, %nanos
  %depth = call i64 @field(i64 %slot, i64 2)
  %inside = icmp ne i64 %depth, 0
  %current = call i64 @field(i64 %slot, i64 3)
  %serial = select i1 %inside, i64 %current, i64 0
  %base = sub i64 %slot, {slots}
  %high = shl i64 %base, 42
  %tag = or i64 %high, %serial
  %n = atomicrmw add ptr inttoptr (i64 {state} to ptr), i64 1 monotonic
  %wrapped = and i64 %n, {ring_mask}
  %place = shl i64 %wrapped, 5
  %address = add i64 %place, {ring}
  %e0 = inttoptr i64 %address to ptr
  %e1 = getelementptr i64, ptr %e0, i64 1
  %e2 = getelementptr i64, ptr %e0, i64 2
  %e3 = getelementptr i64, ptr %e0, i64 3
  store i64 %addr, ptr %e0
  store i64 %size, ptr %e1
  store i64 %time, ptr %e2
  store i64 %tag, ptr %e3
  ret void
}}

define i32 @memalign(ptr %out, i64 %align, i64 %size) {{
  %result = call i32 inttoptr (i64 {posix_memalign} to ptr)(ptr %out, i64 %align, i64 %size)
  %good = icmp eq i32 %result, 0
  br i1 %good, label %given, label %note
given:
  %place = load i64, ptr %out
  br label %note
note:
  %addr = phi i64 [ 0, %0 ], [ %place, %given ]
  %slot = call i64 @my_slot()
  %before = call i64 @field(i64 %slot, i64 4)
  %after = add i64 %before, 1
  call void @set(i64 %slot, i64 4, i64 %after)
  call void @put(i64 %addr, i64 %size, i64 %slot)
  ret i32 %result
}}

define void @release(ptr %p) {{
  %addr = ptrtoint ptr %p to i64
  %none = icmp eq i64 %addr, 0
  br i1 %none, label %done, label %note
note:
  %given = call i64 inttoptr (i64 {malloc_usable_size} to ptr)(ptr %p)
  %slot = call i64 @my_slot()
  %less = sub i64 -1, %given
  call void @put(i64 %addr, i64 %less, i64 %slot)
  br label %done
done:
  call void inttoptr (i64 {free} to ptr)(ptr %p)
  ret void
}}

; 1 for an operator with a kernel of its own: "space::name", not autograd's, not composite
define internal i64 @counts(ptr %name) {{
entry:
  br label %step
step:
  %i = phi i64 [ 0, %entry ], [ %next, %more ]
  %hash = phi i64 [ {fnv}, %entry ], [ %hashed, %more ]
  %colons = phi i64 [ 0, %entry ], [ %seen, %more ]
  %p = getelementptr i8, ptr %name, i64 %i
  %c = load i8, ptr %p
  %end = icmp eq i8 %c, 0
  br i1 %end, label %judge, label %more
more:
  %wide = zext i8 %c to i64
  %mixed = xor i64 %hash, %wide
  %hashed = mul i64 %mixed, {prime}
  %colon = icmp eq i8 %c, 58
  %one = zext i1 %colon to i64
  %seen = add i64 %colons, %one
  %next = add i64 %i, 1
  br label %step
judge:
  %named = icmp eq i64 %colons, 2
  br i1 %named, label %search, label %no
search:
  %j = phi i64 [ 0, %judge ], [ %j1, %another ]
  %from = add i64 %hash, %j
  %index = and i64 %from, {names_mask}
  %off = shl i64 %index, 3
  %address = add i64 %off, {names}
  %entryp = inttoptr i64 %address to ptr
  %known = load i64, ptr %entryp
  %same = icmp eq i64 %known, %hash
  br i1 %same, label %no, label %maybe
maybe:
  %empty = icmp eq i64 %known, 0
  br i1 %empty, label %yes, label %another
another:
  %j1 = add i64 %j, 1
  br label %search
yes:
  ret i64 1
no:
  ret i64 0
}}

define void @begin(ptr sret(i64) %context, ptr %function) {{
  store i64 0, ptr %context
  %name = call ptr inttoptr (i64 {record_name} to ptr)(ptr %function)
  %counted = call i64 @counts(ptr %name)
  %slot = call i64 @my_slot()
  %bits = call i64 @field(i64 %slot, i64 1)
  %shifted = shl i64 %bits, 1
  %pushed = or i64 %shifted, %counted
  call void @set(i64 %slot, i64 1, i64 %pushed)
  %ops = call i64 @field(i64 %slot, i64 5)
  %ops1 = add i64 %ops, 1
  call void @set(i64 %slot, i64 5, i64 %ops1)
  %counts = icmp ne i64 %counted, 0
  br i1 %counts, label %deeper, label %done
deeper:
  %depth = call i64 @field(i64 %slot, i64 2)
  %depth1 = add i64 %depth, 1
  call void @set(i64 %slot, i64 2, i64 %depth1)
  %first = icmp eq i64 %depth, 0
  br i1 %first, label %fresh, label %done
fresh:
  %serial = call i64 @field(i64 %slot, i64 3)
  %serial1 = add i64 %serial, 1
  call void @set(i64 %slot, i64 3, i64 %serial1)
  br label %done
done:
  ret void
}}

define void @finish(ptr %function, ptr %context) {{
  %type = alloca ptr
  %value = alloca ptr
  %trace = alloca ptr
  %slot = call i64 @my_slot()
  %bits = call i64 @field(i64 %slot, i64 1)
  %popped = lshr i64 %bits, 1
  call void @set(i64 %slot, i64 1, i64 %popped)
  %counted = and i64 %bits, 1
  %counts = icmp ne i64 %counted, 0
  br i1 %counts, label %rise, label %done
rise:
  %depth = call i64 @field(i64 %slot, i64 2)
  %depth1 = sub i64 %depth, 1
  call void @set(i64 %slot, i64 2, i64 %depth1)
  %last = icmp eq i64 %depth1, 0
  br i1 %last, label %outer, label %done
outer:
  %allocs = call i64 @field(i64 %slot, i64 4)
  %some = icmp ne i64 %allocs, 0
  br i1 %some, label %python, label %done
python:
  call void @set(i64 %slot, i64 4, i64 0)
  %thread = call ptr inttoptr (i64 {PyGILState_GetThisThreadState} to ptr)()
  %known = icmp ne ptr %thread, null
  br i1 %known, label %tell, label %done
tell:
  %name = call ptr inttoptr (i64 {record_name} to ptr)(ptr %function)
  %base = sub i64 %slot, {slots}
  %index = lshr i64 %base, 6
  %serial = call i64 @field(i64 %slot, i64 3)
  %gil = call i32 inttoptr (i64 {PyGILState_Ensure} to ptr)()
  call void inttoptr (i64 {PyErr_Fetch} to ptr)(ptr %type, ptr %value, ptr %trace)
  call void inttoptr (i64 {tell} to ptr)(ptr %name, i64 %index, i64 %serial)
  %t = load ptr, ptr %type
  %v = load ptr, ptr %value
  %b = load ptr, ptr %trace
  call void inttoptr (i64 {PyErr_Restore} to ptr)(ptr %t, ptr %v, ptr %b)
  call void inttoptr (i64 {PyGILState_Release} to ptr)(i32 %gil)
  br label %done
done:
  ret void
}}
"""


class _Callback(ctypes.Structure):
    """``at::RecordFunctionCallback``: what lies behind the scopes that we ask for is zero, so their number doesn't matter."""

    _fields_ = (("start", ctypes.c_void_p), ("end", ctypes.c_void_p), ("probability", ctypes.c_double), ("scopes", ctypes.c_bool * 40))


def unsupported() -> str | None:
    """Why CPU allocations can't be observed on this machine; None where they can."""
    if sys.platform != "linux" or platform.machine() not in _RELOCATIONS:
        return f"CPU recording works on Linux (x86-64, arm64), not on {platform.system()} {platform.machine()}"
    return None


class Hook:
    """The observers of this process. Once in place the allocation hook stays (some 50 ns an allocation); operators are observed between ``on`` and ``off``."""

    def __init__(self, torch: Any, tell: Callable[[bytes, int, int], None], composite: Iterable[str]) -> None:
        if (reason := unsupported()) is not None:
            raise NotRecording(f"{reason}. Record on such a machine, or use record(source=...) with another source.")
        library = Path(torch.__file__).parent / "lib"
        self._core = ctypes.CDLL(str(library / "libtorch_cpu.so"))
        c = ctypes.CDLL(None)
        self._tell = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)(tell)
        self._memory = [mmap.mmap(-1, size) for size in (4096, _RING * EVENT.itemsize, _SLOTS * 64, _NAMES * 8)]
        state, ring, slots, names = (ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._memory)
        self._count = memoryview(self._memory[0]).cast("q")
        self._ring: npt.NDArray[Any] = np.frombuffer(self._memory[1], EVENT)
        self._slots: npt.NDArray[np.int64] = np.frombuffer(self._memory[2], np.int64).reshape(_SLOTS, 8)
        self._names: npt.NDArray[np.uint64] = np.frombuffer(self._memory[3], np.uint64)
        for name in composite:
            self._pass(name)
        address = {n: ctypes.cast(getattr(c, n), ctypes.c_void_p).value for n in ("posix_memalign", "free", "malloc_usable_size", "pthread_self")}
        # an exception may be on its way through the operator: it is put aside while Python is asked
        python = ("PyGILState_GetThisThreadState", "PyGILState_Ensure", "PyGILState_Release", "PyErr_Fetch", "PyErr_Restore")
        address |= {n: ctypes.cast(getattr(ctypes.pythonapi, n), ctypes.c_void_p).value for n in python}
        code = _IR.format(
            state=state, ring=ring, slots=slots, names=names, ring_mask=_RING - 1, slots_mask=_SLOTS - 1, names_mask=_NAMES - 1,
            clock=ctypes.cast(c.clock_gettime, ctypes.c_void_p).value,
            record_name=ctypes.cast(self._core._ZNK2at14RecordFunction4nameEv, ctypes.c_void_p).value, tell=ctypes.cast(self._tell, ctypes.c_void_p).value,
            fnv=_FNV - (1 << 64), prime=_PRIME, **address,
        )  # fmt: skip
        self._engine, functions = _compile(code)
        self._handle: int | None = None
        self._callback = _Callback(functions["begin"], functions["finish"], 1.0, (ctypes.c_bool * 40)(True))
        self._add, self._remove = self._core._ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE, self._core._ZN2at14removeCallbackEm
        self._add.argtypes, self._add.restype = [_Callback], ctypes.c_uint64
        self._remove.argtypes, self._remove.restype = [ctypes.c_uint64], None
        self._imports = _imported(library / "libc10.so", {"posix_memalign": functions["memalign"], "free": functions["release"]})
        for keep in (self, self._engine):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(keep))  # tensors are freed after Python has ended: the code must still be there
        for place, (new, _) in self._imports.items():
            ctypes.c_uint64.from_address(place).value = new
        atexit.register(self.unhook)

    def _pass(self, name: str) -> None:
        number = _FNV
        for byte in name.encode():
            number = (number ^ byte) * _PRIME % (1 << 64)
        at = number % _NAMES
        while self._names[at] not in {0, number}:
            at = (at + 1) % _NAMES
        self._names[at] = number

    def unhook(self) -> None:
        """Give ``libc10.so`` its own imports back."""
        self.off()
        for place, (_, old) in self._imports.items():
            ctypes.c_uint64.from_address(place).value = old

    def on(self) -> None:
        """Observe operators."""
        if self._handle is None:
            self._slots[:, 4] = 0
            self._handle = self._add(self._callback)

    def off(self) -> None:
        """Observe operators no longer."""
        if self._handle is not None:
            self._remove(self._handle)
            self._handle = None

    @property
    def count(self) -> int:
        """Events since the process's first recording."""
        return self._count[0]

    @property
    def operators(self) -> int:
        """Operators observed, nested ones too."""
        return int(self._slots[:, 5].sum())

    @property
    def capacity(self) -> int:
        """Events that the ring holds."""
        return _RING

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """A copy of events ``start`` to ``stop``; the caller keeps within ``capacity`` of ``count``."""
        at = np.arange(start, stop) & (_RING - 1)
        found: npt.NDArray[Any] = self._ring[at]
        return found


def _compile(code: str) -> tuple[Any, dict[str, int]]:
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(code)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return engine, {name: engine.get_function_address(name) for name in ("memalign", "release", "begin", "finish")}


def _imported(library: Path, wanted: dict[str, int]) -> dict[int, tuple[int, int]]:
    """Addresses at which a loaded library keeps its imported functions: place → (new, real); writable when this returns."""
    base = None
    writable: list[tuple[int, int]] = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, offset, *rest = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in span.split("-"))
        if rest and rest[-1].endswith("/libc10.so"):
            base = low if int(offset, 16) == 0 and base is None else base
        if "w" in rights:
            writable.append((low, high))
    data = library.read_bytes()
    head = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, head[5] + i * head[10]) for i in range(head[11])]
    kind = _RELOCATIONS[platform.machine()]
    c = ctypes.CDLL(None)
    found: dict[int, tuple[int, int]] = {}
    for section in sections:
        if section[1] != 4 or base is None:  # SHT_RELA
            continue
        symbols = sections[section[6]]
        for at in range(section[4], section[4] + section[5], 24):
            place, info, _ = struct.unpack_from("<QQq", data, at)
            if info & 0xFFFFFFFF != kind:
                continue
            name_at = struct.unpack_from("<I", data, symbols[4] + (info >> 32) * 24)[0] + sections[symbols[6]][4]
            name = data[name_at : data.index(b"\0", name_at)].decode()
            if name in wanted:
                found[base + place] = (wanted[name], ctypes.cast(getattr(c, name), ctypes.c_void_p).value or 0)
    if len(found) != len(wanted):
        raise NotRecording(f"{library.name} of this PyTorch does not import posix_memalign and free as expected ({len(found)} of {len(wanted)} found). Use a PyTorch wheel from pytorch.org.")
    size = mmap.PAGESIZE
    for place in found:
        if not any(low <= place and place + 8 <= high for low, high in writable):
            page = place // size * size
            if c.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(2 * size if place + 8 > page + size else size), 3):
                raise NotRecording("The system does not let the imports of libc10.so be changed (mprotect failed). Record where memory protection allows it.")
    return found
