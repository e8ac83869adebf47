"""Whose memory is it: category, evidence, layer, phase and step of each allocation.

Written here and nowhere else, from what a source saw: ``owners`` (storages found in parameters, gradients, optimizer
state, caches, by address), ``hints`` (of single allocations), ``contexts`` (the phase and module in which an event
happened); where there are none, from call stacks. What nobody speaks for is ``unknown``.
"""

from __future__ import annotations

import polars as pl

from nbmemprof import schema
from nbmemprof._stack_words import by_stacks

__all__ = ["RANK", "attribute"]

RANK = ("weights", "buffers", "optimizer_state", "gradients", "kv_cache", "inputs")  # which owner counts where a storage has several; a tag comes before all
# torch's cuBLAS workspace (aten/src/ATen/cuda/CublasHandlePool.cpp): 32 MiB from compute capability 9 on, 8.1 MiB before;
# one for each handle (a thread has its own) and stream, never given back. cuBLASLt's comes with the first.
_WORKSPACES = (32 << 20, 4096 * 1024 * 2 + 16 * 1024 * 8)
_WORDS = ("category", "evidence", "layer", "phase", "step", "op")
_DEFAULT_POOL = "0_0"


def attribute(
    made: pl.DataFrame, hints: pl.DataFrame | None = None, contexts: pl.DataFrame | None = None, owners: pl.DataFrame | None = None, stacks: pl.DataFrame | None = None
) -> pl.DataFrame:
    """What is each allocation for, and how is that known?

    Parameters
    ----------
    made
        ``allocations``, every use of an address paired.
    hints, contexts, owners
        Tables of the schema; None or empty where the source saw nothing of the kind.
    stacks
        Read where none of the others has a row, as of a file: what they say alone (:mod:`nbmemprof._stack_words`).

    Returns
    -------
    ``made`` with ``category evidence layer phase step op`` written anew.
    """
    if not any(table is not None and table.height for table in (hints, contexts, owners)):
        return made if stacks is None else by_stacks(made, stacks)
    rows = made.drop(_WORDS).with_row_index("_row")
    rows = _hinted(rows, hints if hints is not None else schema.empty("hints"))
    rows = _placed(rows, contexts if contexts is not None else schema.empty("contexts"))
    rows = _owned(rows, owners if owners is not None else schema.empty("owners"))
    rows = _with_workspaces(rows)
    seen = contexts is not None and contexts.height > 0
    category, evidence = _rules() if seen else (pl.lit(None, pl.String), pl.lit(None, pl.String))
    dtypes = schema.dtypes("allocations")
    made_here = (pl.col("_o_category") == "inputs") & pl.col("_phase").is_not_null()  # what a forward made is no input of the next
    kept_by_graph = (pl.col("_o_category") == "kv_cache") & (pl.col("_o_evidence") != "tag") & pl.col("_f_phase").is_in(["backward", "recompute"])
    rows = rows.with_columns(pl.when(~(made_here | kept_by_graph).fill_null(value=False)).then("_o_category").alias("_o_category"))
    told = pl.coalesce("_o_category", "_h_category")
    word = pl.coalesce(told, category)
    same = pl.col("_h_category") == category  # the rules know better why
    how = pl.when(pl.col("_o_category").is_not_null()).then("_o_evidence").when(pl.col("_h_category").is_not_null() & ~same.fill_null(value=False)).then("_h_evidence").otherwise(evidence)
    known = word.is_not_null() & (word != "unknown")
    made_in = rows.with_columns(
        pl.when(known).then(word).otherwise(pl.lit("unknown")).cast(dtypes["category"]).alias("category"),
        pl.when(known).then(how).otherwise(pl.lit("none")).cast(dtypes["evidence"]).alias("evidence"),
        pl.coalesce("_o_layer", "_h_layer", "_layer").cast(dtypes["layer"]).alias("layer"),
        pl.coalesce("_name", "_h_phase", "_phase").cast(dtypes["phase"]).alias("phase"),
        pl.coalesce("_h_step", "_step").alias("step"),
        pl.col("_h_op").cast(dtypes["op"]).alias("op"),
    ).select(made.columns)
    return _between_saved(made_in) if seen else made_in


_BLOCK = r"^(.*?\.\d+)(?:\.|$)"


