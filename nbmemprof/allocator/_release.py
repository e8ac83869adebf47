"""Memory given back to the driver: garbage collection, release and flush.

Rules of ``c10/cuda/CUDACachingAllocator.cpp``, a function each.
"""

from __future__ import annotations

from nbmemprof.allocator._blocks import absorb, complete, new_block, put, put_hole, recorded, splice, take, tell
from nbmemprof.allocator._memory import (
    ADDR,
    AGE,
    AREA,
    AREA_BASE,
    AREA_PAGE,
    AT,
    BARRED,
    CHAIN,
    DEFAULT_LARGE,
    DEFAULT_SMALL,
    DEVICE_FREE,
    FAILED,
    FED,
    FREE_COMPLETED,
    GC_LIMIT,
    HALF_FIRST,
    HALF_SEARCHES,
    HOLE,
    LIST,
    LIST_FREE,
    LIST_NEXT,
    LIST_SMALL,
    LIST_STREAM,
    MAX_SPLIT,
    MODE,
    NEXT,
    OVERSIZE_SEGMENTS,
    PENDING_FIRST,
    POOL_FREEABLE,
    POOL_LARGE,
    POOL_NEXT,
    POOL_SMALL,
    POOLS,
    PREV,
    QUIET,
    RESERVED,
    RESERVED_BYTES,
    RIGHT,
    SEGMENT,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
    SIZE,
    STATE,
    SYNCS,
    T_ADDR,
    WRONG,
    Ints,
    after,
    at_least,
    before,
    last,
    lose,
    lose_one,
    recycle,
)  # fmt: skip


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
