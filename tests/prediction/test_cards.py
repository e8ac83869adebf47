"""Which cards a recorded cell fits on."""

from __future__ import annotations

import dataclasses

import polars as pl
import pytest
from attribution_played import play

import nbmemprof as mp
from nbmemprof.prediction import cards as module
from nbmemprof.prediction.catalogue import CATALOGUE

GIB = 1 << 30


@pytest.fixture
def shelf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards like an H200, with less memory."""
    h200 = CATALOGUE["H200"]
    sizes = {"small": 8 * GIB, "tight": int(15.9 * GIB), "large": 24 * GIB}
    monkeypatch.setattr(module, "CATALOGUE", {name: dataclasses.replace(h200, name=name, capacity_bytes=size) for name, size in sizes.items()})


@pytest.mark.cost(0.6)
def test_the_smallest_card_that_fits_comes_first_and_a_tight_one_is_replayed(shelf: None) -> None:
    """GPT-2 small, batch 8: 15.4 GiB reserved, 14.7 allocated at the peak."""
    made = mp.cards(play("gpt2_fp32"))
    assert made["card"].to_list() == ["small", "tight", "large"]
    assert made["fits"].to_list()[::2] == ["no", "yes"]
    tight = made.filter(pl.col("card") == "tight").row(0, named=True)
    assert tight["origin"] == "replayed" and "replayed with" in tight["evidence"] and tight["fits"] != "maybe"
    assert (made["headroom_bytes"] == made["capacity_bytes"] - made["high_bytes"]).all()
    assert mp.cards(play("gpt2_fp32"), replay=False)["fits"].to_list() == ["no", "maybe", "yes"]


def test_what_lies_beside_the_allocator_is_counted(shelf: None) -> None:
    row = mp.cards(play("gpt2_fp32"), replay=False).row(0, named=True)
    told = mp.summary(play("gpt2_fp32")).row(0, named=True)
    outside = CATALOGUE["H200"].outside
    assert row["low_bytes"] == told["peak_allocated_bytes"] + (outside.blas - outside.plus_minus << 20)
    assert row["high_bytes"] == told["peak_reserved_bytes"] + (outside.cudnn + outside.plus_minus << 20)


def test_a_capture_without_a_peak_is_refused() -> None:
    with pytest.raises(mp.NbmemprofError, match="no peak"):
        mp.cards(mp.Capture.build({}))


def test_the_real_catalogue_has_a_card_for_it() -> None:
    assert "yes" in mp.cards(play("gpt2_fp32"), replay=False)["fits"].to_list()
