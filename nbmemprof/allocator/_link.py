"""Compile a function together with the functions of this package that it calls.

numba refuses to call a plain function, and importing it at the top would make every import of this package
heavy. So the rules stay plain Python, and here their copies are linked: each copy sees compiled copies of what
it calls. The name of the linked function carries a digest of all their code, since numba's cache on disk only
looks at the file of the function that is called from outside.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nbmemprof import _jit

__all__ = ["linked", "worth"]

# events (about 10 µs each, interpreted) from which compiled code pays: once it is on disk it loads in half a second, compiling it takes 10 to 20
_WORTH_LOADING, _WORTH_COMPILING = 60_000, 500_000

# what is only called from compiled code needs no way in from Python: more than halves the time to compile
_INNER = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "no_rewrites": True, "error_model": "numpy", "_nrt": False}


def worth(entry: Callable[..., int], work: int) -> Callable[..., int] | None:
    """Return the compiled form where it pays for that many events, else None."""
    if work >= _WORTH_COMPILING or (work >= _WORTH_LOADING and _on_disk(entry)):
        return linked(entry)
    return None


@functools.cache
def _on_disk(entry: Callable[..., int]) -> bool:
    """Whether an earlier process has compiled this very code."""
    name, code = _named(entry), entry.__code__
    pattern = f"*{name}-{code.co_firstlineno}*.nbi"
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(chosen) if chosen else Path(code.co_filename).parent / "__pycache__"
    return folder.is_dir() and next(folder.rglob(pattern), None) is not None


def _named(entry: Any) -> str:
    """Name of the linked function: it carries a digest of all code in it."""
    copies: dict[types.FunctionType, types.FunctionType] = {}
    _gather(entry, copies)
    digest = hashlib.sha256()
    for plain in sorted(copies, key=lambda f: (f.__module__, f.__qualname__)):
        digest.update(repr((plain.__qualname__, plain.__code__.co_code, _constants(plain))).encode())
    return f"{entry.__name__}_{digest.hexdigest()[:12]}"


@functools.cache
def linked(entry: Callable[..., int]) -> Callable[..., int] | None:
    """Return ``entry`` compiled with all that it calls; None where numba is missing or does not work."""
    try:
        import numba
    except Exception:  # numba refuses some NumPy and Python versions with errors of several kinds
        return None
    copies: dict[types.FunctionType, types.FunctionType] = {}
    plain_entry: Any = entry
    _gather(plain_entry, copies)
    main = copies.pop(plain_entry)
    compiled = {plain: numba.njit(**_INNER)(copy) for plain, copy in copies.items()}
    for plain, copy in [*copies.items(), (plain_entry, main)]:
        for name in plain.__code__.co_names:
            called = plain.__globals__.get(name)
            if called in compiled:
                copy.__globals__[name] = compiled[called]
    main.__name__ = main.__qualname__ = _named(entry)
    if not _on_disk(entry):
        _compile(plain_entry, compiled)
    return _jit.compiled(main)


def _compile(entry: types.FunctionType, compiled: dict[types.FunctionType, Any]) -> None:
    """Compile each function once, what it calls before it: left to itself numba makes one more form for every constant that a call passes."""
    done: set[types.FunctionType] = {entry}

    def visit(plain: types.FunctionType) -> None:
        for name in plain.__code__.co_names:
            called = plain.__globals__.get(name)
            if called in compiled and called not in done:
                done.add(called)
                visit(called)
                hints = list(inspect.get_annotations(called).values())[:-1]
                compiled[called].compile(f"int64({', '.join('int64' if hint == 'int' else 'int64[::1]' for hint in hints)})")
                compiled[called].disable_compile()

    visit(entry)


def _gather(function: types.FunctionType, copies: dict[types.FunctionType, types.FunctionType]) -> None:
    if function in copies:
        return
    copy = types.FunctionType(function.__code__, dict(function.__globals__), function.__name__, function.__defaults__)
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copies[function] = copy
    for name in function.__code__.co_names:
        called = function.__globals__.get(name)
        if isinstance(called, types.FunctionType) and called.__module__.startswith("nbmemprof."):
            _gather(called, copies)


def _constants(function: types.FunctionType) -> list[Any]:
    values = [function.__globals__.get(name) for name in function.__code__.co_names]
    return [function.__code__.co_consts, [v for v in values if isinstance(v, (int, float))]]
