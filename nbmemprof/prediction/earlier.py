"""What earlier cells decided because there is no GPU here: read from their text, so that it can be decided again in a fake run.

``device = "cuda" if torch.cuda.is_available() else "cpu"`` is to be evaluated again; what was made with it
(``model = Net().to(device)``) would have been on the GPU. Nothing is run here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["Earlier", "read"]

_ASKED = {"is_available", "device_count", "is_built"}  # torch.cuda's questions whose answer is another on a GPU
_WORDS = _ASKED | {"device", "str", "bool", "int", "getenv", "get", "current_device", "get_device_name"}  # calls that may be made again
_BACK = {"cpu", "numpy", "item", "tolist", "state_dict"}  # what they give is no longer on the device, or is a copy of names


@dataclass
class Earlier:
    """Statements to run again, in order, and names of what would have been on the device."""

    again: list[str] = field(default_factory=list)
    placed: set[str] = field(default_factory=set)
    hanging: set[str] = field(default_factory=set)  # every name that hangs on the answer
    lines: dict[str, tuple[int, int]] = field(default_factory=dict)  # name → which text and line bound it last, or put it on the device


def read(cells: Iterable[str]) -> Earlier:
    """Read cells in the order in which they ran; what does not parse is left out."""
    found = Earlier()
    for number, cell in enumerate(cells):
        try:
            tree = ast.parse(cell)
        except (SyntaxError, ValueError):
            continue
        for statement in tree.body:
            _statement(statement, found)
            for name, line in _bound(statement):
                found.lines[name] = (number, line)
    return found


def _bound(statement: ast.stmt) -> Iterator[tuple[str, int]]:
    """Names that a statement binds or calls ``to`` or ``cuda`` of, with the line; what is in functions and classes is theirs."""
    if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt):
            yield from ((name, node.lineno) for name in _targets(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda") and (base := _base(node.func)):
            yield base, node.lineno


def _statement(node: ast.stmt, found: Earlier) -> None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if _hangs(node, found):
            found.hanging.add(node.name)
            if isinstance(node, ast.ClassDef):
                _class_words(node, found)
    elif isinstance(node, ast.If) and _hangs(node.test, found) and all(_is_words(inner) for inner in [*node.body, *node.orelse]):
        found.again.append(ast.unparse(_without_calls(node)))
        found.hanging |= {name for inner in [*node.body, *node.orelse] for name in _targets(inner)}
    elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
        if isinstance(node, (ast.For, ast.With)) and _hangs(node.iter if isinstance(node, ast.For) else node.items[0].context_expr, found):
            found.hanging |= _targets(node)
        for inner in [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]:
            _statement(inner, found)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        _assignment(node, found)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute) and _hangs(node, found):
        base = _base(node.value.func)
        if base and base not in found.hanging and node.value.func.attr in ("to", "cuda"):
            found.placed.add(base)
            found.hanging.add(base)


def _assignment(node: ast.Assign | ast.AnnAssign | ast.AugAssign, found: Earlier) -> None:
    names = _targets(node)
    assert node.value is not None  # noqa: S101 - the caller looked
    if _is_scaler(node.value, found):
        found.again.append(ast.unparse(node))
    elif not _hangs(node.value, found):
        found.hanging -= names
        found.placed -= names
    elif _is_words(node):
        found.again.append(ast.unparse(node))
        found.hanging |= names
    elif not _comes_back(node.value):
        found.placed |= names
        found.hanging |= names


def _is_scaler(value: ast.expr, found: Earlier) -> bool:
    """``GradScaler()``: without a GPU it switches itself off."""
    if not (isinstance(value, ast.Call) and _last(value.func) == "GradScaler"):
        return False
    enabled = next((word.value for word in value.keywords if word.arg == "enabled"), None)
    return enabled is None or _hangs(enabled, found)


def _class_words(node: ast.ClassDef, found: Earlier) -> None:
    """``class Config: device = …``: set on the class that is there."""
    for inner in node.body:
        if isinstance(inner, (ast.Assign, ast.AnnAssign)) and inner.value is not None and _hangs(inner.value, found) and _is_words(inner):
            found.again += [f"{node.name}.{name} = {ast.unparse(inner.value)}" for name in sorted(_targets(inner))]


def _hangs(node: ast.AST, found: Earlier) -> bool:
    """Whether a piece of code asks for the device, or uses a name that hangs on the answer."""
    return any(
        (isinstance(one, ast.Attribute) and one.attr in _ASKED and _base(one) != "os") or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id in found.hanging)
        for one in ast.walk(node)
    )


def _is_words(node: ast.stmt) -> bool:
    """Whether a statement only puts words together: it can run again and does nothing else."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name) and node.value.func.id == "print":
        return True
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return isinstance(node, ast.Pass)
    for one in ast.walk(node.value):
        if isinstance(one, ast.Call) and _last(one.func) not in _WORDS:
            return False
        if isinstance(one, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)):
            return False
    # x = data[device] or model.weight is no word: attributes and items of what hangs on the answer may be tensors, but reading them again is harmless
    return True


def _without_calls(node: ast.If) -> ast.If:
    """The same without what it prints."""
    bodies = [[inner for inner in body if not isinstance(inner, ast.Expr)] for body in (node.body, node.orelse)]
    return ast.If(node.test, bodies[0] or [ast.Pass()], bodies[1])


def _comes_back(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _BACK


def _targets(node: ast.AST) -> set[str]:
    """Names that a statement binds."""
    if isinstance(node, ast.Assign):
        parts: list[ast.AST] = list(node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)):
        parts = [node.target]
    elif isinstance(node, ast.With):
        parts = [item.optional_vars for item in node.items if item.optional_vars is not None]
    else:
        parts = []
    found = {one.id for part in parts for one in ast.walk(part) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return found | {base for part in parts if isinstance(part, (ast.Attribute, ast.Subscript)) and (base := _base(part))}


def _base(node: ast.AST) -> str | None:
    """``model`` of ``model.encoder.to``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _last(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
