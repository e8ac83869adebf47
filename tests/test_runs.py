"""``mp.open_run``: folders of watches and of captures."""

from __future__ import annotations

import time

import numpy as np
import polars as pl
import pytest
from strategies import Allocator, capture, frames

import nbmemprof as mp
from nbmemprof import heap, history
from nbmemprof.__main__ import main
from nbmemprof.watching import store

MIB = 1 << 20


def saved(size: int, title: str, started: str):
    a = Allocator()
    a.malloc(size * MIB, frames("model.py:5 build"))
    tables = capture([a]).tables
    return heap.build({n: tables[n] for n in ("events", "segments", "blocks", "stacks")}, source="test", title=title, started=started)


def watched(folder, name, unix, values, *, pid=1, rank=None, device="0", ended=True, gauge="allocated_bytes"):
    """What a watch of a reading a second writes; ten steps a second."""
    log = store.Log(folder, name, 16 << 20, dict)
    log.append({"k": "begin", "v": 1, "pid": pid, "host": "elsewhere", "unix": unix, "started": f"2026-01-01T00:00:{int(unix):02d}", "rank": rank, "interval_s": 1.0, "limits": {device: 200 * MIB}})
    for second, value in enumerate(values):
        log.append({"k": "s", "t": float(second), "n": second * 10, "g": {device: {gauge: float(value)}}})
    if ended:
        log.append({"k": "end", "t": float(len(values)), "cost_s": 0.1})
    log.close()


def test_a_history_lists_its_runs_and_opens_them(tmp_path):
    history = mp.open_run(tmp_path)
    history.add(saved(4, "before", "2026-01-01T10:00:00"), "a")
    where = history.add(saved(6, "after: the fix!", "2026-01-02T10:00:00"))
    assert where.name.endswith("after-the-fix")
    rows = mp.open_run(tmp_path).runs
    assert rows.select("title", "kind", "peak_bytes", "end_bytes", "end").rows() == [
        ("before", "capture", 4 * MIB, 4 * MIB, "whole"),
        ("after: the fix!", "capture", 6 * MIB, 6 * MIB, "whole"),
    ]
    change = mp.diff(mp.open_run(tmp_path).load("a"), mp.open_run(tmp_path))
    assert change["change_bytes"].to_list() == [2 * MIB], "the folder's own capture is its newest"
    assert main(["diff", str(tmp_path / "a"), str(tmp_path), "--fail-above", "10%"]) == 1
    with pytest.raises(mp.NbmemprofError, match="It has: .*a"):
        mp.open_run(tmp_path).load("b")


@pytest.mark.cost(1)
def test_a_recording_adds_itself_to_a_history_that_is_asked_for(tmp_path, monkeypatch):
    import torch

    folder, kept = tmp_path / "made" / "history", []
    for size in (4, 6):
        with mp.record("torch_cpu", history=folder, title=f"batch {size}"):
            kept.append(torch.empty(size * MIB, dtype=torch.uint8))
    with mp.record("torch_cpu"):
        kept.append(torch.empty(MIB, dtype=torch.uint8))

    @mp.profile(source="torch_cpu", history=folder)
    def step():
        return torch.empty(MIB, dtype=torch.uint8)

    step()
    run = mp.open_run(folder)
    assert sorted(run.runs["title"]) == ["batch 4", "batch 6", step.__qualname__]
    names = dict(run.runs.select("title", "name").iter_rows())
    change = mp.diff(folder / names["batch 4"], run.load(names["batch 6"]))
    assert change.filter(pl.col("change_bytes") != 0)["change_bytes"].sum() >= 2 * MIB
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    with mp.record("torch_cpu", history="file") as window:
        pass
    assert any(text.startswith("not added to the history: file can't take a run") for text in window.capture.meta["warnings"])


def test_a_long_history_is_opened_once_a_run(tmp_path, monkeypatch):
    run = mp.open_run(tmp_path)
    for number in range(3):
        run.add(saved(1 + number, "x", f"2026-01-0{1 + number}T10:00:00"), f"r{number}")
    first = mp.open_run(tmp_path).runs
    opened = []
    monkeypatch.setattr(history, "load", lambda path: opened.append(path.name) or mp.load(path))
    assert mp.open_run(tmp_path).runs.equals(first)
    assert opened == []
    run.add(saved(9, "x", "2026-01-09T10:00:00"), "r9")
    saved(7, "x", "2026-01-07T10:00:00").to_parquet(tmp_path / "r1")
    assert mp.open_run(tmp_path).runs["peak_bytes"].to_list() == [MIB, 3 * MIB, 7 * MIB, 9 * MIB]
    assert sorted(opened) == ["r1", "r9"], "the new one, and the one that was written over"
    (tmp_path / ".runs.json").write_text('{"r0": 3')
    assert mp.open_run(tmp_path).runs.height == 4


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    history = mp.open_run(tmp_path)
    names = [history.add(saved(1, "x", "t"), "same").name for _ in range(3)]
    assert names == ["same", "same-2", "same-3"]
    assert history.add(saved(1, "../../etc", "t"), "../../up").parent == tmp_path


