"""The one door to optional packages: torch, CuPy, Altair, widgets, numba."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from nbmemprof.errors import MissingPackage

__all__ = ["loaded", "require"]

_EXTRAS = {"torch": "torch", "cupy": "cupy", "cloudpickle": "predict"}


def require(name: str, *, feature: str) -> ModuleType:
    """Import an optional package for a named feature.

    Raises
    ------
    MissingPackage
        Names the feature, the package and what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        top = name.partition(".")[0]
        what = f"nbmemprof[{_EXTRAS[top]}]" if top in _EXTRAS else top
        raise MissingPackage(f"{feature} needs {name}, which can't be imported here ({error}). Install it with: pip install '{what}'") from error


def loaded(name: str) -> ModuleType | None:
    """Return a module only if somebody has imported it already: whoever holds a tensor has imported torch."""
    return sys.modules.get(name)
