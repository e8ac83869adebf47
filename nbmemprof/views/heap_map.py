"""Where blocks lie inside the segments: the heap at its peak and at its end, through time, and what is free in each list.

``%%memprof --view heap_map``, ``%memprof last --view heap_map``. Memory that is reserved and not in use shows as gaps; what keeps a gap
from being given back stands beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from nbmemprof import heap
from nbmemprof.analyses._moment import peak_of
from nbmemprof.analyses._sites import site_of_stacks
from nbmemprof.capture import Capture
from nbmemprof.units import format_bytes, format_count
from nbmemprof.views import _theme, text
from nbmemprof.views._display import put
from nbmemprof.views._facts import Device, Facts, facts
from nbmemprof.views.first import BUDGET_BYTES, Mount, image, rows_of
from nbmemprof.views.pictures import WIDTH
from nbmemprof.views.svg import Svg, clean, middle, shorten, text_width

__all__ = ["bundle", "lists", "moments", "show", "through_time"]

_ROWS, _SITES, _BAND = 14, 7, 15
_LEFT = 92
_FREE, _PENDING, _LIVE, _PINNED, _OPEN, _STRANDED = "#eceef1", "#b3261e", "#7fa8c9", "#e69f00", "#deeba7", "#cc79a7"
Codes = npt.NDArray[np.int16]


class _Colours:
    """Colour of each block: by the site that held most, else by its state."""

    def __init__(self, capture: Capture, sites: pl.DataFrame) -> None:
        named = sites.drop_nulls("site").group_by("site", maintain_order=True).agg(pl.col("size_bytes").sum()) if sites.height else pl.DataFrame({"site": []})
        self.names = [str(n) for n in (named.sort("size_bytes", descending=True, maintain_order=True)["site"] if named.width > 1 else [])][:_SITES]
        self.fills = ["", _FREE, _PENDING, _LIVE if not self.names else _theme.OTHER, *(_theme.SERIES_COLOURS[i % len(_theme.SERIES_COLOURS)] for i in range(len(self.names)))]
        place = {name: i + 4 for i, name in enumerate(self.names)}
        self._of = {i: place[s] for i, s in site_of_stacks(capture.stacks).select("stack_id", "site").iter_rows() if s in place}

    def codes(self, states: list[str], stacks: list[int | None]) -> list[int]:
        """1 free, 2 pending, 3 live of any other line, from 4 on the lines."""
        return [1 if s == "inactive" else 2 if s == "active_pending_free" else self._of.get(k, 3) if k is not None else 3 for s, k in zip(states, stacks, strict=True)]

    def legend(self, svg: Svg, y: float) -> None:
        """Name the colours in one line."""
        x = float(_LEFT)
        others = "other lines" if self.names else "in use"
        named = [(middle(n, 26), self.fills[i + 4]) for i, n in enumerate(self.names)]
        for name, fill in [("free", _FREE), ("pending", _PENDING), (others, self.fills[3]), *named]:
            wide = text_width(name, 10) + 22
            if x + wide > WIDTH - 8:
                break
            svg.rect(x, y - 9, 10, 10, fill, "#00000033")
            svg.text(x + 14, y, name, size=10)
            x += wide


def _key(device: Device) -> tuple[Any, ...]:
    return (device.rank, device.device, device.kind)


def _curve(capture: Capture, device: Device) -> heap.Curve | None:
    return next((c for c in heap.curves(capture) if c.key == _key(device)), None)


def _at(capture: Capture, device: Device) -> list[tuple[str, pl.DataFrame, pl.DataFrame]]:
    """(name, segments, blocks) at the peak and at the end."""
    mine, found = heap.matches(_key(device)), []
    curve = _curve(capture, device)
    if curve is not None and len(curve.seq):
        seq = peak_of(capture, curve)["seq"]
        if seq is not None:
            found.append(("at the peak", heap.segments_at(capture, seq).filter(mine), heap.blocks_at(capture, seq).filter(mine)))
    last = [heap.last_picture(capture.tables[name]).filter(mine) for name in ("segments", "blocks")]
    return [*found, ("at the end", last[0], last[1])]


def _largest(segments: pl.DataFrame) -> pl.DataFrame:
    return segments.sort("size_bytes", "addr", descending=[True, False]).head(_ROWS)


def _raster(segment: dict[str, Any], blocks: pl.DataFrame, codes: Codes, width: int, whole: int) -> Codes:
    """One row of pixels; small blocks in use lie above large ones, so that a block that pins a segment is seen."""
    row = np.zeros(width, np.int16)
    offset = (blocks["addr"].to_numpy() - np.uint64(segment["addr"])).astype(np.float64)
    size = blocks["size_bytes"].to_numpy().astype(np.float64)
    scale = width / whole
    for i in sorted(range(len(size)), key=lambda k: (codes[k] != 1, -size[k])):
        begin = min(int(offset[i] * scale), width - 1)
        row[begin : max(round((offset[i] + size[i]) * scale), begin + 1)] = codes[i]
    return row


def _runs(row: Codes) -> list[tuple[int, int, int]]:
    cuts = np.flatnonzero(np.diff(row)) + 1
    starts, ends = [0, *cuts.tolist()], [*cuts.tolist(), len(row)]
    return [(a, b, int(row[a])) for a, b in zip(starts, ends, strict=True)]


def moments(known: Facts, device: Device) -> tuple[Svg, str] | None:
    """Draw the largest segments and what lies in them, at the peak and at the end; None where there are no segments."""
    pictures = _at(known.capture, device)
    if not any(segments.height for _, segments, _ in pictures):
        return None
    colours = _Colours(known.capture, device.sites)
    rows = max(min(segments.height, _ROWS) for _, segments, _ in pictures)
    wide = (WIDTH - 24 - _LEFT * len(pictures)) // len(pictures)
    words = "; ".join(_said(*picture) for picture in pictures)
    sentence = f"Segments and what lies in them. {words}."
    svg = Svg(WIDTH, 62 + (_BAND + 3) * rows + 14, sentence)
    svg.text(12, 20, (f"{device.label}: " if device.label else "") + "Segments and what lies in them", size=13, bold=True)
    whole = max(int(segments["size_bytes"].max() or 1) for _, segments, _ in pictures if segments.height)  # type: ignore[arg-type]  # sizes are numbers
    for column, (name, segments, blocks) in enumerate(pictures):
        x0 = 12 + _LEFT + column * (wide + _LEFT)
        shown = _largest(segments)
        svg.text(x0, 40, f"{name}: {_some(shown.height, segments.height)}", fill=_theme.MUTED)
        paths: dict[int, list[str]] = {}
        for i, segment in enumerate(shown.iter_rows(named=True)):
            y = 48 + (_BAND + 3) * i
            inside = blocks.filter(pl.col("segment_addr") == segment["addr"])
            codes = np.asarray(colours.codes([str(s) for s in inside["state"]], inside["stack_id"].to_list()), np.int16)
            for a, b, code in _runs(_raster(segment, inside, codes, wide, whole)):
                if code:
                    paths.setdefault(code, []).append(f"M{x0 + a} {y}h{b - a}v{_BAND}h-{b - a}z")
            svg.text(x0 - 6, y + 11, _segment_name(segment), anchor="end", fill=_theme.MUTED, size=9.5)
        for code, parts in sorted(paths.items()):
            svg.path("".join(parts), colours.fills[code])
    colours.legend(svg, 62 + (_BAND + 3) * rows + 4)
    return svg, sentence


def _some(shown: int, of: int) -> str:
    return f"the largest {shown} of {format_count(of)} segments" if shown < of else f"{of} segment{'' if of == 1 else 's'}"


def _segment_name(segment: dict[str, Any]) -> str:
    kind = "grows " if segment["is_expandable"] else "" if str(segment["pool_id"] or "0_0") == "0_0" else "private "
    return kind + format_bytes(segment["size_bytes"])


def _said(name: str, segments: pl.DataFrame, blocks: pl.DataFrame) -> str:
    state = blocks["state"].cast(pl.String)
    free = int(blocks.filter(state == "inactive")["size_bytes"].sum())
    reserved = int(segments["size_bytes"].sum())
    pieces = int((state == "inactive").sum())
    return f"{name.capitalize()} {format_count(segments.height)} segments of {format_bytes(reserved)} together, {format_bytes(free)} of it free in {format_count(pieces)} pieces"


# ---------------------------------------------------------------------- through time
_RECTS = 500


def through_time(known: Facts, device: Device) -> tuple[Svg, str] | None:
    """Draw addresses of the largest segments against time; None where no event was recorded."""
    capture = known.capture
    curve = _curve(capture, device)
    if curve is None or not len(curve.seq):
        return None
    _, segments, _ = _at(capture, device)[0]
    shown = segments.sort("size_bytes", "addr", descending=[True, False]).head(8)
    if not shown.height:
        return None
    colours = _Colours(capture, device.sites)
    first, last = float(curve.seq[0]), float(curve.seq[-1])
    high = _heights([int(s) for s in shown["size_bytes"]], 250)
    x0, wide = float(12 + _LEFT), float(WIDTH - 24 - _LEFT)
    rects = _rectangles(capture.allocations.filter(heap.matches(_key(device))), shown, high, (first, last), wide)
    drawn = sorted(rects, key=lambda r: -r[2] * r[3])[:_RECTS]
    sentence = (
        f"Addresses in use through time, in {_some(shown.height, segments.height)} at the peak: {format_count(len(drawn))} of {format_count(len(rects))} allocations in them are drawn, "
        f"over {format_count(len(curve.seq))} events; what is not coloured is reserved and free, or not reserved yet."
    )
    svg = Svg(WIDTH, 48 + sum(high) + 3 * len(high) + 40, sentence)
    svg.text(12, 20, (f"{device.label}: " if device.label else "") + "Addresses in use through time", size=13, bold=True)
    svg.text(12, 36, f"{_some(shown.height, segments.height)} · {format_count(len(drawn))} of {format_count(len(rects))} allocations in them drawn", fill=_theme.MUTED)
    tops = [44 + sum(high[:i]) + 3 * i for i in range(len(high))]
    for top, tall, segment in zip(tops, high, shown.iter_rows(named=True), strict=True):
        svg.rect(x0, top, wide, tall, _FREE)
        svg.text(x0 - 6, top + tall / 2 + 4, _segment_name(segment), anchor="end", fill=_theme.MUTED, size=9.5)
    paths: dict[int, list[str]] = {}
    for x, row, w, h, y, stack in drawn:
        (code,) = colours.codes(["active_allocated"], [stack])
        paths.setdefault(code, []).append(f"M{x0 + x:.1f} {tops[row] + y:.1f}h{w:.1f}v{h:.1f}h-{w:.1f}z")
    for code, parts in sorted(paths.items()):
        svg.path("".join(parts), colours.fills[code])
    bottom = 44 + sum(high) + 3 * len(high)
    svg.text(x0 + wide / 2, bottom + 12, "events, in order", anchor="middle", fill=_theme.MUTED)
    colours.legend(svg, bottom + 30)
    return svg, sentence


def _heights(sizes: Sequence[int], room: int) -> list[int]:
    """Bands by size, none so low that nothing can be seen in it."""
    whole = sum(sizes)
    return [max(10, room * size // whole) for size in sizes]


def _rectangles(rows: pl.DataFrame, segments: pl.DataFrame, high: list[int], span: tuple[float, float], wide: float) -> list[tuple[float, int, float, float, float, int | None]]:
    """(x, row, width, height, y, stack) of each allocation in these segments, in pixels of its band."""
    scale = wide / max(span[1] - span[0], 1.0)
    found = []
    for number, (segment, tall) in enumerate(zip(segments.iter_rows(named=True), high, strict=True)):
        low, size = int(segment["addr"]), int(segment["size_bytes"])
        inside = rows.filter((pl.col("addr") >= low) & (pl.col("addr") < low + size))
        for addr, block, begin, end, stack in inside.select("addr", "size_bytes", "alloc_seq", "done_seq", "stack_id").iter_rows():
            x = ((begin if begin is not None else span[0]) - span[0]) * scale
            w = max(((end if end is not None else span[1]) - span[0]) * scale - x, 0.4)
            h = max((block or 0) * tall / size, 0.6)
            found.append((x, number, w, h, (addr - low) * tall / size, stack))
    return found


# ---------------------------------------------------------------------- free lists
def lists(known: Facts, device: Device) -> tuple[Svg, str] | None:
    """Draw each free list: in use, pending, free and pinned by blocks beside it, free and releasable; None where there is none."""
    frame = known.of(known.ask("fragmentation"), device)
    if not frame.height:
        return None
    shown = frame.sort("reserved_bytes", descending=True, maintain_order=True).head(10)
    most = max(int(shown["reserved_bytes"].max() or 1), 1)  # type: ignore[arg-type]  # as above
    title = "Free lists at the end"
    words, rows = [], []
    for row in shown.iter_rows(named=True):
        name = _list_name(row)
        said = f"{format_bytes(row['reserved_bytes'])} reserved, {format_bytes(row['free_bytes'])} free" + (f", largest piece {format_bytes(row['largest_free_bytes'])}" if row["free_bytes"] else "")
        free = [(row["free_bytes"], _STRANDED)] if row["private"] else [(row["pinned_bytes"], _PINNED), (row["releasable_bytes"], _OPEN)]
        words.append(f"{name}: {said}, " + ("which no other pool may use" if row["private"] else f"{format_bytes(row['pinned_bytes'])} of it pinned by blocks beside it"))
        rows.append((name, said, [(row["allocated_bytes"], _LIVE), (row["pending_bytes"], _PENDING), *free]))
    cut = f" ({shown.height} of {frame.height})" if shown.height < frame.height else ""
    sentence = f"{title}{cut}. {'; '.join(words)}."
    svg = Svg(WIDTH, 62 + 32 * len(rows), sentence)
    svg.text(12, 20, (f"{device.label}: " if device.label else "") + title + cut, size=13, bold=True)
    for i, (name, said, parts) in enumerate(rows):
        y, x = 44 + 32 * i, 12.0
        svg.text(12, y, shorten(name, WIDTH - 40 - text_width(said, 11), 11))
        svg.text(WIDTH - 12, y, said, anchor="end", fill=_theme.MUTED)
        for size, fill in parts:
            w = (WIDTH - 24) * (size or 0) / most
            svg.rect(x, y + 5, w, 9, fill)
            x += w
    x = 12.0
    used = {fill for _, _, parts in rows for size, fill in parts if size}
    for name, fill in (("in use", _LIVE), ("pending", _PENDING), ("free, pinned by blocks beside it", _PINNED), ("free, whole segments or pages: can be given back", _OPEN), ("free, in a private pool", _STRANDED)):
        if fill not in used:
            continue
        svg.rect(x, 62 + 32 * len(rows) - 21, 10, 10, fill, "#00000033")
        svg.text(x + 14, 62 + 32 * len(rows) - 12, name, size=10)
        x += text_width(name, 10) + 26
    return svg, sentence


def _list_name(row: dict[str, Any]) -> str:
    pool = "" if str(row["pool_id"] or "0_0") == "0_0" else f"private pool {row['pool_id']}, "
    stream = "" if not row["stream"] else f", stream {row['stream']:#x}"
    return f"{pool}{row['pool'] or 'one size'}{stream}"


# ---------------------------------------------------------------------- the view
def bundle(capture: Capture) -> dict[str, str]:
    """Return ``text/html`` and ``text/plain``, together at most 80 kB."""
    known = facts(capture)
    lines = text.headline(capture).split("\n")
    body = "".join(f"<p>{escape(clean(line))}</p>" for line in lines)
    plain = list(map(clean, lines))
    drawn = [device for device in known.devices if device.kind == "device"]
    if not drawn:
        said = "There are no segments to draw: host memory has none. Record on a GPU, open a snapshot, or use %%memprof --as H200:8GiB."
        return {"text/html": Mount.of(body).wrap(body + f"<p>{escape(said)}</p>"), "text/plain": "\n".join([*plain, said])}
    for device in drawn:
        made = [picture for picture in (draw(known, device) for draw in (moments, through_time, lists)) if picture is not None]
        more = "".join(image(*picture) for picture in made) + _details(known, device)
        if len((body + more).encode()) + sum(len(p.encode()) for p in plain) + 500 * len(made) > BUDGET_BYTES:
            body += f"<p>{drawn.index(device)} of {len(drawn)} devices are drawn.</p>"
            break
        body += more
        plain += [clean(sentence) for _, sentence in made]
    return {"text/html": Mount.of(body).wrap(body), "text/plain": "\n".join(plain)}


def _details(known: Facts, device: Device) -> str:
    frame = text.free_parts(known.of(known.ask("fragmentation"), device))
    names = {"pool_id": "pool", "pool": "part", "stream": "stream", "reserved_bytes": "reserved", "allocated_bytes": "in use", "free_bytes": "free", "largest_free_bytes": "largest piece",
             "pinned_bytes": "pinned", "releasable_bytes": "releasable", "stranded_bytes": "stranded in a private pool", "ratio": "fragmented", "pinned_by": "pinned by"}  # fmt: skip
    kept = [n for n in names if n in frame.columns and frame[n].null_count() < frame.height]
    rows = [[text.cell(n, v) for n, v in zip(kept, row, strict=True)] for row in frame.head(12).select(kept).iter_rows()]
    cut = f" (12 of {frame.height})" if frame.height > 12 else ""
    return f"<details><summary>tables</summary>{rows_of('Free memory inside what torch reserved' + cut, [names[n] for n in kept], rows)}</details>"


def show(capture: Capture) -> None:
    """Display it in IPython, print it elsewhere: the view ``heap_map``."""
    put(bundle(capture))
