"""Blocks of the modelled device: the trace of what happens to them, their sets, the search, and their way back.

Rules of ``c10/cuda/CUDACachingAllocator.cpp``; ``m`` is the device (:mod:`nbmemprof.allocator._memory`), ``t`` the trace: written by
:func:`tell`, or recorded and compared with what the rules say.
"""

from __future__ import annotations

from nbmemprof.allocator._memory import (
    ACTIVE,
    ACTIVE_BYTES,
    ADDR,
    AGE,
    ALLOCATED_BYTES,
    ALLOCATION,
    AREA,
    AT,
    END,
    FED,
    FREE,
    FREE_COMPLETED,
    FREE_COUNT,
    FREE_REQUESTED,
    GC_ON,
    GONE,
    HALF_FIRST,
    HALF_SEARCHES,
    HALF_SMALL,
    HOLE,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    IS_LIST,
    KEY,
    LEFT,
    LIST,
    LIST_FREE,
    LIST_HALF,
    LIST_HOLES,
    LIST_NEXT,
    LIST_SMALL,
    LIST_STREAM,
    LISTS_MADE,
    MAX_SPLIT,
    MODE,
    MUTE,
    NEXT,
    NON_SPLIT,
    OOM,
    OTHER,
    OVERSIZE_ALLOCATIONS,
    PENDING,
    PENDING_FIRST,
    PENDING_LAST,
    PREV,
    REQUESTED,
    REQUESTED_BYTES,
    RIGHT,
    ROW,
    SIZE,
    SOURCE,
    STATE,
    T_ADDR,
    T_POOL,
    T_ROW,
    T_SIZE,
    T_STREAM,
    WORDS,
    WRONG,
    WRONG_ADDR,
    WRONG_KIND,
    WRONG_SIZE,
    WRONG_STREAM,
    Ints,
    after,
    at_least,
    gain,
    insert,
    lose,
    lose_one,
    new_record,
    recycle,
    remove,
)  # fmt: skip


# ---------------------------------------------------------------- the trace
def tell(m: Ints, t: Ints, kind: int, addr: int, size: int, stream: int, row: int) -> int:
    """Write an event to the trace, or compare it with the recorded one at the cursor; after a difference nothing more is compared."""
    mode = m[MODE]
    if mode == MUTE:
        return 0
    j = m[AT]
    if mode == FED:
        if m[WRONG]:
            return 0
        while j < m[END] and t[j] == OTHER:
            j += WORDS
        if j >= m[END] or t[j] != kind or (kind != OOM and t[j + T_ADDR] != addr) or t[j + T_SIZE] != size or t[j + T_STREAM] != stream:
            m[WRONG] = 1
            m[WRONG_KIND] = kind
            m[WRONG_ADDR] = addr
            m[WRONG_SIZE] = size
            m[WRONG_STREAM] = stream
            m[AT] = j
            return 0
    else:
        t[j] = kind
        t[j + 1] = addr
        t[j + 2] = size
        t[j + 3] = stream
        t[j + T_ROW] = row
        t[j + T_POOL] = m[SOURCE]
    m[AT] = j + WORDS
    return 0


def recorded(m: Ints, t: Ints) -> int:
    """Kind of the recorded event at the cursor."""
    j = m[AT]
    while j < m[END] and t[j] == OTHER:
        j += WORDS
    m[AT] = j
    return t[j] if j < m[END] else OTHER


# ---------------------------------------------------------------- 1.1 blocks and their sets
def list_of(m: Ints, half: int, stream: int) -> int:
    """Return the free list of a stream within a half of a pool; lists stand in the order of stream pointers."""
    cell = half + HALF_FIRST
    while m[cell] and m[m[cell] + LIST_STREAM] < stream:
        cell = m[cell] + LIST_NEXT
    found = m[cell]
    if found and m[found + LIST_STREAM] == stream:
        return found
    made = new_record(m, IS_LIST)
    m[LISTS_MADE] += 1
    m[made + LIST_HALF] = half
    m[made + LIST_SMALL] = m[half + HALF_SMALL]
    m[made + LIST_STREAM] = stream
    m[made + LIST_NEXT] = found
    m[made + LIST_FREE] = 0
    m[made + LIST_HOLES] = 0
    m[cell] = made
    return made


def new_block(m: Ints, free_list: int, area: int, addr: int, size: int) -> int:
    b = new_record(m, GONE)  # in no set yet
    m[b + ADDR] = addr
    m[b + SIZE] = size
    m[b + REQUESTED] = 0
    m[b + PREV] = 0
    m[b + NEXT] = 0
    m[b + LIST] = free_list
    m[b + AREA] = area
    m[b + ROW] = -1
    return b


def put(m: Ints, b: int) -> int:
    """Insert into the free set, with a fresh age."""
    free_list = m[b + LIST]
    m[b + STATE] = FREE
    m[b + KEY] = m[b + SIZE]
    m[b + AGE] = m[m[free_list + LIST_HALF] + HALF_SEARCHES]
    m[FREE_COUNT] += 1
    return insert(m, free_list + LIST_FREE, b)


def put_hole(m: Ints, b: int) -> int:
    """Insert into the set of unmapped blocks, which is in the order of addresses."""
    m[b + STATE] = HOLE
    m[b + KEY] = 0
    return insert(m, m[b + LIST] + LIST_HOLES, b)


