"""Bytes over time."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._sites import with_site
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["timeline"]

Array = npt.NDArray[Any]
BY = {
    "category": "category",
    "site": "site",
    "layer": "layer",
    "phase": "phase",
    "pool": "pool_id",
    "stream": "stream",
    "kind": "kind",
    "rank": "rank",
    "total": "",
}
OTHER = "(other)"
NOT_KNOWN = "(not known)"


def timeline(
    capture: Capture,
    by: str = "category",
    max_points: int = 2000,
    *,
    top: int = 10,
    device: int | None = None,
    start_us: float | None = None,
    end_us: float | None = None,
) -> pl.DataFrame:
    """How did the bytes in use change over time?

    Reduced without losing a peak: of each stretch of events the highest and the lowest sum and the last
    one are kept, so the maximum is exact, and so is every value shown; a short enough window shows every event.

    Parameters
    ----------
    capture
        Any capture.
    by
        ``category site layer phase pool stream kind rank``, or ``total`` for the series ``live``, ``requested``
        (pending counted) and ``reserved``.
    max_points
        At most this many rows a device.
    top
        Series with the most bytes; the rest is ``(other)``.
    device
        Only this one.
    start_us, end_us
        Window in µs from the capture's start.

    Returns
    -------
    Long frame ``device rank kind seq time_us series size_bytes origin``, a row a moment and series; the
    first moment of a device (null ``seq``) is before its first event. Sums over series are live block bytes.

    Raises
    ------
    NbmemprofError
        For a ``by`` that does not exist, or fewer than 8 ``max_points``.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> device = mp.allocator.Device()
    >>> blocks = [device.malloc("1MiB") for _ in range(20)]
    >>> for block in blocks[::2]:
    ...     device.free(block)
    >>> capture = mp.load(device.snapshot())
    >>> mp.timeline(capture, by="total").filter(series="live")["size_bytes"].max()
    20971520
    """
    if by not in BY:
        raise NbmemprofError(f"by={by!r} is not a way to split the timeline. Use one of: {', '.join(BY)}.")
    if max_points < 8:
        raise NbmemprofError(f"max_points={max_points} is too few to draw. Use 8 or more.")
    parts = [_device(capture, curve, by, max_points, top, start_us, end_us) for curve in heap.curves(capture) if device is None or curve.key[1] == device]
    columns = {"device": pl.Int64, "rank": pl.Int64, "kind": pl.String, "seq": pl.Int64, "time_us": pl.Float64, "series": pl.String, "size_bytes": pl.Int64}
    made = pl.concat(parts) if parts else pl.DataFrame(schema=columns)
    return made.with_columns(pl.lit(capture.meta["origin"]).alias("origin"))


def _device(capture: Capture, curve: heap.Curve, by: str, max_points: int, top: int, start_us: float | None, end_us: float | None) -> pl.DataFrame:
    low = 0 if start_us is None else int(np.searchsorted(curve.time_us, start_us, side="left"))
    high = len(curve.seq) if end_us is None else int(np.searchsorted(curve.time_us, end_us, side="right"))
    if by == "total":
        names = ["live", "requested"] + (["reserved"] if curve.key[2] == "device" else [])
        at = _keep(curve.live, low, high, max_points // len(names) - 1)
        columns = [np.concatenate([[start], values[at]]) for start, values in zip(curve.start, (curve.live, curve.requested, curve.reserved), strict=True)][
            : len(names)
        ]
        values = np.stack(columns, axis=1)
    else:
        names, rows, group = _series(capture, curve, by, top)
        at = _keep(curve.live, low, high, max_points // max(len(names), 1) - 1)
        values = _sums(curve, rows, group, len(names), at)
    opening = start_us is None or low == 0
    keep = slice(None) if opening else slice(1, None)
    seq = pl.Series("seq", [None, *curve.seq[at].tolist()][keep], dtype=pl.Int64)
    first = float(curve.time_us[0]) if len(curve.time_us) and np.isfinite(curve.time_us[0]) else None
    time = pl.Series("time_us", [first, *(t if np.isfinite(t) else None for t in curve.time_us[at].tolist())][keep], dtype=pl.Float64)
    values = values[keep]
    moments, series = len(seq), len(names)
    return pl.DataFrame(
        {
            "device": pl.Series([curve.key[1]], dtype=pl.Int64).new_from_index(0, moments * series), "rank": pl.Series([curve.key[0]], dtype=pl.Int64).new_from_index(0, moments * series),
            "kind": pl.Series([curve.key[2]], dtype=pl.String).new_from_index(0, moments * series),
            "seq": seq.gather(np.repeat(np.arange(moments), series)), "time_us": time.gather(np.repeat(np.arange(moments), series)),
            "series": pl.Series(names * moments, dtype=pl.String), "size_bytes": pl.Series(values.reshape(-1).astype(np.int64)),
        }
    )  # fmt: skip


def _keep(live: Array, low: int, high: int, points: int) -> Array:
    """Positions to show: of each stretch the highest, the lowest and the last; all, where they are few."""
    n = high - low
    if n <= max(points, 3):
        return np.arange(low, high)
    stretches = max(points // 3, 1)
    edges = low + (np.arange(stretches + 1) * n) // stretches
    starts = edges[:-1]
    window = live[low:high]
    highest = np.maximum.reduceat(window, starts - low)
    lowest = np.minimum.reduceat(window, starts - low)
    owner = np.repeat(np.arange(stretches), np.diff(edges))
    # the first place in each stretch that has its highest (lowest) value
    place = np.arange(low, high)
    tops, first_top = np.unique(owner[window == highest[owner]], return_index=True)
    lows, first_low = np.unique(owner[window == lowest[owner]], return_index=True)
    del tops, lows
    return np.unique(np.concatenate([place[window == highest[owner]][first_top], place[window == lowest[owner]][first_low], edges[1:] - 1]))


def _series(capture: Capture, curve: heap.Curve, by: str, top: int) -> tuple[list[str], pl.DataFrame, Array]:
    """The names of the series in order of their highest bytes, the device's allocations, and each one's series."""
    rows = capture.tables["allocations"]
    if len(heap.curves(capture)) > 1:
        rows = rows.filter(heap.matches(curve.key))
    if by == "site":
        rows = with_site(rows, capture.tables["stacks"])
    words = rows[BY[by]].cast(pl.String).fill_null(NOT_KNOWN)
    codes = words.cast(pl.Categorical).to_physical().to_numpy().astype(np.int64) if len(words) else np.zeros(0, np.int64)
    used, group = np.unique(codes, return_inverse=True)
    _, example = np.unique(codes, return_index=True)
    names = [words[int(i)] for i in example]
    # order by bytes at the device's peak, then by all bytes ever given
    peak = int(curve.seq[curve.peak]) if curve.peak >= 0 else None
    live = (
        rows.select(
            ((pl.col("alloc_seq").is_null() | (pl.col("alloc_seq") <= peak)) & (pl.col("free_seq").is_null() | (pl.col("free_seq") > peak)))
            if peak is not None
            else pl.col("alloc_seq").is_null()
        )
        .to_series()
        .fill_null(value=False)
        .to_numpy()
    )
    size = rows["size_bytes"].fill_null(0).to_numpy()
    weight = np.bincount(group, weights=size * live, minlength=len(used)) + 1e-9 * np.bincount(group, weights=size, minlength=len(used))
    order = np.argsort(-weight, kind="stable")
    if len(order) > top:
        place = np.full(len(used), top)
        place[order[:top]] = np.arange(top)
        return [names[i] for i in order[:top]] + [OTHER], rows, place[group]
    place = np.empty(len(used), np.int64)
    place[order] = np.arange(len(used))
    return [names[i] for i in order] or [NOT_KNOWN], rows, place[group] if len(group) else group


def _sums(curve: heap.Curve, rows: pl.DataFrame, group: Array, series: int, at: Array) -> Array:
    """Live bytes of each series before the first event and after each kept one."""
    size = rows["size_bytes"].fill_null(0).to_numpy()
    steps = np.zeros((len(at) + 1) * series, np.float64)
    marks = curve.seq[at]
    for column, sign in (("alloc_seq", 1.0), ("free_seq", -1.0)):
        known = rows[column].is_not_null().to_numpy()
        slot = np.searchsorted(marks, rows[column].drop_nulls().to_numpy(), side="left") + 1
        inside = slot <= len(at)
        index = slot[inside] * series + group[known][inside]
        steps += np.bincount(index, weights=sign * size[known][inside], minlength=len(steps))  # exact: below 2^53
        if column == "alloc_seq":
            steps += np.bincount(group[~known], weights=size[~known], minlength=len(steps))
    return steps.reshape(len(at) + 1, series).cumsum(axis=0)
