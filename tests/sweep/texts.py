"""Texts and speech: transformers' models of many kinds with random weights, training and generation."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sweep.common import DEVICE, ids, randn, train


def made(name: str, dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:
    """A model of transformers with random weights."""
    import transformers

    family, _, _ = name.partition("For")
    family = family.removesuffix("LMHeadModel").removesuffix("Model")
    config = getattr(transformers, f"{family}Config")(**sizes)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(DEVICE):
            return getattr(transformers, name)(config).train()
    finally:
        torch.set_default_dtype(before)


def swin_fp32() -> None:
    net = made("SwinForImageClassification", image_size=224, embed_dim=96, depths=[2, 2, 4, 2], num_heads=[3, 6, 12, 24], num_labels=1000)
    train(lambda: net(pixel_values=randn(24, 3, 224, 224), labels=ids(1000, 24)).loss, torch.optim.AdamW(net.parameters(), lr=1e-4))


def segformer_bf16() -> None:
    net = made("SegformerForSemanticSegmentation", num_labels=19)
    train(lambda: net(pixel_values=randn(8, 3, 256, 256), labels=ids(19, 8, 256, 256)).loss, torch.optim.AdamW(net.parameters(), lr=1e-4), autocast=torch.bfloat16)


def mobilenet_fp32() -> None:
    net = made("MobileNetV2ForImageClassification", num_labels=1000)
    train(lambda: net(pixel_values=randn(32, 3, 224, 224), labels=ids(1000, 32)).loss, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))


def whisper_fp16() -> None:
    net = made("WhisperForConditionalGeneration", d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536)
    train(lambda: net(input_features=randn(8, 80, 3000), labels=ids(51865, 8, 128)).loss, torch.optim.AdamW(net.parameters(), lr=1e-4), autocast=torch.float16, scaled=True, clip=1.0)


def mamba_fp32() -> None:
    net = made("MambaForCausalLM", hidden_size=512, num_hidden_layers=4, vocab_size=32000)

    def loss() -> Any:
        x = ids(32000, 4, 128)
        return net(input_ids=x, labels=x).loss

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-4), steps=2)


def t5_gated_adafactor() -> None:
    net = made("T5ForConditionalGeneration", d_model=512, d_kv=64, d_ff=1024, num_layers=6, num_heads=6, feed_forward_proj="gated-gelu", decoder_start_token_id=0, tie_word_embeddings=False)

    def loss() -> Any:
        x, y = ids(32000, 12, 384), ids(32000, 12, 96)
        mask = torch.ones_like(x)
        mask[:, 300:] = 0
        y[:, 80:] = -100
        return net(input_ids=x, attention_mask=mask, labels=y).loss

    train(loss, torch.optim.Adafactor(net.parameters(), lr=1e-3))


def distilbert_lengths() -> None:
    net = made("DistilBertForSequenceClassification", num_labels=2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-5)
    for step in range(2):
        for length in (256, 128, 384, 200):
            x = ids(30522, 32, length - step)
            (net(input_ids=x, attention_mask=torch.ones_like(x), labels=ids(2, 32)).loss / 4).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def deberta_fp32() -> None:
    net = made("DebertaV2ForTokenClassification", hidden_size=768, num_hidden_layers=4, num_attention_heads=12, intermediate_size=3072, vocab_size=128100, relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm", share_att_key=True, pos_att_type=["p2c", "c2p"], num_labels=9)
    train(lambda: net(input_ids=ids(128000, 8, 256), attention_mask=torch.ones(8, 256, dtype=torch.long, device=DEVICE), labels=ids(9, 8, 256)).loss, torch.optim.AdamW(net.parameters(), lr=1e-5), steps=2)


def bart_train_generate() -> None:
    net = made("BartForConditionalGeneration", d_model=512, encoder_layers=4, decoder_layers=4, encoder_attention_heads=8, decoder_attention_heads=8, encoder_ffn_dim=2048, decoder_ffn_dim=2048)
    train(lambda: net(input_ids=ids(50000, 16, 256), labels=ids(50000, 16, 64)).loss, torch.optim.AdamW(net.parameters(), lr=1e-4), steps=2)
    net.eval()
    with torch.no_grad():
        x = ids(50000, 8, 256)
        net.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=16, min_new_tokens=16, num_beams=4)


def wav2vec_ctc() -> None:
    net = made("Wav2Vec2ForCTC", num_hidden_layers=4, vocab_size=32, mask_time_prob=0.0, ctc_loss_reduction="mean", pad_token_id=31)
    train(lambda: net(input_values=randn(4, 64000), labels=ids(31, 4, 40)).loss, torch.optim.AdamW(net.parameters(), lr=1e-5))


def qwen_checkpointed() -> None:
    net = made("Qwen2ForCausalLM", torch.bfloat16, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, vocab_size=65536, tie_word_embeddings=True)
    net.gradient_checkpointing_enable()

    def loss() -> Any:
        x = ids(65536, 4, 1024)
        return net(input_ids=x, labels=x, use_cache=False).loss

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True), clip=1.0)


def gemma_bf16() -> None:
    net = made("Gemma2ForCausalLM", torch.bfloat16, hidden_size=768, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=6, num_key_value_heads=2, head_dim=128, vocab_size=100000, sliding_window=256, attn_implementation="eager")

    def loss() -> Any:
        x = ids(100000, 2, 512)
        return net(input_ids=x, labels=x, use_cache=False).loss

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-4))


def bloom_bf16() -> None:
    net = made("BloomForCausalLM", hidden_size=768, n_layer=4, n_head=12, vocab_size=50000)

    def loss() -> Any:
        x = ids(50000, 4, 512)
        return net(input_ids=x, labels=x, use_cache=False).loss

    train(loss, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1), autocast=torch.bfloat16)


def qwen_experts() -> None:
    net = made("Qwen2MoeForCausalLM", torch.bfloat16, hidden_size=768, intermediate_size=2048, moe_intermediate_size=512, shared_expert_intermediate_size=1024, num_experts=16, num_experts_per_tok=4, num_hidden_layers=4, num_attention_heads=12, num_key_value_heads=4, vocab_size=50000, output_router_logits=True)

    def loss() -> Any:
        x = ids(50000, 4, 512)
        return net(input_ids=x, labels=x, use_cache=False).loss

    train(loss, torch.optim.AdamW(net.parameters(), lr=1e-4))


def longformer_fp32() -> None:
    net = made("LongformerForSequenceClassification", num_hidden_layers=3, attention_window=256, max_position_embeddings=2050, vocab_size=30000, num_labels=4)
    train(lambda: net(input_ids=ids(30000, 4, 1024).clamp(min=3), attention_mask=torch.ones(4, 1024, dtype=torch.long, device=DEVICE), labels=ids(4, 4)).loss, torch.optim.AdamW(net.parameters(), lr=1e-5), steps=2)


def preference_pairs() -> None:
    net = made("GPT2LMHeadModel", n_layer=6, vocab_size=32000)
    other = copy.deepcopy(net).eval().requires_grad_(requires_grad=False)

    def told(model: Any, x: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=x, use_cache=False).logits[:, :-1]
        return torch.gather(logits.log_softmax(-1), 2, x[:, 1:, None]).squeeze(2).sum(-1)

    def loss() -> torch.Tensor:
        x = ids(32000, 8, 256)
        mine = told(net, x)
        with torch.no_grad():
            theirs = told(other, x)
        good, bad = (mine - theirs).chunk(2)
        return -F.logsigmoid(0.1 * (good - bad)).mean()

    train(loss, torch.optim.RMSprop(net.parameters(), lr=1e-6), autocast=torch.bfloat16)


def static_cache() -> None:
    net = made("LlamaForCausalLM", torch.float16, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8, vocab_size=32000).eval()
    x = ids(32000, 4, 500)
    with torch.inference_mode():
        net.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=12, min_new_tokens=12, do_sample=False, cache_implementation="static", pad_token_id=0)


def falcon_greedy_loop() -> None:
    net = made("FalconForCausalLM", torch.bfloat16, hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, vocab_size=50000, new_decoder_architecture=False, multi_query=True).eval()
    x, past = ids(50000, 4, 700), None
    with torch.no_grad():
        for _ in range(8):
            made_of = net(input_ids=x, past_key_values=past, use_cache=True)
            past, x = made_of.past_key_values, made_of.logits[:, -1].argmax(-1, keepdim=True)


def albert_accumulated() -> None:
    net = made("AlbertForMaskedLM", hidden_size=768, num_attention_heads=12, intermediate_size=3072, num_hidden_layers=6)
    optimizer = torch.optim.NAdam(net.parameters(), lr=1e-4)
    for _ in range(2):
        for _ in range(2):
            x = ids(30000, 12, 256)
            mask = torch.arange(256, device=DEVICE)[None] < torch.linspace(100, 256, 12, device=DEVICE)[:, None]
            with torch.autocast("cuda", torch.bfloat16):
                loss = net(input_ids=x, attention_mask=mask.long(), labels=x.masked_fill(~mask, -100)).loss
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def vit_half_last() -> None:
    net = made("ViTForImageClassification", num_hidden_layers=6, num_labels=1000, hidden_dropout_prob=0.1)
    train(lambda: net(pixel_values=randn(48, 3, 224, 224), labels=ids(1000, 48)).loss, torch.optim.Adam(net.parameters(), lr=1e-4, foreach=False), autocast=torch.float16, scaled=True)


WORKLOADS = (
    swin_fp32, segformer_bf16, mobilenet_fp32, whisper_fp16, mamba_fp32, t5_gated_adafactor, distilbert_lengths, deberta_fp32, bart_train_generate, wav2vec_ctc, qwen_checkpointed, gemma_bf16, bloom_bf16, qwen_experts, longformer_fp32,
    preference_pairs, static_cache, falcon_greedy_loop, albert_accumulated, vit_half_last,
)  # fmt: skip
