"""The experts of a mixture, with their tokens and bytes."""

from __future__ import annotations

from typing import Any

import polars as pl

from nbmemprof.analyses._moment import live_at
from nbmemprof.capture import Capture

__all__ = ["experts"]

_SCHEMA: dict[str, Any] = {
    "device": pl.Int64, "rank": pl.Int64, "kind": pl.String, "layer": pl.String, "expert": pl.Int64, "tokens": pl.Int64, "share": pl.Float64, "weights_bytes": pl.Int64,
    "activations_bytes": pl.Int64, "bytes_per_token": pl.Float64, "evidence": pl.String, "origin": pl.String,
}  # fmt: skip
_LAYER = r"^(.*\.experts?)(?:\.|$)"
_OWN = r"^.*\.experts?\.(\d+)(?:\.|$)"


def experts(capture: Capture, at: str | float = "peak") -> pl.DataFrame:
    """How many tokens does each expert of a mixture get, and what does it hold for them?

    Parameters
    ----------
    at
        ``"peak"``, ``"end"``, or a time in µs from the start; tokens are those of the last forward before that moment.

    Returns
    -------
    One row an expert: ``device rank kind layer`` (of all its experts) ``expert tokens share`` (of the layer's routed tokens) ``weights_bytes
    activations_bytes bytes_per_token evidence origin``; requested bytes. Experts that are modules of their own are measured each. Where a layer's
    experts are one module, each has its tokens' part of what the layer keeps for all routed tokens alike, to the byte (what is kept once, as offsets, is
    nobody's); without the router's choice (record with ``--experts``) there is one row with a null ``expert`` for all of them.
    """
    live = live_at(capture, at).with_columns(pl.col("layer", "category").cast(pl.String))
    live = live.with_columns(pl.col("layer").str.extract(_LAYER).alias("_of"), pl.col("layer").str.extract(_OWN).cast(pl.Int64).alias("_own")).drop_nulls("_of")
    if live.is_empty():
        return pl.DataFrame(schema=_SCHEMA)
    calls = _calls(capture, live)
    rows: list[dict[str, Any]] = []
    for (device, rank, kind, layer), part in live.group_by("device", "rank", "kind", "_of", maintain_order=True):
        head = {"device": device, "rank": rank, "kind": str(kind), "layer": str(layer), "origin": capture.meta["origin"]}
        told = calls.filter(pl.col("layer") == layer)
        rows += [head | row for row in (_each(part, told) if part["_own"].is_not_null().any() else _together(part, told))]
    order = pl.col("layer").str.replace_all(r"(\d+)", "0000000000$1").str.replace_all(r"0*(\d{10})", "$1")  # layer 2 before layer 10
    return pl.DataFrame(rows, schema=_SCHEMA, orient="row").sort("device", order, "expert", nulls_last=True)


def _calls(capture: Capture, live: pl.DataFrame) -> pl.DataFrame:
    """The calls of each layer in its last forward that is part of what is live."""
    seen = capture.tables.get("routing")
    if seen is None or not seen.height:
        return pl.DataFrame(schema={"layer": pl.String, "expert": pl.Int64, "tokens": pl.Int64, "experts": pl.Int64})
    newest = live.filter(pl.col("category") == "activations")["alloc_seq"].max()
    before = seen.filter(pl.col("seq") <= newest) if newest is not None else seen
    before = before if before.height else seen
    last: pl.DataFrame = before.filter(pl.col("group") == pl.col("group").max().over("layer"))
    # the router's own words come before what shapes tell
    best = last.with_columns(pl.when(pl.col("experts") > 0).then(0).otherwise(1).alias("_rank")).filter(pl.col("_rank") == pl.col("_rank").min().over("layer"))
    return best.select("layer", "expert", "tokens", "experts")


def _bytes(part: pl.DataFrame, category: str) -> int:
    return int(part.filter(pl.col("category") == category)["requested_bytes"].sum())


def _each(part: pl.DataFrame, told: pl.DataFrame) -> list[dict[str, Any]]:
    """Experts that are modules: what each holds, and the tokens that it was called with."""
    tokens = dict(told.group_by("expert").agg(pl.col("tokens").sum()).iter_rows())
    whole = sum(tokens.values())
    rows = []
    for (expert,), own in part.drop_nulls("_own").group_by("_own", maintain_order=True):
        count, held = tokens.get(expert, 0 if tokens else None), _bytes(own, "activations")
        rows.append(
            {"expert": expert, "tokens": count, "share": count / whole if count is not None and whole else None, "weights_bytes": _bytes(own, "weights"), "activations_bytes": held,
             "bytes_per_token": held / count if count else None, "evidence": "its module's own memory and calls"}
        )  # fmt: skip
    return rows


def _together(part: pl.DataFrame, told: pl.DataFrame) -> list[dict[str, Any]]:
    """Experts that are one module."""
    weights, held, routed = _bytes(part, "weights"), _bytes(part, "activations"), int(told["tokens"].sum())
    numbered = told.filter(pl.col("expert") >= 0)
    if numbered.is_empty():
        each = held // routed if routed else None
        return [{"expert": None, "tokens": routed or None, "share": 1.0 if routed else None, "weights_bytes": weights, "activations_bytes": held, "bytes_per_token": each, "evidence": "the module of all experts"}]
    width = held // routed if routed else 0  # what is kept once for all is less than a byte a token
    return [
        {"expert": expert, "tokens": tokens, "share": tokens / routed if routed else None, "weights_bytes": weights // max(numbered.height, 1), "activations_bytes": tokens * width,
         "bytes_per_token": width, "evidence": "the router's choice, and what the layer keeps of a routed token"}
        for expert, tokens in numbered.select("expert", "tokens").sort("expert").iter_rows()
    ]  # fmt: skip
