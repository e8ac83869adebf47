"""What each kernel of ``kernels/`` computes, in array code: NumPy's on the host, CuPy's on the device.

A twin takes the arrays' module (``xp``), the kernel's own arguments in their order, and changes the same arrays. A probe runs kernel and
twin and compares the results bit by bit; a kernel that keeps a sum a thread has a twin that keeps one sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["TWINS", "same", "total"]

TWINS: dict[tuple[str, str], Callable[..., None]] = {}


def _twin(file: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def keep(function: Callable[..., None]) -> Callable[..., None]:
        TWINS[file, function.__name__] = function
        return function

    return keep


def total(xp: Any, array: Any) -> int:
    """Sum of words modulo 2^32."""
    return int(xp.sum(array.view(xp.uint32), dtype=xp.uint64)) & 0xFFFFFFFF


def same(xp: Any, one: Any, other: Any) -> bool:
    """Whether two arrays have the same bits."""
    return bool(xp.all(one.view(xp.uint32) == other.view(xp.uint32)))


def _keep(xp: Any, sums: Any, words: Any) -> None:
    sums[:] = 0
    sums[0] = total(xp, words)


# ---------------------------------------------------------------------- bandwidth.cu
@_twin("bandwidth")
def read(xp: Any, source: Any, sums: Any, n: Any, needle: Any, keep: Any) -> None:
    """Sum of all words."""
    _keep(xp, sums, source)


@_twin("bandwidth")
def write(xp: Any, out: Any, n: Any, seed: Any) -> None:
    """Each word is its place times 2654435761 plus the seed, modulo 2^32."""
    words = out.view(xp.uint32)
    words[:] = xp.arange(words.size, dtype=xp.uint32)
    words *= xp.uint32(2654435761)
    words += xp.uint32(seed)


@_twin("bandwidth")
def copy(xp: Any, source: Any, out: Any, n: Any) -> None:
    """Copy."""
    out[:] = source


@_twin("bandwidth")
def scale(xp: Any, source: Any, out: Any, n: Any, s: Any) -> None:
    """Product with s."""
    xp.multiply(source, xp.float32(s), out=out)


@_twin("bandwidth")
def add(xp: Any, a: Any, b: Any, out: Any, n: Any) -> None:
    """Sum."""
    xp.add(a, b, out=out)


@_twin("bandwidth")
def triad(xp: Any, a: Any, b: Any, out: Any, n: Any, s: Any) -> None:
    """Sum of a and s · b, the product rounded first."""
    xp.multiply(b, xp.float32(s), out=out)
    out += a


# ---------------------------------------------------------------------- coalescing.cu
@_twin("coalescing")
def strided(xp: Any, source: Any, sums: Any, n: Any, stride: Any, offset: Any, needle: Any, keep: Any) -> None:
    """Sum of every stride-th word from the offset on."""
    first, step = int(offset), int(stride)
    _keep(xp, sums, xp.ascontiguousarray(source[first : first + (int(n) - 1) * step + 1 : step]))


@_twin("coalescing")
def structures(xp: Any, source: Any, sums: Any, n: Any, fields: Any, per_structure: Any, per_field: Any, needle: Any, keep: Any) -> None:
    """Sum of the fields of all structures."""
    places = xp.arange(int(n), dtype=xp.int64) * int(per_structure)
    whole = 0
    for field in range(int(fields)):
        whole += total(xp, source[places + field * int(per_field)])
    sums[:] = 0
    sums[0] = whole & 0xFFFFFFFF


@_twin("coalescing")
def structures_wide(xp: Any, source: Any, sums: Any, n: Any, needle: Any, keep: Any) -> None:
    """Sum of structures of four words."""
    _keep(xp, sums, source[: 4 * int(n)])


@_twin("coalescing")
def gather(xp: Any, source: Any, places: Any, sums: Any, n: Any, needle: Any, keep: Any) -> None:
    """Sum of the words at the places."""
    _keep(xp, sums, source[places[: int(n)]])


# ---------------------------------------------------------------------- shared memory
@_twin("bank_conflicts")
def shared_loads(xp: Any, places: Any, fill: Any, nbytes: Any, repeats: Any, step: Any, cycles: Any, sums: Any, **macros: int) -> None:
    """Each thread's sum of the words at its lane's place, as often as they are loaded."""
    each = xp.zeros(32, xp.uint32)
    for word in range(macros.get("WIDTH", 4) // 4):
        each += fill[places // 4 + word]
    each *= xp.uint32(repeats)
    sums.reshape(-1, 32)[:] = each


def _transpose(xp: Any, source: Any, out: Any, n: Any) -> None:
    side = int(n)
    out.reshape(side, side)[:] = source.reshape(side, side).T


for _name in ("naive", "tiled", "padded", "swizzled"):
    TWINS["transpose", f"transpose_{_name}"] = _transpose


def _reduce(xp: Any, source: Any, sums: Any, rounds: Any) -> None:
    parts = source.reshape(int(rounds), sums.size, -1)
    sums[:] = (xp.sum(parts, axis=(0, 2), dtype=xp.uint64) & xp.uint64(0xFFFFFFFF)).astype(xp.uint32)


for _name in ("strided", "halves"):
    TWINS["reduction", f"reduce_{_name}"] = _reduce


# ---------------------------------------------------------------------- latency.cu, working_set.cu, touch.cu
@_twin("latency")
def chase(xp: Any, following: Any, start: Any, warm: Any, hops: Any, out: Any) -> None:
    """Where the chase ends; how long it takes only hardware knows."""
    at = int(start)
    for _ in range(int(warm) + int(hops)):
        at = int(following[at])
    out[2] = at


@_twin("latency")
def line_latency(xp: Any, following: Any, lines: Any, count: Any, hops: Any, out: Any) -> None:
    """-1 where a line does not point to itself."""
    astray = following[lines] != lines
    out[: int(count)] = xp.where(astray, -1, xp.maximum(out[: int(count)], 0))


@_twin("working_set")
def reread(xp: Any, source: Any, sums: Any, n: Any, rounds: Any) -> None:
    """Sum of all words, as often as they are read."""
    sums[:] = 0
    sums[0] = total(xp, source[: 4 * int(n)]) * int(rounds) & 0xFFFFFFFF


@_twin("touch")
def touch(xp: Any, data: Any, n: Any, more: Any) -> None:
    """Add to every word."""
    data[: int(n)] += xp.uint32(more)
