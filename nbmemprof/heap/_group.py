"""The trace and the final picture of one device: its allocations, with their sizes, and what does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import _jit, schema
from nbmemprof.allocator import rounding
from nbmemprof.heap import _follow
from nbmemprof.heap._columns import Array, absent, int64
from nbmemprof.heap._layout import Layout
from nbmemprof.units import format_count

__all__ = ["Group"]

_RUN_STATE = {"active_allocated": 1, "active_pending_free": 2}


class Group:
    """The trace and the final picture of one device (or of host memory) of one rank."""

    def __init__(
        self,
        key: tuple[Any, ...],
        events: pl.DataFrame,
        rows: Array | None,
        codes: Array,
        blocks: pl.DataFrame,
        segments: pl.DataFrame,
        meta: Mapping[str, Any],
    ) -> None:
        self.key, self.rows, self.meta = key, rows, meta
        self.events = events if rows is None else events[rows]
        self.act = codes if rows is None else codes[rows]
        self.blocks, self.segments = blocks, segments
        self.addr = int64(self.events["addr"])
        self.size = int64(self.events["requested_bytes"])
        self.stream = int64(self.events["stream"])
        self.warnings: list[str] = []
        self._check_the_picture()
        self.opening = schema.empty("blocks")
        self.universe = np.unique(self.addr)
        self.where = np.searchsorted(self.universe, self.addr).astype(np.int32)

    # ------------------------------------------------------------------ rows
    def allocations(self, sizes: Array) -> pl.DataFrame:
        """Pair, follow, and write the events' sizes to ``sizes``."""
        n = len(self.act)
        self._pair()
        self._meet_the_end()
        requested = np.where(self.row_first >= 0, self.size[self.row_first], 0) if n else np.zeros(len(self.row_alloc), np.int64)
        requested = np.where(self.end_requested >= 0, self.end_requested, requested)
        self.row_size = requested.copy()
        self.row_exact = np.ones(len(requested), np.int8)
        if self.key[2] == "device" and (self.segments.height or (self.act == _follow.SEGMENT_ALLOC).any() or (self.act == _follow.MAP).any()):
            self._follow(rounding.round_sizes(requested, rounding.divisions_of(self.meta.get("settings"))))
        known = self.end_size >= 0
        odd = int((known & (self.row_exact > 0) & (self.row_size != self.end_size)).sum())
        if odd and self.key[2] == "device":
            self._warn(
                f"inconsistent: {format_count(odd)} of {format_count(int(known.sum()))} live blocks{self._place()} have another size than the trace gives them; the blocks' own sizes are used."
            )
        self.row_size = np.where(known, self.end_size, self.row_size)
        self.row_exact = np.where(known, 1, self.row_exact)
        event_sizes = np.where(self.ev_row >= 0, self.row_size[np.maximum(self.ev_row, 0)], -1) if len(self.row_size) else np.full(n, -1)
        sizes[slice(None) if self.rows is None else self.rows] = event_sizes
        return self._frame(requested)

    def _check_the_picture(self) -> None:
        """Blocks must tile their segments, and the segments' own sums must be those of their blocks."""
        if self.segments.is_empty():
            return
        blocks = self.blocks.filter(pl.col("size_bytes") > 0).sort("addr")
        end = pl.col("addr").cast(pl.Int128) + pl.col("size_bytes")
        overlapping = blocks.select((end > pl.col("addr").cast(pl.Int128).shift(-1)).sum()).item()
        if overlapping:
            self._warn(f"inconsistent: {format_count(overlapping)} blocks{self._place()} overlap the block after them; sums of blocks count such bytes twice.")
        shared = self.segments.sort("addr").select((end > pl.col("addr").cast(pl.Int128).shift(-1)).sum()).item()
        if shared:
            self._warn(f"inconsistent: {format_count(shared)} segments{self._place()} overlap the segment after them.")
        state = pl.col("state").cast(pl.String)
        sums = self.blocks.group_by("segment_addr").agg(
            pl.col("size_bytes").sum().alias("tiled"),
            pl.col("size_bytes").filter(state == "active_allocated").sum().alias("live"),
            (state == "unknown").any().alias("odd"),
        )
        both = self.segments.join(sums, left_on="addr", right_on="segment_addr", how="left").with_columns(pl.col("tiled", "live").fill_null(0))
        untiled = both.filter(pl.col("tiled") != pl.col("size_bytes")).height
        if untiled:
            self._warn(
                f"inconsistent: in {format_count(untiled)} of {format_count(both.height)} segments{self._place()} the blocks do not add up to the segment's size; reserved is the segments' sum, live the blocks'."
            )
        wrong = both.filter((pl.col("live") != pl.col("allocated_bytes")) & ~pl.col("odd").fill_null(value=False)).height
        if wrong:
            self._warn(
                f"inconsistent: {format_count(wrong)} of {format_count(both.height)} segments{self._place()} tell another allocated size than their live blocks have; the blocks are believed."
            )

    def _pair(self) -> None:
        n = len(self.act)
        uses = int((self.act <= _follow.DONE).sum())
        self.ev_row = np.full(n, -1, np.int32)
        rows = [np.empty(uses, np.int32) for _ in range(4)]
        opened, seen, count = np.full(len(self.universe), -1, np.int32), np.zeros(len(self.universe), np.int8), np.zeros(3, np.int64)
        made = _jit.run(_follow.pair, 4 * n, self.act, self.where, self.ev_row, *rows, opened, seen, count) if n else 0
        self.row_first, self.row_alloc, self.row_free, self.row_done = (r[:made].copy() for r in rows)
        stray, lost, sudden = (int(c) for c in count)
        if stray:
            self._warn(f"inconsistent: {format_count(stray)} stray frees{self._place()} of addresses that were free already; they are left out.")
        if lost:
            self._warn(f"inconsistent: {format_count(lost)} frees are missing{self._place()}: the address was given out again; the release is placed there.")
        self.sudden = sudden

    def _meet_the_end(self) -> None:
        """Match allocations that are open at the end with the final blocks; add those that no event tells of."""
        n, last = len(self.act), max(len(self.act) - 1, 0)
        final = self.blocks.filter(pl.col("state") != "inactive")
        final_addr, final_size, final_requested = (int64(final[c]) for c in ("addr", "size_bytes", "requested_bytes"))
        final_state = np.asarray([_RUN_STATE.get(s, 0) for s in final["state"].to_list()], np.int8)
        unasked = final["requested_bytes"].is_null().to_numpy()
        order = np.argsort(final_addr, kind="stable")
        open_rows = np.flatnonzero(self.row_done < 0)
        open_addr = self.addr[self.row_first[open_rows]] if n else np.zeros(0, np.int64)
        self.has_picture = self.segments.height > 0 or self.blocks.height > 0
        end_size, end_requested = np.full(len(self.row_alloc), -1, np.int64), np.full(len(self.row_alloc), -1, np.int64)
        matched = np.zeros(len(final_addr), bool)
        lost = 0
        if self.has_picture and len(open_rows):
            # of several blocks at one address (a damaged file) the last one counts, as zero-sized ones come first
            place = np.searchsorted(final_addr[order], open_addr, side="right") - 1
            found = order[np.maximum(place, 0)] if len(order) else np.zeros(len(place), np.int64)
            fits = (place >= 0) & (final_addr[found] == open_addr) if len(order) else np.zeros(len(place), bool)
            live = fits & (final_state[found] == 1) & (self.row_free[open_rows] < 0) if len(order) else fits
            pending = fits & (final_state[found] == 2) if len(order) else fits
            good = live | pending
            rows, at = open_rows[good], found[good]
            matched[at] = True
            end_size[rows] = final_size[at]
            end_requested[rows] = np.where(unasked[at], -1, final_requested[at])
            late = open_rows[pending & (self.row_free[open_rows] < 0)]
            self.row_free[late] = last
            gone = open_rows[~good]
            unknown_state = int((fits & (final_state[found] == 0)).sum()) if len(order) else 0
            lost = len(gone) - unknown_state + len(late)
            self.row_free[gone] = np.where(self.row_free[gone] < 0, last, self.row_free[gone])
            self.row_done[gone] = last
        if lost > 0:
            self._warn(
                f"inconsistent: {format_count(lost)} allocations{self._place()} are not among the final blocks and their frees are missing; they are ended at the last event."
            )
        extra = np.flatnonzero(~matched & (final_state > 0))
        self.unrecorded = extra
        # A pending block without events was given up before the first one.
        freed = np.where(final_state[extra] == 2, 0, -1).astype(np.int32)
        self.start_pending = len(self.row_alloc) + np.flatnonzero(final_state[extra] == 2)
        self.row_first = np.concatenate([self.row_first, np.full(len(extra), -1, np.int32)])
        self.row_alloc = np.concatenate([self.row_alloc, np.full(len(extra), -1, np.int32)])
        self.row_free = np.concatenate([self.row_free, freed if n else np.full(len(extra), -1, np.int32)])
        self.row_done = np.concatenate([self.row_done, np.full(len(extra), -1, np.int32)])
        self.end_size = np.concatenate([end_size, final_size[extra]])
        self.end_requested = np.concatenate([end_requested, np.where(unasked[extra], -1, final_requested[extra])])
        self.extra_addr = final_addr[extra]
        self._recall_the_start()
        self.final, self.extra_rows = final, extra
        self._truncation()

    def _recall_the_start(self) -> None:
        """Take the sizes of what was released within the trace from a picture made before it."""
        picture = self.opening.sort("addr")
        rows = np.flatnonzero((self.row_alloc < 0) & (self.row_first >= 0) & (self.end_size < 0))
        if picture.is_empty() or not len(rows):
            return
        known, wanted = int64(picture["addr"]), self.addr[self.row_first[rows]]
        place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        hit = known[place] == wanted
        self.end_size[rows[hit]] = int64(picture["size_bytes"])[place[hit]]

    def _truncation(self) -> None:
        if self.meta.get("source") != "torch_snapshot" or not len(self.act) or not (self.act == _follow.ALLOC).any():
            return
        earlier = int(((self.row_alloc < 0) & (self.row_first >= 0)).sum())
        # a live block whose stack was recorded, yet without its alloc event: the recorder was on, so the event is lost
        lost = int(self.final["stack_id"].is_not_null().gather(self.extra_rows).sum()) if len(self.extra_rows) else 0
        if any(w.startswith("history truncated") for w in self.meta.get("warnings") or []):
            return
        if lost or self.sudden or earlier:
            first = f"{format_count(earlier)} frees in it have no alloc before them" if earlier else ""
            second = f"{format_count(lost)} live blocks have a stack but no alloc event" if lost else ""
            self._warn(
                f"history truncated{self._place()}: {' and '.join(t for t in (first, second) if t) or 'it begins in the middle of a free'}. The ring overflowed (it kept the last "
                f"{format_count(len(self.act))} events) or recording began late. What is live comes from the blocks, not from the trace. Record with a larger max_entries."
            )

    # ------------------------------------------------------------------ layout
    def _follow(self, rounded: Array) -> None:
        start = Layout(self)
        n, rows = len(self.act), len(self.row_alloc)
        grow = int((self.act == _follow.ALLOC).sum()) * 2 + 4 * int(((self.act >= _follow.SEGMENT_ALLOC) & (self.act <= _follow.UNMAP)).sum()) + 8
        wide = start.blocks(grow)
        runs = start.runs(int((self.act >= _follow.SEGMENT_ALLOC).sum()) + 8)
        row_block = np.full(rows, -1, np.int32)
        row_block[start.row_of_block[0]] = start.row_of_block[1]
        unsure = start.unsure(rounded)
        count, state = np.zeros(2, np.int64), np.asarray([start.used, len(start.addr), len(start.addr)], np.int64)
        settings = self.meta.get("settings") or {}
        widest = settings.get("max_split_size")
        limits = np.asarray([widest if isinstance(widest, int) and widest > 0 else 1 << 60, rounding.SMALL_SIZE], np.int64)
        start_at = np.full(len(self.universe), -1, np.int32)
        begun = np.flatnonzero(wide["where"][: start.used] >= 0)
        start_at[wide["where"][begun]] = begun
        made = self.row_alloc >= 0
        self.row_size = np.where(made, rounded, np.where(self.end_size >= 0, self.end_size, rounded))
        self.row_exact = np.where(made | (self.end_size >= 0), 1, 0).astype(np.int8)
        tight = unsure[3]
        self.row_exact[tight] = 1
        if n:
            moves = int(((self.act == _follow.MAP) | (self.act == _follow.UNMAP)).sum())
            _jit.run(
                _follow.follow, 8 * n + moves * moves // 4, self.act, self.addr, self.size, self.stream, self.where, self.ev_row, self.universe, rounded, self._whole(rounded), self.row_size, self.row_exact, row_block,
                wide["addr"], wide["size"], wide["prev"], wide["next"], wide["state"], wide["run"], wide["where"], start_at, *runs, *unsure[:3], state, limits, count,
            )  # fmt: skip
        misplaced, small = (int(c) for c in count)
        if misplaced + small:
            self._warn(
                f"inconsistent: {format_count(misplaced + small)} of {format_count(int((self.act == _follow.ALLOC).sum()))} allocations{self._place()} do not fit the layout that the trace gives; "
                "their sizes are the rounded requests."
            )

    def _whole(self, rounded: Array) -> Array:
        """Which allocations are of a private pool that splits no block (``MemPool(no_split=True)``, which no file tells).

        A final block that has an alloc, and a rest that would have been split off anywhere else, shows its pool to be one. An allocation is taken
        to be of the pool that its event names, else of the one whose final segment it lies in.
        """
        whole = np.zeros(max(len(rounded), 1), np.int8)
        private = self.segments.filter(pl.col("pool_id").is_not_null() & (pl.col("pool_id").cast(pl.String) != "0_0"))
        if private.is_empty():
            return whole
        last = self.where[np.maximum(self.row_first, 0)] if len(self.act) else np.zeros(0, np.int64)
        at = np.where(self.row_first >= 0, self.universe[last], -1) if len(self.act) else np.full(len(rounded), -1)
        least = np.where(rounded <= rounding.SMALL_SIZE, rounding.MIN_BLOCK, rounding.SMALL_SIZE + 1)
        shows = (self.row_alloc >= 0) & (self.end_size >= 0) & (self.end_size - rounded >= least)
        widest = (self.meta.get("settings") or {}).get("max_split_size")
        if isinstance(widest, int) and widest > 0:  # an oversize block is not split either
            shows &= rounded < widest
        pools: dict[str, Array] = {}
        for addr, size, name in private.select(pl.col("addr").reinterpret(signed=True), "size_bytes", pl.col("pool_id").cast(pl.String)).iter_rows():
            inside = (at >= addr) & (at < addr + size)
            pools[name] = pools[name] | inside if name in pools else inside
        for inside in pools.values():
            if (inside & shows).any():
                whole[: len(rounded)] |= inside
        return whole

    # ------------------------------------------------------------------ out
    def _frame(self, requested: Array) -> pl.DataFrame:
        seq, time = self.events["seq"], self.events["time_us"]
        alloc, free, done = (absent(i) for i in (self.row_alloc, self.row_free, self.row_done))
        begin = self.row_first
        extra = len(self.extra_rows)
        seen = absent(begin)

        def column(name: str, index: pl.Series) -> pl.Series:
            return self.events[name].gather(index) if self.events.height else pl.Series(name, [None] * len(index), dtype=self.events.schema[name])

        def told(name: str) -> pl.Series:
            """From the event that first tells of it, else from the final block."""
            from_events = column(name, seen)
            return from_events if not extra else pl.concat([from_events.head(len(begin) - extra), self.final[name].gather(self.extra_rows)])

        first = int(seq[0]) if len(seq) else 0
        free_seq = seq.gather(free) if len(seq) else pl.Series([None] * len(free), dtype=pl.Int64)
        if len(self.start_pending):
            free_seq = free_seq.scatter(self.start_pending, first)
        made = {
            "rank": self.key[0], "device": self.key[1], "kind": self.key[2], "source": told("source"),
            "alloc_seq": column("seq", alloc), "free_seq": free_seq, "done_seq": column("seq", done),
            "time_us": time.gather(alloc) if len(time) else None, "end_us": time.gather(free) if len(time) else None,
            "addr": told("addr"), "requested_bytes": pl.Series(requested), "size_bytes": pl.Series(self.row_size), "stream": told("stream"), "pool_id": told("pool_id"),
            "stack_id": self._alloc_stack(alloc), "free_stack_id": column("stack_id", free),
            "category": "unknown", "evidence": "none", "at_start": pl.Series(self.row_alloc < 0), "size_exact": pl.Series(self.row_exact > 0),
        }  # fmt: skip
        return schema.fill("allocations", made, len(begin))

    def _alloc_stack(self, alloc: pl.Series) -> pl.Series:
        stack = self.events["stack_id"].gather(alloc) if self.events.height else pl.Series([None] * len(alloc), dtype=pl.UInt32)
        extra = len(self.extra_rows)
        return stack if not extra else pl.concat([stack.head(len(alloc) - extra), self.final["stack_id"].gather(self.extra_rows)])

    def _warn(self, text: str) -> None:
        self.warnings.append(text)

    def _place(self) -> str:
        rank, device, kind = self.key
        place = f" on device {device}" if device is not None else f" in {kind} memory"
        return place + (f" of rank {rank}" if rank is not None else "")
