"""CPU tensors asked for by name in a fake session: their block runs for real, since fakes have no storages to record."""

from __future__ import annotations

from typing import Any

from nbmemprof import _optional
from nbmemprof.capture import Capture

__all__ = ["Aside", "step_aside"]


class Aside:
    """A source of CPU tensors that leaves the fake run from its start to its stop."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._modes: Any = None
        self.name = source.name

    def start(self, **options: Any) -> None:
        """Leave the fake run, and begin."""
        dispatch = _optional.require("torch.utils._python_dispatch", feature="A recording beside a prediction")
        self._modes = dispatch._disable_current_modes()
        self._modes.__enter__()
        try:
            self._source.start(**options)
        except BaseException:
            self._back()
            raise

    def mark(self) -> Any:
        """The position now."""
        return self._source.mark()

    def cut(self, since: Any) -> Capture:
        """What happened since."""
        made: Capture = self._source.cut(since)
        return made

    def stop(self) -> Capture:
        """End, and go on with the fake run."""
        try:
            made: Capture = self._source.stop()
        finally:
            self._back()
        said = "CPU tensors were asked for by name: this block ran for real, and is measured, not predicted"
        if said not in made.meta["warnings"]:
            made.meta["warnings"] = [*made.meta["warnings"], said]
        return made

    def _back(self) -> None:
        modes, self._modes = self._modes, None
        if modes is not None:
            modes.__exit__(None, None, None)


def step_aside() -> None:
    """Let recordings of CPU tensors in this process, which is the session's own, do so."""
    module = _optional.loaded("nbmemprof.sources.torch_cpu")
    if module is not None:
        plain = module.source
        setattr(module, "source", lambda: Aside(plain()))  # noqa: B010 - a module has no such attribute for a type checker
