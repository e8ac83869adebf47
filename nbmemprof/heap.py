"""The heap through time: allocations paired from the trace, block sizes recovered, any moment rebuilt.

A trace tells the bytes asked for, a final picture of the heap the bytes given. :func:`build` joins the two:
it walks the segments back from the end to the beginning, follows the trace forwards from there
(:mod:`nbmemprof._follow`), and so knows the size that every block had. With one row a use of an address,
the heap after any event is a filter of ``allocations`` (about 2 ms a million events), not a walk.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import _follow, _jit, schema
from nbmemprof.allocator import rounding
from nbmemprof.capture import Capture
from nbmemprof.units import format_count

__all__ = ["Curve", "allocations", "blocks_at", "build", "curves", "matches", "segments_at"]

Array = npt.NDArray[Any]
KEY = ["rank", "device", "kind"]
_CODES = {
    "alloc": _follow.ALLOC, "free_requested": _follow.FREE, "free_completed": _follow.DONE,
    "segment_alloc": _follow.SEGMENT_ALLOC, "segment_free": _follow.SEGMENT_FREE, "segment_map": _follow.MAP, "segment_unmap": _follow.UNMAP,
}  # fmt: skip
_RUN_STATE = {"active_allocated": 1, "active_pending_free": 2}


def build(tables: Mapping[str, pl.DataFrame], **meta: Any) -> Capture:
    """Complete the tables of a source: sizes of events, ``allocations``, and warnings about what doesn't fit.

    Parameters
    ----------
    tables
        ``events`` with ``requested_bytes`` as the source tells them (of segment events: the segment's bytes),
        final ``segments`` and ``blocks`` (those of the highest ``snapshot_id``), ``stacks`` and others.
    meta
        As for :meth:`Capture.build`; ``settings`` may hold the allocator's settings, ``start_snapshot_id`` names
        a picture of the heap before the first event, which makes every size exact. For ``source``
        ``torch_snapshot`` the beginning of the trace is searched for signs of a ring that overflowed.
    """
    events = tables.get("events", schema.empty("events"))
    start = meta.get("start_snapshot_id")
    opening = tables["blocks"].filter(pl.col("snapshot_id") == start, pl.col("state") != "inactive") if start is not None and "blocks" in tables else schema.empty("blocks")
    blocks = last_picture(tables.get("blocks", schema.empty("blocks")))
    segments = last_picture(tables.get("segments", schema.empty("segments")))
    warnings = list(meta.pop("warnings", None) or [])
    codes = action_codes(events["action"])
    sizes = np.full(events.height, -1, np.int64)
    parts = []
    for key in _groups(events, blocks, segments):
        rows = _rows_of(events, key)
        group = _Group(key, events, rows, codes, _of(blocks, key), _of(segments, key), meta)
        group.opening = _of(opening, key)
        parts.append(group.allocations(sizes))
        warnings += group.warnings
    made = pl.concat(parts) if parts else schema.empty("allocations")
    complete = dict(tables) | {"events": _sized(events, codes, sizes), "allocations": _attributed(made, tables.get("hints"))}
    return Capture.build(complete, warnings=warnings, **meta)


def allocations(capture: Capture) -> pl.DataFrame:
    """One row a use of an address, derived from events and the final picture; what ``capture.allocations`` calls once."""
    tables = {name: frame for name, frame in capture.tables.items() if name != "allocations"} if capture.tables.is_ready("allocations") else _others(capture)
    return build(tables, **capture.meta).tables["allocations"]


def _others(capture: Capture) -> dict[str, pl.DataFrame]:
    return {name: capture.tables[name] for name in capture.tables if name != "allocations"}


def last_picture(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of the highest ``snapshot_id``."""
    return frame if frame.is_empty() or frame["snapshot_id"].n_unique() == 1 else frame.filter(pl.col("snapshot_id") == pl.col("snapshot_id").max())


def action_codes(action: pl.Series) -> npt.NDArray[np.int8]:
    """Actions as the small numbers of :mod:`nbmemprof._follow`."""
    physical = action.to_physical()
    known = pl.DataFrame({"word": action.unique().drop_nulls()}).with_columns(pl.col("word").to_physical().alias("number"))
    table = np.full(int(known["number"].max() or 0) + 2, _follow.OTHER, np.int8)  # type: ignore[arg-type]
    for word, number in known.iter_rows():
        table[number] = _CODES.get(word, _follow.OTHER)
    codes: npt.NDArray[np.int8] = table[physical.fill_null(len(table) - 1).to_numpy()]
    return codes


def _groups(*frames: pl.DataFrame) -> list[tuple[Any, ...]]:
    keys = pl.concat([f.select(KEY).unique() for f in frames]).unique().sort(KEY, nulls_last=False)
    return keys.rows()


def matches(key: tuple[Any, ...]) -> pl.Expr:
    """Rows of one (rank, device, kind)."""
    return pl.all_horizontal(pl.col(name).eq_missing(pl.lit(value, schema.dtypes("events")[name])) for name, value in zip(KEY, key, strict=True))


def _of(frame: pl.DataFrame, key: tuple[Any, ...]) -> pl.DataFrame:
    return frame.filter(matches(key))


def _rows_of(events: pl.DataFrame, key: tuple[Any, ...]) -> Array | None:
    """Positions of the group's events; None for all of them."""
    if all(events[name].n_unique() <= 1 for name in KEY):
        here = events.height > 0 and events.select(KEY).row(0) == key
        return None if here else np.zeros(0, np.int64)
    return events.select(pl.arg_where(matches(key))).to_series().to_numpy().astype(np.int64)


def _sized(events: pl.DataFrame, codes: Array, sizes: Array) -> pl.DataFrame:
    segment = pl.Series(codes >= _follow.SEGMENT_ALLOC) & pl.Series(codes != _follow.OTHER)
    known = pl.Series("size_bytes", sizes)
    size = pl.when(segment).then(pl.coalesce("requested_bytes", "size_bytes")).when(known >= 0).then(known).otherwise(pl.col("size_bytes"))
    return events.with_columns(size.alias("size_bytes"), pl.when(~segment).then(pl.col("requested_bytes")))


def _attributed(made: pl.DataFrame, hints: pl.DataFrame | None) -> pl.DataFrame:
    """Write what the source saw at each allocation; with the evidence gone the category is ``unknown``."""
    if hints is None or hints.is_empty():
        return made
    words = ["category", "evidence", "layer", "phase", "step", "op"]
    seen = hints.filter(pl.col("alloc_seq").is_not_null()).unique("alloc_seq", keep="last")
    joined = made.drop(words).join(seen, on="alloc_seq", how="left", maintain_order="left")
    return joined.with_columns(pl.col("category").fill_null("unknown"), pl.col("evidence").fill_null("none")).select(*schema.TABLES["allocations"])


def _int64(series: pl.Series) -> Array:
    filled = series.fill_null(0)
    return filled.to_numpy().view(np.int64) if filled.dtype == pl.UInt64 else filled.to_numpy().astype(np.int64, copy=False)


def _absent(index: Array) -> pl.Series:
    """Positions as a Polars index; negative ones become null."""
    series = pl.Series(index)
    return series.set(series < 0, None) if len(series) else series.cast(pl.Int64)


class _Group:
    """The trace and the final picture of one device (or of host memory) of one rank."""

    def __init__(
        self, key: tuple[Any, ...], events: pl.DataFrame, rows: Array | None, codes: Array, blocks: pl.DataFrame, segments: pl.DataFrame, meta: Mapping[str, Any]
    ) -> None:
        self.key, self.rows, self.meta = key, rows, meta
        self.events = events if rows is None else events[rows]
        self.act = codes if rows is None else codes[rows]
        self.blocks, self.segments = blocks, segments
        self.addr = _int64(self.events["addr"])
        self.size = _int64(self.events["requested_bytes"])
        self.stream = _int64(self.events["stream"])
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
            self._warn(f"inconsistent: {format_count(odd)} of {format_count(int(known.sum()))} live blocks{self._place()} have another size than the trace gives them; the blocks' own sizes are used.")
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
            pl.col("size_bytes").sum().alias("tiled"), pl.col("size_bytes").filter(state == "active_allocated").sum().alias("live"), (state == "unknown").any().alias("odd")
        )
        both = self.segments.join(sums, left_on="addr", right_on="segment_addr", how="left").with_columns(pl.col("tiled", "live").fill_null(0))
        untiled = both.filter(pl.col("tiled") != pl.col("size_bytes")).height
        if untiled:
            self._warn(f"inconsistent: in {format_count(untiled)} of {format_count(both.height)} segments{self._place()} the blocks do not add up to the segment's size; reserved is the segments' sum, live the blocks'.")
        wrong = both.filter((pl.col("live") != pl.col("allocated_bytes")) & ~pl.col("odd").fill_null(value=False)).height
        if wrong:
            self._warn(f"inconsistent: {format_count(wrong)} of {format_count(both.height)} segments{self._place()} tell another allocated size than their live blocks have; the blocks are believed.")

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
        final_addr, final_size, final_requested = (_int64(final[c]) for c in ("addr", "size_bytes", "requested_bytes"))
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
            self._warn(f"inconsistent: {format_count(lost)} allocations{self._place()} are not among the final blocks and their frees are missing; they are ended at the last event.")
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
        known, wanted = _int64(picture["addr"]), self.addr[self.row_first[rows]]
        place = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
        hit = known[place] == wanted
        self.end_size[rows[hit]] = _int64(picture["size_bytes"])[place[hit]]

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
        start = _Start(self)
        n, rows = len(self.act), len(self.row_alloc)
        grow = int((self.act == _follow.ALLOC).sum()) * 2 + 4 * int(((self.act >= _follow.SEGMENT_ALLOC) & (self.act <= _follow.UNMAP)).sum()) + 8
        wide = start.blocks(grow)
        runs = start.runs(int((self.act >= _follow.SEGMENT_ALLOC).sum()) + 8)
        row_block = np.full(rows, -1, np.int32)
        row_block[start.row_of_block[0]] = start.row_of_block[1]
        unsure = start.unsure(rounded)
        count, state = np.zeros(2, np.int64), np.asarray([start.used, len(start.addr)], np.int64)
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
            _jit.run(
                _follow.follow, 8 * n, self.act, self.addr, self.size, self.stream, self.where, self.ev_row, self.universe, rounded, self.row_size, self.row_exact, row_block,
                wide["addr"], wide["size"], wide["prev"], wide["next"], wide["state"], wide["run"], wide["where"], start_at, *runs, *unsure[:3], state, limits, count,
            )  # fmt: skip
        misplaced, small = (int(c) for c in count)
        if misplaced + small:
            self._warn(
                f"inconsistent: {format_count(misplaced + small)} of {format_count(int((self.act == _follow.ALLOC).sum()))} allocations{self._place()} do not fit the layout that the trace gives; "
                "their sizes are the rounded requests."
            )

    # ------------------------------------------------------------------ out
    def _frame(self, requested: Array) -> pl.DataFrame:
        seq, time = self.events["seq"], self.events["time_us"]
        alloc, free, done = (_absent(i) for i in (self.row_alloc, self.row_free, self.row_done))
        begin = self.row_first
        extra = len(self.extra_rows)
        seen = _absent(begin)

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


