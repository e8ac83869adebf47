"""What the replay says of a capture: whether the rules give the recorded addresses, and what other settings would have reserved.

A first paint doesn't wait for it: the first view says "not replayed" until :func:`later` has the answer.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.units import format_bytes, format_count
from nbmemprof.views import _theme
from nbmemprof.views._facts import facts
from nbmemprof.views.svg import Svg, clean, shorten, text_width

__all__ = ["Judged", "applies", "judge", "known", "later", "lines", "picture", "table", "what_if_of"]

SHORT = 200_000  # events whose replay the cell waits for
WAIT_S = 5.0  # and how long at most: the first replay on a machine compiles
_SAVING = 0.03  # of the peak reserved; less is no sentence
_SPOKEN_OF = "expandable_segments:True"  # what a finding about a refusal proposes and, after a replay, answers
_WIDTH = 740
_kept: weakref.WeakKeyDictionary[Capture, Judged] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Judged:
    """Answer of one replay: the verdict's sentence and its inferences, and the frame of ``what_if`` (None: it could not be asked)."""

    text: str
    inferred: tuple[str, ...] = ()
    frame: pl.DataFrame | None = None


def applies(capture: Capture) -> bool:
    """Whether there is a trace of a CUDA device to replay."""
    kinds = capture.events["kind"]
    return bool((kinds == "device").any())


def known(capture: Capture) -> Judged | None:
    """The answer, where it is there already."""
    told = capture.meta.get("verdict")
    if capture not in _kept and isinstance(told, dict) and isinstance(told.get("text"), str):
        return Judged(told["text"], tuple(map(str, told.get("inferred") or ())))
    return _kept.get(capture)


def judge(capture: Capture) -> Judged:
    """Replay the capture under its own setting and under others; kept as long as the capture lives."""
    found = known(capture)
    if found is None:
        found = _kept[capture] = _judged(capture)
    return found


def _judged(capture: Capture) -> Judged:
    from nbmemprof.allocator import verdict

    try:
        told = verdict(capture)
        if capture.meta.get("origin") == "modelled":  # its addresses are the model's own
            return Judged("modelled by the rules themselves, so there is nothing to compare it with", (), what_if_of(capture))
        return Judged(told["text"], tuple(told["inferred"]), what_if_of(capture))
    except NbmemprofError as error:
        return Judged(f"not replayed: {error}")
    except Exception as error:  # a view must come whatever the replay meets
        return Judged(f"not replayed: the replay failed ({type(error).__name__}: {error}). Please report it.")


def what_if_of(capture: Capture, confs: Sequence[str] | None = None, *, limit_bytes: int | None = None, capacity_bytes: int | None = None) -> pl.DataFrame:
    """Ask ``what_if``; a modelled device keeps the memory that it was given."""
    from nbmemprof.allocator.what_if import what_if

    if capacity_bytes is None and capture.meta.get("origin") == "modelled" and isinstance(capture.meta.get("capacity_bytes"), int):
        capacity_bytes = capture.meta["capacity_bytes"]
    return what_if(capture, confs, limit_bytes=limit_bytes, capacity_bytes=capacity_bytes)


def later(capture: Capture, then: Callable[[], object]) -> None:
    """Judge in a thread and call ``then``: here and soon for a short recording, else from the thread when it is done."""
    lock, done = threading.Lock(), threading.Event()
    here = capture.events.height <= SHORT

    def work() -> None:
        nonlocal here
        judge(capture)
        with lock:
            done.set()
            mine = not here
        if mine:
            then()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="nbmemprof replay", daemon=True)
    thread.start()
    if here:
        with contextlib.suppress(KeyboardInterrupt):  # whoever waits no longer has it later
            done.wait(WAIT_S)
        with lock:
            here = done.is_set()
        if here:
            then()


# ---------------------------------------------------------------------- as words, picture, table
def lines(capture: Capture) -> list[str]:
    """Sentences for a first view; "not replayed" where the answer isn't there."""
    if not applies(capture):
        return []
    judged = known(capture)
    if judged is None:
        return ["Allocator: not replayed: a first view doesn't wait for it. mp.what_if(cap) has the answer, in a notebook %memprof what-if."]
    said = [f"Allocator: {judged.text}."]
    if judged.frame is not None:
        said += [best for best in [_best(capture, judged.frame)] if best]
    return said


def name_of(conf: str) -> str:
    """A configuration as it is shown; the empty text is torch's defaults."""
    return clean(conf) or "torch's defaults"


