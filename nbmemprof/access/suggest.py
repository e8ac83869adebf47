"""What would be better? Each change is put through the model first; what the model doesn't confirm is not said.

Global memory: structure of arrays, one wide load for a whole structure, a base on a line's boundary, a tile in shared memory for
columns. Shared memory: a padded row, a swizzled row, lanes side by side, one wide access for neighbouring words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nbmemprof.access._lanes import LANES, WIDTHS
from nbmemprof.access._warp import LINE, WORD, GlobalAccess, SharedAccess
from nbmemprof.access._words import stride_of

__all__ = ["Suggestion", "padded", "suggestions", "swizzled"]


_VERBS = {"load": "read", "store": "write", "atomic": "change"}


@dataclass(frozen=True)
class Suggestion:
    """A change and what the model says of it.

    Attributes
    ----------
    kind
        ``structure of arrays``, ``vector width``, ``alignment``, ``shared tile``, ``padding``, ``swizzle`` or ``side by side``.
    text
        What to do, in a sentence with its numbers.
    before, after
        Sectors or wavefronts for the same data, without and with the change.
    access
        The access as it would be.
    """

    kind: str
    text: str
    before: int
    after: int
    access: GlobalAccess | SharedAccess

    @property
    def factor(self) -> float:
        """How many times fewer."""
        return self.before / self.after

    def __str__(self) -> str:
        return self.text


def suggestions(access: Any) -> list[Suggestion]:
    """Return what is better than this access by the model, the largest gain first; an access that can't be improved gives none."""
    found = _for_global(access) if isinstance(access, GlobalAccess) else _for_shared(access)
    return sorted((one for one in found if one is not None and one.after < one.before), key=lambda one: -one.factor)


# ---------------------------------------------------------------------- global memory
def _for_global(access: GlobalAccess) -> list[Suggestion | None]:
    if access.sectors <= access.ideal_unique_sectors:
        return []
    stride = stride_of(access)
    if stride is None or abs(stride) <= access.width:
        return [_aligned(access)]
    return [_tile(access, stride), _arrays(access, stride), _wider(access, stride), _aligned(access)]


def _moved(access: GlobalAccess, address: Any, width: int | None = None) -> GlobalAccess:
    lanes = tuple(None if old is None else address(lane, old) for lane, old in enumerate(access.addresses))
    return GlobalAccess(lanes, width or access.width, access.operation)


def _arrays(access: GlobalAccess, stride: int) -> Suggestion:
    after = _moved(access, lambda lane, _: lane * access.width)
    text = (
        f"Lanes {_VERBS[access.operation]} one field of a structure of {abs(stride)} B. With an array a field (structure of arrays) the same data is "
        f"{after.sectors} sectors instead of {access.sectors}."
    )
    return Suggestion("structure of arrays", text, access.sectors, after.sectors, after)


