"""Operators that torch does out of place for fakes only, because it takes them for a tensor subclass."""

from __future__ import annotations

from typing import Any

__all__ = ["install"]


def install(torch: Any, rules: Any) -> None:
    """Do in place what the device does in place."""
    aten = torch.ops.aten
    for plain, inplace in (
        (aten.index_add.default, aten.index_add_.default), (aten.scatter_add.default, aten.scatter_add_.default), (aten.scatter.src, aten.scatter_.src),
        (aten.index_put.default, aten.index_put_.default), (aten.scatter.value, aten.scatter_.value), (aten.masked_scatter.default, aten.masked_scatter_.default),
    ):  # fmt: skip
        rules.before[plain] = _InPlace(inplace)


class _InPlace:
    """Call the in-place operator where a node of the graph asks for the other on zeros it made itself."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, recorder: Any, _func: Any, args: Any, kwargs: Any) -> Any:
        if not recorder.where.in_backward or recorder.made_in_this_node(args[0]) is False:
            return NotImplemented
        with recorder:
            return self.op(*args, **kwargs)
