"""A process beside this one for a fake run: forked or fresh, bounded in time and memory, listened to until it is done.

What ends it early (a limit, a signal, a crash of native code) becomes one sentence here; this process goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_bytes

__all__ = ["Child", "Limits", "PredictionFailed", "forked", "fresh", "interrupts_held", "refuses_fork", "relax"]

GRACE_S = 3.0  # how long an interrupted child may take to say where it was
SPARE = 1 << 30  # bytes beyond the limit with which an error can still be told
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PREFERRED_HOST_BYTES = 8 << 30


class PredictionFailed(NbmemprofError):
    """The process of the fake run ended without an answer."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Limits:
    """What a fake run may take on this machine.

    Attributes
    ----------
    seconds
        Time of one call or cell.
    host_bytes
        Memory beyond what the process has when it begins; None: 8 GiB, at most half of what is free.
    """

    seconds: float = 600.0
    host_bytes: int | None = None

    def bytes(self) -> int:
        """The memory limit in bytes."""
        if self.host_bytes is not None:
            return self.host_bytes
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(_PREFERRED_HOST_BYTES, max(2 << 30, free // 2))


class Child:
    """The process and the line to it. ``send`` and ``listen`` carry pickled tuples whose first word is their kind."""

    def __init__(self, pid: int, line: Connection, process: subprocess.Popen[bytes] | None = None) -> None:
        self.pid, self.line, self._process = pid, line, process
        self._status: int | None = None

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._status is None and self._wait(block=False) is None

    def send(self, *message: Any) -> None:
        """Say something to it."""
        self.line.send_bytes(pickle.dumps(message))

    def listen(self, handle: Callable[[tuple[Any, ...]], None], limits: Limits) -> tuple[Any, ...]:
        """Hand over what it says until it says ``done``; returns that message.

        Raises
        ------
        PredictionFailed
            It ended, or took longer than it may.
        KeyboardInterrupt
            This process was interrupted, and the child did not say where it was in time.
        """
        deadline, interrupted = time.monotonic() + limits.seconds, False
        while True:
            try:
                if self.line.poll(min(0.5, max(0.0, deadline - time.monotonic()))):
                    message = pickle.loads(self.line.recv_bytes())  # noqa: S301 - written by our own child
                    if message[0] == "done":
                        return message  # type: ignore[no-any-return]
                    handle(message)
                elif time.monotonic() >= deadline:
                    self._overdue(limits, interrupted=interrupted)
            except (EOFError, ConnectionResetError) as error:
                self._wait(block=True)
                if interrupted:
                    raise KeyboardInterrupt from None
                raise PredictionFailed(f"The prediction's process {self.ending(limits)}") from error
            except KeyboardInterrupt:
                if interrupted or not self.alive:
                    self.kill()
                    raise
                interrupted, deadline = True, time.monotonic() + GRACE_S
                os.kill(self.pid, signal.SIGINT)

    def _overdue(self, limits: Limits, *, interrupted: bool) -> NoReturn:
        self.kill()
        if interrupted:
            raise KeyboardInterrupt
        raise PredictionFailed(f"The prediction took longer than {limits.seconds:g} s and was stopped. Predict fewer steps or smaller shapes, or allow more: --predict-seconds, for a session --seconds.")

    def ending(self, limits: Limits) -> str:
        """How it ended, and what to do."""
        code = self._status or 0
        if code >= 0:
            return f"ended by itself with code {code}, without an answer: something in the code left it (os._exit). Take that out of what is predicted."
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        if name in ("SIGKILL", "SIGABRT"):
            limit = format_bytes(limits.bytes())
            return f"was ended by {name}, most likely for want of memory on this machine (it may take {limit}). Use fewer real CPU tensors in it, or allow more: --predict-host, for a session --host."
        return f"crashed with {name} in native code. This kernel is unharmed. Find the call by predicting less of the code; a library that works on a GPU by itself can't be predicted."

    def kill(self) -> None:
        """End it now."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._wait(block=True)

    def close(self) -> None:
        """End it and give back the line."""
        self.kill()
        self.line.close()

    def _wait(self, *, block: bool) -> int | None:
        if self._status is None:
            if self._process is not None:
                self._status = self._process.wait() if block else self._process.poll()
            else:
                try:
                    pid, status = os.waitpid(self.pid, 0 if block else os.WNOHANG)
                except ChildProcessError:  # somebody waited for all children
                    self._status = 0
                else:
                    self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


# ---------------------------------------------------------------------- how it begins
def refuses_fork(words: str) -> bool:
    """Whether a refusal is of the forked process alone: torch names forks where the driver or autograd's threads were in use; with a GPU here its driver may fail in other words."""
    torch = _optional.loaded("torch")
    return "fork" in words or (torch is not None and torch.version.cuda is not None and torch.cuda.device_count() > 0)


def forked(run: Callable[[Connection], None], limits: Limits) -> Child:
    """A copy of this process that does ``run(line)`` and nothing else."""
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    parent, made = os.getpid(), None
    try:
        with interrupts_held() as mask, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the child runs Python in one thread only
            pid = os.fork()
            if pid == 0:
                _as_copy(run, theirs, ours, parent, limits, mask)
            theirs.close()
            made = Child(pid, Connection(ours.detach()))
    except BaseException:  # the interrupt that was held
        if made is not None:
            made.close()
        raise
    return made


@contextlib.contextmanager
def interrupts_held() -> Iterator[set[int]]:
    """Let an interrupt that comes within the block come at its end, once. Gives the signals that were blocked before.

    In the hooks that run around a fork Python only prints an exception and goes on. The signal is blocked in this thread; where another thread takes it, the
    handler in its place only notes it.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    swapped = before is not None and threading.current_thread() is threading.main_thread()
    if swapped:
        signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield {int(one) for one in mask}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if swapped:
            signal.signal(signal.SIGINT, before)
            if came:
                signal.raise_signal(signal.SIGINT)


def _as_copy(run: Callable[[Connection], None], theirs: socket.socket, ours: socket.socket, parent: int, limits: Limits, mask: set[int]) -> NoReturn:
    code = 1
    try:
        ours.close()
        line = Connection(theirs.detach())
        os.setsid()
        settle(parent, limits)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # an interrupt that came since the fork comes now, to this process's own handler
        run(line)
        code = 0
    finally:
        os._exit(code)  # nothing of the kernel's own endings may run here


def fresh(target: str, limits: Limits, environment: Mapping[str, str] | None = None) -> Child:
    """A new Python that calls ``target`` (``module:function``) with its end of the line."""
    ours, theirs = socket.socketpair()
    module, _, function = target.partition(":")
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\nfrom multiprocessing.connection import Connection\nfrom {module} import {function}\n"
        f"from nbmemprof.prediction.child import Limits, settle\nsettle({os.getpid()}, {limits!r}, ('torch',))\n{function}(Connection({theirs.fileno()}))"
    )
    process = subprocess.Popen(  # noqa: S603 - this very Python
        [sys.executable, "-c", code], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True, env={**os.environ, **(environment or {})},
    )  # fmt: skip
    theirs.close()
    return Child(process.pid, Connection(ours.detach()), process)


def settle(parent: int, limits: Limits, first: Sequence[str] = ()) -> None:
    """In the child: end with the parent, take interrupts as Python does, keep to the memory limit.

    What is imported ``first`` does not count: torch for CUDA alone takes more than a small limit.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in first:
        with contextlib.suppress(Exception):  # whoever needs it says so
            importlib.import_module(name)
    with contextlib.suppress(OSError, ValueError):  # RLIMIT_DATA: private writable memory, as "VmData" of proc(5)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = _data_bytes() + limits.bytes()
        top = soft + SPARE if hard == resource.RLIM_INFINITY else min(hard, soft + SPARE)
        resource.setrlimit(resource.RLIMIT_DATA, (min(soft, top), top))


def relax() -> None:
    """In the child, when memory has run out: as much more as it takes to say so."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _data_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123 - a line of a file that is no file
        return next((int(line.split()[1]) << 10 for line in status if line.startswith("VmData:")), 0)
