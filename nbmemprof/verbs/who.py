"""``%memprof who``: who holds each live tensor."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.errors import FlagError
from nbmemprof.flags import Flag

NAME = "who"
HELP = "Who holds the memory now: variables, containers, Out, the last traceback, hooks, caches, autograd graphs, cycles; by bytes, with the way out."


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise FlagError(f"{text!r} is not a number of rows. Use one like 20.")
    return int(text)


FLAGS = [
    Flag("--device", "cpu, cuda, cuda:1 or all (default: GPUs, or the CPU where no GPU memory is in use)", metavar="WHERE"),
    Flag("--top", "rows shown (default: 20)", type=_count, default=20, metavar="N"),
    Flag("--each", "a row a tensor, not a row a holder", action="store_true", default=False),
]


def run(args: Namespace, shell: Any) -> None:
    """Look and show."""
    from nbmemprof import holding
    from nbmemprof.views import held

    scan = holding.look(shell=shell)
    frame = holding.frame_of(scan, args.device)
    notes = [*(f"{where} has {count} {what}s of the same function {function}: each run adds one more. Keep the handle and call handle.remove()." for where, what, function, count in scan.hooks), *scan.notes]
    held.display(frame if args.each else holding.grouped(frame), notes, args.top)
