"""Troubles that the allocator's rules prove from what a capture holds: a function each, from what was seen to findings."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from nbmemprof import heap
from nbmemprof.allocator import rounding
from nbmemprof.allocator.conf import ConfError, Settings, parse
from nbmemprof.analyses._lists import free_lists, is_private, nominal_bytes
from nbmemprof.analyses._pinning import NOWHERE, pinning
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.analyses._trials import inferred_limits, inferred_retries, recorded_settings
from nbmemprof.analyses.oom import explained
from nbmemprof.analyses.stalls import ALLOC, CALLS, DONE, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP, codes_of, stalls
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_time_us

__all__ = ["DETECTORS", "Finding", "Seen"]

_SMALL = 16  # a survivor uses less than a sixteenth of what it holds
_MIN_PINNED = 1 << 20
_ROOMY = 0.5  # of the limit or card
_SLOW = 0.02  # share of the time that device calls take
_REFUSALS = 4  # that are looked into
_MIB = 1 << 20
_CONF = "PYTORCH_CUDA_ALLOC_CONF"


@dataclass(frozen=True)
class Finding:
    """One trouble: what, how it is known, what it costs, what to do."""

    rule: str
    finding: str
    evidence: str
    action: str
    saving_bytes: int | None = None
    rank: int | None = None
    device: int | None = None
    origin: str | None = None


@dataclass(eq=False)
class Seen:
    """What the detectors share, looked up once."""

    capture: Capture
    replayed: bool = False  # whether what a replay infers may be asked

    @functools.cached_property
    def settings(self) -> Settings:
        """Settings in force at the end, as far as they are told."""
        return recorded_settings(self.capture)

    @functools.cached_property
    def text(self) -> str:
        """The configuration as the user wrote it."""
        return str(self.capture.meta.get("conf") or self.settings.text or "")

    @functools.cached_property
    def segments(self) -> pl.DataFrame:
        """Segments at the end."""
        return heap.last_picture(self.capture.tables["segments"])

    @functools.cached_property
    def blocks(self) -> pl.DataFrame:
        """Blocks at the end."""
        return heap.last_picture(self.capture.tables["blocks"])

    @functools.cached_property
    def lists(self) -> pl.DataFrame:
        """Free lists at the end."""
        return free_lists(self.segments, self.blocks, self.settings.text)

    @functools.cached_property
    def is_cuda(self) -> bool:
        """Whether there is memory of torch's CUDA allocator at all."""
        return any(curve.key[2] == "device" for curve in heap.curves(self.capture))

    def roomy(self, device: int | None) -> bool:
        """Whether torch held so little of its limit and of the card, where they are told, that no request can have been refused."""
        capacity = self.capture.meta.get("capacity_bytes")
        capacity = capacity.get(str(device)) if isinstance(capacity, dict) else capacity
        bounds = [int(b) for b in (self.limit(device, told=True), capacity) if isinstance(b, (int, float))]
        peak = max((int(c.reserved.max(initial=0)) for c in heap.curves(self.capture) if c.key[1:] == (device, "device")), default=0)
        return bool(bounds) and peak < _ROOMY * min(bounds) and not (self.capture.tables["events"]["action"] == "oom").any()

    def limit(self, device: int | None, *, told: bool = False) -> int | None:
        """Torch's own limit, where it is told, or where a replay shows one: that is one of a range which explains the trace."""
        value = self.capture.meta.get("limit_bytes")
        value = value.get(str(device)) if isinstance(value, dict) else value
        if value is None and self.replayed and not told:
            value = next((limit for of, limit in inferred_limits(self.capture).items() if device in (None, of)), None)
        return int(value) if isinstance(value, (int, float)) else None


Detector = Callable[[Seen], Iterator[Finding]]


def fenced_holes(seen: Seen) -> Iterator[Finding]:
    """``max_split_size_mb`` with expandable segments: a hole of that size serves no smaller request, so new pages are mapped instead."""
    most = seen.settings.max_split_size
    if most is None or not seen.settings.expandable_segments:
        return
    where = seen.segments.filter(pl.col("is_expandable").fill_null(value=False)).select("rank", "device", "kind", segment_addr="addr")
    holes = seen.blocks.filter(pl.col("state").cast(pl.String) == "inactive", pl.col("size_bytes") >= most).join(
        where, on=["rank", "device", "kind", "segment_addr"], how="semi", nulls_equal=True
    )
    for rank, device, count, size in holes.group_by("rank", "device").agg(n=pl.len(), size=pl.col("size_bytes").sum()).sort("rank", "device").iter_rows():
        if count < 2:
            continue
        yield Finding(
            "fenced_holes",
            f"max_split_size_mb together with expandable_segments leaks: {format_bytes(size)} lie in {count} free holes that requests below {format_bytes(most)} may not use.",
            f"Expandable segments hold {count} free blocks of {format_bytes(most)} or more; the oversize rule keeps smaller requests out of them, so each round maps new pages.",
            "Set one of the two options, not both: expandable_segments:True alone needs no max_split_size_mb.",
            int(size), rank, device,
        )  # fmt: skip


