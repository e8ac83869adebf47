"""The experts of a mixture: what each holds is its tokens times what a routed token keeps."""

from __future__ import annotations

from typing import Any

import polars as pl
import pytest
from attribution_played import play

import nbmemprof as mp

torch: Any = pytest.importorskip("torch")

EXPERTS, WIDTH, INNER = 4, 64, 32


@pytest.fixture(scope="module")
def mixtral() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=500, num_local_experts=EXPERTS
    )
    return transformers.MixtralForCausalLM(config)


@pytest.mark.cost(1.5)
@pytest.mark.parametrize(("how", "each"), [("grouped_mm", 4 * (WIDTH + 2 * INNER + INNER + INNER + WIDTH)), ("eager", 4 * (WIDTH + 2 * INNER + INNER + INNER + WIDTH))])
def test_a_mixture_in_one_module_is_told_by_the_routers_choice(mixtral: Any, how: str, each: int) -> None:
    """Of a routed token its input, gate and up, activation, product and output are kept, fp32, and some bytes of indices."""
    mixtral.set_experts_implementation(how)
    tokens, chosen = torch.randint(5, 500, (3, 20)), []
    hooks = [layer.mlp.experts.register_forward_pre_hook(lambda _, args: chosen.append(torch.bincount(args[1].reshape(-1), minlength=EXPERTS).tolist())) for layer in mixtral.model.layers]
    with mp.record() as rec:
        mixtral(input_ids=tokens, labels=tokens).loss.backward()
    for hook in hooks:
        hook.remove()
    made = mp.layers(rec.capture, by="expert")
    assert [made.filter(pl.col("layer").str.contains(f"layers.{n}."))["tokens"].to_list() for n in range(2)] == chosen
    assert (made["activations_bytes"] == made["tokens"] * made["bytes_per_token"]).all()
    assert made["bytes_per_token"].n_unique() == 1 and each <= made["bytes_per_token"][0] <= each * 1.3
    assert made["weights_bytes"].unique().to_list() == [4 * (2 * INNER * WIDTH + WIDTH * INNER)]
    assert made["share"].sum() == pytest.approx(2)


class Mixture(torch.nn.Module):  # type: ignore[misc]
    """Experts that are modules of their own; each token goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU()) for _ in range(3)])

    def forward(self, x: Any, to: Any) -> Any:
        return [expert(x[to == n]) for n, expert in enumerate(self.experts)]


@pytest.mark.cost(0.3)
def test_experts_that_are_modules_are_measured_each() -> None:
    model, x, to = Mixture(), torch.randn(10, 8), torch.tensor([0] * 7 + [2] * 3)
    with mp.record() as rec:
        held = model(x, to)
    made = mp.layers(rec.capture, at="end", by="expert").filter(pl.col("layer") == "Mixture.experts")
    assert made.select("expert", "tokens").rows() == [(0, 7), (1, 0), (2, 3)]
    assert made["weights_bytes"].to_list() == [4 * (8 * 16 + 16)] * 3
    by_token = {row["expert"]: row["activations_bytes"] for row in made.to_dicts()}
    assert by_token[0] * 3 == by_token[2] * 7 > 0 == by_token[1]
    del held


def test_without_the_routers_choice_a_layers_experts_are_one_row() -> None:
    recorded = play("mixtral_small")
    dict.pop(recorded.tables, "routing")
    made = mp.layers(recorded, by="expert")
    assert made["expert"].null_count() == made.height == 8
    assert made["weights_bytes"].to_list() == [8 * (2 * 2048 * 1024 + 1024 * 2048) * 2] * 8


def test_a_model_without_experts_has_no_row() -> None:
    assert mp.layers(play("resnet50"), by="expert").is_empty()
