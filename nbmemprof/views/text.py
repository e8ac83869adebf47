"""The headline, and the whole report as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_count, format_time_us, share_units
from nbmemprof.views import _theme, findings
from nbmemprof.views._facts import Device, Facts, facts
from nbmemprof.views._fits import smallest
from nbmemprof.views.svg import clean, middle, text_width

__all__ = ["device_line", "empty_reason", "headline", "report", "show", "tables"]

_DEVICES = 8
_PARTS = 4
_DIGITS = 5  # a range is printed with fewer than these behind the point, or not at all
_ORIGINS = {
    "measured": "measured here",
    "recorded": "recorded elsewhere",
    "replayed": "replayed, not measured",
    "predicted": "predicted, not measured",
    "modelled": "modelled, not measured",
}


def headline(capture: Capture) -> str:
    """One line a device: peak, what stayed, what it was made of, what recording cost, where the numbers come from."""
    known = facts(capture)
    if known.is_empty:
        return _joined(does_not_fit(known.meta), empty_reason(known))
    lines = [device_line(known, device, last=i == 0) for i, device in enumerate(known.devices[:_DEVICES])]
    if len(known.devices) > _DEVICES:
        lines.append(f"{_DEVICES} of {len(known.devices)} devices are listed, those with the highest peaks.")
    return "\n".join(lines)


def device_line(known: Facts, device: Device, *, last: bool = True) -> str:
    """Return the headline of one device; with ``last`` the words about the whole capture end it."""
    known_peak = device.number("peak_allocated_bytes") is not None
    parts = [does_not_fit(known.meta)] if last and known.meta.get("source") == "prediction" else []
    parts = [*filter(None, parts), _peak(device) if known_peak else _state(device)]
    if known.is_quiet:
        parts.append("nothing was allocated or freed in this cell")
    kept, is_file, last_size = device.kept, known.meta.get("source") == "torch_snapshot", ""
    if not known_peak:
        pass
    elif is_file or kept is None:
        last_size = format_bytes(device.number("end_allocated_bytes"))
        parts.append(f"{last_size} live at the end")
    else:
        last_size = format_bytes(abs(kept))
        parts.append(f"{'kept' if kept >= 0 else 'released'} {last_size}")
    if not known.is_quiet and (made_of := _made_of(device, last_size)):
        parts.append(made_of)
    if last:
        parts += [p for p in (_cost(known.meta), origin(known.meta)) if p]
    prefix = f"{device.label}: " if device.label else ""
    return prefix + " · ".join(parts)


def does_not_fit(meta: dict[str, Any]) -> str:
    """What a prediction that met a refusal says first; empty where all was served."""
    needs, outside, capacity, limit = meta.get("needs"), int(meta.get("outside_bytes") or 0), meta.get("capacity_bytes"), meta.get("limit_bytes")
    if meta.get("source") != "prediction" or not (isinstance(needs, dict) or (outside and isinstance(capacity, int) and outside > capacity)):
        return ""
    alone = f"the context and libraries alone take {format_bytes(outside)} of {format_bytes(capacity)}" if isinstance(capacity, int) and outside >= capacity else ""
    if not isinstance(needs, dict):
        return f"does not fit: {alone}"
    at = f"{clean(needs.get('op') or 'a request')}{' in ' + clean(needs['layer']) if needs.get('layer') else ''} (asked {format_bytes(needs['refused_bytes'])})"
    room = f", of {format_bytes(limit)} allowed" if isinstance(limit, int) else f", of {format_bytes(capacity)}" if isinstance(capacity, int) else ""
    first = "does not fit at first, and the code caught the error: refused at" if needs.get("caught") else "does not fit: first refused at"
    text = f"{first} {at}; {'with nothing refused ' if needs.get('caught') else ''}it needs at least about {format_bytes(needs['peak_allocated_bytes'])} and {format_bytes(outside)} beside the allocator{room}"
    return _joined(text, alone, "; ")


def _joined(first: str, second: str, between: str = " · ") -> str:
    return between.join(part for part in (first, second) if part)


def _peak(device: Device) -> str:
    peak, reserved = device.number("peak_allocated_bytes"), device.number("peak_reserved_bytes")
    low, high = device.number("peak_allocated_low_bytes"), device.number("peak_allocated_high_bytes")
    digits = None if low is None or high is None else next((d for d in range(1, _DIGITS) if format_bytes(low, d) != format_bytes(high, d)), None)
    sizes = [format_bytes(peak, digits or 1)]
    if digits:
        sizes += [format_bytes(low, digits), format_bytes(high, digits)]
    if reserved:
        sizes.append(format_bytes(reserved))
    shown = share_units(sizes)
    text = f"peak {shown[0]}" + (f" (between {shown[1]} and {shown[2]})" if digits else "")
    return text + (f" (reserved {shown[-1]})" if reserved else "")


def _state(device: Device) -> str:
    live, reserved = device.number("end_allocated_bytes"), device.number("end_reserved_bytes")
    shown = share_units([format_bytes(live), format_bytes(reserved)])
    return f"{shown[0]} live" + (f" (reserved {shown[1]})" if reserved else "") + ", peak unknown"


def _made_of(device: Device, last_size: str) -> str:
    """What the peak is made of, the largest first; ``last_size`` stands right before it."""
    rows = device.parts()
    if not rows:
        return ""
    if device.by == "total":
        return "what it is for: unknown"
    sizes = share_units([format_bytes(size) for _, size in rows[:_PARTS]], last_size)
    shown = [f"{_theme.word(middle(name))} {size}" for (name, _), size in zip(rows, sizes, strict=False)]
    more = ", …" if len(rows) > _PARTS else ""
    return ("at the peak " if device.by == "site" else "") + ", ".join(shown) + more


def _cost(meta: dict[str, Any]) -> str:
    recording = meta.get("recording") or {}
    fraction = recording.get("cost_fraction")
    if fraction is None:
        return clean(recording.get("cost_text") or "")
    about = "≤ " if recording.get("at_most") else "~"
    return "recording cost < 1 %" if fraction < 0.005 else f"recording cost {about}{fraction:.0%}".replace("%", " %")


def origin(meta: dict[str, Any]) -> str:
    """Where the numbers come from, in words."""
    text = _ORIGINS.get(str(meta.get("origin")), str(meta.get("origin")))
    if meta.get("source") == "torch_snapshot" and meta.get("origin") == "measured":
        return "measured, read from a snapshot"
    device = meta.get("device")
    return f"{text} on {clean(device)}" if isinstance(device, str) and device else text


def empty_reason(known: Facts) -> str:
    """Why there is nothing to see, and what to do."""
    meta = known.meta
    if meta.get("source") == "none":  # nothing recorded: either torch never came, or recording was not possible
        said = "; ".join(clean(w) for w in meta.get("warnings") or []) or "nothing was recorded"
        return (
            f"peak 0 B: {said.removeprefix('empty: ')}."
            if said.startswith("empty: ")
            else f"peak unknown: {said}. %memprof doctor says what can be recorded here."
        )
    for warning in meta.get("warnings") or []:
        if warning.startswith(("empty", "no events")):
            return f"Nothing to show: {clean(warning)}"
    if known.silent:
        return f"peak 0 B: no memory was in use on {', '.join(known.silent)} in this capture. Profile a cell that creates tensors."
    if meta.get("source") == "torch_snapshot":
        return (
            "This snapshot holds no segments, blocks or events. Turn the history on before the code runs "
            "(torch.cuda.memory._record_memory_history()), then dump it again."
        )
    return "peak 0 B: no tensor memory was allocated in this cell, so there is nothing to show. Profile a cell that creates tensors; %memprof doctor says what can be recorded here."


# ---------------------------------------------------------------------- tables
def tables(known: Facts, device: Device, top: int) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return (title, head, rows) of each table of one device; titles say "N of M" where rows were cut."""
    when = "at the peak" if device.number("peak_allocated_bytes") is not None else "at the end"
    made = [("Numbers", ["what", "value"], _numbers(known, device))]
    if device.breakdown.height:
        made.append(table(f"What held memory {when}", _with_state(known, device), {
            "category": "for", "size_bytes": "size", "requested_bytes": "requested", "share": "share", "state": "of it", "evidence": "known by", "origin": "origin", "reason": "why unknown",
        }, top + 4))  # fmt: skip
    if device.sites.height and device.sites["site"].drop_nulls().len():
        made.append(table(f"Lines that held most {when}", device.sites, {
            "site": "line", "function": "function", "size_bytes": "size", "requested_bytes": "requested", "count": "blocks", "end_bytes": "at the end",
        }, top))  # fmt: skip
    for name, title, columns in _FURTHER:
        frame = known.of(known.ask(name), device)
        if name == "fragmentation":
            frame = free_parts(frame)
        if frame.height:
            made.append(table(title, frame, columns, top))
    return made