def test_a_capture_that_is_damaged_is_listed_with_the_reason(tmp_path):
    mp.open_run(tmp_path).add(saved(1, "x", "t"), "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "meta.json").write_text("{")
    ends = dict(mp.open_run(tmp_path).runs.select("name", "end").iter_rows())
    assert ends["good"] == "whole"
    assert "damaged" in ends["bad"]


def test_no_such_folder_is_told(tmp_path):
    with pytest.raises(mp.NbmemprofError, match="not a folder"):
        mp.open_run(tmp_path / "nowhere")
    with pytest.raises(mp.NbmemprofError, match="neither a watch nor a capture"):
        _ = mp.open_run(tmp_path).capture


def test_a_server_that_was_started_again_is_one_run_with_one_slope(tmp_path):
    """Each process begins at its base; the leak is the same in both, so the common slope is the leak."""
    rng = np.random.default_rng(0)
    for number in range(2):
        values = 50 * MIB + number * 20 * MIB + np.arange(300) * 2000 + rng.integers(0, 5000, 300)
        watched(tmp_path, f"{number}-a-{number}", float(number * 400), values, pid=number)
    run = mp.open_run(tmp_path)
    assert run.runs["end"].to_list() == ["stopped", "stopped"]
    pooled = run.trend(last_process=False).row(0, named=True)
    assert pooled["slope_bytes"] == pytest.approx(200, rel=0.05)
    assert (pooled["device"], pooled["series"], pooled["verdict"], pooled["per"]) == (0, "allocated_bytes", "growing", "step")
    alone = run.trend().row(0, named=True)
    assert alone["limit_bytes"] == 200 * MIB
    assert alone["lead_s"] == pytest.approx((200 * MIB - (70 * MIB + 600_000)) / 2000, rel=0.05)
    samples = run.capture.samples.filter(pl.col("gauge").cast(pl.String) == "allocated_bytes")
    assert samples["time_us"].is_sorted()
    assert samples["time_us"].max() == 699e6
    assert mp.summary(run.capture)["peak_allocated_bytes"].to_list() == [int(samples["value"].max())]


def test_ranks_are_told_apart(tmp_path):
    for rank in range(2):
        watched(tmp_path, f"0-a-{rank}", 0.0, 50 * MIB + np.arange(300) * 1000 * (rank + 1), rank=rank)
    found = mp.open_run(tmp_path).trend()
    assert dict(found.select("rank", "slope_bytes").iter_rows()) == pytest.approx({0: 100, 1: 200}, rel=0.01)


def test_without_a_last_word_it_is_running_while_files_are_fresh_and_killed_later(tmp_path, monkeypatch):
    watched(tmp_path, "0-a-1", 0.0, [MIB] * 30, ended=False)
    assert mp.open_run(tmp_path).runs["end"].to_list() == ["running"]
    later = time.time() + 1000
    monkeypatch.setattr(time, "time", lambda: later)
    run = mp.open_run(tmp_path)
    assert run.runs["end"].to_list() == ["killed"]
    assert any("without a word" in warning for warning in run.capture.meta["warnings"])


def test_two_watches_are_compared_by_what_they_held(tmp_path, capsys):
    watched(tmp_path / "a", "0-a-1", 0.0, [50 * MIB] * 30)
    watched(tmp_path / "b", "0-a-1", 0.0, [60 * MIB] * 30)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-above", "5%"]) == 1
    assert "peak: 50 MiB → 60 MiB" in capsys.readouterr().out
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--fail-above", "25%"]) == 0


def test_a_wrong_split_is_refused(tmp_path):
    with pytest.raises(mp.NbmemprofError, match="by='line'"):
        mp.open_run(tmp_path).trend(by="line")


@pytest.mark.cost(0.6)
def test_the_capture_of_a_watch_saves_loads_and_shows(tmp_path):
    watched(tmp_path / "run", "0-a-1", 0.0, [50 * MIB] * 30)
    made = mp.open_run(tmp_path / "run").capture
    again = mp.load(made.save(tmp_path / "run.nbmem"))
    assert again.samples.equals(made.samples)
    assert "text/html" in made._repr_mimebundle_()
    assert "<table" in mp.open_run(tmp_path / "run")._repr_html_()
