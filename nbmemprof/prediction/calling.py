"""A function under fake tensors in a child: forked where that is safe, else fresh and carried over; its record comes back, its error is raised here."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from nbmemprof import _optional
from nbmemprof.prediction import calibrating, carrying, deciding, engine, raising, speaking
from nbmemprof.prediction.catalogue import GPU
from nbmemprof.prediction.child import Child, Limits, PredictionFailed, forked, fresh, refuses_fork
from nbmemprof.prediction.recorder import Record
from nbmemprof.prediction.room import Terms

__all__ = ["record_of", "serve"]


def record_of(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], gpu: GPU, rules: str, limits: Limits, choices: dict[Any, str], terms: Terms) -> Record:
    """Run ``fn`` in a child and return what its fake run recorded; that ends where an out-of-memory error ends it.

    Raises
    ------
    PredictionFailed
        The child ended early.
    """
    torch = _optional.loaded("torch")
    found: dict[str, Any] = {}
    earlier = deciding.reading((fn, *args, *kwargs.values()))
    if hasattr(os, "fork") and not (torch is not None and torch.cuda.is_initialized()):
        _listen(forked(lambda line: _run(line, lambda: (fn, args, kwargs), gpu, rules, choices, terms, earlier), limits), limits, found)
    if not found or _refuses_fork(found):
        found.clear()
        packed = carrying.pack({"call": (fn, args, kwargs)}, "CUDA is in use in this process")
        if packed.left:
            raise PredictionFailed(f"The call can't be carried into a fresh process ({packed.left['call']}). Take what can't be pickled out of the function and its arguments.")
        child = fresh("nbmemprof.prediction.calling:serve", limits, {"CUDA_VISIBLE_DEVICES": ""})
        child.send(packed.data, gpu, rules, choices, terms)
        _listen(child, limits, found)
    if "error" in found:
        raise _error(*found["error"])
    record: Record = found["record"][0]
    return record


def serve(line: Connection) -> None:
    """In a fresh process: take a call and run it."""
    data, gpu, rules, choices, terms = pickle.loads(line.recv_bytes())  # noqa: S301 - from the process that made this one
    _run(line, lambda: carrying.load_tensors(data, None, lambda device: device)["call"], gpu, rules, choices, terms)


def _listen(child: Child, limits: Limits, found: dict[str, Any]) -> None:
    try:
        child.listen(lambda message: _heard(message, found), limits)
    finally:
        child.close()


def _heard(message: tuple[Any, ...], found: dict[str, Any]) -> None:
    """What is printed appears here; the rest is kept."""
    if message[0] == "stream":
        (sys.stderr if message[1] == "stderr" else sys.stdout).write(message[2])
    else:
        found[message[0]] = message[1:]


def _run(line: Connection, what: Callable[[], Any], gpu: GPU, rules: str, choices: dict[Any, str], terms: Terms, earlier: Any = ()) -> None:
    sys.stdout, sys.stderr = speaking.Stream(line, "stdout"), speaking.Stream(line, "stderr")
    calibrating.chosen.update(choices)
    torch = _optional.require("torch", feature="a prediction")
    torch.set_num_threads(1)
    try:
        with engine.Session(gpu, torch_rules=rules, terms=terms) as session:
            session.lines.end_at(_run.__code__)
            session.lines.called_from(sys._getframe(1))
            session.begin()
            try:
                with session.lines.before(deciding.BEFORE):
                    fn, args, kwargs = what()
                deciding.again(torch, session, list(earlier))
                result = fn(*args, **kwargs)
                del result, args, kwargs
                session.record.caught = True
            except torch.OutOfMemoryError as error:
                if not session.room.ended(error):
                    raise
                held = error  # its frames hold what was live, as they would where it is shown  # noqa: F841
            finally:
                session.finish()
        answer: tuple[Any, ...] = ("record", session.record)
    except BaseException as error:  # every error is the caller's
        text = "".join(traceback.format_exception(speaking.pruned(type(error), error, error.__traceback__)[1]))
        answer = ("error", raising.packed(error), text, f"{type(error).__name__}: {error}")
    sys.stdout.flush()
    sys.stderr.flush()
    speaking.send(line, *answer)
    speaking.send(line, "done", True)


def _refuses_fork(found: dict[str, Any]) -> bool:
    """The driver or autograd's threads were in use before the fork, and torch refuses in such a process."""
    return "error" in found and "CantFake" in found["error"][1] and refuses_fork(found["error"][1])


def _error(data: bytes | None, text: str, words: str) -> BaseException:
    error = raising.unpacked(data) or PredictionFailed(words)
    error.add_note(f"In the predicted code:\n{text}")
    return error
