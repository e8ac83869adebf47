"""What would the code need if no request were refused? A copy of the predicting process goes on where the first was, with the request granted, and tells its peaks.

It is made by ``fork`` at that very moment, shows nothing, and ends with the process that it was made of. What its code writes to files is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import select
import signal
import time
import warnings
from typing import Any, NoReturn

from nbmemprof.prediction import speaking
from nbmemprof.prediction.child import interrupts_held

__all__ = ["Beyond"]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_MARGIN_S = 2.0  # before the time of the whole prediction is over
_STILL_S = 5.0  # a copy that has computed nothing for so long waits for a thread that is not there


class Beyond:
    """One run's copy, made at its first refusal; ``asked``: whether there was one.

    Parameters
    ----------
    seconds
        What the whole prediction may take.
    """

    def __init__(self, seconds: float) -> None:
        self.copy = False  # this process is the copy
        self.at: int | None = None  # events of the record when it was made
        self._deadline = time.monotonic() + max(0.5 * seconds, seconds - _MARGIN_S)
        self._pid = self._pipe = -1
        self._answer: dict[str, Any] | None = None

    def go_on(self, at: int) -> bool:
        """Make the copy where there is none yet; True in the copy."""
        if self.at is not None:
            return False
        self.at = at
        if not hasattr(os, "fork"):
            return False
        parent = os.getpid()
        read, write = os.pipe()
        with interrupts_held(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python warns of threads that do not live on; a copy that waits for one is ended in time
            self._pid = os.fork()
        if self._pid:
            os.close(write)
            self._pipe = read
            return False
        os.close(read)
        self.copy, self._pipe = True, write
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        speaking.be_silent()
        return True

    def tell(self, answer: dict[str, Any]) -> NoReturn:
        """In the copy: give the answer and end."""
        try:
            data = pickle.dumps(answer)
            while data:
                data = data[os.write(self._pipe, data) :]
        finally:
            os._exit(0)

    def answer(self) -> dict[str, Any] | None:
        """What the copy found; None where it found nothing in time, stands still, or ended early."""
        if self._pid <= 0:
            return self._answer
        data, busy, moved = b"", -1, time.monotonic()
        try:
            while True:
                now = time.monotonic()
                if select.select([self._pipe], [], [], max(0.0, min(0.5, self._deadline - now)))[0]:
                    part = os.read(self._pipe, 1 << 16)
                    if not part:
                        break
                    data += part
                    continue
                ticks = _ticks(self._pid)
                busy, moved = (busy, moved) if ticks == busy else (ticks, now)
                if now >= self._deadline or now - moved > _STILL_S:
                    break
        except KeyboardInterrupt:  # the user has waited long enough
            pass
        finally:
            self._end()
        with contextlib.suppress(pickle.UnpicklingError, EOFError):
            self._answer = pickle.loads(data)  # noqa: S301 - written by our own copy
        return self._answer

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)
        os.close(self._pipe)
        self._pid = -1


def _ticks(pid: int) -> int:
    """Time that a process has computed, in the kernel's ticks (proc(5): utime and stime)."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:  # noqa: PTH123 - a line of a file that is no file
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return -1
    return int(fields[11]) + int(fields[12])
