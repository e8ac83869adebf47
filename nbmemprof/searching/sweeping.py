"""``mp.sweep``: the same step, or the same model by formula, over several settings."""

from __future__ import annotations

import inspect
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import polars as pl

from nbmemprof.allocator import conf as settings
from nbmemprof.allocator.replay import replay
from nbmemprof.analyses.breakdown import breakdown
from nbmemprof.analyses.summary import summary
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction.catalogue import GPU, find
from nbmemprof.prediction.closed_forms import QUANTIZED, Setting, model_table, total_bytes
from nbmemprof.prediction.run import predict, quiet
from nbmemprof.units import parse_bytes

__all__ = ["PRUNING", "sweep"]

PRUNING = "Pruning single weights saves no memory: zeros take as much room as other numbers. Only whole rows, heads or layers do, and then the model is a smaller one."
_BY_FORMULA = ("quantize", "tp", "fsdp")
_SHARED = {"tp": ("weights", "gradients", "optimizer_state"), "fsdp": ("weights", "gradients", "optimizer_state")}


def sweep(fn: Any, *, device: str | GPU | Sequence[str | GPU] = "H200", limit_bytes: int | str | None = None, capacity_bytes: int | str | None = None, **axes: Any) -> pl.DataFrame:
    """What would each combination of these settings take?

    Parameters
    ----------
    fn
        A function that takes some of the axes by name (``fn(batch=…, seq=…, dtype=…, checkpointing=…, optimizer=…)``) and does two or more full steps, or two
        parts of them: each combination is predicted by a fake run. Or a Hugging Face config: each combination is computed by formula.
    device
        Whose rules hold, and where it must fit. Several are an axis of their own.
    limit_bytes, capacity_bytes
        Torch's own limit, and the card; None: no limit, the catalogue's card.
    axes
        Names and their values: a list each, or one value. ``conf`` is the allocator's configuration (the same requests served again). ``quantize`` (``int8 fp8 int4 nf4``), ``tp`` and
        ``fsdp`` (ranks) are computed by formula from the prediction's categories, where ``fn`` does not take them itself; such rows are ``modelled``. ``pruning`` is answered with a word.

    Returns
    -------
    One row a combination: the axes, then ``peak_allocated_bytes peak_reserved_bytes room_bytes fits headroom_bytes seconds origin how``. Reserved is null where a formula answered.
    ``fits``: whether reserved (allocated by formula) is within ``room_bytes``, what the allocator can have; requests that a flush would save are served.

    Raises
    ------
    NbmemprofError
        For an axis that nothing takes. An error of ``fn`` is raised as it is.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> def steps(batch):
    ...     model = torch.nn.Linear(1000, 1000, device="cuda")
    ...     for _ in range(2):
    ...         model(torch.ones(batch, 1000, device="cuda")).sum().backward()
    >>> mp.sweep(steps, batch=[64, 128]).select("batch", "fits").rows()
    [(64, True), (128, True)]
    """
    if isinstance(device, (list, tuple)):
        if not device:
            raise NbmemprofError("device=[] has no value. Give at least one GPU, like device=['T4', 'H200'].")
        several = [(find(one), sweep(fn, device=one, limit_bytes=limit_bytes, capacity_bytes=capacity_bytes, **axes)) for one in [find(one) for one in device]]
        return pl.concat([frame.select(pl.lit(one.name).alias("device"), pl.all()) for one, frame in several], how="vertical_relaxed")
    gpu = find(device)  # type: ignore[arg-type]  # a sequence went above
    axes = {name: list(values) if isinstance(values, (list, tuple, range)) else [values] for name, values in axes.items()}
    pruned = axes.pop("pruning", None) or axes.pop("prune", None)
    if not axes:
        raise NbmemprofError(
            "sweep needs something to vary" + (f". {PRUNING}" if pruned else ": sweep(step, batch=[8, 16], conf=['', 'expandable_segments:True']).")
        )
    for name, values in axes.items():
        if not values:
            raise NbmemprofError(f"{name}=[] has no value. Give at least one, or leave {name} out.")
    for conf in axes.get("conf", []):
        settings.parse(conf)
    limit, capacity = (None if size is None else parse_bytes(size) for size in (limit_bytes, capacity_bytes))
    rows = list((_predicted if callable(fn) else _computed)(fn, gpu, limit, capacity or gpu.capacity_bytes, axes))
    if pruned is not None:
        rows = [row | {"how": f"{row['how']}. {PRUNING}"} for row in rows]
    return pl.DataFrame([row | {name: _plain(row[name]) for name in axes if name in row} for row in rows], infer_schema_length=None)


