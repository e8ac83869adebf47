"""``%memprof advise``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag

NAME = "advise"
HELP = "What would reduce memory, or the allocator's time, in the last capture, and by how much: findings, and settings that were replayed."
FLAGS = [Flag("--quick", "only what needs no replay", action="store_true")]


def run(args: Namespace, shell: Any) -> None:
    """Print the findings; ``mp.advise(cap)`` gives the frame."""
    from nbmemprof import magics
    from nbmemprof.views import advice

    print(advice.findings(magics.last(shell), replay=not args.quick))  # noqa: T201 - what a magic says
