"""A request served: rounding, the choice of pool and segment size, and ``malloc`` step by step.

Rules of ``c10/cuda/CUDACachingAllocator.cpp``, a function each.
"""

from __future__ import annotations

from nbmemprof.allocator._blocks import list_of, new_block, put, search, splice, tell
from nbmemprof.allocator._driver import new_memory
from nbmemprof.allocator._memory import (
    ACTIVE,
    ACTIVE_BYTES,
    ADDR,
    ALLOC,
    ALLOCATED_BYTES,
    ALLOCATION,
    AREA,
    CAPACITY,
    DEFAULT_LARGE,
    DEFAULT_SMALL,
    DIVISIONS,
    EXPANDABLE,
    GC_ON,
    HALF_POOL,
    HALF_SMALL,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    LARGE,
    LIMIT,
    LIST,
    LIST_HALF,
    LIST_STREAM,
    LIVE,
    MAX_SPLIT,
    NEXT,
    NO_LIMIT,
    OOM,
    OOMS,
    OVERSIZE_ALLOCATIONS,
    POOL_CUSTOM,
    POOL_FREEABLE,
    POOL_LARGE,
    POOL_NEXT,
    POOL_NO_SPLIT,
    POOL_ON_OOM,
    POOL_SMALL,
    POOLS,
    PREV,
    QUIET,
    REJECT,
    REJECTIONS,
    REQUESTED,
    REQUESTED_BYTES,
    RESERVED,
    RETRIES,
    ROUTED_QUIET,
    ROW,
    SIZE,
    STATE,
    Ints,
    gain,
    gain_one,
    lose,
)  # fmt: skip
from nbmemprof.allocator._release import collect, flush, release_some
from nbmemprof.allocator.rounding import MIN_BLOCK, MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE


# ---------------------------------------------------------------- 1.3 rounding, 1.4 pool and segment size
def round_size(m: Ints, n: int) -> int:
    if n < MIN_BLOCK:
        return MIN_BLOCK
    log = 0
    x = n
    while x > 1:
        x >>= 1
        log += 1
    bucket = log - 20 if log > 20 else 0
    d = m[DIVISIONS + (bucket if bucket < 15 else 15)]
    if d > 1 and n > MIN_BLOCK * d:
        floor = 1 << log
        if n == floor:
            return n
        step = floor
        while d > 1:
            step >>= 1
            d >>= 1
        return 2 * floor if step == 0 else (n + step - 1) // step * step
    return (n + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK


def segment_size(m: Ints, rounded: int) -> int:
    """Bytes asked of the driver; the memory limit is tested with it in every mode."""
    if rounded <= SMALL_SIZE:
        return SMALL_BUFFER
    if rounded < MIN_LARGE_ALLOC:
        return m[LARGE]
    return (rounded + ROUND_LARGE - 1) // ROUND_LARGE * ROUND_LARGE


# ---------------------------------------------------------------- 1.5 malloc
def grow(m: Ints, t: Ints, free_list: int, rounded: int, nominal: int, expandable: int, quiet: int) -> int:
    """What happens when no free block fits, in this order, until one step succeeds."""
    if m[GC_ON]:
        collect(m, t)
    b = new_memory(m, t, free_list, rounded, nominal, expandable)
    if b:
        return b
    half = m[free_list + LIST_HALF]
    if half == m[DEFAULT_SMALL] or half == m[DEFAULT_LARGE]:  # this search passes expandable blocks over, whatever the option says
        pool = m[POOLS]
        while pool:
            if m[pool + POOL_ON_OOM] and m[pool + POOL_FREEABLE] == 0:
                other = m[pool + POOL_SMALL] if m[half + HALF_SMALL] else m[pool + POOL_LARGE]
                b = search(m, list_of(m, other, m[free_list + LIST_STREAM]), rounded, 0)
                if b:
                    return b
            pool = m[pool + POOL_NEXT]
    if release_some(m, t, free_list, rounded):
        b = new_memory(m, t, free_list, rounded, nominal, expandable)
        if b:
            return b
    if quiet == 0:
        flush(m, t)
        m[RETRIES] += 1
        b = new_memory(m, t, free_list, rounded, nominal, expandable)
    return b


def malloc(m: Ints, t: Ints, row: int, requested: int, stream: int, pool: int) -> int:
    """Serve a request; 0 where it is refused."""
    rounded = round_size(m, requested)
    half = m[pool + POOL_SMALL] if rounded <= SMALL_SIZE else m[pool + POOL_LARGE]
    free_list = list_of(m, half, stream)
    expandable = 1 if m[EXPANDABLE] and m[pool + POOL_CUSTOM] == 0 else 0
    b = search(m, free_list, rounded, expandable)
    if b == 0:
        nominal = segment_size(m, rounded)
        if m[REJECT] and m[RESERVED] + nominal > m[LIMIT]:
            m[REJECTIONS] += 1
            return 0
        quiet = 1 if m[QUIET] or (m[ROUTED_QUIET] and half != m[DEFAULT_SMALL] and half != m[DEFAULT_LARGE]) else 0
        b = grow(m, t, free_list, rounded, nominal, expandable, quiet)
        if b == 0:
            tell(m, t, OOM, m[CAPACITY] - m[RESERVED] if m[CAPACITY] < NO_LIMIT else 0, rounded, stream, row)
            m[OOMS] += 1
            return 0
    if m[m[b + LIST] + LIST_HALF] != half:  # a MemPool served instead
        half = m[m[b + LIST] + LIST_HALF]
        expandable = 0
    small = m[half + HALF_SMALL]
    rest = m[b + SIZE] - rounded
    if m[m[half + HALF_POOL] + POOL_NO_SPLIT]:
        split = False
    elif small or expandable:
        split = rest >= MIN_BLOCK
    else:
        split = rounded < m[MAX_SPLIT] and rest > SMALL_SIZE
    was_split = m[b + PREV] or m[b + NEXT]
    if split:  # the low part is handed out
        low = new_block(m, m[b + LIST], m[b + AREA], m[b + ADDR], rounded)
        splice(m, low, m[b + PREV], b)
        m[b + ADDR] += rounded
        m[b + SIZE] = rest
        put(m, b)
        if m[b + AREA] == 0:
            if was_split:
                lose(m, INACTIVE_SPLIT_BYTES, small, rounded)
            else:
                gain(m, INACTIVE_SPLIT_BYTES, small, rest)
                gain(m, INACTIVE_SPLIT, small, 1)
        b = low
    elif was_split and m[b + AREA] == 0:
        lose(m, INACTIVE_SPLIT_BYTES, small, m[b + SIZE])
        lose(m, INACTIVE_SPLIT, small, 1)
    m[b + STATE] = LIVE
    m[b + REQUESTED] = requested
    m[b + ROW] = row
    size = m[b + SIZE]
    gain(m, ALLOCATION, small, 1)
    gain(m, ALLOCATED_BYTES, small, size)
    gain(m, ACTIVE, small, 1)
    gain(m, ACTIVE_BYTES, small, size)
    gain(m, REQUESTED_BYTES, small, requested)
    if size >= m[MAX_SPLIT]:
        gain_one(m, OVERSIZE_ALLOCATIONS)
    tell(m, t, ALLOC, m[b + ADDR], requested, stream, row)
    return b
