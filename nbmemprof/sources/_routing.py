"""Which expert of a mixture gets how many tokens, read off the calls of its modules.

Experts that are modules of their own (``experts.3``) are called with their tokens: the shape tells, and costs nothing. Where all of a layer's
experts are one module, its activation function is called once for each of them, or once for all; then only the router's choice tells,
which lies on the device: it is read where the user asks for it (``--experts``), and reading waits for the device.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

__all__ = ["Call", "choice", "kind_of"]

_OWN = re.compile(r"\.(?:experts|expert)\.(\d+)$")
_WHOLE = re.compile(r"\.experts$")
_INNER = re.compile(r"\.experts\.(?:act_fn|act|activation|activation_fn)$")


class Call(NamedTuple):
    """One call: record and clock, layer of the mixture, expert (-1: all together, -2: the next in order), its tokens, how many experts there are (0: not told)."""

    record: int
    clock: int
    group: int
    layer: str
    expert: int
    tokens: int
    experts: int


def kind_of(path: str | None) -> tuple[str, str, int] | None:
    """What a module path is to a mixture: ``("own", layer, expert)``, ``("whole", layer, -1)``, ``("inner", layer, -2)``, or None."""
    if path is None:
        return None
    if found := _OWN.search(path):
        return "own", path[: found.start(1) - 1], int(found[1])
    if _WHOLE.search(path):
        return "whole", path, -1
    if _INNER.search(path):
        return "inner", path[: path.rindex(".")], -2
    return None


def choice(module: Any, args: tuple[Any, ...]) -> list[int] | None:
    """Tokens of each expert as the router chose, from the arguments of a module that is all of them; waits for the device."""
    count = next((n for name in ("num_experts", "num_local_experts", "n_experts") if isinstance(n := getattr(module, name, None), int)), 0)
    for value in args[1:3]:
        if count and getattr(value, "ndim", 0) == 2 and "int" in str(getattr(value, "dtype", "")):
            chosen = value.detach().cpu().numpy().reshape(-1)  # NumPy counts: torch would allocate
            counts = [0] * count
            for expert in chosen.tolist():
                if 0 <= expert < count:
                    counts[expert] += 1
            return counts
    return None
