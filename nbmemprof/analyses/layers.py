"""Which layers hold the memory."""

from __future__ import annotations

import polars as pl

from nbmemprof.analyses._moment import live_at
from nbmemprof.analyses.experts import experts
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["COLUMNS", "layers", "part_of"]

# category -> column; the rest of the words are "other"
COLUMNS = {
    "weights": "weights_bytes", "gradients": "gradients_bytes", "optimizer_state": "optimizer_state_bytes", "activations": "activations_bytes",
    "temporary": "temporary_bytes", "kv_cache": "kv_cache_bytes", "buffers": "buffers_bytes",
}  # fmt: skip
_KEYS = ("device", "rank", "kind")


# words in a module's path -> what it is; the innermost module with such a word counts
_PARTS = {
    "experts": r"^experts?$", "router": r"router|^gate$", "attention": r"attn|attention|^(q|k|v|o)_proj$|^qkv$|^out_proj$", "MLP": r"mlp|ffn|feed_?forward|^fc\d*$|^linear\d$|^(gate|up|down)_proj$|^intermediate$",
    "embedding": r"embed|^w[tp]e$|^tok_|position", "norm": r"norm|^ln|^bn\d*$", "head": r"^lm_head$|^head$|^classifier$|^score$", "convolution": r"^conv", "dropout": r"drop",
}  # fmt: skip
_BLOCK_64 = 64  # weights that share a scale in 4-bit formats (bitsandbytes' NF4: a float32 for 64)


def layers(capture: Capture, at: str | float = "peak", depth: int | None = None, by: str = "path") -> pl.DataFrame:
    """What does each layer of the model hold, and all below it?

    Parameters
    ----------
    capture
        Any capture; without modules in its trace all is in the row of no layer.
    by
        ``"path"``: the tree of modules; ``"part"``: attention, MLP, experts, embedding, norm, head … of each model, by the words in the paths (``layer`` is
        then the part, ``parent`` the model); ``"expert"``: the experts of a mixture with their tokens, in columns of their own (:func:`nbmemprof.analyses.experts.experts`).
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
    at most (its own and its children's; the input stays and belongs to what made it, the result stays where the next layer keeps it), ``forward_us``: what it costs, the time of its
    forward in the last step (from each of its events to the next one of that forward; on a GPU the time in which the CPU issued it), and ``int8_saves_bytes int4_saves_bytes``: less for its matrices with one
    byte and a half-precision scale a row, with half a byte and a float32 scale for 64 (null where the recording doesn't know what the weights are made of). Null ``layer``: what no layer is known for.

    Raises
    ------
    NbmemprofError
        For a depth below 0 or another ``by``.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> with mp.record("torch_cpu") as recording:
    ...     model = torch.nn.Linear(1000, 1000)
    ...     model(torch.ones(8, 1000)).sum().backward()
    >>> mp.layers(recording.capture).select("layer", "weights_bytes", "gradients_bytes").rows()[0]
    ('Linear', 4004000, 4004000)
    """
    if by not in ("path", "part", "expert"):
        raise NbmemprofError(f"by={by!r} is not a way to sum layers. Use 'path', 'part' or 'expert'.")
    if by == "expert":
        return experts(capture, at)
    if depth is not None and not hasattr(depth, "__index__"):
        raise NbmemprofError(f"depth={depth!r} is no whole number. Give 0 for the models alone, 1 for their children, or leave it out.")
    if depth is not None and depth < 0:
        raise NbmemprofError(f"depth={depth} is below 0. Give 0 for the models alone, 1 for their children, or leave it out.")
    live = live_at(capture, at).with_columns(pl.col("layer").cast(pl.String), pl.col("category").cast(pl.String))
    named = pl.col("category").replace_strict(COLUMNS, default="other_bytes", return_dtype=pl.String)
    live = live.with_columns(named.alias("_column"))
    times, quantized = _forward_us(capture), _quantized(capture)
    if by == "part":
        live, times, quantized = (frame.with_columns(part_of("layer").alias("layer")) for frame in (live, times, quantized))
    whole = live.group_by(*_KEYS).agg(pl.col("size_bytes").sum().alias("_whole"))
    own = live.group_by(*_KEYS, "layer", "_column").agg(pl.col("requested_bytes").sum(), pl.col("size_bytes").sum(), pl.len().cast(pl.Int64).alias("count"))
    spread = own.join(_above(own["layer"]), on="layer", how="left", nulls_equal=True)
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
    each = _with_costs(each, times, quantized)
    if by == "part":  # a GPU's queue makes later calls wait for earlier ones: of parts all over the model such times mean nothing
        each = each.with_columns(pl.lit(None, pl.Float64).alias("forward_us"))
    if depth is not None:
        each = each.filter(pl.col("depth").is_null() | (pl.col("depth") <= depth))
    order = pl.col("_at").str.replace_all(r"(\d+)", "0000000000$1").str.replace_all(r"0*(\d{10})", "$1")  # h.2 before h.10
    bytes_ = [*COLUMNS.values(), "other_bytes", "recompute_saves_bytes", "forward_us", "int8_saves_bytes", "int4_saves_bytes"]
    return each.sort("rank", "device", order, nulls_last=True).select(*_KEYS, pl.col("_at").alias("layer"), "parent", "name", "depth", "size_bytes", "requested_bytes", "own_bytes", "count", "share", *bytes_)


