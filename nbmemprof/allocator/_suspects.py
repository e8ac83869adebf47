"""Events that may be missing where a trace can't be followed, from what the rest of it tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._attempt import ACTIONS, Followed
from nbmemprof.allocator._held import Held
from nbmemprof.allocator._recording import UNNAMED
from nbmemprof.allocator.rounding import SMALL_BUFFER, SMALL_SIZE
from nbmemprof.heap._columns import int64

__all__ = ["Suspect", "suspects"]

_CODES = {word: code for code, word in ACTIONS.items()}
_MOST = 12  # allocs that are looked into
_LATER = 3  # requests behind a place, that may tell how much lay there


@dataclass(frozen=True)
class Suspect:
    """An event that may be missing: before one of the events ``low`` to ``high``.

    ``row``: the allocation that it belongs to, -1 for none; ``uses``: events that are of that allocation too, which the
    recording could give to none. ``pool``: number of the pool that an alloc asks of. ``certain``: where it must
    have been, if the trace itself shows that it is missing, whatever the pools are. ``guess``: nothing recorded is of it.
    """

    kind: int
    addr: int
    size: int
    stream: int
    low: int
    high: int
    row: int = -1
    uses: tuple[int, ...] = ()
    pool: int = 0
    certain: tuple[int, int] | None = None
    guess: bool = False


def suspects(found: Followed) -> Iterator[Suspect]:
    """Each event whose absence the trace shows, the likeliest first."""
    assert found.mismatch is not None  # noqa: S101 - asked for where something differs
    clues = _Clues(found)
    parts = (clues.half_frees, clues.expected, clues.allocs, clues.there_before, clues.segments_gone, clues.segments_never_made, clues.pages_never_mapped, clues.refusals)
    known = [suspect for part in parts for suspect in part()]
    shown = [suspect for suspect in known if suspect.certain is not None]
    yield from shown
    yield from (suspect for suspect in known if suspect.certain is None)
    if not shown:  # a request of which nothing is recorded can explain much; where something certain is missing, it is that
        yield from clues.unrecorded()


class _Clues:
    def __init__(self, found: Followed) -> None:
        assert found.mismatch is not None  # noqa: S101 - as above
        self.found, self.recording, self.mismatch = found, found.recording, found.mismatch
        r = self.recording
        self.table = r.trace.reshape(-1, M.WORDS)
        self.row, self.kind, self.addr, self.size = self.table[:, M.T_ROW], r.kind, r.addr, r.size
        self.at, self.end = int(self.mismatch["index"]), r.events.height

    # ------------------------------------------------------------------ frees of which one half is there
    def half_frees(self) -> Iterator[Suspect]:
        r, places = self.recording, {}
        for code in (M.ALLOC, M.FREE_REQUESTED, M.FREE_COMPLETED):
            events = np.flatnonzero((self.kind == code) & (self.row >= 0))
            places[code] = np.full(r.rows.height + 1, -1, np.int64)
            places[code][self.row[events]] = events
        made, asked, done = (places[code] for code in (M.ALLOC, M.FREE_REQUESTED, M.FREE_COMPLETED))
        deferred = int(((asked >= 0) & (done > asked + 1)).sum())
        for row in np.flatnonzero((done >= self.at) & (asked < 0) & (made >= 0))[:_MOST].tolist():
            i = int(done[row])  # where all frees complete at once, so did this one
            yield self._half(M.FREE_REQUESTED, i, int(made[row]) + 1 if deferred else i, i, row)
        pending = set(r.final.filter(pl.col("state").cast(pl.String) == "active_pending_free")["addr"].to_list())
        if pending:  # at the end, and never asked for
            ends = np.isin(int64(r.rows["addr"]), np.asarray(sorted(pending), np.uint64).view(np.int64))
            for row in np.flatnonzero(ends & (made >= 0)[:-1] & (asked < 0)[:-1] & (done < 0)[:-1] & r.rows["done_seq"].is_null().to_numpy())[:_MOST].tolist():
                yield self._half(M.FREE_REQUESTED, int(made[row]), int(made[row]) + 1, self.end, row)
        over = r.rows["done_seq"].is_not_null().to_numpy() if r.has_picture else np.ones(r.rows.height, bool)  # in use again, or not pending at the end
        waiting = np.flatnonzero((asked >= 0) & (asked <= self.at) & (done < 0) & np.append(over, False)).tolist()
        for row in waiting[:_MOST]:
            i = int(asked[row])
            again = np.flatnonzero((self.addr[i + 1 :] == self.addr[i]) & (self.kind[i + 1 :] != M.OOM))
            last = i + 1 + int(again[0]) if len(again) else self.end
            yield self._half(M.FREE_COMPLETED, i, i + 1, last if deferred else i + 1, row)

    def _half(self, kind: int, like: int, low: int, high: int, row: int) -> Suspect:
        return Suspect(kind, int(self.addr[like]), int(self.size[like]), int(self.table[like, M.T_STREAM]), low, high, row, certain=(low, high))

    # ------------------------------------------------------------------ what the rules would do here
    def expected(self) -> Iterator[Suspect]:
        """Memory that the rules take or give back where the trace has something else; the driver's address is in the request that follows."""
        wanted, found = self.mismatch["expected"], self.mismatch["found"]
        if wanted is None or not wanted["action"].startswith("segment"):
            return
        addresses = [wanted["addr"]]
        if wanted["action"] in ("segment_alloc", "segment_map") and found is not None:
            request = self.at + int(np.argmax(np.isin(self.kind[self.at :], (M.ALLOC, M.OOM))))
            addresses = [int(self.addr[request]), *addresses]
        taken = wanted["action"] in ("segment_alloc", "segment_map")
        for addr in dict.fromkeys(addresses):  # what was taken was right here; it can have been given back before
            low = self.at if taken else self._untouched_since(addr, wanted["bytes"], self.at)
            yield Suspect(_CODES[wanted["action"]], addr, wanted["bytes"], wanted["stream"], low, self.at)

    def unrecorded(self) -> Iterator[Suspect]:
        """A request that was never freed, where the rules would put another or memory was taken for it."""
        wanted, found = self.mismatch["expected"], self.mismatch["found"]
        if wanted is not None and found is not None:
            yield from self._in_the_way(wanted)
            yield from self._taken_for(found)

    def _in_the_way(self, wanted: dict[str, Any]) -> Iterator[Suspect]:
        """Something that was never freed lies where the rules would put a request: it reaches up to where the request is, or leaves too little of the block."""
        addr, bytes_ = wanted["addr"], wanted["bytes"]
        if wanted["action"] == "segment_map":  # the model has put the request into the free block below and the new pages
            blocks = self.found.model.blocks()
            over = blocks["addr"][(blocks["addr"] <= addr) & (addr < blocks["addr"] + blocks["size"])]
            addr = int(over[0]) if len(over) else addr
        free = self._free_at(addr) if wanted["action"] in ("alloc", "segment_map") else 0
        request = self._request()
        gap = int(self.addr[request]) - addr if request < self.end and self.kind[request] == M.ALLOC else 0
        later = np.flatnonzero((self.kind[self.at :] == M.ALLOC) & (self.addr[self.at :] > addr) & (self.addr[self.at :] < addr + free))[:_LATER] + self.at
        sizes = [gap] if 0 < gap <= free else [*(self.addr[later] - addr).tolist(), free, max(free - bytes_ // 512 * 512, 512)] if free else []
        low = min(self._free_since(addr, 1, self.at), self.at)
        for size in dict.fromkeys(sizes):
            for pool in self._pools(addr, self.at):
                yield Suspect(M.ALLOC, addr, size, wanted["stream"], low, self.at, max(self.recording.rows.height, 1), (), pool, guess=True)

    def _taken_for(self, found: dict[str, Any]) -> Iterator[Suspect]:
        """Memory was taken that the next request does not need: it was for one that is missing, and reached up to where something lies later."""
        if found["action"] not in ("segment_alloc", "segment_map"):
            return
        place = self.at
        while place < self.end and self.kind[place] in (M.SEGMENT_ALLOC, M.SEGMENT_MAP) and (place == self.at or found["action"] == "segment_map"):
            place += 1
        blocks = self.found.model.blocks()
        below = np.flatnonzero((blocks["addr"] + blocks["size"] == found["addr"]) & (blocks["state"] == M.FREE))
        begin = int(blocks["addr"][below[0]]) if len(below) and found["action"] == "segment_map" else found["addr"]
        end = int(self.addr[place - 1] + self.size[place - 1])
        later = np.flatnonzero((self.kind[place:] == M.ALLOC) & (self.addr[place:] > begin) & (self.addr[place:] < end))[:1] + place
        for size in dict.fromkeys([*(self.addr[later] - begin).tolist(), end - begin]):
            for pool in self._pools(begin, self.at):
                yield Suspect(M.ALLOC, begin, size, found["stream"], place, place, max(self.recording.rows.height, 1), (), pool, guess=True)

    def _request(self) -> int:
        """Return the request that the event of the difference belongs to."""
        at = np.flatnonzero(np.isin(self.kind[self.at :], (M.ALLOC, M.OOM, M.FREE_REQUESTED)))[:1]
        return self.at + int(at[0]) if len(at) else self.end

    def _free_at(self, addr: int) -> int:
        """Bytes of the block that the model has at an address, whatever became of it where the trace differs."""
        blocks = self.found.model.blocks()
        at = np.flatnonzero(blocks["addr"] == addr)
        if not len(at):
            return 0
        end = blocks["addr"] + blocks["size"]
        joined = int(end[at[0]])
        while len(after := np.flatnonzero((blocks["addr"] == joined) & (blocks["state"] == M.FREE) & ~blocks["first"])):
            joined = int(end[after[0]])
        return joined - addr

    # ------------------------------------------------------------------ blocks without an alloc
    def allocs(self) -> Iterator[Suspect]:
        """Of frees and final blocks that have no alloc."""
        found = [*self._strays(), *self._orphans()]
        for evidence, addr, size, bytes_, stream, row, uses in sorted(found)[:_MOST]:
            if uses or self.found.terms.empty:
                low, high = self._free_since(addr, bytes_, min(evidence, self.at)), min(self._next_request(), evidence)
            else:  # taken to be there at the beginning: where it is not, it can have come after what differs now
                low, high = self._free_since(addr, bytes_, evidence), evidence
            for pool in self._pools(addr, evidence):
                yield Suspect(M.ALLOC, addr, size, stream, min(low, high), high, row, uses, pool, certain=self._bounds(addr, bytes_, evidence) if uses or self.found.terms.empty or self._used(addr, bytes_, evidence) else None)

    def _pools(self, addr: int, evidence: int) -> list[int]:
        """Numbers of the pools that the request can have asked of, the likeliest first."""
        r = self.recording
        beside = r.pool_beside(addr, min(evidence, self.end - 1)) if len(r.pool_names) > 1 and not r.pools_told else None
        unnamed = [i for i, name in enumerate(r.pool_names) if name.startswith(UNNAMED)] if beside is None else []
        return list(dict.fromkeys([*([] if beside is None else [beside]), r.pool_at(addr, evidence), 0, *unnamed]))

    def _strays(self) -> Iterator[tuple[Any, ...]]:
        """Frees of an address that was free already, which the tables give to no allocation."""
        new = max(self.recording.rows.height, 1)
        for i in np.flatnonzero((self.kind == M.FREE_REQUESTED) & (self.row < 0) & (np.arange(self.end) >= self.at))[:_MOST].tolist():
            done = np.flatnonzero((self.kind[i:] == M.FREE_COMPLETED) & (self.addr[i:] == self.addr[i]))
            uses = (i, i + int(done[0])) if len(done) and self.row[i + int(done[0])] < 0 else (i,)
            yield i, int(self.addr[i]), int(self.size[i]), int(self.size[i]), int(self.table[i, M.T_STREAM]), new, uses

    def _orphans(self) -> Iterator[tuple[Any, ...]]:
        """Allocations that were there before the first event, as the tables have it; in a trace that began with an empty heap none was."""
        r = self.recording
        rows = np.flatnonzero(r.at_start)
        begin, size, asked = int64(r.rows["addr"])[rows], int64(r.rows["size_bytes"])[rows], int64(r.rows["requested_bytes"])[rows]
        seq = r.rows["free_seq"].fill_null(np.iinfo(np.int64).max).to_numpy()[rows]
        evidence = np.minimum(np.searchsorted(r.curve.seq, seq), self.end)
        keep = evidence >= self.at
        if not self.found.terms.empty:
            meant = [(e["addr"], max(e["bytes"], 1)) for e in (self.mismatch["expected"], self.mismatch["found"]) if e is not None]
            keep &= np.any([(begin < a + n) & (a < begin + np.maximum(size, 1)) for a, n in meant] or [keep & False], axis=0)
        stream = int64(r.rows["stream"])[rows]
        for i in np.flatnonzero(keep).tolist():
            yield int(evidence[i]), int(begin[i]), int(asked[i]), int(asked[i]), int(stream[i]), int(rows[i]), ()

    def there_before(self) -> Iterator[Suspect]:
        """Any allocation that was there before the first event, as walking back from the end has it."""
        r = self.recording
        rows = np.flatnonzero(r.at_start) if not self.found.terms.empty else np.zeros(0, np.int64)
        addr, asked, stream = (int64(r.rows[name])[rows].tolist() for name in ("addr", "requested_bytes", "stream"))
        ends = np.minimum(np.searchsorted(r.curve.seq, r.rows["free_seq"].fill_null(np.iinfo(np.int64).max).to_numpy()[rows]), self.end).tolist()
        for row, at, size, of, end in zip(rows.tolist(), addr, asked, stream, ends, strict=True):
            yield Suspect(M.ALLOC, at, size, of, 0, end, row, (), r.pool_at(at, min(end, self.end - 1)))

    def _free_since(self, addr: int, bytes_: int, before: int) -> int:
        """Return the first place at which nothing else holds this range and there is memory below it."""
        r = self.recording
        begin, size = int64(r.rows["addr"]), int64(r.rows["requested_bytes"])  # what was given is not known for certain where an event is missing
        over = (begin < addr + max(bytes_, 1)) & (begin + np.maximum(size, 1) > addr)
        done = r.rows["done_seq"].to_numpy()[over]
        done = done[~np.isnan(done)] if done.dtype.kind == "f" else done
        ends = np.searchsorted(r.curve.seq, done) + 1
        made = np.flatnonzero(np.isin(self.kind[:before], (M.SEGMENT_ALLOC, M.SEGMENT_MAP)) & (self.addr[:before] <= addr) & (addr < self.addr[:before] + self.size[:before])) + 1
        both = np.concatenate([ends[ends <= before], made])
        return int(both.max()) if len(both) else 0

    def _used(self, addr: int, bytes_: int, before: int) -> bool:
        """Whether something else held a part of this range in the trace, so that it was not held from the beginning."""
        inside = (self.kind[:before] == M.ALLOC) & (self.addr[:before] < addr + max(bytes_, 1)) & (self.addr[:before] + np.maximum(self.size[:before], 1) > addr)
        return bool(inside.any())

    def _bounds(self, addr: int, bytes_: int, evidence: int) -> tuple[int, int]:
        """Return the first and last place of an alloc: its range is free from the one on, and the other event needs it; right behind the segment that was taken for it."""
        low = self._free_since(addr, bytes_, evidence)
        taken = low - 1
        if taken >= 0 and self.kind[taken] == M.SEGMENT_ALLOC and self.addr[taken] == addr:
            return low, low
        return min(low, evidence), evidence

    def _next_request(self) -> int:
        """Return the first event from the difference on that is no memory taken or given back: an alloc may be missing right behind what was done for it."""
        for i in range(self.at, self.end):
            if not M.SEGMENT_ALLOC <= self.kind[i] <= M.SEGMENT_UNMAP:
                return i
        return self.end

    # ------------------------------------------------------------------ segments, refusals
    def segments_gone(self) -> Iterator[Suspect]:
        """Memory that is given out again, that the rules would use and the trace has no more, or that is not in the final picture: that it was given back is missing."""
        r, held = self.recording, Held()
        moves = np.flatnonzero((self.kind >= M.SEGMENT_ALLOC) & (self.kind <= M.SEGMENT_UNMAP))
        gone: list[tuple[int, tuple[int, int, int], bool]] = []
        wanted = self.mismatch["expected"]
        for i in moves.tolist():
            if i >= self.at and wanted is not None and wanted["action"] == "alloc":
                gone += [(self.at, one, False) for one in held.over(wanted["addr"], 1)]
                wanted = None
            addr, size = int(self.addr[i]), int(self.size[i])
            for begin, length, stream in held.move(int(self.kind[i]), addr, size, int(self.table[i, M.T_STREAM])):
                low, high = (begin, begin + length) if begin in held.segments else (max(begin, addr), min(begin + length, addr + size))
                gone.append((i, (low, high - low, stream), True))
        if r.has_picture:
            there = set(int64(r.segments["addr"]).tolist())
            gone += [(self.end, one, True) for one in held.classic() if one[0] not in there]
            gone += [(self.end, one, True) for one in self._not_pictured(held)]
        for high, (begin, size, stream), certain in gone[:_MOST]:
            kind = M.SEGMENT_FREE if begin in held.segments else M.SEGMENT_UNMAP
            low = self._untouched_since(begin, size, high)
            yield Suspect(kind, begin, size, stream, low, high, certain=(low, high) if certain else None)

    def _untouched_since(self, begin: int, size: int, before: int) -> int:
        """Return the first place behind the last event in this range."""
        touched = np.flatnonzero((self.addr[:before] >= begin) & (self.addr[:before] < begin + size) & (self.kind[:before] != M.OOM))
        return int(touched[-1]) + 1 if len(touched) else 0

    def _not_pictured(self, held: Held) -> Iterator[tuple[int, int, int]]:
        """Mapped ranges, or pieces of them, that the final picture does not have."""
        r = self.recording
        there = sorted(zip(int64(r.segments["addr"]).tolist(), r.segments["size_bytes"].to_list(), strict=True))
        for begin, (size, stream) in held.ranges.items():
            if begin in held.segments:
                continue
            at = begin
            for low, length in [*((a, n) for a, n in there if a < begin + size and a + n > begin), (begin + size, 0)]:
                if at < low:
                    yield at, low - at, stream
                at = max(at, low + length)

    def pages_never_mapped(self) -> Iterator[Suspect]:
        """Requests that lie where nothing is mapped: that it was is missing among what was done for the first of them."""
        if not self.found.terms.empty or not (self.kind == M.SEGMENT_MAP).any():
            return
        held = Held()
        for i in np.flatnonzero((self.kind == M.ALLOC) | ((self.kind >= M.SEGMENT_ALLOC) & (self.kind <= M.SEGMENT_UNMAP))).tolist():
            addr, size = int(self.addr[i]), int(self.size[i])
            if self.kind[i] != M.ALLOC:
                held.move(int(self.kind[i]), addr, size, 0)
                continue
            at = addr
            for begin, length, _ in held.over(addr, size):
                if begin > at:
                    break
                at = max(at, begin + length)
            if at >= addr + size:
                continue
            first = i
            while first > 0 and M.SEGMENT_ALLOC <= self.kind[first - 1] <= M.SEGMENT_UNMAP:
                first -= 1
            page = SMALL_BUFFER if size <= SMALL_SIZE else self.found.settings.large_segment_size
            yield Suspect(M.SEGMENT_MAP, at, -(-(addr + size - at) // page) * page, int(self.table[i, M.T_STREAM]), first, i, certain=(first, i))
            return

    def segments_never_made(self) -> Iterator[Suspect]:
        """Segments that are given back, or in the final picture, and were never taken: that they were is missing, right before the first use of them."""
        r = self.recording
        if not self.found.terms.empty:
            return
        moves = np.flatnonzero((self.kind == M.SEGMENT_ALLOC) | (self.kind == M.SEGMENT_FREE))
        held: set[int] = set()
        lost: list[tuple[int, int, int, int]] = []
        for i in moves.tolist():
            begin = int(self.addr[i])
            if self.kind[i] == M.SEGMENT_ALLOC:
                held.add(begin)
            elif begin in held:
                held.discard(begin)
            else:
                lost.append((i, begin, int(self.size[i]), int(self.table[i, M.T_STREAM])))
        columns = (int64(r.segments["addr"]).tolist(), r.segments["size_bytes"].to_list(), int64(r.segments["stream"]).tolist(), r.segments["is_expandable"].to_list())
        lost += [(self.end, begin, size, stream) for begin, size, stream, expandable in zip(*columns, strict=True) if not expandable and begin not in held]
        for until, begin, size, stream in lost[:_MOST]:
            before = moves[(moves < until) & (self.addr[moves] < begin + size) & (self.addr[moves] + self.size[moves] > begin)]
            since = int(before[-1]) + 1 if len(before) else 0
            used = np.flatnonzero((self.kind[since:until] == M.ALLOC) & (self.addr[since:until] >= begin) & (self.addr[since:until] < begin + size))
            place = since + int(used[0]) if len(used) else until
            yield Suspect(M.SEGMENT_ALLOC, begin, size, stream, place, place, certain=(place, place))

    def refusals(self) -> Iterator[Suspect]:
        """A request that was refused, behind the memory that was given back for it; how much it asked for is not known: sizes that a flush would not have served."""
        limit = self.found.limit_bytes or self.found.terms.capacity_bytes
        place = self._next_request()
        if limit is None or place == self.at:
            return
        least = max(1, limit - int(self.recording.reserved[place - 1]) + 1)
        stream = int(self.table[self.at, M.T_STREAM])
        for size in sorted({least, *(1 << bit for bit in range(least.bit_length(), 41, 2))}):
            yield Suspect(M.OOM, 0, -(-size // 512) * 512, stream, place, place)
