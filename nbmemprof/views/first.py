"""The first view: a sentence, pictures, findings and tables in one output that is complete by itself.

Jupyter's sanitizer strips inline SVG, styles, ids and ARIA from notebooks that it doesn't trust, so
pictures are images with data URIs, every one with its sentence as ``alt``; a front end that shows no
HTML shows the text. The live view mounts later on the classes of the outer element.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from html import escape
from typing import Any

from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_time_us
from nbmemprof.views import findings, kernels, ledger_bar, pictures, replayed, text, tree
from nbmemprof.views._display import put, shell
from nbmemprof.views._facts import Device, Facts, Stack, facts
from nbmemprof.views.svg import Svg, clean, middle

__all__ = ["BUDGET_BYTES", "Mount", "bundle", "image", "rows_of", "show"]

BUDGET_BYTES = 80_000  # what one view may add to a saved notebook, text and HTML together
_DEVICES = 4
_CELL = 300  # characters of one table cell; to_html has all
# points of a timeline, rows of a table, devices drawn: the first that fits the budget is taken
_SIZES = ((500, 12, _DEVICES), (300, 10, _DEVICES), (160, 8, _DEVICES), (120, 6, 2), (80, 5, 1), (40, 3, 1))


@dataclass(frozen=True)
class Mount:
    """Where the live view finds this output in a page: an element with the class ``nbm-KEY``."""

    key: str

    @classmethod
    def of(cls, body: str) -> Mount:
        """Make the key from what is shown, so that the same capture gives the same output."""
        return cls(blake2s(body.encode("utf-8", "replace"), digest_size=6).hexdigest())

    def wrap(self, body: str) -> str:
        """Put the body into the element."""
        return f'<div class="nbm nbm-{self.key}">{body}</div>'


def bundle(capture: Capture) -> dict[str, str]:
    """Return ``text/html`` and ``text/plain`` of the first view, together at most 80 kB."""
    counted = kernels.has(capture)
    if counted and capture.meta.get("source") == "counters":
        return kernels.bundle(capture)
    known = facts(capture)
    if known.is_empty or known.is_quiet:
        said = [*text.headline(capture).split("\n"), *findings.sentences(known)]
        more = (kernels.section(capture, 12), ["", kernels.plain(capture)]) if counted else (_ledger(known), [])
        return {"text/html": _wrap("".join(f"<p>{_html(s)}</p>" for s in said) + more[0]), "text/plain": "\n".join([*map(clean, said), *more[1]])}
    made: dict[str, str] = {}
    for points, rows, devices in _SIZES:
        made = {"text/html": _wrap(_page(capture, known, points, rows, devices) + (kernels.section(capture, rows) if counted else "")), "text/plain": _plain(capture, rows)}
        if sum(len(part.encode()) for part in made.values()) <= BUDGET_BYTES:
            break
    return made


def show(capture: Capture, display_id: str | None = None, *, update: bool = False) -> None:
    """Display the first view in IPython, print it as text elsewhere.

    In a notebook the output is replaced when the replay's verdict is there: within the cell for short recordings.

    Parameters
    ----------
    display_id
        Under which the output can be replaced later.
    update
        Replace the output with this id instead of adding one.
    """
    if shell() is None:
        sys.stdout.write(text.report(capture) + "\n")
        return
    waits = not update and hasattr(shell(), "kernel") and replayed.applies(capture) and replayed.known(capture) is None
    name = display_id or (f"nbmemprof-{uuid.uuid4().hex[:12]}" if waits else None)
    options: dict[str, Any] = {"display_id": name} if name else {}
    put(bundle(capture), **options, **({"update": True} if update else {}))
    if waits:
        replayed.later(capture, lambda: put(bundle(capture), display_id=name, update=True))


def _wrap(body: str) -> str:
    return Mount.of(body).wrap(body)


def _html(value: object) -> str:
    return escape(clean(value))


def _plain(capture: Capture, rows: int) -> str:
    said, head = text.report(capture, top=min(rows, 8)), text.headline(capture)
    said = "\n".join([head, *(clean(line) for line in replayed.lines(capture))]) + said[len(head) :]
    return "\n".join(line.rstrip() for line in said.encode("utf-8", "replace").decode().split("\n"))


def _page(capture: Capture, known: Facts, points: int, rows: int, devices: int) -> str:
    lines = [_headline(line) for line in text.headline(capture).split("\n")]
    lines += [f"<p>{_html(line)}</p>" for line in replayed.lines(capture)]
    said = findings.sentences(known)
    lines += ["<ul>", *(f"<li>{_html(s)}</li>" for s in said), "</ul>"] if said else []
    for device in known.devices[:devices]:
        stack = known.stack(device, points // min(len(known.devices), devices))
        lines += _pictures(known, device, stack, rows)
    judged = replayed.known(capture)
    if judged is not None and judged.frame is not None:
        title, head, cells = replayed.table(judged.frame)
        lines.append(f"<details><summary>{_html(title)}</summary>{image(*replayed.picture(judged.frame))}{rows_of('The same requests, replayed', head, cells)}</details>")
    if len(known.devices) > devices:
        lines.append(f"<p>{devices} of {len(known.devices)} devices are drawn, those with the highest peaks; cap.to_html(path) has them all.</p>")
    return "\n".join(lines)


def _headline(line: str) -> str:
    peak, dot, rest = line.partition(" · ")
    return f"<p><strong>{_html(peak)}</strong>{dot}{_html(rest)}</p>"


def _pictures(known: Facts, device: Device, stack: Stack, rows: int) -> Iterator[str]:
    if stack.is_drawn:
        yield image(*pictures.timeline(known, device, stack))
    height = 34 + 26 * min(max(len(device.parts()), device.breakdown.height if device.by == "category" else 0, 1), 8, rows)
    both = device.by == "category" and device.sites.height > 0
    bars = [
        pictures.breakdown(device, height, pictures.HALF if both else pictures.WIDTH) if device.by == "category" else None,
        pictures.sites(device, stack, height, pictures.HALF if both else pictures.WIDTH),
    ]
    yield "".join(image(*bar) for bar in bars if bar)
    name = f"{device.label}: " if device.label else ""
    if layers_known(known) and (drawn := tree.picture(known.of(known.ask("layers"), device), f"{name}layers at the peak" if name else "Layers at the peak", rows=rows + 3)) is not None:
        yield f"<details><summary>{_html(name + 'layers')}</summary>{image(*drawn)}</details>"
    if (bar := _bar(known, device)) is not None:
        yield f"<details><summary>{_html(name + 'all of the device: the ledger')}</summary>{image(*bar)}</details>"
    tables = "".join(rows_of(*table) for table in text.tables(known, device, rows))
    yield f"<details><summary>{_html(name + 'tables')}</summary>{tables}{rows_of(*over_time(device, stack, rows + 4)) if stack.is_drawn else ''}</details>"


def _bar(known: Facts, device: Device) -> tuple[Svg, str] | None:
    """The ledger, where the driver was asked."""
    return ledger_bar.picture(known.of(known.ask("ledger"), device)) if known.capture.tables["samples"].height else None


def _ledger(known: Facts) -> str:
    """Where torch's allocator did nothing: who holds the device all the same."""
    return "".join(image(*bar) for device in known.devices[:_DEVICES] if (bar := _bar(known, device)) is not None) if known.moves_outside else ""


