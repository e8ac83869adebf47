"""How far apart the lanes of a warp are, from the text of a source line of CUDA C: simple index arithmetic, worked out; None for all else.

A guess from text is told only where the access model gives the sectors that the hardware counted.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbmemprof import access

__all__ = ["Modelled", "modelled", "stride_of"]

_LANES = 32
_CASTS = re.compile(r"\(\s*(?:const\s+)?(?:unsigned\s+|signed\s+)?(?:long\s+long|long|int|short|char|size_t|ptrdiff_t|u?int\d+_t|unsigned|Index|Count)(?:\s+int)?\s*\)")
_SUFFIX = re.compile(r"\b(\d+)(?:[uU]?[lL]{0,2}|[lL]{1,2}[uU]?)\b")
_BUILTIN = re.compile(r"\b(threadIdx|blockIdx|blockDim|gridDim)\.([xyz])\b")
_FUNCTION = re.compile(r"__(?:global|device)__[^;{]*?\b(\w+)\s*\(([^)]*)\)\s*\{", re.DOTALL)
_SIZES = {"float": 4, "int": 4, "unsigned": 4, "double": 8, "long long": 8, "short": 2, "char": 1, "half": 2, "float2": 8, "float4": 16}
_DEPTH = 12


def stride_of(source: str, line: int, *, operation: str, space: str, width_bytes: int, block: tuple[int, int, int], each: float) -> str | None:
    """Elements from a lane's access to the next lane's, as ``32`` or ``columns``; None where the text doesn't tell.

    Parameters
    ----------
    source
        The whole file.
    line
        From 1.
    operation, space
        ``load`` or ``store``, ``global`` or ``shared``.
    width_bytes
        What a lane's instruction moves.
    block
        Threads of a block, for which lane is which thread.
    each
        Sectors (of shared memory: wavefronts) that a warp instruction of this line took, as counted; the stride has to explain them.
    """
    found = set()
    for name, index, member in _accesses(source, line, operation):
        if _is_shared(source, name) != (space == "shared"):
            continue
        told = _lane_stride(source, line, index, block)
        if told is not None and _explains(source, name, told, member, width_bytes, space, each):
            number, words = told
            size = _element_bytes(source, name) if member else None
            found.add(words if size is None or number is None else str(number * size // width_bytes))
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class Modelled:
    """What the access model says of one access of a source line: ``units`` sectors (shared memory: wavefronts) a warp where ``ideal`` would do."""

    line: int
    array: str
    operation: str
    stride: str
    unit: str
    units: int
    ideal: int


def modelled(source: str, kernel: str, block: tuple[int, int, int]) -> list[Modelled]:
    """Every access of a kernel whose stride its text tells, and what it costs by the model."""
    head = next((match for match in _FUNCTION.finditer(source) if match.group(1) == kernel), None)
    if head is None:
        return []
    first = source[: head.start()].count("\n") + 1
    after = next((match.start() for match in _FUNCTION.finditer(source) if match.start() > head.start()), len(source))
    found = []
    for line in range(first, source[:after].rstrip().count("\n") + 2):
        for operation in ("load", "store"):
            for name, index, member in () if "__shared__" in _line(source, line) else _accesses(source, line, operation):
                told, width = _lane_stride(source, line, index, block), _width(source, name)
                if told is None or width is None or member:
                    continue
                step = abs(told[0] if told[0] is not None else 1 << 20) * width
                shared = _is_shared(source, name)
                lanes = [lane * step for lane in range(_LANES)]
                cost: Any = access.shared_load(lanes, width) if shared else access.global_load(lanes, width)
                units, ideal = (cost.wavefronts, cost.ideal_wavefronts) if shared else (cost.sectors, cost.ideal_sectors)
                found.append(Modelled(line, name, operation, told[1], "wavefronts" if shared else "sectors", units, ideal))
    return found


# ---------------------------------------------------------------------- the text
def _is_shared(source: str, name: str) -> bool:
    return re.search(rf"__shared__[^;]*\b{name}\s*\[", source) is not None


def _width(source: str, name: str) -> int | None:
    """Bytes of an array's element, by its declaration."""
    typed = re.search(rf"\b([a-z_]\w*(?:\s+long)?)\s*(?:\*\s*(?:__restrict__\s*)?{name}\b|\s{name}\s*\[)", source)
    return _SIZES.get(typed.group(1)) if typed else None


