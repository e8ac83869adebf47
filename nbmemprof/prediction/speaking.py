"""In the child: what a shell prints, shows, asks and raises goes over the line, as messages ``(kind, …)``.

``stream name text`` · ``display data metadata transient update`` · ``clear wait`` · ``result data metadata`` · ``input prompt hidden``, answered
by one message · ``error name value lines pickled``. The other end is :mod:`nbmemprof.prediction.hearing`.
"""

from __future__ import annotations

import builtins
import getpass
import io
import pickle
import sys
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from nbmemprof.prediction import raising
from nbmemprof.prediction.child import relax
from nbmemprof.prediction.habit_operators import unknown_operator
from nbmemprof.prediction.lines import BETWEEN

__all__ = ["Stream", "be_silent", "pruned", "send", "speak"]

CHUNK = 4096
_silent = False


class Stream(io.TextIOBase):
    """A text stream at the other end of the line; a line at a time."""

    def __init__(self, line: Connection, name: str) -> None:
        super().__init__()
        self._line, self._name, self._text = line, name, ""

    @property
    def name(self) -> str:
        """Its name, as a file has one."""
        return f"<{self._name}>"

    encoding = "utf-8"
    errors = "strict"

    def writable(self) -> bool:
        """It can be written."""
        return True

    def isatty(self) -> bool:
        """It is no terminal."""
        return False

    def write(self, text: str) -> int:
        """Write; told on at the end of a line."""
        self._text += text
        if "\n" in text or "\r" in text or len(self._text) > CHUNK:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Tell on what was written."""
        text, self._text = self._text, ""
        if text:
            send(self._line, "stream", self._name, text)


def send(line: Connection, *message: Any) -> None:
    """Put a message on the line."""
    if not _silent:
        line.send_bytes(pickle.dumps(message))


def be_silent() -> None:
    """In a copy of this process: nothing goes over the line any more, and nothing can be asked."""
    global _silent  # noqa: PLW0603 - one process, one line
    _silent = True


def speak(shell: Any, line: Connection) -> None:
    """Let everything that a shell gives out go over the line; it never comes back."""
    from IPython.core.displayhook import DisplayHook
    from IPython.core.displaypub import DisplayPublisher

    class Publisher(DisplayPublisher):  # type: ignore[misc]  # IPython's names are untyped
        def publish(self, data: Any, metadata: Any = None, *, transient: Any = None, update: bool = False, **_: Any) -> None:
            _flush()
            send(line, "display", _plain(data), _plain(metadata or {}), _plain(transient or {}), update)

        def clear_output(self, wait: bool = False) -> None:
            _flush()
            send(line, "clear", wait)

    class Hook(DisplayHook):  # type: ignore[misc]  # as above
        def write_output_prompt(self) -> None:
            """The other end has its own."""

        def write_format_data(self, format_dict: Any, md_dict: Any = None) -> None:
            _flush()
            send(line, "result", _plain(format_dict), _plain(md_dict or {}))

        def finish_displayhook(self) -> None:
            self._is_active = False

        def start_displayhook(self) -> None:
            self._is_active = True

    def told(_kind: Any, value: BaseException, lines: Any) -> None:
        relax()
        _flush()
        send(line, "error", type(value).__name__, str(value), [str(one) for one in lines], raising.packed(value))

    def ask(prompt: Any = "", *, hidden: bool = False) -> str:
        _flush()
        send(line, "input", str(prompt), hidden)
        if _silent:
            raise EOFError("nobody answers a copy")
        return str(pickle.loads(line.recv_bytes())[0])  # noqa: S301 - from the kernel that made this child

    sys.stdout, sys.stderr = Stream(line, "stdout"), Stream(line, "stderr")
    shell.display_pub = Publisher(parent=shell)
    shell.displayhook = Hook(shell=shell, parent=shell, cache_size=0)
    shell.display_trap.hook = sys.displayhook = shell.displayhook  # a fork is within the trap already
    shell._showtraceback = told
    whole = shell._get_exc_info
    shell._get_exc_info = lambda exc_tuple=None: pruned(*whole(exc_tuple))
    builtins.input = ask
    getpass.getpass = lambda prompt="Password: ", _stream=None: ask(prompt, hidden=True)  # type: ignore[assignment]


def pruned(kind: Any, value: BaseException, trace: TracebackType | None) -> tuple[Any, BaseException, TracebackType | None]:
    """An error without the frames of the fake run itself, also in those that led to it."""
    said = unknown_operator(value)
    if said is not None and said not in getattr(value, "__notes__", ()):
        value.add_note(said)
    seen: set[int] = set()
    error: BaseException | None = value
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kept = _short(error.__traceback__)
        if kept is not None:
            error.__traceback__ = kept
        error = error.__cause__ or error.__context__
    return kind, value, _short(trace) or trace


def _short(trace: TracebackType | None) -> TracebackType | None:
    rows = []
    while trace is not None:
        if not any(part in trace.tb_frame.f_code.co_filename for part in BETWEEN):
            rows.append(trace)
        trace = trace.tb_next
    made: TracebackType | None = None
    for row in reversed(rows):
        made = TracebackType(made, row.tb_frame, row.tb_lasti, row.tb_lineno)
    return made


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _plain(value: Any) -> Any:
    """What a message can carry: what can't is told as text."""
    try:
        pickle.dumps(value)
    except Exception:
        return {str(k): _plain(v) for k, v in value.items()} if isinstance(value, dict) else repr(value)
    return value
