"""Which cells of a notebook run elsewhere: those that say ``--predict``, and all of them while a fake session is on."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nbmemprof import _optional
from nbmemprof.capture import Capture
from nbmemprof.errors import FlagError

if TYPE_CHECKING:  # what runs cells elsewhere is loaded with the first of them
    from nbmemprof.prediction import notebook

__all__ = ["Router", "Work"]

_OURS = re.compile(r"^\s*%memprof\s+predict\b|^\s*%(?:un|re)load_ext\s+nbmemprof\b", re.MULTILINE)  # these stay in the kernel
_NO_GPU = re.compile(r"cuda|nvidia", re.IGNORECASE)
_KEPT = 64  # failed cells that are remembered
_TOLD = 5  # names that are told


class Work:
    """One cell that runs elsewhere; ``capture`` and ``other`` (its second name) are there when it is done."""

    def __init__(self, run: Callable[[Work], None]) -> None:
        self.capture: Capture | None = None
        self.other: str | None = None
        self.shown = False  # the child has shown the view, and saved
        from nbmemprof.prediction import notebook

        self.transformer = notebook.Elsewhere(lambda: run(self))


class Router:
    """Decides for one shell. ``session`` is the fake session that is on."""

    def __init__(self, shell: Any, quiet: Callable[[], None]) -> None:
        self.shell, self._quiet = shell, quiet
        self.session: notebook.FakeSession | None = None
        self._gone: list[str] = []  # names that ended with the last session, until they were told
        self._interrupted: set[str] = set()  # cells that were stopped: they would run on
        self._failed: dict[str, None] = {}  # cells that failed for want of a GPU, in order

    def route(self, raw: str, text: str, args: Namespace | None, number: int | None) -> Work | None:
        """The work that takes a cell's place; None where it runs here.

        Parameters
        ----------
        raw, text
            The cell as typed, and without our own line.
        args
            Its line, where it has one.
        """
        serving = _optional.loaded("nbmemprof.prediction.serving")
        if serving is not None and serving.current is not None:
            return None
        if self.session is not None:
            return None if _OURS.search(raw) else Work(lambda work: self._in_session(work, raw, number or 0))
        if args is not None and args.predict:
            _only_one(args)
            return Work(lambda work: self._alone(work, text, args, number))
        return None

    def _alone(self, work: Work, text: str, args: Namespace, number: int | None) -> None:
        work.capture, hearing = self.predict(text, args, number)
        hearing.raise_error()

    def predict(self, text: str, args: Namespace, number: int | None) -> tuple[Capture | None, Any]:
        """Predict one cell; its capture, and what can raise its own error."""
        from nbmemprof.prediction import notebook

        _only_one(args)
        wanted = notebook.asked(args.predict, limit=args.limit, conf=args.conf, seconds=args.predict_seconds, host=args.predict_host, calibrate=args.calibrate)
        return notebook.cell(self.shell, text, number, wanted, history=self._texts(), failed=list(self._failed), quiet=self._quiet)

    def _in_session(self, work: Work, raw: str, number: int) -> None:
        assert self.session is not None  # noqa: S101 - it was there when the cell was routed
        work.shown = True
        work.capture, work.other, hearing = self.session.run(raw, number)
        hearing.raise_error()

    def ran(self, raw: str, error: BaseException | None) -> None:
        """A cell ran here: note whether it failed for want of a GPU."""
        self._failed.pop(raw, None)
        (self._interrupted.add if isinstance(error, KeyboardInterrupt) else self._interrupted.discard)(raw)
        if isinstance(error, (RuntimeError, AssertionError, OSError)) and _NO_GPU.search(str(error)) and type(error).__name__ != "OutOfMemoryError":
            self._failed[raw] = None
            while len(self._failed) > _KEPT:
                del self._failed[next(iter(self._failed))]

    def history(self) -> list[tuple[int, str]]:
        """Number and text of the cells that ran in this kernel before the one that runs now, without predicted ones."""
        manager = self.shell.history_manager
        texts = list(manager.input_hist_raw) if manager is not None else []
        return [(number, text) for number, text in enumerate(texts[:-1]) if text.strip() and text not in self._interrupted and not re.match(r"\s*%%memprof\b.*--predict\b", text)]

    def _texts(self) -> list[str]:
        """Earlier cells as Python, magics turned into calls."""
        manager = self.shell.history_manager
        return list(manager.input_hist_parsed)[:-1] if manager is not None else []

    def begin(self, wanted: notebook.Asked) -> list[str]:
        """Begin a session and run the earlier cells again in it; returns what is to be said of them."""
        from nbmemprof.prediction import notebook

        self.end()
        session = notebook.FakeSession(self.shell, wanted)
        try:
            told = session.run_again([(number, text) for number, text in self.history() if not _OURS.search(text)])
        except BaseException:
            session.close()
            raise
        self.session = session
        return told

    def end(self) -> None:
        """End the session."""
        session, self.session = self.session, None
        if session is not None:
            self._gone = [name for name in session.made if name not in self.shell.user_ns]
            session.close()

    def state(self) -> str:
        """What is on, in words."""
        if self.session is None:
            gone, self._gone = self._gone, []
            told = f"names made in the fake session are gone ({_some(gone)}). Also: " if gone else ""
            return f"off: {told}%%memprof --predict H200 predicts one cell, %memprof predict on H200 all cells that follow"
        if self.session.ended is not None:
            return f"on for {self.session.wanted.title}, but {self.session.ended[0].lower()}{self.session.ended[1:]} %memprof predict on {self.session.wanted.title} begins again"
        return f"on for {self.session.wanted.title}: cells run in a fake session (process {self.session.child.pid}, {self.session.cells} cells so far); %memprof predict off ends it"


def _only_one(args: Namespace) -> None:
    """Refuse a line that asks for two GPUs."""
    other = getattr(args, "as", None)
    if other:
        size = other.partition(":")[2]
        raise FlagError(f"--as {other} and --predict {args.predict} in one line: a cell runs on one GPU. Leave one out{f', or give the prediction its size: --predict {args.predict.partition(chr(58))[0]}:{size}' if size else ''}. Nothing was run.")


def _some(names: list[str]) -> str:
    """Up to five of them, and how many more."""
    return ", ".join(names[:_TOLD]) + (f" and {len(names) - _TOLD} more" if len(names) > _TOLD else "")
