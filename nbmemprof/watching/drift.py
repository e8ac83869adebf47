"""How fast does it grow, where growth comes in jumps of any size?

A leak may keep a piece of every request or a whole one now and then, small or huge. Then what is held is a walk, and a
line fitted through all of it is off by the few large jumps: it weighs the middle most. What was kept over a stretch is
the difference of its ends, which are noisy. The local level model (Harvey, Forecasting, Structural Time Series Models, 1989,
section 2.3) has both: held = level + noise, the level moves by the drift and by jumps. The data say how large jumps are against the noise
(maximum likelihood); generalised least squares on the differences then gives the line where there are no jumps, the ends where
there is no noise, and an error that knows of both.
"""

from __future__ import annotations

import math

import numpy as np

from nbmemprof.watching.series import Array

__all__ = ["drift"]

# variance that the level gains from one row to the next, against that of the noise in a row
_RATIOS = np.array([1e-9, 1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 1e3])


def drift(parts: list[tuple[Array, Array, Array]]) -> tuple[float, float]:
    """Give the drift that all parts have in common.

    Parameters
    ----------
    parts
        Each a work axis (ascending), what was held least in each stretch, and the load there, whose effect is taken out.

    Returns
    -------
    Bytes a unit of work, and the standard error of the rate: jumps that are still to come are not those that were.
    """
    # what is kept is there in the next stretch too: a row that stands above the next is none of it
    parts = [(x[:-1], np.minimum(y[:-1], y[1:]), load[:-1]) for x, y, load in parts]
    loads = np.concatenate([load for _, _, load in parts])
    most, span = max(float(np.abs(loads).max()), 1e-12), max(float(x[-1] - x[0]) for x, _, _ in parts)
    scale = max(*(float(np.ptp(y)) for _, y, _ in parts), 1e-12)
    loaded = bool(np.ptp(loads) > 0.1 * np.abs(loads).mean())
    squares, determinants, count = 0.0 * _RATIOS[:, None, None], 0.0 * _RATIOS, 0
    for x, y, load in parts:
        work = np.maximum(np.diff(x) / span, 1e-9)
        columns = np.stack([work, *([np.diff(load) / most] if loaded else []), np.diff(y) / scale], axis=1)
        made, logarithm = _whitened(_RATIOS[:, None] * (work / work.mean()), columns)
        squares, determinants, count = squares + made, determinants + logarithm, count + len(work)
    of_x, with_y, of_y = squares[:, :-1, :-1], squares[:, :-1, -1], squares[:, -1, -1]
    inverse = np.linalg.inv(of_x + 1e-12 * np.trace(of_x, axis1=1, axis2=2)[:, None, None] * np.eye(of_x.shape[-1]))
    slopes = np.einsum("kij,kj->ki", inverse, with_y)
    rest = np.maximum(of_y - np.einsum("ki,ki->k", slopes, with_y), 1e-30) / count
    best = int(np.argmin(count * np.log(rest) + determinants))
    return float(slopes[best, 0]) * scale / span, math.sqrt(float(rest[best] * inverse[best, 0, 0])) * scale / span


def _whitened(jumps: Array, columns: Array) -> tuple[Array, Array]:
    """Products of the columns under the inverse of the covariance of differences, for each ratio, and its log determinant.

    The covariance is tridiagonal: ``jumps + 2`` beside ``-1``; Cholesky, row by row, for all ratios at once.
    """
    pivots, solved = np.empty((len(columns), len(jumps))), np.empty((len(columns), len(jumps), columns.shape[1]))
    above, before = np.zeros((len(jumps), 1)), np.zeros((len(jumps), columns.shape[1]))
    for i, diagonal in enumerate(jumps.T + 2.0):
        before = columns[i] + before * above
        solved[i] = before
        pivots[i] = diagonal - above[:, 0]
        above = 1.0 / pivots[i][:, None]
    return np.einsum("nki,nkj->kij", solved / pivots[:, :, None], solved), np.log(pivots).sum(axis=0)
