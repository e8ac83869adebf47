"""A predicted KV cache is told as a recorded one: the same run under fake tensors and for real on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

import nbmemprof as mp

CONFIG = transformers.LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=500)
SAME = (
    "cache", "layers", "sequences", "tokens", "room_tokens", "bytes_per_token", "bytes_per_sequence", "requested_bytes", "growth_bytes", "growth_per_step_bytes", "padding_bytes",
    "room_bytes", "int8_saves_bytes", "evidence",
)  # fmt: skip
held: list[Any] = []


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    held.clear()


def model(device: str) -> Any:
    return transformers.LlamaForCausalLM(CONFIG).eval().to(device)


def growing(device: str) -> None:
    tokens = torch.randint(5, 500, (3, 20), device=device)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    more = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    held.append((mask, model(device).generate(tokens, attention_mask=mask, **more)))


def static(device: str) -> None:
    cache = transformers.StaticCache(config=CONFIG, max_cache_len=64)
    with torch.no_grad():
        model(device)(torch.randint(5, 500, (3, 20), device=device), past_key_values=cache)
    held.append(cache)


def training(device: str) -> None:
    net = model(device).train()
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.randint(5, 500, (3, 20), device=device)
    net(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
    optimizer.step()
    held.append((net, optimizer))


def both(run: Any) -> tuple[mp.Capture, mp.Capture]:
    predicted = mp.predict(run, "cuda")
    with mp.record("torch_cpu") as rec:
        run("cpu")
    return predicted, rec.capture


@pytest.mark.cost(1.0)
@pytest.mark.parametrize("run", [growing, static])
def test_a_predicted_cache_is_the_recorded_one(run):
    predicted, recorded = (mp.kv_cache(one).select(SAME).rows() for one in both(run))
    assert predicted == recorded and len(predicted) == 1


@pytest.mark.cost(0.8)
def test_in_training_keys_and_values_are_activations_and_parts_have_their_owners_names():
    predicted, recorded = both(training)
    assert mp.kv_cache(predicted).is_empty()
    words = ("weights", "gradients", "optimizer_state", "inputs", "buffers")
    named = [{(row["category"], row["name"]): row["requested_bytes"] for row in mp.breakdown(one, at="end", by="name").iter_rows(named=True) if row["category"] in words and row["name"] != "step"} for one in (predicted, recorded)]
    assert named[0] == named[1] and ("optimizer_state", "exp_avg_sq") in named[0]
    assert sorted(predicted.tables["parameters"].rows()) == sorted(recorded.tables["parameters"].rows())
