"""``%memprof release [--yes]``: let go of what only the notebook holds."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag

NAME = "release"
HELP = "What would come back if the notebook let go of its outputs (Out, _), its last error and garbage; --yes does it. Your variables are never touched."
FLAGS = [
    Flag("--yes", "let go; without it nothing is changed", action="store_true", default=False),
    Flag("--empty-cache", "with --yes: also torch.cuda.empty_cache(), so that other processes can use what came back", action="store_true", default=False),
]


def run(args: Namespace, shell: Any) -> None:
    """Say or do it."""
    from nbmemprof.holding import _release
    from nbmemprof.views import held

    if args.yes:
        print(held.released(_release.let_go(shell, empty_cache=args.empty_cache), emptied=args.empty_cache))  # noqa: T201 - what a magic says
    else:
        print(held.plan(_release.plan(shell)))  # noqa: T201 - as above
