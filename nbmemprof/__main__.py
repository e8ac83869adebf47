"""``python -m nbmemprof show FILE`` and ``diff A B``: what captures say, in a terminal, as a page, as an exit status."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbmemprof import __version__
from nbmemprof.errors import NbmemprofError

if TYPE_CHECKING:
    from nbmemprof.capture import Capture


def main(words: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 2 where the input is refused, 1 where memory grew above what ``--fail-above`` allows."""
    parser = argparse.ArgumentParser(prog="python -m nbmemprof", description="What holds the memory of a training step or a server.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="what a torch snapshot, an .nbmem file or a Parquet folder says; nothing in it is run")
    show.add_argument("file", type=Path)
    show.add_argument("--html", type=Path, metavar="PAGE", help="write one page that needs nothing from outside")
    _add_diff(commands)
    args = parser.parse_args(words)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal or log that knows ASCII only still gets its text
            stream.reconfigure(errors="replace")
    try:
        return _diff(args) if args.command == "diff" else _show(args.file, args.html)
    except NbmemprofError as error:
        print(error, file=sys.stderr)
        return 2


def _add_diff(commands: Any) -> None:
    """``diff A B``; words and choices are checked when it runs, so that nothing is imported for ``--help``."""
    diff = commands.add_parser("diff", help="what got worse from one run to the other, and by how much; for CI")
    diff.add_argument("a", type=Path, help="the run before: what show opens, or a folder of mp.watch or of a history (its newest)")
    diff.add_argument("b", type=Path, help="the run after")
    diff.add_argument("--by", default="site", help="site (default), category, layer, phase, function, kind, pool, stream, op")
    diff.add_argument("--at", default="peak", choices=("peak", "end"))
    diff.add_argument("--fail-above", metavar="GROWTH", help="exit with 1 if the peak or the end of any device grew by more than this: 2%%, 64MiB, 0")
    diff.add_argument("--top", type=int, default=20, help="rows shown (20)")
    diff.add_argument("--json", action="store_true", help="all rows as JSON")


def _diff(args: argparse.Namespace) -> int:
    from nbmemprof.analyses.diff import diff
    from nbmemprof.views import changes

    allowed = None if args.fail_above is None else _growth(args.fail_above)
    a, b = _run(args.a), _run(args.b)
    totals = changes.totals(a, b)
    over = [] if allowed is None else [row for row in totals.iter_rows(named=True) if row["measure"] in ("peak", "at the end") and allowed(row)]
    if args.json:
        made = {"totals": totals.to_dicts(), "changes": diff(a, b, args.by, at=args.at).to_dicts(), "failed": bool(over)}
        print(json.dumps(made, default=str))
    else:
        print(changes.report(a, b, by=args.by, at=args.at, top=args.top))
        for row in over:
            print(f"FAILED: {changes.sentence(row)}; allowed is {args.fail_above}")
    if allowed is not None and totals.is_empty():
        raise NbmemprofError("Neither the peak nor the end of these runs is known in both, so growth can't be judged. Record with %%memprof or mp.record(), or compare two snapshots.")
    return 1 if over else 0


def _run(path: Path) -> Capture:
    from nbmemprof.capture import load
    from nbmemprof.runs import open_run

    return open_run(path).capture if path.is_dir() else load(path)


def _growth(text: str) -> Callable[[dict[str, Any]], bool]:
    """Whether a row grew by more than "2%" of what it was, or than a size."""
    from nbmemprof.units import parse_bytes

    if text.strip().endswith("%"):
        try:
            share = float(text.strip().removesuffix("%")) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < float("inf"):
            raise NbmemprofError(f"{text!r} is not a growth. Write --fail-above 2%, --fail-above 64MiB, or --fail-above 0.")
        return lambda row: bool(row["change_bytes"] > share * row["a_bytes"])
    size = parse_bytes(text)
    return lambda row: bool(row["change_bytes"] > size)


def _show(file: Path, html: Path | None) -> int:
    from nbmemprof.capture import load

    capture = load(file)
    print(capture._repr_mimebundle_()["text/plain"])
    if html is not None:
        print(f"report: {capture.to_html(html)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
