"""What the allocator does differently from one torch to the next."""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbmemprof.errors import NbmemprofError

__all__ = ["DEFAULT", "Rules", "rules_of"]

DEFAULT = "2.11"  # the version that the rules were measured on


@dataclass(frozen=True)
class Rules:
    """One torch version's rules.

    ``old_parser``: the parser up to 2.8. ``min_split_mb``: smallest ``max_split_size_mb``, and whether it is allowed itself.
    ``routed_quiet``: inside ``use_mem_pool`` there is
    no flush and no polling of events. ``keys``: the options that this version knows.
    """

    torch: tuple[int, int]
    old_parser: bool
    routed_quiet: bool
    use_on_oom: bool
    keys: frozenset[str]


_ALWAYS = {
    "max_split_size_mb", "max_non_split_rounding_mb", "garbage_collection_threshold", "roundup_power2_divisions", "expandable_segments", "backend",
    "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads",
    "pinned_use_background_threads",
}  # fmt: skip
_SINCE = {
    (2, 9): {"graph_capture_record_stream_reuse", "pinned_reserve_segment_size_mb"},
    (2, 10): {"large_segment_size_mb", "per_process_memory_fraction"},
    (2, 12): {"throw_on_cudamalloc_oom", "pinned_free_catch_all"},
    (2, 13): {"pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"},
    (2, 14): {"expandable_segments_reserve", "expandable_segments_reserve_by_class"},
}


def rules_of(torch: str | None) -> Rules:
    """Return the rules of a torch version such as ``"2.11"`` or ``"2.13.0+cu130"``; None means 2.11.

    Raises
    ------
    NbmemprofError
        The text is not a version.
    """
    found = re.match(r"\s*v?(\d+)\.(\d+)", str(torch or DEFAULT))
    if found is None:
        raise NbmemprofError(f"{torch!r} is not a torch version. Write it like '2.11' or '2.13.0+cu130'.")
    version = (int(found[1]), int(found[2]))
    keys = set(_ALWAYS)
    for since, more in _SINCE.items():
        if version >= since:
            keys |= more
    return Rules(version, version < (2, 9), version < (2, 12), version >= (2, 8), frozenset(keys))
