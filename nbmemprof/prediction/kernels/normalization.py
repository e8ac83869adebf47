"""Normalisations: statistics and partial sums that their kernels keep for a moment."""

from __future__ import annotations

from typing import Any

__all__ = ["install"]


def install(torch: Any, rules: Any) -> None:
    """Follow them."""
    aten = torch.ops.aten
    rules.after[aten.native_group_norm.default] = _group_norm
    rules.after[aten.native_group_norm_backward.default] = _group_norm_backward


def _group_norm(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """A scale and a shift for each sample and channel."""
    batch, channels = int(args[3]), int(args[4])
    first = recorder.begin(4 * batch * channels, func._schema.name, "workspace", "operator")
    recorder.temporary(4 * batch * channels, func._schema.name)
    recorder.end(first)


def _group_norm_backward(recorder: Any, func: Any, args: Any, _kwargs: Any, _out: Any) -> None:
    """Sums over each sample and channel, and over each group."""
    op = func._schema.name
    batch, channels, groups = int(args[5]), int(args[6]), int(args[8])
    sizes = [4 * batch * channels, 4 * batch * channels, 4 * batch * groups, 4 * batch * groups, 4 * batch * channels]
    held = [recorder.begin(size, op, "workspace", "operator") for size in sizes]
    for index in (held[2], held[3], held[4], held[1], held[0]):
        recorder.end(index)
