"""Code that only puts words together: it can run again, and does nothing else."""

from __future__ import annotations

import ast
from collections.abc import Set as AbstractSet

__all__ = ["ASKED", "is_plain", "is_words", "words_of"]

# torch's questions whose answer is another on a GPU
ASKED = {"is_available", "device_count", "is_built", "is_bf16_supported", "get_device_capability", "get_device_properties", "current_accelerator"}
# calls that may be made again
_WORDS = ASKED | {"device", "str", "bool", "int", "float", "getenv", "get", "current_device", "current_device_index", "get_device_name", "mem_get_info", "dict", "list", "tuple", "set",
                  "Namespace", "SimpleNamespace", "range", "len", "min", "max", "any", "all", "sorted", "round", "getattr", "hasattr", "startswith", "lower", "upper", "format"}  # fmt: skip
_NOT = (ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)
_SAYING = {"print", "warn", "info", "debug", "warning"}


def words_of(value: ast.AST, plain: AbstractSet[str]) -> bool:
    """Whether an expression only puts words together; ``plain``: functions that do."""
    # data[device] and model.weight may be tensors, but reading them again is harmless
    return not any(isinstance(one, _NOT) or (isinstance(one, ast.Call) and _last(one.func) not in _WORDS and ast.unparse(one.func) not in plain) for one in ast.walk(value))


def is_words(node: ast.stmt, plain: AbstractSet[str]) -> bool:
    """Whether a statement binds words, or nothing."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or node.value is None:
        return isinstance(node, ast.Pass)
    return words_of(node.value, plain)


def is_plain(node: ast.FunctionDef | ast.AsyncFunctionDef, plain: AbstractSet[str]) -> bool:
    """Whether a function only puts words together, and may say so."""
    return isinstance(node, ast.FunctionDef) and not node.decorator_list and all(_inside(one, plain) for one in node.body)


def _inside(node: ast.stmt, plain: AbstractSet[str]) -> bool:
    if isinstance(node, (ast.Pass, ast.Import, ast.ImportFrom, ast.Raise)):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or (isinstance(node.value, ast.Call) and _last(node.value.func) in _SAYING)
    if isinstance(node, ast.Return):
        return node.value is None or words_of(node.value, plain)
    if isinstance(node, (ast.If, ast.Try)):
        parts = [*node.body, *node.orelse, *getattr(node, "finalbody", []), *(one for handler in getattr(node, "handlers", []) for one in handler.body)]
        return (isinstance(node, ast.Try) or words_of(node.test, plain)) and all(_inside(one, plain) for one in parts)
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return all(not isinstance(one, (ast.Attribute, ast.Subscript)) for target in targets for one in ast.walk(target)) and words_of(node.value, plain)
    return False


def _last(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None
