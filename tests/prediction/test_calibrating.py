"""What a look at the GPU corrects, with the two processes played."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from nbmemprof.prediction import calibrating, catalogue

RECORDED = Path(__file__).parents[1] / "fixtures" / "prediction" / "predicted_cells.json"
H200 = catalogue.find("H200")
GIB, MIB = 1 << 30, 1 << 20
CALL = ("torch.bfloat16", ((4, 16, 64),) * 3, (True,) * 3, None, False, True, False, True)


@pytest.fixture
def gpu(monkeypatch):
    """A GPU on which the user's process holds 800 MiB outside of 64 MiB reserved, and which others may use too."""
    state = SimpleNamespace(held=0, stirred=0, title=H200.title, none=False, kernels={CALL: "cudnn"})

    class Played:
        def __init__(self, target, _limits):
            self.watches = target.endswith("watch")
            self.asked = False

        def send(self, *_):
            self.asked = True

        def listen(self, keep, _limits):
            if self.watches and state.none:
                keep(("none", "there is no GPU here that torch can use"))
            elif self.watches and self.asked:
                keep(("free", 100 * GIB - state.held - state.stirred))
            elif not self.watches:
                state.held, state.stirred = 864 * MIB, state.stirred * 2
                keep(("used", state.title, "2.11.0", 64 * MIB, state.kernels))
            return ("done", True)

        def close(self):
            if not self.watches:
                state.held = 0

    monkeypatch.setattr(calibrating, "fresh", Played)
    monkeypatch.setattr(calibrating.time, "sleep", lambda _s: None)
    return state


def test_what_lies_outside_is_what_the_user_took_beyond_reserved(gpu):
    seen = calibrating.look({"blas"}, [CALL], H200)
    assert seen.outside_bytes == 800 * MIB
    row = calibrating.calibrated(H200, seen)
    assert (row.outside.context, row.outside.solver, row.outside.plus_minus) == (800, 800, 10)
    assert row.capacity_bytes == H200.capacity_bytes
    told = calibrating.told(H200, seen)["calibration"]
    assert (told["outside_bytes"], told["table_outside_mib"]) == (800 * MIB, H200.outside.blas)


@pytest.mark.parametrize(("what", "value", "why"), [("stirred", 3 * GIB, "another process"), ("title", "NVIDIA L4", "is NVIDIA L4, not NVIDIA H200"), ("none", True, "no GPU here")])
def test_where_it_can_not_be_told_nothing_is_corrected(gpu, what, value, why):
    setattr(gpu, what, value)
    seen = calibrating.look({"blas"}, [], H200)
    assert why in seen.why
    assert calibrating.calibrated(H200, seen) is H200
    assert why in calibrating.told(H200, seen)["warnings"][0]


def test_another_kernel_than_predicted_is_noticed(gpu):
    seen = calibrating.look(set(), [CALL], H200)
    assert calibrating.differs(SimpleNamespace(attention={CALL: "flash"}), seen)
    assert not calibrating.differs(SimpleNamespace(attention={CALL: "cudnn"}), seen)
    assert not calibrating.differs(SimpleNamespace(attention={}), seen)


def test_on_an_h200_each_way_of_predicting_a_cell_gave_what_the_cell_then_took():
    """And one real step saw what lies beside the allocator, and which attention ran."""
    rows = {row["name"]: row for row in json.loads(RECORDED.read_text())["cells"]}
    ways = ("forked: CUDA is not in use", "after a backward on the CPU", "fresh process: CUDA is in use", "calibrated", "in the session")
    real = rows["for real"]["summary"][0]
    assert rows["for real"]["origin"] == "measured"
    for way in ways:
        found = rows[way]["summary"][0]
        assert rows[way]["origin"] == "predicted", way
        assert [found[f"peak_{what}_bytes"] for what in ("allocated", "reserved")] == [real["peak_allocated_bytes"], real["peak_reserved_bytes"]], way
    seen = rows["calibrated"]["calibration"]
    assert seen["attention"] == ["cudnn", "efficient"]
    beside = [rows[way]["summary"][0]["outside_bytes"] for way in ("calibrated", "forked: CUDA is not in use", "for real")]
    assert beside[0] == round(seen["outside_bytes"] / MIB) * MIB
    assert max(beside) - min(beside) < 15 * MIB  # the table's, one look's, and the cell's own, in a process that has had more to do
