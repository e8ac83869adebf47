"""The layers of a model as a tree: a picture in which alike blocks are one row, and nested lists that open and close."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

import polars as pl

from nbmemprof.analyses.layers import COLUMNS
from nbmemprof.units import format_bytes
from nbmemprof.views import _theme
from nbmemprof.views.svg import Svg, clean, middle, shorten, text_width

__all__ = ["Node", "folded", "html", "picture", "shown", "tree"]

PARTS = (*COLUMNS, "other")
_BYTES = (*COLUMNS.values(), "other_bytes")
_ALIKE = 0.05  # blocks whose sizes are this near to each other are drawn as one
_ROWS = 15
_MOST = 1500  # nodes of the nested lists
_LINE = 20


@dataclass
class Node:
    """One module, or several alike: its bytes by category, what is below it included."""

    name: str
    bytes_: list[int]
    children: list[Node] = field(default_factory=list)
    count: int = 1

    @property
    def size(self) -> int:
        """All of them."""
        return sum(self.bytes_)


def tree(frame: pl.DataFrame) -> list[Node]:
    """Roots of the frame of ``layers`` of one device; what belongs to no layer is left out."""
    nodes: dict[str, Node] = {}
    roots: list[Node] = []
    rows = frame.filter(pl.col("layer").is_not_null()).with_columns(pl.col(n).fill_null(0) for n in _BYTES)
    for layer, parent, name, *sizes in rows.sort("depth", maintain_order=True).select("layer", "parent", "name", *_BYTES).iter_rows():
        nodes[layer] = node = Node(clean(name), list(sizes))
        (nodes[parent].children if parent in nodes else roots).append(node)
    return sorted(roots, key=lambda n: -n.size)


def folded(node: Node) -> Node:
    """Numbered neighbours that are alike become one node: twelve equal blocks are one row."""
    children: list[Node] = []
    for child in (folded(c) for c in node.children):
        last = children[-1] if children else None
        if last is not None and child.name.isdigit() and last.name.partition("–")[0].isdigit() and _alike(last, child):
            children[-1] = _joined(last, child)
        else:
            children.append(child)
    return Node(node.name, node.bytes_, children, node.count)


def _alike(one: Node, other: Node) -> bool:
    each = one.size / one.count
    return abs(each - other.size) <= _ALIKE * max(each, other.size, 1) and [c.name for c in one.children] == [c.name for c in other.children]


def _joined(one: Node, other: Node) -> Node:
    name = f"{one.name.partition('–')[0]}–{other.name}" if other.name.isdigit() else one.name
    children = [_joined(a, b) for a, b in zip(one.children, other.children, strict=True)]
    return Node(name, [a + b for a, b in zip(one.bytes_, other.bytes_, strict=True)], children, one.count + other.count)


def shown(roots: Sequence[Node], rows: int = _ROWS) -> list[tuple[int, str, Node]]:
    """Depth, path from the row above, and node of the rows to draw: the largest are opened first, as far as there is room."""
    opened: set[int] = set()
    visible = [folded(root) for root in roots[:rows]]
    least = sum(n.size for n in visible) / 500  # thinner than a pixel

    def below(node: Node) -> list[Node]:
        return [c for c in node.children if c.size > least]

    everything = list(visible)
    while True:
        closed = [n for n in everything if id(n) not in opened and below(n) and len(everything) + len(below(n)) - (len(below(n)) == 1) <= rows]
        if not closed:
            break
        node = max(closed, key=lambda n: n.size)
        opened.add(id(node))
        everything += below(node)
    lines: list[tuple[int, str, Node]] = []

    def walk(node: Node, depth: int, path: str) -> None:
        inner = below(node) if id(node) in opened else []
        if len(inner) == 1 and inner[0].size >= 0.98 * node.size:  # a chain is one row
            walk(inner[0], depth, f"{path}{node.name}.")
            return
        lines.append((depth, f"{path}{node.name}", node))
        for child in inner:
            walk(child, depth + 1, "")

    for node in visible:
        walk(node, 0, "")
    return lines


def picture(frame: pl.DataFrame, title: str, width: int = 740, rows: int = _ROWS) -> tuple[Svg, str] | None:
    """Draw the tree; None where no layer is known."""
    lines = shown(tree(frame), rows)
    if not lines or (len(lines) == 1 and not lines[0][2].children):
        return None
    most = max(node.size for _, _, node in lines) or 1
    sentence = f"{title}: " + ", ".join(f"{middle(path, 50)} {format_bytes(node.size)}" for _, path, node in lines[:8]) + "."
    used = [i for i in range(len(PARTS)) if any(node.bytes_[i] * 300 > most for _, _, node in lines)]
    svg = Svg(width, 58 + _LINE * len(lines), sentence)
    svg.text(12, 20, title, size=13, bold=True)
    x = 12.0
    for i in used:
        word = _theme.word(PARTS[i])
        svg.rect(x, 30, 10, 10, _colour(i), "#00000033")
        svg.text(x + 14, 39, word)
        x += 26 + text_width(word, 11)
    left, right = 300.0, width - 78.0
    for n, (depth, path, node) in enumerate(lines):
        y = 50.0 + _LINE * n
        label = path + (f"  ({node.count} alike)" if node.count > 1 and "–" in node.name else "")
        svg.text(12 + 12 * depth, y + 12, shorten(label, left - 24 - 12 * depth, 11), bold=depth == 0)
        svg.rect(left, y + 2, right - left, _LINE - 7, "#eeeff1")
        at = left
        for i, size in enumerate(node.bytes_):
            wide = (right - left) * size / most
            if wide >= 0.3:
                svg.rect(at, y + 2, wide, _LINE - 7, _colour(i))
            at += wide
        svg.text(width - 12, y + 12, format_bytes(node.size), anchor="end", fill=_theme.MUTED)
    return svg, sentence


def _colour(i: int) -> str:
    return _theme.colour(PARTS[i])


def html(frame: pl.DataFrame) -> str:
    """Nested lists that open and close, with a bar for each module."""
    roots = tree(frame)
    if not roots:
        return ""
    most, left = max(*(n.size for n in roots), 1), [_MOST]
    used = [i for i in range(len(PARTS)) if any(node.bytes_[i] for node in roots)]
    legend = "".join(f'<li><i style="background:{_colour(i)}"></i>{escape(_theme.word(PARTS[i]))}</li>' for i in used)
    body = "".join(_item(node, most, left, 0) for node in roots)
    cut = f'<p class="muted">The first {_MOST} modules are listed.</p>' if left[0] <= 0 else ""
    return f'<ul class="legend">{legend}</ul><div class="tree">{body}</div>{cut}'


def _item(node: Node, most: int, left: list[int], depth: int) -> str:
    if left[0] <= 0:
        return ""
    left[0] -= 1
    bar = "".join(f'<i style="width:{100 * size / most:.2f}%;background:{_colour(i)}" title="{escape(_theme.word(PARTS[i]))} {format_bytes(size)}"></i>' for i, size in enumerate(node.bytes_) if 500 * size > most)
    line = f'<span class="name">{escape(node.name)}</span><span class="bar">{bar}</span><span class="n" title="{node.size} bytes">{format_bytes(node.size, 2)}</span>'
    inner = "".join(_children(node, most, left, depth))
    return f"<details{' open' if depth < 2 and len(node.children) < 8 else ''}><summary>{line}</summary>{inner}</details>" if inner else f'<div class="leaf">{line}</div>'


def _children(node: Node, most: int, left: list[int], depth: int) -> Iterator[str]:
    for child in node.children:
        yield _item(child, most, left, depth + 1)
