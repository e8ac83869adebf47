"""``%memprof max-batch STEP``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.errors import FlagError
from nbmemprof.flags import Flag, identifier, near
from nbmemprof.units import parse_bytes

NAME = "max-batch"
HELP = (
    "The largest batch that fits: STEP is a function step(batch) of this notebook, or step(state, batch) with --setup. Two full steps a try; state is put back."
)
FLAGS = [
    Flag("STEP", "name of the function that runs one full step", type=identifier, optional=False, metavar="STEP"),
    Flag("--setup", "name of a function that makes the state afresh for each try", type=identifier, metavar="NAME"),
    Flag("--low", "smallest batch, with which the search begins", type=int, default=1, metavar="N"),
    Flag("--high", "largest batch that is wanted", type=int, metavar="N"),
    Flag("--limit", "torch's own memory limit, as 8GiB (default: as it is)", type=parse_bytes, metavar="SIZE"),
    Flag("--capacity", "what the card has, as 24GiB (default: as it is)", type=parse_bytes, metavar="SIZE"),
    Flag("--device", "another GPU, by name: predicted", metavar="NAME"),
    Flag("--conf", "PYTORCH_CUDA_ALLOC_CONF during the search", metavar="CONF"),
    Flag("--seconds", "begin no further try after this long", type=float, metavar="S"),
    Flag("--predict-only", "two small tries and the allocator's rules, without confirming", action="store_true", default=False),
    Flag("--out", "bind the result to this name", type=identifier, metavar="NAME"),
]


def run(args: Namespace, shell: Any) -> None:
    """Search and show; ``mp.max_batch(step)`` gives the result."""
    from nbmemprof.searching.batch import max_batch

    step, setup = (_named(shell, name) for name in (args.step, args.setup))
    result = max_batch(
        step, args.low, args.high, setup=setup, conf=args.conf, limit_bytes=args.limit, capacity_bytes=args.capacity, device=args.device, confirm=not args.predict_only,
        seconds=args.seconds,
    )  # fmt: skip
    if args.out:
        shell.user_ns[args.out] = result
    from IPython.display import display

    display(result)


def _named(shell: Any, name: str | None) -> Any:
    if name is None:
        return None
    found = shell.user_ns.get(name)
    if not callable(found):
        known = [n for n, v in shell.user_ns.items() if callable(v) and not n.startswith("_")]
        raise FlagError(
            f"%memprof max-batch: {name!r} is {'not defined' if name not in shell.user_ns else 'not a function'} in this notebook.{near(name, known)} Write def {name}(batch): … first."
        )
    return found
