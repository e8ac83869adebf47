"""Layers as a tree, and the ledger as a bar."""

from __future__ import annotations

import gzip
import re

import polars as pl
import pytest
from attribution_played import play
from support import ROOT

import nbmemprof as mp
from nbmemprof.views import first, ledger_bar, report, tree

NAMES = ["weights_bytes", "gradients_bytes", "optimizer_state_bytes", "activations_bytes", "temporary_bytes", "kv_cache_bytes", "buffers_bytes", "other_bytes"]


def frame(*rows: tuple[str, int]) -> pl.DataFrame:
    """Layers with their weights."""
    made = [{"layer": p, "parent": p.rpartition(".")[0] or None, "name": p.rpartition(".")[2], "depth": p.count("."), "weights_bytes": size} for p, size in rows]
    return pl.DataFrame(made).with_columns(pl.lit(0).alias(n) for n in NAMES[1:])


BLOCKS = frame(("M", 430), ("M.h", 400), *((f"M.h.{n}", 100) for n in range(4)), *((f"M.h.{n}.mlp", 60) for n in range(4)), *((f"M.h.{n}.attn", 40) for n in range(4)), ("M.head", 30))


def test_alike_blocks_are_one_row_and_every_byte_is_in_it() -> None:
    lines = [(depth, path, node.size, node.count) for depth, path, node in tree.shown(tree.tree(BLOCKS))]
    assert lines == [(0, "M", 430, 1), (1, "h.0–3", 400, 4), (2, "mlp", 240, 4), (2, "attn", 160, 4), (1, "head", 30, 1)]


def test_blocks_that_differ_stay_apart() -> None:
    different = frame(("M", 300), ("M.0", 100), ("M.1", 100), ("M.2", 50), ("M.3", 50))
    assert [(path, node.size) for _, path, node in tree.shown(tree.tree(different))] == [("M", 300), ("0–1", 200), ("2–3", 100)]


def test_the_largest_are_opened_first_where_there_is_little_room() -> None:
    wide = frame(("M", 110), ("M.a", 100), ("M.b", 10), ("M.a.x", 60), ("M.a.y", 40), ("M.b.x", 6), ("M.b.y", 4))
    assert [path for _, path, _ in tree.shown(tree.tree(wide), rows=5)] == ["M", "a", "x", "y", "b"]


@pytest.mark.parametrize("name", ["gpt2_fp32", "mixtral_small", "resnet50"])
def test_the_picture_of_a_real_model_says_its_numbers(name: str) -> None:
    layers = mp.layers(play(name))
    drawn = tree.picture(layers, "Layers at the peak")
    assert drawn is not None
    svg, sentence = drawn
    assert re.search(r"\d (GiB|MiB)", sentence) and len(svg.markup()) < 12_000
    rows = tree.shown(tree.tree(layers))
    assert rows[0][2].size == layers.filter(pl.col("depth") == 0)["requested_bytes"].max()


def test_without_layers_there_is_no_picture() -> None:
    assert tree.picture(BLOCKS.clear(), "Layers") is None and tree.html(BLOCKS.clear()) == ""


def test_the_nested_lists_hold_every_module_and_escape_names() -> None:
    made = tree.html(frame(("M", 10), ("M.<b>", 10), ("M.<b>.c", 10)))
    assert made.count("<details") == 2 and "&lt;b&gt;" in made and "<b>" not in made
    assert made.count('class="name"') == 3


@pytest.mark.cost(1)
def test_first_view_and_report_have_tree_and_ledger_within_their_budgets() -> None:
    made = first.bundle(play("gpt2_fp32"))
    assert sum(len(part.encode()) for part in made.values()) <= first.BUDGET_BYTES
    assert "Layers at the peak: GPT2LMHeadModel" in made["text/html"]
    assert '<div class="tree">' in report.page(play("gpt2_fp32"))


def recorded(name: str) -> pl.DataFrame:
    return mp.ledger(mp.load(gzip.decompress((ROOT / "tests" / "fixtures" / "h200" / "ledger" / f"{name}.nbmem.gz").read_bytes())))


def test_the_bar_says_every_line_with_its_error() -> None:
    drawn = ledger_bar.picture(recorded("cupy"))
    assert drawn is not None
    assert "torch cached 1.5 GiB" in drawn[1] and "CuPy's pool cached 384 MiB" in drawn[1] and "±" in drawn[1]
    assert drawn[1].startswith("The device's 2.8 GiB")
    table = ledger_bar.rows(recorded("pinned"))
    assert [row[0] for row in table][-3:] == [f"pinned host memory {word}" for word in ("in use", "rounding", "cached")]


def test_without_the_drivers_number_there_is_no_bar_but_a_table_with_reasons() -> None:
    unknown = mp.ledger(play("gpt2_fp32")).filter(pl.col("line") == "unexplained")
    assert ledger_bar.picture(unknown) is None
    assert "not known" in ledger_bar.rows(unknown)[0]
