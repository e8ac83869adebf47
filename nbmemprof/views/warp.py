"""One warp's access as a picture: lanes and the sectors they touch, or banks and the passes they need; a traced kernel as a table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from nbmemprof.access import GlobalAccess, SharedAccess, Site, Trace
from nbmemprof.views import _theme, text
from nbmemprof.views.first import Mount, image, rows_of
from nbmemprof.views.svg import Svg, clean, middle

__all__ = ["bundle", "picture", "trace_bundle"]

WIDTH, LEFT, CELL = 760, 50, 22
USED, UNUSED, EXTRA, OFF = "#0072b2", "#dbe7f0", "#e69f00", "#eeeff1"
_PICTURES = 3  # of a trace: its worst places, those that look alike once


def bundle(access: GlobalAccess | SharedAccess) -> dict[str, str]:
    """``text/html`` and ``text/plain``: a sentence, the picture, what would be better, the lanes as a table."""
    said, better = access.explain(), [one.text for one in access.suggestions()]
    head, rows = _lanes(access)
    body = f"<p><strong>{_html(said)}</strong> · modelled</p>{image(*picture(access))}"
    body += f"<ul>{''.join(f'<li>{_html(one)}</li>' for one in better)}</ul>" if better else ""
    body += f"<details><summary>lanes</summary>{rows_of('Where each lane goes', head, rows)}</details>"
    return {"text/html": Mount.of(body).wrap(body), "text/plain": "\n".join([f"{said} · modelled", *(f"  • {one}" for one in better)])}


def picture(access: GlobalAccess | SharedAccess) -> tuple[Svg, str]:
    """Draw it; the sentence has the numbers."""
    return _sectors(access) if isinstance(access, GlobalAccess) else _banks(access)


def _html(value: object) -> str:
    return escape(clean(value))


def _lanes(access: GlobalAccess | SharedAccess) -> tuple[list[str], list[list[str]]]:
    if isinstance(access, GlobalAccess):
        return ["lane", "address", "sector", "line"], [[str(lane), f"{a}", f"{a // 32}", f"{a // 128}"] for lane, a in access.active]
    return ["lane", "address", "bank"], [[str(lane), f"{a}", f"{a // 4 % 32}"] for lane, a in access.active]


def _boxes(svg: Svg, access: GlobalAccess | SharedAccess, y: float) -> None:
    """The 32 lanes in a row."""
    svg.text(LEFT - 8, y + 14, "lane", anchor="end", fill=_theme.MUTED)
    for lane, address in enumerate(access.addresses):
        x = LEFT + lane * CELL
        svg.rect(x + 1, y, CELL - 2, 20, OFF if address is None else USED)
        svg.text(x + CELL / 2, y + 14, str(lane), size=9, anchor="middle", fill=_theme.FAINT if address is None else "#ffffff")


def _sectors(access: GlobalAccess) -> tuple[Svg, str]:
    sentence = f"{access.explain()[0].upper()}{access.explain()[1:]}."
    svg = Svg(WIDTH, 196, sentence)
    svg.text(12, 20, f"{access.sectors} sector{'' if access.sectors == 1 else 's'} of 32 B, {access.ideal_unique_sectors} needed", size=13, bold=True)
    svg.text(WIDTH - 12, 20, "blue: bytes that lanes ask for; pale: bytes that come along", anchor="end", fill=_theme.MUTED)
    _boxes(svg, access, 34)
    found = access.sector_lanes
    lines = sorted({sector // 4 for sector in found})
    wide = min(46.0, (WIDTH - LEFT - 14 - 6 * len(lines)) / max(len(found), 1))
    x, placed = float(LEFT), {}
    for line in lines:
        begin = x
        for sector in (s for s in found if s // 4 == line):
            placed[sector] = x
            svg.rect(x + 0.5, 132, wide - 1, 20, UNUSED)
            x += wide
        if x - begin > 40:
            svg.text((begin + x) / 2, 182, f"line {line}", size=9, anchor="middle", fill=_theme.MUTED)
        svg.line(begin + 1, 168, x - 1, 168, _theme.MUTED)
        x += 6
    svg.text(LEFT - 8, 146, "sector", anchor="end", fill=_theme.MUTED)
    for lane, address in access.active:
        left = placed[address // 32] + wide * (address % 32) / 32
        svg.rect(left, 132, max(wide * access.width / 32, 0.6), 20, USED)
        svg.line(LEFT + (lane + 0.5) * CELL, 56, left + wide * access.width / 64, 130, _theme.FAINT, 0.8)
    if wide >= 18:
        for sector, at in placed.items():
            svg.text(at + wide / 2, 164, str(sector), size=8, anchor="middle", fill=_theme.MUTED)
    return svg, sentence


def _banks(access: SharedAccess) -> tuple[Svg, str]:
    sentence = f"{access.explain()[0].upper()}{access.explain()[1:]}."
    passes = access.wavefronts
    high = 18 if passes <= 10 else 12
    svg = Svg(WIDTH, 112 + passes * high + 6 * len(access.phases), sentence)
    svg.text(12, 20, f"{passes} wavefront{'' if passes == 1 else 's'}, {access.ideal_wavefronts} needed", size=13, bold=True)
    svg.text(WIDTH - 12, 20, "numbers in the grid: lanes; orange: passes for words of a bank already asked", anchor="end", fill=_theme.MUTED)
    _boxes(svg, access, 34)
    svg.text(LEFT - 8, 78, "bank", anchor="end", fill=_theme.MUTED)
    for bank in range(32):
        svg.text(LEFT + (bank + 0.5) * CELL, 78, str(bank), size=9, anchor="middle", fill=_theme.MUTED)
    y, number = 86.0, 0
    for phase in access.phases:
        for turn in range(phase.wavefronts):
            number += 1
            svg.text(LEFT - 8, y + high - 4, str(number), size=9, anchor="end", fill=_theme.MUTED)
            svg.rect(LEFT, y, 32 * CELL, high - 1, OFF)
            for bank, words in phase.words.items():
                if turn < len(words):
                    svg.rect(LEFT + bank * CELL + 0.5, y, CELL - 1, high - 1, EXTRA if turn else "#56b4e9")
                    svg.text(LEFT + (bank + 0.5) * CELL, y + high - (6 if high > 12 else 3), _who(access, phase.lanes, words[turn]), size=8, anchor="middle")
            y += high
        y += 6
    svg.text(12, y + 8, "Each bank gives one word of 4 B a wavefront; lanes that ask for the same word share it.", size=10, fill=_theme.MUTED)
    return svg, sentence


def _who(access: SharedAccess, lanes: Sequence[int], word: int) -> str:
    mine = [lane for lane in lanes if (a := access.addresses[lane]) is not None and a // 4 <= word <= (a + access.width - 1) // 4]
    return str(mine[0]) if len(mine) == 1 else f"{len(mine)}×" if len(mine) > 2 else f"{mine[0]},{mine[1]}"


# ---------------------------------------------------------------------- a traced kernel
def trace_bundle(trace: Trace) -> dict[str, str]:
    """``text/html`` and ``text/plain`` of a trace: what each place costs, the worst ones drawn, what would be better."""
    said = _headline(trace)
    head = ["line", "array", "what", "instructions", "transactions", "needed", "used", "code"]
    rows = [_row(site) for site in trace.sites]
    wasting = sorted((site for site in trace.sites if _factor(site) > 1), key=_factor, reverse=True)
    alike: dict[tuple[Any, ...], Site] = {}
    for site in wasting:  # a load and a store of the same words are drawn once
        alike.setdefault((site.line, site.space, site.worst.addresses), site)
    worst = list(alike.values())[:_PICTURES]
    better = list(dict.fromkeys(f"Line {site.line}, {site.array}: {one.text}" for site in worst for one in site.worst.suggestions()[:3]))
    notes = [f"Line {site.line}, {site.array}: lanes repeat this place unequally often; repetitions are matched by number, which is an approximation." for site in trace.sites if not site.aligned]
    drawn = "".join(f"<p>{_html(f'Line {site.line}, {site.array}: {middle(site.source, 90)}')}</p>{image(*picture(site.worst))}" for site in worst)
    lists = "".join(f"<ul>{''.join(f'<li>{_html(one)}</li>' for one in part)}</ul>" for part in (better, notes) if part)
    body = f"<p><strong>{_html(said)}</strong> · modelled</p>{rows_of('What each place costs', head, rows)}{lists}{drawn}"
    plain = [f"{said} · modelled", *text.aligned(head, rows, 110), *(f"  • {one}" for one in (*better, *notes))]
    return {"text/html": Mount.of(body).wrap(body), "text/plain": "\n".join(plain)}


def _factor(site: Site) -> float:
    """How many times too many transactions the worst instruction of a place makes."""
    one = site.worst
    done, needed = (one.sectors, one.ideal_unique_sectors) if isinstance(one, GlobalAccess) else (one.wavefronts, one.ideal_wavefronts)
    return done / needed if needed else 1.0


def _headline(trace: Trace) -> str:
    size = " × ".join(str(n) for n in trace.block if n > 1) or "1"
    many = "block" if len(trace.blocks) == 1 else f"{len(trace.blocks)} blocks"
    if not trace.sites:
        return f"{trace.kernel}, {many} of {size} threads: touches no memory"
    worst = max(trace.sites, key=_factor)
    return f"{trace.kernel}, {many} of {size} threads: line {worst.line}, {worst.array}: {worst.worst.explain()}"


def _row(site: Site) -> list[str]:
    names = ("sectors", "ideal_unique_sectors") if site.space == "global" else ("wavefronts", "ideal_wavefronts")
    done, ideal = site.total(names[0]), site.total(names[1])
    unit = "sectors" if site.space == "global" else "wavefronts"
    share = f"{100 * ideal / done:.3g} %" if done else "–"
    return [str(site.line), site.array, f"{site.space} {site.operation}, {site.width} B", str(len(site.accesses)), f"{done} {unit}", str(ideal), share, middle(site.source, 60)]
