"""In the child: the fake session, and the user's cells in it.

``copy`` runs in a fork of the kernel and has its names; ``serve`` in a fresh process, which is sent names, a job, or cells to run one after
the other. What they say goes over the line (:mod:`nbmemprof.prediction.speaking`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import pickle
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from nbmemprof import _optional
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction import adopting, aside, calibrating, carrying, deciding
from nbmemprof.prediction.catalogue import GPU
from nbmemprof.prediction.earlier import Earlier
from nbmemprof.prediction.engine import Session
from nbmemprof.prediction.room import Terms
from nbmemprof.prediction.speaking import send, speak
from nbmemprof.units import format_bytes

__all__ = ["Job", "Setting", "copy", "current", "serve"]

current: Lasting | None = None  # the session that lives in this process
BEFORE = "earlier cells"  # stands for the lines of what was there before, where they are not known
_SKIPPED = re.compile(r"^\s*(?:!|%pip|%conda|%memprof\b|%load_ext\s+nbmemprof|%reload_ext\s+nbmemprof|%unload_ext\s+nbmemprof)")
_SKIPPED_CELLS = ("bash", "sh", "script", "writefile", "html", "javascript", "js", "cmd", "system", "sx", "!")


@dataclass(frozen=True)
class Job:
    """One cell, and what is to happen before it."""

    text: str
    number: int
    failed: tuple[tuple[int, str], ...] = ()
    earlier: Earlier = field(default_factory=Earlier)
    choices: dict[Any, str] = field(default_factory=dict)  # attention kernels that were seen on the GPU
    terms: Terms = field(default_factory=Terms)


@dataclass(frozen=True)
class Setting:
    """What a fresh child is made for."""

    gpu: GPU
    colors: str = "nocolor"
    conf: str = ""
    capacity_bytes: int | None = None
    limit_bytes: int | None = None
    lasting: bool = False
    seconds: float = Terms.seconds

    @property
    def terms(self) -> Terms:
        """What a run may take."""
        return Terms(self.conf, self.capacity_bytes, self.limit_bytes, self.seconds)


@dataclass
class Lasting:
    """A session that outlives a cell, for the source that makes captures of it."""

    session: Any
    setting: Setting


# ---------------------------------------------------------------------- a fork of the kernel
def copy(line: Connection, shell: Any, gpu: GPU, job: Job, quiet: Callable[[], None]) -> None:
    """Run a job in a forked copy of the kernel."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    quiet()
    speak(shell, line)
    _settle(shell)
    with contextlib.suppress(_Told), _session(line, gpu, job.terms) as session:
        _job(line, shell, session, job)


def _settle(shell: Any) -> None:
    """Let a shell go on alone: no history file, no event loop of the kernel's."""
    history = shell.history_manager
    history.enabled = False
    history.db_input_cache_lock = history.db_output_cache_lock = threading.Lock()
    shell.loop_runner = asyncio.run
    gc.freeze()


# ---------------------------------------------------------------------- a fresh process
def serve(line: Connection) -> None:
    """Do what is asked over the line until it ends."""
    global current  # noqa: PLW0603 - there is one session in a process
    _, setting = pickle.loads(line.recv_bytes())  # noqa: S301 - from the kernel that made this child
    shell = _shell(setting)
    speak(shell, line)
    with contextlib.suppress(_Told, EOFError), _session(line, setting.gpu, setting.terms) as session:
        if setting.lasting:
            current = Lasting(session, setting)
            shell.run_line_magic("load_ext", "nbmemprof")
            aside.step_aside()
        while True:
            kind, *rest = pickle.loads(line.recv_bytes())  # noqa: S301 - as above
            _SERVED[kind](line, shell, session, *rest)
    os._exit(0)


def _shell(setting: Setting) -> Any:
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    with contextlib.suppress(Exception):  # a theme that this version does not have
        shell.colors = setting.colors
    shell.loop_runner = asyncio.run
    return shell


