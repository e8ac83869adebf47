"""What earlier cells decided because there is no GPU here: read from their text, so that it can be decided again in a fake run.

``device = "cuda" if torch.cuda.is_available() else "cpu"`` is to be evaluated again; what was made with it
(``model = Net().to(device)``) would have been on the GPU. Nothing is run here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from nbmemprof.prediction.words import ASKED, is_plain, is_words, words_of

__all__ = ["Earlier", "closed_over", "hangs", "read"]

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
    remade: set[str] = field(default_factory=set)  # names that are bound by the statements that run again
    stays: set[str] = field(default_factory=set)  # of those, names that something else bound anew afterwards
    plain: set[str] = field(default_factory=set)  # functions that only put words together
    asking: set[str] = field(default_factory=set)  # functions that ask for a GPU
    asked: set[str] = field(default_factory=set)  # names that were bound by asking for one, and are not decided again
    imports: set[str] = field(default_factory=lambda: {"torch"})  # names of modules

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
        _definition(node, found)
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        _import(node, found)
    elif isinstance(node, ast.If) and hangs(node.test, found):
        _choice(node, found)
    elif isinstance(node, (ast.If, ast.For, ast.While, ast.With, ast.Try)):
        if isinstance(node, (ast.For, ast.With)) and hangs(node.iter if isinstance(node, ast.For) else node.items[0].context_expr, found):
            found.hanging |= _targets(node)
        for inner in [*node.body, *getattr(node, "orelse", []), *getattr(node, "finalbody", [])]:
            _statement(inner, found)
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        _assignment(node, found)
    elif isinstance(node, ast.Expr) and hangs(node, found):
        _put_there(node, found)


def _definition(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, found: Earlier) -> None:
    _otherwise({node.name}, found)
    for names in (found.hanging, found.plain, found.asking):
        names.discard(node.name)
    if not isinstance(node, ast.ClassDef) and is_plain(node, found.plain):
        found.plain.add(node.name)
    if not hangs(node, found):
        return
    asks = _asks(node, found)
    found.hanging.add(node.name)
    if isinstance(node, ast.ClassDef):
        _class_words(node, found)
    else:
        _default_words(node, node.name, found)
        found.asking |= {node.name} if asks else set()


def _put_there(node: ast.Expr, found: Earlier, *, only: bool = False) -> None:
    """``model.to(device)``; ``only``: it ran only where there is a GPU."""
    call = node.value
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in ("to", "cuda")):
        return
    base = _base(call.func)
    if base and (only or base not in found.hanging) and base not in found.imports:
        found.placed.add(base)
        found.hanging.add(base)


def _assignment(node: ast.Assign | ast.AnnAssign | ast.AugAssign, found: Earlier) -> None:
    value, names = node.value, _names_bound(node)
    assert value is not None  # noqa: S101 - the caller looked
    every = _targets(node) - found.imports
    hanging = hangs(value, found)
    if _is_scaler(value, found):
        _again(node, names, found)
    elif isinstance(node, ast.AugAssign):
        if every & found.remade and words_of(value, found.plain):
            found.again.append(ast.unparse(node))
        elif hanging:
            found.hanging |= every
            found.asked |= every if _asks(value, found) else set()
            _otherwise(names, found)
    elif not hanging:
        if (every - names) & found.remade and is_words(node, found.plain):  # cfg["lr"] = 1
            found.again.append(ast.unparse(node))
        for those in (found.hanging, found.placed, found.asked, found.plain, found.asking):
            those -= names
        _otherwise(names, found)
    elif isinstance(value, ast.Lambda):
        found.hanging |= names
        found.plain |= names if words_of(value.body, found.plain) else set()
        found.asking |= names if _asks(value, found) else set()
        _otherwise(names, found)
    elif _has_fields(value, found):
        attributes = found.classes[ast.unparse(value.func)]  # type: ignore[attr-defined]
        found.fields += [(name, attribute, expression) for name in sorted(names) for attribute, expression in attributes.items()]
        found.hanging |= {f"{name}.{attribute}" for name in names for attribute in attributes}
        _otherwise(names, found)
    elif is_words(node, found.plain) and not _computes(value, found.placed):
        found.hanging |= every
        _again(node, names, found)
    else:
        _placed(value, every, found)
        _otherwise(names, found)


def _again(node: ast.stmt, names: set[str], found: Earlier) -> None:
    """A statement that can run again."""
    found.again.append(ast.unparse(node))
    found.remade |= names
    for those in (found.stays, found.asked, found.placed):
        those -= names


def _otherwise(names: set[str], found: Earlier) -> None:
    """Names that were bound by what does not run again."""
    found.stays |= names & found.remade
    found.remade -= names


def _placed(value: ast.expr, names: set[str], found: Earlier) -> None:
    """Names of what would have been on the device, or can't be told."""
    if not _comes_back(value):
        found.placed |= names
        found.hanging |= names
    found.asked -= names
    found.asked |= names if _asks(value, found) else set()


