"""``mp.watch``: what it writes, what it tells, what it costs."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import time
from http.client import HTTPConnection
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import polars as pl
import pytest
import server
import server_traces as traces
from support import ROOT

import nbmemprof as mp
from nbmemprof import _optional
from nbmemprof.watching import gauges, store
from nbmemprof.watching.drift import drift
from nbmemprof.watching.series import Series
from nbmemprof.watching.trend import judge

MIB = 1 << 20


# ---------------------------------------------------------------------- series and trend
def test_a_series_keeps_lowest_highest_and_last_whatever_comes():
    values = np.random.default_rng(0).integers(0, 1 << 40, 50_000).astype(float)
    series = Series(1.0, buckets=100)
    for part in np.array_split(np.arange(50_000), 37):
        series.extend(part.astype(float), values[part], part.astype(float))
    assert 50 <= len(series) <= 100
    assert series.rows["low"].min() == values.min()
    assert series.rows["high"].max() == values.max()
    assert series.rows["last"][-1] == values[-1]
    assert series.rows["count"].sum() == 50_000
    assert series.rows["total"].sum() == values.sum()
    edges = np.append(0, np.searchsorted(np.arange(50_000), series.rows["time_s"]) + 1)
    assert series.rows["low"].tolist() == [values[a:b].min() for a, b in pairwise(edges)]


def test_one_by_one_is_as_all_at_once():
    values = np.random.default_rng(1).integers(0, 1000, 300).astype(float)
    single, whole = Series(1.0, 64), Series(1.0, 64)
    for i, value in enumerate(values):
        single.add(float(i), value, i)
    whole.extend(np.arange(300.0), values, np.arange(300.0))
    assert single.rows["low"].tolist() == whole.rows["low"].tolist()
    assert Series.load(single.dump()).rows["low"].tolist() == single.rows["low"].tolist()


def test_stretches_of_two_processes_are_never_joined():
    series = Series(10.0, 16)
    series.extend(np.arange(100.0), np.full(100, 5.0), np.arange(100.0))
    series.restart()
    series.extend(np.arange(101.0, 400.0), np.full(299, 1.0), np.arange(299.0))
    assert set(series.rows["low"]) == {5.0, 1.0}
    assert set(series.rows["high"]) == {5.0, 1.0}


def of(value, seconds=2000, per_s=10.0):
    """A series of one reading a second; ``value(requests)``."""
    time_s = np.arange(float(seconds))
    series = Series(1.0)
    series.extend(time_s, np.asarray(value(time_s * per_s), float), time_s * per_s)
    return series


def test_a_leak_is_told_for_each_step_with_its_interval_and_the_time_left():
    rng = np.random.default_rng(0)
    trend = judge(of(lambda n: 100 * MIB + 1000 * n + rng.integers(0, MIB, len(n))), 135 * MIB)
    assert trend.verdict == "growing"
    assert trend.low < 1000 < trend.high
    assert trend.slope == pytest.approx(1000, rel=0.02)
    assert trend.lead_s == pytest.approx((35 * MIB - 1000 * 20_000 - MIB) / 10_000, rel=0.05)
    assert trend.in_sight


def test_without_steps_the_slope_is_a_second():
    trend = judge(_timed(lambda t: 100 * MIB + 5000 * t))
    assert trend.per == "second"
    assert trend.slope == pytest.approx(5000, rel=1e-3)


def _timed(value):
    time_s = np.arange(2000.0)
    series = Series(1.0)
    series.extend(time_s, value(time_s), np.zeros(2000))
    return series


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("nothing but noise", lambda n: 100 * MIB + np.random.default_rng(1).integers(0, 8 * MIB, len(n)), "flat"),
        ("a cache that has filled early", lambda n: 100 * MIB + 50 * MIB * np.minimum(n / 4000, 1.0), "flat"),
        ("a cache that fills ever more slowly", lambda n: 100 * MIB + 50 * MIB * -np.expm1(-n / 9000), "filling"),
        ("memory that is emptied now and then", lambda n: 100 * MIB + (n % 1500) * 10_000, "flat"),
        ("half of it given back at the end", lambda n: 100 * MIB + np.where(n < 19_000, n * 1000, 0), "unknown"),
        ("a model that was loaded", lambda n: np.minimum(n, 300) * MIB, "flat"),
        ("ever less", lambda n: 100 * MIB - 1000 * n, "unknown"),
    ],
)
def test_what_only_looks_like_a_leak_is_called_by_its_name(name, value, verdict):
    trend = judge(of(value), 1024 * MIB)
    assert trend.verdict == verdict, name
    assert not trend.in_sight


def test_daily_load_is_no_growth_while_it_rises():
    """From night to noon the requests in flight rise: with the load taken out nothing is left."""
    rng = np.random.default_rng(2)
    time_s = np.arange(0.0, 43_200.0, 20)
    per_s = 10 * (1 - 0.9 * np.cos(2 * np.pi * time_s / 86_400))
    series = Series(20.0)
    series.extend(time_s, 1000 * MIB + per_s * 20 * MIB + rng.normal(0, 5 * MIB, len(time_s)), np.cumsum(per_s * 20))
    trend = judge(series, 1400 * MIB)
    assert trend.verdict == "flat"


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.0, 0.02, 1.0])
def test_growth_in_jumps_is_told_as_what_was_kept(share, seed):
    """From a piece of each request to few huge ones, under the ups and downs of the load: a line through the middle would be several percent off."""
    rng = np.random.default_rng(seed)
    count = 400
    jumps = np.where(rng.random(count) < 0.3, 10 * MIB * (1 + rng.pareto(1.5, count)), 0.0) * share + MIB * (1.01 - share)
    held, load = 500 * MIB + np.cumsum(jumps), 1 + np.sin(np.arange(count) / 10)
    x = np.arange(count) * 1000.0
    seen = held + 20 * MIB * load + rng.exponential(5 * MIB, count)
    seen[7 * rng.integers(1, 50, 5)] += 2000 * MIB  # a stretch in which nothing else was seen but the peak
    slope, error = drift([(x, seen, load)])
    truth = (held[-2] - held[0]) / (x[-2] - x[0])  # the last stretch has none after it that could confirm it
    assert slope == pytest.approx(truth, abs=0.015 * truth + 20 * MIB / x[-1])
    assert error < 0.05 * slope if share == 0 else error > 0.02 * slope, "jumps that are still to come are not known"


def test_the_same_drift_in_parts_is_one_drift():
    x = np.arange(50.0)
    part = (x, 3.0 * MIB * x, np.ones(50))
    slope, error = drift([part, (x + 1000, 3.0 * MIB * x + 9e9, np.ones(50))])
    assert slope == pytest.approx(3 * MIB, rel=1e-6)
    assert error < 1e-3 * slope


def test_two_readings_say_nothing():
    assert judge(of(lambda n: n, seconds=2)).verdict == "unknown"
    assert judge(Series()).verdict == "unknown"


@pytest.mark.cost(0.6)
def test_servers_without_a_leak_raise_no_alarm_and_one_with_a_leak_does():
    """Three of the hundred kinds that the soak tries, and a short run with a leak of 0.1 %."""
    for seed in (2, 9, 16):
        plan = traces.leak_free(seed, events=40_000)
        assert traces.follow(plan, traces.limit_of(plan), looks=30).alarm is None
    leaking = traces.follow(traces.Plan(events=1_000_000, leak=0.001), 2048 * MIB + 2000 * MIB, looks=40)
    assert leaking.slope.slope == pytest.approx(leaking.truth.slope, rel=0.02)
    assert leaking.alarm is not None
    assert leaking.alarm.lead_steps > 0


# ---------------------------------------------------------------------- the watch
def settle(check, seconds=5.0):
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


def test_a_watch_keeps_readings_steps_labels_and_numbers_of_the_program(tmp_path):
    with mp.watch(tmp_path / "run", interval_s=0.01, title="api") as watch:
        watch.step()
        watch.step("chat", 2)
        watch.gauge("kv_cache_bytes", 5 * MIB)
        watch.mark("new model")
        settle(lambda: any("own" in found for _, _, found in watch._fresh))
        running = mp.open_run(tmp_path / "run")
        assert running.runs["end"].to_list() == ["running"]
    run = mp.open_run(tmp_path / "run")
    row = run.runs.row(0, named=True)
    assert (row["title"], row["kind"], row["end"], row["steps"], row["alarms"]) == ("api", "watch", "stopped", 3.0, 0)
    assert row["peak_bytes"] > 10 * MIB
    last = dict(run.capture.samples.with_columns(pl.col("gauge").cast(pl.String)).group_by("gauge", maintain_order=True).agg(pl.col("value").last()).iter_rows())
    assert last["steps"] == 3
    assert last["steps chat"] == 2
    assert last["kv_cache_bytes"] == 5 * MIB
    assert last["rss_bytes"] > 10 * MIB
    assert "new model" in run.capture.marks["name"].to_list()
    assert "no events" in run.capture.meta["warnings"][0]
    assert "stopped" in repr(run)


def test_a_watch_costs_a_hundredth_of_a_core_at_most(tmp_path):
    with mp.watch(tmp_path, interval_s=0.0005) as watch:
        time.sleep(0.7)
        spent, whole = watch.cost_s, time.monotonic() - watch._begin
        # and 10 ms for loading LAPACK; the pause after the last round is not over yet
        assert spent < 0.01 * whole + 0.03
        assert "cost" in repr(watch)


def test_stopping_twice_and_after_an_error_is_quiet(tmp_path):
    with pytest.raises(ZeroDivisionError), mp.watch(tmp_path) as watch:
        raise ZeroDivisionError
    watch.stop()
    watch.mark("too late")
    assert "ended by ZeroDivisionError" in mp.open_run(tmp_path).capture.marks["name"].to_list()


def test_what_makes_no_sense_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for make, said in (
        (lambda: mp.watch(tmp_path / "file"), "can't be written"),
        (lambda: mp.watch(tmp_path, interval_s=0), "interval_s"),
        (lambda: mp.watch(tmp_path, on_alarm=3), "on_alarm"),
        (lambda: mp.watch(tmp_path, limit_bytes="much"), "not a size"),
    ):
        with pytest.raises(mp.NbmemprofError, match=said):
            make()


@pytest.fixture
def fed(tmp_path):
    """A watch whose readings are given by hand: ``fed(value, hook)`` after 400 s of growth."""
    made = []

    def feed(value, **options):
        watch = mp.watch(tmp_path / "fed", interval_s=3600, warmup_s=0, **options)
        made.append(watch)
        watch._fresh.clear()
        series = watch._series["host", "rss_bytes"] = Series(1.0)
        time_s = np.arange(400.0)
        series.extend(time_s, value(time_s), time_s * 10)
        return watch

    yield feed
    for watch in made:
        watch.stop()


def test_an_alarm_calls_the_hook_once_writes_a_line_and_says_how_long_it_lasts(fed, caplog):
    told = []
    watch = fed(lambda t: 100 * MIB + t * MIB, host_limit_bytes="700MiB", on_alarm=told.append)
    with caplog.at_level(logging.WARNING, logger="nbmemprof.watch"):
        for _ in range(5):
            watch._judge()
    assert len(told) == 1
    assert told[0].lead_s == pytest.approx(201, abs=4)
    assert told[0].slope_bytes_per_step == pytest.approx(MIB / 10, rel=0.01)
    assert "host memory" in told[0].text
    assert "700 MiB" in told[0].text
    assert told[0].text in caplog.text
    watch.stop()
    alarms = mp.open_run(watch.folder).alarms
    assert alarms["text"].to_list() == [told[0].text]
    assert mp.open_run(watch.folder).runs["alarms"].to_list() == [1]


def test_growth_that_meets_the_limit_far_ahead_raises_nothing_yet(fed):
    watch = fed(lambda t: 100 * MIB + t * MIB, host_limit_bytes="1200MiB")
    for _ in range(5):
        watch._judge()
    assert watch.alarms == []
    assert watch.trends()["host", "rss_bytes"].verdict == "growing"


def test_a_hook_that_fails_is_noted_and_the_watch_goes_on(fed, caplog):
    def hook(alarm):
        raise RuntimeError("pager is down")

    watch = fed(lambda t: 100 * MIB + t * MIB, host_limit_bytes="700MiB", on_alarm=hook)
    watch._judge()
    watch._judge()
    watch.step()
    watch.stop()
    assert any("pager is down" in name for name in mp.open_run(watch.folder).capture.marks["name"])


def test_a_number_of_the_program_with_a_limit_is_judged(fed):
    watch = fed(lambda t: np.full(400, 100.0 * MIB))
    watch.gauge("queue", 400, limit=700)
    series = watch._series["own", "queue"] = Series(1.0)
    series.extend(np.arange(400.0), np.arange(400.0) * 1e6, np.zeros(400))
    watch.gauge("queue", 400e6, limit=700e6)
    watch._judge()
    watch._judge()
    assert [alarm.gauge for alarm in watch.alarms] == ["queue"]


def test_torch_counters_are_read_for_each_device_in_use_and_no_peak_is_reset(monkeypatch):
    calls = []

    def stats(device):
        calls.append(device)
        now = {"current": 7 * MIB, "peak": 9 * MIB if device == 0 else 0}
        return {"allocated_bytes": {"all": now}, "reserved_bytes": {"all": now}, "requested_bytes": {"all": now}, "active_bytes": {"all": now}, "allocation": {"all": now}, "num_ooms": 1}

    cuda = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 2, memory=SimpleNamespace(get_per_process_memory_fraction=lambda d: 0.5),
        get_device_properties=lambda d: SimpleNamespace(total_memory=80 << 30),
    )  # fmt: skip
    fake = SimpleNamespace(cuda=cuda, _C=SimpleNamespace(_cuda_memoryStats=stats))  # has nothing that could reset
    monkeypatch.setattr(_optional, "loaded", lambda name: fake if name == "torch" else None)
    found = gauges.read()
    assert list(found) == ["host", "0"]  # device 1 has never held anything
    assert found["0"]["allocated_bytes"] == 7 * MIB
    assert found["0"]["allocated_peak_bytes"] == 9 * MIB
    assert found["0"]["ooms"] == 1
    assert gauges.limits(None, 5)["0"] == 40 << 30
    assert gauges.limits(3, 5) == {"host": 5, "0": 3, "1": 3}


def test_a_watch_in_a_child_of_fork_is_the_parents(tmp_path):
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import nbmemprof as mp
watch = mp.watch({str(tmp_path)!r}, interval_s=0.01)
child = os.fork()
if child == 0:
    watch.step(); watch.mark("from the child"); watch.stop()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
watch.step()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    run = mp.open_run(tmp_path)
    assert run.runs["end"].to_list() == ["stopped"]  # at the end of the interpreter
    assert run.runs["steps"].to_list() == [1.0]
    assert "from the child" not in run.capture.marks["name"].to_list()


def test_a_watch_needs_neither_polars_nor_torch(tmp_path):
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import nbmemprof as mp
with mp.watch({str(tmp_path)!r}, interval_s=0.01) as watch:
    watch.step()
    watch._judge()
assert not {{"polars", "torch", "numba", "IPython"}} & set(sys.modules), sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.cost(0.9)
def test_with_stacks_the_lines_that_hold_memory_are_kept(tmp_path):
    torch = pytest.importorskip("torch")
    kept = []
    with mp.watch(tmp_path, interval_s=0.02, stacks=True, warmup_s=0) as watch:
        for number in range(60):
            kept.append(torch.ones(100_000))
            watch.step()
            if number % 10 == 0:
                watch._look_at_sites(watch._now())
        watch._look_at_sites(watch._now())
        assert watch._grown_sites()[0][0].startswith("test_watch.py:")
    run = mp.open_run(tmp_path)
    mine = run.live_sites.filter(pl.col("site").str.starts_with("test_watch.py"))
    assert mine["size_bytes"].max() == 60 * 400_000
    assert mine["count"].max() == 60
    assert run.trend(by="site").filter(pl.col("series").str.starts_with("test_watch.py")).height == 1


# ---------------------------------------------------------------------- kill -9, and a real server
VICTIM = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import nbmemprof as mp
watch = mp.watch(sys.argv[1], interval_s=0.001, ring_bytes=32768)
print("ready", flush=True)
n = 0
while True:
    n += 1
    watch.step()
    if n % 50 == 0:
        watch.mark(f"mark {{n}} " + "x" * 60)  # the ring of 32 kB goes round many times a second
"""


