"""What checkpointing every block of a model would make of a recorded step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from nbmemprof import heap
from nbmemprof.capture import Capture

__all__ = ["Saving", "checkpointed"]

_FEWEST = 2  # blocks in a row
_TRIED = 4  # lists of modules, those whose blocks keep most


@dataclass(frozen=True)
class Saving:
    """Peaks of live bytes as recorded and with every block of ``path`` checkpointed; ``kept_bytes``: what the blocks keep at the recorded peak."""

    path: str
    blocks: int
    peak_bytes: int
    then_bytes: int
    kept_bytes: int
    forward_us: float | None

    @property
    def less_bytes(self) -> int:
        """By how much the peak would be lower."""
        return self.peak_bytes - self.then_bytes


def checkpointed(capture: Capture, curve: heap.Curve) -> Saving | None:
    """How high would the peak be if each block of a numbered list of modules was checkpointed by itself?

    What autograd keeps of a block, but for the block's result, is taken out of the recorded curve from the end of the block's forward until backward comes to it, when
    it would be computed again and be there as recorded. The list whose blocks keep most is taken. Temporaries of the second computing are not in it.

    Returns
    -------
    None: nothing is kept in numbered modules, the step recomputes already, or no peak is in the events.
    """
    rows = capture.tables["allocations"].filter(heap.matches(curve.key)).with_columns(pl.col("evidence", "phase", "layer", "category").cast(pl.String))
    contexts = capture.tables["contexts"].select("seq", "span", "step", pl.col("phase", "layer").cast(pl.String))
    if not len(curve.seq) or contexts.is_empty() or (rows["phase"] == "recompute").any():
        return None
    kept = rows.filter((pl.col("evidence") == "saved") & (pl.col("category") == "activations") & (pl.col("phase") == "forward"), pl.col("alloc_seq").is_not_null(), pl.col("free_seq").is_not_null())
    forward = contexts.filter(pl.col("phase") == "forward")
    kept, places = kept.join(contexts.select(alloc_seq="seq", span="span"), on="alloc_seq", how="inner"), _numbered(forward["layer"])
    listed = kept.join(places, on="layer").group_by("path").agg(pl.col("size_bytes").sum()).sort("size_bytes", "path", descending=[True, False])["path"]
    tried = [one for path in listed.head(_TRIED) if (one := _with(capture, curve, kept, forward, places.filter(pl.col("path") == path), path)) is not None]
    return max(tried, key=lambda one: one.less_bytes, default=None)


def _with(capture: Capture, curve: heap.Curve, kept: pl.DataFrame, forward: pl.DataFrame, places: pl.DataFrame, path: str) -> Saving | None:
    """The curve with the blocks of one list checkpointed."""
    key = ["span", "block"]
    ends = forward.join(places, on="layer").group_by(key).agg(end=pl.col("seq").max())
    mine = kept.join(places, on="layer").sort("alloc_seq").join(ends, on=key, how="left")
    inner = mine.filter(pl.col("alloc_seq") != pl.col("alloc_seq").max().over(key)).with_columns(begin=pl.col("free_seq").min().over(key))
    if inner["block"].n_unique() < _FEWEST:
        return None
    gone = inner.group_by(key).agg(pl.col("size_bytes").sum(), pl.col("end").first(), pl.col("begin").first())
    less = np.zeros(len(curve.seq) + 1, np.int64)
    at = np.searchsorted(curve.seq, gone["end"].to_numpy(), side="right"), np.searchsorted(curve.seq, gone["begin"].to_numpy() - 1, side="left")
    some = at[0] < at[1]
    np.add.at(less, at[0][some], -gone["size_bytes"].to_numpy()[some])
    np.add.at(less, at[1][some], gone["size_bytes"].to_numpy()[some])
    then, top = curve.live + np.cumsum(less)[:-1], int(curve.live.argmax())
    live = mine.filter((pl.col("alloc_seq") <= int(curve.seq[top])) & (pl.col("free_seq") > int(curve.seq[top])))
    spent = _forward_us(capture, forward, places)
    return Saving(path, inner["block"].n_unique(), int(curve.live[top]), max(int(then.max()), curve.start[0]), int(live["size_bytes"].sum()), spent)


def _numbered(layers: pl.Series) -> pl.DataFrame:
    """Of each layer the numbered modules that it lies in: ``path`` of their list, ``block`` the number."""
    rows = [
        (layer, ".".join(parts[:i]), int(part))
        for layer in layers.drop_nulls().unique().to_list()
        for parts in [layer.split(".")]
        for i, part in enumerate(parts)
        if part.isdigit()
    ]
    return pl.DataFrame(rows, schema={"layer": pl.String, "path": pl.String, "block": pl.Int64}, orient="row")


def _forward_us(capture: Capture, forward: pl.DataFrame, places: pl.DataFrame) -> float | None:
    """Time of the blocks' forward in the last step."""
    last = forward.filter(pl.col("step").fill_null(-1) == pl.col("step").fill_null(-1).max())
    timed = last.join(capture.tables["events"].select("seq", "time_us"), on="seq").sort("seq").with_columns(gap=(pl.col("time_us").shift(-1) - pl.col("time_us")).over("span"))
    spent = timed.filter(pl.col("layer").is_in(places["layer"].implode()))["gap"].drop_nulls()
    return float(spent.sum()) if len(spent) else None
