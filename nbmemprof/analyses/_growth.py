"""Growth over a trace: which stacks keep something in iteration after iteration, and which only look like it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import polars as pl

from nbmemprof import schema
from nbmemprof.capture import Capture

__all__ = ["HEAP", "LEAK", "Clock", "behaviour", "clock_of", "keyed"]

HEAP = ["rank", "device", "kind"]
MIN_HITS = 3  # two iterations can't be told from a warm-up
MIN_HITS_WITHOUT_FRAMES = 10

# Frames that stand for one call of torch: a loop inside it goes over layers or parameters, not over iterations.
_ONE_CALL = ("_call_impl", "_wrapped_call_impl", "_apply", "load_state_dict", "_engine_run_backward", "_init_group", "from_pretrained", "__init__")
_CALLS = ("_call_impl", "_wrapped_call_impl", "inner")
# Frames of code that builds what is meant to stay.
_BUILDS = ("__init__", "_apply", "convert", "load_state_dict", "_init_group", "from_pretrained", "reset_parameters", "_init_weights")


@dataclass(frozen=True)
class Clock:
    """The iterations of one heap: the seq at which each begins, and how they were found."""

    bounds: pl.Series
    period: float
    stop: int
    how: str
    over_layers: bool = False  # its rounds lie inside one call of a module

    @property
    def count(self) -> int:
        """Number of iterations seen."""
        return len(self.bounds)


# what a model and its optimizer keep, one a parameter
_STAY = ("weights", "buffers", "gradients", "optimizer_state", "workspace")


def keyed(allocations: pl.DataFrame) -> pl.DataFrame:
    """Add ``key``: the stack, or where none was recorded the requested size (negative)."""
    return allocations.with_columns(key=pl.coalesce(pl.col("stack_id").cast(pl.Int64), -1 - pl.col("requested_bytes"), pl.lit(-1)))


def _by_key(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.sort("key", maintain_order=True) if rows.get_column("alloc_seq").is_sorted() else rows.sort("key", "alloc_seq")


def _beats(rows: pl.DataFrame) -> pl.DataFrame:
    """Allocations that find nothing else of their stack alive: where a round begins."""
    rows = _by_key(rows)
    group = (pl.col("key") != pl.col("key").shift()).fill_null(value=False).cum_sum().cast(pl.Int64) * (1 << 40)
    freed = (group + pl.col("free_seq")).fill_null(-1).cum_max().shift(fill_value=-1)  # of an earlier stack: below this one's
    return rows.filter(freed < group + pl.col("alloc_seq"))


def clock_of(born: pl.DataFrame, end: int, marks: pl.DataFrame, stacks: _Stacks) -> Clock | None:
    """When did the iterations begin? Step marks say so; else the stacks that come round evenly, to the end.

    Of the numbers of rounds that the stacks have, the one with most allocations behind it, unless its rounds lie inside
    one call of a module (layers). Stacks that only keep count where there is nothing else.
    """
    start = int(born.get_column("alloc_seq").min())  # type: ignore[arg-type]
    first = pl.when(pl.col("seq").is_null() & (pl.col("time_us") <= 0)).then(start).otherwise(pl.col("seq") + 1)  # a mark names the last event before it
    steps = marks.filter(pl.col("kind") == "step").select(first).to_series().drop_nulls().unique().sort()
    steps = steps.filter(steps <= end)
    if len(steps) >= MIN_HITS:
        return Clock(steps, (end - steps[0]) / len(steps), end, "step marks")
    rows = born.select("key", "alloc_seq", "free_seq")
    freed = rows.filter(pl.col("free_seq").is_not_null())
    return _likeliest(_beats(freed), born, start, end, stacks) or _likeliest(_by_key(rows), born, start, end, stacks)


def _likeliest(beats: pl.DataFrame, born: pl.DataFrame, start: int, end: int, stacks: _Stacks) -> Clock | None:
    seq = pl.col("alloc_seq")
    per_key = beats.group_by("key").agg(n=pl.len().cast(pl.Int64), first=seq.min(), last=seq.max(), mean=seq.mean(), std=seq.std(ddof=0))
    reach = pl.col("last") - pl.col("first")
    gap = reach / (pl.col("n") - 1)
    slack = pl.when(pl.col("n") < 6).then(0.25).otherwise(0.12)
    spread = (reach**2 * (pl.col("n") + 1) / (pl.col("n") - 1) / 12).sqrt()
    regular = per_key.filter(
        (pl.col("n") >= MIN_HITS)
        & ((pl.col("last") >= end - 1.5 * gap) | (reach >= 0.5 * (end - start)))
        & ((pl.col("mean") - (pl.col("first") + pl.col("last")) / 2).abs() <= slack * reach)
        & pl.col("std").is_between((1 - 2 * slack) * spread, (1 + 2 * slack) * spread)
    )
    if (regular.get_column("key") >= 0).any():
        regular = regular.filter(pl.col("key") >= 0)  # sizes tell little where stacks were recorded
    choices = []
    weight = {int(n): int(n) * int(k) for n, k in regular.get_column("n").value_counts().iter_rows()}
    for count in sorted(weight, key=lambda n: (-sum(weight.get(n + d, 0) for d in (-1, 0, 1)), -weight[n], -n))[:6]:
        key, first, last = regular.filter(pl.col("n") == count).sort("first", "key").select("key", "first", "last").row(0)
        bounds = beats.filter(pl.col("key") == key).get_column("alloc_seq")
        period = (last - first) / (count - 1)
        choices.append(Clock(bounds, period, min(end, int(last + period)), "stacks that come round"))
        if not _goes_over_layers(born, bounds, key, stacks):
            return choices[-1]
    if not choices:
        return None
    calls = stacks.first_of_calls(choices[0].bounds)
    if len(calls) >= MIN_HITS:
        period = float(calls[-1] - calls[0]) / (len(calls) - 1)
        return Clock(calls, period, min(end, int(calls[-1] + period)), "calls of a module")
    return replace(choices[0], over_layers=True)


def _goes_over_layers(born: pl.DataFrame, bounds: pl.Series, key: int, stacks: _Stacks) -> bool:
    """Whether rounds from the middle of the trace lie inside one call of a module."""
    path = stacks.path(key) if key >= 0 else []
    level = next((i for i, frame in enumerate(path) if _is_one_call(frame)), None)
    if level is None or stacks.calls(bounds) >= max(MIN_HITS, 0.75 * len(bounds)):
        return False
    inside, middle = stacks.inside(path[: level + 1]), len(bounds) // 2
    rounds = [
        born.filter(pl.col("alloc_seq").is_between(*bounds[i : i + 2])).get_column("stack_id").drop_nulls()
        for i in range(max(0, middle - 2), min(len(bounds) - 1, middle + 1))
    ]
    return 2 * sum(bool(ids.is_in(inside.implode()).all()) for ids in rounds) > len(rounds)


def _survivors(born: pl.DataFrame, clock: Clock) -> pl.DataFrame:
    """Live blocks with the iteration (1 is the first) in which they were made; 0 is just before it, -1 long before."""
    live = born.filter(pl.col("free_seq").is_null())
    iteration = clock.bounds.search_sorted(live.get_column("alloc_seq"), side="right").cast(pl.Int64)
    early = clock.bounds[0] - 2 * clock.period  # a first iteration has more to do
    return live.with_columns(it=iteration).with_columns(it=pl.when(pl.col("alloc_seq") < early).then(-1).otherwise(pl.col("it")))


def _candidates(live: pl.DataFrame, clock: Clock) -> pl.DataFrame:
    """Keys with something kept in three iterations or more, up to the end, and not ever more slowly."""
    it = pl.col("it")
    span = live.filter(it >= 0).with_columns(it_first=it.min().over("key"))
    late = it > (pl.col("it_first") + clock.count) / 2
    per = span.group_by("key").agg(hits=it.n_unique(), it_first=it.min(), it_last=it.max(), kept=pl.len(), late=late.sum(), stack_id=pl.col("stack_id").first())
    gap = (pl.col("it_last") - pl.col("it_first")) / (pl.col("hits") - 1)
    early = pl.col("kept") - pl.col("late")
    slower = (pl.col("late") < 0.6 * early) & ((early.cast(pl.Int64) - pl.col("late").cast(pl.Int64)) > 2 * pl.col("kept").sqrt())
    return (
        per.filter(pl.col("hits") >= MIN_HITS)
        .with_columns(gap=gap)
        .filter((clock.count - pl.col("it_last") <= 2 * pl.col("gap") + 1) & (pl.col("it_last") > (pl.col("it_first") + clock.count) / 2) & ~slower)
        .sort("key")
    )


def _still_grows(mine: pl.DataFrame, kept: pl.DataFrame, clock: Clock) -> bool:
    """Whether what was kept is more than a window that moves, or a list that is emptied now and then."""
    freed = mine.filter(pl.col("free_seq").is_not_null()).with_columns(life=pl.col("free_seq") - pl.col("alloc_seq"))
    if freed.is_empty():
        return True
    t0 = int(kept.get_column("alloc_seq").min())  # type: ignore[arg-type]
    if freed.filter(pl.col("life") >= 0.5 * (clock.stop - t0)).height > 0.5 * kept.height:
        return False
    long = freed.filter(pl.col("life") >= 2 * clock.period)
    for share in (0.5, 0.75):
        since = t0 + share * (clock.stop - t0)
        gained = kept.filter(pl.col("alloc_seq") > since).height
        if gained and long.filter(pl.col("free_seq") > since).height > 0.5 * gained:
            return False
    return True


def _apart(kept: pl.DataFrame) -> pl.DataFrame:
    """Take out what came once: a workspace made with the first block, or tensors still in use in the last iteration."""
    counts = kept.filter(pl.col("it") >= 0).group_by("it").len()
    usual = counts.get_column("len").median()
    first, last = counts.get_column("it").min(), counts.get_column("it").max()
    ends = pl.col("it").is_in([-1, first, last])
    more = set(counts.filter(pl.col("len") > usual).get_column("it")) | {-1}
    usual_sizes = kept.filter(~pl.col("it").is_in(sorted(more & {-1, first, last}))).get_column("size_bytes").unique()
    once = ends & pl.col("it").is_in(sorted(more)) & ~pl.col("size_bytes").is_in(usual_sizes.implode())
    return kept.filter(~once).with_columns(it=pl.max_horizontal("it", 0))


class _Stacks:
    """Outer paths of stacks, asked for a few of them only; and which call of which module an event fell into, where that was seen."""

    def __init__(self, stacks: pl.DataFrame, contexts: pl.DataFrame | None = None) -> None:
        self.stacks = stacks
        self._contexts = contexts
        self._forwards: pl.DataFrame | None = None
        self._outer: pl.DataFrame | None = None
        self._inside: dict[tuple[Any, ...], pl.Series] = {}

    @property
    def outer(self) -> pl.DataFrame:
        """Frames with ``level``: 0 is the outermost."""
        if self._outer is None:
            depth = pl.col("depth").cast(pl.Int32)
            self._outer = self.stacks.select("stack_id", "filename", "line", "function", level=depth.max().over("stack_id") - depth)
        return self._outer

    def calls(self, seqs: pl.Series) -> int:
        """In how many forward passes one and the same module made these; 0 where none was seen."""
        return len(self.first_of_calls(seqs))

    def first_of_calls(self, seqs: pl.Series) -> pl.Series:
        """The first of these events in each forward pass, of the module that has most passes."""
        if self._forwards is None:
            known = self._contexts if self._contexts is not None else schema.empty("contexts")
            self._forwards = known.filter(pl.col("phase").cast(pl.String) == "forward").select("seq", "span", "layer")
        mine = self._forwards.filter(pl.col("seq").is_in(seqs.implode())).group_by("layer", "span").agg(pl.col("seq").min())
        many = mine.group_by("layer").agg(pl.len(), first=pl.col("seq").min()).sort("len", "first", descending=[True, False]).head(1)
        return mine.join(many.select("layer"), on="layer", how="semi").get_column("seq").sort()

    def path(self, stack_id: int) -> list[tuple[str, int, str]]:
        """Frames of one stack, outermost first."""
        return self.stacks.filter(pl.col("stack_id") == stack_id).sort("depth", descending=True).select("filename", "line", "function").rows()

    def inside(self, prefix: list[tuple[str, int, str]]) -> pl.Series:
        """Stacks that begin with these outer frames."""
        at = tuple(prefix)
        if at not in self._inside:
            wanted = pl.DataFrame(prefix, schema={"filename": pl.String, "line": pl.Int64, "function": pl.String}, orient="row").with_columns(
                level=pl.int_range(pl.len(), dtype=pl.Int32)
            )
            same = self.outer.join(wanted, on=["level", "filename", "line", "function"], nulls_equal=True).group_by("stack_id").len()
            self._inside[at] = same.filter(pl.col("len") == len(prefix)).get_column("stack_id")
        return self._inside[at]


def _is_one_call(frame: tuple[str, int, str]) -> bool:
    return frame[2] in _ONE_CALL or "torch/optim/" in (frame[0] or "")


def _in_one_call(path: list[tuple[str, int, str]], window: pl.DataFrame, stacks: _Stacks, hits: int) -> bool:
    """Whether all that happened meanwhile lies inside one call of a module, an optimizer or a constructor.

    Then the blocks belong to its layers or parameters: a forward pass stopped half-way is no leak.
    """
    level = next((i for i, frame in enumerate(path) if _is_one_call(frame)), None)
    if level is None:
        return False
    ids = window.get_column("stack_id").drop_nulls().unique()
    inside = stacks.inside(path[: level + 1])
    if len(ids) > ids.is_in(inside.implode()).sum():
        return False
    hook = any(
        path[i][2] in _CALLS and path[i + 1][2] not in ("forward", "_slow_forward", *_CALLS) and not _is_one_call(path[i + 1]) for i in range(len(path) - 1)
    )
    return not (hook or _calls_repeat(path, window, ids, stacks, level, hits))


def _calls_repeat(path: list[tuple[str, int, str]], window: pl.DataFrame, ids: pl.Series, stacks: _Stacks, level: int, hits: int) -> bool:
    """Whether each line of the called function came anew in every iteration: then the call itself was repeated."""
    frames = stacks.outer.filter(pl.col("stack_id").is_in(ids.implode()))
    by_level = frames.group_by("level").agg(
        stacks=pl.len(), lines=pl.struct("filename", "line", "function").n_unique(), places=pl.struct("filename", "function").n_unique()
    )
    split = by_level.filter((pl.col("lines") > 1) | (pl.col("stacks") < len(ids))).sort("level").head(1)
    if split.is_empty():
        return False
    at, reached, lines, places = split.row(0)
    calls = sum(path[i][2] in ("_call_impl", "__init__") for i in range(level, min(at, len(path))))
    if calls > 1 or places > 1 or lines < 2 or reached < len(ids):
        return False
    line = frames.filter(pl.col("level") == at).select("stack_id", "line")
    order = window.drop_nulls("stack_id").sort("alloc_seq").join(line, on="stack_id", maintain_order="left").get_column("line")
    runs = order.rle().struct.field("value").value_counts(name="runs").get_column("runs")
    return int(runs.min()) >= max(2, hits - 1)  # type: ignore[arg-type]


def _confidence(hits: int, kept: pl.DataFrame, temporaries: bool, framed: bool, truncated: bool) -> float:
    gaps = kept.get_column("it").unique().sort().diff().drop_nulls()
    uneven = float(gaps.std() or 0.0) / max(1e-9, float(gaps.mean() or 1.0)) if len(gaps) > 1 else 0.0  # type: ignore[arg-type]
    value = (1 - 0.5 ** (hits - 1)) / (1 + 0.5 * uneven)
    for holds, factor in ((temporaries, 0.7), (framed, 0.5), (not truncated, 0.8)):
        value *= 1.0 if holds else factor
    return round(value, 3)


LEAK = {
    "key": pl.Int64,
    "stack_id": pl.UInt32,
    "leak_bytes": pl.Int64,
    "leak_count": pl.Int64,
    "bytes_per_iteration": pl.Int64,
    "iterations": pl.Int64,
    "confidence": pl.Float64,
    "evidence": pl.String,
}


def _grown(part: pl.DataFrame, born: pl.DataFrame, clock: Clock, stacks: _Stacks, truncated: bool) -> pl.DataFrame:
    """Rows of what grows in one heap."""
    live = _survivors(born, clock)
    rows: list[dict[str, Any]] = []
    framed = stacks.stacks.height > 0
    for c in _candidates(live, clock).iter_rows(named=True):
        if c["stack_id"] is None and framed is False and c["hits"] < MIN_HITS_WITHOUT_FRAMES:
            continue
        mine = born.filter(pl.col("key") == c["key"])
        kept = _apart(live.filter(pl.col("key") == c["key"]))
        if kept.get_column("it").n_unique() < MIN_HITS or not _still_grows(mine, kept, clock):
            continue
        lo, hi = kept.get_column("alloc_seq").min(), kept.get_column("alloc_seq").max()
        window = born.filter(pl.col("alloc_seq").is_between(lo, hi))
        temporaries = window.filter(pl.col("free_seq") <= hi).height >= c["hits"] - 1
        path = [] if c["stack_id"] is None else stacks.path(c["stack_id"])
        if not temporaries and any(f[2] in _BUILDS or "torch/optim/" in (f[0] or "") for f in path):
            continue
        if stacks.calls(kept.get_column("alloc_seq")) < MIN_HITS and _in_one_call(path, window, stacks, c["hits"]):
            continue
        rows.append(_row(c, mine, kept, part, clock, {"temporaries": temporaries, "framed": bool(path), "truncated": truncated}))
    return pl.DataFrame(rows, schema=LEAK)


def _usual_gap(its: pl.Series) -> float:
    """Iterations from one kept block to the next: the usual number, or where there is none the mean."""
    seen = its.unique().sort()
    gaps = seen.diff().drop_nulls()
    usual, mean = float(gaps.median()), float(gaps.mean())  # type: ignore[arg-type]
    return usual if abs(usual - mean) * len(gaps) <= 1.5 else mean


def _row(c: dict[str, Any], mine: pl.DataFrame, kept: pl.DataFrame, part: pl.DataFrame, clock: Clock, known: dict[str, bool]) -> dict[str, Any]:
    its = kept.get_column("it")
    hits = its.n_unique()
    gap = _usual_gap(its)
    older = part.filter((pl.col("key") == c["key"]) & pl.col("alloc_seq").is_null() & pl.col("free_seq").is_null())
    older = older.filter(pl.col("size_bytes").is_in(kept.get_column("size_bytes").unique().implode()))
    size = int(kept.get_column("size_bytes").sum())
    lost = older if known["truncated"] else older.head(0)  # a window's older blocks were told by the window before
    half = int((its > (its.min() + clock.count) / 2).sum())  # type: ignore[operator]
    text = f"{kept.height} of {mine.height} blocks made are kept, in {hits} of {max(hits, clock.count)} iterations ({clock.how}); {kept.height - half} in the first half, {half} in the second"
    if older.height:
        text += f"; {older.height} more are older than the trace"
    if not known["framed"]:
        text += "; no frames: told by size only"
    if not known["temporaries"]:
        text += "; nothing else came and went meanwhile"
    if known["truncated"]:
        text += "; the history is truncated"
    return {
        "key": c["key"], "stack_id": c["stack_id"], "leak_bytes": size + int(lost.get_column("size_bytes").sum()), "leak_count": kept.height + lost.height,
        "bytes_per_iteration": round(size / hits / max(gap, 1e-9)), "iterations": max(hits, clock.count), "confidence": _confidence(hits, kept, **known), "evidence": text,
    }  # fmt: skip


def _is_constant(values: pl.Series) -> bool:
    nulls = values.null_count()
    return nulls == len(values) or (nulls == 0 and values.to_physical().min() == values.to_physical().max())


def behaviour(capture: Capture) -> list[tuple[dict[str, Any], pl.DataFrame, Clock | None, pl.DataFrame]]:
    """For each heap: its identity, its keyed allocations, its iterations (None: none were seen) and what grows in it."""
    needed = [*HEAP, "alloc_seq", "free_seq", "stack_id", "requested_bytes", "size_bytes"]
    rows = keyed(capture.tables["allocations"].select(*needed, pl.col("category").cast(pl.String).is_in(_STAY).fill_null(value=False).alias("_stays")))
    truncated = any(str(w).startswith("history truncated") for w in capture.meta.get("warnings") or ())
    stacks, marks = _Stacks(capture.tables["stacks"], capture.tables["contexts"]), capture.tables["marks"]
    found = []
    names = rows.select(HEAP).head(1) if all(_is_constant(rows.get_column(n)) for n in HEAP) else rows.select(HEAP).unique()
    for identity in names.sort(*HEAP, nulls_last=True).iter_rows(named=True):
        part = rows if names.height == 1 else rows.filter(pl.all_horizontal(pl.col(n).eq_missing(pl.lit(v)) for n, v in identity.items()))
        born = part.filter(pl.col("alloc_seq").is_not_null())
        clock, grown = None, pl.DataFrame(schema=LEAK)
        if born.height:
            end = max(int(v) for v in (born.get_column("alloc_seq").max(), part.get_column("free_seq").max()) if v is not None)  # type: ignore[arg-type]
            its = marks.filter(
                pl.col("rank").eq_missing(pl.lit(identity["rank"])) & pl.col("device").eq_missing(pl.lit(identity["device"])) | pl.col("device").is_null()
            )
            clock = clock_of(born, end, its, stacks)
            if clock is not None:
                by_steps, nameless = clock.how == "step marks", pl.col("key") < 0
                kept = pl.lit(by_steps) | ~(pl.col("_stays") & nameless)  # as many of one size as the model has layers are no iterations
                grown = _grown(part.filter(kept), born.filter(kept), clock, stacks, truncated)
        found.append((identity, part.drop("_stays"), clock, grown))
    return found
