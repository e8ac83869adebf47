"""Operators without a kernel for fakes: run once on the CPU with zeros to learn what they return, and said so.

Torch itself would run them on the device with zeros, which is not there. What such an operator needs beside its outputs is not known here.
"""

from __future__ import annotations

from typing import Any

from nbmemprof.errors import NbmemprofError

__all__ = ["CantPredict", "install"]

LIMIT = 64 << 20  # elements of all inputs: more would take real memory and time
NOTE = "no rule for {}: its outputs were counted, what its kernel needs beside is not known"


class CantPredict(NbmemprofError):
    """Code does what a fake run can't do."""


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
    changes.put(torch, "istft", _istft(torch, torch.istft))
    _ragged(torch, changes)


def _ragged(torch: Any, changes: Any) -> None:
    """Jagged tensors hold offsets that a fake can't count with: refused before anything is made."""

    def refusing(plain: Any, always: bool) -> Any:
        def make(*args: Any, **kwargs: Any) -> Any:
            if always or kwargs.get("layout") is torch.jagged:
                raise CantPredict("Nested tensors in the jagged layout can't be predicted: a fake one has no offsets. Predict the step with a padded tensor and a mask, of the longest length, in their place.")
            return plain(*args, **kwargs)

        return make

    for name, always in (("nested_tensor", False), ("as_nested_tensor", False), ("narrow", False), ("nested_tensor_from_jagged", True)):
        if hasattr(torch.nested, name):
            changes.put(torch.nested, name, refusing(getattr(torch.nested, name), always))


def _istft(torch: Any, plain: Any) -> Any:
    """In Python what C++ looks into memory for: whether the windows cover everything (aten/src/ATen/native/SpectralOps.cpp)."""
    fake, aten = torch._subclasses.fake_tensor.FakeTensor, torch.ops.aten

    def istft(
        source: Any, n_fft: int, hop_length: Any = None, win_length: Any = None, window: Any = None, center: bool = True, normalized: bool = False, onesided: Any = None, length: Any = None, return_complex: bool = False
    ) -> Any:
        if not isinstance(source, fake):
            return plain(source, n_fft, hop_length, win_length, window, center, normalized, onesided, length, return_complex)
        hop, width = hop_length or n_fft // 4, win_length or n_fft
        single = source.dim() == 2
        source = (source[None] if single else source).transpose(1, 2)
        frames = source.shape[1]
        whole = n_fft + hop * (frames - 1)
        shape = torch.ones(width, device=source.device) if window is None else window
        if width != n_fft:
            left = (n_fft - width) // 2
            shape = torch.nn.functional.pad(shape, (left, n_fft - width - left))
        both = onesided is False or (onesided is None and return_complex)
        pieces = torch.fft.ifft(source, dim=-1) if both else torch.fft.irfft(source, n=n_fft, dim=-1)
        pieces = pieces * shape.view(1, 1, n_fft)
        made = aten.unfold_backward(pieces, [pieces.shape[0], whole], 1, n_fft, hop)
        cover = aten.unfold_backward(shape.pow(2).expand(1, frames, n_fft), [1, whole], 1, n_fft, hop)
        start = n_fft // 2 if center else 0
        end = start + length if length is not None else whole - (n_fft // 2 if center else 0)
        made = made[:, start : min(end, whole)] / cover[:, start : min(end, whole)]
        if end > whole:
            made = torch.nn.functional.pad(made, (0, end - whole))
        return made[0] if single else made

    return istft
