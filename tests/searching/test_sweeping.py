"""Settings side by side: by formula for a config, by fake runs for a function, and rows of ranks by formula on top of them."""

from __future__ import annotations

import pytest

import nbmemprof as mp
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError
from nbmemprof.searching import sweeping
from nbmemprof.searching.fakes import FakeBench, NothingOnTheDevice

GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
MIB = 1 << 20


def two_steps(batch: int, width: int = 512) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(batch, width, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_config_is_computed_for_every_combination():
    rows = mp.sweep(GPT2, batch=[1, 8], checkpointing=[False, True], dtype="fp32", device="A100-40GB")
    assert rows.height == 4
    assert rows.columns[:3] == ["batch", "checkpointing", "dtype"]
    assert set(rows["origin"]) == {"modelled"}
    by = {(r["batch"], r["checkpointing"]): r["peak_allocated_bytes"] for r in rows.to_dicts()}
    assert by[8, True] < by[8, False]
    assert by[1, False] < by[8, False]


def test_what_does_not_fit_is_told():
    rows = mp.sweep(GPT2, batch=[1, 64], dtype="fp32", device="T4")
    assert rows["fits"].to_list() == [True, False]
    assert rows["headroom_bytes"][1] < 0


def test_unstructured_pruning_is_answered_with_a_word():
    rows = mp.sweep(GPT2, batch=1, pruning=0.5)
    assert "saves no memory" in rows["how"].item()
    assert rows["peak_allocated_bytes"].item() == mp.sweep(GPT2, batch=1)["peak_allocated_bytes"].item()


def test_an_axis_that_nothing_takes_is_refused():
    with pytest.raises(NbmemprofError, match="no setting 'colour'"):
        mp.sweep(GPT2, colour=["red"])
    with pytest.raises(NbmemprofError, match="takes no 'seq'"):
        mp.sweep(two_steps, seq=[1])
    with pytest.raises(NbmemprofError, match="something to vary"):
        mp.sweep(GPT2)


@pytest.mark.cost(1.3)
def test_a_function_is_predicted_and_its_requests_are_served_again_under_other_settings():
    pytest.importorskip("torch")
    rows = mp.sweep(two_steps, batch=[1024, 8192], conf=["", "expandable_segments:True"], fsdp=[1, 4])
    assert rows.columns[:3] == ["batch", "conf", "fsdp"]
    assert rows["origin"].to_list() == ["predicted", "modelled"] * 4
    whole = rows.filter(fsdp=1)
    assert whole["peak_allocated_bytes"].to_list()[0] == whole["peak_allocated_bytes"].to_list()[1]
    assert (whole["peak_reserved_bytes"] >= whole["peak_allocated_bytes"]).all()
    assert rows.filter(fsdp=4)["peak_reserved_bytes"].null_count() == 4
    assert "ZeRO-3 over 4" in rows.filter(fsdp=4)["how"][0]


@pytest.mark.cost(2.2)
def test_the_largest_batch_without_a_gpu_is_predicted_and_confirmed_by_fake_runs():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU: the search would be a real one")

    def setup():
        model = torch.nn.Linear(1024, 1024, device="cuda")
        return model, torch.optim.AdamW(model.parameters())

    def step(state, batch):
        model, optimizer = state
        model(torch.randn(batch, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    result = mp.max_batch(step, 16, setup=setup, limit_bytes="256MiB")
    assert result.exact
    assert result.origin == "predicted"
    assert (result.tries["batch"].to_list()[-1], result.ooms) in ((result.batch + 1, 1), (result.batch, 2))
    assert len(result.made) <= 8


@pytest.mark.cost(0.6)
def test_a_step_without_cuda_tensors_asks_nothing_of_the_device():
    pytest.importorskip("torch")
    from nbmemprof.prediction.catalogue import find

    with pytest.raises(NothingOnTheDevice, match="asked for no memory of a CUDA device"):
        FakeBench(lambda batch: None, None, find("H200")).run(1, "probe")


@pytest.mark.cost(3)
def test_a_step_whose_tensors_die_within_it_is_predicted_too():
    torch = pytest.importorskip("torch")

    def step(batch: int) -> None:
        torch.zeros(batch << 20, device="cuda")

    result = mp.max_batch(step, 8, 8, limit_bytes="64MiB")
    assert (result.batch, result.origin) == (8, "predicted")


@pytest.mark.cost(0.3)
def test_a_data_type_of_torch_is_text_and_the_table_can_be_written():
    torch = pytest.importorskip("torch")

    def made(dtype):
        torch.zeros(MIB, dtype=dtype, device="cuda")

    rows = mp.sweep(made, dtype=[torch.bfloat16])
    assert rows["dtype"].to_list() == ["bfloat16"]
    assert rows.write_csv().splitlines()[1].startswith("bfloat16,")


def test_an_axis_of_things_that_no_table_holds_is_named():
    assert [sweeping._plain(value) for value in (1, 0.5, "fp32", None, sweep_of, (1, 2))] == [1, 0.5, "fp32", None, "sweep_of", "(1, 2)"]


def sweep_of() -> None:
    """A value of an axis that is a function."""


def test_captures_are_not_run_and_the_way_to_compare_them_is_named():
    a, b = (Capture.build({}, source="none", origin="measured") for _ in range(2))
    with pytest.raises(NbmemprofError) as told:
        mp.compare(big=a, small=b)
    assert (
        str(told.value)
        == "compare runs functions, not captures: it was given big (a value of type Capture), small (a value of type Capture). Write mp.diff(big, small) for what one holds more than the other."
    )
    with pytest.raises(NbmemprofError, match=r"step \(a value of type int\)\. Give each as a function"):
        mp.compare(step=3)
    with pytest.raises(NbmemprofError, match="none was given"):
        mp.compare()
