"""Whose memory it was on an H200: what the recordings say is what the models' own arithmetic said there.

Made by ``tests/gpu/record_attribution.py``; each JSON says with what.
"""

from __future__ import annotations

from functools import lru_cache

import polars as pl
import pytest
from attribution_played import NAMES, numbers, play
from cuda_like import live_before_backward

import nbmemprof as mp
from nbmemprof.capture import Capture
from nbmemprof.sources import _cuda_owned

EXACT = ("weights", "gradients", "optimizer_state", "kv_cache", "buffers")
UNKNOWN = {"compiled": 0.05}


@lru_cache(None)
def capture(name: str) -> Capture:
    return play(name)


def by_category(name: str, at: str, column: str = "requested_bytes") -> dict[str, int]:
    frame = mp.breakdown(capture(name), at=at)
    return dict(zip(frame["category"].cast(pl.String), frame[column], strict=True))


@pytest.mark.cost(0.6)
@pytest.mark.parametrize("name", NAMES)
def test_categories_sum_to_torchs_allocated_at_the_peak_and_at_the_end(name: str) -> None:
    truth = numbers(name)["torch"]
    assert sum(by_category(name, "peak", "size_bytes").values()) == truth["peak_allocated_bytes"]
    assert sum(by_category(name, "end", "size_bytes").values()) == truth["end_allocated_bytes"]


@pytest.mark.parametrize("name", NAMES)
def test_weights_gradients_state_buffers_and_cache_are_the_models_own_arithmetic(name: str) -> None:
    truth, found = numbers(name)["truth"], by_category(name, "end")
    assert {c: found.get(c, 0) for c in EXACT if c in truth} == {c: truth[c] for c in EXACT if c in truth}


@pytest.mark.parametrize("name", [n for n in NAMES if "saved" in numbers(n)["truth"]])
def test_activations_at_the_end_of_forward_are_what_autograd_saves(name: str) -> None:
    made = capture(name)
    for step in made.tables["contexts"]["step"].drop_nulls().unique().to_list():
        live = live_before_backward(made, step).filter(pl.col("evidence").cast(pl.String) == "saved")
        assert live["category"].cast(pl.String).unique().to_list() == ["activations"]
        assert live["requested_bytes"].sum() == numbers(name)["truth"]["saved"]


@pytest.mark.parametrize("name", NAMES)
def test_next_to_nothing_is_unknown(name: str) -> None:
    frame = mp.breakdown(capture(name))
    assert frame.filter(pl.col("category").cast(pl.String) == "unknown")["share"].sum() <= UNKNOWN.get(name, 0.01)


@pytest.mark.parametrize("lost", ["weights", "optimizer_state", "gradients"])
def test_what_nobody_found_is_unknown_and_no_neighbours(lost: str) -> None:
    """Model and optimizer are from before the window here: only the owners know what they are."""
    with_all, without = by_category("gpt2_midrun", "peak"), mp.breakdown(play("gpt2_midrun", (lost,)))
    found = dict(zip(without["category"].cast(pl.String), without["requested_bytes"], strict=True))
    gone = with_all.get(lost, 0)
    assert found["unknown"] - with_all["unknown"] == gone
    assert {c: b for c, b in found.items() if c not in ("unknown", lost)} == {c: b for c, b in with_all.items() if c not in ("unknown", lost)}


def test_what_is_unknown_says_why() -> None:
    def reason(made: Capture) -> str | None:
        told = dict(mp.breakdown(made).select(pl.col("category").cast(pl.String), "reason").iter_rows())
        assert all(text is None for category, text in told.items() if category != "unknown")
        return told["unknown"]

    assert reason(capture("gpt2_midrun")) == "65 MiB: there before the recording, and found in no model or optimizer"
    assert reason(capture("gpt2_checkpointed")) == "1 MiB: asked for in recompute, and neither an owner nor when it went tells what for"
    assert reason(capture("resnet50")) == "512 B: asked for outside forward, backward and optimizer, and found in no model or optimizer"


def test_each_moment_of_an_optimizer_is_told_by_its_name() -> None:
    named = mp.breakdown(capture("gpt2_fp32"), by="name")
    state = named.filter(pl.col("category").cast(pl.String) == "optimizer_state").select("name", "requested_bytes").rows()
    weights = numbers("gpt2_fp32")["truth"]["weights"]
    assert state == [("exp_avg", weights), ("exp_avg_sq", weights)]
    assert named["size_bytes"].sum() == mp.breakdown(capture("gpt2_fp32"))["size_bytes"].sum()
    with pytest.raises(mp.NbmemprofError, match="'category' or 'name'"):
        mp.breakdown(capture("gpt2_fp32"), by="colour")


