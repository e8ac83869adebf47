"""``%memprof last``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag, view_names

NAME = "last"
HELP = "Show the last capture again."
VIEW = Flag("--view", "what is shown", choices=view_names, default="first", metavar="VIEW")
FLAGS = [VIEW]


def run(args: Namespace, shell: Any) -> None:
    """Show ``_memprof``."""
    from nbmemprof import magics

    magics.present(magics.last(shell), args.view)
