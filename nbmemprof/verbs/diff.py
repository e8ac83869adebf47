"""``%memprof diff A B``."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from nbmemprof.analyses import diff as comparison
from nbmemprof.capture import Capture, load
from nbmemprof.errors import FlagError
from nbmemprof.flags import Flag, near

NAME = "diff"
HELP = "What got worse from one capture to another, and by how much. A and B: names, or files that %memprof load opens; B is the last capture where it is left out."
FLAGS = [
    Flag("A", "the run before: a name, or a file", optional=False),
    Flag("B", "the run after"),
    Flag("--by", "what is compared", choices=comparison.BY, default="site"),
    Flag("--at", "the moment", choices=("peak", "end"), default="peak"),
]


def run(args: Namespace, shell: Any) -> None:
    """Print what changed; ``mp.diff(a, b)`` gives the frame."""
    from nbmemprof import magics
    from nbmemprof.views import changes

    before = _capture(args.a, shell)
    after = _capture(args.b, shell) if args.b else magics.last(shell)
    print(changes.report(before, after, by=args.by, at=args.at))  # noqa: T201 - what a magic says


def _capture(word: str, shell: Any) -> Capture:
    found = shell.user_ns.get(word)
    found = found if isinstance(found, Capture) else getattr(found, "capture", None)
    if isinstance(found, Capture):
        return found
    path = Path(word).expanduser()
    if path.exists():
        return load(path)
    captures = [name for name, value in shell.user_ns.items() if isinstance(value, Capture)]
    raise FlagError(f"%memprof diff: {word!r} is neither a capture nor a file.{near(word, captures)} Captures here: {', '.join(captures) or 'none'}.")
