"""Memory taken from the driver: new segments and pages, and where they lie.

Rules of ``c10/cuda/CUDACachingAllocator.cpp``, a function each.
"""

from __future__ import annotations

from nbmemprof.allocator._blocks import absorb, new_block, put, put_hole, recorded, splice, take, tell
from nbmemprof.allocator._memory import (
    ADDR,
    AREA,
    AREA_BASE,
    AREA_BYTES,
    AREA_LIST,
    AREA_PAGE,
    AREAS_MADE,
    ASCENDING,
    AT,
    CAPACITY,
    DESCENDING,
    DEVICE_ALLOC,
    FED,
    FREE,
    FREE_COMPLETED,
    GIVEN,
    HOLE,
    IS_AREA,
    LARGE,
    LIMIT,
    LIST,
    LIST_HOLES,
    LIST_SMALL,
    LIST_STREAM,
    MAX_SPLIT,
    MODE,
    NEXT,
    NEXT_ADDR,
    OOM,
    OVERSIZE_SEGMENTS,
    POLICY,
    PREV,
    RANDOM,
    REFUSALS,
    RESERVED,
    RESERVED_BYTES,
    SEGMENT,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SEGMENTS_MADE,
    SIZE,
    STATE,
    T_ADDR,
    VIRTUAL,
    WINDOW,
    WINDOW_END,
    WRONG,
    Ints,
    after,
    at_least,
    gain,
    gain_one,
    new_record,
)  # fmt: skip
from nbmemprof.allocator.rounding import ROUND_LARGE, SMALL_BUFFER


# ---------------------------------------------------------------- 1.7 new memory
def granted(m: Ints, t: Ints, bytes_: int) -> int:
    """Whether the driver gives these bytes: what the recording says, or the card's capacity."""
    if m[MODE] == FED and m[WRONG] == 0:
        kind = recorded(m, t)
        if kind == SEGMENT_ALLOC or kind == SEGMENT_MAP:
            return 1
        if kind == SEGMENT_FREE or kind == SEGMENT_UNMAP or kind == OOM or kind == FREE_COMPLETED:
            m[REFUSALS] += 1
            return 0
    return 1 if m[RESERVED] + bytes_ <= m[CAPACITY] else 0


