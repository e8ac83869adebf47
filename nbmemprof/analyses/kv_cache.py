"""What the KV caches hold, waste, and leave room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from nbmemprof import heap
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import parse_bytes

__all__ = ["kv_cache"]

_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "rank": pl.Int64, "kind": pl.String, "cache": pl.String, "layers": pl.Int64, "sequences": pl.Int64, "tokens": pl.Int64, "room_tokens": pl.Int64,
    "bytes_per_token": pl.Float64, "bytes_per_sequence": pl.Int64, "requested_bytes": pl.Int64, "size_bytes": pl.Int64, "peak_bytes": pl.Int64, "growth_bytes": pl.Int64,
    "growth_per_step_bytes": pl.Float64, "padding_bytes": pl.Int64, "room_bytes": pl.Int64, "rounding_bytes": pl.Int64, "int8_saves_bytes": pl.Int64, "free_bytes": pl.Int64, "fits_sequences": pl.Int64,
    "evidence": pl.String, "origin": pl.String,
}  # fmt: skip


def kv_cache(
    capture: Capture, *, sequences: int | None = None, tokens: int | Sequence[int] | None = None, block_tokens: int | None = None, capacity_bytes: int | str | None = None
) -> pl.DataFrame:
    """What do the KV caches hold for each token and sequence, what is wasted, how many more sequences fit?

    Parameters
    ----------
    sequences, tokens
        What the caches hold, where the recording doesn't know it (caches of your own that are tagged with ``mp.tag(obj, "kv_cache")``, recordings of
        elsewhere); ``tokens`` of each sequence, one number for all or one for each.
    block_tokens
        Tokens of a block of a paged cache: the last block of each sequence is partly empty.
    capacity_bytes
        Memory of the card, as ``"80GiB"`` or a number; by default the capture's.

    Returns
    -------
    One row a cache, the largest first: ``device rank kind cache layers sequences tokens room_tokens`` (allocated for each sequence),
    ``bytes_per_token`` (of one sequence, all layers) ``bytes_per_sequence requested_bytes size_bytes`` (rounded, at the cache's last sight) ``peak_bytes`` (highest,
    with the copies that growing makes) ``growth_bytes growth_per_step_bytes`` (since it was first seen, and by forward) and the waste: ``padding_bytes``
    (of tokens that the attention mask leaves out) ``room_bytes`` (allocated for tokens that are not there: static caches, blocks) ``rounding_bytes``.
    ``int8_saves_bytes``: less with one byte a number and a half-precision scale for 64 of them (0 where it is no larger now).
    ``fits_sequences``: how many more of its length would fit into ``free_bytes``, which is the card less what is outside torch and live at the end.
    Null: not known. Without a KV cache there is no row.

    Raises
    ------
    NbmemprofError
        For numbers that can't be.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     cache = mp.tag([torch.zeros(2, 128, 64) for _ in range(4)], "kv_cache")
    >>> mp.kv_cache(recording.capture, sequences=2, tokens=128).select("bytes_per_token", "bytes_per_sequence").rows()
    [(1024.0, 131072)]
    """
    for name, number in (("sequences", sequences), ("block_tokens", block_tokens), *(("tokens", one) for one in (tokens if isinstance(tokens, (list, tuple)) else [tokens]))):
        if number is not None and not hasattr(number, "__index__") and not hasattr(number, "__array__"):
            raise NbmemprofError(f"{name}={number!r} is no whole number. Give one of 1 or more, or leave it out.")
    lengths = [tokens] * (sequences or 1) if isinstance(tokens, int) else list(tokens) if tokens is not None else None
    if (sequences is not None and sequences < 1) or (block_tokens is not None and block_tokens < 1) or (lengths is not None and (not lengths or min(lengths) < 1)):
        raise NbmemprofError(f"sequences={sequences}, tokens={tokens}, block_tokens={block_tokens}: each is 1 or more. Leave out what you don't know.")
    capacity = None if capacity_bytes is None else parse_bytes(capacity_bytes)
    rows = capture.tables["allocations"].filter(pl.col("category").cast(pl.String) == "kv_cache")
    if rows.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    seen = capture.tables.get("caches")
    found = []
    for curve in heap.curves(capture):
        mine = rows.filter(heap.matches(curve.key))
        if mine.is_empty():
            continue
        shapes = _last(seen) if seen is not None and seen.height else None
        told = [*shapes.iter_rows(named=True)] if shapes is not None and lengths is None else [None]
        found += [_row(capture, curve, mine, shape, seen, sequences, lengths, block_tokens, capacity, alone=len(told) == 1) for shape in told]
    return pl.DataFrame(found, schema=_SCHEMA, orient="row").sort("requested_bytes", descending=True, nulls_last=True)


def _last(seen: pl.DataFrame) -> pl.DataFrame:
    """Each cache at its largest; of equal sights the last, which has been asked most."""
    order = seen.with_row_index("_n").sort("size_bytes", "_n")
    grown = order.group_by("cache_id", maintain_order=True).last()
    told = seen.group_by("cache_id").agg(pl.col("tokens").max(), pl.col("padding_tokens").drop_nulls().last())
    return grown.drop("tokens", "padding_tokens", "_n").join(told, on="cache_id", how="left").filter(pl.col("size_bytes") > 0)


def _row(
    capture: Capture, curve: heap.Curve, rows: pl.DataFrame, shape: dict[str, Any] | None, seen: pl.DataFrame | None,
    sequences: int | None, lengths: list[int] | None, block: int | None, capacity: int | None, *, alone: bool,
) -> dict[str, Any]:  # fmt: skip
    rank, device, kind = curve.key
    made: dict[str, Any] = {"device": device, "rank": rank, "kind": str(kind), "origin": capture.meta["origin"]}
    made |= _of_shape(shape, seen) if shape is not None else _of_numbers(rows, sequences, lengths, block)
    at_end = rows.filter(pl.col("free_seq").is_null())
    live = at_end if at_end.height else rows.filter(pl.col("free_seq") == pl.col("free_seq").max())
    if alone:
        rounded, asked = int(live["size_bytes"].sum()), int(live["requested_bytes"].sum())
        made |= {"size_bytes": rounded, "rounding_bytes": rounded - asked, "peak_bytes": _highest(rows)}
        made["requested_bytes"] = made.get("requested_bytes") or asked
    free = _free(capture, curve, capacity)
    each = made.get("bytes_per_sequence")
    return made | {"free_bytes": free, "fits_sequences": free // each if free is not None and each else None}


def _of_shape(shape: dict[str, Any], seen: pl.DataFrame | None) -> dict[str, Any]:
    assert seen is not None  # noqa: S101 - the shape is a row of it
    each, tokens, room, count = shape["token_bytes"], shape["tokens"], shape["room_tokens"], shape["sequences"]
    history = seen.filter(pl.col("cache_id") == shape["cache_id"]).unique("size_bytes", keep="first", maintain_order=True)["size_bytes"]
    growth = int(history[-1] - history[0])
    padded = shape["padding_tokens"]
    return {
        "cache": shape["cache"], "layers": shape["layers"], "sequences": count, "tokens": tokens, "room_tokens": room, "bytes_per_token": float(each),
        "bytes_per_sequence": shape["size_bytes"] // count, "requested_bytes": shape["size_bytes"], "growth_bytes": growth,
        "growth_per_step_bytes": growth / (len(history) - 1) if len(history) > 1 else None, "padding_bytes": padded * each if padded is not None else None,
        "room_bytes": (room - tokens) * each * count if tokens is not None else None, "int8_saves_bytes": _int8(shape), "evidence": "shapes of its tensors",
    }  # fmt: skip


def _int8(shape: dict[str, Any]) -> int | None:
    width = shape.get("element_bytes")
    return int(shape["size_bytes"] * max(1 - (1 + 2 / 64) / width, 0)) if width else None


def _of_numbers(rows: pl.DataFrame, sequences: int | None, lengths: list[int] | None, block: int | None) -> dict[str, Any]:
    """From what the user says; what he doesn't say is null."""
    live = rows.filter(pl.col("free_seq").is_null())
    held = int((live if live.height else rows)["requested_bytes"].sum())
    if lengths is None:
        return {"cache": "KV cache", "sequences": sequences, "requested_bytes": held, "bytes_per_sequence": held // sequences if sequences else None, "evidence": "category"}
    room = sum(-(-length // block) * block for length in lengths) if block else sum(lengths)
    each = held / room
    return {
        "cache": "KV cache", "sequences": len(lengths), "tokens": max(lengths), "room_tokens": -(-room // len(lengths)), "bytes_per_token": each,
        "bytes_per_sequence": int(held / len(lengths)), "requested_bytes": held, "room_bytes": round((room - sum(lengths)) * each), "evidence": "category, and lengths as given",
    }  # fmt: skip


def _highest(rows: pl.DataFrame) -> int:
    """Highest sum of requested bytes: a cache that grows by concatenation holds old and new side by side."""
    start = int(rows.filter(pl.col("alloc_seq").is_null())["requested_bytes"].sum())
    moves = pl.concat(
        [rows.drop_nulls("alloc_seq").select(seq="alloc_seq", change="requested_bytes"), rows.drop_nulls("free_seq").select(seq="free_seq", change=-pl.col("requested_bytes"))]
    ).sort("seq")
    return start + int(max(np.cumsum(moves["change"].to_numpy()).max(initial=0), 0))


def _free(capture: Capture, curve: heap.Curve, capacity: int | None) -> int | None:
    """The card less what lies outside torch, and what is live at the end."""
    row = summary(capture).filter(pl.col("device").eq_missing(pl.lit(curve.key[1], pl.Int64)), pl.col("kind").cast(pl.String) == str(curve.key[2])).row(0, named=True)
    bound = capacity if capacity is not None else capture.meta.get("limit_bytes") or row["capacity_bytes"]
    if not isinstance(bound, int):
        return None
    outside = row["outside_bytes"] or 0 if bound != capture.meta.get("limit_bytes") else 0
    return max(bound - outside - int(row["end_allocated_bytes"] or 0), 0)
