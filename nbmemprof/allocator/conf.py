"""``PYTORCH_CUDA_ALLOC_CONF``, read as torch reads it, errors included.

Rules: ``c10/core/AllocatorConfig.cpp`` and ``c10/cuda/CUDAAllocatorConfig.cpp`` (2.9 on), ``c10/cuda/CUDAAllocatorConfig.cpp`` (up to 2.8).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from nbmemprof.allocator.rounding import BUCKETS, LARGE_BUFFER, MIN_LARGE_ALLOC
from nbmemprof.allocator.versions import Rules, rules_of
from nbmemprof.errors import NbmemprofError

__all__ = ["ConfError", "Settings", "native", "parse"]

_MB = 1 << 20
_UNLIMITED_MB = (1 << 64) // _MB - 1


class ConfError(NbmemprofError, ValueError):
    """torch would refuse this configuration; the message has torch's own words."""


@dataclass(frozen=True)
class Settings:
    """What a configuration sets; sizes are bytes, ``max_split_size`` None is unlimited."""

    text: str = ""
    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = LARGE_BUFFER
    roundup_power2_divisions: tuple[int, ...] = (0,) * BUCKETS
    garbage_collection_threshold: float = 0.0
    large_segment_size: int = LARGE_BUFFER
    per_process_memory_fraction: float | None = None
    graph_capture_record_stream_reuse: bool = False
    throw_on_cudamalloc_oom: bool = False
    release_lock_on_cudamalloc: bool = False
    backend: str = "native"
    expandable_reserve: float | int | None = None  # a fraction of the device, or bytes
    others: dict[str, Any] = field(default_factory=dict)  # host memory and other keys that do not touch device memory


