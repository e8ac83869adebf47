"""Run operations through the rules, or follow a recorded trace and compare.

``t`` is the trace, ``o`` the operations, both in rows of six words: kind, address, bytes, stream, row, and the
pool's record (of an alloc) or whether the free waits for other streams; in a trace that is written, the operation that
caused it. ``h`` has two words a row: the block that serves it (-1: refused) and the bytes given. ``e`` lists moments without an event of their own, as pairs: the word in the
operations before which it happened, and 0 for ``empty_cache()`` or the pool that was dropped; -1 ends it.
"""

from __future__ import annotations

from nbmemprof.allocator._blocks import complete, fit, free, list_of, recorded
from nbmemprof.allocator._memory import (
    ALLOC,
    AMBIGUOUS,
    AREA,
    AT,
    CAPACITY,
    DEFAULT_LARGE,
    DROP_POOL,
    EMPTY,
    END,
    EXPANDABLE,
    FED,
    FOUND,
    FREE_COMPLETED,
    FREE_COUNT,
    FREE_REQUESTED,
    GC_LIMIT,
    GC_ON,
    HALF_FIRST,
    HALF_POOL,
    INFER,
    LIMIT,
    LIST,
    LIST_FREE,
    LIST_HALF,
    LIST_NEXT,
    LIVE,
    MODE,
    NEXT,
    NEXT_GIVEN,
    NOW,
    OOM,
    OTHER,
    PENDING,
    POOL_CUSTOM,
    POOL_FREEABLE,
    POOL_LARGE,
    POOL_SMALL,
    PREV,
    RECORD,
    RESERVED,
    ROOM,
    ROW,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    SERVED_AGAIN,
    SIZE,
    SKIPPED,
    SKIPPED_BYTES,
    SOURCE,
    STATE,
    STOP,
    SYNCS,
    T_ADDR,
    T_POOL,
    T_ROW,
    T_SIZE,
    T_STREAM,
    TELL,
    TOP,
    WORDS,
    WRONG,
    WRONG_ADDR,
    WRONG_KIND,
    WRONG_SIZE,
    WRONG_STREAM,
    Ints,
    after,
    at_least,
)  # fmt: skip
from nbmemprof.allocator._release import flush, pool_holding, release_pool
from nbmemprof.allocator._rules import malloc, round_size, segment_size
from nbmemprof.allocator.rounding import SMALL_SIZE

__all__ = ["DONE", "MORE_ROOM", "MORE_TRACE", "free_block", "run"]

DONE, MORE_ROOM, MORE_TRACE = range(3)
DIFFERS, STRAY, NOTHING_PENDING, NOTHING_TO_RELEASE, NO_REQUEST = range(1, 6)  # WRONG


def run(m: Ints, t: Ints, o: Ints, h: Ints, e: Ints) -> int:
    """Go on until the end (``DONE``) or until there must be more room for records or for the trace."""
    if m[MODE] == FED:
        return follow(m, t, h, e)
    return serve(m, t, o, h, e)


def lacking(m: Ints) -> int:
    """One operation makes a few records, a flush two for each free block, and three events for each at most."""
    if m[TOP] + RECORD * (16 + 2 * m[FREE_COUNT]) > m[ROOM]:
        return MORE_ROOM
    if m[MODE] == TELL and m[AT] + WORDS * (16 + 3 * m[FREE_COUNT]) > m[END]:
        return MORE_TRACE
    return DONE


