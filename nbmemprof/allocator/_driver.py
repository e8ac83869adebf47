"""Memory taken from the driver and given back: new segments and pages, garbage collection, release and flush.

Rules of ``c10/cuda/CUDACachingAllocator.cpp``, a function each.
"""

from __future__ import annotations

from nbmemprof.allocator._blocks import absorb, complete, new_block, put, put_hole, recorded, splice, take, tell
from nbmemprof.allocator._memory import (
    ADDR,
    AGE,
    AREA,
    AREA_BASE,
    AREA_BYTES,
    AREA_LIST,
    AREA_PAGE,
    AREAS_MADE,
    ASCENDING,
    AT,
    BARRED,
    CAPACITY,
    CHAIN,
    DEFAULT_LARGE,
    DEFAULT_SMALL,
    DESCENDING,
    DEVICE_ALLOC,
    DEVICE_FREE,
    FAILED,
    FED,
    FREE,
    FREE_COMPLETED,
    GC_LIMIT,
    GIVEN,
    HALF_FIRST,
    HALF_SEARCHES,
    HOLE,
    IS_AREA,
    LARGE,
    LIMIT,
    LIST,
    LIST_FREE,
    LIST_HOLES,
    LIST_NEXT,
    LIST_SMALL,
    LIST_STREAM,
    MAX_SPLIT,
    MODE,
    NEXT,
    NEXT_ADDR,
    OOM,
    OVERSIZE_SEGMENTS,
    PENDING_FIRST,
    POLICY,
    POOL_FREEABLE,
    POOL_LARGE,
    POOL_NEXT,
    POOL_SMALL,
    POOLS,
    PREV,
    QUIET,
    RANDOM,
    REFUSALS,
    RESERVED,
    RESERVED_BYTES,
    RIGHT,
    SEGMENT,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SEGMENTS_MADE,
    SIZE,
    STATE,
    SYNCS,
    T_ADDR,
    VIRTUAL,
    WINDOW,
    WINDOW_END,
    WRONG,
    Ints,
    after,
    at_least,
    before,
    gain,
    gain_one,
    last,
    lose,
    lose_one,
    new_record,
    recycle,
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


# ---------------------------------------------------------------- 1.8 garbage collection
def collect(m: Ints, t: Ints) -> int:
    """Free whole cached segments of the large default pool, those first that were longest unused."""
    if m[RESERVED] <= m[GC_LIMIT]:
        return 0
    target = m[RESERVED] - m[GC_LIMIT]
    freed = 0
    half = m[DEFAULT_LARGE]
    searches = m[half + HALF_SEARCHES]
    total = 0
    count = 0
    free_list = m[half + HALF_FIRST]
    while free_list:
        b = at_least(m, free_list + LIST_FREE, 0)
        while b:
            if m[b + PREV] == 0 and m[b + NEXT] == 0:
                total += searches - m[b + AGE]
                count += 1
            b = after(m, b)
        free_list = m[free_list + LIST_NEXT]
    progress = 1
    while freed < target and progress and count > 0:
        sum_ = total
        number = count
        progress = 0
        free_list = m[half + HALF_FIRST]
        while free_list:
            b = at_least(m, free_list + LIST_FREE, 0)
            while b:
                following = after(m, b)
                age = searches - m[b + AGE]
                if m[b + PREV] == 0 and m[b + NEXT] == 0 and m[b + AREA] == 0 and age * number >= sum_:
                    progress = 1
                    freed += m[b + SIZE]
                    total -= age
                    count -= 1
                    release(m, t, b)
                b = following
            free_list = m[free_list + LIST_NEXT]
    return 0


# ---------------------------------------------------------------- 1.9 releasing memory
def release(m: Ints, t: Ints, b: int) -> int:
    """Give a classic segment back."""
    take(m, b)
    size = m[b + SIZE]
    free_list = m[b + LIST]
    small = m[free_list + LIST_SMALL]
    m[RESERVED] -= size
    m[DEVICE_FREE] += 1
    lose(m, SEGMENT, small, 1)
    lose(m, RESERVED_BYTES, small, size)
    if size >= m[MAX_SPLIT]:
        lose_one(m, OVERSIZE_SEGMENTS)
    tell(m, t, SEGMENT_FREE, m[b + ADDR], size, m[free_list + LIST_STREAM], -1)
    recycle(m, b)
    return size


def unmap(m: Ints, t: Ints, b: int) -> int:
    """Unmap the whole pages of a free expandable block; what is left at its ends stays free."""
    area = m[b + AREA]
    free_list = m[b + LIST]
    base = m[area + AREA_BASE]
    page = m[area + AREA_PAGE]
    addr = m[b + ADDR]
    begin = (addr - base + page - 1) // page * page + base
    end = (addr + m[b + SIZE] - base) // page * page + base
    if begin >= end:
        return 0
    if m[BARRED] and (m[BARRED] < 0 or m[BARRED] == 1 + m[free_list + LIST_STREAM]):  # torch waits for the stream first, which the driver refuses in its capture
        m[FAILED] = 1
        return 0
    take(m, b)
    if begin > addr:
        head = new_block(m, free_list, area, addr, begin - addr)
        splice(m, head, m[b + PREV], b)
        put(m, head)
    if addr + m[b + SIZE] > end:
        tail = new_block(m, free_list, area, end, addr + m[b + SIZE] - end)
        splice(m, tail, b, m[b + NEXT])
        put(m, tail)
    m[b + ADDR] = begin
    m[b + SIZE] = end - begin
    m[b + STATE] = HOLE
    absorb(m, b, m[b + PREV], HOLE)
    absorb(m, b, m[b + NEXT], HOLE)
    m[RESERVED] -= end - begin
    m[DEVICE_FREE] += 1
    lose(m, RESERVED_BYTES, m[free_list + LIST_SMALL], end - begin)
    tell(m, t, SEGMENT_UNMAP, begin, end - begin, m[free_list + LIST_STREAM], -1)
    if m[b + PREV] == 0 and m[b + NEXT] == 0:  # the whole reservation is unmapped: it is given back
        recycle(m, area)
        return recycle(m, b)
    return put_hole(m, b)


def release_half(m: Ints, t: Ints, half: int) -> int:
    """Free every whole classic segment of a half in the order of its set, then unmap the free expandable blocks."""
    first = 0
    latest = 0
    free_list = m[half + HALF_FIRST]
    while free_list:
        b = at_least(m, free_list + LIST_FREE, 0)
        while b:
            following = after(m, b)
            if m[b + AREA]:
                m[b + CHAIN] = 0
                if latest:
                    m[latest + CHAIN] = b
                else:
                    first = b
                latest = b
            elif m[b + PREV] == 0 and m[b + NEXT] == 0:
                release(m, t, b)
            b = following
        free_list = m[free_list + LIST_NEXT]
    while first and m[FAILED] == 0:
        following = m[first + CHAIN]
        unmap(m, t, first)
        first = following
    return 0


def release_pool(m: Ints, t: Ints, pool: int) -> int:
    """Free what a private pool without users holds."""
    release_half(m, t, m[pool + POOL_SMALL])
    if m[FAILED]:
        return 0
    return release_half(m, t, m[pool + POOL_LARGE])


def release_some(m: Ints, t: Ints, free_list: int, rounded: int) -> int:
    """Free cached oversize blocks until they could hold the request; whether they could."""
    if m[MAX_SPLIT] >= 1 << 60:
        return 0
    least = rounded if rounded > m[MAX_SPLIT] else m[MAX_SPLIT]
    b = at_least(m, free_list + LIST_FREE, least)
    if b and m[b + AREA] == 0:
        release(m, t, b)
        return 1
    b = before(m, b) if b else last(m, free_list + LIST_FREE)
    total = 0
    while b and total < least and m[b + SIZE] >= m[MAX_SPLIT]:
        smaller = before(m, b)
        if m[b + AREA] == 0:
            total += release(m, t, b)
        b = smaller
    return 1 if total >= least else 0


def flush(m: Ints, t: Ints) -> int:
    """Complete every pending free and give back all whole segments; what ``empty_cache()`` does."""
    if m[QUIET] == 0:
        m[SYNCS] += 1
        if m[MODE] == FED:  # streams finish in the order of the recording
            while m[WRONG] == 0 and recorded(m, t) == FREE_COMPLETED and m[PENDING_FIRST]:
                addr = t[m[AT] + T_ADDR]
                b = m[PENDING_FIRST]
                while b and m[b + ADDR] != addr:
                    b = m[b + RIGHT]
                if b == 0:
                    break
                complete(m, t, b)
        while m[PENDING_FIRST]:
            complete(m, t, m[PENDING_FIRST])
        release_half(m, t, m[DEFAULT_LARGE])
        release_half(m, t, m[DEFAULT_SMALL])
    pool = m[POOLS]
    while pool and m[FAILED] == 0:
        if m[pool + POOL_FREEABLE]:
            release_pool(m, t, pool)
        pool = m[pool + POOL_NEXT]
    if m[MODE] == FED:  # graph pools that lost their last user, which no event tells
        while m[WRONG] == 0 and (recorded(m, t) == SEGMENT_FREE or recorded(m, t) == SEGMENT_UNMAP):
            pool = pool_holding(m, t[m[AT] + T_ADDR])
            if pool == 0:
                break
            release_pool(m, t, pool)
    return 0


def pool_holding(m: Ints, addr: int) -> int:
    """Return the private pool in which the address is free, or 0."""
    pool = m[POOLS]
    while pool:
        for half in (m[pool + POOL_SMALL], m[pool + POOL_LARGE]):
            free_list = m[half + HALF_FIRST]
            while free_list:
                b = at_least(m, free_list + LIST_FREE, 0)
                while b:
                    if m[b + ADDR] <= addr < m[b + ADDR] + m[b + SIZE]:
                        return pool
                    b = after(m, b)
                free_list = m[free_list + LIST_NEXT]
        pool = m[pool + POOL_NEXT]
    return 0
