"""``python -m nbmemprof show FILE``: what a snapshot or capture says, in a terminal or as a page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nbmemprof import __version__
from nbmemprof.errors import NbmemprofError


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 2 where the input is refused."""
    parser = argparse.ArgumentParser(prog="python -m nbmemprof", description="What holds the memory of a training step or a server.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what a torch snapshot, an .nbmem file or a Parquet folder says; nothing in it is run")
    show.add_argument("file", type=Path)
    show.add_argument("--html", type=Path, metavar="PAGE", help="write one page that needs nothing from outside")
    args = parser.parse_args(words)
    try:
        return _show(args.file, args.html)
    except NbmemprofError as error:
        print(error, file=sys.stderr)
        return 2


def _show(file: Path, html: Path | None) -> int:
    from nbmemprof.capture import load

    capture = load(file)
    print(capture._repr_mimebundle_()["text/plain"])
    if html is not None:
        print(f"report: {capture.to_html(html)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
