"""Which request of one run is which request of another: the fewest that have no partner (Myers 1986, the greedy O(ND) algorithm)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["partners"]

Ints = npt.NDArray[np.int64]
_MOST = 1000  # requests without a partner; runs that differ by more are of two kinds


def partners(a: Ints, b: Ints) -> Ints | None:
    """For each token of ``a`` the place of its partner in ``b``, -1 where it has none; None where the two are too different."""
    found = np.full(len(a), -1, np.int64)
    same = min(len(a), len(b))
    differ = np.flatnonzero(a[:same] != b[:same])
    head = int(differ[0]) if len(differ) else same
    found[:head] = np.arange(head)
    rest = same - head
    differ = np.flatnonzero(a[len(a) - rest :][::-1] != b[len(b) - rest :][::-1])
    tail = int(differ[0]) if len(differ) else rest
    found[len(a) - tail :] = np.arange(len(b) - tail, len(b))
    middle = _greedy(a[head : len(a) - tail].tolist(), b[head : len(b) - tail].tolist())
    if middle is None:
        return None
    for i, j in middle:
        found[head + i] = head + j
    return found


def _greedy(a: list[int], b: list[int]) -> list[tuple[int, int]] | None:
    """Pairs of equal tokens on a shortest path; None where it is longer than what is looked for."""
    n, m = len(a), len(b)
    if not n or not m:
        return [] if n + m <= _MOST else None
    ends, history = [0] * (2 * _MOST + 3), []  # the farthest place on each diagonal, which may be negative: Python counts those from the end
    for depth in range(min(n + m, _MOST) + 1):
        history.append([*ends[: depth + 2], *ends[-depth - 1 :]])
        for k in range(-depth, depth + 1, 2):
            x = ends[k + 1] if k == -depth or (k != depth and ends[k - 1] < ends[k + 1]) else ends[k - 1] + 1
            while x < n and x - k < m and a[x] == b[x - k]:
                x += 1
            ends[k] = x
            if x >= n and x - k >= m:
                return _walk(history, n, m)
    return None


def _walk(history: list[list[int]], x: int, y: int) -> list[tuple[int, int]]:
    """Go back along the path."""
    pairs = []
    for depth in range(len(history) - 1, -1, -1):
        ends, k = history[depth], x - y
        before = k + 1 if k == -depth or (k != depth and ends[k - 1] < ends[k + 1]) else k - 1
        begin = ends[before]
        while x > begin and y > begin - before:
            x, y = x - 1, y - 1
            pairs.append((x, y))
        x, y = begin, begin - before
    return pairs