def killed(folder, seconds):
    """A watching process, killed after that time; what is read of it."""
    with subprocess.Popen([sys.executable, "-c", VICTIM, str(folder)], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        time.sleep(seconds)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    story = store.read(folder, store.names(folder)[0])
    run = mp.open_run(folder)
    assert run.runs["end"].to_list() == ["killed"]
    assert story.damaged == 0
    samples = run.capture.samples.filter(pl.col("gauge").cast(pl.String) == "rss_bytes")
    assert samples.height >= 1
    assert samples["time_us"].min() < 0.2e6, "the beginning is kept, thinned"
    assert run.capture.marks["time_us"].max() > (seconds - 0.3) * 1e6, "to the very end"
    assert run.trend().height == 1
    return story


@pytest.mark.cost(2.9)
def test_killed_at_random_moments_every_run_is_readable(tmp_path):
    rng = random.Random(0)
    stories = [killed(tmp_path / str(i), rng.uniform(0.0, 0.5)) for i in range(5)]
    assert any(story.state for story in stories), "in some the ring had gone round"


def test_a_state_whose_segments_were_not_removed_yet_counts_once(tmp_path):
    """The process died between writing the state and removing what it stands for."""
    log = store.Log(tmp_path, "a", 8 * 4096, lambda: {"notes": []})
    for number in range(700):
        log.append({"k": "s", "n": number, "x": "y" * 60})
    log.close()
    before = store.read(tmp_path, "a")
    assert before.state["through"] >= 1
    (tmp_path / f"a.{before.state['through']:05d}.watch").write_bytes(store._line({"k": "s", "n": -1}))
    again = store.read(tmp_path, "a")
    assert [r["n"] for r in again.records] == [r["n"] for r in before.records]
    assert sum(path.stat().st_size for path in tmp_path.glob("*.watch")) < 10 * 4096


def test_torn_and_damaged_lines_are_left_out_and_counted(tmp_path):
    log = store.Log(tmp_path, "a", 1 << 20, dict)
    for number in range(5):
        log.append({"n": number})
    log.close()
    path = tmp_path / "a.00001.watch"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1].replace(b'"n":1', b'"n":7')
    lines[3] = b"\xff\xfe not a record\n"
    path.write_bytes(b"".join(lines)[:-4])
    story = store.read(tmp_path, "a")
    assert [r["n"] for r in story.records] == [0, 2]
    assert (story.damaged, story.torn) == (2, True)


