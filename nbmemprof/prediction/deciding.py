"""A function's own globals that hang on a GPU, decided again in a fake run of it: what the magics read from cells, ``mp.predict`` reads from the notebook or the function's file.

``device = "cuda" if torch.cuda.is_available() else "cpu"`` above a function would make it run on the CPU also where a GPU is predicted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import io
import linecache
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

from nbmemprof import _optional
from nbmemprof.prediction import adopting, imported, remaking
from nbmemprof.prediction.earlier import Earlier, closed_over, read
from nbmemprof.units import format_bytes

__all__ = ["BEFORE", "again", "closures", "decided", "of_modules", "on_the_cpu", "reached", "reading", "saying_cpu", "undecided"]

BEFORE = "before the call"  # stands for the lines of what was there before, where they are not known
_CELLS = "%memprof predict on {} runs the cells again as on a GPU"
_LONG = 120  # characters of a value that is told


def reading(call: Iterable[Any]) -> list[tuple[FunctionType, Earlier]]:
    """What was decided for want of a GPU above the functions of a call; nothing where there is a GPU."""
    torch = _optional.loaded("torch")
    if torch is None or torch.cuda.is_available():
        return []
    known = imported.modules()
    found = []
    for function in _functions(call):
        others = {name: one for name, one in known.items() if vars(sys.modules[name]) is not function.__globals__}
        found.append((function, read(_texts(function.__globals__), others)))
    return found


def again(torch: Any, session: Any, found: list[tuple[FunctionType, Earlier]]) -> None:
    """In the child: decide it as on a GPU, move what the functions use of what would have been there, and say so."""
    for function, earlier in found:
        namespace, names = function.__globals__, _reached(function)
        changed = [*decided(namespace, earlier), *closures([function, *(namespace.get(name) for name in names)], earlier)]
        with session.lines.before(BEFORE) as before:
            moved = adopting.adopt(torch, session, {name: namespace[name] for name in sorted(earlier.placed & names) if name in namespace} | of_modules(earlier, names))
        adopting.name_lines(torch, session, namespace, {name: (_file(namespace, text), line) for name, (text, line) in earlier.lines.items() if name in names}, before)
        for what in changed:
            session.record.assume(f"decided as on a GPU: {what}")
        for name, size in moved.moved.items():
            session.record.assume(f"taken as on the GPU, where it would have been put: {name} ({format_bytes(size)})")
        for name, why in moved.left.items():
            session.record.assume(f"left on the CPU: {name} ({why})")
        left = remaking.undecided(torch, namespace, earlier, names, set(moved.moved) | set(moved.left), functools.partial(_file, namespace))
        if left:
            session.record.assume(f"{remaking.UNDECIDED} {', '.join(left)}; choose it inside the function, or {_CELLS.format(session.gpu.name)}")


def decided(namespace: dict[str, Any], earlier: Earlier) -> list[str]:
    """In the child: run the statements again, in modules first; returns what came out otherwise, in words."""
    changed: list[str] = []
    for name, inner in earlier.modules.items():
        module = sys.modules.get(name)
        if module is not None:
            changed += [f"{name}.{what}" for what in decided(vars(module), inner)]
    before = {name: repr(namespace.get(name)) for name in earlier.hanging}
    stays = {name: namespace[name] for name in earlier.stays if name in namespace}
    for statement in earlier.again:
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):  # names that are gone: the function itself will say so
            remaking.again(statement, namespace, earlier)
    namespace.update(stays)
    changed += [f"{name} = {_short(namespace[name])}" for name in sorted(earlier.hanging) if name in namespace and repr(namespace[name]) != before[name]]
    for function, argument, expression in earlier.defaults:
        with contextlib.suppress(Exception):
            value = eval(expression, namespace)  # noqa: S307 - as above
            changed += [f"{function}({argument}={value!r})"] if _redefault(eval(function, namespace), argument, value) else []  # noqa: S307
    for name, attribute, expression in earlier.fields:
        with contextlib.suppress(Exception):
            value = eval(expression, namespace)  # noqa: S307
            changed += [f"{name}.{attribute} = {value!r}"] if repr(getattr(namespace[name], attribute)) != repr(value) else []
            setattr(namespace[name], attribute, value)
    return changed


def undecided(torch: Any, session: Any, namespace: dict[str, Any], earlier: Earlier, text: str, told: set[str]) -> list[str]:
    """In the child: what a cell uses and is as it was without a GPU, as a sentence; ``told``: names of which something was said already."""
    left = remaking.undecided(torch, namespace, earlier, reached(namespace, text), told, lambda number, _line: f"In[{number}]")
    return [f"{remaking.UNDECIDED} {', '.join(left)}; {_CELLS.format(session.gpu.name)}"] if left else []


def reached(namespace: dict[str, Any], text: str) -> set[str]:
    """Names in a cell's text, and in the functions of the notebook that it reaches by them."""
    names = set(re.findall(r"\w+", text))
    for name in list(names):
        function = namespace.get(name)
        if isinstance(function, FunctionType) and function.__globals__ is namespace:
            names |= _reached(function)
    return names