def _with_state(known: Facts, device: Device) -> pl.DataFrame:
    """The breakdown with the optimizer's state by its names, in words (``state``)."""
    shown, state = device.breakdown, pl.col("category").cast(pl.String) == "optimizer_state"
    if shown.filter(state).is_empty() or "evidence" not in shown.columns:
        return shown
    named = known.of(known.ask("breakdown", by="name"), device)
    parts = named.filter(state).drop_nulls("name").sort("size_bytes", "name", descending=[True, False]).head(4) if named.height else named
    words = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.select("name", "requested_bytes").iter_rows()) if parts.height else None
    return shown.with_columns(state=pl.when(state).then(pl.lit(words, pl.String)))


def free_parts(lists: pl.DataFrame) -> pl.DataFrame:
    """Lists of ``fragmentation`` in which something is free; what is free in a private pool is neither releasable nor pinned but stranded."""
    if lists.is_empty():
        return lists
    own = pl.col("private")
    return lists.filter(pl.col("free_bytes") > 0).with_columns(
        *(pl.when(~own).then(name).alias(name) for name in ("releasable_bytes", "pinned_bytes")), stranded_bytes=pl.when(own).then("stranded_bytes")
    )


_FURTHER = (
    ("leaks", "Memory that grows or is never freed", {
        "site": "line", "leak_bytes": "bytes", "leak_count": "blocks", "bytes_per_iteration": "per iteration", "class": "kind", "confidence": "confidence", "evidence": "because",
    }),
    ("oom", "Out of memory", {
        "site": "line", "requested_bytes": "requested", "device_free_bytes": "free on the device", "reason": "reason", "would_help_bytes": "would have helped",
    }),
    ("fragmentation", "Free memory inside what torch reserved", {
        "pool_id": "pool", "pool": "part", "stream": "stream", "free_bytes": "free", "largest_free_bytes": "largest piece",
        "releasable_bytes": "releasable", "pinned_bytes": "pinned", "stranded_bytes": "stranded in a private pool", "ratio": "fragmented",
    }),
)  # fmt: skip


