"""Follow a recorded trace: pair allocations with their releases, and recover what each block measured.

Plain functions over indexable buffers, run by :mod:`nbmemprof._jit` either as they stand or compiled.
A trace gives the requested bytes only. The block that served a request is found by keeping the heap's
layout: the free block that begins at the recorded address is split by the allocator's own rule.
"""

from __future__ import annotations

from collections.abc import MutableSequence

__all__ = ["ALLOC", "DONE", "FREE", "MAP", "OTHER", "SEGMENT_ALLOC", "SEGMENT_FREE", "UNMAP", "follow", "pair"]

ALLOC, FREE, DONE, SEGMENT_ALLOC, SEGMENT_FREE, MAP, UNMAP, OTHER = range(8)

Ints = MutableSequence[int]


def pair(
    act: Ints, where: Ints, ev_row: Ints, row_first: Ints, row_alloc: Ints, row_free: Ints, row_done: Ints, open_row: Ints, seen: Ints, count: Ints
) -> int:
    """Give every alloc and free event its allocation.

    ``where`` is the event's address as an index; ``open_row`` and ``seen`` are one cell an address (-1, 0).
    ``row_*`` receive event indexes, -1 where there is none;
    ``row_first`` is the event that first tells of the allocation. ``count`` receives: stray frees, allocations
    whose free was lost, releases without their request. Returns the number of allocations.
    """
    rows = 0
    for i in range(len(act)):
        a = int(act[i])
        if a > 2:
            continue
        w = int(where[i])
        r = int(open_row[w])
        if a == 0:
            if r >= 0:  # the address is given out again, so its free was lost
                if row_free[r] < 0:
                    row_free[r] = i
                    count[1] += 1
                row_done[r] = i
            r = rows
            rows += 1
            row_first[r] = i
            row_alloc[r] = i
            row_free[r] = -1
            row_done[r] = -1
            open_row[w] = r
        elif r < 0:
            if seen[w] > 0:  # already released once in this trace: the second release is stray
                count[0] += 1
                continue
            r = rows
            rows += 1
            row_first[r] = i
            row_alloc[r] = -1
            row_free[r] = i
            row_done[r] = -1
            if a == 1:
                open_row[w] = r
            else:  # given up before the first event, and pending since
                row_free[r] = 0
                row_done[r] = i
                count[2] += 1
        elif a == 1:
            if row_free[r] >= 0:
                count[0] += 1
                continue
            row_free[r] = i
        else:
            if row_free[r] < 0:
                row_free[r] = i
                count[2] += 1
            row_done[r] = i
            open_row[w] = -1
        seen[w] = 1
        ev_row[i] = r
    return rows