def _namespace(line: Connection, shell: Any, session: Any, packed: carrying.Packed) -> None:
    with session.lines.before(BEFORE):
        carrying.unpack(packed, shell, session)


def _again(line: Connection, shell: Any, session: Any, cells: list[tuple[int, str]]) -> None:
    """Run earlier cells; only what went wrong is told."""
    told = []
    for number, text in cells:
        body, left = _quiet_lines(text)
        if left:
            told.append(f"In[{number}]: left out: {', '.join(left)}")
        send(line, "doing", f"In[{number}]")
        with _mute(shell) as errors:
            result = _run(shell, body, number)
        if not result.success:
            told.append(f"In[{number}] failed here: {errors[-1] if errors else result.error_in_exec or result.error_before_exec}")
    send(line, "again", told)
    send(line, "done", True)


def _quiet_lines(text: str) -> tuple[str, list[str]]:
    """A cell without what installs, writes or asks for us; what was left out."""
    first = next((row for row in text.splitlines() if row.strip()), "")
    magic = re.match(r"%%(\S+)", first)
    if magic and magic[1] in _SKIPPED_CELLS:
        return "", [first.strip()]
    rows, left = [], []
    for row in text.splitlines(keepends=True):
        if _SKIPPED.match(row):
            left.append(row.strip())
            rows.append("pass\n" if row[:1].isspace() else "\n")
        elif re.match(r"%%memprof\b", row):
            rows.append("# " + row)
        else:
            rows.append(row)
    return "".join(rows), [one for one in left if not one.startswith(("%memprof", "%load_ext", "%reload_ext", "%unload_ext"))]


@contextlib.contextmanager
def _mute(shell: Any) -> Iterator[list[str]]:
    """No output; the errors in words."""
    errors: list[str] = []
    kept = (sys.stdout, sys.stderr, shell._showtraceback, shell.display_pub.publish, shell.displayhook.write_format_data)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - a stream, not a file
        sys.stdout = sys.stderr = nowhere
        shell._showtraceback = lambda _kind, value, _lines: errors.append(f"{type(value).__name__}: {value}".splitlines()[0])
        shell.display_pub.publish = shell.displayhook.write_format_data = lambda *_args, **_kwargs: None
        try:
            yield errors
        finally:
            sys.stdout, sys.stderr, shell._showtraceback = kept[:3]
            del shell.display_pub.publish, shell.displayhook.write_format_data


def _cell(line: Connection, shell: Any, session: Any, text: str, number: int) -> None:
    """Run one cell of the lasting session; a capture that it made is told."""
    before = shell.user_ns.get("_memprof")
    names = set(shell.user_ns)
    session.begin()
    result = _run(shell, text, number)
    session.finish()
    send(line, "names", [name for name, value in shell.user_ns.items() if name not in names and not name.startswith("_") and not isinstance(value, type(sys))])
    made = shell.user_ns.get("_memprof")
    if made is not None and made is not before:
        other = next((name for name, value in shell.user_ns.items() if value is made and not name.startswith("_")), None)
        with tempfile.TemporaryDirectory() as folder:
            send(line, "capture", made.save(Path(folder, "capture.nbmem")).read_bytes(), other)
    send(line, "done", result.success)


# ---------------------------------------------------------------------- both
class _Told(Exception):
    """What went wrong was said over the line."""


@contextlib.contextmanager
def _session(line: Connection, gpu: GPU, terms: Terms) -> Iterator[Any]:
    """The fake session; where this torch can't be faked, that is said."""
    opened = contextlib.ExitStack()
    try:
        torch = _optional.require("torch", feature="a prediction")
        torch.set_num_threads(1)  # a forked process has no worker threads
        session = opened.enter_context(Session(gpu, terms=terms))
    except NbmemprofError as error:
        opened.close()
        send(line, "refused", str(error))
        send(line, "done", False)
        raise _Told from error
    try:
        yield session
    finally:
        opened.close()


