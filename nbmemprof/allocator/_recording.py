"""What a recording tells of one device, packed for the rules: its trace, its rows, its pools, its beginning and its end."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl

from nbmemprof import heap
from nbmemprof.allocator import _blocks
from nbmemprof.allocator import _memory as M
from nbmemprof.allocator._held import Area, reservations
from nbmemprof.allocator._model import Model, Words
from nbmemprof.allocator.rounding import SMALL_BUFFER
from nbmemprof.capture import Capture
from nbmemprof.heap._columns import int64, rows_of

__all__ = ["UNNAMED", "Recording", "recordings"]

_KINDS = {
    "alloc": M.ALLOC, "free_requested": M.FREE_REQUESTED, "free_completed": M.FREE_COMPLETED, "segment_alloc": M.SEGMENT_ALLOC, "segment_free": M.SEGMENT_FREE,
    "segment_map": M.SEGMENT_MAP, "segment_unmap": M.SEGMENT_UNMAP, "oom": M.OOM,
}  # fmt: skip
_MANY = 32  # frees that complete at once, from which one that does not is taken for one whose completion is missing
UNNAMED = "?_"  # a private pool that is gone at the end


def recordings(capture: Capture) -> list[Recording]:
    """One recording a CUDA device of the capture that has events."""
    return [Recording(capture, curve) for curve in heap.curves(capture) if curve.key[2] == "device" and len(curve.seq)]


class Recording:
    """The trace of one device.

    Attributes
    ----------
    trace
        Rows of six words (:mod:`nbmemprof.allocator._run`); the pool is a number, 0 the default, until :meth:`bind`.
    rows
        The device's ``allocations``; ``at_start`` those that were there before the first event.
    lost
        Words in the trace before which a ``free_completed`` must have been, though none is recorded.
    """

    def __init__(self, capture: Capture, curve: heap.Curve) -> None:
        self.capture, self.curve, self.key = capture, curve, curve.key
        events, rows = capture.tables["events"], capture.tables["allocations"]
        index = rows_of(events, self.key)
        self.events = events if index is None else events[index]
        self.rows = rows if _only(rows, self.key) else rows.filter(heap.matches(self.key))
        picture = heap.last_picture(capture.tables["segments"])
        self.segments = picture.filter(heap.matches(self.key))
        self.final = heap.last_picture(capture.tables["blocks"]).filter(heap.matches(self.key))
        self.has_picture = self.segments.height > 0 or self.final.height > 0
        self.pool_names = ["0_0"]
        self._areas: list[Area] | None = None
        self._pack(curve.seq)
        self.at_start = self.rows["alloc_seq"].is_null().to_numpy()
        self.starts_empty = curve.start[2] <= 0
        meta = capture.meta
        told = meta.get("start_snapshot_id") is not None or bool(meta.get("recording")) or bool(meta.get("counters"))
        # nothing was live, and the source does not tell the beginning: a lost segment_alloc looks the same as a cached segment
        self.may_be_whole = not self.starts_empty and not told and not self.at_start.any()
        self.reserved = curve.reserved - (curve.start[2] if self.starts_empty or self.may_be_whole else 0)
        self.start_reserved = 0 if self.starts_empty or self.may_be_whole else curve.start[2]
        self._pools()

    def _pack(self, seq: Words) -> None:
        events, rows = self.events, self.rows
        n = events.height
        table = np.zeros((n, M.WORDS), np.int64)
        kind = _codes(events["action"])
        self.addr = int64(events["addr"])
        size = int64(pl.Series(events["requested_bytes"]))
        missing = (kind >= M.SEGMENT_ALLOC) & (kind <= M.SEGMENT_UNMAP)
        if missing.any():
            size = np.where(missing, int64(events["size_bytes"]), size)
        row = np.full(n, -1, np.int64)
        contiguous = n > 0 and int(seq[-1] - seq[0]) == n - 1
        where = int64(rows["addr"])
        for column, code in (("alloc_seq", M.ALLOC), ("free_seq", M.FREE_REQUESTED), ("done_seq", M.FREE_COMPLETED)):
            known = np.flatnonzero(rows[column].is_not_null().to_numpy())
            wanted = rows[column].drop_nulls().to_numpy()
            at = wanted - seq[0] if contiguous else np.searchsorted(seq, wanted)
            good = (at >= 0) & (at < n)
            at, known = at[good], known[good]
            told = (kind[at] == code) & (self.addr[at] == where[known])  # where a free is missing, the heap places it at another event
            row[at[told]] = known[told]
        free = np.flatnonzero(kind == M.FREE_REQUESTED)
        follows = np.minimum(free + 1, max(n - 1, 0))
        at_once = (kind[follows] == M.FREE_COMPLETED) & (row[follows] == row[free]) & (free + 1 < n)
        table[:, M.T_KIND], table[:, M.T_ADDR], table[:, M.T_SIZE], table[:, M.T_STREAM], table[:, M.T_ROW] = kind, self.addr, size, int64(events["stream"]), row
        table[free, M.T_POOL] = ~at_once
        self.kind, self.size = kind, size
        self.trace = table.reshape(-1)
        self.deferred = int((~at_once).sum())
        self.lost = self._lost(free[~at_once], row)
        asked = np.zeros(rows.height + 1, bool)
        asked[row[free]] = True
        ended = np.flatnonzero((kind == M.FREE_COMPLETED) & (row >= 0))
        ended = ended[~asked[row[ended]]]  # given up before the first event, and pending since
        self.pending_at_start = set(row[ended if self.deferred else ended[ended == 0]].tolist())

    def _lost(self, waiting: Words, row: Words) -> list[int]:
        """Frees that never complete, of blocks that are not pending at the end: their ``free_completed`` is missing."""
        if not len(waiting):
            return []
        completed = np.zeros(self.rows.height + 1, bool)
        completed[row[self.kind == M.FREE_COMPLETED]] = True
        if not self.has_picture:  # the only one of many frees that waits for another stream, and in vain
            i = int(waiting[0])
            alone = len(waiting) == 1 and row[i] >= 0 and not completed[row[i]] and int((self.kind == M.FREE_COMPLETED).sum()) >= _MANY
            return [(i + 1) * M.WORDS] if alone else []
        pending = set(self.final.filter(pl.col("state").cast(pl.String) == "active_pending_free")["addr"].to_list())
        return [int(i + 1) * M.WORDS for i in waiting.tolist() if row[i] >= 0 and not completed[row[i]] and int(self.addr[i]) % (1 << 64) not in pending]

    # ------------------------------------------------------------------ pools
    def _pools(self) -> None:
        """Write each request's pool: as the events tell it, else by the private segment that its address lies in."""
        self._tell_pools()
        if len(self.pool_names) == 1:  # the default pool is the first record of every model
            self.trace.reshape(-1, M.WORDS)[(self.kind == M.ALLOC) | (self.kind == M.OOM), M.T_POOL] = M.HEAD

    def _tell_pools(self) -> None:
        table = self.trace.reshape(-1, M.WORDS)
        asks = (self.kind == M.ALLOC) | (self.kind == M.OOM)
        told = self.events["pool_id"]
        self.pools_told = told.null_count() < len(told)
        if self.pools_told:
            self.pool_names += sorted(set(told.unique().cast(pl.String).fill_null("0_0").to_list()) - {"0_0"}, key=_pool_order)
            if len(self.pool_names) > 1:
                names = told.cast(pl.String).fill_null("0_0")
                number = names.replace_strict(self.pool_names, list(range(len(self.pool_names))), return_dtype=pl.Int64).to_numpy()
                table[asks, M.T_POOL] = number[asks]
            return
        private = self.segments.filter((pl.col("pool_id").is_not_null()) & (pl.col("pool_id").cast(pl.String) != "0_0"))
        self.pool_names += sorted(private["pool_id"].cast(pl.String).unique().to_list(), key=_pool_order)
        for addr, size, name, expandable in zip(
            int64(private["addr"]).tolist(), private["size_bytes"].to_list(), private["pool_id"].cast(pl.String).to_list(), private["is_expandable"].to_list(), strict=True
        ):
            area = self._area_at(addr, len(self.kind)) if expandable else None
            made = np.flatnonzero((self.kind == M.SEGMENT_ALLOC) & (self.addr == addr))
            since = area.begin if area is not None else int(made[-1]) if len(made) and not expandable else -1
            low, high = (area.low, area.high) if area is not None else (addr, addr + size)
            inside = (self.addr >= low) & (self.addr < high) & (self.kind == M.ALLOC)
            inside[: since + 1] = False
            table[inside, M.T_POOL] = self.pool_names.index(name)

    def _area_at(self, addr: int, index: int) -> Area | None:
        """Return the reservation that holds an address at this event."""
        if self._areas is None:
            self._areas = reservations(self.kind, self.addr, self.size, self.trace[M.T_STREAM :: M.WORDS]) if self.starts_empty else []
        return next((a for a in self._areas if a.begin <= index <= a.end and a.low <= addr < a.high), None)

    def pool_at(self, addr: int, index: int) -> int:
        """Number of the pool that an address belongs to: as the event at ``index`` tells it, else by the final segments."""
        if self.pools_told:
            name = self.events["pool_id"][min(index, self.events.height - 1)]
            return self.pool_names.index(name) if name in self.pool_names else 0
        begin, size = int64(self.segments["addr"]), int64(self.segments["size_bytes"])
        over = np.flatnonzero((begin <= addr) & (addr < begin + size))
        later = len(over) and not self.segments["is_expandable"][int(over[0])] and ((self.kind[index:] == M.SEGMENT_ALLOC) & (self.addr[index:] == begin[over[0]])).any()
        name = self.segments["pool_id"].cast(pl.String)[int(over[0])] if len(over) and not later else None
        return self.pool_names.index(name) if name in self.pool_names else 0

    def pool_beside(self, addr: int, index: int) -> int | None:
        """Number of the pool that the other requests ask of which a segment serves that is gone at the end; None where it has none."""
        gone = self.segment_gone(addr, index)
        if gone is None:
            return None
        pools = self.trace.reshape(-1, M.WORDS)[self._inside(*gone), M.T_POOL]
        return int(pools[0]) if len(pools) else None

    def pools_may_be_gone(self) -> bool:
        """Whether there were private pools, and segments of which no event tells that they were not such a pool's."""
        return not self.pools_told and len(self.pool_names) > 1 and bool(np.isin(self.kind, (M.SEGMENT_FREE, M.SEGMENT_UNMAP)).any())

    def segment_gone(self, addr: int, index: int) -> tuple[int, int] | None:
        """Return the events with which the segment at this address, as it was at this event, came and went; None where it stays, as the final picture names its pool."""
        made = np.flatnonzero((self.kind[: index + 1] == M.SEGMENT_ALLOC) & (self.addr[: index + 1] <= addr) & (addr < self.addr[: index + 1] + self.size[: index + 1]))
        if not len(made):
            area = self._area_at(addr, index)
            return (area.begin, area.end) if area is not None and area.end < len(self.kind) else None
        begin = int(made[-1])
        gone = np.flatnonzero((self.kind[begin:] == M.SEGMENT_FREE) & (self.addr[begin:] == self.addr[begin]))
        return (begin, begin + int(gone[0])) if len(gone) else None

    def _inside(self, begin: int, end: int) -> Words:
        """Requests that a segment serves, between the events with which it comes and goes; of a refused request only itself."""
        if self.kind[begin] == M.OOM:
            return np.asarray([begin])
        area = self._area_at(int(self.addr[begin]), begin) if self.kind[begin] == M.SEGMENT_MAP else None
        low, high = (area.low, area.high) if area is not None else (self.addr[begin], self.addr[begin] + self.size[begin])
        found: Words = np.flatnonzero((self.kind[begin:end] == M.ALLOC) & (self.addr[begin:end] >= low) & (self.addr[begin:end] < high)) + begin
        return found

    def route(self, segment: tuple[int, int], number: int) -> bool:
        """Give the requests of a segment that comes and goes to a pool; False where there is nothing to change. A number past the pools that there are makes a new, unnamed one."""
        inside = self._inside(*segment)
        table = self.trace.reshape(-1, M.WORDS)
        if len(self.pool_names) == 1:  # the default pool stood there as a record
            table[(self.kind == M.ALLOC) | (self.kind == M.OOM), M.T_POOL] = 0
        if not len(inside) or (table[inside, M.T_POOL] == number).all():
            return False
        if number == len(self.pool_names):
            self.pool_names.append(f"{UNNAMED}{number}")
        table[inside, M.T_POOL] = number
        return True

    def bind(self, model: Model) -> Words:
        """Return the trace with the records of the model's pools in place of numbers; pools are made where there are none yet."""
        while len(model.pools) < len(self.pool_names):
            model.add_pool()
        if len(self.pool_names) == 1:
            return self.trace
        bound = self.trace.copy()
        table = bound.reshape(-1, M.WORDS)
        asks = (self.kind == M.ALLOC) | (self.kind == M.OOM)
        table[asks, M.T_POOL] = np.asarray(model.pools, np.int64)[table[asks, M.T_POOL]]
        return bound

    # ------------------------------------------------------------------ the beginning
    def first_segments(self) -> pl.DataFrame:
        """Segments before the first event."""
        return heap.segments_at(self.capture, int(self.curve.seq[0]) - 1).filter(heap.matches(self.key)).sort("addr")

    def cached_at_start(self) -> bool:
        """Whether segments without an event may have been cached before it: several, or one without the stack that the others have."""
        first, stack = self.first_segments(), pl.col("stack_id")
        made = self.events.filter(pl.Series((self.kind == M.SEGMENT_ALLOC) | (self.kind == M.SEGMENT_MAP)))
        with_stacks = made["stack_id"].null_count() < made.height
        return first.height > 1 or (with_stacks and first.filter(stack.is_not_null()).is_empty())

    def lay_out(self, model: Model, rows: Words, later: frozenset[int] = frozenset()) -> list[str]:
        """Build the heap as it was before the first event, without the segments that came later; returns what had to be assumed."""
        first = int(self.curve.seq[0]) - 1
        segments = self.first_segments()
        if later:
            segments = segments.filter(~pl.Series(np.isin(int64(segments["addr"]), sorted(later))))
        blocks = heap.blocks_at(self.capture, first).filter(heap.matches(self.key)).sort("addr")
        start = np.flatnonzero(self.at_start)
        row_of = dict(zip(int64(self.rows["addr"])[start].tolist(), start.tolist(), strict=True))
        return _Layout(model, rows, row_of, self.pool_names, self.pending_at_start).build(segments, blocks)


