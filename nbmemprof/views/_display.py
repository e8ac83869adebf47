"""Where a view goes: into the notebook's output, or as text to the terminal."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["put", "shell"]


def shell() -> Any:
    """IPython's shell; None outside."""
    ipython: Any = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def put(bundle: dict[str, str], **options: Any) -> None:
    """Display a bundle (MIME type → text) in IPython, with the options of its ``display``; print its plain text elsewhere."""
    if shell() is None:
        sys.stdout.write(bundle["text/plain"] + "\n")
    else:
        sys.modules["IPython"].display.display(bundle, raw=True, **options)