class _Start:
    """The layout of a group's heap before its first event, as flat arrays for the kernel."""

    def __init__(self, group: _Group) -> None:
        self.group = group
        segments = _walk_back(group.segments, group.act, group.addr, group.size, group.stream)
        segments.sort()
        self.segments = segments
        self.addr = [s[0] for s in segments]
        rows = np.flatnonzero(group.row_alloc < 0)
        first = group.row_first[rows]
        addresses = np.zeros(len(rows), np.int64)
        paired = first >= 0
        addresses[paired] = group.addr[first[paired]]
        addresses[~paired] = group.extra_addr
        order = np.argsort(addresses, kind="stable")
        self._lay(rows[order].tolist(), addresses[order].tolist(), group.end_size[rows[order]].tolist(), group)

    def _lay(self, rows: list[int], addresses: list[int], sizes: list[int], group: _Group) -> None:
        """Tile every run: border, blocks and free gaps in the order of addresses, border."""
        self.out: list[tuple[int, int, int, int]] = []  # addr, size, state, run
        self.heads, self.tails = [], []
        self.row_of_block: tuple[list[int], list[int]] = ([], [])
        self.unsure_rows: list[tuple[int, int, int, int]] = []  # addr, block, row, room
        i = 0
        for run, (addr, size, *_rest) in enumerate(self.segments):
            end, at = addr + size, addr
            self.heads.append(len(self.out))
            self.out.append((addr, 0, 3, run))
            while i < len(rows) and addresses[i] < addr:
                i += 1
            while i < len(rows) and addresses[i] < end:
                here, row, length = addresses[i], rows[i], sizes[i]
                i += 1
                if here < at:  # overlaps the one before
                    continue
                room = (addresses[i] if i < len(rows) and addresses[i] < end else end) - here
                if here > at:
                    self.out.append((at, here - at, 0, run))
                block = len(self.out)
                if length < 0 or length > room:
                    self.unsure_rows.append((here, block, row, room))
                    length = room
                pending = group.row_free[row] == 0
                self.out.append((here, length, 2 if pending else 1, run))
                self.row_of_block[0].append(row)
                self.row_of_block[1].append(block)
                at = here + length
            if at < end:
                self.out.append((at, end - at, 0, run))
            self.tails.append(len(self.out))
            self.out.append((end, 0, 3, run))
        self.used = len(self.out)

    def blocks(self, grow: int) -> dict[str, Array]:
        table = np.asarray(self.out, np.int64).reshape(-1, 4)
        n = len(table) + grow
        made = {name: np.empty(n, kind) for name, kind in {"addr": np.int64, "size": np.int64, "prev": np.int32, "next": np.int32, "state": np.int8, "run": np.int32, "where": np.int32}.items()}
        used = np.arange(self.used)
        for position, name in enumerate(("addr", "size", "state", "run")):
            made[name][: self.used] = table[:, position]
        made["prev"][: self.used], made["next"][: self.used] = used - 1, used + 1
        made["prev"][self.heads], made["next"][self.tails] = self.heads, self.tails
        universe = self.group.universe
        place = np.searchsorted(universe, table[:, 0]) if len(universe) else np.zeros(len(table), np.int64)
        hit = (place < len(universe)) & (table[:, 2] != 3)
        hit[hit] = universe[place[hit]] == table[hit, 0]
        made["where"][: self.used] = np.where(hit, place, -1)
        return made

    def runs(self, grow: int) -> list[Array]:
        n = len(self.segments)
        columns = [[s[0] for s in self.segments], [s[0] + s[1] for s in self.segments], self.heads, self.tails, [1] * n, [int(s[2]) for s in self.segments], [s[3] for s in self.segments]]
        made = []
        for values in columns:
            array = np.zeros(n + grow, np.int64)
            array[:n] = values
            made.append(array)
        return made

    def unsure(self, rounded: Array) -> tuple[Array, Array, Array, Array]:
        """Blocks of unknown size; one whose room is its rounded request has that size for certain."""
        tight = [row for _, _, row, room in self.unsure_rows if room == rounded[row]]
        loose = [u for u in self.unsure_rows if u[3] != rounded[u[2]]]
        columns = np.asarray([u[:3] for u in loose], np.int64).reshape(-1, 3)
        return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy(), np.asarray(tight, np.int64)


