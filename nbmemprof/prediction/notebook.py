"""From the kernel's side: a cell predicted in a child, and a session of one fake child for the cells that follow.

The cell's text stays as it is; its tree is replaced by a call of what is here (:class:`Elsewhere`), so that history, ``In``
and errors are a plain cell's. Its output comes back as a plain cell's too; its names stay in the child.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import polars as pl

from nbmemprof import _optional, schema
from nbmemprof.capture import Capture
from nbmemprof.prediction import calibrating, carrying, feed, imported, serving
from nbmemprof.prediction.catalogue import GPU, find
from nbmemprof.prediction.child import Child, Limits, PredictionFailed, forked, fresh, refuses_fork
from nbmemprof.prediction.earlier import Earlier, read
from nbmemprof.prediction.hearing import Hearing
from nbmemprof.prediction.room import Terms
from nbmemprof.units import format_bytes, parse_bytes

__all__ = ["Asked", "Elsewhere", "FakeSession", "asked", "call", "cell", "fork_hurts"]

# their threads do not live on in a forked process, and a call would wait for them for ever
_THREADED = {"polars", "nbmemprof", "jax", "tensorflow", "grpc", "cudf"}
_waiting: dict[int, Callable[[], None]] = {}


@dataclass(frozen=True)
class Asked:
    """What a line asks for: the GPU, its allocator's settings, what the child may take."""

    gpu: GPU
    capacity_bytes: int | None = None
    limit_bytes: int | None = None
    conf: str = ""
    limits: Limits = field(default_factory=Limits)
    calibrate: bool = False

    @property
    def title(self) -> str:
        """As a person says it."""
        return self.gpu.name


def asked(words: str, *, limit: int | None = None, conf: str | None = None, seconds: float | None = None, host: int | None = None, calibrate: bool = False) -> Asked:
    """Understand ``H200`` or ``H200:80GiB`` and what stands beside it.

    Raises
    ------
    NbmemprofError
        There is no such GPU or size.
    """
    name, colon, size = words.partition(":")
    return Asked(find(name), parse_bytes(size) if colon else None, limit, conf or "", Limits(seconds or Limits.seconds, host), calibrate)


