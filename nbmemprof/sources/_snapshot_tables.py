"""The tables of a snapshot, made column by column; what can't be used is left out, counted and named."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import schema
from nbmemprof.sources._pickle import Ints, ranges
from nbmemprof.sources._snapshot_rows import BAD, MAX_DEPTH, MAX_DEVICES, MISSING, OK, WIDE, File, Rows, first_of_each
from nbmemprof.units import format_bytes, format_count

__all__ = ["SnapshotTables"]

Array = npt.NDArray[Any]

_SIZE_LIMIT = 1 << 60
_MARKS_LIMIT = 100_000
_NOTES_LIMIT = 1000
_HEAP_ACTIONS = ("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
_STATES = {"active_allocated": 0, "active_pending_free": 1, "active_awaiting_free": 1, "inactive": 2}
_EVENT = ("action", "addr", "size", "stream", "time_us", "pool_id", "frames", "user_metadata", "device_free")
_SEGMENT = ("device", "address", "total_size", "allocated_size", "active_size", "stream", "segment_type", "segment_pool_id", "is_expandable", "frames", "blocks")
_BLOCK = ("address", "size", "requested_size", "state", "frames", "history")
_HISTORY = ("addr", "real_size", "frames")
_ANNOTATION = ("stage", "name", "device", "time_us")


class SnapshotTables:
    """Turns the rows of a snapshot into tables; collects warnings on the way."""

    def __init__(self, file: File, rank: int | None, warnings: list[str]) -> None:
        self.file, self.warnings = file, warnings
        self.same = {"rank": rank, "kind": "device", "source": "torch"}
        self.dropped: dict[str, int] = {}
        self.start: int | None = None
        self.rows_seen = 0
        self._keys: list[tuple[str, Ints]] = []
        self._moments: list[dict[str, Any]] = []

    def _malformed(self, what: str, strays: int, bad: int, total: int) -> None:
        self.rows_seen += total - bad
        if strays + bad:
            self.dropped[f"malformed {what}"] = strays + bad
            self.warnings.append(f"malformed: {format_count(strays + bad)} of {format_count(strays + total)} {what} have no usable address, size, device or action and were skipped")

    # ------------------------------------------------------------------ events
    def events(self) -> tuple[dict[str, pl.DataFrame], list[tuple[int, int, Array]]]:
        """The table of events; and (device, first seq, times) of each trace."""
        rows, device, devices, odd = self.file.traces(_EVENT)
        if odd:
            self.warnings.append(f"malformed: {format_count(odd)} of {format_count(devices)} device traces are not lists and were skipped")
        action, words = rows.words("action")
        free, free_status = rows.ints("device_free")
        addr, addr_status = rows.ints("addr")
        size, size_status = rows.ints("size")
        has_addr = ((addr_status == OK) & (addr >= 0)) | (addr_status == WIDE)
        has_size = (size_status == OK) & (size >= 0) & (size < _SIZE_LIMIT)
        of_heap = np.array([*(word in _HEAP_ACTIONS for word in words), False, False])[action]
        good = (~of_heap | (has_addr & has_size & _fits(addr, size))) & (action != -2)
        self._malformed("events", rows.strays, int((~good).sum()), rows.count)
        stream, stream_status = rows.ints("stream")
        time, time_status = rows.ints("time_us")
        pool, pools = rows.pairs("pool_id")
        note, notes = rows.words("user_metadata")
        keys = rows.stacks("frames")
        has_addr &= addr_status != MISSING
        columns = [device, action, addr, has_addr, size, has_size, stream, stream_status == OK, time, (time_status == OK) & (time > 0), pool, keys, note, free, free_status == OK]
        if not good.all():
            columns = [column[good] for column in columns]
        device, action, addr, has_addr, size, has_size, stream, has_stream, time, has_time, pool, keys, note, free, has_free = columns
        traces = _traces(device)
        firsts = [int(time[lo:hi][has_time[lo:hi]][0]) for _, lo, hi in traces if has_time[lo:hi].any()]
        self.start = min(firsts) if firsts else None
        moment = np.where(has_time, (time - (self.start or 0)).astype(np.float64), np.nan)
        self._actions(action, words)
        self._times(traces, moment)
        self._keys.append(("events", keys))
        self._note_moments(action, words, device, moment, size, has_size, free, has_free, note, notes)
        frame = schema.fill(
            "events",
            self.same
            | {
                "device": device, "seq": np.arange(len(device)), "time_us": pl.Series(moment).fill_nan(None), "action": _words(action, words), "addr": _known(addr.view(np.uint64), has_addr),
                "requested_bytes": _known(size, has_size), "stream": _known(stream, has_stream), "pool_id": _words(pool, pools),
            },
            len(device),
        )  # fmt: skip
        return {"events": frame}, [(d, lo, moment[lo:hi]) for d, lo, hi in traces]

    def _actions(self, action: Array, words: list[str]) -> None:
        counts = np.bincount(action + 1, minlength=len(words) + 1)
        used = [i for i, word in enumerate(words) if word not in schema.ACTIONS and counts[i + 1]]
        strange = [f"no action {format_count(int(counts[0]))}×"] if counts[0] else []
        strange += [f"{words[i][:40]!r} {format_count(int(counts[i + 1]))}×" for i in used[:9]]
        if strange:
            self.warnings.append(f"unknown actions are kept but not followed: {', '.join(strange)}{_more(len(used) - 9)}")

    def _times(self, traces: list[tuple[int, int, int]], moment: Array) -> None:
        back = 0
        for _, lo, hi in traces:
            times = moment[lo:hi]
            times = times[~np.isnan(times)]
            back += int((np.diff(times) < 0).sum())
        if back:
            self.warnings.append(f"time order: {format_count(back)} events are dated earlier than the event before them; the order of the file is kept")

    def _note_moments(
        self, action: Array, words: list[str], device: Array, moment: Array, size: Array, has_size: Array, free: Array, has_free: Array, note: Array, notes: list[str]
    ) -> None:
        def mark(at: int, kind: str, name: str | None, value: float | None) -> None:
            when = float(moment[at])
            self._moments.append({"device": int(device[at]), "time_us": None if np.isnan(when) else when, "seq": at, "kind": kind, "name": name, "value": value})

        code = {word: i for i, word in enumerate(words)}
        for at in np.flatnonzero(action == code.get("oom", -9))[:_MARKS_LIMIT].tolist():
            mark(at, "oom", "out of memory", float(free[at]) if has_free[at] and free[at] >= 0 else None)
        for at in np.flatnonzero(action == code.get("snapshot", -9))[:_MARKS_LIMIT].tolist():
            mark(at, "snapshot", "snapshot", float(size[at]) if has_size[at] else None)
        said = np.flatnonzero(np.isin(action, [code.get("user_defined", -9), code.get("annotate", -9)]) & (note >= 0))
        for at in said[:_NOTES_LIMIT].tolist():
            if notes[note[at]]:
                mark(at, "note", notes[note[at]], None)
        if len(said) > _NOTES_LIMIT:
            self.dropped["notes"] = len(said) - _NOTES_LIMIT

    # ------------------------------------------------------------------ segments and blocks
    def heap(self) -> dict[str, pl.DataFrame]:
        """The tables of segments and blocks."""
        rows = self.file.rows("segments", _SEGMENT)
        device, device_status = rows.ints("device")
        addr, addr_status = rows.ints("address")
        total, total_status = rows.ints("total_size")
        stream, stream_status = rows.ints("stream")
        allocated, allocated_status = rows.ints("allocated_size")
        active, active_status = rows.ints("active_size")
        kind, kinds = rows.words("segment_type")
        pool, pools = rows.pairs("segment_pool_id")
        expandable = rows.flags("is_expandable")
        children, parent = rows.children("blocks", _BLOCK)
        block = _Blocks(children, parent, addr)
        sums = np.bincount(parent, weights=np.where(block.good, block.size, 0), minlength=rows.count).astype(np.int64)
        total = np.where(total_status == MISSING, sums, total)
        good = ((addr_status == OK) & (addr >= 0)) | (addr_status == WIDE)
        good &= (device_status == MISSING) | ((device_status == OK) & (device >= 0) & (device < MAX_DEVICES))
        good &= (total_status == MISSING) | ((total_status == OK) & (total >= 0) & (total < _SIZE_LIMIT))
        good &= _fits(addr, total)
        self._malformed("segments", rows.strays, int((~good).sum()), rows.count)
        keep = block.good & good[parent]
        self._malformed("blocks", children.strays, int((~keep).sum()), children.count)
        self._states(block, keep)
        half = np.array([*({"small": 0, "large": 1}.get(word, -1) for word in kinds), -1, -1])[kind]
        halves = pl.Series(["small", "large"], dtype=pl.Enum(("small", "large")))
        names, has_stream = _words(pool, pools), stream_status == OK
        where = pl.Series(np.flatnonzero(good))
        frame = schema.fill(
            "segments",
            self.same
            | {
                "device": device[good], "snapshot_id": 0, "addr": addr.view(np.uint64)[good], "size_bytes": total[good],
                "allocated_bytes": _known(allocated, (allocated_status == OK) & (allocated >= 0))[where], "active_bytes": _known(active, (active_status == OK) & (active >= 0))[where],
                "stream": _known(stream, has_stream)[where], "pool_id": names[where], "pool": _pick(halves, half)[where],
                "is_expandable": _known(expandable > 0, expandable >= 0)[where],
            },
            int(good.sum()),
        )  # fmt: skip
        of = parent[keep]
        up = pl.Series(of)
        blocks = schema.fill(
            "blocks",
            self.same
            | {
                "device": device[of], "snapshot_id": 0, "segment_addr": addr.view(np.uint64)[of], "addr": block.addr.view(np.uint64)[keep], "size_bytes": block.size[keep],
                "requested_bytes": _known(block.requested, block.has_requested)[pl.Series(np.flatnonzero(keep))], "state": _pick(pl.Series(schema.STATES, dtype=pl.Enum(schema.STATES)), block.state[keep]),
                "stream": _known(stream, has_stream)[up], "pool_id": names[up], "pool": _pick(halves, half)[up],
            },
            len(of),
        )  # fmt: skip
        self._keys += [("segments", rows.stacks("frames")[good]), ("blocks", block.keys[keep])]
        return {"segments": frame, "blocks": blocks}

    def _states(self, block: _Blocks, keep: Array) -> None:
        strange = Counter(block.words[i] if i >= 0 else "no state" for i in block.word[keep & (block.state == 3)].tolist())
        if strange:
            lost = format_bytes(int(block.size[keep & (block.state == 3)].sum()))
            said = [f"{word[:40]!r} {format_count(count)}×" for word, count in strange.items()]
            self.warnings.append(f"unknown block states, {lost} together, counted apart: {', '.join(said[:10])}{_more(len(said) - 10)}")

    # ------------------------------------------------------------------ marks
    def marks(self, events: pl.DataFrame, traces: list[tuple[int, int, Array]]) -> dict[str, pl.DataFrame]:
        """OOMs, earlier snapshots, notes, and the named ranges of ``external_annotations``."""
        rows = self.file.rows("external_annotations", _ANNOTATION)
        stage, stages = rows.words("stage")
        name, names = rows.words("name")
        device, device_status = rows.ints("device")
        time, time_status = rows.ints("time_us")
        usable = (time_status == OK) & (time > 0) & (name >= 0) & (stage >= 0)
        if self.start is None and usable.any():
            self.start = int(time[usable][0])
        place = {d: (lo, np.maximum.accumulate(np.nan_to_num(times))) for d, lo, times in traces}
        opened: dict[tuple[int, int], list[int]] = {}
        found: list[dict[str, Any]] = []
        for at in np.flatnonzero(usable).tolist():
            key = (int(device[at]) if device_status[at] == OK else -1, int(name[at]))
            when = float(time[at] - (self.start or 0))
            if stages[stage[at]] == "START":
                if len(found) < _MARKS_LIMIT:
                    opened.setdefault(key, []).append(len(found))
                    lo, times = place.get(key[0], (0, np.zeros(0)))
                    before = int(np.searchsorted(times, when, side="right"))
                    found.append({"device": key[0] if key[0] >= 0 else None, "time_us": when, "end_us": None, "seq": lo + before - 1 if before else None, "kind": "range", "name": names[name[at]]})
            elif opened.get(key):
                found[opened[key].pop()]["end_us"] = when
        if (extra := int(usable.sum()) - 2 * len(found)) > 0 and len(found) >= _MARKS_LIMIT:
            self.dropped["annotations"] = extra
        every = found + self._moments
        columns: dict[str, object] = {key: [row.get(key) for row in every] for key in ("device", "time_us", "end_us", "seq", "kind", "name", "value")}
        typed = {key: pl.Series(key, values, dtype=schema.dtypes("marks")[key], strict=False) for key, values in columns.items()}  # type: ignore[arg-type]
        return {"marks": schema.fill("marks", typed | {"rank": self.same["rank"]}, len(every))}

    # ------------------------------------------------------------------ stacks
    def stacks(self, tables: dict[str, pl.DataFrame]) -> pl.DataFrame:
        """The table of stacks; writes ``stack_id`` to the tables that have stacks."""
        used = np.unique(np.concatenate([_distinct(keys) for _, keys in self._keys]))
        used = used[used >= 0]
        frames, where, first, lengths = self.file.frames(used)
        function, functions = frames.words("name")
        filename, filenames = frames.words("filename")
        line, line_status = frames.ints("line")
        code, alike = _alike(function.astype(np.int64), filename.astype(np.int64), np.where(line_status == OK, line, -1))
        where = np.where(where >= 0, alike[np.maximum(where, 0)] if len(alike) else -1, -1)
        at = ranges(first, lengths)
        owner = np.repeat(np.arange(len(used)), lengths)
        flat = where[at]
        owner, flat = owner[flat >= 0], flat[flat >= 0]
        lengths = np.bincount(owner, minlength=len(used))
        ids = _same_stacks(flat, owner, lengths)
        for name, keys in self._keys:
            stack = ids[np.searchsorted(used, np.maximum(keys, 0)).clip(max=max(len(used) - 1, 0))] if len(used) else np.full(len(keys), -1)
            tables[name] = tables[name].with_columns(_known(stack.astype(np.uint32), (keys >= 0) & (stack >= 0)).alias("stack_id"))
        self._keys.clear()
        example = np.flatnonzero(np.diff(np.maximum.accumulate(np.append(-1, ids))) > 0)  # the first stack of each id
        starts = (np.cumsum(lengths) - lengths)[example]
        flat = flat[ranges(starts, lengths[example])]
        each = code[flat]
        return schema.fill(
            "stacks",
            {
                "stack_id": np.repeat(ids[example], lengths[example]).astype(np.uint32), "depth": ranges(np.zeros(len(example)), lengths[example]).astype(np.uint16),
                "function": _texts(function[each], functions), "filename": _texts(filename[each], filenames), "line": _known(line[each], line_status[each] == OK),
            },
            len(flat),
        )  # fmt: skip

    # ------------------------------------------------------------------ what there is to say
    def judge(self, tables: dict[str, pl.DataFrame], stacks: pl.DataFrame) -> None:
        """Say what the file lacks."""
        events, segments = tables["events"], tables["segments"]
        say = self.warnings.append
        if not events.height and not segments.height:
            say("empty: the snapshot has no segments and no events. It was taken before anything was allocated on a CUDA device, or in another process")
        elif not events.height:
            say("no events: the snapshot has no allocation history, only the state at its end. Call torch.cuda.memory._record_memory_history() before the code of interest")
        else:
            silent = sorted(set(segments["device"].unique()) - set(events["device"].unique()))
            if silent:
                say(f"device without events: {', '.join(f'cuda:{d}' for d in silent[:8])} has segments but no history, so only its end is known. Memory history is recorded for devices in use when it is switched on")
        if not stacks.height and (events.height or segments.height):
            say("no frames: nothing in the snapshot has a call stack, so bytes can't be given to lines of code. Record with context='all' and stacks='python'")
        if self.file.depth < MAX_DEPTH:
            say(f"malformed: there are too many different stacks to keep whole; the innermost {self.file.depth} frames of each are shown")
        overflowed, most = (self._setting(key) for key in ("trace_alloc_overflowed", "trace_alloc_max_entries"))
        if overflowed is True or (isinstance(overflowed, list) and any(flag is True for flag in overflowed)):
            limit = f"max_entries {most}" if isinstance(most, int) else "max_entries"
            say(f"history truncated: the recorder says that its ring overflowed ({limit}), so the oldest events are lost. Record with a larger max_entries")

    def _setting(self, key: str) -> Any:
        value = self.file.top(key)
        settings = self.file.top("allocator_settings") if value is None else None
        return settings.get(key) if isinstance(settings, Mapping) else value


class _Blocks:
    """Columns of all blocks; addresses and requests of old files are filled in from sizes and ``history``."""

    def __init__(self, rows: Rows, parent: Ints, segment_addr: Ints) -> None:
        self.size, size_status = rows.ints("size")
        addr, addr_status = rows.ints("address")
        requested, requested_status = rows.ints("requested_size")
        self.word, self.words = rows.words("state")
        keys = rows.stacks("frames")
        past, block = rows.children("history", _HISTORY)
        latest = first_of_each(block)
        real, real_status = past.ints("real_size")
        past_keys = past.stacks("frames")
        self.good = (size_status == OK) & (self.size >= 0) & (self.size < _SIZE_LIMIT) & (addr_status != BAD) & ~((addr_status == OK) & (addr < 0))
        size = np.where(self.good, self.size, 0)
        begin = np.cumsum(size) - size
        first = first_of_each(parent)
        offset = begin - np.repeat(begin[first], np.diff(np.append(first, len(parent))))
        self.addr = np.where(addr_status == MISSING, segment_addr[parent] + offset, addr)
        self.good &= _fits(self.addr, size)
        self.state = np.array([*(_STATES.get(word, 3) for word in self.words), 3, 3], np.int8)[self.word]
        lacking = latest[(requested_status[block[latest]] == MISSING) & (real_status[latest] == OK)]
        requested[block[lacking]] = real[lacking]
        requested_status[block[lacking]] = OK
        self.requested = requested
        self.has_requested = (requested_status == OK) & (requested >= 0) & (requested < _SIZE_LIMIT) & (self.state != 2)  # that of an inactive block is stale
        lacking = latest[keys[block[latest]] < 0]
        keys[block[lacking]] = past_keys[lacking]
        self.keys = np.where(self.state == 2, -1, keys)


# ---------------------------------------------------------------------- small things
def _traces(device: Ints) -> list[tuple[int, int, int]]:
    """(device, first row, end) of each trace."""
    first = first_of_each(device).tolist()
    return [(int(device[lo]), lo, hi) for lo, hi in zip(first, [*first[1:], len(device)], strict=False)]


def _fits(addr: Ints, size: Ints) -> Array:
    """Whether a range ends before the numbers do (addresses from 2**63 on are negative here)."""
    fits: Array = addr <= np.iinfo(np.int64).max - np.maximum(size, 0)
    return fits


def _known(values: Array, known: Array) -> pl.Series:
    """A column that is null where it is not known."""
    series = pl.Series(values)
    return series if known.all() else pl.select(pl.when(pl.Series(known)).then(series)).to_series()


def _pick(values: pl.Series, index: Array) -> pl.Series:
    """``values[index]``, null where the index is negative."""
    return values.gather(_known(index.astype(np.uint32), index >= 0)) if len(values) else values.extend_constant(None, len(index))


def _words(index: Array, words: list[str]) -> pl.Series:
    return _pick(pl.Series(words, dtype=pl.String).cast(pl.Categorical), index)


def _texts(index: Array, words: list[str]) -> pl.Series:
    return _pick(pl.Series(words, dtype=pl.String), index).fill_null("")


def _more(count: int) -> str:
    return f" and {format_count(count)} more" if count > 0 else ""


def _distinct(keys: Ints) -> Ints:
    """Distinct values of a column of keys from -1 on."""
    if not len(keys):
        return keys
    seen = np.zeros(int(keys.max()) + 2, bool)
    seen[keys] = True  # -1 is the last cell
    seen[-1] = False
    return np.flatnonzero(seen)


def _alike(function: Ints, filename: Ints, line: Ints) -> tuple[Ints, Ints]:
    """An example of each different frame, and for each frame which it is like."""
    both = (function + 2) * (int(filename.max(initial=0)) + 3) + filename + 2
    _, both = np.unique(both, return_inverse=True)
    lines, which = np.unique(line, return_inverse=True)
    _, example, alike = np.unique(both.astype(np.int64) * max(len(lines), 1) + which, return_index=True, return_inverse=True)
    return example, alike


def _same_stacks(flat: Ints, owner: Ints, lengths: Ints) -> Ints:
    """A number for each stack, the same for equal ones, in the order of first appearance; -1 for empty ones."""
    if not len(lengths):
        return lengths
    random = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    at = np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    weight = random.integers(1, 1 << 63, int(lengths.max()) + 1, dtype=np.uint64) | np.uint64(1)
    value = random.integers(1, 1 << 63, int(flat.max(initial=0)) + 1, dtype=np.uint64)
    mixed = value[flat] * weight[at]
    mixed ^= mixed >> np.uint64(29)
    total = np.append(np.uint64(0), np.cumsum(mixed * np.uint64(0x9E3779B97F4A7C15)))
    end = np.cumsum(lengths)
    hashes = (total[end] - total[end - lengths]) ^ lengths.astype(np.uint64)
    _, first, group = np.unique(np.where(lengths > 0, hashes, np.uint64(0)), return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(first))  # by first appearance
    has = np.bincount(group, weights=lengths, minlength=len(first)) > 0
    number = np.cumsum(has[np.argsort(first)]) - 1
    ids = np.where(has, number[order], -1)
    return ids[group]
