"""What an allocation is for, as far as call stacks alone say it: for files, where nobody watched owners and phases.

Read are only frames of torch that mean one thing, whatever the program. Autograd runs backward in a thread without Python: where stacks are
recorded for requests and frees, those without one are its own. What it gives back of a request that the program made, a graph had
kept for it. Where frees have no stacks of their own (torch then writes that of the request), only what an optimizer and a module make is told.
"""

from __future__ import annotations

import polars as pl

from nbmemprof import schema

__all__ = ["by_stacks"]

_TORCH = r"(^|[/\\])torch[/\\]"
_OPTIMIZER = _TORCH + r"optim[/\\]"
_MODULE = _TORCH + r"nn[/\\]modules[/\\]module\.py$"
_PARAMETERS_ONLY = _TORCH + r"nn[/\\]modules[/\\](linear|sparse|conv|normalization)\.py$"  # their __init__ makes no buffers
_WORKSPACES = (32 << 20, 4096 * 1024 * 2 + 16 * 1024 * 8, 1 << 20)  # as in nbmemprof.attribution; cuBLASLt's is 1 MiB
_COPIED = 0.5  # share of frees with the stack of their request: above it torch wrote that one for want of their own


def by_stacks(made: pl.DataFrame, stacks: pl.DataFrame) -> pl.DataFrame:
    """Write ``category``, ``evidence`` and ``phase`` where the stacks tell them; all else stays as it is.

    Returns
    -------
    ``made``, with the evidence ``stack`` where something was told: ``optimizer_state`` (made in an optimizer's step, and kept), ``temporary`` (made and given
    back in one forward, in the optimizer, or by autograd), ``activations`` (made by the program, given back by autograd), ``gradients`` (made by autograd, given back by
    ``zero_grad``, or kept and of a size that was), ``weights`` (parameters made by a module or moved to a device); and ``cuda_graph`` with the evidence ``pool``.
    """
    if stacks.is_empty() or made.is_empty():
        return made
    told = _told(stacks)
    if told.is_empty():
        return made
    own = told.select("stack_id", "optimizer", "forward", "weights", "inside")
    freed = told.select(free_stack_id="stack_id", f_optimizer="optimizer", f_forward="forward", f_zero="zero_grad")
    rows = made.join(own, on="stack_id", how="left", maintain_order="left").join(freed, on="free_stack_id", how="left", maintain_order="left")
    word, phase = _words(_with_runs(rows))
    dtypes = schema.dtypes("allocations")
    graph = (~pl.col("pool_id").cast(pl.String).str.starts_with("0_")).fill_null(value=False)  # a graph's pool is (n, 0), a MemPool's (0, n)
    rows = _with_runs(rows).with_columns(pl.when(graph).then(pl.lit("cuda_graph")).otherwise(word).alias("_word"), phase.alias("_phase"))
    known, how = pl.col("_word").is_not_null(), pl.when(graph).then(pl.lit("pool")).otherwise(pl.lit("stack"))
    return rows.with_columns(
        pl.when(known).then(pl.col("_word").cast(dtypes["category"])).otherwise("category").alias("category"),
        pl.when(known).then(how.cast(dtypes["evidence"])).otherwise("evidence").alias("evidence"),
        pl.coalesce("_phase", pl.col("phase").cast(pl.String)).cast(dtypes["phase"]).alias("phase"),
    ).select(made.columns)


def _told(stacks: pl.DataFrame) -> pl.DataFrame:
    """What the frames of each stack say; no rows where none of them is one that says something."""
    names = stacks.select(pl.col("filename", "function").cast(pl.String))
    files = names["filename"].unique().drop_nulls()
    if not files.str.contains(_OPTIMIZER).any() and not files.str.contains(_MODULE).any():
        return pl.DataFrame()
    file, function = pl.col("filename").cast(pl.String), pl.col("function").cast(pl.String)
    outer = function.shift(-1).over("stack_id"), file.shift(-1).over("stack_id")
    called = (function == "forward") & outer[0].is_in(["_call_impl", "inner"]) & outer[1].str.contains(_MODULE)
    moved = outer[0].eq("_apply") & outer[1].str.contains(_MODULE) & (function != "_apply")
    built = (function == "__init__") & file.str.contains(_PARAMETERS_ONLY)
    frames = stacks.sort("stack_id", "depth").with_columns(
        is_optimizer=file.str.contains(_OPTIMIZER), is_forward=called, is_moved=moved, is_built=built, is_zero=function == "zero_grad", apply_line=pl.when(moved).then(pl.col("line").shift(-1).over("stack_id"))
    )
    # _apply goes over parameters first: the line that calls is above those for gradients and buffers
    first = pl.col("apply_line") == pl.col("apply_line").min()
    each = frames.with_columns(is_first=first.fill_null(value=False)).group_by("stack_id").agg(
        optimizer=pl.col("is_optimizer").any(), forward=pl.col("is_forward").any(), zero_grad=pl.col("is_zero").any(),
        inside=pl.col("filename").cast(pl.String).last().str.contains(_TORCH), weights=(pl.col("is_built") | (pl.col("is_moved") & pl.col("is_first"))).any(),
    )  # fmt: skip
    each = each.fill_null(value=False)
    return each if each.select(pl.any_horizontal("optimizer", "forward", "zero_grad", "weights").any()).item() else each.clear()


