"""``mp.predict`` as a caller meets it: what was decided above the function, what it prints and raises, and what is refused before it runs."""

from __future__ import annotations

import importlib
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import nbmemprof as mp
from nbmemprof.errors import NbmemprofError
from nbmemprof.prediction import raising
from nbmemprof.prediction.run import NothingOnTheDevice
from nbmemprof.views import findings, text

MIB = 1 << 20
device = "cuda" if torch.cuda.is_available() else "cpu"
weights = torch.zeros(2, MIB // 4).to(device)
other = torch.zeros(4, MIB // 4).to(device)


def step(batch: int = 8) -> None:
    print("batch", batch)
    made = torch.zeros(batch, MIB // 4, device=device) + weights[0]
    made.sum()


def peak(capture) -> int:
    return mp.summary(capture)["peak_allocated_bytes"].max()


@dataclass
class Options:
    lr: float = 1e-3
    place: str = "cuda" if torch.cuda.is_available() else "cpu"


options = Options(lr=1e-2)
chosen_elsewhere: Any = None  # a module that a test imports


def by_default(size: int, place: str = device) -> torch.Tensor:
    return torch.zeros(size, MIB // 4, device=place)


def around():
    place = "cuda" if torch.cuda.is_available() else "cpu"

    def inner() -> torch.Tensor:
        return torch.zeros(2, MIB // 4, device=place)

    return inner


closed = around()


def logged(ok: bool) -> torch.dtype:
    with open(__file__, encoding="utf-8"):
        return torch.float16 if ok else torch.float32


kind = logged(torch.cuda.is_available())


def of_a_kind() -> None:
    torch.zeros(MIB, device=device, dtype=kind)


def everywhere() -> None:
    held = [by_default(1), closed(), torch.zeros(4, MIB // 4, device=options.place), torch.zeros(8, MIB // 4, device=Options().place)]
    held.append(torch.zeros(16, MIB // 4, device=chosen_elsewhere.place))
    held.append(chosen_elsewhere.table + 0)


class Odd(Exception):
    def __init__(self, code: int, words: str) -> None:
        super().__init__(f"{words} ({code})")
        self.code = code


def odd() -> None:
    raise Odd(7, "odd")


def mixed() -> None:
    torch.zeros(3, device="cuda") + torch.zeros(3)


@pytest.mark.cost(1.5)
def test_a_device_chosen_above_the_function_is_chosen_again_and_prints_are_shown(capsys):
    capture = mp.predict(step, 8)
    assert 16 * MIB <= peak(capture) - 2 * MIB < 17 * MIB
    assert capsys.readouterr().out == "batch 8\n"
    said = [one["what"] for one in capture.meta["assumptions"]]
    assert "decided as on a GPU: device = 'cuda'" in said
    assert any(one.startswith("taken as on the GPU") and "weights (2 MiB)" in one for one in said)
    assert f"Assumed: {'; '.join(said[:3])}" in text.report(capture)
    assert not any("other" in one for one in said)  # no function of the call uses it
    assert (device, weights.device.type) == ("cpu", "cpu")


@pytest.mark.cost(0.2)
def test_defaults_closures_fields_and_imported_modules_are_decided_again(tmp_path, monkeypatch):
    (tmp_path / "chosen_elsewhere.py").write_text("import torch\nplace = 'cuda' if torch.cuda.is_available() else 'cpu'\ntable = torch.zeros(32, 1 << 18).to(place)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(globals(), "chosen_elsewhere", importlib.import_module("chosen_elsewhere"))
    capture = mp.predict(everywhere)
    assert capture.events.filter(capture.events["action"] == "alloc")["requested_bytes"].sum() == (1 + 2 + 4 + 8 + 16 + 2 * 32) * MIB
    said = [one["what"] for one in capture.meta["assumptions"]]
    assert {f"decided as on a GPU: {one}" for one in ("by_default(place='cuda')", "place = 'cuda' in around", "options.place = 'cuda'", "chosen_elsewhere.place = 'cuda'")} <= set(said)
    assert (by_default.__defaults__, options.place, closed().device.type) == (("cpu",), "cpu", "cpu")  # here nothing changed


@pytest.mark.cost(0.2)
def test_a_choice_that_is_not_made_again_is_named():
    capture = mp.predict(of_a_kind)
    said = next(one for one in capture.meta["warnings"] if one.startswith("not decided again: kind (test_calling.py:"))
    assert said in [one["what"] for one in capture.meta["assumptions"]]
    assert f"Not {said[4:]}" in text.report(capture)


@pytest.mark.cost(3)
def test_a_sweep_and_a_search_take_the_same_device(capsys):
    rows = mp.sweep(step, batch=2, device=["T4", "H200"])
    assert rows["device"].to_list() == ["T4", "H200"]
    assert rows["peak_allocated_bytes"].to_list() == [6 * MIB] * 2
    assert mp.max_batch(step, 4, 4, capacity_bytes="10GiB").origin == "predicted"
    assert "batch" not in capsys.readouterr().out.replace("max batch", "")


@pytest.mark.cost(0.4)
def test_a_function_that_stays_on_the_cpu_is_told_so():
    place = "cpu"
    with pytest.raises(NothingOnTheDevice, match=r"no memory of a CUDA device.*on the CPU \(place='cpu'\)\. Write device='cuda'"):
        mp.predict(lambda: torch.zeros(3, device=place))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"capacity_bytes": "40 bananas"}, "40 bananas"),
        ({"limit_bytes": "x"}, "'x' is not a size"),
        ({"conf": "banana"}, "banana"),
        ({"seconds": -1}, "seconds=-1"),
        ({"device": 7}, "device=7 is no name of a GPU"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(given, said, capsys):
    with pytest.raises(NbmemprofError, match=said):
        mp.predict(step, **given)
    assert capsys.readouterr().out == ""


def test_what_is_no_function_and_an_axis_without_values_are_refused():
    with pytest.raises(NbmemprofError, match="needs a function to run, not 'step'"):
        mp.predict("step")
    with pytest.raises(NbmemprofError, match=r"batch=\[\] has no value"):
        mp.sweep(step, batch=[])
    with pytest.raises(NbmemprofError, match=r"device=\[\] has no value"):
        mp.sweep(step, device=[], batch=[1])
    with pytest.raises(NbmemprofError, match="banana"):
        mp.sweep(step, batch=[1], conf=["", "banana"])


@pytest.mark.cost(0.4)
def test_an_error_keeps_its_class_though_its_arguments_cannot_make_it():
    with pytest.raises(Odd, match=r"odd \(7\)") as caught:
        mp.predict(odd)
    assert caught.value.code == 7
    (note,) = caught.value.__notes__
    assert 'raise Odd(7, "odd")' in note
    assert "nbmemprof/prediction" not in note


@pytest.mark.cost(0.4)
def test_tensors_on_two_devices_are_torchs_error_with_the_users_line():
    with pytest.raises(RuntimeError) as caught:
        mp.predict(mixed)
    assert type(caught.value) is RuntimeError
    (note,) = caught.value.__notes__
    assert "torch.zeros(3)" in note
    assert "_subclasses" not in note.replace("torch._subclasses.fake_tensor.FakeTensorDeviceMismatchError", "")


def test_an_error_of_a_class_that_is_nowhere_is_not_carried():
    class Hidden(Exception):
        pass

    assert raising.packed(Hidden("x")) is None
    assert raising.unpacked(pickle.dumps(ValueError("x"))).args == ("x",)


@pytest.mark.cost(0.5)
def test_an_operator_without_a_kernel_for_fakes_is_named():
    with torch.library._scoped_library("nbmemprof_tests", "DEF") as library:
        library.define("own(Tensor x) -> Tensor")
        with pytest.raises(RuntimeError) as caught:
            mp.predict(lambda: torch.ops.nbmemprof_tests.own(torch.eye(3, device="cuda")))
    assert any("nbmemprof_tests::own has no kernel for fake tensors here" in note for note in caught.value.__notes__)


def test_what_was_assumed_is_told_with_the_number_of_the_rest():
    known = SimpleNamespace(meta={"assumptions": [{"what": f"thing {n}", "count": n} for n in range(1, 6)]})
    assert findings._assumed(known) == ["Assumed: thing 5; thing 4; thing 3; 2 more in meta['assumptions']."]
    assert findings._assumed(SimpleNamespace(meta={})) == []