def take(m: Ints, b: int) -> int:
    if m[b + STATE] == HOLE:
        return remove(m, m[b + LIST] + LIST_HOLES, b)
    m[FREE_COUNT] -= 1
    return remove(m, m[b + LIST] + LIST_FREE, b)


def absorb(m: Ints, b: int, other: int, state: int) -> int:
    """Merge a neighbour that is in this state into ``b``; returns its bytes, 0 where it stays."""
    if other == 0 or m[other + STATE] != state:
        return 0
    take(m, other)
    size = m[other + SIZE]
    if m[b + PREV] == other:
        m[b + ADDR] = m[other + ADDR]
        m[b + PREV] = m[other + PREV]
        if m[b + PREV]:
            m[m[b + PREV] + NEXT] = b
    else:
        m[b + NEXT] = m[other + NEXT]
        if m[b + NEXT]:
            m[m[b + NEXT] + PREV] = b
    m[b + SIZE] += size
    recycle(m, other)
    return size


def splice(m: Ints, b: int, prev: int, following: int) -> int:
    """Link a new block between two neighbours of its segment."""
    m[b + PREV] = prev
    m[b + NEXT] = following
    if prev:
        m[prev + NEXT] = b
    if following:
        m[following + PREV] = b
    return 0


# ---------------------------------------------------------------- 1.6 search (best fit)
def reach(m: Ints, b: int) -> int:
    following = m[b + NEXT]
    return m[b + SIZE] + (m[following + SIZE] if following and m[following + STATE] == HOLE else 0)


def fit(m: Ints, free_list: int, rounded: int, expandable: int) -> int:
    """Return the free block that serves a request, or 0; it stays where it is."""
    b = at_least(m, free_list + LIST_FREE, rounded)
    if b == 0:
        return 0
    if m[b + AREA]:
        if expandable:  # the tail that can grow counts with what it can grow to
            following = after(m, b)
            while m[b + AREA] and following and reach(m, following) < reach(m, b):
                b = following
                following = after(m, b)
        else:  # the option was switched off: blocks of expandable segments are not used
            while b and m[b + AREA]:
                b = after(m, b)
            if b == 0:
                return 0
    if rounded < m[MAX_SPLIT]:
        if m[b + SIZE] >= m[MAX_SPLIT]:
            return 0
    elif m[b + SIZE] >= rounded + m[NON_SPLIT]:
        return 0
    return b


def search(m: Ints, free_list: int, rounded: int, expandable: int) -> int:
    if m[GC_ON]:
        m[m[free_list + LIST_HALF] + HALF_SEARCHES] += 1
    b = fit(m, free_list, rounded, expandable)
    if b:
        take(m, b)
    return b


# ---------------------------------------------------------------- 1.10 free
def free(m: Ints, t: Ints, b: int, deferred: int) -> int:
    """Give a block up; deferred: other streams used it, so it waits for them."""
    small = m[m[b + LIST] + LIST_SMALL]
    lose(m, ALLOCATION, small, 1)
    lose(m, ALLOCATED_BYTES, small, m[b + SIZE])
    if m[b + SIZE] >= m[MAX_SPLIT]:
        lose_one(m, OVERSIZE_ALLOCATIONS)
    tell(m, t, FREE_REQUESTED, m[b + ADDR], m[b + REQUESTED], m[m[b + LIST] + LIST_STREAM], m[b + ROW])
    if deferred == 0:
        return complete(m, t, b)
    m[b + STATE] = PENDING
    m[FREE_COUNT] += 1
    m[b + LEFT] = m[PENDING_LAST]
    m[b + RIGHT] = 0
    if m[PENDING_LAST]:
        m[m[PENDING_LAST] + RIGHT] = b
    else:
        m[PENDING_FIRST] = b
    m[PENDING_LAST] = b
    return 0


def complete(m: Ints, t: Ints, b: int) -> int:
    """The block is free: merge it with its free neighbours."""
    free_list = m[b + LIST]
    small = m[free_list + LIST_SMALL]
    if m[b + STATE] == PENDING:
        m[FREE_COUNT] -= 1
        if m[b + LEFT]:
            m[m[b + LEFT] + RIGHT] = m[b + RIGHT]
        else:
            m[PENDING_FIRST] = m[b + RIGHT]
        if m[b + RIGHT]:
            m[m[b + RIGHT] + LEFT] = m[b + LEFT]
        else:
            m[PENDING_LAST] = m[b + LEFT]
    size = m[b + SIZE]
    requested = m[b + REQUESTED]
    tell(m, t, FREE_COMPLETED, m[b + ADDR], requested, m[free_list + LIST_STREAM], m[b + ROW])
    below = absorb(m, b, m[b + PREV], FREE)
    above = absorb(m, b, m[b + NEXT], FREE)
    put(m, b)
    if m[b + AREA] == 0:
        count = 0
        net = 0
        if m[b + PREV] or m[b + NEXT]:
            count = 1
            net = m[b + SIZE]
        count -= (1 if below else 0) + (1 if above else 0)
        net -= below + above
        if count > 0:
            gain(m, INACTIVE_SPLIT, small, count)
        elif count < 0:
            lose(m, INACTIVE_SPLIT, small, -count)
        if net > 0:
            gain(m, INACTIVE_SPLIT_BYTES, small, net)
        elif net < 0:
            lose(m, INACTIVE_SPLIT_BYTES, small, -net)
    lose(m, ACTIVE, small, 1)
    lose(m, ACTIVE_BYTES, small, size)
    lose(m, REQUESTED_BYTES, small, requested)
    return 0
