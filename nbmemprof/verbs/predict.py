"""``%memprof predict [on DEVICE|off]``: the cells that follow run in one fake session, on a GPU that is not here."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.errors import FlagError, NotRecording
from nbmemprof.flags import Flag
from nbmemprof.sources.prediction import seconds
from nbmemprof.units import parse_bytes

NAME = "predict"
HELP = "Run the cells that follow under fake tensors in one process of their own, for this GPU; earlier cells run again in it first. %%memprof there shows predictions."
FLAGS = [
    Flag("STATE", "on, off, or status: what is on, as without it", choices=("on", "off", "status"), metavar="on|off|status"),
    Flag("DEVICE", "the GPU, as H200 or H200:80GiB", metavar="DEVICE[:SIZE]"),
    Flag("--limit", "torch's own memory limit, as 8GiB", type=parse_bytes, metavar="SIZE"),
    Flag("--conf", "PYTORCH_CUDA_ALLOC_CONF", metavar="CONF"),
    Flag("--seconds", "longest time of one cell (default: 600)", type=seconds, metavar="S"),
    Flag("--host", "most memory that the session may take here (default: 8 GiB, at most half of what is free)", type=parse_bytes, metavar="SIZE"),
]


def run(args: Namespace, shell: Any) -> None:
    """Begin, end, or say what is on."""
    from nbmemprof import magics
    from nbmemprof.prediction import notebook

    here = magics.of(shell)
    if here is None:
        raise NotRecording("The extension is not loaded in this shell. Run %load_ext nbmemprof.")
    if args.state == "off":
        here.router.end()
    elif args.state == "on":
        if not args.device:
            raise FlagError("%memprof predict on: for which GPU? Say %memprof predict on H200.")
        wanted = notebook.asked(args.device, limit=args.limit, conf=args.conf, seconds=args.seconds, host=args.host)
        for line in here.router.begin(wanted):
            print(line)  # noqa: T201 - what a magic says
    print(f"memprof: prediction is {here.router.state()}")  # noqa: T201 - as above
