"""An error on its way from the child: of its own class wherever that can be found here, also where it can't be made again from its arguments."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

__all__ = ["packed", "unpacked"]


def packed(error: BaseException) -> bytes | None:
    """An error as bytes, without its frames; None where its class can't be named elsewhere.

    The fake run's own kinds of RuntimeError are told as the RuntimeError that torch raises on a GPU.
    """
    if type(error).__module__.startswith("torch._subclasses"):
        error = RuntimeError(str(error))
    error = error.with_traceback(None)
    with contextlib.suppress(Exception):
        whole = pickle.dumps(error)
        if type(pickle.loads(whole)) is type(error):  # noqa: S301 - made a line above
            return whole
    try:
        return pickle.dumps((type(error), _kept(error.args), {name: value for name, value in vars(error).items() if _goes(value)}))
    except Exception:  # a class of a function's inside, or of a module that is nowhere
        return None


def unpacked(data: bytes | None) -> BaseException | None:
    """The error; None where its class is not here."""
    if data is None:
        return None
    try:
        made = pickle.loads(data)  # noqa: S301 - written by our own child
        if isinstance(made, tuple):
            kind, args, attributes = made
            made = kind.__new__(kind, *args)
            made.args = args
            vars(made).update(attributes)
    except Exception:
        return None
    return made if isinstance(made, BaseException) else None


def _kept(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(one if _goes(one) else repr(one) for one in args)


def _goes(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True