def _between_saved(rows: pl.DataFrame) -> pl.DataFrame:
    """Backward's own allocations get the block of layers that it was at work in.

    A node of the graph lets go of what it had saved when it has run. Where the last such release before an allocation and the next one after it are of the same
    numbered block (``h.3``), the allocation is that block's; of the gradients whose layer is known otherwise every one agrees (six recorded models, 1824 gradients).
    """
    phase, key = pl.col("phase").cast(pl.String), ["rank", "device", "kind"]
    open_ = rows.with_row_index("_row").filter(phase.is_in(["backward", "recompute"]) & pl.col("layer").is_null() & pl.col("alloc_seq").is_not_null())
    block = pl.col("layer").cast(pl.String).str.extract(_BLOCK)
    gone = rows.filter((pl.col("evidence").cast(pl.String) == "saved") & (pl.col("category").cast(pl.String) == "activations") & pl.col("free_seq").is_not_null())
    gone = gone.select(pl.struct(key).hash().alias("_key"), pl.col("free_seq"), block.alias("_block")).drop_nulls("_block").sort("free_seq")
    if open_.is_empty() or gone.is_empty():
        return rows
    asked = open_.select("_row", pl.struct(key).hash().alias("_key"), "alloc_seq").sort("alloc_seq")
    joined = asked.join_asof(gone, left_on="alloc_seq", right_on="free_seq", by="_key", strategy="backward", check_sortedness=False)
    joined = joined.join_asof(gone.rename({"_block": "_next", "free_seq": "_next_seq"}), left_on="alloc_seq", right_on="_next_seq", by="_key", strategy="forward", check_sortedness=False)
    told = joined.filter(pl.col("_block") == pl.col("_next")).select("_row", "_block")
    placed = rows.with_row_index("_row").join(told, on="_row", how="left", maintain_order="left")
    return placed.with_columns(pl.coalesce(pl.col("layer").cast(pl.String), "_block").cast(rows.schema["layer"]).alias("layer")).select(rows.columns)


def _text(table: pl.DataFrame) -> pl.DataFrame:
    """Categoricals and enums as text: they meet each other here."""
    return table.with_columns(pl.col(pl.Categorical, pl.Enum).cast(pl.String))


def _hinted(rows: pl.DataFrame, hints: pl.DataFrame) -> pl.DataFrame:
    seen = _text(hints).filter(pl.col("alloc_seq").is_not_null()).unique("alloc_seq", keep="last")
    return rows.join(seen.select("alloc_seq", pl.col(_WORDS).name.prefix("_h_")), on="alloc_seq", how="left", maintain_order="left")


def _placed(rows: pl.DataFrame, contexts: pl.DataFrame) -> pl.DataFrame:
    """Where an allocation began and where it ended."""
    seen = _text(contexts).unique("seq", keep="last")
    begin = seen.select(pl.col("seq").alias("alloc_seq"), pl.col("span", "phase", "layer", "name", "step", "evidence").name.prefix("_"))
    end = seen.select(pl.col("seq").alias("free_seq"), _f_span="span", _f_phase="phase")
    return rows.join(begin, on="alloc_seq", how="left", maintain_order="left").join(end, on="free_seq", how="left", maintain_order="left")


def _owned(rows: pl.DataFrame, owners: pl.DataFrame) -> pl.DataFrame:
    """The owner that counts most of those found while the allocation was live."""
    key = ["rank", "device", "kind", "addr"]
    place = pl.struct(pl.col("rank").fill_null(-1), pl.col("device").fill_null(-1), pl.col("kind").cast(pl.String), "addr").hash().alias("_key")
    uses = rows.select("_row", place, pl.col("alloc_seq").fill_null(-(1 << 62)).alias("_from"), "free_seq", *key).sort("_from")
    found = _text(owners).with_columns(place, pl.col("seq") - 1).sort("seq")
    met = found.join_asof(uses.select("_row", "_key", "_from", "free_seq"), left_on="seq", right_on="_from", by="_key", strategy="backward", check_sortedness=False)
    rank = pl.when(pl.col("evidence") == "tag").then(-1).otherwise(pl.col("category").replace_strict({c: i for i, c in enumerate(RANK)}, default=len(RANK), return_dtype=pl.Int64))
    best = (
        met.filter(pl.col("_row").is_not_null() & (pl.col("free_seq").is_null() | (pl.col("free_seq") > pl.col("seq"))))
        .with_columns(rank.alias("_rank"))
        .sort("_rank", maintain_order=True)
        .unique("_row", keep="first", maintain_order=True)
    )
    return rows.join(best.select("_row", _o_category="category", _o_evidence="evidence", _o_layer="layer"), on="_row", how="left", maintain_order="left")