def _signed(addr: int) -> int:
    """An address as the int64 of the same bits, which is what arrays of addresses hold here."""
    return addr - (1 << 64) if addr >= 1 << 63 else addr


def _walk_back(segments: pl.DataFrame, act: Array, addr: Array, size: Array, stream: Array) -> list[tuple[int, int, bool, int]]:
    """Segments before the first of these events: (addr, size, expandable, stream). Undoes the events from last to first."""
    here: dict[int, tuple[int, bool, int]] = {}
    for a, s, expandable, line in segments.select("addr", "size_bytes", "is_expandable", "stream").iter_rows():
        if s:
            here[_signed(int(a))] = (int(s), bool(expandable), int(line or 0))
    for i in np.flatnonzero((act >= _follow.SEGMENT_ALLOC) & (act <= _follow.UNMAP))[::-1].tolist():
        a, s, line = int(addr[i]), int(size[i]), int(stream[i])
        match act[i]:
            case _follow.SEGMENT_ALLOC:
                here.pop(a, None)
            case _follow.SEGMENT_FREE:
                here[a] = (s, False, line)
            case _follow.MAP:
                for b, (t, expandable, owner) in list(here.items()):
                    if b <= a and a + s <= b + t:
                        del here[b]
                        if b < a:
                            here[b] = (a - b, expandable, owner)
                        if a + s < b + t:
                            here[a + s] = (b + t - a - s, expandable, owner)
                        break
            case _:
                below = next((b for b, (t, e, o) in here.items() if e and o == line and b + t == a), None)
                above = here.pop(a + s) if a + s in here and here[a + s][1:] == (True, line) else None
                begin = a if below is None else below
                length = s + (here[below][0] if below is not None else 0) + (above[0] if above else 0)
                here[begin] = (length, True, line)
    return [(a, s, e, o) for a, (s, e, o) in here.items()]