def part_of(column: str) -> pl.Expr:
    """The model and what a module of it is, from its path: ``GPT2LMHeadModel.attention``; null stays null."""
    path = pl.col(column)
    words = path.str.split(".")
    part = pl.lit("other")
    for name, pattern in reversed(_PARTS.items()):
        last = words.list.eval(pl.element().str.to_lowercase().str.contains(pattern)).list.any()
        part = pl.when(last).then(pl.lit(name)).otherwise(part)
    return pl.when(path.is_not_null()).then(words.list.first() + "." + part)


def _forward_us(capture: Capture) -> pl.DataFrame:
    """Time from each event in the forward of the last step to the next one, by the module path of the first; of itself, not of what is below it."""
    events = capture.tables["events"].select("seq", "time_us").drop_nulls()
    seen = capture.tables["contexts"].select("seq", "span", "step", pl.col("phase", "layer").cast(pl.String)).filter(pl.col("phase") == "forward")
    if seen.is_empty() or events.is_empty():
        return pl.DataFrame(schema={"layer": pl.String, "_time": pl.Float64})
    seen = seen.filter(pl.col("span") == pl.col("span").max()) if seen["step"].null_count() else seen.filter(pl.col("step") == pl.col("step").max())
    timed = seen.join(events, on="seq").sort("seq").with_columns((pl.col("time_us").shift(-1) - pl.col("time_us")).over("span").fill_null(0.0).alias("_time"))
    return timed.drop_nulls("layer").group_by("layer").agg(pl.col("_time").sum())


def _quantized(capture: Capture) -> pl.DataFrame:
    """Bytes that the matrices of each module would save with one byte, and with half a byte, a number."""
    known = capture.tables.get("parameters")
    if known is None:
        return pl.DataFrame(schema={"layer": pl.String, "_int8": pl.Int64, "_int4": pl.Int64})
    matrices = pl.col("rows") > 0
    int8 = pl.col("size_bytes") - pl.col("elements") - 2 * pl.col("rows")
    int4 = pl.col("size_bytes") - (pl.col("elements") + 1) // 2 - 4 * ((pl.col("elements") + _BLOCK_64 - 1) // _BLOCK_64)
    made: pl.DataFrame = known.select("layer", *(pl.when(matrices).then(e.clip(lower_bound=0)).otherwise(0).alias(n) for n, e in (("_int8", int8), ("_int4", int4))))
    return made


def _with_costs(each: pl.DataFrame, times: pl.DataFrame, quantized: pl.DataFrame) -> pl.DataFrame:
    """Add what recomputing and quantizing mean to every row, what is below it included."""
    spent = times.join(_above(times["layer"]), on="layer").group_by("_at").agg(pl.col("_time").sum().alias("forward_us"))
    saved = quantized.join(_above(quantized["layer"]), on="layer").group_by("_at").agg(int8_saves_bytes=pl.col("_int8").sum(), int4_saves_bytes=pl.col("_int4").sum())
    return each.join(spent, on="_at", how="left").join(saved, on="_at", how="left")


def _above(paths: pl.Series) -> pl.DataFrame:
    """A path counts in itself and in every module above it: ``layer`` to ``_at``; null to null."""
    split = pl.DataFrame({"layer": paths.unique()}, schema={"layer": pl.String}).with_columns(pl.col("layer").str.split(".").alias("_parts"))
    named = split.drop_nulls("layer").with_columns(pl.int_ranges(1, pl.col("_parts").list.len() + 1).alias("_take")).explode("_take")
    named = named.with_columns(pl.col("_parts").list.head("_take").list.join(".").alias("_at")).select("layer", "_at")
    return pl.concat([named, pl.DataFrame({"layer": [None], "_at": [None]}, schema={"layer": pl.String, "_at": pl.String})])
