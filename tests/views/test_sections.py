"""The full report's further parts: the allocator, what would save, experts, cards."""

from __future__ import annotations

import re

import polars as pl
import pytest
from attribution_played import play

import nbmemprof as mp
from nbmemprof.allocator import verdict
from nbmemprof.units import format_count
from nbmemprof.views import report, sections, text
from nbmemprof.views._facts import facts


def titles(page: str) -> list[str]:
    return re.findall(r"<summary>(.*?)</summary>", page)


@pytest.mark.cost(0.7)
def test_the_page_has_the_verdict_what_was_inferred_the_heap_and_other_settings(fixtures):
    capture = mp.load(fixtures / "recordings" / "mempool.snapshot.pickle.gz")
    page, told = report.page(capture), verdict(capture)
    assert told["text"] in page
    assert page.count("Inferred, as no event tells it: ") == len(told["inferred"]) > 0
    for title in ("The heap: segments, addresses through time, free lists", "What other allocator settings would have reserved"):
        assert f"<h3>{title}</h3><img " in page
    assert {"What to change", "Which GPUs it would fit on", "Time that the allocator spent on the driver"} <= set(titles(page))
    assert len(page.encode()) < report.BUDGET_BYTES


@pytest.mark.cost(0.3)
def test_the_page_has_savings_by_module_parts_experts_and_cards():
    """A small mixture's training on an H200."""
    capture = play("mixtral_small")
    made = {table.title.split(" (")[0]: table for table in sections.tables(facts(capture), facts(capture).devices[0])}
    layers = mp.layers(capture).filter(pl.col("layer") == "MixtralForCausalLM").row(0, named=True)
    savings = made["What checkpointing and smaller weights would save, at most"]
    row = dict(zip(savings.head, savings.rows[0], strict=True))
    assert row["module"] == "MixtralForCausalLM"
    assert [row[n] for n in ("checkpointing would not keep", "8-bit weights save", "4-bit weights save")] == [
        text.cell("bytes", layers[n]) for n in ("recompute_saves_bytes", "int8_saves_bytes", "int4_saves_bytes")
    ]
    assert any("experts" in row[0] for row in made["By part of the model, at the peak"].rows)
    experts = made["Experts and their tokens"]
    assert experts.rows[0][experts.head.index("tokens")] == format_count(1198)
    assert made["Which GPUs it would fit on"].rows[0][0] == mp.cards(capture)["card"][0]


def test_the_smallest_card_is_said_as_mp_cards_has_it(fixtures):
    capture = mp.load(fixtures / "recordings" / "mempool.snapshot.pickle.gz")
    first = mp.cards(capture).filter(pl.col("fits") == "yes")["card"][0]
    numbers = dict(text.tables(facts(capture), facts(capture).devices[0], 8)[0][2])
    assert numbers["smallest GPU that it fits on"].startswith(f"{first} (")
    assert sections.fits(capture, replay=True).startswith(f"The smallest GPU that it fits on: {first}.")
    assert "tells no peak" in sections.fits(mp.Capture.build({}), replay=True)


def test_host_memory_has_no_card_in_its_numbers(training):
    capture = training(on="host")
    assert "smallest GPU that it fits on" not in dict(text.tables(facts(capture), facts(capture).devices[0], 8)[0][2])
    assert sections.allocator(facts(capture)) == []
