"""One HTML page of a capture that needs nothing from outside: pictures that zoom, the tables behind them."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import polars as pl

from nbmemprof import __version__
from nbmemprof.capture import Capture, whole_file
from nbmemprof.units import format_bytes, format_count
from nbmemprof.views import _theme, findings, first, kernels, ledger_bar, pictures, sections, text, tree
from nbmemprof.views._facts import Device, Facts, Stack, facts
from nbmemprof.views.svg import clean

__all__ = ["BUDGET_BYTES", "page", "write"]

BUDGET_BYTES = 2_000_000
_HERE = Path(__file__).parent
_DEVICES = 16
_SIZES = ((16000, 400), (8000, 200), (4000, 80), (1500, 30), (500, 10))  # points of all timelines, rows a table
_TITLES = {
    "breakdown": "What held memory at the peak",
    "sites": "Lines that held most at the peak",
    "leaks": "Memory that grows or is never freed",
    "oom": "Out of memory",
    "lifetimes": "How long memory lived",
    "fragmentation": "Free memory inside what torch reserved",
    "holes": "How the holes in it came about",
    "stalls": "Time that the allocator spent on the driver",
    "pools": "Lines that ask for memory again and again, and what a pool of their own would save",
}
_EMPTY = {
    "breakdown": "There are no allocations to sort.",
    "sites": "No call stacks were recorded. Record with stacks='python'.",
    "leaks": "Nothing was judged to be leaking.",
    "oom": "There was no out-of-memory error.",
    "lifetimes": "No allocation was recorded, so there are no lifetimes.",
    "fragmentation": "There are no free lists: this source has no segments.",
    "holes": "No segment has free memory between blocks in use.",
    "stalls": "No memory was got from the driver or given back.",
    "pools": "No allocation was recorded.",
}
_UNTIMED = "Times are unknown: no device made these calls, and a model's take no time."


def write(capture: Capture, path: str | os.PathLike[str]) -> Path:
    """Write the page (below 2 MB, no request to anywhere) and return its path; the file appears whole or not at all."""
    with whole_file(path) as part:
        part.write_text(page(capture), encoding="utf-8", errors="replace")
    return Path(path)


def page(capture: Capture) -> str:
    """Return the page: the largest of a few sizes that stays below the budget."""
    known, made = facts(capture), ""
    for points, rows in _SIZES:
        made = _document(capture, known, points, rows)
        if len(made.encode("utf-8", "replace")) < BUDGET_BYTES:
            break
    return made


def _document(capture: Capture, known: Facts, points: int, rows: int) -> str:
    script = (_HERE / "_report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # only this very script may run, nothing may be fetched: text from a file can do neither
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    title = clean(known.meta.get("title") or "Memory profile")
    body = "\n".join(_body(capture, known, points, rows))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)} · nbmemprof</title>'
        f"<style>{(_HERE / '_report.css').read_text(encoding='utf-8')}</style></head>\n<body>\n<h1>{escape(title)}</h1>\n{body}\n<script>{script}</script></body></html>\n"
    )


def _body(capture: Capture, known: Facts, points: int, rows: int) -> Iterator[str]:
    for line in text.headline(capture).split("\n"):
        yield f'<p class="headline">{_html(line)}</p>'
    yield from (f"<p>{_html(line)}</p>" for line in sections.allocator(known))
    if said := findings.sentences(known, limit=None):
        yield "<ul>" + "".join(f"<li>{_html(s)}</li>" for s in said) + "</ul>"
    if not known.is_empty:
        yield "<h2>Every device</h2>" + _frame(known.ask("summary"), rows)
    drawn = known.devices[:_DEVICES]
    for number, device in enumerate(drawn):
        yield from _device(known, device, points // len(drawn), rows, number)
    if len(known.devices) > _DEVICES:
        yield f"<p>{_DEVICES} of {len(known.devices)} devices are drawn, those with the highest peaks.</p>"
    if kernels.has(capture):
        yield kernels.section(capture, rows)
    yield "<h2>What is exact here, and what is not</h2><ul>" + "".join(f"<li>{_html(s)}</li>" for s in exactness(known)) + "</ul>"
    yield f"<h2>Where this comes from</h2>{_about(known)}"


def _device(known: Facts, device: Device, points: int, rows: int, number: int) -> Iterator[str]:
    yield f"<h2>{_html(device.label or 'GPU 0')}</h2>"
    stack = known.stack(device, points)
    if stack.is_drawn:
        yield _timeline(known, device, stack, number)
        yield f"<details><summary>The timeline as a table</summary>{_table(*first.over_time(device, stack, 100))}</details>"
    yield _bars(device)
    if first.layers_known(known) and (layers := tree.html(known.of(known.ask("layers"), device))):
        yield f"<h3>Layers at the peak</h3>{layers}"
    if (bar := ledger_bar.picture(known.of(known.ask("ledger"), device))) is not None:
        yield f"<h3>All of the device</h3>{first.image(*bar)}<details><summary>The ledger as a table</summary>{_table('', ledger_bar.head(), ledger_bar.rows(known.of(known.ask('ledger'), device)))}</details>"
    for title, made in sections.drawn(known, device):
        yield f"<h3>{title}</h3>{''.join(first.image(*picture) for picture in made)}"
    for table in sections.tables(known, device):
        yield f"<details><summary>{_html(table.title)}</summary>{_table('', table.head, table.rows)}</details>"
    for name, title in _TITLES.items():
        frame = getattr(device, name) if name in ("breakdown", "sites") else known.of(known.ask(name), device)
        opened = " open" if name in ("leaks", "oom") and frame.height else ""
        note = f"<p>{_html(_UNTIMED)}</p>" if name == "stalls" and frame.height and known.meta.get("origin") not in ("measured", "recorded") else ""
        yield f"<details{opened}><summary>{title}</summary>{note}{_frame(frame, rows) if frame.height else _html(_EMPTY[name])}</details>"


def _timeline(known: Facts, device: Device, stack: Stack, number: int) -> str:
    small = known.stack(device, min(len(stack.xs), 300))
    picture, sentence = pictures.timeline(known, device, small)
    names = ["allocated"] if stack.by == "total" else [_theme.word(clean(n)) for n in stack.names]
    colours = ["#7fa8c9"] if stack.by == "total" else [_theme.colour(n, i) for i, n in enumerate(stack.names)]
    timed = stack.axis == "time"
    position = "time_us" if timed else "seq"
    marks = known.marks(device).filter(pl.col(position).is_not_null()).head(300)
    data = {
        "label": sentence,
        "axis": stack.axis,
        "x": _deltas([round(x * 10) for x in stack.xs]),
        "series": [{"name": n, "colour": c, "v": _deltas(v)} for n, c, v in zip(names, colours, stack.values, strict=True)],
        "rv": _deltas(stack.reserved),
        "bounds": [{"size": size, "name": name} for size, name in pictures.bounds(known, device, max([*stack.totals, *stack.reserved]))],
        "peak": {"x": stack.xs[stack.top], "size": stack.totals[stack.top], "words": pictures.peak_words(device, stack.totals[stack.top])},
        "marks": [
            {"x": m[position], "end": m["end_us"] if timed else None, "kind": m["kind"], "name": clean(m["name"] or m["kind"] or "")}
            for m in marks.iter_rows(named=True)
        ],
    }
    legend = "".join(f'<li><i style="background:{c}"></i>{_html(n)}</li>' for n, c in zip(names, colours, strict=True))
    reserved = '<li><i style="background:var(--ink);height:2px;vertical-align:middle"></i>reserved</li>' if stack.reserved else ""
    image = f'<img alt="{_html(sentence)}" src="{picture.data_uri()}">'
    return (
        f'<h3>Memory over time</h3><div class="timeline" data-source="data-{number}">{image}</div><ul class="legend">{legend}{reserved}</ul>'
        f'<script type="application/json" id="data-{number}">{_json(data)}</script>'
    )


def _deltas(values: list[int]) -> list[int]:
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def _json(data: Any) -> str:
    """JSON that can't end the element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _bars(device: Device) -> str:
    parts, word = device.parts(), "for" if device.by == "category" else "line"
    if not parts:
        return ""
    whole, most = sum(size for _, size in parts), parts[0][1]
    lines = "".join(
        f'<tr><td>{_html(_theme.word(name))}</td><td class="share"><i style="width:{max(size / most, 0.004):.1%}"></i></td>'
        f'<td class="n" title="{size} bytes">{format_bytes(size, 2)}</td><td class="n">{size / whole:.1%}</td></tr>'
        for name, size in parts[:15]
    )
    cut = f" (15 of {len(parts)})" if len(parts) > 15 else ""
    return f'<h3>At the peak{cut}</h3><div class="wide"><table><tr><th>{word}</th><th></th><th>size</th><th>share</th></tr>{lines}</table></div>'


