"""In the child: a statement runs again as on a GPU; objects that others hold stay the same objects. And what was not made again."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from nbmemprof.prediction.earlier import Earlier, hangs

__all__ = ["UNDECIDED", "again", "undecided"]

UNDECIDED = "not decided again:"


def again(statement: str, namespace: dict[str, Any], earlier: Earlier) -> None:
    """Run a statement; a dict, list or namespace that it spells out keeps what code put into it since, but for what hangs on the answer."""
    node = ast.parse(statement).body[0]
    name = node.targets[0].id if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name) else None
    old = namespace.get(name) if name is not None and name not in earlier.stays else None
    exec(statement, namespace)  # noqa: S102 - the user's own statement, again
    if old is not None and isinstance(node, ast.Assign) and name is not None and type(old) is type(namespace[name]) and _put(old, namespace[name], node.value, earlier):
        namespace[name] = old


def _put(old: Any, new: Any, value: ast.expr, earlier: Earlier) -> bool:
    """Put into an object what hangs on the answer in the expression that made it; whether that can be told."""
    if isinstance(value, ast.List) and isinstance(old, list):
        for index, one in enumerate(value.elts[: len(old)]):
            if not isinstance(one, ast.Starred) and hangs(one, earlier):
                old[index] = new[index]
        return not any(isinstance(one, ast.Starred) for one in value.elts)
    if isinstance(value, ast.Dict):
        given = [(key.value if isinstance(key, ast.Constant) else None, one) for key, one in zip(value.keys, value.values, strict=True)]
    elif isinstance(value, ast.Call) and not value.args:
        given = [(word.arg, word.value) for word in value.keywords]
    else:
        return False
    holder, made = (old, new) if isinstance(old, dict) else (getattr(old, "__dict__", None), getattr(new, "__dict__", {}))
    if holder is None or any(key is None for key, _ in given):
        return False
    holder.update({key: made[key] for key, one in given if hangs(one, earlier) and key in made})
    return True


def undecided(torch: Any, namespace: dict[str, Any], earlier: Earlier, names: set[str], told: set[str], place: Callable[[int, int], str]) -> list[str]:
    """Names that code uses and that are as they were without a GPU, with where they were bound.

    Parameters
    ----------
    names
        Those that the code uses.
    told
        Those that were moved, or could not be.
    place
        How the text of this number and its line are called.
    """
    found = []
    tensors = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
    for name in sorted((earlier.asked | earlier.hanging) & names - earlier.remade):
        value = namespace.get(name)
        if value is None and name not in earlier.asked:
            continue
        if isinstance(value, (FunctionType, ModuleType, type)) or name not in namespace:
            continue
        where = place(*earlier.lines[name]) if name in earlier.lines else ""
        said = [name] if name in earlier.asked and not isinstance(value, tensors) and not (name in told and type(value).__module__ == "builtins") else _of_cpu(torch, name, value)
        found += [f"{one} ({where})" if where else one for one in said]
    used = [namespace[name] for name in names if name in namespace]
    for module, inner in earlier.modules.items():
        if any(one is sys.modules.get(module) or (isinstance(one, (FunctionType, type)) and one.__module__ == module) for one in used):
            found += [f"{module}.{name}" for name in sorted(inner.asked & names) if not isinstance(vars(sys.modules[module]).get(name), (*tensors, FunctionType, type))]
    return found


def _of_cpu(torch: Any, name: str, value: Any) -> list[str]:
    """Attributes of an object that say ``cpu``."""
    held = getattr(value, "__dict__", None)
    if not isinstance(held, dict) or isinstance(value, torch.Tensor):
        return []
    return [f"{name}.{key}" for key, one in held.items() if isinstance(one, (str, torch.device)) and str(one) == "cpu"]
