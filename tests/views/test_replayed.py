"""The verdict after first paint, and what other settings would have done, as words and pictures."""

from __future__ import annotations

import re
import sys
import threading

import polars as pl
import pytest
from IPython.core.interactiveshell import InteractiveShell

import nbmemprof as mp
from nbmemprof import magics
from nbmemprof.allocator import Device
from nbmemprof.errors import NbmemprofError
from nbmemprof.views import findings, first, replayed

RECORDED = "max_split_size_mb:20,garbage_collection_threshold:0.8"


@pytest.fixture
def tight(fixtures):
    """Sixteen refusals under a limit of 2.5 GiB, recorded on an H200."""
    return mp.load(fixtures / "recordings" / "split20-gc80-tight.snapshot.pickle.gz")


@pytest.fixture
def kernel(monkeypatch):
    """An IPython with a kernel; what it publishes."""
    published = []

    class Display:
        @staticmethod
        def display(data, **options):
            published.append((data, options, threading.current_thread() is threading.main_thread()))

    class Shell:
        kernel = object()

    class IPython:
        display = Display

        @staticmethod
        def get_ipython():
            return Shell()

    monkeypatch.setitem(sys.modules, "IPython", IPython)
    return published


@pytest.mark.cost(1)
def test_first_paint_says_not_replayed_and_the_same_output_has_the_verdict(tight, kernel, monkeypatch):
    monkeypatch.setattr(replayed, "WAIT_S", 60.0)  # however busy the machine is
    first.show(tight)
    (before, options, _), (after, update, main) = kernel
    assert "Allocator: not replayed: a first view" in before["text/plain"]
    assert "Allocator: not replayed: a first view" in before["text/html"]
    assert "replayed exactly: the rules give all 8\N{NARROW NO-BREAK SPACE}071 recorded events" in after["text/plain"].replace("\N{NO-BREAK SPACE}", "\N{NARROW NO-BREAK SPACE}")
    assert "not replayed" not in after["text/html"]
    assert update == {"raw": True, "display_id": options["display_id"], "update": True}
    assert main, "a short replay is shown by the cell itself"
    assert sum(len(part.encode()) for part in after.values()) <= first.BUDGET_BYTES


@pytest.mark.cost(1.1)
def test_a_long_recording_is_replayed_beside_the_cell(tight, kernel, monkeypatch):
    monkeypatch.setattr(replayed, "SHORT", 10)
    go, real = threading.Event(), replayed._judged
    monkeypatch.setattr(replayed, "_judged", lambda capture: go.wait(30) and real(capture))
    first.show(tight)
    assert len(kernel) == 1, "the cell waited for the replay"
    (thread,) = [t for t in threading.enumerate() if t.name == "nbmemprof replay"]
    go.set()
    thread.join(30)
    assert "replayed exactly" in kernel[1][0]["text/plain"]
    assert not kernel[1][2]


@pytest.mark.cost(0.9)
def test_a_replay_that_takes_too_long_comes_later(tight, kernel, monkeypatch):
    monkeypatch.setattr(replayed, "WAIT_S", 0.01)
    go, real = threading.Event(), replayed._judged
    monkeypatch.setattr(replayed, "_judged", lambda capture: go.wait(30) and real(capture))
    first.show(tight)
    assert len(kernel) == 1
    (thread,) = [t for t in threading.enumerate() if t.name == "nbmemprof replay"]
    go.set()
    thread.join(30)
    assert len(kernel) == 2


@pytest.mark.cost(0.9)
def test_shown_again_it_comes_at_once(tight, kernel):
    replayed.judge(tight)
    first.show(tight)
    assert len(kernel) == 1
    assert "replayed exactly" in kernel[0][0]["text/plain"]


def test_a_recording_that_the_rules_do_not_give_says_where(fixtures):
    capture = mp.load(fixtures / "recordings" / "split20-gc80-tight.snapshot.pickle.gz")
    at = capture.events.with_row_index().filter(pl.col("action") == "segment_alloc")["index"][5]
    capture.tables["events"] = capture.events.with_columns(pl.when(pl.int_range(pl.len()) == at).then(pl.col("addr") + (1 << 30)).otherwise("addr").alias("addr"))
    text = replayed.judge(capture).text
    assert text.startswith("not exact"), text
    assert re.search(r"event [\d\s]+ of device 0", text)


def test_a_host_recording_has_no_line_about_an_allocator(training, kernel):
    first.show(training(on="host"))
    assert len(kernel) == 1
    assert "Allocator" not in kernel[0][0]["text/plain"]


def test_a_failed_replay_is_a_sentence(tight, monkeypatch):
    from nbmemprof import allocator

    def broken(capture):
        raise RuntimeError("no such rule")

    monkeypatch.setattr(allocator, "verdict", broken)
    assert replayed.judge(tight).text == "not replayed: the replay failed (RuntimeError: no such rule). Please report it."


