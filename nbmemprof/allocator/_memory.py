"""The modelled device as one array of integers, and the ordered sets of free blocks kept in it.

Everything that the allocator knows lies in ``m``: a header of settings and counters, then records of 16
words. A record is named by its offset, as a pointer would, so ``m[block + SIZE]`` reads a field and 0
means none. The functions are plain Python that numba compiles (:mod:`nbmemprof.allocator._link`); over a
``memoryview`` of the same array they run interpreted.

A free set is a treap (each node has a random rank; parents outrank children) ordered by ``KEY``, then
address: lookups, insertions and removals take logarithmic time whatever the sizes.
"""

from __future__ import annotations

from collections.abc import MutableSequence

Ints = MutableSequence[int]

# ---------------------------------------------------------------- header: words before the first record
TOP, SPARE, ROOM, MODE, AT, END, NOW, STOP = range(8)  # room in use; cursors in the trace and in the operations
WRONG, WRONG_KIND, WRONG_ADDR, WRONG_SIZE, WRONG_STREAM, SEED, FREE_COUNT, GIVEN = range(8, 16)
EXPANDABLE, MAX_SPLIT, NON_SPLIT, LARGE, LIMIT, GC_ON, GC_LIMIT, CAPACITY = range(16, 24)
VIRTUAL, ROUTED_QUIET, REJECT, QUIET, POLICY, NEXT_ADDR, SEGMENTS_MADE, AREAS_MADE = range(24, 32)
RESERVED, RETRIES, OOMS, SYNCS, DEVICE_ALLOC, DEVICE_FREE, REJECTIONS, REFUSALS = range(32, 40)
PENDING_FIRST, PENDING_LAST, POOLS, DEFAULT_SMALL, DEFAULT_LARGE, AMBIGUOUS, FOUND, SKIPPED = range(40, 48)
SKIPPED_BYTES, NEXT_GIVEN, INFER, LISTS_MADE, WINDOW, WINDOW_END, _, SOURCE = range(48, 56)
BARRED, FAILED, SERVED_AGAIN = range(56, 59)  # 1 + the stream that a capture is on, -1 for any: nothing of it can be unmapped; what was tried all the same; refusals served now
DIVISIONS = 64  # 16 buckets of roundup_power2_divisions
STATS = 96  # statistics: 12 words each (all, small, large; of each current, peak, allocated, freed)
ALLOCATION, SEGMENT, ACTIVE, INACTIVE_SPLIT, ALLOCATED_BYTES, RESERVED_BYTES, ACTIVE_BYTES, INACTIVE_SPLIT_BYTES, REQUESTED_BYTES = range(96, 204, 12)
OVERSIZE_ALLOCATIONS, OVERSIZE_SEGMENTS = 204, 208  # current, peak, allocated, freed
HEAD = 256

# ---------------------------------------------------------------- records
RECORD = 16
ADDR, SIZE, REQUESTED, STATE, PREV, NEXT, LIST, AREA, AGE, KEY, LEFT, RIGHT, UP, RANK, ROW, CHAIN = range(16)
FREE, LIVE, PENDING, HOLE, GONE, IS_LIST, IS_HALF, IS_POOL, IS_AREA = range(9)  # STATE; HOLE is unmapped
POOL_SMALL, POOL_LARGE, POOL_NEXT, _, POOL_NO_SPLIT, POOL_CUSTOM, POOL_ON_OOM, POOL_FREEABLE, POOL_NUMBER = range(9)
HALF_POOL, HALF_SMALL, HALF_FIRST, _, HALF_SEARCHES = range(5)
LIST_HALF, LIST_STREAM, LIST_NEXT, _, LIST_FREE, LIST_HOLES, LIST_SMALL = range(7)
AREA_BASE, AREA_BYTES, AREA_PAGE, _, AREA_LIST = range(5)

# ---------------------------------------------------------------- the trace and the operations: rows of 6 words
WORDS = 6
T_KIND, T_ADDR, T_SIZE, T_STREAM, T_ROW, T_POOL = range(6)
ALLOC, FREE_REQUESTED, FREE_COMPLETED, SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, OTHER, OOM, EMPTY, DROP_POOL, DEFER = range(12)
MUTE, TELL, FED = range(3)  # MODE: nothing is written; events are written to the trace; the trace is recorded and compared
NO_LIMIT = 1 << 62
ASCENDING, DESCENDING, RANDOM, WINDOWS = range(4)  # POLICY: where new segments lie