def _job(line: Connection, shell: Any, session: Any, job: Job) -> None:
    """Run one cell and tell what it took."""
    torch = _optional.require("torch", feature="a prediction")
    calibrating.chosen.update(job.choices)
    record, warnings, since, success = session.record, [], 0, False
    session.begin()
    try:
        warnings = _prepare(torch, shell, session, job, lambda what: send(line, "doing", what))
        since, elsewhere = len(record.events), record.elsewhere
        result = _run(shell, job.text, job.number)
        if len(record.events) == since and record.elsewhere > elsewhere:
            warnings.insert(0, f"{'no events on the device' if record.made else 'empty'}: {_nothing(shell.user_ns, job.text)}")  # of an empty capture the view says it once
        success, record.caught = result.success, not session.room.ended(result.error_in_exec)
    except torch.OutOfMemoryError as error:  # what was there before does not fit
        shell._showtraceback(type(error), error, [f"OutOfMemoryError: {error}", *error.__notes__])
    session.finish(since)
    send(line, "record", record, since, warnings, {"torch": torch.__version__, "python": sys.version.split()[0]})
    send(line, "done", success)


def _prepare(torch: Any, shell: Any, session: Any, job: Job, doing: Callable[[str], None]) -> list[str]:
    """Decide again what hung on a GPU, and move what would have been on it; returns what is to be said of it."""
    namespace, said = shell.user_ns, []
    changed = deciding.decided(namespace, job.earlier)
    changed += deciding.closures(list(namespace.values()), job.earlier)
    if changed:
        said.append(f"decided as on a GPU: {', '.join(changed)}")
    live = {name: value for name, value in namespace.items() if not name.startswith("_") and name in job.earlier.placed}
    with session.lines.before(BEFORE) as before:
        adopted = adopting.adopt(torch, session, live | deciding.of_modules(job.earlier, set(re.findall(r"\w+", job.text))))
    adopting.name_owners(torch, session, session.carried)
    adopting.name_lines(torch, session, namespace, {name: (f"In[{cell}]", line) for name, (cell, line) in job.earlier.lines.items()}, before)
    if adopted.moved:
        said.append("taken as on the GPU, where earlier cells would have put it: " + ", ".join(f"{name} ({format_bytes(size)})" for name, size in adopted.moved.items()))
    said += [f"left on the CPU: {name} ({why})" for name, why in adopted.left.items()]
    for number, text in job.failed:
        doing(f"an earlier cell that failed for want of a GPU ({text.strip().partition(chr(10))[0]!r})")
        with _mute(shell) as errors:
            ran = _run(shell, text, number)
        said.append("an earlier cell that failed here for want of a GPU was run first" if ran.success else f"an earlier cell that failed for want of a GPU fails in the prediction too: {errors[-1] if errors else '?'}")
    doing("")
    for one in deciding.undecided(torch, session, namespace, job.earlier, job.text, {*adopted.moved, *adopted.left}):
        said.append(one)
        session.record.assume(one)
    return said


def _nothing(namespace: dict[str, Any], text: str) -> str:
    """Why a cell's view is empty, with what says ``cpu``."""
    told = ", ".join(deciding.saying_cpu({name: namespace[name] for name in deciding.reached(namespace, text) if name in namespace}))
    return f"the cell asked for no memory of a CUDA device, its tensors were on the CPU{f' ({told})' if told else ''}. Write device='cuda' where its model and tensors are made, or choose the device inside the cell."


def _run(shell: Any, text: str, number: int) -> Any:
    """Run a cell as a plain one that has this number."""
    shell.execution_count = number
    return shell.run_cell(text, store_history=True)


def _serve_job(line: Connection, shell: Any, session: Any, job: Job) -> None:
    _job(line, shell, session, job)


_SERVED: dict[str, Callable[..., None]] = {"namespace": _namespace, "again": _again, "cell": _cell, "job": _serve_job}
