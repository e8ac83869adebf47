"""Windows nest, overlap and end in any order; the source starts once and always stops; torch may come later."""

import asyncio
import importlib.util
import sys
import threading
from types import SimpleNamespace

import pytest

import nbmemprof as mp
from nbmemprof import recording, schema, sources
from nbmemprof.capture import Capture
from nbmemprof.errors import NbmemprofError, NotRecording
from nbmemprof.recording import _recorders


class Tape:
    """A source that remembers what was asked of it; every event is a number."""

    name = "tape"

    def __init__(self, fail: str = "") -> None:
        self.calls: list[str] = []
        self.events: list[int] = []
        self.options: dict = {}
        self.fail = fail
        self.running = False

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail == name:
            raise RuntimeError(f"{name} is broken")

    def start(self, **options) -> None:
        self._call("start")
        self.options, self.running = options, True

    def mark(self) -> int:
        self._call("mark")
        return len(self.events)

    def cut(self, since: int) -> Capture:
        self._call("cut")
        return self._capture(self.events[since:])

    def stop(self) -> Capture:
        self.calls.append("stop")
        self.running = False
        if self.fail == "stop":
            raise RuntimeError("stop is broken")
        return self._capture(self.events)

    def _capture(self, events: list[int]) -> Capture:
        table = schema.fill("events", {"seq": list(events), "action": "alloc", "kind": "host", "source": "torch"}, height=len(events))
        return Capture.build({"events": table}, source="tape")


class OnlyStartAndStop:
    def __init__(self) -> None:
        self.tape = Tape()

    def start(self, **options) -> None:
        self.tape.start(**options)

    def stop(self) -> Capture:
        return self.tape.stop()


def seqs(capture: Capture) -> list[int]:
    return capture.events["seq"].to_list()


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = list(sys.meta_path)
    yield
    assert not _recorders
    assert sys.meta_path == before


# ---------------------------------------------------------------------- windows
def test_a_window_is_one_start_and_one_stop():
    tape = Tape()
    with mp.record(tape, stacks="all", ring_bytes="1MiB", title="mine") as rec:
        tape.events.append(1)
    assert seqs(rec.capture) == [1]
    assert tape.calls[0] == "start"
    assert "cut" not in tape.calls
    assert not tape.running
    assert (tape.options["stacks"], tape.options["ring_bytes"]) == ("all", 1 << 20)


def test_the_capture_says_which_window_it_is():
    with mp.record(Tape(), title="mine", cell=7) as rec:
        pass
    meta, mark = rec.capture.meta, rec.capture.marks.row(0, named=True)
    assert (meta["title"], meta["cell"], meta["warnings"]) == ("mine", 7, [])
    assert meta["started"].startswith("20")
    assert meta["duration_us"] > 0
    assert (mark["kind"], mark["name"], mark["time_us"]) == ("cell", "mine", 0.0)
    assert 0 < mark["end_us"] <= meta["duration_us"]


def test_nested_windows_share_one_recorder_and_have_each_their_events():
    tape = Tape()
    with mp.record(tape) as outer:
        tape.events.append(1)
        with mp.record(tape) as inner:
            tape.events.append(2)
        assert tape.running
        tape.events.append(3)
    assert (seqs(outer.capture), seqs(inner.capture)) == ([1, 2, 3], [2])
    assert tape.calls.count("start") == 1
    assert not tape.running


def test_windows_that_end_in_another_order_than_they_began():
    tape = Tape()
    first, second = mp.record(tape).start(), None
    tape.events.append(1)
    second = mp.record(tape).start()
    tape.events.append(2)
    assert seqs(first.stop()) == [1, 2]
    assert tape.running
    tape.events.append(3)
    assert seqs(second.stop()) == [2, 3]
    assert not tape.running


def test_stopping_twice_gives_the_same_capture():
    rec = mp.record(Tape()).start()
    assert rec.stop() is rec.stop()


def test_a_recording_is_used_once():
    rec = mp.record(Tape()).start()
    with pytest.raises(NbmemprofError, match="started before"):
        rec.start()
    rec.stop()
    with pytest.raises(NbmemprofError, match="never started"):
        mp.record(Tape()).stop()


def test_discarding_stops_the_source_and_makes_nothing():
    tape = Tape()
    rec = mp.record(tape).start()
    rec.discard()
    assert rec.capture is None
    assert not tape.running


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_goes_on_and_leaves_a_capture(error):
    tape = Tape()
    with pytest.raises(error), mp.record(tape) as rec:
        tape.events.append(1)
        raise error
    assert seqs(rec.capture) == [1]
    assert not tape.running


def test_a_source_that_can_not_start_lets_the_block_run_and_says_why():
    tape = Tape(fail="start")
    with mp.record(tape) as rec:
        ran = True
    assert ran
    assert rec.capture.meta["source"] == "none"
    assert rec.capture.meta["warnings"] == ["recording was not possible: start is broken"]