def _line(source: str, line: int) -> str:
    rows = source.splitlines()
    return rows[line - 1].split("//")[0] if 0 < line <= len(rows) else ""


def _accesses(source: str, line: int, operation: str) -> Iterator[tuple[str, str, bool]]:
    """``name[index]`` of a line that are read (or written), and whether a member is taken of them."""
    text = _line(source, line)
    for match in re.finditer(r"\b(\w+)\s*\[", text):
        end = _closing(text, match.end())
        index, after = text[match.end() : end - 1], text[end:].lstrip()
        if after.startswith("["):  # an array of two dimensions: rows of the declared length
            pitch = re.search(rf"\b{match.group(1)}\s*\[[^\]]*\]\s*\[([^\]]+)\]\s*;", source)
            close = _closing(after, 1)
            if pitch is None or after[close:].lstrip().startswith("["):
                continue
            index, after = f"({index}) * ({pitch.group(1)}) + ({after[1 : close - 1]})", after[close:].lstrip()
        member = re.match(r"\.\w+", after)
        rest = after[member.end() :].lstrip() if member else after
        plain, updated = re.match(r"=(?!=)", rest) is not None, re.match(r"[-+*/^|&]=", rest) is not None
        if (plain or updated) if operation == "store" else not plain:
            yield match.group(1), index, member is not None


def _closing(text: str, at: int) -> int:
    """Where the bracket that was opened before ``at`` is closed: the place after it."""
    depth = 1
    while at < len(text) and depth:
        depth += {"[": 1, "]": -1}.get(text[at], 0)
        at += 1
    return at


def _element_bytes(source: str, name: str) -> int | None:
    """Bytes of a pointer's element, where it is a structure of plain fields."""
    typed = re.search(rf"\b(\w+)\s*\*\s*(?:__restrict__\s*)?{name}\b", source)
    body = re.search(rf"struct\s+{typed.group(1)}\s*\{{([^}}]*)\}}", source) if typed else None
    if body is None:
        return None
    total = 0
    for field in filter(None, (part.strip() for part in body.group(1).split(";"))):
        kind = next((name for name in sorted(_SIZES, key=len, reverse=True) if field.startswith(f"{name} ")), None)
        if kind is None or "[" in field:
            return None
        total += _SIZES[kind] * (field.count(",") + 1)
    return total


# ---------------------------------------------------------------------- the arithmetic
def _lane_stride(source: str, line: int, index: str, block: tuple[int, int, int]) -> tuple[int | None, str] | None:
    """(stride, its words); the stride is None where it is a parameter of the kernel."""
    tries = []
    for seed in (1, 2):  # parameters get two values each: a stride that follows one is that parameter
        values: dict[str, int] = {}
        try:
            places = [_value(source, line, index, _builtins(lane, block), values, seed, 0) for lane in range(_LANES)]
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, KeyError):
            return None
        steps = {b - a for a, b in itertools.pairwise(places)}
        if len(steps) != 1:
            return None
        tries.append((steps.pop(), values))
    (one, first), (two, second) = tries
    if one == two:
        return one, str(one)
    for name in first:
        for times in (1, 2, 4, 8, 16, 32):
            if one == times * first[name] and two == times * second[name]:
                return None, name if times == 1 else f"{times} {name}"
    return None