def table(title: str, frame: pl.DataFrame, columns: dict[str, str], top: int) -> tuple[str, list[str], list[list[str]]]:
    """Return title, head and rows of some columns of a frame; the title says "N of M" where rows were cut."""
    names = [n for n in columns if n in frame.columns and frame[n].null_count() < frame.height]
    rows = [[cell(n, v) for n, v in zip(names, row, strict=True)] for row in frame.head(top).select(names).iter_rows()]
    cut = f" ({top} of {format_count(frame.height)})" if frame.height > top else ""
    return title + cut, [columns[n] for n in names], rows


def cell(name: str, value: object) -> str:
    """One value as a person reads it; null is a dash."""
    if value is None:
        return "no stack" if name == "site" else "–"
    if isinstance(value, list):
        return clean(" ← ".join(str(v) for v in value))
    if name.endswith(("bytes", "_iteration")) and isinstance(value, (int, float)):
        return format_bytes(value, 2)
    if (name.endswith("_us") or "_us_" in name) and isinstance(value, (int, float)):
        return format_time_us(value)
    if name in ("share", "ratio", "confidence") and isinstance(value, (int, float)):
        return f"{value:.1%}".replace("%", " %")
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and name not in ("device", "rank", "stream", "seq"):
        return format_count(value)
    return f"{value:.3g}" if isinstance(value, float) else clean(value)


