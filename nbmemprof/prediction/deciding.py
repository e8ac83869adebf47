"""A function's own globals that hang on a GPU, decided again in a fake run of it: what the magics read from cells, ``mp.predict`` reads from the notebook or the function's file.

``device = "cuda" if torch.cuda.is_available() else "cpu"`` above a function would make it run on the CPU also where a GPU is predicted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import linecache
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from nbmemprof import _optional
from nbmemprof.prediction import adopting
from nbmemprof.prediction.earlier import Earlier, read
from nbmemprof.units import format_bytes

__all__ = ["BEFORE", "again", "on_the_cpu", "reading"]

BEFORE = "before the call"  # stands for the lines of what was there before, where they are not known


def reading(call: Iterable[Any]) -> list[tuple[FunctionType, Earlier]]:
    """What was decided for want of a GPU above the functions of a call; nothing where there is a GPU."""
    torch = _optional.loaded("torch")
    if torch is None or torch.cuda.is_available():
        return []
    found = [(function, read(_texts(function.__globals__))) for function in _functions(call)]
    return [(function, earlier) for function, earlier in found if earlier.again or earlier.placed]


def again(torch: Any, session: Any, found: list[tuple[FunctionType, Earlier]]) -> None:
    """In the child: decide it as on a GPU, move what the functions use of what would have been there, and say so."""
    for function, earlier in found:
        namespace, names = function.__globals__, _reached(function)
        before = {name: repr(namespace.get(name)) for name in earlier.hanging}
        for statement in earlier.again:
            with contextlib.suppress(Exception):  # names that are gone: the function itself will say so
                exec(statement, namespace)  # noqa: S102 - the user's own statement, again
        for name in sorted(earlier.hanging):
            if name in namespace and repr(namespace[name]) != before[name]:
                session.record.assume(f"decided as on a GPU: {name} = {namespace[name]!r}")
        with session.lines.before(BEFORE) as before:
            moved = adopting.adopt(torch, session, {name: namespace[name] for name in sorted(earlier.placed & names) if name in namespace})
        adopting.name_lines(torch, session, namespace, {name: (_file(namespace, text), line) for name, (text, line) in earlier.lines.items() if name in names}, before)
        for name, size in moved.moved.items():
            session.record.assume(f"taken as on the GPU, where it would have been put: {name} ({format_bytes(size)})")
        for name, why in moved.left.items():
            session.record.assume(f"left on the CPU: {name} ({why})")


def on_the_cpu(call: Iterable[Any], named: dict[str, Any]) -> list[str]:
    """Names that say ``cpu`` where the functions of a call look: ``device='cpu'``."""
    found = dict(named)
    for function in _functions(call):
        found |= {name: function.__globals__[name] for name in _reached(function) if name in function.__globals__}
        with contextlib.suppress(ValueError):  # a cell of a closure that is empty
            found |= inspect.getclosurevars(function).nonlocals
    torch = _optional.loaded("torch")
    kinds = (str,) if torch is None else (str, torch.device)
    return [f"{name}={str(value)!r}" for name, value in sorted(found.items()) if isinstance(value, kinds) and str(value) == "cpu"]


def _functions(call: Iterable[Any]) -> Iterator[FunctionType]:
    """The plain functions behind what is called: of a partial, a method, a module."""
    for one in call:
        while isinstance(one, functools.partial):
            one = one.func
        one = inspect.unwrap(getattr(one, "__func__", one)) if callable(one) else None
        if one is not None and not isinstance(one, (FunctionType, type)):
            one = getattr(type(one), "forward", type(one).__call__)
        if isinstance(one, FunctionType) and one.__globals__.get("__name__", "").partition(".")[0] not in ("torch", "nbmemprof"):
            yield one


def _texts(namespace: dict[str, Any]) -> list[str]:
    """The code that made these globals: the cells of the notebook so far, or a file."""
    ipython = _optional.loaded("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is not None and shell.user_ns is namespace:
        return [str(text) for text in namespace.get("In", ())]
    module = sys.modules.get(str(namespace.get("__name__")))
    path = namespace.get("__file__") if module is not None and vars(module) is namespace else None
    return ["".join(linecache.getlines(path, namespace))] if path else []


def _file(namespace: dict[str, Any], text: int) -> str:
    """How the text of this number is called, of those that made these globals."""
    return str(namespace.get("__file__") or f"In[{text}]")


def _reached(function: FunctionType) -> set[str]:
    """Global names of a function, and of the functions that it reaches by them."""
    names: set[str] = set()
    left: list[Any] = [function.__code__]
    while left:
        code = left.pop()
        left += [one for one in code.co_consts if isinstance(one, type(code))]
        for name in set(code.co_names) - names:
            names.add(name)
            inner = function.__globals__.get(name)
            if isinstance(inner, FunctionType) and inner.__globals__ is function.__globals__:
                left.append(inner.__code__)
    return names