def _with_workspaces(rows: pl.DataFrame) -> pl.DataFrame:
    """Mark cuBLAS's workspaces: the first that stays of their very size in a stream and thread, and what cuBLASLt asks for in the same breath."""
    alike = ["rank", "device", "kind", "stream", "_thread"]
    stays = pl.col("alloc_seq").is_not_null() & pl.col("free_seq").is_null() & (pl.col("kind") == "device") & pl.col("_o_category").is_null()
    in_module = (pl.col("_phase") != "optimizer").fill_null(value=False)  # between the phases a weight of that size is made, too
    first = (
        rows.with_columns((pl.col("_phase") == "backward").fill_null(value=False).alias("_thread"))
        .filter(stays & in_module & pl.col("_span").is_not_null() & pl.col("requested_bytes").is_in(_WORKSPACES))
        .sort("alloc_seq").unique(alike, keep="first", maintain_order=True)
    )  # fmt: skip
    if first.is_empty():
        return rows.with_columns(pl.lit(value=False).alias("_workspace"))
    order = rows.filter(pl.col("alloc_seq").is_not_null()).sort("alloc_seq").with_columns(pl.col("_row").shift(1).over("rank", "device", "kind").alias("_before"))
    beside = order.filter(stays & pl.col("_before").is_in(first["_row"].to_list()) & pl.col("requested_bytes").is_in([1 << 20, 32 << 20]))
    chosen = pl.concat([first["_row"], beside["_row"]]).unique()
    return rows.with_columns(pl.col("_row").is_in(chosen.to_list()).alias("_workspace"))


def _rules() -> tuple[pl.Expr, pl.Expr]:
    """Category and evidence by where an allocation began and ended; null where that tells nothing."""
    phase, ended, gone = pl.col("_phase"), pl.col("_f_phase"), pl.col("free_seq").is_not_null()
    seen = pl.col("_span").is_not_null()
    same = gone & (pl.col("_f_span") == pl.col("_span"))
    soon = gone & pl.col("_f_span").is_between(pl.col("_span"), pl.col("_span") + 1)  # what a forward returns and nobody keeps goes right after it
    in_backward = gone & ended.is_in(["backward", "recompute"])
    rules: list[tuple[pl.Expr, str, str | pl.Expr]] = [
        (pl.col("_workspace"), "workspace", "operator"),
        (pl.col("pool_id").is_not_null() & (pl.col("pool_id").cast(pl.String) != _DEFAULT_POOL), "cuda_graph", "pool"),
        ((phase == "optimizer") & same, "temporary", "phase"),
        ((phase == "optimizer") & in_backward, "activations", "saved"),  # a loss that the step's closure computed
        (phase == "optimizer", "optimizer_state", "phase"),
        ((phase == "recompute") & gone & (ended == "recompute"), "temporary", "phase"),
        ((phase == "recompute") & gone & (ended == "backward"), "activations", "saved"),
        ((phase == "backward") & same, "temporary", "phase"),
        (phase == "backward", "gradients", "phase"),
        (seen & in_backward, "activations", "saved"),
        ((phase == "forward") & soon, "temporary", "phase"),
        ((phase == "forward") & pl.col("_layer").is_not_null(), "activations", "module"),
        (phase == "forward", "activations", "phase"),
        (seen & same, "temporary", "phase"),
    ]  # fmt: skip
    category, evidence = pl.lit(None, pl.String), pl.lit(None, pl.String)
    weaker = pl.col("_evidence") == "stack"  # the phase itself is read off call stacks
    for condition, word, how in reversed(rules):
        applies = condition.fill_null(value=False)
        told = pl.lit(how)
        category = pl.when(applies).then(pl.lit(word)).otherwise(category)
        evidence = pl.when(applies).then(pl.when(weaker).then(pl.lit("stack")).otherwise(told) if how in ("phase", "module", "saved") else told).otherwise(evidence)
    return category, evidence
