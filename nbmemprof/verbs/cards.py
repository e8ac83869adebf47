"""``%memprof cards``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag

NAME = "cards"
HELP = "Which GPUs the last capture would fit on, the smallest first: its peak and what lies beside torch; where it is close, its requests are replayed with so much memory."
FLAGS = [Flag("--quick", "without a replay: what is close is 'maybe'", action="store_true")]


def run(args: Namespace, shell: Any) -> None:
    """Print the table; ``mp.cards(cap)`` gives the frame."""
    from nbmemprof import magics
    from nbmemprof.views import sections

    print(sections.fits(magics.last(shell), replay=not args.quick))  # noqa: T201 - what a magic says