def _builtins(lane: int, block: tuple[int, int, int]) -> dict[str, int]:
    x, y, _ = block
    thread = (lane % x, lane // x % y, lane // (x * y))
    made = {f"threadIdx_{axis}": thread[i] for i, axis in enumerate("xyz")}
    return made | {f"blockDim_{axis}": block[i] for i, axis in enumerate("xyz")} | {f"blockIdx_{axis}": 3 for axis in "xyz"} | {f"gridDim_{axis}": 64 for axis in "xyz"}


def _value(source: str, line: int, text: str, lane: Mapping[str, int], values: dict[str, int], seed: int, depth: int) -> int:
    """An index expression for one lane.

    Raises
    ------
    ValueError
        For what is more than arithmetic on names that can be followed.
    """
    if depth > _DEPTH:
        raise ValueError(text)
    plain = _SUFFIX.sub(r"\1", _BUILTIN.sub(r"\1_\2", _CASTS.sub("", text))).replace("/", "//")
    tree = ast.parse(plain.strip(), mode="eval").body

    def of(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -of(node.operand)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~of(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return int(_OPERATIONS[type(node.op)](of(node.left), of(node.right)))
        if isinstance(node, ast.Name):
            return name_of(node.id)
        raise ValueError(text)

    def name_of(name: str) -> int:
        if name in lane:
            return lane[name]
        macro = re.search(rf"^\s*#define\s+{name}\s+(.+)$", source, re.MULTILINE)
        if macro:
            return _value(source, line, macro.group(1), lane, values, seed, depth + 1)
        where, told = _definition(source, line, name)
        if told is not None:
            return _value(source, where, told, lane, values, seed, depth + 1)
        if _is_parameter(source, line, name):
            return values.setdefault(name, 1_000_003 * seed + 64 * 1009 * len(values))
        raise ValueError(name)

    return of(tree)


_OPERATIONS: dict[type, Any] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b, ast.FloorDiv: lambda a, b: a // b, ast.Mod: lambda a, b: a % b,
    ast.BitAnd: lambda a, b: a & b, ast.BitOr: lambda a, b: a | b, ast.BitXor: lambda a, b: a ^ b, ast.LShift: lambda a, b: a << b, ast.RShift: lambda a, b: a >> b,
}  # fmt: skip


def _head(source: str, line: int) -> re.Match[str] | None:
    """The function that a line lies in."""
    at = sum(len(row) + 1 for row in source.splitlines()[: line - 1]) + len(_line(source, line))
    return next((match for match in reversed(list(_FUNCTION.finditer(source))) if match.start() <= at), None)


def _definition(source: str, line: int, name: str) -> tuple[int, str | None]:
    """The line and text of what a name was last set to before a line, in the same function."""
    head = _head(source, line)
    if head is None:
        return line, None
    first = source[: head.end()].count("\n")
    rows = source.splitlines()
    for at in range(line - 1, first - 1, -1):
        found = list(re.finditer(rf"(?<![\w.\]])\b{name}\s*=(?!=)\s*([^;,]+)[;,]", rows[at].split("//")[0]))
        if found:
            return at + 1, found[0].group(1).rstrip(") ") if found[0].group(1).count("(") < found[0].group(1).count(")") else found[0].group(1)
    return line, None


def _is_parameter(source: str, line: int, name: str) -> bool:
    head = _head(source, line)
    return head is not None and any(re.search(rf"\b{name}$", part.strip()) is not None and "*" not in part for part in head.group(2).split(","))


def _explains(source: str, name: str, told: tuple[int | None, str], member: bool, width: int, space: str, each: float) -> bool:
    """Whether the access model gives what was counted, a shifted start allowed."""
    number = abs(told[0]) if told[0] is not None else 1 << 20  # a parameter of the size of a row or more
    step = number * ((_element_bytes(source, name) or width) if member else width)
    if space == "shared":
        return abs(access.shared_load(lambda t: t * step, width, element_bytes=1).wavefronts - each) < 0.01
    return abs(access.global_load(lambda t: t * step, width, element_bytes=1).sectors - each) <= 1.01