def limit_flushes(seen: Seen) -> Iterator[Finding]:
    """Flushes that a limit caused though the pages that were needed would have fitted: it is tested with the nominal size."""
    if not seen.settings.expandable_segments:
        return
    for curve in heap.curves(seen.capture):
        limit = seen.limit(curve.key[1], told=True)  # of a range, one end would blame the limit and the other not
        if limit is None or curve.key[2] != "device" or not len(curve.seq):
            continue
        count, given = _needless(seen, curve, limit)
        if count:
            yield Finding(
                "limit_flushes",
                f"The memory limit of {format_bytes(limit)} emptied the cache {_times(count)} though the new pages would have fitted under it.",
                f"Expandable segments: the limit is tested with the whole request rounded to 2 MiB, not with the pages that are missing; {format_bytes(given)} were unmapped and mapped again.",
                "Raise the limit by the largest request, or use classic segments under a tight limit.",
                0, curve.key[0], curve.key[1],
            )  # fmt: skip


def _needless(seen: Seen, curve: heap.Curve, limit: int) -> tuple[int, int]:
    events = seen.capture.tables["events"]
    mine = events if events.height == len(curve.seq) else events.filter(heap.matches(curve.key))
    action, size = codes_of(mine["action"]), mine["size_bytes"].fill_null(0).to_numpy()
    asked = mine["requested_bytes"].fill_null(0).to_numpy()
    back_there = (action == SEGMENT_UNMAP) | (action == SEGMENT_FREE)
    if not back_there.any():
        return 0, 0
    edges = np.diff(np.r_[0, (back_there | (action == DONE)).astype(np.int8), 0])
    count = given = 0
    for start, end in zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True):
        stop = end
        while stop < len(action) and action[stop] == SEGMENT_MAP:
            stop += 1
        if stop == end or stop >= len(action) or action[stop] != ALLOC:
            continue
        back = int(size[start:end][back_there[start:end]].sum())
        before = int(curve.reserved[start - 1]) if start else curve.start[2]
        rounded = int(rounding.round_sizes(asked[stop : stop + 1], list(seen.settings.roundup_power2_divisions))[0])
        grown = before - back + int(size[end:stop].sum())
        if back and grown <= limit < before + nominal_bytes(rounded, seen.settings.text):
            count, given = count + 1, given + back
    return count, given


def collection_that_never_runs(seen: Seen) -> Iterator[Finding]:
    """A ``garbage_collection_threshold`` that can have no effect."""
    threshold = seen.settings.garbage_collection_threshold
    if not threshold or not seen.is_cuda:
        return
    if seen.settings.expandable_segments:
        yield Finding(
            "collection_that_never_runs",
            f"garbage_collection_threshold:{threshold:g} frees nothing here: with expandable segments there are no blocks that it may free.",
            "The collection frees whole classic segments of the large pool only.",
            "Leave the option out; expandable segments give whole pages back when memory is short.",
        )
    elif seen.limit(None) is None and not isinstance(seen.capture.meta.get("limit_bytes"), dict) and seen.settings.per_process_memory_fraction in (None, 1.0):
        from_file = seen.capture.meta.get("source") == "torch_snapshot"
        if from_file and seen.capture.tables["events"]["action"].cast(pl.String).is_in(["oom", "segment_free"]).any():
            return  # a limit may have refused it, or the collector given it back
        yield Finding(
            "collection_that_never_runs",
            f"garbage_collection_threshold:{threshold:g} never runs without a memory limit" + (", and this file tells of none." if from_file else "."),
            "The threshold is a share of torch's own limit; a fraction of 1.0 is no limit (torch 2.11).",
            "Set a limit below 1.0 with torch.cuda.set_per_process_memory_fraction(f), or leave the option out.",
        )


