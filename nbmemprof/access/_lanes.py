"""The 32 lanes of a warp: what may be passed as addresses, and as which byte each is read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from nbmemprof.errors import NbmemprofError

__all__ = ["LANES", "WIDTHS", "Addresses", "Lanes", "lanes_of"]

LANES = 32
WIDTHS = (1, 2, 4, 8, 16)  # bytes one lane moves with one instruction: PTX ld/st .b8 to .v4.b32

Lanes = tuple[int | None, ...]
Addresses = Iterable[int | None] | Callable[[int], int | None]


def lanes_of(addresses: Addresses, width: int, *, base: int = 0, element_bytes: int | None = None) -> Lanes:
    """Return a byte address for each of 32 lanes, None where a lane is switched off.

    Parameters
    ----------
    addresses
        Bytes, at most 32, None for an inactive lane; a short list is lanes 0 to n - 1. Or an index expression: a function of the lane that
        gives an element's index (or None), as in ``lambda t: t * 32``.
    width
        Bytes that each lane moves: 1, 2, 4, 8 or 16.
    base
        Added to every address, in bytes.
    element_bytes
        What an index counts; ``width`` unless said.

    Raises
    ------
    NbmemprofError
        A width that no instruction has, more than 32 lanes, an address that is no whole number, is negative, or is not a multiple of the width
        (the GPU stops with "misaligned address").
    """
    if width not in WIDTHS:
        raise NbmemprofError(f"No instruction moves {width!r} bytes a lane. Use a width of 1, 2, 4, 8 or 16; wider elements are several accesses.")
    if not callable(addresses) and not isinstance(addresses, Iterable):
        raise NbmemprofError(f"{addresses!r} is neither addresses nor an index expression. Give up to 32 byte addresses, like [0, 4, 8], or a function of the lane, like lambda t: t * 32.")
    if callable(addresses):
        scale = width if element_bytes is None else element_bytes
        found = [None if (index := addresses(lane)) is None else whole(index, lane) * scale for lane in range(LANES)]
    else:
        found = [None if address is None else whole(address, lane) for lane, address in enumerate(addresses)]
    if len(found) > LANES:
        raise NbmemprofError(f"A warp has 32 lanes, {len(found)} addresses were given. Pass one warp at a time, or trace a block with mp.access.trace.")
    moved = [None if address is None else address + base for address in found]
    for lane, address in enumerate(moved):
        if address is not None and (address < 0 or address % width):
            what = "is negative" if address < 0 else f"is not a multiple of its width, {width} bytes: the GPU would stop with 'misaligned address'"
            raise NbmemprofError(f"Lane {lane}: address {address} {what}. Check the index arithmetic, or use a narrower width.")
    return tuple(moved) + (None,) * (LANES - len(moved))


def whole(value: Any, lane: int) -> int:
    """Return an integer of any library as int."""
    try:
        return operator.index(value)
    except TypeError as error:
        raise NbmemprofError(f"Lane {lane}: {value!r} is no whole number, so it is no address. Use // instead of / in an index expression.") from error
