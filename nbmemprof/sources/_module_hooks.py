"""Global hooks on the calls of modules, which the compiler does not see: what it makes must not depend on them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["ModuleHooks"]

_TABLES = ("_global_backward_pre_hooks", "_global_backward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks")


def _torchs() -> Any:
    return sys.modules["torch.nn.modules.module"]


class ModuleHooks:
    """Two hooks, made by ``entering`` and ``leaving``, from ``open`` to ``close``; the second is called after an exception too."""

    def __init__(self, entering: Callable[[], Callable[..., None]], leaving: Callable[[], Callable[..., None]]) -> None:
        self._make = entering, leaving
        self._handles: list[Any] = []
        self._callbacks: tuple[Any, Any] | None = None
        self._open = False

    @property
    def told(self) -> bool:
        """Whether the compiler tells when it is at work."""
        return self._callbacks is not None

    def open(self) -> None:
        """Put the hooks in place."""
        self._open = True
        self._hook()
        self._meet_compiler()

    def close(self) -> None:
        """Take them away, and what tells of the compiler."""
        self._open = False
        self._unhook()
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is not None and self._callbacks is not None:
            for name, callback in zip(("start_callbacks", "end_callbacks"), self._callbacks, strict=True):
                callbacks = getattr(handler, name, None)
                if callbacks is not None and callback in callbacks:
                    callbacks.remove(callback)
        self._callbacks = None

    def others(self) -> bool:
        """Whether somebody else has global hooks on modules: torch.compile warns of those, and ours leave it alone."""
        ours = {handle.id for handle in self._handles}
        return any(set(getattr(_torchs(), name, ())) - ours for name in _TABLES)

    def compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``torch.compile`` loads the compiler; from then on we hear when it is at work."""

        @functools.wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:  # noqa: A001 - torch's name
            if self._open:
                importlib.import_module("torch._dynamo")
                self._meet_compiler()
            return original(*args, **kwargs)

        return compile

    def _hook(self) -> None:
        entering, leaving = (make() for make in self._make)
        modules = _torchs()
        self._handles = [modules.register_module_forward_pre_hook(entering), modules.register_module_forward_hook(leaving, with_kwargs=True, always_call=True)]

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
            for name in ("_global_forward_hooks_with_kwargs", "_global_forward_hooks_always_called"):
                getattr(_torchs(), name, {}).pop(handle.id, None)  # torch forgets the first
        self._handles = []

    def _hook_again(self) -> None:
        if self._open and not self._handles:
            self._hook()

    def _meet_compiler(self) -> None:
        """While the compiler looks at a module our hooks are out of its sight."""
        handler = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
        if handler is None or self._callbacks is not None:
            return
        begin, end = (lambda *_: self._unhook()), (lambda *_: self._hook_again())
        try:
            handler.register_start_callback(begin)
            handler.register_end_callback(end)
            self._callbacks = (begin, end)
        except AttributeError:  # an older torch
            return