@pytest.mark.parametrize("where", ["mark", "cut", "stop"])
def test_a_source_that_fails_later_is_stopped_and_told(where):
    tape = Tape(fail=where)
    with mp.record(tape) as outer, mp.record(tape) as inner:
        pass
    assert any(f"{where} is broken" in text for rec in (outer, inner) for text in rec.capture.meta["warnings"])
    assert "stop" in tape.calls


def test_options_that_an_open_recording_can_not_follow_are_told():
    tape = Tape()
    with mp.record(tape, stacks="none") as outer, mp.record(tape, stacks="all") as inner:
        pass
    assert outer.capture.meta["warnings"] == []
    assert "stacks=none, not all" in inner.capture.meta["warnings"][0]


def test_start_and_stop_are_enough_for_one_window():
    source = OnlyStartAndStop()
    with mp.record(source) as rec:
        source.tape.events.append(4)
    assert seqs(rec.capture) == [4]
    with mp.record(source) as outer, mp.record(source) as inner:
        pass
    assert "no mark() and cut()" in inner.capture.meta["warnings"][0]
    assert outer.capture.meta["source"] == "tape"


def test_a_source_that_gives_no_capture_is_told():
    source = SimpleNamespace(start=lambda **options: None, stop=lambda: 5)
    with mp.record(source) as rec:
        pass
    assert "gave a int" in rec.capture.meta["warnings"][0]


def test_threads_open_and_close_windows_at_once():
    tape = Tape()
    errors = []

    def work() -> None:
        try:
            for _ in range(50):
                with mp.record(tape) as rec:
                    pass
                assert rec.capture.meta["warnings"] == []
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert not tape.running
    assert tape.calls.count("start") <= tape.calls.count("stop")


# ---------------------------------------------------------------------- which source
def test_a_source_that_does_not_exist_is_refused_with_the_list():
    with pytest.raises(NbmemprofError, match=r"no source 'aut'.*Did you mean 'auto'.*start\(\) and stop\(\)"):
        mp.record("aut")
    with pytest.raises(NbmemprofError, match=r"lacks start\(\) or stop\(\)"):
        mp.record(5)
    with pytest.raises(NbmemprofError, match="stacks can't be 'pyton'"):
        mp.record(Tape(), stacks="pyton")


@pytest.fixture
def shelf(monkeypatch, tmp_path):
    """Two sources instead of the real ones, and a torch that isn't imported yet."""
    tapes = {"torch_history": Tape(), "torch_cpu": Tape()}
    reasons = {"torch_history": "no CUDA device", "torch_cpu": None}
    modules = {name: SimpleNamespace(source=lambda t=tape: t, unavailable=lambda n=name: reasons[n]) for name, tape in tapes.items()}
    monkeypatch.setattr(sources, "recorders", lambda: modules)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("value = 5\n")
    (tmp_path / "torch" / "nn.py").write_text("import torch\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("torch", "torch.nn"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    return SimpleNamespace(tapes=tapes, reasons=reasons, folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"stack": "none"}, r"no option 'stack'\. Did you mean 'stacks'\? It takes: .*ring_bytes.*attribution"),
        ({"historie": "runs"}, "Did you mean 'history'"),
        ({"as_device": "H200:8GiB", "what": 1}, r"no option 'what'\. It takes"),
    ],
)
def test_an_option_that_no_source_takes_is_refused(options, text):
    with pytest.raises(NbmemprofError, match=text):
        mp.record(**options)
    with pytest.raises(NbmemprofError, match=text):
        mp.profile(**options)(len)


def test_a_source_of_the_users_takes_any_option():
    class Mine:
        def start(self, **options):
            self.options = options

        def stop(self):
            return Capture.build({}, source="mine")

    source = Mine()
    with mp.record(source, colour="blue"):
        pass
    assert source.options["colour"] == "blue"


def test_auto_takes_the_first_that_can_record(shelf):
    import torch

    with mp.record() as rec:
        shelf.tapes["torch_cpu"].events.append(1)
    assert seqs(rec.capture) == [1]
    shelf.reasons["torch_history"] = None
    with mp.record() as rec:
        shelf.tapes["torch_history"].events.append(2)
    assert seqs(rec.capture) == [2]
    assert torch.value == 5


def test_where_none_can_record_all_reasons_are_told(shelf):
    import torch  # noqa: F401

    shelf.reasons["torch_cpu"] = "too old"
    with mp.record() as rec:
        pass
    assert rec.capture.meta["warnings"] == ["recording was not possible: torch_history: no CUDA device; torch_cpu: too old"]


