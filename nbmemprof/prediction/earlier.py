"""What earlier cells decided because there is no GPU here: read from their text, so that it can be decided again in a fake run.

``device = "cuda" if torch.cuda.is_available() else "cpu"`` is to be evaluated again; what was made with it
(``model = Net().to(device)``) would have been on the GPU. Nothing is run here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

__all__ = ["Earlier", "closed_over", "read"]

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
    defaults: list[tuple[str, str, str]] = field(default_factory=list)  # function, its argument, the default to be evaluated again
    fields: list[tuple[str, str, str]] = field(default_factory=list)  # object, its attribute, what that is to be
    modules: dict[str, Earlier] = field(default_factory=dict)  # of the user's own, that decided when they were imported
    classes: dict[str, dict[str, str]] = field(default_factory=dict)  # class → what its objects have that hangs on the answer

    def __bool__(self) -> bool:
        """Whether anything is to be decided again."""
        return bool(self.again or self.placed or self.defaults or self.fields or self.modules)


def read(cells: Iterable[str], modules: dict[str, Earlier] | None = None) -> Earlier:
    """Read cells in the order in which they ran; what does not parse is left out. ``modules``: what is known of those that they import from."""
    found = Earlier(modules=dict(modules or {}))
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
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from ((one.asname or one.name, node.lineno) for one in node.names)
        elif isinstance(node, ast.stmt):
            yield from ((name, node.lineno) for name in _targets(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("to", "cuda") and (base := _base(node.func)):
            yield base, node.lineno


def _statement(node: ast.stmt, found: Earlier) -> None:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        if _hangs(node, found):
            found.hanging.add(node.name)
            if isinstance(node, ast.ClassDef):
                _class_words(node, found)
            else:
                _default_words(node, node.name, found)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        _import(node, found)
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
    elif _has_fields(node.value, found):
        attributes = found.classes[ast.unparse(node.value.func)]  # type: ignore[attr-defined]
        found.fields += [(name, attribute, expression) for name in sorted(names) for attribute, expression in attributes.items()]
        found.hanging |= {f"{name}.{attribute}" for name in names for attribute in attributes}
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
    """``class Config: device = …``: set on the class that is there; what its objects are given in ``__init__``, and its methods' defaults."""
    attributes: dict[str, str] = {}
    for inner in node.body:
        if isinstance(inner, (ast.Assign, ast.AnnAssign)) and inner.value is not None and _hangs(inner.value, found) and _is_words(inner):
            for name in sorted(_targets(inner)):
                found.again.append(f"{node.name}.{name} = {ast.unparse(inner.value)}")
                found.defaults.append((f"{node.name}.__init__", name, f"{node.name}.{name}"))  # of a dataclass
                attributes[name] = f"{node.name}.{name}"
        elif isinstance(inner, ast.FunctionDef):
            _default_words(inner, f"{node.name}.{inner.name}", found)
            if inner.name == "__init__":
                own = {one.arg for one in ast.walk(inner.args) if isinstance(one, ast.arg)}
                for statement in inner.body:
                    if isinstance(statement, ast.Assign) and _hangs(statement.value, found) and _is_words(statement) and not own & _names(statement.value):
                        attributes |= {one.attr: ast.unparse(statement.value) for one in statement.targets if isinstance(one, ast.Attribute)}
    if attributes:
        found.classes[node.name] = attributes


def _has_fields(value: ast.expr, found: Earlier) -> bool:
    """``Config()``, of a class whose objects have what hangs on the answer, and none of that is given."""
    name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return name in found.classes and not value.args and not {word.arg for word in value.keywords} & {None, *found.classes[name]}  # type: ignore[attr-defined]


def _default_words(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, found: Earlier) -> None:
    """``def step(batch, device=device)``: the default again."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    given = [*zip(arguments[len(arguments) - len(node.args.defaults) :], node.args.defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    for argument, default in given:
        if default is not None and _hangs(default, found) and _is_words(ast.Assign([], default)):
            found.defaults.append((name, argument.arg, ast.unparse(default)))


def _import(node: ast.Import | ast.ImportFrom, found: Earlier) -> None:
    """Names from a module that decided when it was imported."""
    if isinstance(node, ast.Import):
        for one in node.names:
            known = found.modules.get(one.name)
            if known is not None:
                found.hanging |= {f"{one.asname or one.name}.{name}" for name in known.hanging | known.placed}
                found.classes |= {f"{one.asname or one.name}.{name}": _of_module(attributes, one.name) for name, attributes in known.classes.items()}
        return
    known = found.modules.get(node.module or "")
    for one in node.names if known is not None and not node.level else ():
        name = one.asname or one.name
        if one.name in known.placed:  # type: ignore[union-attr]
            found.placed.add(name)
            found.hanging.add(name)
        elif one.name in known.hanging:  # type: ignore[union-attr]
            found.again.append(ast.unparse(ast.ImportFrom(node.module, [one], 0)))
            found.hanging.add(name)
            if one.name in known.classes:  # type: ignore[union-attr]
                found.classes[name] = _of_module(known.classes[one.name], node.module or "")  # type: ignore[union-attr]


def _of_module(attributes: dict[str, str], module: str) -> dict[str, str]:
    """Expressions that hold in a module, to be evaluated elsewhere."""
    return {name: f"eval({expression!r}, vars(__import__('sys').modules[{module!r}]))" for name, expression in attributes.items()}


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def closed_over(text: str, name: str, line: int, variable: str, found: Earlier) -> str | None:
    """What a variable of the function around another was bound to, where that hangs on the answer and on globals alone.

    Parameters
    ----------
    name, line
        Of the inner function, as its code object has them.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    for outer in ast.walk(tree):
        if not isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        own = {one.arg for one in ast.walk(outer.args) if isinstance(one, ast.arg)} | {target for one in ast.walk(outer) for target in (_targets(one) if isinstance(one, ast.stmt) else ())}
        inner = (one for one in ast.walk(outer) if one is not outer and isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))
        if not any(getattr(one, "name", "<lambda>") == name and min([one.lineno, *(d.lineno for d in getattr(one, "decorator_list", ()))]) == line for one in inner):
            continue
        bound = [one for one in outer.body if isinstance(one, ast.Assign) and _targets(one) == {variable}]
        if len(bound) == 1 and _hangs(bound[0].value, found) and _is_words(bound[0]) and not own & _names(bound[0].value):
            return ast.unparse(bound[0].value)
    return None


def _hangs(node: ast.AST, found: Earlier) -> bool:
    """Whether a piece of code asks for the device, or uses a name that hangs on the answer."""
    return any(
        (isinstance(one, ast.Attribute) and ((one.attr in _ASKED and _base(one) != "os") or (isinstance(one.value, ast.Name) and f"{one.value.id}.{one.attr}" in found.hanging)))
        or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id in found.hanging)
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
