"""``%memprof pools``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag

NAME = "pools"
HELP = "Lines of the last capture that ask for memory again and again, and what a reusable buffer, an arena or a pool of its stream would save."
FLAGS: list[Flag] = []


def run(args: Namespace, shell: Any) -> None:
    """Print the table; ``mp.pools(cap)`` gives the frame."""
    from nbmemprof import magics
    from nbmemprof.views import advice

    print(advice.pools(magics.last(shell)))  # noqa: T201 - what a magic says
