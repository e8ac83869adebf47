"""Sources: each fills the tables of a capture. One file a source, found by its place; there is no registry."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError

__all__ = ["Companion", "Source", "available", "check_options", "companions", "find", "leave", "names", "recorders"]


@runtime_checkable
class Source(Protocol):
    """What records: a file ``sources/<name>.py`` gives one by ``source()``, a user may pass his own.

    A source of the user's needs ``start`` and ``stop`` only; then one window at a time can use it.
    """

    name: str

    def start(self, **options: Any) -> None:
        """Begin. Options: ``stacks`` ("python", "none", "all"), ``ring_bytes``, ``cell``; unknown ones are ignored."""

    def mark(self) -> Any:
        """The position now; cheap."""

    def cut(self, since: Any) -> Capture:
        """What happened from ``since`` until now; recording goes on."""

    def stop(self) -> Capture:
        """Everything since ``start``; recording ends. A second call gives the same."""


class Companion(Protocol):
    """What records beside a source, in the same window: a file ``sources/<name>.py`` gives one by ``companion(options)``, or None."""

    name: str

    def start(self) -> None:
        """Begin; raises where it can't, with the reason."""

    def stop(self) -> None:
        """End; a second call does nothing."""

    def attach(self, capture: Capture, began: float) -> None:
        """Add what was recorded to a capture whose time 0 is ``began`` (``time.perf_counter()``)."""


def companions(options: dict[str, Any]) -> list[Companion]:
    """What a recording's options ask for beside its source."""
    from nbmemprof import flags

    made = (module.companion(options) for module in flags.modules("sources").values() if hasattr(module, "companion"))
    return [companion for companion in made if companion is not None]


def recorders() -> dict[str, ModuleType]:
    """Source modules that record live, by name (file readers have no ``source``)."""
    from nbmemprof import flags

    return {name: module for name, module in flags.modules("sources").items() if hasattr(module, "source")}


def leave() -> None:
    """Let every source that was used take away what it keeps in place between recordings."""
    for name in list(sys.modules):
        if name.startswith(f"{__name__}."):
            away = getattr(sys.modules[name], "leave", None)
            if callable(away):
                away()


def names() -> list[str]:
    """What ``--source`` and ``record(source=...)`` take."""
    return ["auto", *recorders()]


def find(name: str) -> ModuleType:
    """The module of a source.

    Raises
    ------
    NbmemprofError
        Names the nearest and all that exist.
    """
    from nbmemprof import flags

    found = recorders()
    if name not in found:
        known = ["auto", *found]
        raise NbmemprofError(f"There is no source {name!r}.{flags.near(name, known)} Use one of: {', '.join(known)}; or pass an object with start() and stop().")
    return found[name]


def check_options(given: Iterable[str]) -> None:
    """Refuse an option that no source of ours takes: those of their flags, and of their ``start``.

    Raises
    ------
    NbmemprofError
        Names the option, the nearest and all that exist.
    """
    from nbmemprof import flags

    names = set(given) - {"cell", "as_device"}
    known = {flag.dest for module in flags.modules("sources").values() for flag in getattr(module, "FLAGS", ())} if names else set()
    if names - known:
        known |= {p.name for module in recorders().values() for p in inspect.signature(module.source().start).parameters.values() if p.kind is p.KEYWORD_ONLY}
    for name in sorted(names - known):
        takes = ["source", "stacks", "ring_bytes", "title", "history", "as_device", *sorted(known - {"as", "cell", "stacks", "ring_bytes"})]
        raise NbmemprofError(f"A recording has no option {name!r}.{flags.near(name, takes)} It takes: {', '.join(takes)}; or pass a source of your own, which may take any.")


def available() -> dict[str, str | None]:
    """Source name to why it can't record here now; None where it can."""
    return {name: module.unavailable() for name, module in recorders().items()}
