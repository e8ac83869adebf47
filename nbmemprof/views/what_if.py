"""The answer of ``%memprof what-if``: the verdict, a picture, a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.views import replayed, text
from nbmemprof.views._display import put
from nbmemprof.views.first import Mount, image, rows_of
from nbmemprof.views.svg import clean

__all__ = ["bundle", "display"]


def bundle(capture: Capture, confs: Sequence[str] | None = None, *, limit_bytes: int | None = None, capacity_bytes: int | None = None) -> dict[str, str]:
    """Return ``text/html`` and ``text/plain``.

    Raises
    ------
    NbmemprofError
        There is nothing to replay, or torch would refuse a setting.
    """
    frame = replayed.what_if_of(capture, confs, limit_bytes=limit_bytes, capacity_bytes=capacity_bytes)
    judged = replayed.judge(capture)
    said = [f"Allocator: {judged.text}.", *(f"Inferred: {clean(i)}." for i in judged.inferred)]
    title, head, rows = replayed.table(frame)
    body = "".join(f"<p>{escape(clean(s))}</p>" for s in said) + image(*replayed.picture(frame)) + rows_of(title, head, rows)
    return {"text/html": Mount.of(body).wrap(body), "text/plain": "\n".join([*map(clean, said), title, *text.aligned(head, rows, 80)])}


def display(capture: Capture, confs: Sequence[str] | None = None, **options: Any) -> None:
    """Display it in IPython, print it elsewhere."""
    put(bundle(capture, confs, **options))
