"""Which layers hold the memory."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._moment import live_at
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["COLUMNS", "layers"]

# category -> column; the rest of the words are "other"
COLUMNS = {
    "weights": "weights_bytes", "gradients": "gradients_bytes", "optimizer_state": "optimizer_state_bytes", "activations": "activations_bytes",
    "temporary": "temporary_bytes", "kv_cache": "kv_cache_bytes", "buffers": "buffers_bytes",
}  # fmt: skip
_KEYS = ("device", "rank", "kind")


def layers(capture: Capture, at: str | float = "peak", depth: int | None = None) -> pl.DataFrame:
    """What does each layer of the model hold, and all below it?

    Parameters
    ----------
    at
        ``"peak"`` (each device at its own), ``"end"``, or a time in µs from the start.
    depth
        Deepest level to show, 0 for the models alone; all of them by default. What is deeper counts in its parents.

    Returns
    -------
    One row a device and module path, parents before their children in the order of the path: ``device rank kind layer
    parent name depth size_bytes requested_bytes own_bytes`` (its own, without its children) ``count share`` (of all that is live on the device), then
    requested bytes by category: ``weights_bytes gradients_bytes optimizer_state_bytes activations_bytes temporary_bytes
    kv_cache_bytes buffers_bytes other_bytes``, and ``recompute_saves_bytes``: activations that checkpointing this layer would not keep,
    at most (its own and its children's; the input stays and belongs to what made it, the result stays where the next layer keeps it). Null ``layer``: what no layer is known for.
    """
    if depth is not None and depth < 0:
        raise NbmemprofError(f"depth={depth} is below 0. Give 0 for the models alone, 1 for their children, or leave it out.")
    live = live_at(capture, at).with_columns(pl.col("layer").cast(pl.String), pl.col("category").cast(pl.String))
    named = pl.col("category").replace_strict(COLUMNS, default="other_bytes", return_dtype=pl.String)
    live = live.with_columns(named.alias("_column"))
    whole = live.group_by(*_KEYS).agg(pl.col("size_bytes").sum().alias("_whole"))
    own = live.group_by(*_KEYS, "layer", "_column").agg(pl.col("requested_bytes").sum(), pl.col("size_bytes").sum(), pl.len().cast(pl.Int64).alias("count"))
    parts = pl.col("layer").str.split(".")
    paths = own.select("layer").unique().with_columns(parts.alias("_parts"))
    # a path counts in itself and in every part of it
    above = paths.drop_nulls("layer").with_columns(pl.int_ranges(1, pl.col("_parts").list.len() + 1).alias("_take")).explode("_take")
    above = above.with_columns(pl.col("_parts").list.head("_take").list.join(".").alias("_at")).select("layer", "_at")
    nowhere = pl.DataFrame({"layer": [None], "_at": [None]}, schema={"layer": pl.String, "_at": pl.String})
    spread = own.join(pl.concat([above, nowhere]), on="layer", how="left", nulls_equal=True)
    self_bytes = pl.col("size_bytes").filter(pl.col("layer").eq_missing(pl.col("_at"))).sum()
    each = spread.group_by(*_KEYS, "_at").agg(
        pl.col("size_bytes").sum(), pl.col("requested_bytes").sum(), self_bytes.alias("own_bytes"), pl.col("count").sum(),
        *(pl.col("requested_bytes").filter(pl.col("_column") == column).sum().alias(column) for column in (*COLUMNS.values(), "other_bytes")),
    )  # fmt: skip
    level = pl.col("_at").str.count_matches(".", literal=True).cast(pl.Int64)
    each = each.join(whole, on=list(_KEYS), nulls_equal=True).with_columns(
        level.alias("depth"),
        pl.col("_at").str.extract(r"^(.*)\.[^.]*$").alias("parent"),
        pl.col("_at").str.extract(r"([^.]*)$").alias("name"),
        pl.when(pl.col("_whole") > 0).then(pl.col("size_bytes") / pl.col("_whole")).alias("share"),
        pl.when(pl.col("_at").is_not_null()).then("activations_bytes").alias("recompute_saves_bytes"),
    )
    if depth is not None:
        each = each.filter(pl.col("depth").is_null() | (pl.col("depth") <= depth))
    order = pl.col("_at").str.replace_all(r"(\d+)", "0000000000$1").str.replace_all(r"0*(\d{10})", "$1")  # h.2 before h.10
    bytes_ = [*COLUMNS.values(), "other_bytes", "recompute_saves_bytes"]
    return each.sort("rank", "device", order, nulls_last=True).select(*_KEYS, pl.col("_at").alias("layer"), "parent", "name", "depth", "size_bytes", "requested_bytes", "own_bytes", "count", "share", *bytes_)