def of_modules(earlier: Earlier, names: set[str]) -> dict[str, Any]:
    """What the user's modules would have put on the GPU when they were imported, of what goes by these names."""
    found = {f"{name}.{one}": vars(sys.modules[name]).get(one) for name, inner in earlier.modules.items() if name in sys.modules for one in sorted(inner.placed & names)}
    return {name: value for name, value in found.items() if value is not None}


def _short(value: Any) -> str:
    """A value as it is told."""
    text = repr(value)
    return text if len(text) <= _LONG else f"{text[: _LONG - 1]}…"


def _redefault(function: Any, argument: str, value: Any) -> bool:
    """Give an argument another default; whether it is another."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    names, defaults = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    if argument in names[len(names) - len(defaults) :]:
        place = names.index(argument) - len(names) + len(defaults)
        before = defaults[place]
        function.__defaults__ = (*defaults[:place], value, *defaults[place + 1 :])
    elif argument in (function.__kwdefaults__ or {}):
        before = function.__kwdefaults__[argument]
        function.__kwdefaults__[argument] = value
    else:
        return False
    return repr(before) != repr(value)


def closures(functions: Iterable[Any], earlier: Earlier) -> list[str]:
    """Variables of the functions around these that say ``cpu``, bound anew where their text shows that they hang on a GPU; what changed, in words."""
    changed = []
    for function in functions:
        if not isinstance(function, FunctionType) or not function.__closure__:
            continue
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__, strict=True):
            with contextlib.suppress(Exception):  # a cell that is empty
                if str(cell.cell_contents) != "cpu":
                    continue
                found = (closed_over(text, code.co_name, code.co_firstlineno, variable, earlier) for text in _texts_of(function))
                expression = next((one for one in found if one is not None), None)
                if expression is not None:
                    cell.cell_contents = eval(expression, function.__globals__)  # noqa: S307 - the user's own, again
                    changed.append(f"{variable} = {cell.cell_contents!r} in {function.__qualname__.rpartition('.<locals>')[0]}")
    return changed


def _texts_of(function: FunctionType) -> list[str]:
    """The code in which a function stands."""
    lines = linecache.getlines(function.__code__.co_filename, function.__globals__)
    return ["".join(lines)] if lines else _texts(function.__globals__)


def on_the_cpu(call: Iterable[Any], named: dict[str, Any]) -> list[str]:
    """Names that say ``cpu`` where the functions of a call look: ``device='cpu'``."""
    found = dict(named)
    for function in _functions(call):
        found |= {name: function.__globals__[name] for name in _reached(function) if name in function.__globals__}
        with contextlib.suppress(ValueError):  # a cell of a closure that is empty
            found |= inspect.getclosurevars(function).nonlocals
    return saying_cpu(found)


def saying_cpu(found: dict[str, Any]) -> list[str]:
    """Of these names, those that say ``cpu``."""
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


def _file(namespace: dict[str, Any], text: int, line: int = 0) -> str:
    """How the text of this number is called, of those that made these globals."""
    path = namespace.get("__file__")
    return f"In[{text}]" if not path else f"{Path(path).name}:{line}" if line else str(path)


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
