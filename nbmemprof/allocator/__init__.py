"""PyTorch's CUDA caching allocator as a model: exact by rules, without a GPU.

:class:`Device` answers call by call; :func:`nbmemprof.replay` and :func:`nbmemprof.what_if` put whole recordings through the same rules.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_NAMES = {"Device": "device", "Settings": "conf", "ConfError": "conf", "parse": "conf", "verdict": "replay"}

__all__ = ["ConfError", "Device", "Settings", "parse", "verdict"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


if TYPE_CHECKING:
    from nbmemprof.allocator.conf import ConfError as ConfError
    from nbmemprof.allocator.conf import Settings as Settings
    from nbmemprof.allocator.conf import parse as parse
    from nbmemprof.allocator.device import Device as Device
    from nbmemprof.allocator.replay import verdict as verdict
