"""What device kernels ask of the allocator beside their outputs, one module a family; measured on an H200 where it says so."""

from __future__ import annotations

from typing import Any

from nbmemprof.prediction.kernels import (
    algebra,
    attention,
    blas,
    convolution,
    distances,
    encoder,
    fourier,
    indexing,
    losses,
    normalization,
    recurrent,
    reduction,
    sorting,
    unfaked,
)

__all__ = ["install"]


def install(torch: Any, rules: Any) -> None:
    """Fill the tables of ``rules``."""
    for family in (reduction, blas, algebra, attention, convolution, distances, encoder, fourier, losses, normalization, recurrent, indexing, sorting, unfaked):
        family.install(torch, rules)