def _html(value: object) -> str:
    return escape(clean(value))


def _table(title: str, head: list[str], rows: list[list[str]]) -> str:
    top, body = "".join(f"<th>{_html(h)}</th>" for h in head), "".join("<tr>" + "".join(f"<td>{_html(c)}</td>" for c in r) + "</tr>" for r in rows)
    return f'<p class="muted">{_html(title)}</p><div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _frame(frame: pl.DataFrame, rows: int) -> str:
    """Show a frame as it is, names and all; sizes carry their exact bytes as a hint."""
    names = [n for n in frame.columns if n != "stack_id" and frame[n].null_count() < frame.height]
    lines = []
    for row in frame.head(rows).select(names).iter_rows():
        lines.append("<tr>" + "".join(_cell(n, v) for n, v in zip(names, row, strict=True)) + "</tr>")
    cut = f'<p class="muted">{rows} of {format_count(frame.height)} rows</p>' if frame.height > rows else ""
    head = "".join("<th>" + _html(n).replace("_", "_<wbr>") + "</th>" for n in names)
    return f'<div class="wide"><table><tr>{head}</tr>{"".join(lines)}</table></div>{cut}'


def _cell(name: str, value: object) -> str:
    shown = _html(text.cell(name, value))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        hint = f' title="{value:.0f} bytes"' if "bytes" in name else ""
        return f'<td class="n"{hint}>{shown}</td>'
    return f"<td>{shown}</td>"