def serve(m: Ints, t: Ints, o: Ints, h: Ints, e: Ints) -> int:
    """Run the operations; recorded segment events among them are outcomes and are passed over."""
    while m[NOW] < m[STOP]:
        short = lacking(m)
        if short:
            return short
        i = m[NOW]
        m[SOURCE] = i
        g = m[NEXT_GIVEN]
        if e[g] == i:
            m[NEXT_GIVEN] = g + 2
            if e[g + 1]:
                release_pool(m, t, e[g + 1])
            else:
                flush(m, t)
            continue
        m[NOW] = i + WORDS
        kind = o[i]
        row = o[i + T_ROW]
        if kind == ALLOC:
            b = malloc(m, t, row, o[i + T_SIZE], o[i + T_STREAM], o[i + T_POOL])
            h[2 * row] = b if b else -1
            if b:
                h[2 * row + 1] = m[b + SIZE]
            else:
                m[SKIPPED] += 1
                m[SKIPPED_BYTES] += o[i + T_SIZE]
        elif kind == FREE_REQUESTED:
            b = h[2 * row] if row >= 0 else 0
            if b > 0 and m[b + STATE] == LIVE and m[b + ROW] == row:
                free(m, t, b, o[i + T_POOL])
        elif kind == FREE_COMPLETED:
            b = h[2 * row] if row >= 0 else 0
            if b > 0 and m[b + STATE] == PENDING and m[b + ROW] == row:
                complete(m, t, b)
        elif kind == OOM:  # refused when it was recorded; what the program would have done with it is not known, so it is given back at once
            b = malloc(m, t, row, o[i + T_SIZE], o[i + T_STREAM], o[i + T_POOL])
            h[2 * row] = b if b else -1
            if b:
                h[2 * row + 1] = m[b + SIZE]
                m[SERVED_AGAIN] += 1
                free(m, t, b, 0)
            else:
                m[SKIPPED] += 1
                m[SKIPPED_BYTES] += o[i + T_SIZE]
        elif kind == EMPTY:
            flush(m, t)
        elif kind == DROP_POOL:
            m[o[i + T_POOL] + POOL_FREEABLE] = 1
            if o[i + T_SIZE]:  # a MemPool is deleted: an empty_cache() of its own
                m[SYNCS] += 1
                release_pool(m, t, o[i + T_POOL])
    return DONE


def wrong(m: Ints, why: int, kind: int, addr: int, size: int, stream: int) -> int:
    m[WRONG] = why
    m[WRONG_KIND] = kind
    m[WRONG_ADDR] = addr
    m[WRONG_SIZE] = size
    m[WRONG_STREAM] = stream
    return why


def follow(m: Ints, t: Ints, h: Ints, e: Ints) -> int:
    """Drive the rules with the recorded requests and frees; every event they cause must be the recorded one."""
    while m[WRONG] == 0:
        kind = recorded(m, t)
        j = m[AT]
        if j >= m[END] or j >= m[STOP]:
            break
        short = lacking(m)
        if short:
            return short
        if m[INFER] == 0 and e[m[NEXT_GIVEN]] >= 0 and e[m[NEXT_GIVEN]] <= j:  # the source saw this empty_cache
            m[NEXT_GIVEN] += 2
            flush(m, t)
            continue
        row = t[j + T_ROW]
        b = h[2 * row] if row >= 0 else 0
        held = b > 0 and m[b + ROW] == row and (m[b + STATE] == LIVE or m[b + STATE] == PENDING)
        if kind == FREE_REQUESTED:
            if held and m[b + STATE] == LIVE:
                free(m, t, b, t[j + T_POOL])
            else:
                wrong(m, STRAY, OTHER, 0, 0, 0)
        elif kind == FREE_COMPLETED and not (held and m[b + STATE] == PENDING):
            if held:
                free(m, t, b, 0)  # its request is missing
            else:
                wrong(m, NOTHING_PENDING, OTHER, 0, 0, 0)
        elif kind == FREE_COMPLETED and asked_for(m, t, b, j) == 0:
            flush(m, t)
        elif kind == FREE_COMPLETED and flushes_next(m, t, j) == 0:
            complete(m, t, b)
        else:
            request(m, t, h, e, j)
    return DONE


def asked_for(m: Ints, t: Ints, b: int, j: int) -> int:
    """Whether a malloc looked for the frees that complete at ``j``: its other events follow. Else only an empty_cache() can have, or a MemPool that was deleted."""
    p = j
    while p < m[END] and (t[p] == FREE_COMPLETED or t[p] == OTHER):
        p += WORDS
    if p < m[END] and t[p] != FREE_REQUESTED:
        return 1
    return 1 if m[m[m[b + LIST] + LIST_HALF] + HALF_POOL] != m[m[DEFAULT_LARGE] + HALF_POOL] else 0


