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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nbmemprof.errors import NotRecording
from nbmemprof.sources._cpu_ir import IR

__all__ = ["EVENT", "SERIAL", "Hook", "unsupported"]

EVENT = np.dtype([("addr", "u8"), ("size", "i8"), ("time", "i8"), ("tag", "u8")])  # size < 0: released, minus what malloc gave; tag: thread's slot, serial of its operator
SERIAL = (1 << 48) - 1
_RING, _SLOTS, _NAMES = 1 << 18, 1024, 1 << 14  # entries
_RELOCATIONS = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT
_FNV, _PRIME = 0xCBF29CE484222325, 0x100000001B3


class _Callback(ctypes.Structure):
    """``at::RecordFunctionCallback``: what lies behind the scopes that we ask for is zero, so their number doesn't matter."""

    _fields_ = (("start", ctypes.c_void_p), ("end", ctypes.c_void_p), ("probability", ctypes.c_double), ("scopes", ctypes.c_bool * 40))


def unsupported() -> str | None:
    """Why CPU allocations can't be observed on this machine; None where they can."""
    if sys.platform != "linux" or platform.machine() not in _RELOCATIONS:
        return f"CPU recording works on Linux (x86-64, arm64), not on {platform.system()} {platform.machine()}"
    return None


class Hook:
    """The observers of this process.

    The allocation hook stays from the first recording on (some 50 ns an allocation), so that what is made between two
    recordings is known in the second, until ``unhook``; operators are observed between ``on`` and ``off``.
    """

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
        self._imports = _imports(library / "libc10.so", ("posix_memalign", "free"))
        address = {n: ctypes.cast(getattr(c, n), ctypes.c_void_p).value for n in ("malloc_usable_size", "pthread_self")}
        address |= {n: real for n, (_, real) in self._imports.items()}
        # an exception may be on its way through the operator: it is put aside while Python is asked
        python = ("PyGILState_GetThisThreadState", "PyGILState_Ensure", "PyGILState_Release", "PyErr_Fetch", "PyErr_Restore")
        address |= {n: ctypes.cast(getattr(ctypes.pythonapi, n), ctypes.c_void_p).value for n in python}
        code = IR.format(
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
        for keep in (self, self._engine):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(keep))  # tensors are freed after Python has ended: the code must still be there
        self._ours = {"posix_memalign": functions["memalign"], "free": functions["release"]}
        self.hooked = False
        self.hook()
        atexit.register(self.unhook)

    def _pass(self, name: str) -> None:
        number = _FNV
        for byte in name.encode():
            number = (number ^ byte) * _PRIME % (1 << 64)
        at = number % _NAMES
        while self._names[at] not in {0, number}:
            at = (at + 1) % _NAMES
        self._names[at] = number

    def hook(self) -> None:
        """Point the imports of ``libc10.so`` to our functions."""
        for name, (place, _) in self._imports.items():
            ctypes.c_uint64.from_address(place).value = self._ours[name]
        self.hooked = True

    def unhook(self) -> None:
        """Give ``libc10.so`` its own imports back, unless somebody has replaced ours since."""
        self.off()
        for name, (place, real) in self._imports.items():
            entry = ctypes.c_uint64.from_address(place)
            if self.hooked and entry.value == self._ours[name]:
                entry.value = real
        self.hooked = False

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


def _imports(library: Path, wanted: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """Where a loaded library keeps the address of an imported function, and that address; the places are writable when this returns.

    An address within the library itself is its stub for a function that was never called: the real one is looked up.
    """
    mapped, writable = [], []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, offset, *rest = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in span.split("-"))
        if rest and rest[-1].endswith("/" + library.name):
            mapped.append((low, high, int(offset, 16)))
        if "w" in rights:
            writable.append((low, high))
    base = min((low for low, _, offset in mapped if offset == 0), default=0)
    c, size, found = ctypes.CDLL(None), mmap.PAGESIZE, {}
    for name, relative in _relocations(library.read_bytes()):
        if name in wanted and base:
            place = base + relative
            value = int(ctypes.c_uint64.from_address(place).value)
            stub = any(low <= value < high for low, high, _ in mapped)
            found[name] = place, ctypes.cast(getattr(c, name), ctypes.c_void_p).value or 0 if stub else value
    if len(found) != len(wanted):
        raise NotRecording(f"{library.name} of this PyTorch does not import posix_memalign and free as expected ({len(found)} of {len(wanted)} found). Use a PyTorch wheel from pytorch.org.")
    for place, _ in found.values():
        page = place // size * size
        if not any(low <= place < high for low, high in writable) and c.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(size), 3):
            raise NotRecording("The system does not let the imports of libc10.so be changed (mprotect failed). Record where memory protection allows it.")
    return found


def _relocations(data: bytes) -> Iterator[tuple[str, int]]:
    """Name and offset of every imported function of an ELF file that is called through its table."""
    head = struct.unpack_from("<HHIQQQIHHHHHH", data, 16)
    sections = [struct.unpack_from("<IIQQQQIIQQ", data, head[5] + i * head[10]) for i in range(head[11])]
    kind = _RELOCATIONS[platform.machine()]
    for section in sections:
        if section[1] != 4:  # SHT_RELA
            continue
        symbols = sections[section[6]]
        for at in range(section[4], section[4] + section[5], 24):
            place, info, _ = struct.unpack_from("<QQq", data, at)
            if info & 0xFFFFFFFF == kind:
                name_at = struct.unpack_from("<I", data, symbols[4] + (info >> 32) * 24)[0] + sections[symbols[6]][4]
                yield data[name_at : data.index(b"\0", name_at)].decode(), place
