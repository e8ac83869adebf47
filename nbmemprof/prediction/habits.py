"""What notebooks do beside computing, and what it comes to in a fake run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["kept"]


@contextlib.contextmanager
def kept(torch: Any, session: Any) -> Iterator[None]:
    """Let the habits work while the block runs."""
    yield
