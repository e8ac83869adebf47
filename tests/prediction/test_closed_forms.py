"""Models by formula: parameters against transformers' own count, peaks against an H200, KV caches against arithmetic."""

from __future__ import annotations

import json

import pytest

from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction.closed_forms import OPTIMIZERS, kv_cache_bytes, model_table, total_bytes
from nbmemprof.prediction.shapes import shape_of

MIB = 1 << 20
TINY = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500}
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5,
}  # fmt: skip
LLAMA_1B = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 64,
    "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
}  # fmt: skip
DEEPSEEK = {
    "n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 48, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 16, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.cost(0.3)
@pytest.mark.parametrize(
    ("model", "config", "more"),
    [
        ("GPT2LMHeadModel", "GPT2Config", {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 500, "n_positions": 64}),
        ("LlamaForCausalLM", "LlamaConfig", TINY | {"num_key_value_heads": 2}),
        ("LlamaForCausalLM", "LlamaConfig", TINY | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("MistralForCausalLM", "MistralConfig", TINY | {"num_key_value_heads": 2, "head_dim": 32}),
        ("Qwen2ForCausalLM", "Qwen2Config", TINY | {"num_key_value_heads": 2}),
        ("Qwen3ForCausalLM", "Qwen3Config", TINY | {"num_key_value_heads": 2, "head_dim": 16}),
        ("MixtralForCausalLM", "MixtralConfig", TINY | {"num_key_value_heads": 2, "num_local_experts": 4}),
        ("DeepseekV3ForCausalLM", "DeepseekV3Config", TINY | DEEPSEEK),
        ("BertForMaskedLM", "BertConfig", TINY | {"max_position_embeddings": 128}),
    ],
)
def test_parameters_are_counted_exactly(model, config, more):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    made = getattr(transformers, config)(**more)
    with torch.device("meta"):
        truth = sum(p.numel() for p in getattr(transformers, model)(made).parameters())
    assert shape_of(made).parameters == truth
    assert shape_of(made.to_dict() | {"model_type": made.model_type}).parameters == truth


@pytest.mark.parametrize(
    ("config", "setting", "measured_mib"),
    [  # peaks of an H200, torch 2.11, transformers 5.17; two or three steps, scaled-dot-product attention unless said
        (GPT2, {"batch": 8, "dtype": "fp32"}, 14470.8),
        (GPT2, {"batch": 4, "dtype": "fp32"}, 7999.0),
        (GPT2, {"batch": 8, "dtype": "fp32", "checkpointing": True}, 6546.1),
        (GPT2, {"batch": 4, "dtype": "fp32", "attention": "eager"}, 13179.2),
        (LLAMA_1B, {"batch": 2, "seq": 2048}, 20006.5),
        (LLAMA_1B, {"batch": 4, "seq": 2048, "checkpointing": True}, 19801.0),
        (LLAMA_8B, {"batch": 1, "seq": 512, "optimizer": "none"}, 15470.8),
        (LLAMA_8B, {"batch": 1, "seq": 8192, "optimizer": "none"}, 17304.6),
        (LLAMA_8B, {"batch": 8, "seq": 2048, "optimizer": "none"}, 19253.6),
    ],
)
def test_peaks_are_within_one_percent_of_an_h200(config, setting, measured_mib):
    assert total_bytes(model_table(config, **setting)) / MIB == pytest.approx(measured_mib, rel=0.01)


def test_a_token_of_llama_8b_takes_131072_bytes():
    assert kv_cache_bytes(LLAMA_8B, 1) == 2 * 32 * 8 * 128 * 2 == 131072
    assert kv_cache_bytes(LLAMA_8B, 100, 3) == 300 * 131072
    assert kv_cache_bytes(LLAMA_8B, 1, dtype="fp8") == 65536


def test_latent_attention_keeps_1152_bytes_a_token_and_layer():
    config = LLAMA_8B | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    assert kv_cache_bytes(config, 1) == 32 * 1152


def test_a_window_stops_the_cache_and_pages_are_paid_whole():
    assert kv_cache_bytes(LLAMA_8B | {"sliding_window": 4096}, 100_000) == kv_cache_bytes(LLAMA_8B, 4096)
    mixed = LLAMA_8B | {"sliding_window": 10, "layer_types": ["sliding_attention"] * 16 + ["full_attention"] * 16}
    assert kv_cache_bytes(mixed, 100) == (16 * 10 + 16 * 100) * 4096
    assert kv_cache_bytes(LLAMA_8B, 1000, block=16) == 1008 * 131072


def test_each_moment_of_the_optimizer_is_a_row_by_its_name():
    table = model_table(GPT2, dtype="fp32", optimizer="amsgrad")
    states = table.filter(part="optimizer_state")
    assert states["component"].to_list() == ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]
    assert states["size_bytes"].to_list() == [124_439_808 * 4] * 3
    assert set(table["origin"]) == {"modelled"}
    assert table.filter(part="activations", component="layer")["layer"].to_list() == list(range(12))


def test_ranks_share_weights_gradients_and_states():
    alone, eight = (model_table(LLAMA_8B, fsdp=n).filter(part="optimizer_state")["size_bytes"].sum() for n in (1, 8))
    assert alone == 8 * eight
    assert "gathered blocks" in model_table(LLAMA_8B, fsdp=8)["component"].to_list()
    one, four = (model_table(LLAMA_8B, tp=n).filter(component="layer")["size_bytes"].sum() for n in (1, 4))
    assert four / one == pytest.approx((10 + 24 / 4) / 34)


def test_frozen_parts_have_no_gradient_and_quantized_ones_are_smaller():
    table = model_table(LLAMA_8B, trainable=0.01, quantize="nf4")
    full = model_table(LLAMA_8B)
    assert table.filter(part="gradients")["size_bytes"].item() == pytest.approx(0.01 * full.filter(part="gradients")["size_bytes"].item(), rel=1e-6)
    matrices = [t.filter(component="matrices of the layers")["size_bytes"].item() for t in (table, full)]
    assert matrices[0] / matrices[1] == pytest.approx((0.5 + 1 / 16) / 2)


@pytest.mark.parametrize(
    ("config", "setting", "words"),
    [
        ({"model_type": "t5"}, {}, "no closed form for model_type='t5'"),
        ({"model_type": "gpt2", "n_embd": 8, "n_head": 2}, {}, "n_layer=None"),
        (GPT2, {"dtype": "fp5"}, "dtype='fp5'"),
        (GPT2, {"optimizer": "lion"}, "optimizer='lion'"),
        (GPT2, {"quantize": "sparse"}, "zeros take as much room"),
        (GPT2, {"tp": 0}, "tp=0"),
        (3, {}, "int is not a config"),
        ("/nowhere/config.json", {}, "is no config.json"),
    ],
)
def test_what_can_not_be_computed_says_why(config, setting, words):
    with pytest.raises(NbmemprofError, match=words):
        model_table(config, **setting)


def test_a_config_file_and_its_folder_are_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    assert shape_of(tmp_path) == shape_of(str(tmp_path / "config.json")) == shape_of(GPT2)


def test_every_optimizer_has_a_table():
    for name in OPTIMIZERS:
        assert total_bytes(model_table(GPT2, optimizer=name)) > 124_439_808 * 2