def _wider(access: GlobalAccess, stride: int) -> Suggestion | None:
    """A structure of 2, 4, 8 or 16 bytes whose fields are all wanted: one instruction for it instead of one a field."""
    first = min((address for _, address in access.active), default=0)
    if abs(stride) not in WIDTHS or access.operation != "load":
        return None
    fields = abs(stride) // access.width
    start = first // abs(stride) * abs(stride)
    after = _moved(access, lambda _, old: start + (old - start) // abs(stride) * abs(stride), abs(stride))
    each = sum(_moved(access, lambda _, old, k=k: (old - start) // abs(stride) * abs(stride) + start + k * access.width).sectors for k in range(fields))
    text = (
        f"If the other {f'{fields - 1} fields' if fields > 2 else 'field'} of each {abs(stride)} B {'are' if fields > 2 else 'is'} read too, take them together with a load of {abs(stride)} B a lane: "
        f"{after.sectors} sectors in one instruction instead of {each} in {fields}."
    )
    return Suggestion("vector width", text, each, after.sectors, after)


def _tile(access: GlobalAccess, stride: int) -> Suggestion | None:
    """A column of a matrix: read rows into shared memory, take the column from there. Both halves are checked."""
    if abs(stride) < LINE or access.width not in (4, 8) or access.operation == "atomic":
        return None
    rows = _moved(access, lambda lane, _: lane * access.width)
    pad = padded(SharedAccess(tuple(None if a is None else lane * LANES * access.width for lane, a in enumerate(access.addresses)), access.width))
    if pad is None:
        return None
    what = ("writing", "fill") if access.operation == "store" else ("reading", "take")
    text = (
        f"Lanes walk down a column ({abs(stride)} B apart). Copy a tile of 32 × 32 through shared memory, {what[0]} rows ({rows.sectors} sectors instead of {access.sectors}), "
        f"and {what[1]} the tile by columns, declared with {LANES} + {(pad.pitch - LANES * access.width) // access.width} of them ({pad.after} wavefront{'s' if pad.after > 1 else ''})."
    )
    return Suggestion("shared tile", text, access.sectors, rows.sectors, rows)


def _aligned(access: GlobalAccess) -> Suggestion | None:
    first = min((address for _, address in access.active), default=0)
    off = first % LINE
    after = _moved(access, lambda _, old: old - off)
    if not off or after.sectors >= access.sectors:
        return None
    text = f"The first address lies {off} B behind a line's beginning. On a boundary of {LINE} B (pad the rows, or shift the start) it is {after.sectors} sectors instead of {access.sectors}."
    return Suggestion("alignment", text, access.sectors, after.sectors, after)


# ---------------------------------------------------------------------- shared memory
def _for_shared(access: SharedAccess) -> list[Suggestion | None]:
    if access.conflicts == 0:
        return []
    return [padded(access), swizzled(access), _side_by_side(access), _wider_shared(access)]


@dataclass(frozen=True)
class Padded(Suggestion):
    """A padded row; ``pitch`` is its new length in bytes."""

    pitch: int = 0


def _pitches(access: SharedAccess) -> list[int]:
    """Lengths of a row, in bytes, that the addresses may stem from: their stride, else a power of two."""
    stride = stride_of(access)
    if stride:
        return [abs(stride)]
    return [LINE, 2 * LINE, LINE // 2, 4 * LINE, 8 * LINE, 16 * LINE, 32 * LINE]


def padded(access: SharedAccess) -> Padded | None:
    """Return the smallest padding of a row that takes the conflict away, or None; the row itself must stay free of conflicts."""
    for pitch in _pitches(access):
        for pad in range(access.width, LINE + 1, access.width):
            lanes = tuple(None if old is None else old // pitch * (pitch + pad) + old % pitch for old in access.addresses)
            after = SharedAccess(lanes, access.width, access.operation)
            if after.conflicts == 0 and _row(access, pitch, lambda a, row, p=pitch + pad: row * p + a).conflicts == 0:
                columns = pitch // access.width
                text = (
                    f"Pad each row of {pitch} B by {pad} B (declare {columns} + {pad // access.width} columns): "
                    f"{after.wavefronts} wavefront{'' if after.wavefronts == 1 else 's'} instead of {access.wavefronts}."
                )
                return Padded("padding", text, access.wavefronts, after.wavefronts, after, pitch + pad)
    return None


def swizzled(access: SharedAccess) -> Suggestion | None:
    """Return an exclusive-or swizzle within lines of 128 B that takes the conflict away, or None; it costs no memory."""
    if access.width < WORD:
        return None
    columns = LINE // access.width
    for pitch in _pitches(access):
        if pitch % LINE:
            continue
        rows_per_step = pitch // LINE

        def swap(address: int, rows: int = rows_per_step) -> int:
            line, column = address // LINE, address % LINE // access.width
            return line * LINE + (column ^ (line // rows % columns)) * access.width + address % access.width

        after = SharedAccess(tuple(None if old is None else swap(old) for old in access.addresses), access.width, access.operation)
        if after.conflicts == 0 and _row(access, pitch, lambda a, row, p=pitch, swap=swap: swap(row * p + a)).conflicts == 0:
            text = (
                f"Swizzle: keep column c of row r at column c ^ (r % {columns}) of its 128 B (in units of {access.width} B): "
                f"{after.wavefronts} wavefront{'' if after.wavefronts == 1 else 's'} instead of {access.wavefronts}, no memory lost."
            )
            return Suggestion("swizzle", text, access.wavefronts, after.wavefronts, after)
    return None


def _row(access: SharedAccess, pitch: int, place: Any) -> SharedAccess:
    """Lanes side by side along row 1 of the changed layout."""
    wide = max(1, min(LANES, pitch // access.width))
    return SharedAccess(tuple(place(lane * access.width, 1) if lane < wide else None for lane in range(LANES)), access.width, access.operation)


def _side_by_side(access: SharedAccess) -> Suggestion | None:
    """Neighbouring lanes take neighbouring elements: a sum by halves instead of strides that double."""
    stride = stride_of(access)
    if stride is None or abs(stride) >= LINE:  # a row or more apart: a column that is wanted as it is
        return None
    after = SharedAccess(tuple(None if old is None else lane * access.width for lane, old in enumerate(access.addresses)), access.width, access.operation)
    text = f"Renumber the work so that neighbouring lanes take neighbouring elements (a sum by halves, not by strides that double): {after.wavefronts} wavefront{'' if after.wavefronts == 1 else 's'} instead of {access.wavefronts}."
    return Suggestion("side by side", text, access.wavefronts, after.wavefronts, after)


def _wider_shared(access: SharedAccess) -> Suggestion | None:
    """Words that lie in pairs or fours: one wide access for all of them instead of one each."""
    stride = stride_of(access)
    if stride is None or abs(stride) not in (8, 16) or access.width >= abs(stride) or access.width < WORD:
        return None
    wide, fields = abs(stride), abs(stride) // access.width
    lanes = tuple(None if old is None else old // wide * wide for old in access.addresses)
    after = SharedAccess(lanes, wide, access.operation)
    each = sum(SharedAccess(tuple(None if a is None else a + k * access.width for a in lanes), access.width, access.operation).wavefronts for k in range(fields))
    text = (
        f"If all {fields} values of each {wide} B are wanted, move them at once with {wide} B a lane: "
        f"{after.wavefronts} wavefronts instead of {each} in {fields} instructions."
    )
    return Suggestion("vector width", text, each, after.wavefronts, after)
