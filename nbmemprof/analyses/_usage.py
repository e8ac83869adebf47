"""Troubles that categories, phases and the ledger show: a function each, from what was seen to findings."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._checkpointing import checkpointed
from nbmemprof.analyses._detectors import Detector, Finding, Seen
from nbmemprof.analyses._moment import live_at
from nbmemprof.analyses._sites import with_site
from nbmemprof.analyses.ledger import ledger
from nbmemprof.units import format_bytes, format_time_us

__all__ = ["USAGE"]

_MIB = 1 << 20
_ledgers: weakref.WeakKeyDictionary[Seen, pl.DataFrame] = weakref.WeakKeyDictionary()
_WORTH = 0.05  # share of the peak from which a finding is worth a sentence
_HALF = 0.5
_MUCH = 0.15  # share of the peak that checkpointing must save to be proposed


def _ledger(seen: Seen) -> pl.DataFrame:
    """The ledger where anything was read of the driver or of pinned memory, else no rows of it; asked once."""
    if seen not in _ledgers:
        made = ledger(seen.capture)
        _ledgers[seen] = made if seen.capture.tables["samples"].height else made.clear()
    return _ledgers[seen]


def first_step(seen: Seen) -> Iterator[Finding]:
    """An optimizer makes its state in its first step: the second iteration needs more than the first."""
    capture = seen.capture
    rows = capture.tables["allocations"].with_columns(pl.col("category", "phase").cast(pl.String))
    state = rows.filter((pl.col("category") == "optimizer_state") & (pl.col("phase") == "optimizer") & pl.col("alloc_seq").is_not_null() & pl.col("free_seq").is_null())
    for curve in heap.curves(capture):
        rank, device, kind = curve.key
        mine = state.filter(heap.matches(curve.key))
        size, highest = int(mine["size_bytes"].sum()), int(curve.live.max(initial=0))
        if size < max(_WORTH * highest, 1) or mine["step"].n_unique() > 1:
            continue
        step = mine["step"][0]
        if step is None:  # no marks of steps: a forward between two blocks of it is one
            between = pl.col("alloc_seq").is_between(int(mine["alloc_seq"].min()), int(mine["alloc_seq"].max()))  # type: ignore[arg-type]
            if rows.filter(heap.matches(curve.key), between, pl.col("phase") == "forward").height:
                continue
        owners = capture.tables["owners"].filter((pl.col("category").cast(pl.String) == "optimizer_state") & pl.col("addr").is_in(mine["addr"].to_list()))
        names = sorted(set(owners["name"].drop_nulls().to_list()))
        where = with_site(mine, capture.tables["stacks"])["site"].drop_nulls()
        at = f" at {where.mode().sort()[0]}" if len(where) else ""
        yield Finding(
            "first_step",
            f"The optimizer state ({', '.join(names) or 'made by step()'}) came with the first step(){at}: {format_bytes(size)} that stay, so every iteration after the first needs as much more, once and no further.",
            f"{mine.height} blocks made in {f'step {step}' if step is not None else 'one step()'} and kept; none in a later one.",
            "Judge by the second iteration whether a batch fits; an optimizer with smaller state (8-bit, SGD, Adafactor) or sharded state takes less.",
            None, rank, device if kind == "device" else None,
        )  # fmt: skip


def one_checkpoint(seen: Seen) -> Iterator[Finding]:
    """A checkpoint around the whole network: backward computes and holds all of it again, at once."""
    capture = seen.capture
    if not (capture.tables["allocations"]["phase"].cast(pl.String) == "recompute").any():
        return
    live = live_at(capture, "peak").with_columns(pl.col("category", "phase").cast(pl.String))
    whole = capture.tables["allocations"].with_columns(pl.col("phase", "category").cast(pl.String)).filter((pl.col("phase") == "recompute") & (pl.col("category") == "activations"))
    for curve in heap.curves(capture):
        rank, device, kind = curve.key
        here = live.filter(heap.matches(curve.key) & (pl.col("category") == "activations"))
        again = here.filter(pl.col("phase") == "recompute")
        held, kept = int(again["size_bytes"].sum()), int(here["size_bytes"].sum())
        if held < max(_HALF * kept, 1):
            continue
        steps = again["step"].drop_nulls().unique().to_list()
        all_of_it = whole.filter(heap.matches(curve.key), pl.col("step").is_in(steps) if steps else pl.lit(value=True))
        total = int(all_of_it["size_bytes"].sum())
        if held < 0.7 * total:
            continue
        yield Finding(
            "one_checkpoint",
            f"Checkpointing saves next to nothing here: the peak is in backward, where the recompute of one segment holds {format_bytes(held)} of activations at once, {held / total:.0%} of all that is recomputed.".replace("%", " %"),
            f"Of {format_bytes(kept)} of activations at the peak, {format_bytes(held)} were made by a recompute.",
            "Checkpoint each block by itself (checkpoint(block, x, use_reentrant=False) in the loop): then one block's activations are held at a time.",
            None, rank, device if kind == "device" else None,
        )  # fmt: skip


def checkpoint(seen: Seen) -> Iterator[Finding]:
    """What checkpointing each block would save, and what it would cost."""
    for curve in heap.curves(seen.capture):
        saving = checkpointed(seen.capture, curve)
        if saving is None or saving.less_bytes < _MUCH * saving.peak_bytes:
            continue
        rank, device, kind = curve.key
        again = f" It computes their forward a second time: {format_time_us(saving.forward_us)} a step{', as the CPU issued it' if kind == 'device' else ''}." if saving.forward_us else ""
        yield Finding(
            "checkpoint",
            f"The {saving.blocks} blocks of {saving.path} keep {format_bytes(saving.kept_bytes)} for backward at the peak, {saving.kept_bytes / saving.peak_bytes:.0%} of it. With each of them checkpointed the peak would be about {format_bytes(saving.then_bytes)}, {format_bytes(saving.less_bytes)} less.{again}".replace("%", " %"),
            "The recorded events without what autograd keeps of a block between its forward and its backward; its result stays. Temporaries of the second computing are not in it.",
            "In the loop over the blocks: x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False); in transformers: model.gradient_checkpointing_enable().",
            saving.less_bytes, rank, device if kind == "device" else None, "modelled",
        )  # fmt: skip


def pinned(seen: Seen) -> Iterator[Finding]:
    """Page-locked memory is rounded up to a power of two, and kept."""
    rows = _ledger(seen).filter(pl.col("kind") == "pinned")
    size = {line.removeprefix("pinned host memory "): value for line, value in rows.select("line", "size_bytes").iter_rows()}
    if not size:
        return
    asked, lost, cached = size["in use"], size["rounding"], size["cached"]
    if lost < max(asked // 4, 8 * _MIB) and cached < 64 * _MIB:
        return
    locked = asked + lost + cached
    text = f"{format_bytes(locked)} of host memory are pinned (page-locked) for {format_bytes(asked)} of tensors"
    text += f": each block is rounded up to a power of two, {format_bytes(lost)} more than asked for" if lost else ""
    text += f"{',' if lost else ':'} {format_bytes(cached)} of it belong to tensors that are gone and stay locked" if cached else ""
    yield Finding(
        "pinned", f"{text}. It is host memory; the device's is not touched.",
        "torch's counters of pinned memory, and the pinned tensors that are alive." + (f" That is {(asked + lost) / asked:.2f} times what they need." if asked else ""),
        "Pack the shards into one pinned buffer just below a power of two; torch._C._host_emptyCache() gives back what is cached.", None,
    )  # fmt: skip


def other_pools(seen: Seen) -> Iterator[Finding]:
    """CuPy's pool keeps freed blocks that torch can't use."""
    if not seen.is_cuda:
        return
    lines = _ledger(seen).filter(pl.col("line") == "CuPy's pool cached")
    for rank, device, size, reported in lines.select("rank", "device", "size_bytes", "reported_bytes").iter_rows():
        if size >= max(64 * _MIB, _WORTH * (reported or 0) / 5):
            yield Finding(
                "cupy_pool", f"CuPy's pool keeps {format_bytes(size)} of free blocks that torch can't use.", "CuPy's default pool, asked at the end: total less used.",
                "cupy.get_default_memory_pool().free_all_blocks() gives them back; torch.cuda.empty_cache() does not.", 0, rank, device,
            )  # fmt: skip


def strangers(seen: Seen) -> Iterator[Finding]:
    """Memory that no line of the ledger explains."""
    if not seen.is_cuda:
        return
    lines = _ledger(seen).filter((pl.col("line") == "unexplained") & pl.col("size_bytes").is_not_null())
    for rank, device, size, low, reported in lines.select("rank", "device", "size_bytes", "low_bytes", "reported_bytes").iter_rows():
        if low is not None and low >= 64 * _MIB and size >= 0.02 * (reported or size):
            yield Finding(
                "unexplained", f"{format_bytes(size)} of the {format_bytes(reported)} that the driver reports belong to nobody in the ledger: at least {format_bytes(low)} of it is no error of the table.",
                "What the driver reports less torch, other pools, context, libraries and other processes.",
                "A library that calls cudaMalloc itself, or a context of another runtime, holds it: mp.ledger(cap) has the lines.", None, rank, device,
            )  # fmt: skip


USAGE: tuple[Detector, ...] = (one_checkpoint, checkpoint, first_step, pinned, other_pools, strangers)
