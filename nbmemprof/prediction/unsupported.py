"""Operators without a kernel for fakes: run once on the CPU with zeros to learn what they return, and said so.

Torch itself would run them on the device with zeros, which is not there. What such an operator needs beside its outputs is not known here.
"""

from __future__ import annotations

from typing import Any

__all__ = ["install"]

LIMIT = 64 << 20  # elements of all inputs: more would take real memory and time
NOTE = "no rule for {}: its outputs were counted, what its kernel needs beside is not known"


def install(torch: Any, changes: Any, record: Any) -> None:
    """Put our way in the place of torch's."""
    from torch._subclasses import fake_tensor

    tree = torch.utils._pytree

    def run(mode: Any, func: Any, flat: Any, spec: Any, error: BaseException) -> Any:
        given = [value for value in flat if mode.is_our_fake(value)]
        if torch.Tag.inplace_view in func.tags or any(value.is_sparse for value in given) or sum(value.numel() for value in given) > LIMIT:
            raise error
        device = next((value.fake_device for value in given if value.fake_device.type != "cpu"), torch.device("cpu"))
        inside: dict[int, Any] = {}

        def real(value: Any) -> Any:
            if mode.is_our_fake(value):
                made = torch.zeros(tuple(value.shape), dtype=value.dtype)
                inside[id(made)] = value
                return made
            return torch.device("cpu") if isinstance(value, torch.device) else value

        def fake(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) in inside:
                return inside[id(value)]
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

        try:
            with fake_tensor.no_dispatch(), torch.utils._python_dispatch._disable_current_modes():
                args, kwargs = tree.tree_unflatten([real(value) for value in flat], spec)
                out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, IndexError, ValueError):
            raise error from None
        if device.type != "cpu":
            record.assume(NOTE.format(func.name()))
        with mode:
            return tree.tree_map(fake, out)

    changes.put(fake_tensor, "run_fallback_kernel", run)