def _plain(value: Any) -> Any:
    """A value of an axis as a frame can hold and write it: numbers and text stay, ``torch.bfloat16`` is ``"bfloat16"``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__name__", None) or str(value).removeprefix("torch.")


def _combinations(axes: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _row(
    axes: dict[str, Any], allocated: int, reserved: int | None, room: int, seconds: float, origin: str, how: str, fits: bool | None = None
) -> dict[str, Any]:
    needed = reserved if reserved is not None else allocated
    return axes | {
        "peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved, "room_bytes": room, "fits": needed <= room if fits is None else fits, "headroom_bytes": room - needed,
        "seconds": seconds, "origin": origin, "how": how,
    }  # fmt: skip


# ---------------------------------------------------------------------- by formula
def _computed(config: Any, gpu: GPU, limit: int | None, capacity: int, axes: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    known = set(Setting.__dataclass_fields__)
    if stray := sorted(set(axes) - known):
        raise NbmemprofError(f"A model by formula has no setting {stray[0]!r}. It has: {', '.join(sorted(known))}.")
    room = min(size for size in (limit, capacity - (gpu.outside.second_blas << 20)) if size is not None)
    for one in _combinations(axes):
        begin = time.perf_counter()
        total = total_bytes(model_table(config, device=gpu, **one))
        how = "closed form of the config" + (", one rank's share" if one.get("tp", 1) > 1 or one.get("fsdp", 1) > 1 else "")
        yield _row(one, total, None, room, time.perf_counter() - begin, "modelled", how)


# ---------------------------------------------------------------------- by fake runs
def _predicted(fn: Callable[..., Any], gpu: GPU, limit: int | None, capacity: int, axes: dict[str, list[Any]]) -> Iterator[dict[str, Any]]:
    parameters = inspect.signature(fn).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = {name for name in axes if name in parameters or (takes_all and name not in (*_BY_FORMULA, "conf"))}
    formulas = [name for name in axes if name in _BY_FORMULA and name not in own]
    if stray := sorted(set(axes) - own - set(formulas) - {"conf"}):
        raise NbmemprofError(
            f"The function takes no {stray[0]!r}, and no formula knows it. It takes: {', '.join(parameters) or 'nothing'}; by formula: {', '.join(_BY_FORMULA)}; conf."
        )
    confs = axes.get("conf", [""]) if "conf" not in own else [""]
    for given in _combinations({name: axes[name] for name in axes if name in own}):
        begin = time.perf_counter()
        with quiet():  # what it prints would be shown for each combination
            capture = predict(fn, device=gpu, capacity_bytes=1 << 50, conf=confs[0], **given)
        seconds = time.perf_counter() - begin
        room = capacity - int(capture.meta.get("outside_bytes") or 0)
        room = min(room, limit) if limit is not None else room
        for conf in confs:
            made = capture if conf == confs[0] else replay(capture, conf)
            for ranks in _combinations({name: axes[name] for name in formulas}):
                # in the order of the axes as they were given
                told = {name: ({"conf": conf} | given | ranks)[name] for name in axes}
                yield _shared(told, ranks, made, room, seconds) if any(v not in (None, 1) for v in ranks.values()) else _whole(told, made, conf, room, seconds)


def _whole(axes: dict[str, Any], capture: Capture, conf: str, room: int, seconds: float) -> dict[str, Any]:
    peak = summary(capture).sort("peak_allocated_bytes", descending=True).row(0, named=True)
    fits = None
    if peak["peak_reserved_bytes"] > room >= peak["peak_allocated_bytes"]:  # a flush may save it
        fits = int(summary(replay(capture, conf, limit_bytes=room))["ooms"].sum()) == 0
    return _row(axes, peak["peak_allocated_bytes"], peak["peak_reserved_bytes"], room, seconds, "predicted", "fake run", fits)


def _shared(axes: dict[str, Any], ranks: dict[str, Any], capture: Capture, room: int, seconds: float) -> dict[str, Any]:
    """What is left of the predicted peak on one rank, or with frozen weights quantized."""
    parts = dict(breakdown(capture).select(pl.col("category").cast(pl.String), "size_bytes").iter_rows())
    said = []
    kind = ranks.get("quantize")
    if kind is not None:
        if kind not in QUANTIZED:
            raise NbmemprofError(f"quantize={kind!r} is not known here. It is one of: {', '.join(QUANTIZED)}. {PRUNING}")
        parts["weights"] = parts.get("weights", 0) * QUANTIZED[kind] / 2
        said.append(f"weights as {kind}, from 16 bits; their gradients and states are left as predicted")
    for name, names in _SHARED.items():
        n = ranks.get(name) or 1
        if n > 1:
            whole = parts.get("weights", 0)
            parts |= {part: parts.get(part, 0) / n for part in names}
            if name == "fsdp":
                parts["weights"] += min(whole, 2 * _largest_layer(capture))
                said.append(f"ZeRO-3 over {n}: weights, gradients, states / {n}, the two largest layers gathered")
            else:
                parts["activations"] = parts.get("activations", 0) * (10 + 24 / n) / 34
                said.append(f"tensor parallel over {n}: weights, gradients, states / {n}, activations · (10 + 24/{n}) / 34")
    return _row(axes, round(sum(parts.values())), None, room, seconds, "modelled", "; ".join(said) + "; communication buffers not included")


def _largest_layer(capture: Capture) -> int:
    """Bytes of the weights of the layer that has most of them."""
    weights = capture.allocations.filter(pl.col("category").cast(pl.String) == "weights")
    layers = weights.group_by(pl.col("layer").cast(pl.String).str.extract(r"^(.*?\.\d+)(?:\.|$)")).agg(pl.col("size_bytes").sum())
    return int(layers["size_bytes"].max() or 0)  # type: ignore[arg-type]
