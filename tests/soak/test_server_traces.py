"""Servers over days: ten million events with a leak, a hundred without one, a hundred killed, a real one that leaks."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import server
import server_traces as traces
import test_watch
from server_traces import MIB, Cache, Plan
from support import ROOT

CACHES = (Cache(500 * MIB, 2e5, False), Cache(700 * MIB, 6e5, True), Cache(300 * MIB, 4e5, False))
LONG = {"events": 10_000_000, "days": 10, "together": 24, "leak": 0.001}
BUSY = LONG | {"caches": CACHES, "restarts": (0.23, 0.41)}
KINDS = {
    "a piece of each request": BUSY,
    "the same, no caches": LONG,
    "a piece of each, 60 at a time, heaviest tails": BUSY | {"days": 3, "together": 60, "swing": 0.8, "tail": 1.3, "restarts": (0.5,)},
    "one request in 1000 whole, light tails": BUSY | {"whole": True, "tail": 3.0},
    "one in 1000 whole, heavy tails": BUSY | {"whole": True},
    "one in 1000 whole, heaviest tails": BUSY | {"whole": True, "tail": 1.3, "restarts": (0.3, 0.7)},
}
LEAKING = {f"{name}, seed {seed}": Plan(**options, seed=seed) for name, options in KINDS.items() for seed in (1, 2, 3)}


@pytest.mark.soak
@pytest.mark.parametrize("name", LEAKING)
def test_ten_million_events_with_a_leak_of_a_thousandth(name):
    """In a process of its own, so that its memory can be read: the slope within 2 %, at most 300 MB with the generator."""
    code = f"""
import sys, time, resource
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import server_traces as traces
from server_traces import Plan, Cache
plan = {LEAKING[name]!r}
began = time.perf_counter()
found = traces.follow(plan, traces.limit_of(plan), looks=200)
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
truth, slope, alarm = found.truth.judged_slope, found.slope, found.alarm
print(f"{{found.events:,}} events in {{seconds:.1f}} s, {{peak:.0f}} MiB: slope {{slope.slope:.1f}} of {{truth:.1f}} bytes a request that leaked ({{slope.slope / truth - 1:+.2%}}, "
      f"99 % interval {{slope.low / truth - 1:+.2%}} to {{slope.high / truth - 1:+.2%}}); told to grow after {{found.growing_requests:,}} requests, alarm after {{found.alarm_requests:,}} "
      f"({{found.alarm_requests / plan.requests:.1%}} of the run), {{alarm.lead_steps:,.0f}} requests or {{alarm.lead_s / 3600:.1f}} hours before the limit")
print(slope.slope / truth, slope.low / truth, slope.high / truth, peak)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    sentence, numbers = done.stdout.splitlines()
    print(f"\n{name}: {sentence}")
    ratio, low, high, peak = map(float, numbers.split())
    assert low - 0.02 <= 1 <= high + 0.02
    assert ratio == pytest.approx(1, abs=0.02)
    assert peak <= 300


@pytest.mark.soak
def test_a_hundred_servers_without_a_leak_raise_no_alarm():
    alarms, growing = [], 0
    for seed in range(100):
        plan = traces.leak_free(seed)
        found = traces.follow(plan, traces.limit_of(plan))
        alarms += [seed] if found.alarm else []
        growing += found.growing_requests is not None
    print(f"\n100 leak-free servers of 200,000 events, each judged 100 times: {len(alarms)} alarms; {growing} were told to be growing at some time (caches that fill)")
    assert alarms == []


@pytest.mark.soak
def test_a_hundred_killed_at_random_moments_are_readable(tmp_path):
    rng, turned = random.Random(1), 0
    for number in range(100):
        turned += bool(test_watch.killed(tmp_path / str(number), rng.uniform(0.0, 1.0)).state)
    print(f"\n100 of 100 watches killed with SIGKILL are readable; in {turned} the ring had gone round")


@pytest.mark.soak
@pytest.mark.parametrize("options", [(), ("--torch",)])
def test_a_real_server_is_told_before_its_limit(tmp_path, options):
    seen = test_watch.serve_until_alarm(tmp_path, 96, 24_000, *options)
    assert seen["alarm"]
    assert seen["rss"] < seen["limit"]
    print(f"\nserver.py {' '.join(options)}: leak {server.REQUEST // 1000} bytes a request, told {seen['per_step']:.0f}; alarm seen after {seen['sent']} requests, "
          f"{(seen['limit'] - seen['rss']) / MIB:.1f} of 96 MiB below the limit; {seen['alarm']['text']}")  # fmt: skip


@pytest.mark.soak
def test_a_real_server_without_a_leak_raises_no_alarm(tmp_path):
    seen = test_watch.serve_until_alarm(tmp_path, 96, 12_000, "--leak", "0")
    print(f"\nserver.py without a leak: {seen['sent']} requests, no alarm: {seen['alarm'] is None}; {seen['run']}")
    assert seen["alarm"] is None
