"""What earlier cells decided for want of a GPU is found in their text."""

import pytest

from nbmemprof.prediction.earlier import closed_over, read


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


DEVICE = "device = 'cuda' if torch.cuda.is_available() else 'cpu'"


ASKS = "def get_device():\n    if torch.cuda.is_available():\n        print('there')\n        return torch.device('cuda')\n    return torch.device('cpu')"
HEAVY = "def heavy(ok):\n    open('log')\n    return 2 if ok and torch.cuda.is_available() else 1"


@pytest.mark.parametrize(
    ("cells", "remade", "asked"),
    [
        (["dtype = torch.bfloat16 if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else torch.float32"], {"dtype"}, set()),
        (["dtype = torch.bfloat16 if torch.cuda.get_device_capability()[0] >= 8 else torch.float16"], {"dtype"}, set()),
        (["place = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else 'cpu'"], {"place"}, set()),
        ([ASKS, "device = get_device()", "kw = dict(device=device)", "all = [torch.device(device)]"], {"device", "kw", "all"}, set()),
        (["get = lambda: 'cuda' if torch.cuda.is_available() else 'cpu'", "device = get()"], {"device"}, set()),
        ([DEVICE, "ns = argparse.Namespace(device=device, fp16=torch.cuda.is_available())"], {"device", "ns"}, set()),
        ([HEAVY, "n = heavy(True)"], set(), {"n"}),
        ([HEAVY, "n = heavy(torch.cuda.is_available())\nn = 3"], set(), set()),
        (["n = 8 if torch.cuda.is_available() else 1\nn *= 2"], {"n"}, set()),
        (["n = 8 if torch.cuda.is_available() else 1\nn *= load()"], {"n"}, set()),
        (["if torch.cuda.is_available():\n    device = 'cuda'\n    torch.cuda.set_device(0)\n    net = net.cuda()\nelse:\n    device = 'cpu'"], {"device"}, {"net"}),
        (["class Trainer:\n    def __init__(self):\n        self.amp = setup(torch.cuda.is_available())", "trainer = Trainer()"], set(), {"trainer"}),
    ],
)
def test_what_asks_for_a_gpu_is_decided_again_or_known_not_to_be(cells, remade, asked):
    found = read(cells)
    assert (found.remade, found.asked) == (remade, asked)


def test_a_name_that_was_set_by_hand_afterwards_stays():
    found = read([DEVICE, "device = 'cpu'", "net = Net().to(device)"])
    assert (found.stays, found.remade, found.placed) == ({"device"}, set(), set())


def test_settings_of_torch_do_not_put_everything_on_the_device():
    found = read(["if torch.cuda.is_available():\n    torch.backends.cuda.matmul.allow_tf32 = True", "data = torch.randn(3)"])
    assert found.placed == set()
    assert "data" not in found.hanging


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([DEVICE, "def step(batch, lr=1e-3, device=device):\n    pass"], [("step", "device", "device")]),
        ([DEVICE, "def step(batch, *, on=device, off='cpu'):\n    pass"], [("step", "on", "device")]),
        ([DEVICE, "class Net:\n    def __init__(self, device=device):\n        pass"], [("Net.__init__", "device", "device")]),
        ([DEVICE, "def step(net=Net().to(device)):\n    pass"], []),  # no words: it would be built again
    ],
)
def test_a_default_that_hangs_on_a_gpu_is_evaluated_again(cells, said):
    assert read(cells).defaults == said


def test_an_object_of_a_class_that_looks_for_a_gpu_has_its_field_set_unless_it_was_given():
    cells = ["class A:\n    def __init__(self, lr=1):\n        self.lr = lr\n        self.device = 'cuda' if torch.cuda.is_available() else 'cpu'", "a = A(lr=2)\nb = A(device='cpu')\nnet = Net().to(a.device)"]
    found = read(cells)
    assert [(name, attribute) for name, attribute, _ in found.fields] == [("a", "device")]
    assert "net" in found.placed


def test_a_field_that_a_lambda_fills_is_set_again():
    found = read(["@dataclass\nclass Args:\n    bs: int = field(default_factory=lambda: 64 if torch.cuda.is_available() else 2)", "args = Args()"])
    assert found.fields == [("args", "bs", "64 if torch.cuda.is_available() else 2")]


def test_names_from_a_module_that_looked_for_a_gpu_are_imported_again():
    known = {"config": read([DEVICE, "table = torch.zeros(3).to(device)\nwidth = 8"])}
    found = read(["from config import device as place, width, table\nimport config as c", "x = Net(width)\ny = Net(c.width).to(c.device)"], known)
    assert found.again == ["from config import device as place"]
    assert found.placed == {"table", "y"}


def test_a_variable_of_the_function_around_is_found_where_it_hangs_on_globals_alone():
    text = "def outer(a):\n    on = 'cuda' if torch.cuda.is_available() else 'cpu'\n    of = a if torch.cuda.is_available() else 'cpu'\n    def inner():\n        return on, of\n    return inner"
    found = read([])
    assert closed_over(text, "inner", 4, "on", found) == "'cuda' if torch.cuda.is_available() else 'cpu'"
    assert closed_over(text, "inner", 4, "of", found) is None
    assert closed_over(text, "other", 4, "on", found) is None