def ignored_settings(seen: Seen) -> Iterator[Finding]:
    """Settings that are written but not in force."""
    text, torch = seen.text, seen.capture.meta.get("torch")
    if not text:
        return
    version = torch if isinstance(torch, str) else None
    keys = [k for k in re.findall(r"([a-z_0-9]+)\s*:", re.sub(r"\[[^\]]*\]", "", text)) if k != "backend"]
    if re.search(r"backend\s*:\s*cudaMallocAsync", text):
        native = [k for k in keys if not k.startswith("pinned_")]
        if native:
            yield Finding(
                "ignored_settings",
                f"{', '.join(native)} {'has' if len(native) == 1 else 'have'} no effect with backend:cudaMallocAsync.",
                f"{_CONF}={text}: memory comes from the driver's pool, which knows none of the native allocator's options.",
                "Leave backend:cudaMallocAsync out to use them, or leave them out.",
            )
        return
    try:
        written = parse(text, version)
    except ConfError as error:
        yield Finding(
            "ignored_settings", f"{_CONF}={text} can't have been in force: torch refuses it.", str(error), "Correct it, and set it before torch is imported."
        )
        return
    found, listed = seen.settings, seen.capture.meta.get("settings")
    differ = [n for n in ("expandable_segments", "max_split_size", "garbage_collection_threshold") if getattr(written, n) != getattr(found, n)]
    if isinstance(listed, dict) and differ:
        yield Finding(
            "ignored_settings",
            f"{', '.join(differ)} {'is' if len(differ) == 1 else 'are'} not as {_CONF} says.",
            "; ".join(f"{n}: {getattr(written, n)} written, {getattr(found, n)} in force" for n in differ) + ".",
            "Set the variable before the first tensor is made on a GPU; a call at run time replaces it.",
        )
    if "max_non_split_rounding_mb" in keys and written.max_split_size is None:
        yield Finding(
            "ignored_settings",
            "max_non_split_rounding_mb has no effect without max_split_size_mb.",
            "It bounds which oversize blocks a request may take, and without max_split_size_mb none is oversize.",
            "Set max_split_size_mb too, or leave it out.",
        )


def late_frees(seen: Seen) -> Iterator[Finding]:
    """A refusal with a fitting block free: a free behind ``record_stream`` completed in the flush, and torch does not search again."""
    refusals = _after_a_late_free(seen.capture)
    most = seen.settings.max_split_size
    for row in explained(seen.capture, refusals.head(_REFUSALS), {}).iter_rows(named=True) if refusals.height else ():
        asked, largest = row["requested_bytes"], row["largest_free_bytes"]
        if largest is not None and largest >= asked and (most is None or (asked < most) == (largest < most)):
            where = f" at {row['site']}" if row["site"] else ""
            yield Finding(
                "late_frees",
                f"The request for {format_bytes(asked)}{where} was refused with a fitting block of {format_bytes(largest)} free: asked again, it would be served.",
                "A block that another stream used (record_stream) came back while torch emptied its cache, and torch does not look for free blocks again after that.",
                "Synchronize that stream before large requests, or catch the error and ask once more.",
                0, row["rank"], row["device"],
            )  # fmt: skip