def test_the_picture_and_the_table_say_what_the_frame_says(tight):
    frame = mp.what_if(tight, [RECORDED, "", "expandable_segments:True"])
    svg, sentence = replayed.picture(frame)
    title, head, rows = replayed.table(frame)
    assert "refused when it was recorded is asked again, and given back at once" in title
    refused = dict(frame.select("conf", "ooms").iter_rows())
    assert refused[RECORDED] == 16
    for conf, name in ((RECORDED, f"{RECORDED} (as recorded)"), ("expandable_segments:True", "expandable_segments:True")):
        assert f"{refused[conf]} requests refused" in sentence
        (row,) = [row for row in rows if row[0] == name]
        assert row[head.index("refused")] == str(refused[conf])
    assert "torch's defaults" in sentence
    assert svg.markup().count("<rect") == 1 + 3 * frame.height


@pytest.mark.cost(0.6)
def test_the_better_setting_is_named_only_where_it_is_better(fixtures, tight):
    capture = mp.load(fixtures / "recordings" / "snap_gpt2_varlen_b8.pickle.gz")
    frame = mp.what_if(capture)
    saved = int(frame.filter("recorded")["peak_reserved_low_bytes"][0] - frame["peak_reserved_high_bytes"].min())
    assert saved == 1_600_126_976
    assert replayed._best(capture, frame) == "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would have reserved 13.31 GiB at the peak, 1.5 GiB less (replayed)."
    assert replayed._best(capture, frame.filter(pl.col("conf") != "expandable_segments:True")) == ""
    assert replayed._best(tight, mp.what_if(tight)) == "", "after refusals less reserved is no gain, and the finding has what refuses less"


@pytest.mark.cost(0.6)
def test_the_verb_takes_settings_and_a_limit(tight, capsys):
    shell = InteractiveShell()
    magics.load(shell)
    try:
        shell.user_ns["_memprof"] = tight
        shell.run_line_magic("memprof", "what-if expandable_segments:True '' --limit 3GiB")
        said = capsys.readouterr().out
        result = shell.run_cell("%memprof what-if max_splt:3")
    finally:
        magics.unload(shell)
    assert "Allocator: replayed exactly" in said
    rows = [line for line in said.splitlines() if line.lstrip().startswith(("expandable_segments:True", "torch's defaults"))]
    assert len(rows) == 2
    assert isinstance(result.error_in_exec, NbmemprofError)


@pytest.mark.cost(0.6)
def test_what_if_keeps_a_virtual_device_s_memory():
    torch = pytest.importorskip("torch")
    with mp.record(as_device="H200:61MiB") as rec:
        pieces = [torch.empty(9 << 20, dtype=torch.uint8) for _ in range(6)]
    assert len(pieces) == 6
    frame = replayed.what_if_of(rec.capture, ["", "large_segment_size_mb:40"])
    assert dict(frame.select("conf", "ooms").iter_rows()) == {"": 0, "large_segment_size_mb:40": 2}
    assert "modelled by the rules themselves" in replayed.judge(rec.capture).text


def test_the_chart_has_the_ranges_and_the_refusals(tight):
    pytest.importorskip("altair")
    from nbmemprof.views.charts.what_if import what_if as chart

    frame = mp.what_if(tight, ["", "expandable_segments:True"])
    data = next(iter(chart(frame).to_dict()["datasets"].values()))
    assert [(row["conf"], row["refused"]) for row in data] == [("torch's defaults", "37 refused"), ("expandable_segments:True", "14 refused")]


@pytest.mark.cost(0.3)
def test_of_a_virtual_device_the_finding_has_the_replays_answer_and_rows_are_called_modelled():
    """Twelve pieces of 4 MiB, every other one gone: 36 MiB are free in pieces."""
    torch = pytest.importorskip("torch")
    with mp.record(as_device="H200:64MiB") as rec:
        parts = [torch.empty(4 << 20, dtype=torch.uint8) for _ in range(12)]
        del parts[::2]
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(24 << 20, dtype=torch.uint8)
    before = " ".join(findings.findings(rec.capture))
    judged = replayed.judge(rec.capture)
    after = " ".join(findings.findings(rec.capture))
    assert judged.frame is not None
    assert judged.frame.filter("recorded").select("conf", "origin").rows() == [("", "modelled")]
    assert "not replayed yet" in before
    assert "not replayed yet" not in after


def test_where_no_piece_was_large_enough_the_setting_that_serves_is_named_all_the_same():
    """30 MiB were cut from a free block of 300: what is left of it is too small for the next 300, and nothing is scattered."""
    device = Device(limit_bytes=400 << 20)
    device.free(device.malloc(300 << 20))
    device.malloc(30 << 20)
    with pytest.raises(mp.OutOfMemoryError):
        device.malloc(300 << 20)
    capture = mp.load(device.snapshot(), limit_bytes=400 << 20)
    assert "would have refused" not in " ".join(replayed.lines(capture))
    replayed.judge(capture)
    assert replayed.lines(capture)[-1] == "PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128 would have refused none of the requests instead of 1 (replayed)."


def test_what_a_finding_says_of_a_refusal_is_not_said_twice(fixtures):
    capture = mp.load(fixtures / "h200" / "allocator" / "case_checkerboard.pickle.gz")
    replayed.judge(capture)
    said = [*replayed.lines(capture), *findings.findings(capture)]
    assert sum("refuse" in s and "none of the requests instead of 1 (replayed)" in s for s in said) == 1
