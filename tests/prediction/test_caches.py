"""A predicted KV cache is told as a recorded one (``tests/analyses/test_kv_cache.py``): by the model's arithmetic, and so are the parts of a model."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

import nbmemprof as mp

LAYERS, HEADS, WIDTH = 2, 2, 16
TOKEN = 2 * LAYERS * HEADS * WIDTH * 4  # keys and values, fp32
CONFIG = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS, vocab_size=500)
held: list[Any] = []


def model() -> Any:
    return transformers.LlamaForCausalLM(CONFIG).eval().cuda()


def ids() -> Any:
    return torch.randint(5, 500, (3, 20), device="cuda")


@pytest.mark.cost(0.8)
def test_a_growing_cache_is_the_models_arithmetic_and_padding_is_told():
    def step() -> None:
        tokens = ids()
        mask = torch.ones_like(tokens)
        mask[0, :7] = 0
        more = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
        held.append(model().generate(tokens, attention_mask=mask, **more))

    made = mp.predict(step)
    row = mp.kv_cache(made).row(0, named=True)
    assert (row["cache"], row["sequences"], row["tokens"], row["room_tokens"], row["layers"], row["origin"]) == ("DynamicCache", 3, 25, 25, LAYERS, "predicted")
    assert (row["bytes_per_token"], row["bytes_per_sequence"], row["requested_bytes"]) == (TOKEN, TOKEN * 25, 3 * TOKEN * 25)
    assert (row["growth_per_step_bytes"], row["padding_bytes"], row["room_bytes"]) == (3 * TOKEN, 7 * TOKEN, 0)
    assert row["fits_sequences"] == row["free_bytes"] // (TOKEN * 25) > 0
    assert not any("unknown integer" in one["what"] for one in made.meta["assumptions"])


@pytest.mark.cost(0.4)
def test_a_static_cache_has_room_that_nobody_uses():
    def step() -> None:
        cache = transformers.StaticCache(config=CONFIG, max_cache_len=64)
        with torch.no_grad():
            model()(ids(), past_key_values=cache)
        held.append(cache)

    row = mp.kv_cache(mp.predict(step)).row(0, named=True)
    assert (row["tokens"], row["room_tokens"], row["requested_bytes"], row["room_bytes"]) == (20, 64, 3 * 64 * TOKEN, 3 * (64 - 20) * TOKEN)


@pytest.mark.cost(0.5)
def test_in_training_keys_and_values_are_activations_and_parts_have_their_owners_names():
    def step() -> None:
        net, tokens = model().train(), ids()
        optimizer = torch.optim.AdamW(net.parameters())
        net(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
        optimizer.step()
        held.append((net, optimizer))

    made = mp.predict(step)
    assert mp.kv_cache(made).is_empty()
    named = {(row["category"], row["name"]): row["requested_bytes"] for row in mp.breakdown(made, at="end", by="name").iter_rows(named=True)}
    parts = made.tables["parameters"]
    weights = parts["size_bytes"].sum()
    assert named["weights", "weight"] == named["gradients", None] == named["optimizer_state", "exp_avg"] == named["optimizer_state", "exp_avg_sq"] == weights
    assert weights == 4 * (2 * 500 * 64 + 64 + LAYERS * (2 * 64 + 2 * 64 * 64 + 2 * 64 * HEADS * WIDTH + 3 * 64 * 128))
    assert parts.filter(parts["name"] == "weight").height == parts.height
    assert made.allocations.filter(made.allocations["category"].cast(str) == "inputs")["requested_bytes"].to_list() == [3 * 20 * 8]  # given by keyword, twice
