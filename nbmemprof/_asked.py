"""The door to the questions: each gets a capture, or the asker hears what to give instead."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["asked"]


def asked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check the first argument of a function that takes a ``capture``; any other function is given back as it is.

    A recording that has ended, or a run, stands for its capture.
    """
    first = next(iter(inspect.signature(function).parameters.values()), None) if inspect.isfunction(function) else None
    if first is None or first.name != "capture":
        return function
    optional = first.default is None

    @functools.wraps(function)
    def question(*args: Any, **kwargs: Any) -> Any:
        if args and not isinstance(args[0], Capture) and not (optional and args[0] is None):
            args = (_capture(args[0], function.__name__), *args[1:])
        elif not isinstance(given := kwargs.get("capture"), Capture) and "capture" in kwargs and not (optional and given is None):
            kwargs["capture"] = _capture(given, function.__name__)
        return function(*args, **kwargs)

    return question


def _capture(given: Any, name: str) -> Capture:
    inner = getattr(given, "capture", None) if not isinstance(given, type) else None
    if isinstance(inner, Capture):
        return inner
    if hasattr(given, "capture"):
        raise NbmemprofError(f"mp.{name} asks a capture, and this {type(given).__name__} has none yet. Ask after its with block, or after stop().")
    if isinstance(given, (str, os.PathLike)):
        raise NbmemprofError(f"mp.{name} asks a capture; {str(given)[:200]!r} is a path. Open it first: mp.{name}(mp.load({str(given)[:200]!r})).")
    raise NbmemprofError(f"mp.{name} asks a capture, and got {'None' if given is None else 'an object of type ' + type(given).__name__}. Give what mp.record(), %%memprof (_memprof is the last) or mp.load(file) made.")