# ---------------------------------------------------------------------- a cell's tree is replaced by a call
class Elsewhere(ast.NodeTransformer):
    """Stands among the shell's AST transformers for one cell and puts a call of ``do`` in place of its code."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do

    def visit(self, node: ast.AST) -> Any:
        """Return the other tree."""
        if not isinstance(node, ast.Module):
            return node
        _waiting[id(self)] = self._do
        return ast.parse(f"__import__({__name__!r}, fromlist=['call']).call({id(self)})")


def call(key: int) -> None:
    """Do what a cell was replaced by."""
    _waiting.pop(key)()


# ---------------------------------------------------------------------- one cell
def cell(shell: Any, text: str, number: int | None, wanted: Asked, *, history: Sequence[str] = (), failed: Sequence[str] = (), quiet: Callable[[], None] = lambda: None) -> tuple[Capture | None, Hearing]:
    """Predict one cell in a child that ends with it.

    Parameters
    ----------
    text
        The cell, without our own line.
    history
        Cells that ran before, in order: read, not run.
    failed
        Those that failed for want of a GPU: run first, in the child.
    quiet
        Called in a forked child: takes our hooks off its copy of the shell.

    Returns
    -------
    The capture, None where the child's shell did not get as far, and what can raise the cell's own error.

    Raises
    ------
    PredictionFailed
        The child ended early, or this torch can't be faked.
    """
    earlier = _earlier(history)
    job = serving.Job(text, number or 0, tuple((_number_of(shell, one, number or 0), one) for one in failed), earlier, terms=Terms(wanted.conf, wanted.capacity_bytes, wanted.limit_bytes, wanted.limits.seconds))
    started, zero = datetime.now(UTC).astimezone().isoformat(timespec="seconds"), _clock()
    hearing = _run(shell, job, wanted, quiet)
    if "refused" in hearing.others:
        raise PredictionFailed(hearing.others["refused"][1])
    if "record" not in hearing.others:
        return None, hearing
    _, record, since, warnings, versions = hearing.others["record"]
    gpu, extra = wanted.gpu, {}
    if wanted.calibrate:
        seen = calibrating.look(record.used, list(calibrating.calls(record)), gpu)
        if calibrating.differs(record, seen):  # with the kernels that torch takes here
            hearing = _run(shell, replace(job, choices=seen.kernels), wanted, quiet, silent=True)
            _, record, since, warnings, versions = hearing.others.get("record", ("record", record, since, warnings, versions))
        extra, gpu = calibrating.told(gpu, seen), calibrating.calibrated(gpu, seen)
        warnings = [*warnings, *extra.pop("warnings", [])]
    meta: dict[str, Any] = extra | {"warnings": warnings, "versions": versions, "cell": number, "title": None, "started": started, "duration_us": (_clock() - zero) * 1e6, "recording": feed.NOTHING_SPENT}
    capture = feed.capture_of(record, gpu, conf=wanted.conf, torch=wanted.gpu.torch, limit_bytes=wanted.limit_bytes, capacity_bytes=wanted.capacity_bytes, since=since, meta=meta)
    mark = schema.fill("marks", {"time_us": 0.0, "end_us": meta["duration_us"], "kind": "cell", "name": f"In[{number}]" if number is not None else "cell"}, height=1)
    capture.tables["marks"] = pl.concat([capture.tables["marks"], mark], how="diagonal")
    return capture, hearing


def _run(shell: Any, job: serving.Job, wanted: Asked, quiet: Callable[[], None], *, silent: bool = False) -> Hearing:
    """Run a job in a child, forked where that is safe; ``silent``: its output was shown before."""
    why = next(filter(None, (fork_hurts(shell, shell.transform_cell(text)) for text in (job.text, *(text for _, text in job.failed)))), None)
    if why is None:
        hearing = _listen(shell, forked(lambda line: serving.copy(line, shell, wanted.gpu, job, quiet), wanted.limits), wanted, silent=silent)
        if "refused" in hearing.others and refuses_fork(hearing.others["refused"][1]):
            why = "torch refuses to go on in a forked process"
    if why is not None:
        child = fresh("nbmemprof.prediction.serving:serve", wanted.limits, {"CUDA_VISIBLE_DEVICES": ""})
        child.send("begin", serving.Setting(wanted.gpu, shell.colors, wanted.conf, wanted.capacity_bytes, wanted.limit_bytes, seconds=wanted.limits.seconds))
        child.send("namespace", carrying.pack(shell.user_ns, why))
        child.send("job", job)
        hearing = _listen(shell, child, wanted, silent=silent)
    return hearing


def _listen(shell: Any, child: Child, wanted: Asked, *, silent: bool) -> Hearing:
    hearing = Hearing(shell, child, silent=silent)
    try:
        hearing.done(child.listen(hearing, wanted.limits))
    except PredictionFailed as error:
        raise PredictionFailed(f"{error}{hearing.where}") from error
    finally:
        child.close()
    if hearing.short_of_memory:
        print(f"memprof: the prediction's process may take {format_bytes(wanted.limits.bytes())} of this machine's memory; --predict-host allows more.", file=sys.stderr)  # noqa: T201 - beside the cell's error
    return hearing


def _earlier(history: Sequence[str]) -> Earlier:
    """What earlier cells decided for want of a GPU; nothing where there is one."""
    torch = _optional.loaded("torch")
    here = torch is not None and not torch.cuda.is_available()
    found = read(history, imported.modules() if here else None)
    return found if here else Earlier(lines=found.lines)


def _number_of(shell: Any, text: str, other: int) -> int:
    """The number under which a cell ran last; ``other`` where none is known."""
    texts = list(shell.history_manager.input_hist_raw) if shell.history_manager is not None else []
    return max((number for number, one in enumerate(texts) if one == text), default=other)


def _clock() -> float:
    import time

    return time.perf_counter()


def fork_hurts(shell: Any, text: str) -> str | None:
    """Why a forked copy of this process could not run the cell; None where it can."""
    import os

    if not hasattr(os, "fork"):
        return "this system has no fork"
    torch = _optional.loaded("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is in use in this process"
    try:
        names = {one.id for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Name)} | {
            alias.name.partition(".")[0] for one in ast.walk(ast.parse(text)) if isinstance(one, (ast.Import, ast.ImportFrom)) for alias in one.names
        }
    except (SyntaxError, ValueError):
        return None
    return _threaded(shell.user_ns, names, set())


def _threaded(namespace: dict[str, Any], names: set[str], seen: set[int]) -> str | None:
    for name in names:
        value = namespace.get(name, sys.modules.get(name) if name in _THREADED else None)
        if value is None or id(value) in seen:
            continue
        seen.add(id(value))
        top = (getattr(value, "__name__", "") if isinstance(value, type(sys)) else getattr(value, "__module__", None) or type(value).__module__).partition(".")[0]
        if top in _THREADED:
            return f"{name!r} is of {top}, whose threads don't live on in a forked process"
        code = getattr(value, "__code__", None)
        if code is not None and getattr(value, "__globals__", None) is namespace:
            why = _threaded(namespace, _names_of(code), seen)
            if why is not None:
                return why
    return None


def _names_of(code: Any) -> set[str]:
    """Global names of a function and of those within it."""
    return set(code.co_names).union(*(_names_of(inner) for inner in code.co_consts if isinstance(inner, type(code))))


# ---------------------------------------------------------------------- a session
class FakeSession:
    """One fake child for the cells that follow. ``run`` a cell in it, ``close`` it."""

    def __init__(self, shell: Any, wanted: Asked) -> None:
        self.shell, self.wanted, self.cells = shell, wanted, 0
        self.ended: str | None = None
        self.made: dict[str, None] = {}  # names that its cells bound, in order
        self.child = fresh("nbmemprof.prediction.serving:serve", wanted.limits, {"CUDA_VISIBLE_DEVICES": ""})
        self.child.send("begin", serving.Setting(wanted.gpu, shell.colors, wanted.conf, wanted.capacity_bytes, wanted.limit_bytes, lasting=True, seconds=wanted.limits.seconds))

    def run_again(self, cells: Sequence[tuple[int, str]]) -> list[str]:
        """Run the cells that ran here before, without their output; returns what is to be said of them."""
        hearing = self._do("again", list(cells))
        return list(hearing.others.get("again", ("", []))[1])

    def run(self, text: str, number: int) -> tuple[Capture | None, str | None, Hearing]:
        """Run a cell; returns the capture that it bound to ``_memprof`` there, the other name of it, and what can raise its error."""
        hearing = self._do("cell", text, number)
        self.cells += 1
        self.made |= dict.fromkeys(hearing.others.get("names", ("", ()))[1])
        made = hearing.others.get("capture")
        return (None, None, hearing) if made is None else (carrying.capture(made[1]), made[2], hearing)

    def _do(self, *message: Any) -> Hearing:
        if self.ended is not None:
            raise PredictionFailed(f"{self.ended} Begin again: %memprof predict on {self.wanted.title}; or go on here: %memprof predict off.")
        hearing = Hearing(self.shell, self.child)
        try:
            self.child.send(*message)
            hearing.done(self.child.listen(hearing, self.wanted.limits))
        except (PredictionFailed, KeyboardInterrupt, BrokenPipeError) as error:
            if not self.child.alive or isinstance(error, BrokenPipeError):
                self.ended = "The fake session has ended, and with it what its cells made."
                self.child.close()
            if isinstance(error, BrokenPipeError):
                raise PredictionFailed(f"{self.ended} The prediction's process {self.child.ending(self.wanted.limits)}") from error
            if isinstance(error, PredictionFailed):
                raise PredictionFailed(f"{error}{hearing.where} The fake session has ended with it; %memprof predict on {self.wanted.title} begins again, %memprof predict off goes on here.") from error
            raise
        if "refused" in hearing.others:
            self.close()
            raise PredictionFailed(hearing.others["refused"][1])
        return hearing

    def close(self) -> None:
        """End it."""
        self.ended = self.ended or "The fake session was ended."
        self.child.close()