def scattered(seen: Seen) -> Iterator[Finding]:
    """A refusal with enough free memory in pieces: what classic segments can't move, expandable ones give back page by page."""
    refusals = seen.capture.tables["events"].filter(pl.col("action") == "oom").sort("seq")
    if refusals.is_empty() or seen.settings.expandable_segments:
        return
    for row in explained(seen.capture, refusals.head(_REFUSALS), {}).iter_rows(named=True):
        asked, free, largest, pieces = (row[n] for n in ("requested_bytes", "free_bytes_in_list", "largest_free_bytes", "free_blocks"))
        if not row["fits_if_adjacent"] or largest is None or largest >= asked or asked <= rounding.SMALL_SIZE:
            continue
        where = f" at {row['site']}" if row["site"] else ""
        page = seen.settings.large_segment_size
        whole = max(0, free // page - 2 * pieces) * page  # each piece loses less than two pages at its ends
        yield Finding(
            "scattered",
            f"Fragmentation refused the request for {format_bytes(asked)}{where}: {format_bytes(free)} lay free in {pieces} pieces, the largest {format_bytes(largest)}.",
            f"Classic segments keep a piece where it is. In expandable ones whole free pages of {format_bytes(page)} serve elsewhere"
            + (f": at least {format_bytes(whole)} of this." if whole else "."),
            f"Set {_CONF}=expandable_segments:True before torch is imported (not replayed yet: mp.what_if(cap) tells whether it serves the request), or make what stays before the large temporaries.",
            0, row["rank"], row["device"],
        )  # fmt: skip


def _after_a_late_free(capture: Capture) -> pl.DataFrame:
    """Refusals right before which a free completed: in the flush, else the request would have found the block."""
    events = capture.tables["events"]
    if not (events["action"] == "oom").any():
        return events.head(0)
    heaps = ["rank", "device", "kind"]
    action = pl.col("action").cast(pl.String)
    rows = events.sort("seq").with_columns(late=action == "free_completed", quiet=action.is_in(["free_completed", "segment_free", "segment_unmap"]))
    runs = rows.with_columns(run=(~pl.col("quiet")).cum_sum().over(heaps))
    ended = runs.group_by(*heaps, "run").agg(pl.col("late").any()).with_columns(pl.col("run") + 1)
    found = runs.filter(action == "oom").join(ended.filter("late"), on=[*heaps, "run"], how="semi", nulls_equal=True)
    return found.select(events.columns)


def survivors(seen: Seen) -> Iterator[Finding]:
    """Small blocks that keep whole segments, or pages, from being given back."""
    pins = pinning(seen.segments, seen.blocks, seen.settings.text).filter(
        ~is_private(),
        pl.when("is_expandable")
        .then(pl.col("size_bytes") * _SMALL <= pl.col("pinned_bytes"))
        .otherwise(pl.col("used_bytes") * _SMALL <= pl.col("segment_bytes")),
    )
    if pins.is_empty():
        return
    names = site_of_stacks(seen.capture.tables["stacks"]).select("stack_id", "site")
    state = seen.blocks.select("rank", "device", "kind", "segment_addr", "addr", waits=pl.col("state").cast(pl.String) == "active_pending_free").unique(["rank", "device", "kind", "segment_addr", "addr"])
    pins = pins.join(state, on=["rank", "device", "kind", "segment_addr", "addr"], how="left", nulls_equal=True)
    # a segment that two lines hold counts for the one with most in it
    pins = pins.join(names, on="stack_id", how="left").with_columns(pl.col("site").fill_null(NOWHERE)).sort("size_bytes", "addr", descending=[True, False])
    once = pins.with_columns(
        pinned_bytes=pl.when(pl.col("is_expandable") | pl.struct("rank", "device", "segment_addr").is_first_distinct()).then("pinned_bytes").otherwise(0)
    )
    sums = once.group_by("rank", "device", "site", "waits").agg(pl.col("pinned_bytes", "size_bytes").sum(), n=pl.len()).filter(pl.col("pinned_bytes") >= _MIN_PINNED)
    for row in sums.sort("pinned_bytes", "site", "waits", descending=[True, False, False]).head(3).iter_rows(named=True):
        held, size, count = format_bytes(row["pinned_bytes"]), format_bytes(row["size_bytes"]), row["n"]
        what = f"This {size} tensor of {row['site']} holds" if count == 1 else f"{count} small tensors of {row['site']}, {size} in all, hold"
        action = "Make what stays before the large temporaries, or .clone() it once they are gone; expandable_segments:True gives back all pages but its own."
        if row["waits"]:
            what = f"{count} freed block{'' if count == 1 else 's'} of {row['site']}, {size} in all, still wait{'s' if count == 1 else ''} for another stream and hold{'s' if count == 1 else ''}"
            action = "Synchronize that stream, or wait for its event before the free: the next request then finds them free. empty_cache() waits for it by itself."
        yield Finding(
            "survivors",
            f"{what} {held}" + (" until that stream is done." if row["waits"] else " that empty_cache() can't give back."),
            "It is the only thing in use in its segment." if count == 1 else "They are nearly all that is in use in their segments.",
            action, int(row["pinned_bytes"]), row["rank"], row["device"],
        )  # fmt: skip


def private_pools(seen: Seen) -> Iterator[Finding]:
    """Several private pools, each with free memory that no other may use."""
    own = seen.lists.filter(pl.col("private"), pl.col("reserved_bytes") > 0)
    each = own.group_by("rank", "device", pl.col("pool_id").cast(pl.String)).agg(pl.col("reserved_bytes", "allocated_bytes", "free_bytes").sum())
    for (rank, device), pools in each.sort("rank", "device", "pool_id").group_by("rank", "device", maintain_order=True):
        if pools.height < 2:
            continue
        reserved, live, free = (int(pools[n].sum()) for n in ("reserved_bytes", "allocated_bytes", "free_bytes"))
        need = _shared(pools)
        if reserved - need < _MIB:
            continue
        graphs = sum(not name.startswith("0_") for name in pools["pool_id"])
        kind = "CUDA graphs" if graphs == pools.height else "CUDA graphs and MemPools" if graphs else "MemPools"
        yield Finding(
            "private_pools",
            f"{pools.height} private pools of {kind} reserve {format_bytes(reserved)}, of which {format_bytes(live)} are allocated: each keeps its own free memory, which empty_cache() does not return.",
            f"{format_bytes(free)} lie free in them. One after the other in one pool, largest first, with all results kept, they would need {format_bytes(need)}.",
            "Share one pool: torch.cuda.graph(g, pool=first.pool()), and capture the largest batch first." if graphs else "Use one MemPool for all, the largest use first.",
            reserved - need, rank, device,
        )  # fmt: skip


def _shared(pools: pl.DataFrame) -> int:
    """What one pool would need: the largest, and then whatever stays of those before beside the next."""
    need = kept = 0
    for reserved, live in pools.sort("reserved_bytes", descending=True).select("reserved_bytes", "allocated_bytes").iter_rows():
        need, kept = max(need, kept + reserved), kept + live
    return int(need)


def device_calls(seen: Seen) -> Iterator[Finding]:
    """Device calls that take a noticeable part of the time."""
    for (rank, device), rows in stalls(seen.capture).group_by("rank", "device", maintain_order=True):
        whole, retries = rows.filter(pl.col("what").is_in(CALLS)), rows.filter(pl.col("what") == "retry")
        share, spent = float(whole["share"].sum()), float(whole["time_us"].sum())
        if whole["share"].null_count() or share < _SLOW:
            continue
        top = whole.sort("time_us", descending=True).row(0, named=True)
        least, most = float(whole["least_us"].sum()), float(whole["most_us"].sum())
        back = f", {_times(retries['count'][0])} after giving memory back ({format_time_us(retries['time_us'][0])})" if retries.height else ""
        where = f", most of it at {top['site']}" if top["site"] else ""
        yield Finding(
            "device_calls",
            f"Allocator stalls took {100 * share:.0f} % of this time: about {format_time_us(spent)} in {int(whole['count'].sum())} device calls{back}{where}.",
            f"Estimated from the gaps in the trace, between {format_time_us(least)} and {format_time_us(most)}.",
            _why_back(seen, device) if retries.height else "Warm up with the largest batch first; the cache then serves the rest.",
            0, rank, device,
        )  # fmt: skip


def _why_back(seen: Seen, device: int | None) -> str:
    """Memory is tight, or the program empties the cache: what is known of it."""
    known = inferred_retries(seen.capture).get(device) if seen.replayed else None
    if _hopeless(seen, device):
        return "What was refused is larger than the card or the limit: no free memory serves it, so ask for less at once."
    if seen.roomy(device):
        return "There was room, so nothing was refused: the program gives its cache back. Leave torch.cuda.empty_cache() out, and the cache serves what follows."
    if known == 0 and not (seen.capture.tables["events"]["action"] == "oom").any():
        return "By the replay no request was retried: the program gives its cache back. Leave torch.cuda.empty_cache() out, and the cache serves what follows."
    if known or seen.capture.meta.get("source") == "torch_history":  # which has a mark of every empty_cache()
        return "Memory is tight: a smaller batch, or a higher limit, keeps the cache."
    return "Either memory is tight, and a smaller batch or a higher limit keeps the cache; or the program calls torch.cuda.empty_cache(), which costs just this."


def _hopeless(seen: Seen, device: int | None) -> bool:
    """Whether each refusal is of a request that nothing that could be freed would have served."""
    refusals = seen.capture.tables["events"].filter(pl.col("action") == "oom", pl.col("device").eq_missing(pl.lit(device, dtype=pl.Int64))).sort("seq")
    if refusals.is_empty() or refusals.height > _REFUSALS:
        return False
    return not explained(seen.capture, refusals, {})["fits_if_all_freed"].fill_null(value=True).any()


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


DETECTORS: tuple[Detector, ...] = (
    scattered, fenced_holes, late_frees, private_pools, ignored_settings, collection_that_never_runs, limit_flushes, survivors, device_calls,
)  # fmt: skip
