"""Which lines of code ask for memory in a fake run: each distinct call stack once, without the frames that a GPU's run would not have.

A backward pass runs in the thread that called it here, so what it asks for has the line of that call; on a device autograd has a thread of its own,
without Python frames.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import CodeType, FrameType

from nbmemprof import _optional
from nbmemprof._cells import cell_names

__all__ = ["BETWEEN", "Frame", "Lines"]

# what stands between the user's call and the operator in a fake run, and would not on a GPU
BETWEEN = ("/nbmemprof/prediction/", "/torch/_subclasses/", "/torch/_ops.py", "/torch/_compile.py", "/torch/_dynamo/", "/torch/utils/_stats.py", "/torch/_prims_common/", "/torch/_decomp/", "/torch/_refs/",
           "/torch/_meta_registrations.py", "/torch/utils/_pytree.py", "/torch/utils/_python_dispatch.py", "/torch/_library/", "/torch/fx/experimental/")  # fmt: skip
_OURS = __file__.rpartition("prediction")[0]
_MOST = 30_000  # distinct paths

Frame = tuple[str, str, int | None]  # function, file (a notebook cell is In[7]), line


class Lines:
    """Interns call stacks: ``of(frame)`` is a number, ``rows[number]`` its frames, innermost first; 0 means not recorded.

    A walk goes by code object and instruction, so that a path that was met before costs a look into a dictionary. It ends where a
    cell begins (IPython's ``run_code``) or at one of ``ends``, behind which come the frames ``outer``: of who called for the prediction.
    """

    def __init__(self, rows: list[tuple[Frame, ...]]) -> None:
        self.rows = rows
        self.outer: tuple[Frame, ...] = ()
        self._ids: dict[tuple[int, ...], int] = {}
        self._numbers: dict[tuple[Frame, ...], int] = {}
        self._held: dict[int, CodeType] = {}  # keeps the id of a code object its own
        self._ends: set[int] = set()
        self._names: dict[str, str | None] = {}  # of files: None where they are left out
        self._fixed: int | None = None
        self.look()

    def look(self) -> None:
        """Find the code that ends a walk."""
        shell = _optional.loaded("IPython.core.interactiveshell")
        code = getattr(getattr(getattr(shell, "InteractiveShell", None), "run_code", None), "__code__", None)
        if code is not None:
            self.end_at(code)

    def end_at(self, code: CodeType) -> None:
        """Let walks end at the frames of this code."""
        self._held[id(code)] = code
        self._ends.add(id(code))

    def called_from(self, frame: FrameType | None) -> None:
        """Take the frames from here outwards as those of the caller of what is predicted."""
        self.outer = self._frames(frame)

    def of(self, frame: FrameType | None) -> int:
        """Number of the stack that ends in ``frame``."""
        if self._fixed is not None:
            return self._fixed
        ends, start = self._ends, frame
        path: list[int] = []
        push = path.append
        while frame is not None:
            code = id(frame.f_code)
            if code in ends:
                break
            push(code)
            push(frame.f_lasti)
            frame = frame.f_back
        key = tuple(path)
        found = self._ids.get(key)
        return self._learn(key, start) if found is None else found

    def _learn(self, path: tuple[int, ...], frame: FrameType | None) -> int:
        if len(self._ids) >= _MOST:
            return 0
        number = self._ids[path] = self.number(self._frames(frame) + self.outer)
        return number

    def number(self, frames: tuple[Frame, ...]) -> int:
        """Number of a stack by its frames; 0 for none."""
        if not frames:
            return 0
        number = self._numbers.get(frames)
        if number is None:
            number = self._numbers[frames] = len(self.rows)
            self.rows.append(frames)
        return number

    def _frames(self, frame: FrameType | None) -> tuple[Frame, ...]:
        found: list[Frame] = []
        while frame is not None and id(frame.f_code) not in self._ends:
            code = frame.f_code
            self._held[id(code)] = code
            name = self._names.get(code.co_filename, "")
            if name == "":
                name = self._names[code.co_filename] = self._name(code.co_filename)
            if name is not None:
                found.append((code.co_name, name, frame.f_lineno or code.co_firstlineno))
            frame = frame.f_back
        return tuple(found)

    @staticmethod
    def _name(filename: str) -> str | None:
        """A file as it is shown: cells by their number; None for what a run on a GPU would not pass through."""
        if filename.startswith(_OURS) or any(part in filename for part in BETWEEN):
            return None
        return cell_names().get(filename, filename)

    @contextlib.contextmanager
    def before(self, what: str) -> Iterator[int]:
        """Give all that is asked for in the block one stack that says what it is: brought in from before. Gives its number."""
        kept, self._fixed = self._fixed, self.number((("<module>", what, None),))
        try:
            yield self._fixed
        finally:
            self._fixed = kept