def exactness(known: Facts) -> list[str]:
    """Say which numbers of this capture are exact and which are not."""
    meta, capture = known.meta, known.capture
    said = [f"All numbers are {text.origin(meta)}."]
    allocations = capture.allocations if capture.events.height else None
    if allocations is not None and allocations.height:
        rough = allocations.filter(~pl.col("size_exact").fill_null(value=False)).height
        said.append(
            f"{format_count(rough)} of {format_count(allocations.height)} block sizes are bounds: the trace gives only what was asked for, and the block could not be recovered."
            if rough
            else "Every block size is the allocator's own number."
        )
        named = allocations.filter(pl.col("category") != "unknown").height
        said.append(
            f"{format_count(named)} of {format_count(allocations.height)} allocations have a known purpose; the others are counted as unknown, not guessed."
        )
    elif not capture.events.height:
        said.append("There is no history, so the state at the end is exact and nothing before it is known.")
    for what, count in (meta.get("dropped") or {}).items():
        said.append(f"Left out: {format_count(count) if isinstance(count, (int, float)) else count} {str(what).replace('_', ' ')}.")
    said += [f"Of the file: {w}" for w in meta.get("warnings") or []]
    said.append(
        "Timelines are reduced to a few thousand points; the highest point of every stretch is kept, dips between two points may be flatter than they were."
    )
    return said


def _about(known: Facts) -> str:
    meta = known.meta
    pairs = [(k, meta.get(k)) for k in ("origin", "source", "device", "conf", "torch", "limit_bytes", "capacity_bytes")]
    rows = [[k, text.cell(k, v)] for k, v in pairs if v not in (None, "")]
    rows += [[str(k), str(v)] for k, v in (meta.get("versions") or {}).items()] + [["nbmemprof", __version__]]
    return _table("", ["what", "value"], rows)
