"""Parts of the full report that a first view has no room for: the allocator, what would save, caches, cards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import polars as pl

from nbmemprof.capture import Capture
from nbmemprof.views import heap_map, replayed, text
from nbmemprof.views._facts import Device, Facts, facts
from nbmemprof.views._fits import cards_of
from nbmemprof.views.svg import Svg

__all__ = ["Table", "allocator", "drawn", "fits", "tables"]

_DEPTH = 4  # levels of modules in the table of savings
_ROWS, _DRAWN = 40, 4
_FITS = "Which GPUs it would fit on"
_CARDS = {"card": "card", "capacity_bytes": "memory", "fits": "fits", "low_bytes": "needs at least", "high_bytes": "needs at most", "evidence": "how it is known"}


@dataclass(frozen=True)
class Table:
    """A table with its title."""

    title: str
    head: list[str]
    rows: list[list[str]]


def allocator(known: Facts) -> list[str]:
    """Sentences on the replay: its verdict, what had to be inferred. A short trace is replayed for it."""
    capture = known.capture
    if not replayed.applies(capture):
        return []
    if capture.events.height <= replayed.SHORT:
        replayed.judge(capture)
    judged = replayed.known(capture)
    return [*replayed.lines(capture), *(f"Inferred, as no event tells it: {one}." for one in (judged.inferred if judged is not None else ()))]


def drawn(known: Facts, device: Device) -> Iterator[tuple[str, list[tuple[Svg, str]]]]:
    """Pictures by title: the heap, and other settings, which are of all devices. Of many devices those with the highest peaks have pictures."""
    if device.kind != "device" or device not in known.devices[:_DRAWN]:
        return
    made = [picture for picture in (draw(known, device) for draw in (heap_map.moments, heap_map.through_time, heap_map.lists)) if picture is not None]
    if made:
        yield "The heap: segments, addresses through time, free lists", made
    judged = replayed.known(known.capture)
    if device is known.devices[0] and judged is not None and judged.frame is not None and judged.frame.height:
        yield "What other allocator settings would have reserved", [replayed.picture(judged.frame)]


def tables(known: Facts, device: Device) -> Iterator[Table]:
    """Tables that are not an analysis as it is: other settings, advice, savings by module, caches, cards."""
    judged = replayed.known(known.capture)
    if device is known.devices[0] and judged is not None and judged.frame is not None and judged.frame.height:
        title, head, rows = replayed.table(judged.frame)
        yield Table(title, head, rows)
    yield from _of(known.ask("advise", replay=judged is not None), device, "What to change", {"finding": "finding", "evidence": "how it is known", "action": "what to do", "saving_bytes": "saves", "origin": "origin"}, either=True)
    yield from _savings(known.of(known.ask("layers"), device))
    parts = known.of(known.ask("layers", by="part"), device).drop_nulls("layer") if known.ask("layers").height else pl.DataFrame()
    yield from _of(parts, device, "By part of the model, at the peak", {"layer": "part", "size_bytes": "size", "weights_bytes": "weights", "gradients_bytes": "gradients", "optimizer_state_bytes": "optimizer state", "activations_bytes": "kept for backward"})
    yield from _of(known.ask("layers", by="expert"), device, "Experts and their tokens", {"layer": "layer", "expert": "expert", "tokens": "tokens", "share": "share", "weights_bytes": "weights", "activations_bytes": "kept for backward", "bytes_per_token": "for each token", "evidence": "how it is known"})
    yield from _of(known.ask("kv_cache"), device, "KV caches", {"cache": "cache", "layers": "layers", "sequences": "sequences", "tokens": "tokens", "bytes_per_token": "for each token", "bytes_per_sequence": "for each sequence", "requested_bytes": "size", "growth_bytes": "growth", "padding_bytes": "padding", "room_bytes": "room nobody uses", "int8_saves_bytes": "saved by 8 bits", "fits_sequences": "more sequences that fit"})
    fit = cards_of(known, replay=True) if device is known.devices[0] else pl.DataFrame()
    if fit.height:
        yield Table(*text.table(_FITS, fit, _CARDS, _ROWS))


def _of(frame: pl.DataFrame, device: Device, title: str, columns: dict[str, str], *, either: bool = False) -> Iterator[Table]:
    """The rows of one device, where there are any; ``either``: those that concern all devices too."""
    if not frame.height:
        return
    mine = pl.col("device").eq_missing(pl.lit(device.device, dtype=pl.Int64)) & pl.col("rank").eq_missing(pl.lit(device.rank, dtype=pl.Int64))
    rows = frame.filter(mine | (pl.col("device").is_null() & pl.lit(either)))
    if rows.height:
        yield Table(*text.table(title, rows, columns, _ROWS))


def _savings(layers: pl.DataFrame) -> Iterator[Table]:
    """What checkpointing each module would not keep, and what smaller numbers would save, largest first."""
    names = ("recompute_saves_bytes", "int8_saves_bytes", "int4_saves_bytes")
    if not layers.height:
        return
    rows = layers.drop_nulls("layer").filter(pl.col("depth") <= _DEPTH, pl.any_horizontal(pl.col(n).fill_null(0) > 0 for n in names))
    rows = rows.sort("size_bytes", descending=True, maintain_order=True)
    if rows.height:
        columns = {"layer": "module", "size_bytes": "holds", "recompute_saves_bytes": "checkpointing would not keep", "forward_us": "and costs", "int8_saves_bytes": "8-bit weights save", "int4_saves_bytes": "4-bit weights save"}
        yield Table(*text.table("What checkpointing and smaller weights would save, at most", rows, columns, _ROWS))


def fits(capture: Capture, *, replay: bool) -> str:
    """The cards that a capture would fit on, as text."""
    frame = cards_of(facts(capture), replay=replay)
    if not frame.height:
        return "This capture tells no peak, so nothing can be said of cards. Record a cell with %%memprof, or open a snapshot with its history."
    yes = frame.filter(pl.col("fits") == "yes")
    first = f"The smallest GPU that it fits on: {yes['card'][0]}." if yes.height else "It fits on none of these GPUs as it is."
    title, head, rows = text.table(_FITS, frame, _CARDS, _ROWS)
    return "\n".join([first, title, *text.aligned(head, rows)])
