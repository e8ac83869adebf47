"""Shapes of KV caches: how many sequences, tokens and layers one holds, and how much room it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

__all__ = ["Shape", "padding", "shapes"]

_MASK_MOST = 64 << 20  # elements of a mask that are looked at


class Shape(NamedTuple):
    """One cache at one moment.

    Attributes
    ----------
    key
        Tells caches apart: ``id`` of the object.
    sequences, tokens, room, layers
        Sequences held; tokens of each in use (-1: not told without waiting for the device) and allocated; layers.
    size, token_bytes
        Bytes of its tensors, and of one token of one sequence in the layers that grow.
    element_bytes
        Of one number in it.
    """

    key: int
    name: str
    sequences: int
    tokens: int
    room: int
    layers: int
    size: int
    token_bytes: int
    element_bytes: int


def shapes(cache: Any, *, wait: bool = False) -> Iterator[Shape]:
    """Shapes of a cache of transformers, or of the tuples of keys and values of old.

    Parameters
    ----------
    wait
        Whether a length that is kept on the device may be read; that waits for it.
    """
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    if any(part is not None for part in parts):  # an encoder and a decoder
        for part in parts:
            if part is not None:
                yield from shapes(part, wait=wait)
        return
    pairs = list(_pairs(cache))
    if not pairs:
        return
    rows = []
    for keys, values, layer in pairs:
        size = sum(t.numel() * t.element_size() for t in (keys, values))
        room = int(keys.shape[-2])
        rows.append((size, room, _used(layer, room, wait=wait), int(keys.shape[0])))
    room, sequences = max(r[1] for r in rows), max(r[3] for r in rows)
    tokens = -1 if any(r[2] < 0 for r in rows) else max(r[2] for r in rows)
    grows = [size // max(sequences * length, 1) for size, length, _, _ in rows if length == room]  # layers with a window hold less and grow no more
    yield Shape(id(cache), type(cache).__name__, sequences, tokens, room, len(rows), sum(r[0] for r in rows), sum(grows), pairs[0][0].element_size())


def _pairs(cache: Any) -> Iterator[tuple[Any, Any, Any]]:
    layers: Iterable[Any] = getattr(cache, "layers", None) or ()
    found: list[tuple[Any, Any, Any]] = [(getattr(layer, "keys", None), getattr(layer, "values", None), layer) for layer in layers]
    if not found and isinstance(cache, (tuple, list)):
        found = [(pair[0], pair[1], None) for pair in cache if isinstance(pair, (tuple, list)) and len(pair) >= 2]
    if not found and isinstance(getattr(cache, "key_cache", None), list):  # transformers before 4.54
        found = [(k, v, None) for k, v in zip(cache.key_cache, cache.value_cache, strict=False)]
    for keys, values, layer in found:
        if getattr(keys, "ndim", 0) == 4 and getattr(values, "ndim", 0) == 4 and keys.numel():
            yield keys, values, layer


def _used(layer: Any, room: int, *, wait: bool) -> int:
    length = getattr(layer, "cumulative_length_int", None)
    if length is None:
        length = getattr(layer, "cumulative_length", None)
    if length is None:
        return room  # it has grown to what it holds
    if isinstance(length, int):
        return min(length, room)
    return min(int(length), room) if wait or getattr(length, "device", None) is None or length.device.type == "cpu" else -1


def padding(mask: Any) -> int | None:
    """Tokens that an attention mask leaves out; None where it is not a mask of (sequences, tokens)."""
    if getattr(mask, "ndim", 0) != 2 or not 0 < mask.numel() <= _MASK_MOST:
        return None
    return int((mask.detach().cpu().numpy() == 0).sum())  # NumPy counts: torch would allocate
