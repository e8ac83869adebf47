"""The heap map: what lies where, at the peak, at the end and through time; each free list."""

from __future__ import annotations

import re

import numpy as np
import polars as pl
import pytest

import nbmemprof as mp
from nbmemprof.units import format_bytes
from nbmemprof.views import findings, first, heap_map, text
from nbmemprof.views._facts import facts

MIB = 1 << 20


@pytest.fixture
def pools(fixtures):
    """Two pools, one of them private, recorded on an H200."""
    return mp.load(fixtures / "recordings" / "mempool.snapshot.pickle.gz")


def _area(svg, fill):
    """Pixels of one colour, from the paths of widths and heights."""
    parts = re.findall(rf'<path d="([^"]*)" fill="{fill}"', svg.markup())
    return sum(float(w) * float(h) for part in parts for w, h in re.findall(r"h([\d.]+)v([\d.]+)", part))


def test_the_sentence_has_the_bytes_of_the_tables(pools):
    _, sentence = heap_map.moments(facts(pools), facts(pools).devices[0])
    reserved = int(pools.segments["size_bytes"].sum())
    free = int(pools.blocks.filter(pl.col("state") == "inactive")["size_bytes"].sum())
    assert reserved == 2_017_460_224
    assert f"At the end 13 segments of 1.9 GiB together, {format_bytes(free)} of it free in 27 pieces" in sentence


@pytest.mark.cost(0.6)
def test_pixels_are_bytes():
    """A heap that is full at the peak and half free at the end shows a quarter of its pixels free, and a small block that pins a segment is seen."""
    torch = pytest.importorskip("torch")
    with mp.record(as_device="H200:1GiB") as rec:
        kept = [torch.empty(10 * MIB, dtype=torch.uint8) for _ in range(8)]
        del kept[::2]
    known = facts(rec.capture)
    svg, _ = heap_map.moments(known, known.devices[0])
    free, used = _area(svg, "#eceef1"), sum(_area(svg, fill) for fill in set(re.findall(r'fill="(#\w+)"', svg.markup())) - {"#eceef1"})
    assert free / (free + used) == pytest.approx(1 / 4, abs=0.01), "full at the peak, half free at the end"
    segment, blocks = {"addr": 0}, pl.DataFrame({"addr": [0, 512], "size_bytes": [512, 2 * MIB - 512]}, schema_overrides={"addr": pl.UInt64})
    row = heap_map._raster(segment, blocks, np.asarray([3, 1], np.int16), 100, 2 * MIB)
    assert row.tolist() == [3] + [1] * 99


@pytest.mark.cost(0.6)
def test_more_segments_than_rows_are_n_of_m(pools, fixtures):
    big = mp.load(fixtures / "recordings" / "snap_gpt2_varlen_b8.pickle.gz")
    made = heap_map.bundle(big)
    assert "in the largest 8 of 169 segments at the peak: 500 of 529 allocations in them are drawn" in made["text/plain"]
    assert sum(len(part.encode()) for part in made.values()) <= first.BUDGET_BYTES


def test_every_picture_has_words_and_nothing_that_a_sanitizer_strips(pools):
    page = heap_map.bundle(pools)["text/html"]
    images = re.findall(r"<img\b[^>]*>", page)
    assert len(images) == 3
    assert all(re.search(r'alt="[^"]*\d[^"]*"', tag) and 'src="data:image/svg+xml;base64,' in tag for tag in images)
    assert "<svg" not in page
    assert "<style" not in page


def test_free_lists_are_told_apart_and_add_up(pools):
    svg, sentence = heap_map.lists(facts(pools), facts(pools).devices[0])
    assert sentence.startswith("Free lists at the end. large: 1.3 GiB reserved, 1.2 GiB free, largest piece 278 MiB")
    assert "private pool 0_1, large: 570 MiB reserved" in sentence
    frame = mp.fragmentation(pools)
    row = frame.sort("reserved_bytes", descending=True).row(0, named=True)
    assert row["allocated_bytes"] + row["pending_bytes"] + row["pinned_bytes"] + row["releasable_bytes"] == row["reserved_bytes"]
    assert svg.markup().count("<text") == 1 + 2 * frame.height + 4


def test_what_is_free_in_a_private_pool_is_called_stranded_and_never_releasable(pools):
    """``empty_cache()`` gives nothing back of a pool that somebody uses: neither sentence nor table may promise it."""
    frame = mp.fragmentation(pools)
    own, open_ = frame.filter("private"), frame.filter(~pl.col("private"))
    assert own["releasable_bytes"].sum() > 0
    gap = next(s for s in findings.findings(pools) if s.startswith("Torch reserved"))
    assert f"would give {format_bytes(open_['releasable_bytes'].sum())} back" in gap
    shown = text.free_parts(frame)
    assert shown.filter("private").select("releasable_bytes", "pinned_bytes").null_count().row(0) == (own.height, own.height)
    assert shown.filter("private")["stranded_bytes"].to_list() == own["free_bytes"].to_list()
    assert shown.filter(~pl.col("private"))["stranded_bytes"].null_count() == open_.height
    assert "stranded in a private pool" in heap_map.bundle(pools)["text/html"]


def test_host_memory_has_no_map_and_says_what_has(training):
    said = heap_map.bundle(training(on="host"))["text/plain"]
    assert "no segments to draw" in said
    assert "--as H200:8GiB" in said


def test_it_is_a_view_that_the_magics_take(pools, capsys, monkeypatch):
    from nbmemprof import flags

    assert "heap_map" in flags.view_names()
    monkeypatch.setitem(__import__("sys").modules, "IPython", None)
    heap_map.show(pools)
    assert capsys.readouterr().out.startswith("peak 627.4 MiB")
