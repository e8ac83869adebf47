"""Lazy modules in a prediction: they get their shapes from the first batch, on the device where they are to be."""

import copy
import weakref

import pytest

torch = pytest.importorskip("torch")
from torch import nn

import nbmemprof as mp
from nbmemprof.prediction import carrying

device = "cuda" if torch.cuda.is_available() else "cpu"
above = nn.Sequential(nn.LazyLinear(256), nn.LazyBatchNorm1d()).to(device)


def step(width: int) -> None:
    above.half()
    optimizer = torch.optim.SGD(above.parameters(), momentum=0.9)
    above(torch.zeros(4, width, device=device, dtype=torch.half)).sum().backward()
    optimizer.step()


def inside() -> None:
    net = nn.Sequential(nn.LazyConv2d(8, 3), nn.Flatten(), nn.LazyLinear(10)).cuda()
    net = copy.deepcopy(net)
    print(tuple(net(torch.zeros(2, 3, 32, 32, device="cuda")).shape), *net[2].weight.shape, net[2].weight.device, type(net[2]).__name__)


@pytest.mark.cost(0.3)
def test_a_lazy_model_from_before_the_call_is_shaped_moved_and_named(capsys):
    remembered = [weakref.ref(parameter) for parameter in above.parameters()]  # as an earlier recording may
    held = dict(mp.breakdown(mp.predict(step, 512)).select("category", "requested_bytes").iter_rows())
    assert held["weights"] == 2 * (512 * 256 + 3 * 256)
    assert held["optimizer_state"] == held["weights"]
    assert held["buffers"] == 2 * 2 * 256 + 8
    assert nn.parameter.is_lazy(above[0].weight) and all(ref() is not None for ref in remembered)  # here nothing changed
    mp.predict(inside)
    assert capsys.readouterr().out == "(2, 10) 10 7200 cuda:0 Linear\n"


def test_a_lazy_model_can_be_carried_into_a_fresh_process():
    packed = carrying.pack({"net": nn.LazyLinear(4, dtype=torch.half)}, "a test")
    assert not packed.left
    made = carrying.load_tensors(packed.data, None, lambda device: device)["net"]
    assert (nn.parameter.is_lazy(made.weight), made.weight.dtype, made.bias.requires_grad) == (True, torch.half, True)
