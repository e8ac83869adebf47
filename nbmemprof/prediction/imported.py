"""The user's own modules that looked for a GPU when they were imported: what they decided is read from their files."""

from __future__ import annotations

import linecache
import sys
from types import ModuleType

from nbmemprof.analyses._sites import is_user_file
from nbmemprof.prediction.earlier import Earlier, read
from nbmemprof.prediction.words import ASKED

__all__ = ["modules"]

_MOST = 1 << 20  # bytes of a file that is read


def modules() -> dict[str, Earlier]:
    """What each decided, by its name; those that others import from first."""
    found: dict[str, Earlier] = {}
    for name, module in reversed(list(sys.modules.items())):  # a module is there before what it imports
        path = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if not isinstance(path, str) or not path.endswith(".py") or name.partition(".")[0] in ("__main__", "nbmemprof") or not is_user_file(path):
            continue
        text = "".join(linecache.getlines(path))
        if len(text) <= _MOST and (any(word in text for word in ASKED) or any(f"import {other}" in text or f"from {other} " in text for other in found)):
            read_here = read([text], found)
            read_here.modules = {}
            if read_here or read_here.hanging:
                found[name] = read_here
    return found
