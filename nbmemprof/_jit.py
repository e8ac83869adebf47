"""Run a kernel compiled by numba when the work is worth it, interpreted otherwise.

A kernel is one plain Python function over one-dimensional arrays: it indexes them, loops, and returns
an integer. It does not slice, call NumPy or raise, keeps its integers below 2**63, and adds 0 to an
unsigned element (``data[i] + 0``) so that numba and CPython compute the same. Loading numba costs about
0.4 s and a first compilation seconds (kept on disk afterwards), so small inputs run interpreted, over
``memoryview`` s, whose elements are Python ints.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["WORTH", "compiled", "run"]

WORTH = 1_000_000  # steps of a kernel (about 0.5 s interpreted) from which compiled code pays for itself


def run(function: Callable[..., int], work: int, *arguments: Any) -> int:
    """Call the kernel over its arguments; arrays are changed in place.

    Parameters
    ----------
    function
        The kernel, a function at the top level of its module.
    work
        About how many steps it will take; from ``WORTH`` on the compiled form is used, if there is numba.
    arguments
        One-dimensional NumPy arrays and ints.
    """
    fast = compiled(function) if work >= WORTH else None
    if fast is not None:
        return int(fast(*arguments))
    return int(function(*(a.data if isinstance(a, np.ndarray) else a for a in arguments)))


@functools.cache
def compiled(function: Callable[..., int]) -> Callable[..., int] | None:
    """Return the kernel compiled on first call; None where numba is missing or does not work."""
    try:
        import numba
    except Exception:  # numba refuses some NumPy and Python versions with errors of several kinds
        return None
    uncached: Callable[..., int] = numba.njit(nogil=True)(function)
    try:
        cached: Callable[..., int] = numba.njit(cache=True, nogil=True)(function)
    except RuntimeError:  # no folder in which the compiled code may be kept
        return uncached

    def call(*arguments: Any) -> int:
        try:
            return cached(*arguments)
        except OSError:  # that folder is full, or read-only by now; a kernel itself does no I/O
            return uncached(*arguments)

    return call