def _best(capture: Capture, frame: pl.DataFrame) -> str:
    """The setting that would have reserved least, where it is worth a sentence; after a refusal the finding about it says what helps."""
    if frame["device"].n_unique() != 1 or frame["rank"].n_unique() != 1 or not frame["recorded"].any():
        return ""
    now = frame.filter("recorded").row(0, named=True)
    best = frame.sort("ooms_high", "peak_reserved_high_bytes", "device_calls", maintain_order=True).row(0, named=True)
    saved = now["peak_reserved_low_bytes"] - best["peak_reserved_high_bytes"]
    if now["ooms"]:
        rules = facts(capture).ask("advise", replay=False)
        return _serves_more(frame, now, best, spoken_of=bool(rules.height and (rules["rule"] == "scattered").any()))
    if best["recorded"] or best["ooms_high"] or saved < _SAVING * now["peak_reserved_low_bytes"]:
        return ""
    set_ = f"PYTORCH_CUDA_ALLOC_CONF={best['conf']}" if best["conf"] else "Without PYTORCH_CUDA_ALLOC_CONF"
    return f"{set_} would have reserved {_range(best)} at the peak, {format_bytes(saved)} less (replayed)."


def _serves_more(frame: pl.DataFrame, now: dict[str, Any], best: dict[str, Any], *, spoken_of: bool) -> str:
    """The setting that refuses least, unless that of which the finding about the refusal speaks does as well."""
    told = frame.filter(pl.col("conf") == _SPOKEN_OF)["ooms_high"] if spoken_of else pl.Series(dtype=pl.Int64)
    if best["recorded"] or best["ooms_high"] >= min([now["ooms"], *told]):
        return ""
    set_ = f"PYTORCH_CUDA_ALLOC_CONF={best['conf']}" if best["conf"] else "torch's default setting"
    return f"{set_} would have refused {_refusals(best).removesuffix(' requests') if best['ooms_high'] else 'none'} of the requests instead of {format_count(now['ooms'])} (replayed)."


def _range(row: dict[str, Any]) -> str:
    low, high = format_bytes(row["peak_reserved_low_bytes"], 2), format_bytes(row["peak_reserved_high_bytes"], 2)
    return low if low == high else f"{low} to {high}"


def _refusals(row: dict[str, Any]) -> str:
    low, high = format_count(row["ooms"]), format_count(row["ooms_high"])
    return f"{low} requests" if low == high else f"{low} to {high} requests"


def picture(frame: pl.DataFrame) -> tuple[Svg, str]:
    """Draw peak reserved by configuration; the part that hangs on unknown addresses is lighter."""
    rows = list(frame.iter_rows(named=True))
    most = max((row["peak_reserved_high_bytes"] for row in rows), default=1) or 1
    title = "Peak reserved, by PYTORCH_CUDA_ALLOC_CONF"
    words = [f"{name_of(row['conf'])} {_range(row)}" + (f", {_refusals(row)} refused" if row["ooms_high"] else "") + (" (as recorded)" if row["recorded"] else "") for row in rows]
    sentence = f"{title}: {'; '.join(words)}."
    svg = Svg(_WIDTH, 40 + 30 * len(rows), sentence)
    svg.text(12, 20, title, size=13, bold=True)
    svg.text(12 + text_width(title, 14) + 10, 20, "the same requests, replayed", fill=_theme.MUTED)
    for i, row in enumerate(rows):
        y = 44 + 30 * i
        value = _range(row) + (f" · {_refusals(row)} refused" if row["ooms_high"] else "")
        label = name_of(row["conf"]) + (" (as recorded)" if row["recorded"] else "") + (f" · GPU {row['device']}" if frame["device"].n_unique() > 1 else "")
        svg.text(12, y, shorten(label, _WIDTH - 40 - text_width(value, 11), 11), bold=bool(row["recorded"]))
        svg.text(_WIDTH - 12, y, value, anchor="end", fill=_theme.MARK if row["ooms_high"] else _theme.MUTED)
        wide = _WIDTH - 24
        svg.rect(12, y + 5, wide, 8, "#eeeff1")
        svg.rect(12, y + 5, wide * row["peak_reserved_high_bytes"] / most, 8, "#b9d3e6")
        svg.rect(12, y + 5, max(wide * row["peak_reserved_low_bytes"] / most, 1), 8, "#0072b2" if row["recorded"] else "#7fa8c9")
    return svg, sentence


def table(frame: pl.DataFrame) -> tuple[str, list[str], list[list[str]]]:
    """The same as title, head and rows."""
    head = ["setting", "peak reserved", "refused", "retries", "device calls", "origin"]
    several = frame["device"].n_unique() > 1
    rows = [
        [
            name_of(row["conf"]) + (" (as recorded)" if row["recorded"] else ""), *([f"GPU {row['device']}"] if several else []), _range(row),
            _refusals(row).removesuffix(" requests"), format_count(row["retries"]), format_count(row["device_calls"]), row["origin"],
        ]
        for row in frame.iter_rows(named=True)
    ]  # fmt: skip
    again = " (what was refused when it was recorded is asked again, and given back at once)" if frame["asked_again"].sum() else ""
    return f"What other allocator settings would have reserved{again}", [head[0], *(["device"] if several else []), *head[1:]], rows
