"""The allocator's counters under their right names."""

from __future__ import annotations

import types
from typing import Any

import polars as pl
import pytest

import nbmemprof as mp
from nbmemprof.errors import NbmemprofError

MIB = 1 << 20


def counters(**changed: int) -> dict[str, Any]:
    """Two live blocks (one pending), a free piece beside them, a whole free segment."""
    found: dict[str, Any] = {
        "allocation.all.current": 1, "allocation.all.allocated": 7, "allocation.all.freed": 6, "allocation.all.peak": 3,
        "allocated_bytes.all.current": 5 * MIB, "active_bytes.all.current": 8 * MIB, "requested_bytes.all.current": 8 * MIB - 100,
        "reserved_bytes.all.current": 60 * MIB, "reserved_bytes.all.peak": 80 * MIB, "reserved_bytes.small_pool.peak": 2 * MIB,
        "inactive_split_bytes.all.current": 12 * MIB, "segment.all.current": 2, "segment.all.allocated": 4,
        "oversize_allocations.current": 0, "num_alloc_retries": 3, "num_ooms": 0, "max_split_size": -1, "something_new": 5,
    }  # fmt: skip
    return found | changed


def value(frame: pl.DataFrame, name: str) -> int | None:
    return frame.filter(pl.col("counter") == name)["value"].item()  # type: ignore[no-any-return]


def test_what_the_common_snippet_gets_wrong_has_its_right_name() -> None:
    frame = mp.stats(counters())
    assert frame.columns == ["device", "counter", "value", "unit", "meaning"]
    assert value(frame, "derived.segments") == 2  # not num_alloc_retries
    assert value(frame, "derived.requests") == 7  # not allocation.all.current
    assert value(frame, "derived.live_blocks") == 1
    meaning = dict(frame.select("counter", "meaning").rows())
    assert "not a number of segments" in meaning["num_alloc_retries"]
    assert "not the number of requests" in meaning["derived.live_blocks"]


def test_the_parts_add_up_to_what_is_reserved() -> None:
    frame = mp.stats(counters())
    parts = [value(frame, f"derived.{n}_bytes") for n in ("rounding", "pinned", "releasable")]
    assert parts == [100, 12 * MIB, 40 * MIB]
    assert value(frame, "requested_bytes.all.current") + sum(parts) == 60 * MIB  # type: ignore[arg-type, operator]
    assert value(frame, "derived.pending_bytes") == 3 * MIB


def test_free_segments_of_a_private_pool_are_stranded(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbmemprof import memory_stats

    def segment(pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, object]:
        size = sum(b[0] for b in blocks) * MIB
        return {"device": 0, "segment_pool_id": pool, "total_size": size, "blocks": [{"size": s * MIB, "state": state} for s, state in blocks]}

    segments = [segment((0, 0), (20, "inactive")), segment((1, 0), (30, "inactive")), segment((1, 0), (5, "active_allocated"), (7, "inactive"))]
    cuda = types.SimpleNamespace(get_allocator_backend=lambda: "native", memory_snapshot=lambda **_: segments)
    assert memory_stats._picture(types.SimpleNamespace(cuda=cuda), 0) == {"segments": 3, "pinned": 7 * MIB, "stranded": 30 * MIB}


def test_no_limit_is_null_and_not_minus_one() -> None:
    assert value(mp.stats(counters()), "max_split_size") is None
    assert value(mp.stats(counters(max_split_size=21 * MIB)), "max_split_size") == 21 * MIB


def test_what_counters_cannot_tell_of_expandable_segments_is_null() -> None:
    frame = mp.stats(counters(**{"segment.all.current": 0, "inactive_split_bytes.all.current": 0}))
    assert [value(frame, f"derived.{n}") for n in ("segments", "pinned_bytes", "releasable_bytes")] == [None, None, None]
    assert value(frame, "derived.cached_bytes") == 52 * MIB


def test_every_counter_of_torch_is_there_with_unit_and_meaning() -> None:
    frame = mp.stats(counters())
    assert set(counters()) < set(frame["counter"])
    assert frame.filter(pl.col("unit").is_null())["counter"].to_list() == ["something_new"]
    assert frame.filter(pl.col("counter") == "reserved_bytes.small_pool.peak")["meaning"].item() == "memory held from the driver: highest since the peaks were last reset (requests up to 1 MiB)"


def test_a_nested_dict_is_read_like_a_flat_one() -> None:
    nested = {"allocated_bytes": {"all": {"current": 512, "peak": 1024}}, "num_ooms": 1}
    assert value(mp.stats(nested), "allocated_bytes.all.peak") == 1024


def test_free_bytes_beside_used_ones_are_pinned_by_whole_pages_where_segments_expand() -> None:
    from nbmemprof.memory_stats import _pinned

    def segment(expandable: bool, *blocks: tuple[int, str]) -> dict[str, Any]:
        sizes = [{"size": size * MIB, "state": state} for size, state in blocks]
        return {"is_expandable": expandable, "segment_type": "large", "total_size": sum(b["size"] for b in sizes), "blocks": sizes}

    used = (5, "active_allocated")
    assert _pinned(segment(False, used, (35, "inactive"))) == 35 * MIB
    assert _pinned(segment(False, (40, "inactive"))) == 0
    assert _pinned(segment(True, used, (35, "inactive"))) == 15 * MIB  # of 40 MiB the second page of 20 can go
    assert _pinned(segment(True, (30, "inactive"), used, (5, "inactive"))) == 15 * MIB


def test_without_a_device_the_host_is_told_and_nothing_pretended() -> None:
    frame = mp.stats()
    host = frame.filter(pl.col("device").is_null())
    assert host["counter"].to_list() == ["host.rss", "host.rss.peak"]
    assert host["value"].min() > 1 << 20  # type: ignore[operator]


def test_what_is_no_dict_of_counters_is_refused_by_name() -> None:
    with pytest.raises(NbmemprofError, match="list"):
        mp.stats([1])  # type: ignore[arg-type]


def test_a_device_without_counters_says_what_to_do() -> None:
    with pytest.raises(NbmemprofError, match="Allocate something"):
        mp.stats(device=0)
