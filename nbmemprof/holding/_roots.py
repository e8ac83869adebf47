"""Where a search begins: the user's names, running code, modules, and what the notebook keeps of its own accord."""

from __future__ import annotations

import builtins
import contextvars
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType, ModuleType
from typing import Any

from nbmemprof.holding._parts import OPTIMIZED, file_line, frame_locals, function_name, has_base, own_dict

__all__ = ["Root", "Slot", "handled", "machinery", "modules", "names", "notebook_names", "running"]

_UNDERS = ("_", "__", "___")
_KEPT_BY_SYS = ("last_exc", "last_value", "last_traceback")
_KEPT_BY_TB = ("tb", "pdb", "etb")
_HISTORY = ("_oh", "Out", "_ih", "In", "_dh", "_i", "_ii", "_iii", "_memprof", "__builtins__", "__builtin__")


@dataclass(frozen=True)
class Root:
    """A thing from which the search begins, and how it is called."""

    thing: Any
    label: str
    kind: str
    where: str = ""


@dataclass(frozen=True)
class Slot:
    """A place of the notebook's machinery that keeps a thing: who refers to it, and how it is let go."""

    thing: Any
    label: str
    kind: str
    owners: tuple[Any, ...] = ()
    clear: Callable[[], None] = field(default=lambda: None)


# ---------------------------------------------------------------------- the user's
def names(namespace: Mapping[str, Any], shell: Any = None) -> Iterator[Root]:
    """The user's variables; what the notebook put there is left out, and so are modules, which are roots of their own."""
    hidden = notebook_names(shell) if shell is not None and namespace is shell.user_ns else {}
    plain = dict.items(namespace) if has_base(type(namespace), dict) else namespace.items()  # type: ignore[arg-type]
    for name, value in list(plain):
        if hidden.get(name) is value or (hidden and name in _HISTORY) or has_base(type(value), ModuleType):
            continue
        yield Root(value, str(name), "variable")


def notebook_names(shell: Any) -> dict[str, Any]:
    """Names in the user's namespace that are the notebook's: what it had at the start, ``_``, ``_3``; those that the user has bound anew are not."""
    space = shell.user_ns
    found = dict(getattr(shell, "user_ns_hidden", {}))
    found |= {f"_{number}": value for number, value in dict.items(space.get("_oh") or {})}
    hook = own_dict(shell.displayhook) or {}
    found |= {name: hook[name] for name in _UNDERS if name in hook}
    return {name: value for name, value in found.items() if name in space and space[name] is value}


# ---------------------------------------------------------------------- running code
def running() -> Iterator[Root]:
    """Local variables of what runs now, in this thread and in others; our own functions are left out."""
    mine, threads = threading.get_ident(), {t.ident: t.name for t in list(getattr(threading, "_active", {}).values())}  # enumerate() would take a lock
    for ident, top in sys._current_frames().items():
        kind, of = ("local", "") if ident == mine else ("thread", f" in thread {threads.get(ident, ident)}")
        frame: FrameType | None = top
        while frame is not None:
            if not _ours(frame) and not (frame.f_code.co_flags & OPTIMIZED == 0 and frame.f_locals is frame.f_globals):
                where = f"{function_name(frame)} ({file_line(frame)}){of}"
                for name, value in frame_locals(frame):
                    yield Root(value, name, kind, where)
            frame = frame.f_back
    for variable, value in list(contextvars.copy_context().items()):
        yield Root(value, f"context variable {variable.name}", "module")


def _ours(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__")
    return type(module) is str and module.startswith("nbmemprof.")


def handled() -> Iterator[Root]:
    """Exceptions that are being handled now, in each thread."""
    for found in sys._current_exceptions().values():
        error = found[1] if type(found) is tuple else found
        if error is not None:
            yield Root(error, "the exception being handled", "handled")


def modules(namespace: Mapping[str, Any]) -> Iterator[Root]:
    """Every module but the one that the user's variables are in."""
    for name, module in list(sys.modules.items()):
        if module is not None and own_dict(module) is not namespace:
            yield Root(module, str(name), "module")


# ---------------------------------------------------------------------- the notebook's machinery
def machinery(shell: Any = None) -> list[Slot]:
    """Every place where an interpreter or a notebook keeps results and errors without being asked."""
    found = list(_last_error())
    if shell is not None:
        found += [*_tracebacks(shell), *_last_result(shell), *_outputs(shell)]
    plain = own_dict(builtins)
    if plain is not None and "_" in plain:  # the plain interpreter's last value (gettext's function is a module's own)
        found.append(Slot(plain["_"], "_", "output", (plain,), lambda: plain.pop("_", None)))
    return [slot for slot in found if slot.thing is not None]


def _last_error() -> Iterator[Slot]:
    space = own_dict(sys) or {}
    for name in _KEPT_BY_SYS:
        if name in space:

            def clear(name: str = name) -> None:
                space.pop(name, None)
                space.pop("last_type", None)  # where one is missing the shell takes none

            yield Slot(space[name], f"sys.{name}", "traceback", (space,), clear)


def _tracebacks(shell: Any) -> Iterator[Slot]:
    shell_dict = own_dict(shell) or {}
    for keeper in ("InteractiveTB", "SyntaxTB", "CustomTB"):
        it = shell_dict.get(keeper)
        space = own_dict(it) if it is not None else None
        for name in (*_KEPT_BY_TB, "last_syntax_error"):
            if space is not None and space.get(name) is not None:
                label = "the debugger of %debug" if name == "pdb" else f"the shell's {keeper}.{name}"
                yield Slot(space[name], label, "traceback", (it, space), lambda it=it, name=name: setattr(it, name, None))  # type: ignore[misc]


def _last_result(shell: Any) -> Iterator[Slot]:
    values = (own_dict(shell) or {}).get("_trait_values") or {}
    result = values.get("last_execution_result")
    if result is not None:

        def clear() -> None:
            if values.get("last_execution_result") is result:
                shell.last_execution_result = None

        yield Slot(result, "the shell's last_execution_result", "result", (shell, values), clear)


def _outputs(shell: Any) -> Iterator[Slot]:
    space, hook = shell.user_ns, own_dict(shell.displayhook) or {}
    hidden = getattr(shell, "user_ns_hidden", {})
    history = space.get("_oh")
    if type(history) is dict:
        for number, value in list(dict.items(history)):

            def clear(number: Any = number, value: Any = value) -> None:
                history.pop(number, None)
                for names in (space, hidden):
                    if names.get(f"_{number}") is value:
                        del names[f"_{number}"]

            yield Slot(value, f"Out[{number}]", "output", (history, space, hidden), clear)
    for name in _UNDERS:
        value = hook.get(name)
        if value is None or type(value) is str:
            continue

        def blank(name: str = name, value: Any = value) -> None:
            if hook.get(name) is value:
                setattr(shell.displayhook, name, "")  # as the shell itself does when its cache is flushed
            for names in (space, hidden):
                if names.get(name) is value:
                    names[name] = ""

        yield Slot(value, name, "output", (shell.displayhook, hook, space, hidden), blank)