@pytest.mark.cost(6)
def test_a_real_server_that_leaks_a_thousandth_is_told_before_its_limit(tmp_path):
    seen = serve_until_alarm(tmp_path, 40, 9000, "--hurry")
    assert seen["alarm"], "an alarm"
    assert seen["rss"] < seen["limit"], "before the limit"
    assert seen["per_step"] == pytest.approx(server.REQUEST / 1000, rel=0.5)


def serve_until_alarm(folder, room_mib, most, *options):
    """Send requests to a server until it tells of its leak; what was seen at that moment."""
    command = [sys.executable, server.__file__, str(folder), str(room_mib), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            port, limit = map(int, process.stdout.readline().split())
            client = HTTPConnection("127.0.0.1", port, timeout=30)
            for sent in range(1, most + 1):
                client.request("GET", "/")
                client.getresponse().read()
                if sent % 250 == 0 and mp.open_run(folder).alarms.height:
                    break
            run = mp.open_run(folder)
            alarm = run.alarms.row(0, named=True) if run.alarms.height else None
            rss = run.capture.samples.filter(pl.col("gauge").cast(pl.String) == "rss_bytes")["value"].max()
            return {"alarm": alarm, "rss": rss, "limit": limit, "sent": sent, "per_step": run.trend()["slope_bytes"][0], "run": run.text()}
        finally:
            process.kill()
            process.wait()