def _with_runs(rows: pl.DataFrame) -> pl.DataFrame:
    """Add ``run`` and ``f_run``: the stretch of requests within forwards in which an allocation began and ended."""
    keys = ["rank", "device", "kind"]
    asked = rows.filter(pl.col("alloc_seq").is_not_null()).select(*keys, "alloc_seq", inside=pl.col("forward").fill_null(value=False)).sort("alloc_seq")
    runs = asked.with_columns(run=(pl.col("inside") != pl.col("inside").shift()).fill_null(value=True).cum_sum().over(keys))
    # while backward runs the program waits: between two requests of its own lie only autograd's
    own = rows.filter(pl.col("stack_id").is_not_null(), ~pl.col("inside").fill_null(value=False))["alloc_seq"].drop_nulls().sort()
    theirs = rows.filter(pl.col("stack_id").is_null())["alloc_seq"].drop_nulls()
    busy = own.search_sorted(theirs).unique()
    rows = rows.with_columns(in_backward=pl.Series(own.search_sorted(rows["free_seq"].fill_null(-1))).is_in(busy.implode()) & rows["free_seq"].is_not_null())
    runs = runs.select(pl.struct(keys).hash().alias("_heap"), "alloc_seq", "run").sort("alloc_seq")
    marked = rows.with_row_index("_row").with_columns(pl.struct(keys).hash().alias("_heap"))
    begun = marked.select("_row", "_heap", "alloc_seq").drop_nulls("alloc_seq").sort("alloc_seq").join_asof(runs, on="alloc_seq", by="_heap", check_sortedness=False).select("_row", "run")
    ended = marked.select("_row", "_heap", "free_seq").drop_nulls("free_seq").sort("free_seq")
    ended = ended.join_asof(runs, left_on="free_seq", right_on="alloc_seq", by="_heap", check_sortedness=False).select("_row", f_run="run")
    return marked.join(begun, on="_row", how="left", maintain_order="left").join(ended, on="_row", how="left", maintain_order="left").drop("_row", "_heap")


def _words(rows: pl.DataFrame) -> tuple[pl.Expr, pl.Expr]:
    """Category and phase of each row; null where its stacks don't tell."""
    recorded, gone = pl.col("alloc_seq").is_not_null(), pl.col("free_seq").is_not_null()
    framed, f_framed = pl.col("stack_id").is_not_null(), pl.col("free_stack_id").is_not_null()
    asked = rows.filter(framed & gone & recorded)
    own = asked.height > 0 and asked["free_stack_id"].null_count() < asked.height and ((asked["free_stack_id"] == asked["stack_id"]).sum() < _COPIED * asked.height)
    bare, f_bare = recorded & ~framed & pl.lit(own), gone & ~f_framed & pl.lit(own)
    optimizer, forward, weights, inside = (pl.col(n).fill_null(value=False) for n in ("optimizer", "forward", "weights", "inside"))
    f_optimizer, f_forward, f_zero = (pl.col(n).fill_null(value=False) & pl.lit(own) for n in ("f_optimizer", "f_forward", "f_zero"))
    zeroed = rows.filter((bare & gone & f_zero).fill_null(value=False))["requested_bytes"].unique()
    stays = bare & ~gone & pl.col("requested_bytes").is_in(zeroed.implode()) & ~pl.col("requested_bytes").is_in(_WORKSPACES)
    rules = [
        (optimizer & ~f_zero & gone & f_optimizer, "temporary"),
        (optimizer & ~gone, "optimizer_state"),
        (weights & ~forward & ~gone, "weights"),
        (framed & ~inside & ~optimizer & ~weights & f_bare & pl.col("in_backward"), "activations"),
        (forward & ~inside & gone & f_forward & (pl.col("run") == pl.col("f_run")), "temporary"),
        (bare & gone & f_zero, "gradients"),
        (stays, "gradients"),
        (bare & f_bare, "temporary"),
    ]
    word = pl.lit(None, pl.String)
    for condition, name in reversed(rules):
        word = pl.when((recorded & condition).fill_null(value=False)).then(pl.lit(name)).otherwise(word)
    phase = pl.when(recorded & optimizer).then(pl.lit("optimizer")).when(recorded & forward & ~inside).then(pl.lit("forward")).when(bare).then(pl.lit("backward"))
    return word, phase