def test_a_weight_of_a_workspaces_size_is_no_workspace_when_nobody_knows_it() -> None:
    """Llama's projections of 32 MiB are made before any forward; cuBLAS asks for its workspace within one."""
    with_all, without = by_category("llama8b_generate", "peak"), mp.breakdown(play("llama8b_generate", ("weights",)))
    found = dict(zip(without["category"].cast(pl.String), without["requested_bytes"], strict=True))
    assert found["unknown"] - with_all["unknown"] == with_all["weights"]
    assert found["workspace"] == with_all["workspace"]


def test_gradients_and_state_that_a_training_keeps_are_no_leak() -> None:
    """Backward has no call stacks: as many gradients of one size as the model has layers are no iterations."""
    for name in ("mixtral_small", "resnet50", "gpt2_fp32"):
        assert mp.leaks(capture(name)).is_empty(), name


def test_what_checkpointing_would_make_of_a_step_is_what_it_made_of_it_on_an_h200() -> None:
    """GPT-2's plain step says how high the checkpointed one will be; that one was recorded too."""
    row = mp.advise(capture("gpt2_fp32"), replay=False).filter(pl.col("rule") == "checkpoint").row(0, named=True)
    truth = [numbers(name)["torch"]["peak_allocated_bytes"] for name in ("gpt2_fp32", "gpt2_checkpointed")]
    assert row["saving_bytes"] == pytest.approx(truth[0] - truth[1], rel=0.001)
    assert mp.advise(capture("gpt2_checkpointed"), replay=False).filter(pl.col("rule") == "checkpoint").is_empty()


def test_workspaces_that_an_earlier_recording_saw_made_are_known_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """This one began in the middle of a run: two blocks of 32 MiB were there already."""
    monkeypatch.setattr(_cuda_owned, "_known", {})
    loose = pl.col("at_start") & (pl.col("requested_bytes") == 32 << 20) & (pl.col("category").cast(pl.String) == "unknown")
    before = play("gpt2_midrun").allocations.filter(loose)
    assert before.height == 2
    monkeypatch.setattr(_cuda_owned, "_known", {(0, addr): 32 << 20 for addr in before["addr"]})
    after = play("gpt2_midrun")
    assert after.allocations.filter(loose).is_empty()
    found = mp.breakdown(after).filter(pl.col("category").cast(pl.String) == "workspace")
    assert found["requested_bytes"].item() >= 2 * 32 << 20 and "operator" in found["evidence"].item()


def test_an_allocation_has_layer_phase_and_step() -> None:
    rows = capture("gpt2_fp32").allocations
    saved = rows.filter(pl.col("evidence").cast(pl.String) == "saved")
    assert saved["phase"].cast(pl.String).unique().to_list() == ["forward"]
    assert sorted(saved["step"].unique().to_list()) == [0, 1, 2]
    blocks = saved.with_columns(pl.col("layer").cast(pl.String).str.extract(r"^(GPT2LMHeadModel\.transformer\.h\.\d+)\.").alias("block")).drop_nulls("block")
    assert blocks["block"].n_unique() == 12
    each = blocks.filter(pl.col("step") == 1).group_by("block").agg(pl.col("requested_bytes").sum())["requested_bytes"]
    assert each.n_unique() == 1  # twelve equal layers keep equally much


@pytest.mark.parametrize("name", ["gpt2_fp32", "resnet50", "mixtral_small", "llama1b_lora", "gpt2_checkpointed", "gpt2_autocast"])
def test_what_backward_allocates_gets_the_block_that_it_works_in(name: str) -> None:
    """Told by what is let go before and after it; gradients, whose layers are known by themselves, say whether that is right."""
    with_owners, without = capture(name).allocations, play(name, ("gradients",)).allocations
    where = pl.col("layer").cast(pl.String)
    backward = pl.col("phase").cast(pl.String) == "backward"
    truth = with_owners.filter(backward & (pl.col("category").cast(pl.String) == "gradients")).select("alloc_seq", told=where)
    found = without.filter(backward & pl.col("layer").is_not_null()).select("alloc_seq", found=where)
    both = truth.join(found, on="alloc_seq").with_columns(pl.col("told").str.extract(r"^(.*?\.\d+)(?:\.|$)"))
    assert both.height > 100 and (both["told"] == both["found"]).all()
    loose = with_owners.filter(backward & (pl.col("category").cast(pl.String) == "temporary"))
    assert loose["layer"].null_count() < 0.35 * loose.height


