"""An interrupt that comes while a prediction's process is being made comes once: here, and to nobody else."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

from nbmemprof.prediction.child import Child, Limits, forked

_at_fork: list[Any] = []
os.register_at_fork(before=lambda: [do("before") for do in _at_fork], after_in_parent=lambda: [do("after") for do in _at_fork])


@pytest.fixture
def other() -> Iterator[threading.Thread]:
    """Another thread, which may be the one that takes a signal."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    yield thread
    done.set()


def masked() -> set[int]:
    return {int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def tells(line: Connection) -> None:
    line.send_bytes(pickle.dumps(("told", masked(), signal.getsignal(signal.SIGINT) is signal.default_int_handler)))
    line.send_bytes(pickle.dumps(("done", True)))


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("taken_by", ["main", "other"])
def test_an_interrupt_around_the_fork_is_raised_once_and_the_child_ends(other, moment, taken_by, monkeypatch):
    made: list[Child] = []
    monkeypatch.setattr(Child, "close", lambda self, close=Child.close: (made.append(self), close(self)))
    target = threading.main_thread() if taken_by == "main" else other
    here, handler, raised = masked(), signal.getsignal(signal.SIGINT), 0
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes)

    def interrupt(now: str) -> None:
        if now == moment:
            signal.pthread_kill(target.ident, signal.SIGINT)
            if taken_by == "other":
                os.read(reads, 1)  # the other thread has taken it

    _at_fork.append(interrupt)
    try:
        forked(lambda _line: time.sleep(30), Limits())
    except KeyboardInterrupt:
        raised += 1
    finally:
        _at_fork.clear()
        signal.set_wakeup_fd(before)
    try:
        for _ in range(100):
            time.sleep(0.0001)  # a second one would come now
    except KeyboardInterrupt:
        raised += 1
    assert raised == 1
    assert not made[0].alive and made[0]._status == -signal.SIGKILL
    assert (masked(), signal.getsignal(signal.SIGINT)) == (here, handler)


def test_an_interrupt_for_the_child_waits_until_it_has_its_own_handler():
    child = forked(lambda _line: time.sleep(30), Limits())
    os.kill(child.pid, signal.SIGINT)  # most likely before it runs its first line
    begun = time.monotonic()
    child._wait(block=True)
    assert child._status == 1 and time.monotonic() - begun < 25  # by the exception in its sleep
    child.close()
    told: list[Any] = []
    child = forked(tells, Limits())
    child.listen(told.append, Limits())
    child.close()
    assert told == [("told", masked(), True)]
