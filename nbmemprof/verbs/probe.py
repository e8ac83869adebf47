"""``%memprof probe NAME``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.errors import FlagError
from nbmemprof.flags import Flag

NAME = "probe"
HELP = "What this card's memory can do, measured by small kernels; without a GPU the recordings of an H200 that ship. mp.probes has the same as frames."


def _names() -> tuple[str, ...]:
    from nbmemprof.gpu import probes

    return probes.NAMES


FLAGS = [
    Flag("NAME", "which probe", choices=_names),
    Flag("--recorded", "show the shipped recording also where there is a GPU", action="store_true", default=False),
]


def run(args: Namespace, shell: Any) -> Any:
    """Measure and return the frame, which draws itself; it is the cell's value."""
    from nbmemprof.gpu import probes

    if args.name is None:
        raise FlagError(f"%memprof probe: which one? There are: {', '.join(probes.NAMES)}. Say %memprof probe {probes.NAMES[0]}.")
    from nbmemprof.searching.progress import Line

    with Line() as line:
        return probes.run(args.name, recorded=args.recorded, told=line.say)