_NUMBERS = {
    "peak_allocated_bytes": "peak allocated", "peak_allocated_low_bytes": "peak allocated, low", "peak_allocated_high_bytes": "peak allocated, high",
    "peak_reserved_bytes": "peak reserved", "peak_requested_bytes": "peak requested", "end_allocated_bytes": "allocated at the end", "end_reserved_bytes": "reserved at the end",
    "end_pending_bytes": "freed, waiting for streams, at the end", "largest_free_bytes": "largest free block at the end", "unrecorded_bytes": "live without a record of its allocation",
    "live_blocks": "blocks at the end", "segments": "segments at the end", "events": "events", "unknown_events": "events of an unknown kind", "ooms": "out-of-memory errors", "retries": "retries after freeing the cache",
    "capacity_bytes": "device capacity", "outside_bytes": "held by this process outside torch",
}  # fmt: skip


def _numbers(known: Facts, device: Device) -> list[list[str]]:
    rows = [[label, cell(name, device.row[name])] for name, label in _NUMBERS.items() if device.row.get(name) is not None]
    if device.start_bytes is not None:
        rows.insert(1, ["allocated at the start", format_bytes(device.start_bytes, 2)])
    limit = known.meta.get("limit_bytes")
    if isinstance(limit, int):
        rows.append(["limit set in torch", format_bytes(limit, 2)])
    fits = smallest(known, device)
    return [*rows, ["smallest GPU that it fits on", fits]] if fits else rows


# ---------------------------------------------------------------------- plain text
def report(capture: Capture, top: int = 8) -> str:
    """Return headline, findings and tables as aligned text: what a terminal shows."""
    from nbmemprof.views import kernels  # which writes its tables by this module

    counted = kernels.plain(capture, top) if kernels.has(capture) else ""
    if counted and capture.meta.get("source") == "counters":
        return counted
    known = facts(capture)
    lines = [headline(capture)]
    lines += [f"  • {sentence}" for sentence in findings.sentences(known)]
    for device in [] if known.is_quiet else known.devices[:_DEVICES]:
        for title, head, rows in tables(known, device, top):
            if title == "Numbers":
                continue
            lines += ["", f"{device.label}: {title}" if device.label else title, *aligned(head, rows)]
    return "\n".join([*lines, "", counted] if counted else lines)


def show(capture: Capture) -> None:
    """Print the report: the view ``text``."""
    print(report(capture))


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]], widest: int = 60) -> list[str]:
    """Lay a table out in columns: text to the left, numbers to the right; long text loses its middle."""
    body = [[middle(c, widest) for c in row] for row in rows]
    right = [all(row[i][:1] in "0123456789–−" for row in body) for i in range(len(head))]
    widths = [max(_columns(r[i]) for r in [list(head), *body]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [" " * (w - _columns(c)) + c if r else c + " " * (w - _columns(c)) for c, w, r in zip(row, widths, right, strict=True)]
        return "  " + "  ".join(cells).rstrip()

    return [line(head), *(line(row) for row in body)]


def _columns(text: str) -> int:
    return sum(2 if text_width(c, 1) > 1 else 1 for c in text)
