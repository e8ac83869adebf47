"""``%memprof load FILE``."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from nbmemprof.flags import Flag, existing_path, identifier
from nbmemprof.verbs.last import VIEW

NAME = "load"
HELP = "Open a torch snapshot, a .nbmem file or a folder of Parquet, show it, and bind it to _memprof. Nothing in it is run."
FLAGS = [
    Flag("FILE", "what to open; quote a path with spaces", type=existing_path, optional=False),
    Flag("--out", "bind the capture to this name too", type=identifier, metavar="NAME"),
    VIEW,
    Flag(("-q", "--quiet"), "show nothing", action="store_true", default=False),
]


def run(args: Namespace, shell: Any) -> None:
    """Load, bind, show."""
    from nbmemprof import magics
    from nbmemprof.capture import load

    capture = load(args.file)
    shell.user_ns["_memprof"] = capture
    if args.out:
        shell.user_ns[args.out] = capture
    if not args.quiet:
        magics.present(capture, args.view)
