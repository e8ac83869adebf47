"""KV caches: bytes of a token and a sequence are the model's arithmetic, and waste is what nobody reads."""

from __future__ import annotations

from typing import Any

import pytest
from attribution_played import play

import nbmemprof as mp
from nbmemprof.views.findings import findings

torch: Any = pytest.importorskip("torch")

LAYERS, HEADS, WIDTH = 2, 2, 16
TOKEN = 2 * LAYERS * HEADS * WIDTH * 4  # keys and values, fp32


@pytest.fixture(scope="module")
def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=HEADS, vocab_size=500)
    return transformers.LlamaForCausalLM(config).eval()


def generate(model: Any, tokens: Any, mask: Any, **more: Any) -> Any:
    return model.generate(tokens, attention_mask=mask, max_new_tokens=10, min_new_tokens=10, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **more)


@pytest.mark.cost(1.2)
def test_a_growing_cache_is_the_models_arithmetic_and_padding_is_told(llama: Any) -> None:
    tokens = torch.randint(5, 500, (3, 20))
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    with mp.record() as rec:
        held = generate(llama, tokens, mask)
    row = mp.kv_cache(rec.capture, capacity_bytes=1 << 24).row(0, named=True)
    length = held.sequences.shape[1] - 1  # the last token is not cached
    assert (row["sequences"], row["tokens"], row["room_tokens"], row["layers"]) == (3, length, length, LAYERS)
    assert (row["bytes_per_token"], row["bytes_per_sequence"], row["requested_bytes"]) == (TOKEN, TOKEN * length, 3 * TOKEN * length)
    assert row["growth_per_step_bytes"] == 3 * TOKEN
    assert (row["padding_bytes"], row["room_bytes"]) == (7 * TOKEN, 0)
    assert row["peak_bytes"] >= row["requested_bytes"]
    assert row["fits_sequences"] == row["free_bytes"] // (TOKEN * length) > 0
    assert row["free_bytes"] == (1 << 24) - mp.summary(rec.capture)["end_allocated_bytes"].item()


@pytest.mark.cost(0.6)
def test_a_static_cache_has_room_that_nobody_uses(llama: Any) -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.StaticCache(config=llama.config, max_cache_len=64)
    tokens = torch.randint(5, 500, (3, 20))
    with mp.record() as rec, torch.no_grad():
        llama(tokens, past_key_values=cache)
    row = mp.kv_cache(rec.capture).row(0, named=True)
    assert (row["tokens"], row["room_tokens"], row["requested_bytes"]) == (20, 64, 3 * 64 * TOKEN)
    assert row["room_bytes"] == 3 * (64 - 20) * TOKEN
    assert row["fits_sequences"] is None  # nobody said how large the card is


def test_a_paged_cache_that_is_tagged_wastes_the_end_of_its_blocks() -> None:
    """Four blocks of 16 tokens, 32 bytes each, for sequences of 17 and 20 tokens."""

    class Blocks:
        def __init__(self) -> None:
            self.table = torch.zeros(4, 16, 32, dtype=torch.uint8)

    with mp.record() as rec:
        held = mp.tag(Blocks(), "kv_cache")
    row = mp.kv_cache(rec.capture, tokens=[17, 20], block_tokens=16).row(0, named=True)
    assert (row["sequences"], row["bytes_per_token"], row["requested_bytes"]) == (2, 32.0, 2048)
    assert row["room_bytes"] == (64 - 37) * 32
    assert mp.kv_cache(rec.capture).row(0, named=True)["bytes_per_token"] is None
    del held


@pytest.mark.cost(0.5)
def test_a_generation_of_an_8b_model_on_an_h200_takes_131072_bytes_a_token() -> None:
    """Llama of 8 B parameters: 32 layers, 8 heads of 128, bf16; batch 4, 1024 tokens and 7 more."""
    capture = play("llama8b_generate")
    row = mp.kv_cache(capture, sequences=4, tokens=[1031] * 4).row(0, named=True)
    assert (row["bytes_per_token"], row["requested_bytes"]) == (131_072, 540_540_928)
    assert row["peak_bytes"] == 540_540_928 + 4 * 1030 * 131_072 // 64  # the old keys or values of one layer, while the new are made
    assert any(s.startswith("The KV cache (DynamicCache) takes 128 KiB for a token, 128.9 MiB for each of 4 sequences of") and " more of that length would fit into " in s for s in findings(capture))


def test_without_a_cache_there_is_no_row_and_strange_numbers_are_refused() -> None:
    with mp.record() as rec:
        held = torch.zeros(100)
    assert mp.kv_cache(rec.capture).is_empty()
    with pytest.raises(mp.NbmemprofError, match="1 or more"):
        mp.kv_cache(rec.capture, tokens=0)
    with pytest.raises(mp.NbmemprofError, match="tokens='many' is no whole number"):
        mp.kv_cache(rec.capture, tokens="many")
    del held
