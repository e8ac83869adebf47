"""An access in one sentence: numbers first, then what it should have been."""

from __future__ import annotations

import itertools
from typing import Any

from nbmemprof.access._warp import GlobalAccess, SharedAccess

__all__ = ["explain", "stride_of"]


def explain(access: Any) -> str:
    """Say what one warp instruction costs."""
    head = f"{'global' if isinstance(access, GlobalAccess) else 'shared'} {access.operation}, {access.width} B a lane"
    if access.active_lanes == 0:
        return f"{head}: no lane is active, nothing is moved"
    lanes = "" if access.active_lanes == 32 else f" by {access.active_lanes} lane{'s' if access.active_lanes > 1 else ''}"
    return f"{head}{lanes}{_pattern(access)}: " + (_sectors(access) if isinstance(access, GlobalAccess) else _wavefronts(access))


def _sectors(access: GlobalAccess) -> str:
    best = access.ideal_unique_sectors
    enough = "" if access.sectors <= best else f" where {best} would do"
    return f"{_count(access.sectors, 'sector')} in {_count(access.lines, 'line')}{enough}, {_percent(access.efficiency)} of the bytes used"


def _wavefronts(access: SharedAccess) -> str:
    if access.conflicts == 0:
        return f"{_count(access.wavefronts, 'wavefront')}, no bank conflict"
    return f"{_count(access.wavefronts, 'wavefront')} where {access.ideal_wavefronts} would do, {'an' if access.ways in (8, 11, 18) else 'a'} {access.ways}-way bank conflict"


def stride_of(access: Any) -> int | None:
    """Bytes from each active lane to the next by lane number; None where it is not one number or fewer than two lanes are active."""
    active = access.active
    steps = {(b - a, m - n) for (n, a), (m, b) in itertools.pairwise(active)}
    strides = {gap // lanes for gap, lanes in steps if gap % lanes == 0}
    return strides.pop() if len(strides) == 1 and all(gap % lanes == 0 for gap, lanes in steps) else None


def _pattern(access: Any) -> str:
    stride = stride_of(access)
    if stride is None:
        return ""
    if stride == 0:
        return ", one address"
    return ", side by side" if stride == access.width else f", {stride} B apart"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
