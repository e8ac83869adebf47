"""Bytes and time, parsed and printed in one way for text, charts and widgets alike (IEC units)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from nbmemprof.errors import NbmemprofError

__all__ = ["format_bytes", "format_count", "format_time_us", "parse_bytes", "share_units", "unit_of"]

_STEPS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?(?:e[0-9]+)?)\s*([kmgtp]?)(i?)(b?)\s*$", re.IGNORECASE)


def parse_bytes(value: str | int | float) -> int:
    """Read a size: ``8GiB``, ``512 MiB``, ``1.5G``, ``80GB``, ``1048576``.

    ``KiB MiB GiB TiB PiB`` and the bare letters ``K M G T P`` are powers of 1024, as the field uses
    them; ``kB MB GB TB PB`` are powers of 1000 (IEC 80000-13).

    Raises
    ------
    NbmemprofError
        For text that is not a size, for a negative or non-finite number.
    """
    if isinstance(value, bool):
        raise NbmemprofError(f"{value!r} is not a size. Give a number of bytes or text like '8GiB'.")
    if isinstance(value, (int, float)):
        if not math.isfinite(value) or value < 0:
            raise NbmemprofError(f"{value!r} is not a size. Give a number of bytes that is zero or more.")
        return int(value)
    match = _SIZE.match(value)
    if match is None:
        raise NbmemprofError(f"{value!r} is not a size. Write it like '8GiB', '512MiB', '80GB' or '1048576'.")
    number, letter, binary, unit = match.groups()
    power = _STEPS[letter.lower()]
    base = 1000 if unit and letter and not binary else 1024
    scaled = (int(number) if number.isdigit() else float(number)) * base**power
    if not math.isfinite(scaled):
        raise NbmemprofError(f"{value!r} is too large for a size. Write it like '8GiB'.")
    return int(scaled)


def format_bytes(size: float | None, digits: int = 1) -> str:
    """Print a size in the largest IEC unit that leaves it at 1 or more; None is ``unknown``."""
    if size is None or (isinstance(size, float) and math.isnan(size)):
        return "unknown"
    sign, size = ("−" if size < 0 else ""), abs(size)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        # 1023.96 KiB would print as 1024.0 KiB: step up once rounding reaches the next unit
        if unit == "B" and size < 1024:
            return f"{sign}{size:.0f} B"
        if unit != "B" and round(size, digits) < 1024:
            return f"{sign}{_trim(size, digits)} {unit}"
        size /= 1024
    return f"{sign}{_trim(size, digits)} PiB"


def unit_of(text: str) -> str:
    """Return the unit of a printed size; empty where it has none (``unknown``)."""
    return text.rpartition(" ")[2] if " " in text else ""


def share_units(texts: Sequence[str], before: str = "") -> list[str]:
    """Leave out units of printed sizes that stand side by side.

    A unit goes only where the size to the left and the one to the right have the same: whichever of them a reader takes it from, it is the right one.

    Parameters
    ----------
    texts
        Sizes as ``format_bytes`` prints them.
    before
        The size that stands to the left of the first one; empty for none.

    Examples
    --------
    >>> share_units(["3 GiB", "2 GiB", "1 GiB"])
    ['3 GiB', '2', '1']
    >>> share_units(["3 MiB", "2 MiB", "512 KiB"], before="4 MiB")
    ['3', '2 MiB', '512 KiB']
    """
    units = [unit_of(before), *map(unit_of, texts)]
    units.append(units[-1])  # nothing stands to the right of the last one
    return [
        text.removesuffix(f" {unit}") if unit and left == unit == right else text
        for text, left, unit, right in zip(texts, units, units[1:], units[2:], strict=False)
    ]


def format_count(count: float | None) -> str:
    """Print a count with thin groups of three; None is ``unknown``."""
    return "unknown" if count is None else f"{count:,.0f}".replace(",", "\u202f")


def format_time_us(time_us: float | None) -> str:
    """Print a duration given in microseconds; None is ``unknown``."""
    if time_us is None or math.isnan(time_us):
        return "unknown"
    for unit, factor in (("µs", 1.0), ("ms", 1e3), ("s", 1e6)):
        if abs(time_us) < 1e3 * factor or unit == "s":
            return f"{_trim(time_us / factor, 1 if abs(time_us) >= 100 * factor else 2)} {unit}"
    raise AssertionError(time_us)


def _trim(number: float, digits: int) -> str:
    text = f"{number:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