def _computes(value: ast.AST, placed: set[str]) -> bool:
    """Whether an expression may make a tensor of one that is to be moved first."""
    return bool(_names(value) & placed) and any(isinstance(one, (ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Compare)) for one in ast.walk(value))


def _choice(node: ast.If, found: Earlier) -> None:
    """``if torch.cuda.is_available():``: of what it binds, words again; the rest would be on the device, or can't be told."""
    other: set[str] = set()
    parts = [one for body in (node.body, node.orelse) for inner in body for one in ast.walk(inner) if isinstance(one, ast.stmt)]
    for one in parts:
        if isinstance(one, ast.Expr):
            _put_there(one, found, only=True)
        elif isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            other.add(one.name)
        elif _targets(one) and not _again_inside(one, found):
            other |= _names_bound(one)
    if not words_of(node.test, found.plain):
        other |= {name for one in parts for name in _names_bound(one)}
    kept = _without(node, other, found)
    if kept is not None:
        bound = {name for one in ast.walk(kept) for name in _targets(one)} - found.imports
        found.hanging |= bound
        _again(kept, {name for one in ast.walk(kept) for name in _names_bound(one)}, found)
    for one in parts:
        names = _names_bound(one) & other
        if names and isinstance(one, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and one.value is not None:
            _placed(one.value, names, found)
    found.hanging |= other
    found.asked |= other
    _otherwise(other, found)


def _again_inside(node: ast.stmt, found: Earlier) -> bool:
    value = getattr(node, "value", None)
    return is_words(node, found.plain) or (isinstance(node, ast.Assign) and value is not None and _is_scaler(value, found))


def _without(node: ast.If, other: set[str], found: Earlier) -> ast.If | None:
    """The same with what can run again alone; None where that is nothing."""
    bodies: list[list[ast.stmt]] = []
    for body in (node.body, node.orelse):
        kept: list[ast.stmt] = []
        for one in body:
            if isinstance(one, ast.If) and words_of(one.test, found.plain):
                inner = _without(one, other, found)
                kept += [inner] if inner is not None else []
            elif isinstance(one, ast.Assign | ast.AnnAssign) and _again_inside(one, found) and not _names_bound(one) & other:
                kept.append(one)
        bodies.append(kept)
    return ast.If(node.test, bodies[0] or [ast.Pass()], bodies[1]) if any(bodies) else None


def _is_scaler(value: ast.expr, found: Earlier) -> bool:
    """``GradScaler()``: without a GPU it switches itself off."""
    if not (isinstance(value, ast.Call) and _last(value.func) == "GradScaler"):
        return False
    enabled = next((word.value for word in value.keywords if word.arg == "enabled"), None)
    return enabled is None or hangs(enabled, found)


def _class_words(node: ast.ClassDef, found: Earlier) -> None:
    """``class Config: device = …``: set on the class that is there; what its objects are given in ``__init__``, and its methods' defaults."""
    attributes: dict[str, str] = {}
    for inner in node.body:
        if isinstance(inner, (ast.Assign, ast.AnnAssign)) and inner.value is not None and hangs(inner.value, found) and is_words(inner, found.plain):
            for name in sorted(_targets(inner)):
                found.again.append(f"{node.name}.{name} = {ast.unparse(inner.value)}")
                found.defaults.append((f"{node.name}.__init__", name, f"{node.name}.{name}"))  # of a dataclass
                attributes[name] = f"{node.name}.{name}"
        elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name) and (made := _made_by(inner.value, found)) is not None:
            attributes[inner.target.id] = ast.unparse(made)
        elif isinstance(inner, ast.FunctionDef):
            _default_words(inner, f"{node.name}.{inner.name}", found)
            if inner.name == "__init__":
                own = {one.arg for one in ast.walk(inner.args) if isinstance(one, ast.arg)}
                for statement in inner.body:
                    if isinstance(statement, ast.Assign) and hangs(statement.value, found) and is_words(statement, found.plain) and not own & _names(statement.value):
                        attributes |= {one.attr: ast.unparse(statement.value) for one in statement.targets if isinstance(one, ast.Attribute)}
    if attributes:
        found.classes[node.name] = attributes
    elif any(_asks(one, found) for one in node.body if not isinstance(one, ast.FunctionDef) or one.name in ("__init__", "__post_init__", "__new__")):
        found.asking.add(node.name)


