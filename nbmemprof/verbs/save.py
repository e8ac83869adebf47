"""``%memprof save FILE``, and what ``--save`` does."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.flags import Flag, capture_path
from nbmemprof.units import format_bytes

NAME = "save"
HELP = "Save the last capture; the suffix says how: .nbmem, .html (one page that needs nothing), or no suffix for a folder of Parquet. What is there is replaced."
FLAGS = [Flag("FILE", "where; quote a path with spaces", type=capture_path, optional=False)]


def run(args: Namespace, shell: Any) -> None:
    """Save ``_memprof``."""
    from nbmemprof import magics

    print(write(magics.last(shell), args.file))  # noqa: T201 - what a magic says


def write(capture: Capture, path: Path) -> str:
    """Save by the suffix; returns the sentence that says where."""
    there = path.exists()
    writer = {".nbmem": capture.save, ".html": capture.to_html}.get(path.suffix, capture.to_parquet)
    target = writer(path)
    size = sum(p.stat().st_size for p in target.iterdir()) if target.is_dir() else target.stat().st_size
    return f"{'replaced' if there else 'saved to'} {target} ({format_bytes(size)})"