def test_without_torch_the_capture_is_small_and_honest(shelf):
    with mp.record() as rec:
        assert sys.meta_path[0].__class__.__module__ == "nbmemprof._torch_import"
    assert rec.capture.meta["source"] == "none"
    assert rec.capture.meta["warnings"] == ["empty: torch was not imported, so no torch memory was allocated"]
    assert "torch" not in sys.modules


def test_recording_begins_when_the_block_imports_torch(shelf):
    tape = shelf.tapes["torch_cpu"]
    with mp.record() as outer, mp.record("torch_cpu") as inner:
        assert tape.calls == []
        import torch.nn

        assert tape.running
        tape.events.append(1)
    assert torch.value == 5
    assert "nbmemprof" not in type(torch.__spec__.loader).__module__
    assert "nbmemprof" not in type(torch.__loader__).__module__
    assert (seqs(outer.capture), seqs(inner.capture)) == ([1], [1])
    assert not tape.running


def test_an_import_that_fails_fails_as_it_would(shelf):
    (shelf.folder / "torch" / "__init__.py").write_text("raise OSError('broken library')\n")
    with pytest.raises(OSError, match="broken library"), mp.record() as rec:
        import torch  # noqa: F401
    assert rec.capture.meta["source"] == "none"
    assert "torch" not in sys.modules


def test_a_source_that_can_not_start_does_not_break_the_import(shelf):
    shelf.tapes["torch_cpu"].fail = "start"
    with mp.record() as rec:
        import torch
    assert torch.value == 5
    assert "start is broken" in rec.capture.meta["warnings"][0]


def test_asking_whether_torch_is_there_imports_nothing(shelf):
    with mp.record():
        assert importlib.util.find_spec("torch").loader.is_package("torch")
    assert "torch" not in sys.modules


def test_torch_that_comes_after_the_window_is_left_alone(shelf):
    with mp.record():
        pass
    import torch  # noqa: F401

    assert shelf.tapes["torch_cpu"].calls == []


# ---------------------------------------------------------------------- functions
def test_profile_records_each_call_and_keeps_the_last():
    tape = Tape()

    @mp.profile(source=tape, keep=2)
    def step(n):
        """Take a step."""
        tape.events.append(n)
        return n + 1

    assert step.last_capture is None
    assert [step(n) for n in (1, 2, 3)] == [2, 3, 4]
    assert step.__doc__ == "Take a step."
    assert len(step.captures) == 2
    assert step.last_capture is step.captures[-1]
    assert step.last_capture.meta["title"].endswith("step")


def test_profile_bare_and_an_error_inside(shelf):
    @mp.profile
    def fails():
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        fails()
    assert fails.last_capture.meta["source"] == "none"


def test_profile_of_coroutines_and_generators():
    tape = Tape()

    @mp.profile(source=tape)
    async def waits():
        await asyncio.sleep(0)
        tape.events.append(1)
        return 5

    @mp.profile(source=tape)
    def yields():
        sent = yield 1
        tape.events.append(2)
        return sent

    @mp.profile(source=tape)
    async def streams():
        yield 1
        tape.events.append(3)
        yield 2

    async def all_of_it():
        return await waits(), [item async for item in streams()]

    assert asyncio.run(all_of_it()) == (5, [1, 2])
    items = yields()
    assert next(items) == 1
    with pytest.raises(StopIteration) as done:
        items.send("sent")
    assert done.value.value == "sent"
    assert [f.last_capture.events["seq"].to_list()[-1] for f in (waits, yields, streams)] == [1, 2, 3]
    assert not tape.running


def test_profile_refuses_what_is_no_function_and_wrong_options_at_once():
    with pytest.raises(NbmemprofError, match="decorates functions"):
        mp.profile("torch_cpu")
    with pytest.raises(NbmemprofError, match="stacks"):
        mp.profile(stacks="some")(len)


# ---------------------------------------------------------------------- a picture
def test_a_picture_without_torch_says_so(shelf):
    capture = mp.snapshot(title="now")
    assert capture.blocks.height == 0
    assert capture.meta["title"] == "now"
    assert capture.meta["warnings"][0].startswith("empty: torch is not imported")


@pytest.mark.cost(0.6)
def test_a_picture_of_cpu_tensors_has_each_storage_once():
    torch = pytest.importorskip("torch")
    base = torch.zeros(1 << 20)
    view = base[10:]
    blocks = mp.snapshot().blocks
    rows = blocks.filter(blocks["addr"] == base.untyped_storage().data_ptr())
    assert rows["size_bytes"].to_list() == [4 << 20]
    assert rows["kind"].to_list() == ["host"]
    assert view.numel() > 0


def test_a_forked_child_is_told_to_be_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(recording, "_PROCESS", -1)
    with pytest.raises(NotRecording, match="forked"):
        recording.record().start()
