"""Whose memory it is, where neither the program's objects nor its phases tell: workspaces of cuBLAS, buckets of DDP, blocks of a peak that was thinned."""

from __future__ import annotations

import polars as pl

from nbmemprof import schema
from nbmemprof.capture import Capture
from nbmemprof.sources._cuda_trace import Stacks
from nbmemprof.sources._placing import Log

__all__ = ["buckets", "named", "remember", "workspaces"]

_known: dict[tuple[int | None, int], int] = {}  # workspaces of this process that recordings saw made: (device, address) to bytes


def remember(made: Capture) -> None:
    """Keep where the workspaces of a finished window are: the next window has no event of them."""
    rows = made.tables["allocations"].filter(pl.col("free_seq").is_null() & (pl.col("category").cast(pl.String) == "workspace"))
    _known.update({(device, addr): size for device, addr, size in rows.select("device", "addr", "size_bytes").iter_rows()})


def workspaces(blocks: pl.DataFrame, events: pl.DataFrame) -> pl.DataFrame:
    """Workspaces of cuBLAS that earlier windows of this process saw made, as ``owners``, if blocks of their sizes are still there."""
    if not _known or not events.height:
        return schema.empty("owners")
    live = blocks.filter((pl.col("state").cast(pl.String) == "active_allocated") & pl.col("size_bytes").is_in(list(set(_known.values()))))
    here = [(device, addr) for device, addr, size in live.select("device", "addr", "size_bytes").iter_rows() if _known.get((device, addr)) == size]
    if not here:
        return schema.empty("owners")
    columns = {"kind": "device", "source": "torch", "seq": int(events["seq"][0]), "category": "workspace", "evidence": "operator", "name": "cuBLAS"}
    places = {"device": pl.Series([d for d, _ in here], dtype=pl.Int64), "addr": pl.Series([a for _, a in here], dtype=pl.UInt64)}
    return schema.fill("owners", columns | places, len(here))


def buckets(events: pl.DataFrame, stacks: Stacks) -> pl.DataFrame:
    """What DistributedDataParallel itself asks for, as ``hints``: its buckets, into which gradients are copied to be sent.

    Where gradients are views of the buckets (``gradient_as_bucket_view``) their owners are found, and they are gradients.
    """
    mine = events.filter((pl.col("action").cast(pl.String) == "alloc") & pl.col("stack_id").is_in(stacks.ending_in("torch/nn/parallel/distributed.py")))
    return schema.fill("hints", {"alloc_seq": mine["seq"], "category": "framework", "evidence": "stack", "op": "DDP bucket"}, mine.height)


def named(blocks: pl.DataFrame, log: Log | None, device: int, clock_us: float | None) -> pl.DataFrame:
    """Blocks of a peak whose events are gone, with the category of what was found at their addresses before it and again after it.

    Weights, state and buffers stay where they are; what came and went in between (activations) stays unknown.
    """
    if log is None or clock_us is None:
        return blocks
    names = ("addr", "category", "evidence", "layer")
    rows = [(addr, category, evidence, layer, clock / 1e3 <= clock_us) for _, clock, where, addr, category, evidence, layer, _ in log.owners if where == device]
    seen = pl.DataFrame(rows, schema=dict.fromkeys(names, pl.String) | {"addr": pl.UInt64, "before": pl.Boolean}, orient="row").unique()
    both = seen.group_by(names).agg(pl.col("before").n_unique().alias("sides")).filter(pl.col("sides") == 2)
    stays = both.unique("addr", keep="none").drop("sides")  # an address that was two things tells nothing
    dtypes = schema.dtypes("allocations")
    return blocks.join(stays, on="addr", how="left", maintain_order="left").with_columns(pl.col(n).cast(dtypes[n]) for n in names[1:])
