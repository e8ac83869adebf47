"""What earlier cells decided for want of a GPU is found in their text."""

import pytest

from nbmemprof.prediction.earlier import read


@pytest.mark.parametrize(
    ("cells", "again", "placed"),
    [
        (["device = 'cuda' if torch.cuda.is_available() else 'cpu'"], 1, set()),
        (["device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')", "model = Net().to(device)"], 1, {"model"}),
        (["gpu = torch.cuda.is_available()", "device = torch.device('cuda' if gpu else 'cpu')", "x, y = x.to(device), y.to(device)"], 2, {"x", "y"}),
        (["if torch.cuda.is_available():\n    device = 'cuda'\nelse:\n    device = 'cpu'\n    print('slow')"], 1, set()),
        (["device = 'cuda' if torch.cuda.is_available() else 'cpu'", "net = Net()", "net.to(device)", "opt = Adam(net.parameters())"], 1, {"net", "opt"}),
        (["device = 'cuda' if torch.cuda.is_available() else 'cpu'", "def make():\n    return Net().to(device)", "net = make()"], 1, {"net"}),
        (["class Config:\n    lr = 1e-3\n    device = 'cuda' if torch.cuda.is_available() else 'cpu'", "net = Net().to(Config.device)"], 1, {"net"}),
        (["config = {'device': 'cuda' if torch.cuda.is_available() else 'cpu', 'lr': 1}", "net = Net().to(config['device'])"], 1, {"net"}),
    ],
)
def test_words_are_decided_again_and_what_was_placed_is_named(cells, again, placed):
    found = read(cells)
    assert len(found.again) == again
    assert found.placed == placed


def test_a_scaler_that_switched_itself_off_is_made_again_unless_it_was_to_be_off():
    assert read(["scaler = torch.amp.GradScaler('cuda')"]).again == ["scaler = torch.amp.GradScaler('cuda')"]
    assert read(["scaler = GradScaler(enabled=False)"]).again == []
    assert len(read(["on = torch.cuda.is_available()", "scaler = GradScaler(enabled=on)"]).again) == 2


def test_what_came_back_from_the_device_or_was_bound_anew_stays():
    found = read(["device = 'cuda' if torch.cuda.is_available() else 'cpu'\nx = torch.zeros(3).to(device)\ny = (x * 2).cpu()\nx = 3"])
    assert found.placed == set()


def test_cells_that_do_not_ask_or_do_not_parse_say_nothing():
    found = read(["device = 'cpu'\nmodel = Net().to(device)", "def f(:", "%matplotlib inline"])
    assert (found.again, found.placed) == ([], set())


def test_what_prints_is_not_run_again():
    (statement,) = read(["if torch.cuda.is_available():\n    device = 'cuda'\nelse:\n    device = 'cpu'\n    print('slow')"]).again
    assert "print" not in statement