def test_phases_and_steps_are_marks() -> None:
    marks = capture("gpt2_fp32").marks.with_columns(pl.col("kind").cast(pl.String))
    phases = marks.filter(pl.col("kind") == "phase").sort("time_us")["name"].to_list()
    assert phases == ["forward", "backward", "optimizer", "zero_grad"] * 2 + ["forward", "backward"]
    assert marks.filter(pl.col("kind") == "step")["name"].to_list() == ["step 0", "step 1"]
    assert (marks.filter(pl.col("kind") != "cell")["end_us"] >= marks.filter(pl.col("kind") != "cell")["time_us"]).all()


def test_bytes_of_an_expert_are_its_tokens_times_what_a_routed_token_keeps() -> None:
    """Mixtral of 8 layers and 8 experts, bf16: input, gate and up, activation, product and output of each routed token, and 29 bytes of indices."""
    made = mp.layers(capture("mixtral_small"), by="expert")
    tokens = numbers("mixtral_small")["truth"]["experts"]
    assert [part["tokens"].to_list() for part in made.partition_by("layer", maintain_order=True)] == tokens
    each = 2 * (1024 + 2 * 2048 + 2048 + 2048 + 1024) + 29
    assert made["activations_bytes"].to_list() == [count * each for layer in tokens for count in layer]
    assert made["weights_bytes"].unique().to_list() == [2 * (2 * 2048 * 1024 + 1024 * 2048)]
    whole = mp.layers(capture("mixtral_small")).filter(pl.col("name") == "experts")["activations_bytes"].sum()
    rest = whole - made["activations_bytes"].sum()
    assert 0 <= rest < 8 * 8192  # offsets, kept once a layer: less than a byte for each of its 8192 routed tokens


def test_a_cache_on_an_h200_knows_its_sequences_tokens_and_growth() -> None:
    """Llama of 8 B parameters, batch 4, 1024 tokens and 7 more that are cached."""
    row = mp.kv_cache(capture("llama8b_generate")).row(0, named=True)
    assert (row["cache"], row["layers"], row["sequences"], row["tokens"]) == ("DynamicCache", 32, 4, 1031)
    assert (row["bytes_per_token"], row["requested_bytes"]) == (131_072, numbers("llama8b_generate")["truth"]["kv_cache"])
    assert row["growth_per_step_bytes"] == 4 * 131_072
    assert (row["padding_bytes"], row["room_bytes"]) == (0, 0)
    assert row["fits_sequences"] == row["free_bytes"] // row["bytes_per_sequence"] > 100
    assert row["int8_saves_bytes"] == int(row["requested_bytes"] * (1 - (1 + 2 / 64) / 2))


def test_marks_of_steps_name_the_last_event_before_them() -> None:
    made = capture("gpt2_fp32")
    steps = made.marks.filter(pl.col("kind").cast(pl.String) == "step").sort("time_us")
    contexts = made.tables["contexts"]
    assert steps["seq"][0] is None, "nothing was recorded before the first"
    for number, seq in enumerate(steps["seq"][1:].to_list(), 1):
        assert contexts.filter(pl.col("seq") <= seq)["step"].max() == number - 1
        assert contexts.filter(pl.col("seq") > seq)["step"].min() == number


def test_the_pool_of_a_cuda_graph_is_named() -> None:
    found = by_category("graphed", "peak")
    assert found["cuda_graph"] == 234881096


@pytest.mark.parametrize("name", ["gpt2_fp32", "llama1b_lora", "resnet50"])
def test_without_notes_the_clock_and_the_stacks_tell_the_same(name: str) -> None:
    """The same events and log, read as from a torch whose threads carry no notes, or from the user's own history."""
    made, noted = play(name, notes=False), by_category(name, "peak")
    found = mp.breakdown(made)
    clocked = dict(zip(found["category"].cast(pl.String), found["requested_bytes"], strict=True))
    total = sum(noted.values())
    assert sum(clocked.values()) == total
    assert sum(abs(clocked.get(c, 0) - noted.get(c, 0)) for c in {*clocked, *noted}) <= 0.01 * total
    assert {c: clocked.get(c) for c in EXACT} == {c: noted.get(c) for c in EXACT}