class _Tokens:
    """The tokens of a configuration; blanks are dropped, as torch drops them."""

    def __init__(self, text: str, rules: Rules) -> None:
        self.all = [t for t in re.split(r"([,:\[\]])", re.sub(r"\s", "", text)) if t]
        self.rules, self.text, self.i = rules, text, 0

    def error(self, words: str) -> ConfError:
        major, minor = self.rules.torch
        return ConfError(f"torch {major}.{minor} refuses {self.text!r}: {words}. Correct the option, or leave it out.")

    def more(self) -> bool:
        return self.i < len(self.all)

    def next(self) -> str:
        if not self.more():
            raise self.error("a value is missing at its end")
        self.i += 1
        return self.all[self.i - 1]

    def skip(self, token: str) -> None:
        """Pass a separator: the old parser insists on it, the new one (2.9 on) takes whatever stands there."""
        found = self.next() if self.more() else ""
        if self.rules.old_parser and found != token:
            raise self.error(f"Error parsing CachingAllocator settings, expected {token}")

    def integer(self) -> int:
        """As ``stoull``: the digits at the beginning count; a minus wraps around."""
        token = self.next()
        digits = re.match(r"[+-]?\d+", token)
        if digits is None:
            raise self.error(f"stoull: {token!r} is not a number")
        value = int(digits[0])
        if not -(1 << 64) < value < 1 << 64:
            raise self.error(f"stoull: {token!r} is out of range")
        return value % (1 << 64)

    def number(self) -> float:
        token = self.next()
        digits = re.match(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", token)
        if digits is None:
            raise self.error(f"stod: {token!r} is not a number")
        return float(digits[0])

    def boolean(self, key: str) -> bool:
        token = self.next()
        if token not in ("True", "False"):
            words = f"Expected a single True/False argument for {key}" if self.rules.old_parser else f"Expected 'True' or 'False' but got {token!r}"
            raise self.error(words)
        return token.startswith("T")

    def pass_over(self) -> str:
        """Skip a value that this model has no use for."""
        value = self.next()
        if value == "[":
            while self.next() != "]":
                pass
        return value


def native(settings: Settings) -> Settings:
    """Return the settings if they are of torch's own allocator.

    Raises
    ------
    NbmemprofError
        For another backend, which is not modelled.
    """
    if settings.backend != "native":
        raise NbmemprofError(f"backend:{settings.backend} leaves memory to the driver's pool; only torch's native allocator is modelled. Leave the option out.")
    return settings


def parse(text: str | None, torch: str | None = None, before: Settings | None = None) -> Settings:
    """Read a configuration.

    Parameters
    ----------
    text
        ``key:value`` joined by commas, lists in brackets; empty or None for torch's defaults.
    torch
        Version whose parser reads it; 2.11 unless said.
    before
        What was set before, where the option changes at run time: ``max_split_size_mb``, ``roundup_power2_divisions`` and
        ``garbage_collection_threshold`` go back to their defaults first, all others stay.

    Raises
    ------
    ConfError
        Where torch would raise.

    Examples
    --------
    >>> import nbmemprof as mp
    >>> mp.allocator.parse("max_split_size_mb:128").max_split_size
    134217728
    """
    tokens = _Tokens(text or "", rules_of(torch))
    old = before or Settings()
    made: dict[str, Any] = {"text": text or "", "max_split_size": None, "roundup_power2_divisions": (0,) * BUCKETS, "garbage_collection_threshold": 0.0}
    large = old.large_segment_size
    if "large_segment_size_mb" in tokens.rules.keys and "large_segment_size_mb" in tokens.all:  # read first, wherever it stands
        tokens.i = tokens.all.index("large_segment_size_mb") + 2
        large = _large_segment(tokens)
        tokens.i = 0
    made["large_segment_size"] = large
    others = dict(old.others)
    while tokens.more():
        key = tokens.next()
        if key not in tokens.rules.keys:
            raise tokens.error(f"Unrecognized CachingAllocator option: {key}" if tokens.rules.old_parser else f"Unrecognized key '{key}' in CUDA allocator config")
        tokens.skip(":")
        if key in _READERS:
            name, read = _READERS[key]
            made[name] = read(tokens, key, large)
        else:
            others[key] = tokens.pass_over()
        if tokens.more():
            tokens.skip(",")
    return replace(old, **made, others=others)


def _large_segment(tokens: _Tokens) -> int:
    value = tokens.integer()
    if value <= MIN_LARGE_ALLOC // _MB:
        raise tokens.error(f"CachingAllocator option large_segment_size_mb must be > {MIN_LARGE_ALLOC // _MB} MB")
    return min(value, _UNLIMITED_MB) * _MB


def _at_least_large(tokens: _Tokens, key: str, large: int) -> int:
    value = tokens.integer()
    least = large // _MB
    if value < least or (tokens.rules.old_parser and key == "max_split_size_mb" and value == least):
        sign = ">" if tokens.rules.old_parser and key == "max_split_size_mb" else ">="
        raise tokens.error(f"CachingAllocator option {key} too small, must be {sign} {least}")
    return min(value, _UNLIMITED_MB) * _MB


def _threshold(tokens: _Tokens, _key: str, _large: int) -> float:
    value = tokens.number()
    if not 0 < value < 1:
        size = "small" if value <= 0 else "big"
        raise tokens.error(
            f"garbage_collect_threshold too {size}, set it 0.0~1.0" if tokens.rules.old_parser else "garbage_collect_threshold is invalid, set it in (0.0, 1.0)"
        )
    return value


def _fraction(tokens: _Tokens, _key: str, _large: int) -> float:
    value = tokens.number()
    if not 0 <= value <= 1:
        raise tokens.error("per_process_memory_fraction is invalid, set it in [0.0, 1.0]")
    return value


def _power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _divisions(tokens: _Tokens, _key: str, _large: int) -> tuple[int, ...]:
    found = [0] * BUCKETS
    first = tokens.next()
    if first != "[":
        tokens.i -= 1
        value = tokens.integer()
        if not _power_of_two(value):
            raise tokens.error("For roundups, the divisions has to be power of 2")
        return (value,) * BUCKETS
    at, fresh = 0, True
    while (start := tokens.next()) != "]":
        tokens.skip(":")
        value = tokens.integer()
        if value and not _power_of_two(value):
            raise tokens.error("For roundups, the divisions has to be power of 2 or 0 to disable roundup")
        if start == ">":
            found[at:] = [value] * (BUCKETS - at)
        else:
            begin = re.match(r"\d+", start)
            if begin is None or not _power_of_two(int(begin[0])):
                raise tokens.error("For roundups, the intervals have to be power of 2")
            bucket = min(int(begin[0]).bit_length() - 1, BUCKETS - 1)
            if fresh:
                found[:bucket] = [value] * bucket
                fresh = False
            found[bucket] = value
            at = bucket if tokens.rules.old_parser else bucket + 1  # up to 2.8 ">" overwrites the last listed one
        if tokens.more() and tokens.all[tokens.i] != "]":
            tokens.skip(",")
    return tuple(found[:BUCKETS])


def _backend(tokens: _Tokens, _key: str, _large: int) -> str:
    value = tokens.next()
    if value not in ("native", "cudaMallocAsync"):
        raise tokens.error("Unknown allocator backend, options are native and cudaMallocAsync")
    return value


def _reserve(tokens: _Tokens, _key: str, _large: int) -> float | int | None:
    """A fraction, or GiB with a G; what torch can't read it ignores with a warning."""
    token = tokens.next()
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)([gG]?)", token)
    if found is None or float(found[1]) <= 0:
        return None
    return int(float(found[1]) * (1 << 30)) if found[2] else float(found[1])


_READERS: dict[str, tuple[str, Callable[[_Tokens, str, int], Any]]] = {
    "expandable_segments": ("expandable_segments", lambda t, k, _: t.boolean(k)),
    "max_split_size_mb": ("max_split_size", _at_least_large),
    "max_non_split_rounding_mb": ("max_non_split_rounding", _at_least_large),
    "roundup_power2_divisions": ("roundup_power2_divisions", _divisions),
    "garbage_collection_threshold": ("garbage_collection_threshold", _threshold),
    "large_segment_size_mb": ("large_segment_size", lambda t, _k, _l: _large_segment(t)),
    "per_process_memory_fraction": ("per_process_memory_fraction", _fraction),
    "graph_capture_record_stream_reuse": ("graph_capture_record_stream_reuse", lambda t, k, _: t.boolean(k)),
    "throw_on_cudamalloc_oom": ("throw_on_cudamalloc_oom", lambda t, k, _: t.boolean(k)),
    "release_lock_on_cudamalloc": ("release_lock_on_cudamalloc", lambda t, k, _: t.boolean(k)),
    "backend": ("backend", _backend),
    "expandable_segments_reserve": ("expandable_reserve", _reserve),
}
