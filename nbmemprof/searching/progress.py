"""One line that tells how far a search is, and goes away."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self

__all__ = ["Line"]


class Line:
    """``with Line() as line: line.say("…")``: an output of the notebook's cell that is updated, or a line of a terminal; silent elsewhere."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._written = 0

    def __enter__(self) -> Self:
        return self

    def say(self, text: str) -> None:
        """Show this in place of what was shown."""
        ipython: Any = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        if shell is not None and getattr(shell, "kernel", None) is not None:
            made = {"text/plain": text}
            if self._handle is None:
                self._handle = ipython.display.display(made, raw=True, display_id=True)
            else:
                self._handle.update(made, raw=True)
        elif sys.stderr.isatty():
            sys.stderr.write("\r" + text.ljust(self._written))
            sys.stderr.flush()
            self._written = len(text)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)
        elif self._written:
            sys.stderr.write("\r" + " " * self._written + "\r")
            sys.stderr.flush()