# ---------------------------------------------------------------------- any moment
def segments_at(capture: Capture, seq: int) -> pl.DataFrame:
    """Segments as they were after the event ``seq`` (schema ``segments``); walked back from the final ones."""
    final = last_picture(capture.tables["segments"])
    events = capture.tables["events"]
    codes = action_codes(events["action"])
    later = np.flatnonzero((codes >= _follow.SEGMENT_ALLOC) & (codes <= _follow.UNMAP) & (events["seq"].to_numpy() > seq))
    if not len(later):
        return final
    parts = []
    subset = events[later]
    known = final.select(*KEY, "addr", "source", "pool_id", "pool", "stack_id")
    for key in _groups(final, subset):
        mine, picture = _of(subset, key), _of(final, key)
        size = mine.with_columns(requested_bytes=pl.coalesce("requested_bytes", "size_bytes"))["requested_bytes"]
        made = _walk_back(picture, action_codes(mine["action"]), _int64(mine["addr"]), _int64(size), _int64(mine["stream"]))
        frame = schema.fill(
            "segments",
            {
                "rank": key[0], "device": key[1], "kind": key[2], "source": "torch", "snapshot_id": 0,
                "addr": pl.Series([m[0] % (1 << 64) for m in made], dtype=pl.UInt64), "size_bytes": pl.Series([m[1] for m in made], dtype=pl.Int64),
                "stream": pl.Series([m[3] for m in made], dtype=pl.Int64), "is_expandable": pl.Series([m[2] for m in made], dtype=pl.Boolean),
            },
            len(made),
        )  # fmt: skip
        # A segment that is gone at the end tells its pool by the requests that it served, or not at all.
        born = mine.filter(pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_map", "segment_free"])).select("addr", pool_then="pool_id", stack_then="stack_id").unique("addr", keep="first")
        mates = _of(known, key).drop(KEY)
        frame = frame.drop("pool_id", "pool", "stack_id").join(mates.drop("source"), on="addr", how="left").join(born, on="addr", how="left")
        small = pl.when(pl.col("size_bytes") <= rounding.SMALL_BUFFER).then(pl.lit("small")).otherwise(pl.lit("large")).cast(schema.dtypes("segments")["pool"])
        frame = frame.with_columns(pl.coalesce("pool_id", "pool_then").alias("pool_id"), pl.coalesce("pool", pl.when(~pl.col("is_expandable")).then(small)).alias("pool"), pl.coalesce("stack_id", "stack_then").alias("stack_id"))
        parts.append(frame.select(*schema.TABLES["segments"]))
    return pl.concat(parts)


def blocks_at(capture: Capture, seq: int) -> pl.DataFrame:
    """Blocks as they were after the event ``seq`` (schema ``blocks``): live, pending, and the free gaps between them."""
    before = (pl.col("alloc_seq") <= seq) | pl.col("alloc_seq").is_null()
    held = capture.tables["allocations"].filter(before & ((pl.col("done_seq") > seq) | pl.col("done_seq").is_null()))
    pending = (pl.col("free_seq") <= seq).fill_null(value=False)
    state = pl.when(pending).then(pl.lit("active_pending_free")).otherwise(pl.lit("active_allocated")).cast(schema.dtypes("blocks")["state"])
    held = held.with_columns(state.alias("state"))
    segments = segments_at(capture, seq)
    parts = [_tile(_of(held, key), _of(segments, key), key) for key in _groups(held, segments)]
    return pl.concat(parts) if parts else schema.empty("blocks")


def _tile(held: pl.DataFrame, segments: pl.DataFrame, key: tuple[Any, ...]) -> pl.DataFrame:
    held = held.sort("addr")
    columns = {name: held[name] for name in ("addr", "size_bytes", "requested_bytes", "state", "stream", "pool_id", "stack_id", "source")}
    used = schema.fill("blocks", {"rank": key[0], "device": key[1], "kind": key[2], "snapshot_id": 0} | columns, held.height)
    if segments.is_empty():
        return used
    segments = segments.sort("addr")
    starts, lengths = _int64(segments["addr"]), _int64(segments["size_bytes"])
    at, size = _int64(used["addr"]), _int64(used["size_bytes"])
    owner = np.searchsorted(starts, at, side="right") - 1
    inside = (owner >= 0) & (at < starts[np.maximum(owner, 0)] + lengths[np.maximum(owner, 0)])
    place = _absent(np.where(inside, owner, -1))
    used = used.with_columns(segments["addr"].gather(place).alias("segment_addr"), segments["pool"].gather(place).alias("pool"), pl.coalesce("pool_id", segments["pool_id"].gather(place)).alias("pool_id"))
    # gaps: from the end of a block (or the segment's beginning) to the next block (or the segment's end)
    begin = np.concatenate([starts, (at + size)[inside]])
    finish = np.concatenate([starts + lengths, at[inside]])
    mine = np.concatenate([np.arange(len(starts)), owner[inside]])
    begin, finish = begin[np.lexsort((begin, mine))], finish[np.lexsort((finish, mine))]
    mine = np.sort(mine)
    gap = np.flatnonzero(finish > begin)
    free = schema.fill(
        "blocks",
        {
            "rank": key[0], "device": key[1], "kind": key[2], "snapshot_id": 0, "state": "inactive", "source": "torch",
            "addr": pl.Series(begin[gap].view(np.uint64)), "size_bytes": pl.Series((finish - begin)[gap]), "segment_addr": segments["addr"].gather(mine[gap]),
            "stream": segments["stream"].gather(mine[gap]), "pool_id": segments["pool_id"].gather(mine[gap]), "pool": segments["pool"].gather(mine[gap]),
        },
        len(gap),
    )  # fmt: skip
    return pl.concat([used, free]).sort("addr")


# ---------------------------------------------------------------------- curves
@dataclass(frozen=True)
class Curve:
    """Bytes of one device after each of its events: live blocks, requested (pending counted), reserved; and before the first."""

    key: tuple[Any, ...]
    seq: Array
    time_us: Array
    live: Array
    requested: Array
    reserved: Array
    start: tuple[int, int, int]
    has_picture: bool

    @property
    def peak(self) -> int:
        """Position of the highest live bytes; -1 is before the first event."""
        if not len(self.live):
            return -1
        top = int(self.live.argmax())
        return top if self.live[top] > self.start[0] else -1


_CURVES: weakref.WeakKeyDictionary[Capture, list[Curve]] = weakref.WeakKeyDictionary()


def curves(capture: Capture) -> list[Curve]:
    """Bytes after each event, a curve a device; anchored at the final state. Kept with the capture."""
    if capture not in _CURVES:
        _CURVES[capture] = _make_curves(capture)
    return _CURVES[capture]


def _make_curves(capture: Capture) -> list[Curve]:
    events, rows = capture.tables["events"], capture.tables["allocations"]
    blocks, segments = last_picture(capture.tables["blocks"]), last_picture(capture.tables["segments"])
    codes = action_codes(events["action"])
    made = []
    for key in _groups(events, blocks, segments):
        index = _rows_of(events, key)
        mine = events if index is None else events[index]
        act = codes if index is None else codes[index]
        seq = mine["seq"].to_numpy()
        own = rows if _groups(rows) == [key] else _of(rows, key)
        size, requested = _int64(own["size_bytes"]), _int64(own["requested_bytes"])
        live, asked = np.zeros(len(seq), np.int64), np.zeros(len(seq), np.int64)
        start_live = start_asked = 0
        for column, sign in (("alloc_seq", 1), ("free_seq", -1), ("done_seq", -1)):
            known = own[column].is_not_null().to_numpy()
            at = _position(seq, own[column].drop_nulls().to_numpy())
            inside = at < len(seq)
            if column != "done_seq":
                np.add.at(live, at[inside], sign * size[known][inside])
            if column != "free_seq":
                np.add.at(asked, at[inside], sign * requested[known][inside])
            if column == "alloc_seq":
                start_live, start_asked = int(size[~known].sum()), int(requested[~known].sum())
        step = np.where((act == _follow.SEGMENT_ALLOC) | (act == _follow.MAP), 1, np.where((act == _follow.SEGMENT_FREE) | (act == _follow.UNMAP), -1, 0)) * _int64(mine["size_bytes"])
        reserved = np.cumsum(step)
        picture = _of(segments, key)
        start_reserved = int(picture["size_bytes"].sum()) - (int(reserved[-1]) if len(reserved) else 0) if picture.height else max(0, -int(reserved.min(initial=0)))
        time = mine["time_us"].to_numpy()
        made.append(
            Curve(key, seq, time, np.cumsum(live) + start_live, np.cumsum(asked) + start_asked, reserved + start_reserved, (start_live, start_asked, start_reserved), picture.height > 0)
        )
    return made


def _position(seq: Array, wanted: Array) -> Array:
    """Where each wanted number stands in the ascending ``seq``; most captures number their events without gaps."""
    if len(seq) and seq[-1] - seq[0] == len(seq) - 1:
        shifted: Array = wanted - seq[0]
        return shifted
    return np.searchsorted(seq, wanted)


def place_of(key: tuple[Any, ...]) -> str:
    """A device in words."""
    return f"device {key[1]}" if key[1] is not None else f"{key[2]} memory"
