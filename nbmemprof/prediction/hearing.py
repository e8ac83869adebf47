"""In the kernel: what a child's shell gives out appears as if the cell had run here.

Nothing is bound: a cell's last value is shown with its number, ``_`` and ``Out`` stay as they are.
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable
from typing import Any

from nbmemprof.prediction import raising
from nbmemprof.prediction.child import Child

__all__ = ["Hearing", "PredictedError"]


class PredictedError(Exception):
    """An error of the predicted code whose own class is not here; it has that class's name."""


class Hearing:
    """Handles the messages of one cell; ``raise_error`` after it."""

    def __init__(self, shell: Any, child: Child, *, silent: bool = False) -> None:
        self._shell, self._child, self._silent = shell, child, silent
        self.others: dict[str, tuple[Any, ...]] = {}  # messages of other kinds, the last of each
        self._error: tuple[Any, ...] | None = None

    def __call__(self, message: tuple[Any, ...]) -> None:
        """Do what a message says."""
        if self._silent and message[0] in ("stream", "display", "clear", "result"):
            return
        handle: Callable[..., None] | None = getattr(self, f"_on_{message[0]}", None)
        if handle is None:
            self.others[message[0]] = message
        else:
            handle(*message[1:])

    def done(self, message: tuple[Any, ...]) -> None:
        """The child is done; an error that its code went on after is shown."""
        if message[1] and self._error is not None:
            name, text, lines, _ = self._error
            self._error = None
            self._shell._showtraceback(name, text, lines)

    def raise_error(self) -> None:
        """Raise what the child's code raised last, with the traceback that it had there."""
        if self._error is None:
            return
        name, text, lines, carried = self._error
        error = _original(carried) or type(name, (PredictedError,), {"__module__": "builtins"})(text)
        setattr(error, "_render_traceback_", lambda: lines)  # noqa: B010 - IPython asks for it
        raise error

    @property
    def short_of_memory(self) -> bool:
        """Whether its error is one of this machine's memory."""
        return self._error is not None and (("MemoryError" in self._error[0] and self._error[0] != "OutOfMemoryError") or "can't allocate memory" in self._error[1])

    @property
    def where(self) -> str:
        """Which earlier cell it was running, as a sentence; empty where it was the cell itself."""
        doing = self.others.get("doing", ("", ""))[1]
        return f" It was running {doing} again, not the cell itself." if doing else ""

    # ------------------------------------------------------------------ kinds
    def _on_stream(self, name: str, text: str) -> None:
        stream = sys.stderr if name == "stderr" else sys.stdout
        stream.write(text)
        stream.flush()

    def _on_display(self, data: Any, metadata: Any, transient: Any, update: bool) -> None:
        publish = self._shell.display_pub.publish
        if transient or update:
            publish(data, metadata, transient=transient, update=update)
        else:
            publish(data, metadata)

    def _on_clear(self, wait: bool) -> None:
        self._shell.display_pub.clear_output(wait=wait)

    def _on_result(self, data: Any, metadata: Any) -> None:
        hook = self._shell.displayhook
        hook.start_displayhook()
        hook.write_output_prompt()
        hook.write_format_data(data, metadata)
        hook.finish_displayhook()

    def _on_input(self, prompt: str, hidden: bool) -> None:
        self._child.send(getpass.getpass(prompt) if hidden else input(prompt))

    def _on_error(self, *error: Any) -> None:
        self._error = error


def _original(carried: bytes | None) -> BaseException | None:
    """The error itself, where its class is here and the shell shows it by the traceback that it brings."""
    error = raising.unpacked(carried)
    if error is None or not hasattr(error, "__dict__"):
        return None
    from IPython.core.error import UsageError

    return error if not isinstance(error, (SyntaxError, UsageError)) else None