def next_request(m: Ints, t: Ints, j: int) -> int:
    """Where the alloc or oom of the malloc stands whose events begin at ``j``; the end where there is none."""
    k = j
    while k < m[END] and (t[k] == FREE_COMPLETED or t[k] == OTHER or SEGMENT_ALLOC <= t[k] <= SEGMENT_UNMAP):
        k += WORDS
    return k if k < m[END] and (t[k] == ALLOC or t[k] == OOM) else m[END]


def free_block(m: Ints, pool: int, requested: int, stream: int) -> int:
    """The free block that would serve a request; 0 for none."""
    rounded = round_size(m, requested)
    half = m[pool + POOL_SMALL] if rounded <= SMALL_SIZE else m[pool + POOL_LARGE]
    return fit(m, list_of(m, half, stream), rounded, 1 if m[EXPANDABLE] and m[pool + POOL_CUSTOM] == 0 else 0)


def would_fit(m: Ints, t: Ints, k: int) -> int:
    return free_block(m, t[k + T_POOL], t[k + T_SIZE], t[k + T_STREAM])


def would_release(m: Ints, t: Ints, k: int) -> int:
    """Whether the request at ``k`` gives memory back before it is served: by the limit, the collector or a refusal."""
    if would_fit(m, t, k):
        return 0
    if t[k] == OOM:
        return 1
    needed = m[RESERVED] + segment_size(m, round_size(m, t[k + T_SIZE]))
    return 1 if needed > m[LIMIT] or needed > m[CAPACITY] or (m[GC_ON] and m[RESERVED] > m[GC_LIMIT]) else 0


def collectable(m: Ints) -> int:
    """Whether the collector would free something now."""
    free_list = m[m[DEFAULT_LARGE] + HALF_FIRST]
    while free_list:
        b = at_least(m, free_list + LIST_FREE, 0)
        while b:
            if m[b + PREV] == 0 and m[b + NEXT] == 0 and m[b + AREA] == 0:
                return 1
            b = after(m, b)
        free_list = m[free_list + LIST_NEXT]
    return 0


def flushes_next(m: Ints, t: Ints, j: int) -> int:
    """Whether a run of ``free_completed`` belongs to the flush of the request after it, not to the polling before its search."""
    k = next_request(m, t, j)
    if k >= m[END]:
        return 0
    p = j
    while t[p] == FREE_COMPLETED or t[p] == OTHER:
        p += WORDS
    if t[p] != OOM and t[p] != SEGMENT_FREE and t[p] != SEGMENT_UNMAP:
        return 0
    if would_fit(m, t, k) or (m[GC_ON] and m[RESERVED] > m[GC_LIMIT] and collectable(m)):  # the collector would have come before the flush
        return 0
    needed = m[RESERVED] + segment_size(m, round_size(m, t[k + T_SIZE]))
    return 1 if t[k] == OOM or needed > m[LIMIT] or needed > m[CAPACITY] else 0


def request(m: Ints, t: Ints, h: Ints, e: Ints, j: int) -> int:
    """Explain the events that begin at ``j`` by a request, or by memory that was given back from outside."""
    k = next_request(m, t, j)
    if t[j] == SEGMENT_FREE or t[j] == SEGMENT_UNMAP:
        pool = pool_holding(m, t[j + T_ADDR])
        if pool or (m[INFER] and (k >= m[END] or would_release(m, t, k) == 0)):
            if pool:  # a MemPool that was deleted
                release_pool(m, t, pool)
            else:
                flush(m, t)
                if k < m[END] and (t[k - WORDS] == SEGMENT_ALLOC or t[k - WORDS] == SEGMENT_MAP):
                    m[AMBIGUOUS] += 1
            e[m[FOUND]] = j
            e[m[FOUND] + 1] = pool
            m[FOUND] += 2
            if m[AT] == j and m[WRONG] == 0:
                wrong(m, NOTHING_TO_RELEASE, OTHER, 0, 0, 0)
            return 0
    if k >= m[END]:
        return wrong(m, NO_REQUEST, OTHER, 0, 0, 0)
    row = t[k + T_ROW]
    b = malloc(m, t, row, t[k + T_SIZE], t[k + T_STREAM], t[k + T_POOL])
    if row >= 0 and b:
        h[2 * row] = b
        h[2 * row + 1] = m[b + SIZE]
    elif row >= 0:
        h[2 * row] = -1
    return 0