def follow(
    act: Ints, addr: Ints, size: Ints, stream: Ints, where: Ints, ev_row: Ints, universe: Ints, row_round: Ints, row_whole: Ints, row_size: Ints, row_exact: Ints, row_block: Ints,
    b_addr: Ints, b_size: Ints, b_prev: Ints, b_next: Ints, b_state: Ints, b_run: Ints, b_where: Ints, start_at: Ints,
    r_addr: Ints, r_end: Ints, r_head: Ints, r_tail: Ints, r_alive: Ints, r_exp: Ints, r_stream: Ints, r_list: Ints,
    unsure_addr: Ints, unsure_block: Ints, unsure_row: Ints, state: Ints, limits: Ints, count: Ints,
) -> int:  # fmt: skip
    """Keep the layout of the heap through the trace and write every allocation's block size to ``row_size``.

    Blocks are doubly linked by address within a run (a segment, or a contiguous mapped range); states: 0 free,
    1 live, 2 pending, 3 the border of a run, 4 gone. ``start_at`` maps an address of ``universe`` (ascending) to
    the block that begins there, ``b_where`` back. ``unsure_*`` list, by address, blocks that were there at the
    start with an unknown size. ``row_whole`` tells which allocations are of a pool that splits no block. ``r_list`` lists the runs that ranges may be mapped to or unmapped from. ``state``
    holds the numbers of blocks and runs in use, and the length of that list; ``limits`` max_split_size
    and the slack of the large pool. ``count`` receives: addresses that no free block begins at, blocks too small
    for the request. Returns 0.
    """
    blocks, runs, listed = int(state[0]), int(state[1]), int(state[2])
    max_split, slack = int(limits[0]), int(limits[1])
    known, unsure = len(universe), len(unsure_addr)
    for i in range(len(act)):
        a = int(act[i])
        if a == 7:
            continue
        x, s = int(addr[i]), int(size[i])
        made = -1  # a free block begun at a computed address: it must be found in the universe
        joins = -1  # a free block that may join its neighbours
        if a == 0:
            row = int(ev_row[i])
            rounded = int(row_round[row])
            b = int(start_at[where[i]])
            if b < 0 and unsure > 0:  # inside a block of unknown size: that one ends where this request begins
                lo, hi = 0, unsure
                while lo < hi:
                    mid = (lo + hi) >> 1
                    if unsure_addr[mid] <= x:
                        lo = mid + 1
                    else:
                        hi = mid
                u = int(unsure_block[lo - 1]) if lo > 0 and unsure_row[lo - 1] >= 0 else -1
                if u >= 0 and b_addr[u] == unsure_addr[lo - 1] and (b_state[u] == 1 or b_state[u] == 2) and x < b_addr[u] + b_size[u]:
                    b = blocks
                    blocks += 1
                    b_addr[b] = x
                    b_size[b] = b_addr[u] + b_size[u] - x
                    b_size[u] = x - b_addr[u]
                    b_state[b] = 0
                    b_run[b] = b_run[u]
                    b_where[b] = where[i]
                    n = int(b_next[u])
                    if b_state[n] == 0:  # free space above it was held apart by the unknown end
                        if b_where[n] >= 0:
                            start_at[b_where[n]] = -1
                        b_size[b] += b_size[n]
                        b_state[n] = 4
                        n = int(b_next[n])
                    b_prev[b] = u
                    b_next[b] = n
                    b_next[u] = b
                    b_prev[n] = b
                    start_at[where[i]] = b
                    row_size[unsure_row[lo - 1]] = b_size[u]
                    row_exact[unsure_row[lo - 1]] = 1
                    unsure_row[lo - 1] = -1
            if b < 0:
                count[0] += 1
                row_size[row] = rounded
                row_exact[row] = 0
                row_block[row] = -1
                continue
            left = int(b_size[b]) - rounded
            run = int(b_run[b])
            row_exact[row] = 1
            if left < 0:
                count[1] += 1
                row_exact[row] = 0
            least = 512
            if r_exp[run] == 0 and rounded > 1048576:
                least = slack + 1 if rounded < max_split else 1 << 62
            if row_whole[row] != 0:
                least = 1 << 62
            if left >= least:
                made = blocks
                blocks += 1
                b_addr[made] = x + rounded
                b_size[made] = left
                b_state[made] = 0
                b_run[made] = run
                n = int(b_next[b])
                b_next[made] = n
                b_prev[n] = made
                b_prev[made] = b
                b_next[b] = made
                b_size[b] = rounded
            b_state[b] = 1
            row_size[row] = b_size[b]
            row_block[row] = b
        elif a == 1 or a == 2:
            row = int(ev_row[i])
            b = int(row_block[row]) if row >= 0 else -1
            if b >= 0 and b_addr[b] == x and (b_state[b] == 1 or b_state[b] == 2):
                if a == 1:
                    b_state[b] = 2
                else:
                    b_state[b] = 0
                    joins = b
        elif a == 3 or a == 5:
            if s <= 0:
                continue
            below, above = -1, -1
            if a == 5:
                j = 0
                while j < listed and j < 8192:  # a real heap has dozens of mapped ranges; a hostile file is not worth the search
                    r = int(r_list[j])
                    if r_alive[r] == 0:  # given back, or joined to another one
                        listed -= 1
                        r_list[j] = r_list[listed]
                        continue
                    if r_exp[r] == 1 and r_stream[r] == stream[i]:
                        if r_end[r] == x:
                            below = r
                        elif r_addr[r] == x + s:
                            above = r
                    j += 1
            b = blocks
            blocks += 1
            b_addr[b] = x
            b_size[b] = s
            b_state[b] = 0
            b_where[b] = where[i]
            start_at[where[i]] = b
            run = below
            if below >= 0:
                r_end[run] = x + s
            else:
                run = runs
                runs += 1
                h, t = blocks, blocks + 1
                blocks += 2
                b_state[h] = 3
                b_state[t] = 3
                b_run[h] = run
                b_run[t] = run
                b_prev[h] = h
                b_next[h] = t
                b_prev[t] = h
                b_next[t] = t
                r_addr[run] = x
                r_end[run] = x + s
                r_head[run] = h
                r_tail[run] = t
                r_alive[run] = 1
                r_exp[run] = 1 if a == 5 else 0
                r_stream[run] = stream[i]
                if a == 5:
                    r_list[listed] = run
                    listed += 1
            t = int(r_tail[run])
            p = int(b_prev[t])
            b_run[b] = run
            b_prev[b] = p
            b_next[p] = b
            b_next[b] = t
            b_prev[t] = b
            if above >= 0:
                n = int(b_next[r_head[above]])
                b_next[b] = n
                b_prev[n] = b
                r_tail[run] = r_tail[above]
                r_end[run] = r_end[above]
                r_alive[above] = 0
                while b_state[n] != 3:
                    b_run[n] = run
                    n = int(b_next[n])
                b_run[n] = run
            joins = b
        else:
            e = x + s
            r = -1
            if a == 4:  # a segment is given back whole, as one free block that begins where it begins
                b = int(start_at[where[i]])
                if b >= 0:
                    r = int(b_run[b])
            else:
                j = 0
                while j < listed and j < 8192 and r < 0:
                    r = int(r_list[j])
                    if r_alive[r] == 0 or x < r_addr[r] or e > r_end[r]:
                        r = -1
                    j += 1
            if r < 0 or s <= 0 or r_alive[r] == 0 or x < r_addr[r] or e > r_end[r]:
                count[0] += 1
                continue
            b = int(b_next[r_head[r]])
            if a == 4:
                r_alive[r] = 0
                while b_state[b] != 3:
                    if b_where[b] >= 0 and start_at[b_where[b]] == b:
                        start_at[b_where[b]] = -1
                    b_state[b] = 4
                    b = int(b_next[b])
                continue
            while b_state[b] != 3 and b_addr[b] + b_size[b] <= x:
                b = int(b_next[b])
            if b_state[b] != 0 or b_addr[b] > x or b_addr[b] + b_size[b] < e:
                count[0] += 1
                continue
            old_end, old_tail, n = int(r_end[r]), int(r_tail[r]), int(b_next[b])
            high = int(b_addr[b]) + int(b_size[b]) - e
            t = blocks  # the lower part keeps the run, with a new upper border
            blocks += 1
            b_state[t] = 3
            b_run[t] = r
            b_next[t] = t
            r_end[r] = x
            r_tail[r] = t
            b_size[b] = x - b_addr[b]
            p = b
            if b_size[b] == 0:
                p = int(b_prev[b])
                if b_where[b] >= 0:
                    start_at[b_where[b]] = -1
                b_state[b] = 4
            b_next[p] = t
            b_prev[t] = p
            if r_end[r] == r_addr[r]:
                r_alive[r] = 0
            if old_end > e:  # the upper part becomes a run of its own
                run = runs
                runs += 1
                h = blocks
                blocks += 1
                b_state[h] = 3
                b_run[h] = run
                b_prev[h] = h
                r_addr[run] = e
                r_end[run] = old_end
                r_head[run] = h
                r_tail[run] = old_tail
                r_alive[run] = 1
                r_exp[run] = r_exp[r]
                r_stream[run] = r_stream[r]
                r_list[listed] = run
                listed += 1
                if high > 0:
                    made = blocks
                    blocks += 1
                    b_addr[made] = e
                    b_size[made] = high
                    b_state[made] = 0
                    b_prev[made] = h
                    b_next[made] = n
                    b_next[h] = made
                    b_prev[n] = made
                else:
                    b_next[h] = n
                    b_prev[n] = h
                n = int(b_next[h])
                while b_state[n] != 3:
                    b_run[n] = run
                    n = int(b_next[n])
                b_run[n] = run
        if made >= 0:
            y = int(b_addr[made])
            lo, hi = 0, known
            while lo < hi:
                mid = (lo + hi) >> 1
                if universe[mid] < y:
                    lo = mid + 1
                else:
                    hi = mid
            b_where[made] = -1
            if lo < known and universe[lo] == y:
                start_at[lo] = made
                b_where[made] = lo
        if joins >= 0:
            n = int(b_next[joins])
            if b_state[n] == 0:
                if b_where[n] >= 0:
                    start_at[b_where[n]] = -1
                b_size[joins] += b_size[n]
                m = int(b_next[n])
                b_next[joins] = m
                b_prev[m] = joins
                b_state[n] = 4
            p = int(b_prev[joins])
            if b_state[p] == 0:
                if b_where[joins] >= 0:
                    start_at[b_where[joins]] = -1
                b_size[p] += b_size[joins]
                m = int(b_next[joins])
                b_next[p] = m
                b_prev[m] = p
                b_state[joins] = 4
    state[0] = blocks
    state[1] = runs
    state[2] = listed
    return 0