def new_address(m: Ints, t: Ints, bytes_: int) -> int:
    """Where the driver puts a new range: as recorded, as given, or by the policy."""
    if m[MODE] == FED and m[WRONG] == 0:
        kind = recorded(m, t)
        if kind == SEGMENT_ALLOC or kind == SEGMENT_MAP:
            return t[m[AT] + T_ADDR]
    if m[GIVEN]:
        addr = m[GIVEN]
        m[GIVEN] = 0
        return addr
    span = (bytes_ + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE
    policy = m[POLICY]
    if policy == ASCENDING:
        addr = m[NEXT_ADDR]
        m[NEXT_ADDR] = addr + span
        return addr
    if policy == DESCENDING:
        m[NEXT_ADDR] -= span
        return m[NEXT_ADDR]
    if policy == RANDOM:  # distinct slots of 256 GiB in a shuffled order
        m[NEXT_ADDR] = (m[NEXT_ADDR] + 0x2F0B4D) & 0x7FFFFF
        return (m[NEXT_ADDR] * 0x5BD1E9 & 0x7FFFFF) << 38
    if m[WINDOW] + span > m[WINDOW_END]:  # windows of whole 32 MiB going down, each filled upwards
        size = (span + (1 << 25) - 1) >> 25 << 25
        m[NEXT_ADDR] -= size
        m[WINDOW] = m[NEXT_ADDR]
        m[WINDOW_END] = m[NEXT_ADDR] + size
    addr = m[WINDOW]
    m[WINDOW] += span
    return addr


def new_memory(m: Ints, t: Ints, free_list: int, rounded: int, nominal: int, expandable: int) -> int:
    """Return a block of new memory, in no set; 0 where the limit or the driver refuses."""
    if m[RESERVED] + nominal > m[LIMIT]:
        return 0
    if expandable:
        return expand(m, t, free_list, rounded)
    if granted(m, t, nominal) == 0:
        return 0
    small = m[free_list + LIST_SMALL]
    b = new_block(m, free_list, 0, new_address(m, t, nominal), nominal)
    m[RESERVED] += nominal
    m[DEVICE_ALLOC] += 1
    m[SEGMENTS_MADE] += 1
    gain(m, SEGMENT, small, 1)
    gain(m, RESERVED_BYTES, small, nominal)
    if nominal >= m[MAX_SPLIT]:
        gain_one(m, OVERSIZE_SEGMENTS)
    tell(m, t, SEGMENT_ALLOC, m[b + ADDR], nominal, m[free_list + LIST_STREAM], -1)
    return b


def room_for(m: Ints, t: Ints, free_list: int, rounded: int) -> int:
    """Return the block from which contiguous free or unmapped blocks hold the request; a new reservation where there is none."""
    b = at_least(m, free_list + LIST_HOLES, 0)
    while b:
        start = m[b + PREV] if m[b + PREV] and m[m[b + PREV] + STATE] == FREE else b
        total = 0
        p = start
        while p and total < rounded and (m[p + STATE] == FREE or m[p + STATE] == HOLE):
            total += m[p + SIZE]
            p = m[p + NEXT]
        if total >= rounded:
            return start
        b = after(m, b)
    page = SMALL_BUFFER if m[free_list + LIST_SMALL] else m[LARGE]
    size = (m[VIRTUAL] + page - 1) // page * page
    area = new_record(m, IS_AREA)
    m[area + AREA_BASE] = new_address(m, t, size)
    m[area + AREA_BYTES] = size
    m[area + AREA_PAGE] = page
    m[area + AREA_LIST] = free_list
    m[AREAS_MADE] += 1
    b = new_block(m, free_list, area, m[area + AREA_BASE], size)
    put_hole(m, b)
    return b


def map_pages(m: Ints, t: Ints, b: int, size: int) -> int:
    """Map the beginning of an unmapped block, up to a page's end, and merge it; 0 where the driver refuses."""
    area = m[b + AREA]
    page = m[area + AREA_PAGE]
    addr = m[b + ADDR]
    mapped = (addr + size - m[area + AREA_BASE] + page - 1) // page * page + m[area + AREA_BASE] - addr
    if granted(m, t, mapped) == 0:
        return 0
    free_list = m[b + LIST]
    take(m, b)
    if mapped < m[b + SIZE]:
        rest = new_block(m, free_list, area, addr + mapped, m[b + SIZE] - mapped)
        splice(m, rest, b, m[b + NEXT])
        put_hole(m, rest)
        m[b + SIZE] = mapped
    absorb(m, b, m[b + PREV], FREE)
    absorb(m, b, m[b + NEXT], FREE)
    put(m, b)
    m[RESERVED] += mapped
    m[DEVICE_ALLOC] += 1
    gain(m, RESERVED_BYTES, m[free_list + LIST_SMALL], mapped)
    tell(m, t, SEGMENT_MAP, addr, mapped, m[free_list + LIST_STREAM], -1)
    return 1


def expand(m: Ints, t: Ints, free_list: int, rounded: int) -> int:
    b = room_for(m, t, free_list, rounded)
    if m[b + SIZE] < rounded and m[b + STATE] == HOLE and m[b + NEXT] == 0:
        return 0  # larger than a whole reservation
    if m[b + STATE] == HOLE and map_pages(m, t, b, min(m[b + SIZE], rounded)) == 0:
        return 0
    while m[b + SIZE] < rounded:
        hole = m[b + NEXT]
        if hole == 0 or m[hole + STATE] != HOLE or map_pages(m, t, hole, min(rounded - m[b + SIZE], m[hole + SIZE])) == 0:
            return 0
        b = hole
    take(m, b)
    return b
