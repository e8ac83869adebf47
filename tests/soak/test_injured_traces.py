"""Recorded traces with one event injured, by the thousand: a lost event is told at its place or within an interval that holds it, and nothing impossible is called exact.

``NBMEMPROF_DROPS`` says how many events are taken out (2,000), ``NBMEMPROF_INJURIES`` how many of each other injury (500), ``NBMEMPROF_INJURIES_SEED`` which.
"""

from __future__ import annotations

import collections
import os
import random

import injuries
import pytest

from nbmemprof.allocator import verdict

pytestmark = pytest.mark.soak
SEED = int(os.environ.get("NBMEMPROF_INJURIES_SEED", "0"))


@pytest.fixture(scope="module")
def exact() -> list[injuries.Whole]:
    """All recordings; each is followed exactly from its trace alone."""
    found = list(injuries.wholes())
    good = [whole for whole in found if verdict(whole.capture())["exact"]]
    print(f"\n{len(good)} of {len(found)} recordings are exact from the trace alone")
    assert len(good) == len(found)
    return good


def show(kind: str, table: collections.Counter) -> None:
    print(f"\n{kind}: {sum(table.values())} injuries")
    for action in sorted({a for a, _ in table}):
        print(f"  {action:15}", "  ".join(f"{tag} {n}" for tag in ("at", "in", "off", "exact", "nothing tells") if (n := table[action, tag])))


def test_a_lost_event_is_told_at_its_place_or_in_an_interval_that_holds_it(exact):
    count, rng, table, wrong = int(os.environ.get("NBMEMPROF_DROPS", "2000")), random.Random(SEED), collections.Counter(), []
    for whole, at, trace in injuries.choose(exact, count, "drop", rng):
        tag, action = injuries.told(whole, "drop", at, trace), whole.trace[at]["action"]
        if tag == "exact" and injuries.nothing_tells(whole, at):
            tag = "nothing tells"
        table[action, tag] += 1
        if tag in ("off", "exact"):
            wrong.append(f"{whole.name}: event {at}, {action}: {tag}")
            print(wrong[-1], flush=True)
    show("drop", table)
    assert not wrong


@pytest.mark.parametrize("kind", injuries.KINDS[1:])
def test_an_injured_trace_is_exact_only_where_the_allocator_could_have_left_it(exact, kind):
    """A request repeated or changed that was refused anyway; neighbours that do not depend on each other; a size that changes no block."""
    count, rng, table, wrong = int(os.environ.get("NBMEMPROF_INJURIES", "500")), random.Random(SEED + 1), collections.Counter(), []
    for whole, at, trace in injuries.choose(exact, count, kind, rng):
        tag, action = injuries.told(whole, kind, at, trace), whole.trace[at]["action"]
        table[action, tag] += 1
        if tag == "exact" and not possible(whole, kind, at):
            wrong.append(f"{whole.name}: event {at}, {action}")
            print(wrong[-1], flush=True)
    show(kind, table)
    assert not wrong


def possible(whole: injuries.Whole, kind: str, at: int) -> bool:
    event, following = whole.trace[at], whole.trace[min(at + 1, len(whole.trace) - 1)]
    if kind == "swap":  # two requests or frees of different blocks, or a free that then waits; a pool that is gone gave its memory back at any time
        pools = any(tuple(segment["segment_pool_id"]) != (0, 0) for segment in whole.snapshot["segments"])
        return following["action"] in ("alloc", "oom", "free_requested", "free_completed") or (pools and following["action"] in ("segment_free", "segment_unmap"))
    if event["action"] == "oom":
        return kind == "size" or whole.readings is None
    return kind == "size" and event["action"] == "alloc" and not any(e["action"] == "free_requested" and e["addr"] == event["addr"] for e in whole.trace[at:])
