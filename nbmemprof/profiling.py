"""``@mp.profile``: each call of a function is a recording."""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import aclosing
from types import TracebackType
from typing import Any, TypeVar, overload

from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.recording import Recording

__all__ = ["profile"]

_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def profile(function: _F) -> _F: ...
@overload
def profile(*, keep: int = 1, **options: Any) -> Callable[[_F], _F]: ...
def profile(function: Callable[..., Any] | None = None, *, keep: int = 1, **options: Any) -> Any:
    """Record each call of a function: ``@mp.profile`` or ``@mp.profile(stacks="all", keep=3)``.

    The decorated function has ``last_capture`` and ``captures`` (the last ``keep``, newest last). Coroutine functions
    are recorded while they are awaited, generators from their first item to their end.

    Parameters
    ----------
    keep
        How many captures to keep.
    options
        As :func:`record`.

    Examples
    --------
    >>> import nbmemprof as mp, torch
    >>> @mp.profile(source="torch_cpu")
    ... def work():
    ...     return torch.ones(1 << 18).sum()
    >>> result = work()
    >>> work.last_capture.events.height > 0
    True
    """
    if function is None:
        return lambda later: profile(later, keep=keep, **options)  # type: ignore[call-overload]
    if not callable(function):
        raise NbmemprofError(f"profile decorates functions; {function!r} is not callable. Name options: @profile(source=...).")
    captures: deque[Capture] = deque(maxlen=max(1, keep))
    title = options.pop("title", None) or getattr(function, "__qualname__", None)

    class Window(Recording):
        def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
            captures.append(self.stop())
            setattr(wrapper, "last_capture", captures[-1])  # noqa: B010 - a function has no such attribute for a type checker

    def window() -> Recording:
        return Window(title=title, **options)

    window()  # a wrong option is told where it is written
    wrapper: Any = functools.wraps(function)(_wrapper(function, window))
    wrapper.captures, wrapper.last_capture = captures, None
    return wrapper


def _wrapper(function: Callable[..., Any], window: Callable[[], Recording]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with window():
                return await function(*args, **kwargs)

        return awaited
    if inspect.isasyncgenfunction(function):

        async def streamed(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            with window():
                async with aclosing(function(*args, **kwargs)) as items:
                    async for item in items:
                        yield item

        return streamed
    if inspect.isgeneratorfunction(function):

        def generated(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            with window():
                return (yield from function(*args, **kwargs))

        return generated

    def called(*args: Any, **kwargs: Any) -> Any:
        with window():
            return function(*args, **kwargs)

    return called
