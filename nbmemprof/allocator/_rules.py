"""The rules of PyTorch's CUDA caching allocator, as ``c10/cuda/CUDACachingAllocator.cpp`` has them.

Each function is one paragraph of that file; ``m`` is the modelled device (:mod:`nbmemprof.allocator._memory`),
``t`` the trace: written by :func:`tell`, or recorded and compared with what the rules say.
"""

from __future__ import annotations

from nbmemprof.allocator._memory import (
    ACTIVE, ACTIVE_BYTES, ADDR, AGE, ALLOC, ALLOCATED_BYTES, ALLOCATION, AREA, AREA_BASE, AREA_BYTES, AREA_LIST, AREA_PAGE, AREAS_MADE, ASCENDING, AT,
    CAPACITY, CHAIN, DEFAULT_LARGE, DEFAULT_SMALL, DESCENDING, DEVICE_ALLOC, DEVICE_FREE, DIVISIONS, END, EXPANDABLE, FED, FREE, FREE_COMPLETED, FREE_COUNT,
    FREE_REQUESTED, GC_LIMIT, GC_ON, GIVEN, GONE, HALF_FIRST, HALF_POOL, HALF_SEARCHES, HALF_SMALL, HOLE, INACTIVE_SPLIT, INACTIVE_SPLIT_BYTES, IS_AREA, IS_LIST, KEY,
    LARGE, LEFT, LIMIT, LIST, LIST_FREE, LIST_HALF, LIST_HOLES, LIST_NEXT, LIST_SMALL, LIST_STREAM, LISTS_MADE, LIVE, MAX_SPLIT, MODE, MUTE, NEXT, NEXT_ADDR, NO_LIMIT, NON_SPLIT, OOM, OOMS, OTHER,
    OVERSIZE_ALLOCATIONS, OVERSIZE_SEGMENTS, PENDING, PENDING_FIRST, PENDING_LAST, POLICY, POOL_CUSTOM, POOL_FREEABLE, POOL_LARGE, POOL_NEXT, POOL_NO_SPLIT,
    POOL_ON_OOM, POOL_SMALL, POOLS, PREV, QUIET, RANDOM, REFUSALS, REJECT, REJECTIONS, REQUESTED, REQUESTED_BYTES, RESERVED, RESERVED_BYTES, RETRIES, RIGHT,
    ROUTED_QUIET, ROW, SEGMENT, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, SEGMENTS_MADE, SIZE, SOURCE, STATE, SYNCS, T_ADDR, T_POOL, T_ROW, T_SIZE, T_STREAM, VIRTUAL,
    WINDOW, WINDOW_END, WORDS, WRONG, WRONG_ADDR, WRONG_KIND, WRONG_SIZE, WRONG_STREAM,
    Ints, after, at_least, before, gain, gain_one, insert, last, lose, lose_one, new_record, recycle, remove,
)  # fmt: skip
from nbmemprof.allocator.rounding import MIN_BLOCK, MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER, SMALL_SIZE


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


# ---------------------------------------------------------------- 1.1 blocks and their sets
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
    while first:
        following = m[first + CHAIN]
        unmap(m, t, first)
        first = following
    return 0


def release_pool(m: Ints, t: Ints, pool: int) -> int:
    """Free what a private pool without users holds."""
    release_half(m, t, m[pool + POOL_SMALL])
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
    while pool:
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


# ---------------------------------------------------------------- 1.5 malloc
def grow(m: Ints, t: Ints, free_list: int, rounded: int, nominal: int, expandable: int, quiet: int) -> int:
    """What happens when no free block fits, in this order, until one step succeeds."""
    if m[GC_ON]:
        collect(m, t)
    b = new_memory(m, t, free_list, rounded, nominal, expandable)
    if b:
        return b
    half = m[free_list + LIST_HALF]
    if half == m[DEFAULT_SMALL] or half == m[DEFAULT_LARGE]:
        pool = m[POOLS]
        while pool:
            if m[pool + POOL_ON_OOM]:
                other = m[pool + POOL_SMALL] if m[half + HALF_SMALL] else m[pool + POOL_LARGE]
                b = search(m, list_of(m, other, m[free_list + LIST_STREAM]), rounded, 1 if m[EXPANDABLE] and m[pool + POOL_CUSTOM] == 0 else 0)
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
    half = m[m[b + LIST] + LIST_HALF]
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
