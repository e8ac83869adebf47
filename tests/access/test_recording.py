"""How patterns are packed into launches and read back out of totals, with the model in place of a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
sys.path.append(str(TESTS / "gpu"))
import patterns
import record_patterns as recorder
from modelled_access import access, count
from patterns import Pattern


def modelled(pattern: Pattern) -> int:
    return count(access(pattern))


def totals(found: list[Pattern], launches: list) -> list[dict[str, int]]:
    """What counters would show if the model were the hardware; a launch moves something of its own."""
    counts = []
    for number, launch in enumerate(launches):
        own = 100 + number // 2 if len(launch) > 1 else 300
        row = {m: own for names in recorder.METRICS.values() for m in names}
        for n, times in launch:
            metric, *requests = recorder.METRICS[found[n].space]
            row[metric] += times * modelled(found[n])
            for request in requests:
                row[request] += times
        counts.append(row)
    return counts


@pytest.mark.cost(0.5)
def test_packed_counts_come_apart_again():
    found = patterns.stored()[:120]
    launches = recorder.packed(found, 3)
    assert len(launches) < 2 * 120 / 4
    assert sorted(n for launch in launches[::2] for n, _ in launch) == list(range(120))
    decoded = recorder.decoded(found, launches, totals(found, launches))
    assert [decoded[n] for n in range(120)] == [modelled(p) for p in found]


def test_counts_of_a_launch_of_its_own_are_read_past_the_launch_s_traffic():
    found = patterns.stored()[:20]
    launches = recorder.alone(found)
    decoded = recorder.decoded(found, launches, totals(found, launches))
    assert [decoded[n] for n in range(20)] == [modelled(p) for p in found]


def test_one_request_too_many_is_noticed():
    found = patterns.stored()[:16]
    launches = recorder.packed(found, 3)
    counts = totals(found, launches)
    counts[0]["l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum"] += 1
    with pytest.raises(ValueError, match="requests"):
        recorder.decoded(found, launches, counts)


def test_what_a_launch_computes_is_checked_lane_by_lane():
    memory = recorder.initial()
    found = [Pattern("global load", 8, tuple(8 * i if i % 2 else None for i in range(32))), Pattern("global store", 2, tuple(2 * (i // 2) for i in range(32)))]
    sums = recorder.expected(found, [(0, 3)], memory)
    words = memory.view(np.uint32)
    assert sums[1] == (3 * (int(words[2]) + int(words[3]))) % 2**32
    assert sums[0] == 0
    after = memory.copy()
    after[:32] = np.array([[2 * i + 2, 0] for i in range(16)], np.uint8).ravel()
    assert recorder.stored_right(found, [(1, 5)], memory, after)
    after[40] ^= 1
    assert not recorder.stored_right(found, [(1, 5)], memory, after)


def test_ncu_s_table_is_read_by_name():
    names = [m for several in recorder.METRICS.values() for m in several]
    text = "\n".join(['==PROF== x', ",".join(f'"{n}"' for n in ("ID", "Kernel Name", *names)), ",".join(['""', '""', *['"sector"'] * 8]), ",".join(['"0"', '"access_patterns"', *[f'"{1000 + i:,}"' for i in range(8)]])])
    assert recorder.parsed(text) == [{n: 1000 + i for i, n in enumerate(names)}]