def _made_by(value: ast.expr | None, found: Earlier) -> ast.expr | None:
    """What ``field(default_factory=lambda: …)`` gives, where that hangs on the answer and is words."""
    for word in value.keywords if isinstance(value, ast.Call) else ():
        if word.arg == "default_factory" and isinstance(word.value, ast.Lambda) and hangs(word.value, found) and words_of(word.value.body, found.plain):
            return word.value.body
    return None


def _has_fields(value: ast.expr, found: Earlier) -> bool:
    """``Config()``, of a class whose objects have what hangs on the answer, and none of that is given."""
    name = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    return name in found.classes and not value.args and not {word.arg for word in value.keywords} & {None, *found.classes[name]}  # type: ignore[attr-defined]


def _default_words(node: ast.FunctionDef | ast.AsyncFunctionDef, name: str, found: Earlier) -> None:
    """``def step(batch, device=device)``: the default again."""
    arguments = [*node.args.posonlyargs, *node.args.args]
    given = [*zip(arguments[len(arguments) - len(node.args.defaults) :], node.args.defaults, strict=True), *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    for argument, default in given:
        if default is not None and hangs(default, found) and is_words(ast.Assign([], default), found.plain):
            found.defaults.append((name, argument.arg, ast.unparse(default)))


def _import(node: ast.Import | ast.ImportFrom, found: Earlier) -> None:
    """Names from a module that decided when it was imported."""
    if isinstance(node, ast.Import):
        found.imports |= {one.asname or one.name.partition(".")[0] for one in node.names}
        for one in node.names:
            known = found.modules.get(one.name)
            if known is not None:
                found.hanging |= {f"{one.asname or one.name}.{name}" for name in known.hanging | known.placed}
                for mine, theirs in ((found.plain, known.plain), (found.asking, known.asking)):
                    mine |= {f"{one.asname or one.name}.{name}" for name in theirs}
                found.classes |= {f"{one.asname or one.name}.{name}": _of_module(attributes, one.name) for name, attributes in known.classes.items()}
        return
    known = found.modules.get(node.module or "")
    for one in node.names if known is not None and not node.level else ():
        name = one.asname or one.name
        found.asked |= {name} if one.name in known.asked else set()  # type: ignore[union-attr]
        if one.name in known.placed:  # type: ignore[union-attr]
            found.placed.add(name)
            found.hanging.add(name)
        elif one.name in known.hanging:  # type: ignore[union-attr]
            found.again.append(ast.unparse(ast.ImportFrom(node.module, [one], 0)))
            found.hanging.add(name)
            for mine, theirs in ((found.plain, known.plain), (found.asking, known.asking)):  # type: ignore[union-attr]
                mine |= {name} if one.name in theirs else set()
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
        if len(bound) == 1 and hangs(bound[0].value, found) and is_words(bound[0], found.plain) and not own & _names(bound[0].value):
            return ast.unparse(bound[0].value)
    return None


def hangs(node: ast.AST, found: Earlier) -> bool:
    """Whether a piece of code asks for the device, or uses a name that hangs on the answer."""
    return any(
        (isinstance(one, ast.Attribute) and ((one.attr in ASKED and _base(one) != "os") or (isinstance(one.value, ast.Name) and f"{one.value.id}.{one.attr}" in found.hanging)))
        or (isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load) and one.id in found.hanging)
        for one in ast.walk(node)
    )


def _asks(node: ast.AST, found: Earlier) -> bool:
    """Whether a piece of code asks for a GPU itself, or calls a function that does."""
    return any(
        (isinstance(one, ast.Attribute) and one.attr in ASKED and _base(one) != "os") or (isinstance(one, (ast.Name, ast.Attribute)) and isinstance(one.ctx, ast.Load) and ast.unparse(one) in found.asking)
        for one in ast.walk(node)
    )


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


def _names_bound(node: ast.AST) -> set[str]:
    """Names that a statement binds themselves, not a part of what they name."""
    parts: list[ast.AST] = list(node.targets) if isinstance(node, ast.Assign) else [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For)) else []
    if isinstance(node, ast.With):
        parts = [item.optional_vars for item in node.items if item.optional_vars is not None]
    return {one.id for part in parts for one in ast.walk(part) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}


def _base(node: ast.AST) -> str | None:
    """``model`` of ``model.encoder.to``."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _last(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