def layers_known(known: Facts) -> bool:
    """Whether the recording tells of modules at all."""
    return bool(known.capture.tables["contexts"].height or known.capture.tables["owners"].height)


def image(svg: Svg, sentence: str) -> str:
    """A picture that needs no trust, and its sentence."""
    return f'<img alt="{_html(sentence)}" src="{svg.data_uri()}" width="{svg.width}" height="{svg.height}">'


def rows_of(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its title."""
    top = "".join(f"<th>{_html(h)}</th>" for h in head)
    body = "".join("<tr>" + "".join(f"<td>{_html(middle(c, _CELL))}</td>" for c in row) + "</tr>" for row in rows)
    return f"<p>{_html(title)}</p><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def over_time(device: Device, stack: Stack, count: int) -> tuple[str, list[str], list[list[str]]]:
    """Return the timeline as a table: evenly spaced points and the peak."""
    totals, last, top = stack.totals, len(stack.xs) - 1, stack.top
    chosen = sorted({top, *(round(last * k / max(count - 2, 1)) for k in range(count - 1))})
    rows = []
    for i in chosen:
        at = format_time_us(stack.xs[i]) if stack.axis == "time" else f"event {stack.xs[i]:.0f}"
        rows.append([at + (" (peak)" if i == top else ""), format_bytes(totals[i], 2), format_bytes(stack.reserved[i], 2) if stack.reserved else "–"])
    cut = f" ({len(chosen)} of {last + 1} points)" if len(chosen) <= last else ""
    return f"Memory over time{cut}", ["at", "allocated", "reserved"], rows
