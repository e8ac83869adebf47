"""``%memprof stats``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag

NAME = "stats"
HELP = "torch's own counters now, by the right names: counter, value, unit, meaning."
FLAGS: list[Flag] = []


def run(args: Namespace, shell: Any) -> Any:
    """The frame of ``mp.stats()``; it is the cell's value."""
    import nbmemprof

    return nbmemprof.stats()
