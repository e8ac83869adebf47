"""The habits of notebooks under fake tensors: each in a fake run of its own, all in one fresh process, whose word on each comes as it goes."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # as in conftest, for the process that runs this file
from prediction.habit_table import HABITS

from nbmemprof.prediction import catalogue
from nbmemprof.prediction.engine import Session
from nbmemprof.prediction.habit_operators import unknown_operator

torch = pytest.importorskip("torch")


def run_one(code: str, name: str, tmp: str) -> dict:
    record: dict = {"failed": None}
    try:
        with Session(catalogue.find("H200")) as session:
            exec(compile(code, name, "exec"), {"torch": torch, "nn": torch.nn, "F": torch.nn.functional, "math": math, "tmp": tmp})
            record["assumed"] = list(session.record.assumptions)
    except BaseException as error:
        record["failed"] = "".join(traceback.format_exception(error))[-1500:]
        record["word"] = unknown_operator(error)
    return record


def run_all(tmp: str) -> None:
    torch.set_num_threads(1)
    torch.save({"w": torch.randn(3, 4)}, f"{tmp}/real.pt")
    with open(f"{tmp}/outcomes.jsonl", "w") as told:
        for name, code in (HABITS | OTHERS).items():
            signal.alarm(60)  # one that hangs ends the process, and the rest fails with it
            print(json.dumps([name, run_one(code, name, tmp)]), file=told, flush=True)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[str, dict]:
    tmp = tmp_path_factory.mktemp("habits")
    subprocess.run([sys.executable, __file__, str(tmp)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    return dict(json.loads(line) for line in (tmp / "outcomes.jsonl").read_text().splitlines())


OTHERS = {"no kernel for fakes": "i = torch.tensor([[0, 1], [1, 0]]).cuda()\ntorch.sparse.mm(torch.sparse_coo_tensor(i, torch.ones(2, device='cuda'), (2, 2)), torch.randn(2, 4, device='cuda'))"}


@pytest.mark.cost(0.15)
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_runs(outcomes, name):
    assert name in outcomes, "the child ended before it came to this"
    assert outcomes[name]["failed"] is None, outcomes[name]["failed"]


def test_what_could_not_be_done_as_on_a_gpu_is_among_the_assumptions(outcomes):
    assert any("torch.compile" in text for text in outcomes["compile"]["assumed"])
    assert any("checkpoints are kept" in text for text in outcomes["save and load"]["assumed"])
    assert any("array" in text for text in outcomes["numpy of a result"]["assumed"])
    assert outcomes["numpy of labels"]["assumed"] == []


def test_an_operator_without_a_kernel_is_named(outcomes):
    outcome = outcomes["no kernel for fakes"]
    assert outcome["failed"]
    assert "aten::_sparse_addmm has no kernel for fake tensors" in outcome["word"]


def test_torch_is_as_it_was_after_a_fake_run(outcomes):
    """Here, where no fake run was: and so in the child after each, or the next would have failed."""
    assert torch.Tensor.numpy is torch._C.TensorBase.numpy
    assert "numpy" not in vars(torch.Tensor)


if __name__ == "__main__":
    run_all(sys.argv[1])
