"""Torch's internals changed under the predictor, slot by slot: what is not where it was is refused with a word, and nothing crashes."""

from __future__ import annotations

import importlib
import pickle

import pytest

torch = pytest.importorskip("torch")
importlib.import_module("torch._dynamo")  # what every fake run imports: forks of this process have it already

from nbmemprof.prediction import legal
from nbmemprof.prediction.catalogue import find
from nbmemprof.prediction.child import Limits, forked
from nbmemprof.prediction.engine import fake_run

SLOTS = 40


def step() -> None:
    torch.nn.Linear(3, 3).cuda()(torch.zeros(2, 3, device="cuda")).sum().backward()


def outcome(name: str, slot: int) -> str:
    """What a process says that takes ``slot`` for the one that ``name`` means."""

    def run(line) -> None:
        setattr(legal, name, slot)
        try:
            fake_run(step, device_row=find("H200"))
            word = "worked"
        except legal.CantFake as error:
            word = f"refused: {error}"
        line.send_bytes(pickle.dumps(("done", word)))

    child = forked(run, Limits(seconds=60))
    try:
        return child.listen(lambda _message: None, Limits(seconds=60))[1]
    finally:
        child.close()


@pytest.mark.soak
@pytest.mark.parametrize("name", ["_BUILT", "_CONTEXT"])
def test_every_other_slot_is_refused_with_a_word(name):
    said = {slot: outcome(name, slot) for slot in range(SLOTS)}
    assert said.pop(getattr(legal, name)) == "worked"
    assert {slot: word for slot, word in said.items() if not word.startswith("refused: Fake CUDA tensors can't be set up with torch")} == {}
    print(f"\ntorch {torch.__version__}, {name}: {len(said)} other slots refused, none crashed")
