"""``%memprof what-if [CONF ...]``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag
from nbmemprof.units import parse_bytes

NAME = "what-if"
HELP = "What the last capture's requests would have reserved under other PYTORCH_CUDA_ALLOC_CONF settings: those named, or those that a person would try. '' is torch's defaults."
FLAGS = [
    Flag("CONF", "settings to try, as in PYTORCH_CUDA_ALLOC_CONF", action="append", metavar="CONF …"),
    Flag("--limit", "torch's own memory limit, as 8GiB (default: as recorded)", type=parse_bytes, metavar="SIZE"),
    Flag("--capacity", "what the device can give, as 80GiB (default: as recorded)", type=parse_bytes, metavar="SIZE"),
]


def run(args: Namespace, shell: Any) -> None:
    """Replay and show; ``mp.what_if(cap)`` gives the frame."""
    from nbmemprof import magics
    from nbmemprof.views import what_if

    what_if.display(magics.last(shell), args.conf or None, limit_bytes=args.limit, capacity_bytes=args.capacity)
