"""The heap on real H200 recordings, compiled against interpreted, and what does not fit."""

from __future__ import annotations

import polars as pl
import pytest
from strategies import Allocator, capture, frames

import nbmemprof as mp
from nbmemprof import _jit, heap, schema
from nbmemprof.allocator import Device
from nbmemprof.capture import Capture

MIB = 1 << 20


def lived() -> Allocator:
    a = Allocator()
    kept = [a.malloc(n * 300_000, frames(f"train.py:{n} step")) for n in range(1, 9)]
    for block in kept[::2]:
        a.free(block)
    a.empty_cache()
    a.malloc(5 * MIB, frames("train.py:40 step"))
    return a


def build(made: Capture, **changes: pl.DataFrame) -> Capture:
    return heap.build({name: made.tables[name] for name in ("events", "segments", "blocks", "stacks")} | changes, source="test")


@pytest.mark.cost(5)
def test_compiled_and_interpreted_kernels_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    made = capture([lived()])
    interpreted = build(made).allocations
    monkeypatch.setattr(_jit, "WORTH", 0)
    assert build(made).allocations.equals(interpreted)


def test_a_stray_free_is_counted_and_left_out() -> None:
    a = Allocator()
    block = a.malloc(1000)
    a.free(block)
    a.event("free_requested", block.addr, 1000, 0, ())
    made = build(capture([a]))
    assert [w.partition(":")[0] for w in made.meta["warnings"]] == ["inconsistent"]
    assert "1 stray frees" in made.meta["warnings"][0]
    assert made.allocations.height == 1


def test_a_missing_free_is_placed_where_the_address_is_given_out_again() -> None:
    a = Allocator()
    block = a.malloc(1000)
    a.free(block)
    a.malloc(1000)
    made = capture([a])
    lost = made.events.filter(pl.col("action").cast(pl.String).is_in(["free_requested", "free_completed"]).not_())
    derived = build(made, events=lost)
    assert any("1 frees are missing" in w for w in derived.meta["warnings"])
    assert derived.allocations["free_seq"].to_list() == [4, None]


def test_an_allocation_that_is_not_among_the_final_blocks_ends_at_the_last_event() -> None:
    a = Allocator()
    block = a.malloc(1000)
    a.malloc(3000)
    a.free(block)
    made = capture([a])
    derived = build(made, events=made.events.head(3))
    assert any(w.startswith("inconsistent: 1 allocations") for w in derived.meta["warnings"])
    assert derived.allocations["free_seq"].to_list() == [2, None]


def test_a_block_without_events_was_there_at_the_start() -> None:
    a = Allocator()
    a.malloc(1000, frames("train.py:1 main"))
    made = capture([a])
    derived = build(made, events=schema.empty("events"))
    assert derived.allocations.select("at_start", "alloc_seq", "size_bytes", "requested_bytes").rows() == [(True, None, 1024, 1000)]


def test_a_request_that_the_layout_can_not_serve_is_counted() -> None:
    a = Allocator()
    a.malloc(1000)
    made = capture([a])
    elsewhere = made.events.with_columns(
        pl.when(pl.col("action").cast(pl.String) == "alloc").then(pl.lit(12345 * 512, pl.UInt64)).otherwise("addr").alias("addr")
    )
    derived = build(made, events=elsewhere)
    assert any("do not fit the layout" in w for w in derived.meta["warnings"])
    assert not derived.allocations["size_exact"].all()


def test_hints_of_a_source_become_categories_and_the_rest_stays_unknown() -> None:
    a = Allocator()
    a.malloc(1000)
    a.malloc(2000)
    hints = schema.fill("hints", {"alloc_seq": [1], "category": ["weights"], "evidence": ["storage"], "op": ["aten::empty"]})
    made = build(capture([a]), hints=hints)
    assert made.allocations.select("category", "evidence", "op").rows() == [("weights", "storage", "aten::empty"), ("unknown", "none", None)]


def test_host_memory_has_no_segments_and_keeps_its_requested_size() -> None:
    a = Allocator()
    a.malloc(1000)
    host = capture([a], kind="host")
    only = {"events": host.events.filter(pl.col("action").cast(pl.String) == "alloc"), "segments": schema.empty("segments")}
    assert build(host, **only).allocations["size_bytes"].to_list() == [1024]  # a final block's own size
    assert heap.build(only, source="test").allocations["size_bytes"].to_list() == [1000]


def picture(**changes: pl.Expr) -> list[str]:
    """Warnings for a picture of two live blocks and a hole whose columns were changed."""
    a = Allocator()
    a.malloc(1000)
    a.malloc(3000)
    made = capture([a])
    changed = {name: made.tables[name].with_columns(**{c: e for c, e in changes.items() if c in made.tables[name].columns}) for name in ("segments", "blocks")}
    return heap.build(changed, source="test").meta["warnings"]


def test_a_sound_picture_has_no_warning() -> None:
    assert picture() == []


def test_blocks_that_overlap_are_said() -> None:
    said = picture(requested_bytes=pl.col("requested_bytes"), addr=pl.when(pl.col("addr") == pl.col("addr").max()).then(pl.col("addr") - 512).otherwise("addr"))
    assert any("overlap the block after" in w for w in said)


def test_sums_that_do_not_match_are_said() -> None:
    assert any("tell another allocated size" in w for w in picture(allocated_bytes=pl.col("allocated_bytes") + 512))
    assert any("do not add up" in w for w in picture(state=pl.col("state"), size_bytes=pl.col("size_bytes") + 512))


def test_a_pool_that_splits_no_block_gives_whole_ones():
    """No file names MemPool(no_split=True); a final block with 37 MiB that would have been split off shows it, for its pool and no other."""
    device = Device()
    whole, plain = device.mem_pool(no_split=True), device.mem_pool()
    device.free(device.malloc(40 << 20, pool=whole))
    device.free(device.malloc(3 << 20, pool=whole))
    held = [device.malloc(5 << 20, pool=whole), device.malloc(700, pool=whole), device.malloc(3 << 20, pool=plain), device.malloc(3 << 20)]
    capture = mp.load(device.snapshot())
    assert len(held) == 4
    assert capture.allocations["size_bytes"].to_list() == [40 << 20, 40 << 20, 40 << 20, 2 << 20, 3 << 20, 3 << 20]
    assert capture.allocations["size_exact"].all()
    assert not any("inconsistent" in w for w in capture.meta["warnings"])
