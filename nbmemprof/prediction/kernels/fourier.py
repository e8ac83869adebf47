"""Fourier transforms: cuFFT's workspaces and torch's own copies.

Source of the copies: aten/src/ATen/native/cuda/SpectralOps.cpp; of the workspaces: 230 transforms on an H200 (cuFFT of CUDA 13.0). Exact for
lengths of small prime factors, only bounded for others.
"""

from __future__ import annotations

from typing import Any

__all__ = ["install", "workspace"]

_LONG = 8192  # a real transform of a power of two up to this length, and a complex one of twice, is one kernel
_PLANE = 128  # up to this a row of a transform of several dimensions needs none
_SMOOTH = 127  # with a larger prime factor cuFFT convolves (Bluestein)


def install(torch: Any, rules: Any) -> None:
    """Follow the three of them."""
    aten = torch.ops.aten
    rules.emit[aten._fft_r2c.default] = _real
    rules.emit[aten._fft_c2r.default] = _back
    rules.emit[aten._fft_c2c.default] = _complex


def _factors(n: int) -> list[int]:
    found, p = [], 2
    while n > 1 and p * p <= n:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return [*found, n] if n > 1 else found


def workspace(lengths: tuple[int, ...], real: bool, real_bytes: int, complex_bytes: int) -> tuple[int, int, int]:
    """Bytes of one call: low, guess, high.

    Parameters
    ----------
    lengths
        Of the transform, the last one first.
    real
        Whether one side is real.
    real_bytes, complex_bytes
        Of that side, and of the complex one.
    """
    primes = [_factors(n) for n in lengths]
    worst = max((f for found in primes for f in found), default=1)
    last = lengths[0]
    if worst > _SMOOTH and len(lengths) == 1 and not (real and last % 2):
        return 0, 5 * complex_bytes if last > 6000 else 2 * real_bytes, 6 * complex_bytes
    if len(lengths) > 1:
        guess = real_bytes if real and last > _PLANE and last & (last - 1) else 0
        return 0, guess, complex_bytes
    if not real:
        guess = complex_bytes if last > 2 * _LONG else 0
        return (guess, guess, guess) if last & (last - 1) == 0 else (0, guess, 2 * complex_bytes)
    if last % 2:
        return 0, 2 * real_bytes, 2 * real_bytes + 1024
    if last & (last - 1) == 0:
        guess = 0 if last <= _LONG else real_bytes if last < 1 << 16 else complex_bytes
        return guess, guess, guess
    guess = real_bytes if worst == 3 or worst > 5 or last > _LONG else 0
    return 0, guess, complex_bytes


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _dims(tensor: Any, dim: Any) -> tuple[int, ...]:
    return tuple(d % tensor.dim() for d in reversed(list(dim)))


def _used(recorder: Any) -> None:
    recorder.record.used.add("fft")


def _real(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Real to complex; in two steps where only half is asked for of several dimensions."""
    source, op = args[0], func._schema.name
    recorder.note(func, out)
    if out.device.type != "cuda":
        return
    _used(recorder)
    lengths = tuple(source.shape[d] for d in _dims(source, args[1]))
    recorder.ranged(*_guess_first(workspace(lengths, True, _size(source), _size(out))), op)


def _back(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    """Complex to real writes over its input, so that this is copied."""
    source, op = args[0], func._schema.name
    recorder.note(func, out)
    if out.device.type != "cuda":
        return
    _used(recorder)
    copy = recorder.begin(_size(source), op, "temporary", "operator")
    lengths = tuple(out.shape[d] for d in _dims(out, args[1]))
    recorder.ranged(*_guess_first(workspace(lengths, True, _size(out), _size(source))), op)
    recorder.end(copy)


def _complex(recorder: Any, func: Any, args: Any, _kwargs: Any, out: Any) -> None:
    source, op = args[0], func._schema.name
    recorder.note(func, out)
    if out.device.type != "cuda" or not args[1]:
        return
    _used(recorder)
    lengths = tuple(source.shape[d] for d in _dims(source, args[1]))
    recorder.ranged(*_guess_first(workspace(lengths, False, _size(source), _size(source))), op)


def _guess_first(bounds: tuple[int, int, int]) -> tuple[int, int, int]:
    low, guess, high = bounds
    return guess, low, max(guess, high)