def new_record(m: Ints, state: int) -> int:
    """Take a record; there is room (checked before each operation)."""
    b = m[SPARE]
    if b:
        m[SPARE] = m[b + NEXT]
    else:
        b = m[TOP]
        m[TOP] = b + RECORD
        m[SEED] = (m[SEED] * 1103515245 + 12345) & 0x7FFFFFFF
        m[b + RANK] = m[SEED]
    m[b + STATE] = state
    return b


def recycle(m: Ints, b: int) -> int:
    m[b + STATE] = GONE
    m[b + NEXT] = m[SPARE]
    m[SPARE] = b
    return 0


def insert(m: Ints, root: int, b: int) -> int:
    """Put a block into the set whose root is kept at ``m[root]``: go down to its rank, split what is below around it."""
    key = m[b + KEY]
    addr = m[b + ADDR]
    rank = m[b + RANK]
    cell = root
    up = 0
    p = m[root]
    while p and m[p + RANK] >= rank:
        up = p
        cell = p + LEFT if key < m[p + KEY] or (key == m[p + KEY] and addr < m[p + ADDR]) else p + RIGHT
        p = m[cell]
    m[cell] = b
    m[b + UP] = up
    low = b + LEFT
    low_up = b
    high = b + RIGHT
    high_up = b
    while p:
        if key < m[p + KEY] or (key == m[p + KEY] and addr < m[p + ADDR]):
            m[high] = p
            m[p + UP] = high_up
            high = p + LEFT
            high_up = p
            p = m[high]
        else:
            m[low] = p
            m[p + UP] = low_up
            low = p + RIGHT
            low_up = p
            p = m[low]
    m[low] = 0
    m[high] = 0
    return 0


def remove(m: Ints, root: int, b: int) -> int:
    """Take a block out of its set: its two subtrees, joined by rank, stand in its place."""
    up = m[b + UP]
    p = m[b + LEFT]
    q = m[b + RIGHT]
    cell = root
    if up:
        cell = up + LEFT if m[up + LEFT] == b else up + RIGHT
    while p and q:
        if m[p + RANK] >= m[q + RANK]:
            m[cell] = p
            m[p + UP] = up
            cell = p + RIGHT
            up = p
            p = m[cell]
        else:
            m[cell] = q
            m[q + UP] = up
            cell = q + LEFT
            up = q
            q = m[cell]
    rest = p if p else q
    m[cell] = rest
    if rest:
        m[rest + UP] = up
    return 0


def at_least(m: Ints, root: int, key: int) -> int:
    """Return the first block of the set whose key is not below ``key``."""
    p = m[root]
    best = 0
    while p:
        if m[p + KEY] >= key:
            best = p
            p = m[p + LEFT]
        else:
            p = m[p + RIGHT]
    return best


def last(m: Ints, root: int) -> int:
    p = m[root]
    while p and m[p + RIGHT]:
        p = m[p + RIGHT]
    return p


def after(m: Ints, b: int) -> int:
    """Return the next block in the order of the set."""
    p = m[b + RIGHT]
    if p:
        while m[p + LEFT]:
            p = m[p + LEFT]
        return p
    p = m[b + UP]
    while p and m[p + RIGHT] == b:
        b = p
        p = m[b + UP]
    return p


def before(m: Ints, b: int) -> int:
    p = m[b + LEFT]
    if p:
        while m[p + RIGHT]:
            p = m[p + RIGHT]
        return p
    p = m[b + UP]
    while p and m[p + LEFT] == b:
        b = p
        p = m[b + UP]
    return p


def gain(m: Ints, stat: int, small: int, amount: int) -> int:
    """Raise a statistic, for all pools and for the class of this one (section 1.12)."""
    now = m[stat] + amount
    m[stat] = now
    if now > m[stat + 1]:
        m[stat + 1] = now
    m[stat + 2] += amount
    c = stat + 4 if small else stat + 8
    now = m[c] + amount
    m[c] = now
    if now > m[c + 1]:
        m[c + 1] = now
    m[c + 2] += amount
    return 0


def lose(m: Ints, stat: int, small: int, amount: int) -> int:
    m[stat] -= amount
    m[stat + 3] += amount
    c = stat + 4 if small else stat + 8
    m[c] -= amount
    m[c + 3] += amount
    return 0


def gain_one(m: Ints, stat: int) -> int:
    """Raise a statistic without classes."""
    m[stat] += 1
    if m[stat] > m[stat + 1]:
        m[stat + 1] = m[stat]
    m[stat + 2] += 1
    return 0


def lose_one(m: Ints, stat: int) -> int:
    m[stat] -= 1
    m[stat + 3] += 1
    return 0