class _Layout:
    """Blocks written into a model by hand, through its own rules for sets and statistics."""

    def __init__(self, model: Model, rows: Words, row_of: dict[int, int], pool_names: list[str], pending: set[int]) -> None:
        self.model, self.rows, self.row_of, self.pool_names, self.pending = model, rows, row_of, pool_names, pending
        self.areas: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def build(self, segments: pl.DataFrame, blocks: pl.DataFrame) -> list[str]:
        model = self.model
        while model.m[M.TOP] + M.RECORD * (blocks.height * 2 + segments.height * 4 + 64) > len(model.m):
            model._grow()
        m: Any = model.m.data
        inside: dict[int, list[tuple[int, int, int, str]]] = {}
        for segment, addr, size, requested, state in zip(
            int64(blocks["segment_addr"]).tolist(), int64(blocks["addr"]).tolist(), int64(blocks["size_bytes"]).tolist(), int64(blocks["requested_bytes"]).tolist(),
            blocks["state"].cast(pl.String).to_list(), strict=True,
        ):  # fmt: skip
            inside.setdefault(segment, []).append((addr, size, requested, state))
        guessed = 0
        ends: dict[int, tuple[int, int]] = {}  # area -> its last block and where that ends
        for addr, size, stream, name, half, expandable in zip(
            int64(segments["addr"]).tolist(), int64(segments["size_bytes"]).tolist(), int64(segments["stream"]).tolist(), segments["pool_id"].cast(pl.String).to_list(),
            segments["pool"].cast(pl.String).to_list(), segments["is_expandable"].to_list(), strict=True,
        ):  # fmt: skip
            here = inside.get(addr, [])
            if half is None:
                guessed += 1
                half = "large" if any(b[1] > 1 << 20 and b[3] != "inactive" for b in here) or (not expandable and size > SMALL_BUFFER) else "small"
                if expandable and size % int(m[M.LARGE]) == 0 and size > SMALL_BUFFER:
                    half = "large"
            pool = model.pools[self.pool_names.index(name)] if name in self.pool_names else model.default
            free_list = _blocks.list_of(m, int(m[pool + (M.POOL_SMALL if half == "small" else M.POOL_LARGE)]), stream)
            area = self._area(m, free_list, addr, size, ends) if expandable else 0
            before = self._hole(m, free_list, area, addr, ends) if area else 0
            for block in here:
                before = self._block(m, free_list, area, before, block)
            m[M.RESERVED] += size
            M.gain(m, M.RESERVED_BYTES, int(m[free_list + M.LIST_SMALL]), size)
            if area:
                ends[area] = (before, addr + size)
            else:
                M.gain(m, M.SEGMENT, int(m[free_list + M.LIST_SMALL]), 1)
                self._split_statistics(m, free_list, before)
        for area, (before, end) in ends.items():
            self._hole(m, int(m[area + M.AREA_LIST]), area, int(m[area + M.AREA_BASE] + m[area + M.AREA_BYTES]), {area: (before, end)})
        self._forget_totals()
        said = [f"the trace begins in the middle of a run: {segments.height} segments and {blocks.height} blocks before it come from walking back from the end"]
        if guessed:
            said.append(f"for {guessed} segments that are gone at the end, small or large pool is told by their size")
        if model.m[M.GC_ON]:
            said.append("ages of free blocks before the first event are not known; the garbage collector takes them as fresh")
        return said

    def _area(self, m: Any, free_list: int, addr: int, size: int, ends: dict[int, tuple[int, int]]) -> int:
        """Ranges of one list are taken to lie in one reservation as long as they fit into it; it begins at the lowest."""
        for area in ends:
            if m[area + M.AREA_LIST] == free_list and addr + size <= m[area + M.AREA_BASE] + m[area + M.AREA_BYTES]:
                return area
        page = SMALL_BUFFER if m[free_list + M.LIST_SMALL] else int(m[M.LARGE])
        area = M.new_record(m, M.IS_AREA)
        m[area + M.AREA_BASE], m[area + M.AREA_PAGE], m[area + M.AREA_LIST] = addr, page, free_list
        m[area + M.AREA_BYTES] = -(-max(int(m[M.VIRTUAL]), size) // page) * page
        m[M.AREAS_MADE] += 1
        return area

    def _hole(self, m: Any, free_list: int, area: int, until: int, ends: dict[int, tuple[int, int]]) -> int:
        """Return the unmapped block between the last range of the area and this address."""
        before, at = ends.get(area, (0, int(m[area + M.AREA_BASE])))
        if at >= until:
            return before
        hole = _blocks.new_block(m, free_list, area, at, until - at)
        _blocks.splice(m, hole, before, 0)
        _blocks.put_hole(m, hole)
        return hole

    def _block(self, m: Any, free_list: int, area: int, before: int, block: tuple[int, int, int, str]) -> int:
        addr, size, requested, state = block
        b = _blocks.new_block(m, free_list, area, addr, size)
        _blocks.splice(m, b, before, 0)
        if state == "inactive":
            _blocks.put(m, b)
            return b
        small, row = int(m[free_list + M.LIST_SMALL]), self.row_of.get(addr, -1)
        m[b + M.STATE], m[b + M.REQUESTED], m[b + M.ROW] = M.LIVE, requested, row
        if row >= 0:
            self.rows[2 * row], self.rows[2 * row + 1] = b, size
        for stat, amount in ((M.ALLOCATION, 1), (M.ALLOCATED_BYTES, size), (M.ACTIVE, 1), (M.ACTIVE_BYTES, size), (M.REQUESTED_BYTES, requested)):
            M.gain(m, stat, small, amount)
        if size >= m[M.MAX_SPLIT]:
            M.gain_one(m, M.OVERSIZE_ALLOCATIONS)
        if state == "active_pending_free" or row in self.pending:
            mode, m[M.MODE] = m[M.MODE], M.MUTE
            _blocks.free(m, m, b, 1)
            m[M.MODE] = mode
        return b

    def _split_statistics(self, m: Any, free_list: int, last: int) -> None:
        b, small = last, int(m[free_list + M.LIST_SMALL])
        if not b:
            return
        if m[b + M.SIZE] >= m[M.MAX_SPLIT] and not m[b + M.PREV]:
            M.gain_one(m, M.OVERSIZE_SEGMENTS)
        while b and m[last + M.PREV]:
            if m[b + M.STATE] == M.FREE:
                M.gain(m, M.INACTIVE_SPLIT, small, 1)
                M.gain(m, M.INACTIVE_SPLIT_BYTES, small, int(m[b + M.SIZE]))
            b = m[b + M.PREV]

    def _forget_totals(self) -> None:
        """Count ``allocated`` and ``freed`` from the first event; what is there is current and peak."""
        m = self.model.m
        for at in (*range(M.ALLOCATION, M.OVERSIZE_ALLOCATIONS, 4), M.OVERSIZE_ALLOCATIONS, M.OVERSIZE_SEGMENTS):
            m[at + 1], m[at + 2], m[at + 3] = m[at], 0, 0


def _only(rows: pl.DataFrame, key: tuple[Any, ...]) -> bool:
    return rows.height > 0 and all(rows[name].n_unique() == 1 for name in ("rank", "device", "kind")) and rows.select("rank", "device", "kind").row(0) == key


def _codes(action: pl.Series) -> Words:
    known = pl.DataFrame({"word": action.unique().drop_nulls()}).with_columns(pl.col("word").to_physical().alias("number"))
    table = np.full(int(known["number"].max() or 0) + 2, M.OTHER, np.int64)  # type: ignore[arg-type]
    for word, number in known.iter_rows():
        table[number] = _KINDS.get(word, M.OTHER)
    found: Words = table[action.to_physical().fill_null(len(table) - 1).to_numpy()]
    return found


def _pool_order(name: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in name.split("_"))
