"""KV caches of a forward: which objects are caches, what tensors they hold, how many sequences, tokens and layers, and how much room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import polars as pl

__all__ = ["Shape", "caches_of", "is_cache", "padding", "shapes", "table", "tensors"]

_PLAIN = (str, bytes, int, float, bool, type(None))
_DEPTH = 4  # a cache, its list of layers, a layer, a list in it
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


def is_cache(kind: type) -> bool:
    """Whether a class is a KV cache of transformers, or of its kind."""
    return any(c.__module__ == "transformers.cache_utils" and c.__name__.endswith("Cache") for c in kind.__mro__)


def caches_of(values: Iterable[Any]) -> list[Any]:
    """KV caches among arguments and results of a forward: transformers' classes, and the tuples of old that go by the name."""
    found = []
    for value in values:
        held = value if is_cache(type(value)) else None
        if held is None and not isinstance(value, _PLAIN):
            held = value.get("past_key_values") if isinstance(value, dict) else getattr(value, "__dict__", {}).get("past_key_values")
        if held is not None:
            found.append(held)
    return found


def tensors(cache: Any, torch: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """What a cache is made of: itself, items of containers, attributes of its layers."""
    if isinstance(cache, torch.Tensor):
        yield cache
    elif depth and not isinstance(cache, (*_PLAIN, type)):
        items = cache.values() if isinstance(cache, dict) else cache if isinstance(cache, (list, tuple)) else getattr(cache, "__dict__", {}).values()
        for one in list(items):
            yield from tensors(one, torch, depth - 1)


def table(seen: Sequence[tuple[Shape, int | None]], seq: Any) -> pl.DataFrame:
    """The table ``caches``: what each held, and before which event.

    ``seq cache_id cache sequences tokens room_tokens layers size_bytes token_bytes element_bytes padding_tokens``; null ``tokens``: not told while the device
    was at work; null ``padding_tokens``: no mask was seen.
    """
    rows = [(one.key, one.name, one.sequences, one.tokens if one.tokens >= 0 else None, one.room, one.layers, one.size, one.token_bytes, one.element_bytes, padded) for one, padded in seen]
    names = ("cache_id", "cache", "sequences", "tokens", "room_tokens", "layers", "size_bytes", "token_bytes", "element_bytes", "padding_tokens")
    made = pl.DataFrame(rows, schema={name: pl.String if name == "cache" else pl.Int64 for name in names}, orient="row")
    return made.with_columns(pl.Series("seq", seq, dtype=pl.Int64)).select("seq", *names)


def shapes(cache: Any, *, wait: bool = False, read: Callable[[Any], int | None] = int) -> Iterator[Shape]:
    """Shapes of a cache of transformers, or of the tuples of keys and values of old.

    Parameters
    ----------
    wait
        Whether a length that is kept on the device may be read; that waits for it.
    read
        How such a length is read; None: it is not known.
    """
    parts = [getattr(cache, name, None) for name in ("self_attention_cache", "cross_attention_cache")]
    if any(part is not None for part in parts):  # an encoder and a decoder
        for part in parts:
            if part is not None:
                yield from shapes(part, wait=wait, read=read)
        return
    pairs = list(_pairs(cache))
    if not pairs:
        return
    rows = []
    for keys, values, layer in pairs:
        size = sum(t.numel() * t.element_size() for t in (keys, values))
        room = int(keys.shape[-2])
        rows.append((size, room, _used(layer, room, wait=wait, read=read), int(keys.shape[0])))
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


def _used(layer: Any, room: int, *, wait: bool, read: Callable[[Any], int | None]) -> int:
    length = getattr(layer, "cumulative_length_int", None)
    if length is None:
        length = getattr(layer, "cumulative_length", None)
    if length is None:
        return room  # it has grown to what it holds
    if isinstance(length, int):
        return min(length, room)
    told = read(length) if wait or getattr(length, "device", None) is None or length.device.type == "cpu" else None
    return -1 if told is None else min(told, room)


def padding(mask: Any) -> int | None:
    """Tokens that an attention mask leaves out; None where it is not a mask of (sequences, tokens)."""
    if getattr(mask, "ndim", 0) != 2 or not 0 < mask.numel() <= _MASK_MOST:
        return None
    return int((mask.detach().cpu().numpy() == 0).sum())  # NumPy counts: torch would allocate
