"""What one warp instruction does to memory: sectors of global memory, wavefronts of shared memory. Exact, by rules; no GPU.

Sources: CUDA C++ Programming Guide, "Device Memory Accesses" (sectors of 32 bytes, lines of 128) and "Shared Memory" (32 banks of 4 bytes);
Nsight Compute's documentation (wavefronts). When the two halves of a wide shared load go together was said by NVIDIA for compute
capability 7.x (forum thread 77228) and holds on an H200, where all of this was counted: tests/fixtures/h200/patterns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from nbmemprof.access._lanes import LANES, Lanes

__all__ = ["BANKS", "LINE", "SECTOR", "WORD", "GlobalAccess", "Phase", "SharedAccess", "phases_of"]

SECTOR, LINE = 32, 128
BANKS, WORD = 32, 4
Operation = Literal["load", "store", "atomic"]


@dataclass(frozen=True)
class _Access:
    """One instruction of one warp.

    Attributes
    ----------
    addresses
        A byte address for each of the 32 lanes, None where it is switched off.
    width
        Bytes that each lane moves.
    operation
        ``load``, ``store``, or ``atomic`` (global memory: the sectors of a load; that equal addresses wait for each other is not in them).
    """

    addresses: Lanes
    width: int
    operation: Operation = "load"

    @property
    def active(self) -> tuple[tuple[int, int], ...]:
        """Lane and address of the lanes that take part."""
        return tuple((lane, address) for lane, address in enumerate(self.addresses) if address is not None)

    @property
    def active_lanes(self) -> int:
        """How many lanes take part."""
        return sum(address is not None for address in self.addresses)

    @property
    def unique_bytes(self) -> int:
        """Distinct bytes that are moved; lanes that share an address count once."""
        return covered((address, address + self.width) for _, address in self.active)

    def explain(self) -> str:
        """Say in one sentence what happens."""
        from nbmemprof.access import _words

        return _words.explain(self)

    def suggestions(self) -> list[Any]:
        """Return the changes that the model says are better, best first; see :mod:`nbmemprof.access.suggest`."""
        from nbmemprof.access import suggest

        return suggest.suggestions(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        from nbmemprof.views.warp import bundle

        return bundle(self)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"<{self.explain()}>"


@dataclass(frozen=True, repr=False)
class GlobalAccess(_Access):
    """A load or store of global (or local) memory by one warp.

    Memory moves in sectors of 32 bytes; four of them share a line of 128 bytes and its tag.

    Attributes
    ----------
    addresses
        Byte address of each of 32 lanes; None where a lane is inactive.
    width
        Bytes that each lane moves.
    operation
        ``"load"`` or ``"store"``.
    """

    @property
    def sectors(self) -> int:
        """Distinct sectors: what the counter ``l1tex__t_sectors_pipe_lsu_mem_global_op_ld`` (``_st``) counts."""
        return len(self.sector_lanes)

    @property
    def lines(self) -> int:
        """Distinct lines of 128 bytes: tags looked up."""
        return len({address // LINE for _, address in self.active})

    @property
    def requests(self) -> int:
        """1, or 0 where no lane is active."""
        return int(self.active_lanes > 0)

    @property
    def ideal_sectors(self) -> int:
        """Sectors if the active lanes' data lay side by side."""
        return -(-self.active_lanes * self.width // SECTOR)

    @property
    def ideal_unique_sectors(self) -> int:
        """Sectors if the distinct bytes lay side by side: fewer where lanes share an address."""
        return -(-self.unique_bytes // SECTOR)

    @property
    def efficiency(self) -> float:
        """Distinct bytes by bytes moved, in (0, 1]; 1 where nothing is moved."""
        return self.unique_bytes / (SECTOR * self.sectors) if self.sectors else 1.0

    @property
    def bytes_per_sector(self) -> float:
        """Bytes handed to lanes by sector, as the counter has it: above 32 where lanes share data."""
        return self.active_lanes * self.width / self.sectors if self.sectors else 0.0

    @property
    def sector_lanes(self) -> dict[int, list[int]]:
        """Sector (address / 32) to the lanes that touch it, by address."""
        found: dict[int, list[int]] = {}
        for lane, address in sorted(self.active, key=lambda one: one[1]):
            found.setdefault(address // SECTOR, []).append(lane)
        return found


@dataclass(frozen=True)
class Phase:
    """Lanes of a shared-memory access that go together: each bank gives one word a wavefront.

    Attributes
    ----------
    lanes
        Active lanes.
    words
        Bank to its distinct words (address / 4), in order of address.
    """

    lanes: tuple[int, ...]
    words: dict[int, list[int]]

    @property
    def wavefronts(self) -> int:
        """Passes that this phase takes: most distinct words in one bank."""
        return max((len(words) for words in self.words.values()), default=0)


@dataclass(frozen=True, repr=False)
class SharedAccess(_Access):
    """A load or store of shared memory by one warp: 32 banks, each 4 bytes wide.

    Attributes
    ----------
    addresses
        Byte address of each of 32 lanes; None where a lane is inactive.
    width
        Bytes that each lane moves.
    operation
        ``"load"`` or ``"store"``.
    """

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Groups of lanes that are served one after the other; see :func:`phases_of`."""
        return phases_of(self.addresses, self.width, self.operation)

    @property
    def wavefronts(self) -> int:
        """Passes: what ``l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld`` (``_st``) counts."""
        return sum(phase.wavefronts for phase in self.phases)

    @property
    def ideal_wavefronts(self) -> int:
        """Passes without conflicts: one a phase."""
        return len(self.phases)

    @property
    def ways(self) -> int:
        """Degree of the worst bank conflict: 1 is none, 32 the most; 0 where no lane is active."""
        return max((phase.wavefronts for phase in self.phases), default=0)

    @property
    def conflicts(self) -> int:
        """Passes too many."""
        return self.wavefronts - self.ideal_wavefronts

    @property
    def efficiency(self) -> float:
        """Passes without conflicts by passes, in (0, 1]; 1 where nothing is moved."""
        return self.ideal_wavefronts / self.wavefronts if self.wavefronts else 1.0


def phases_of(addresses: Lanes, width: int, operation: Operation = "load") -> tuple[Phase, ...]:
    """Split a warp into the groups of lanes that shared memory serves together; groups without an active lane are left out.

    Up to 4 bytes a lane the whole warp is one group, 8 bytes make two halves, 16 bytes four quarters. In a load, neighbouring
    groups join where all active lanes ``i`` and ``i xor 1`` read the same address, or all ``i`` and ``i xor 2``.
    """
    size = {8: 16, 16: 8}.get(width, LANES)
    if size < LANES and operation == "load" and (_shares(addresses, 1) or _shares(addresses, 2)):
        size *= 2
    groups = [range(first, first + size) for first in range(0, LANES, size)]
    return tuple(phase for group in groups if (phase := _phase(addresses, width, group)).lanes)


def _shares(addresses: Lanes, step: int) -> bool:
    pairs = ((addresses[lane], addresses[lane ^ step]) for lane in range(LANES))
    return all(one is None or other is None or one == other for one, other in pairs)


def _phase(addresses: Lanes, width: int, lanes: Iterable[int]) -> Phase:
    active = [(lane, address) for lane in lanes if (address := addresses[lane]) is not None]
    words = sorted({word for _, address in active for word in range(address // WORD, (address + width - 1) // WORD + 1)})
    banks: dict[int, list[int]] = {}
    for word in words:
        banks.setdefault(word % BANKS, []).append(word)
    return Phase(tuple(lane for lane, _ in active), banks)


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Bytes in the union of half-open spans."""
    total, reached = 0, -1
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
