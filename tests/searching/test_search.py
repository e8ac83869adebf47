"""The search on a modelled device that runs out of memory truthfully: exact, few tries, few refusals."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from simulated import Simulated, Training

from nbmemprof.errors import NbmemprofError
from nbmemprof.searching.batch import searched
from nbmemprof.searching.search import Search

pytestmark = pytest.mark.cost(0.1)
MIB = 1 << 20


@st.composite
def trainings(draw) -> tuple[Training, int]:
    layers = draw(st.integers(2, 8))
    sizes = st.integers(1, 40).map(lambda n: n << 18)
    step = Training(
        draw(st.lists(sizes, min_size=layers, max_size=layers)), draw(st.lists(st.integers(50_000, 4_000_000), min_size=layers, max_size=layers)), power=draw(st.sampled_from([1, 1, 2])),
        temporaries=draw(st.sampled_from([0, 700_000, 3_000_000])), workspace=draw(st.sampled_from([0, 32 * MIB])), saturating=draw(st.sampled_from([0, 3_000_000])), optimizer=draw(st.booleans()),
    )  # fmt: skip
    return step, sum(step.weights) * 5 + draw(st.integers(64, 900)) * MIB


@pytest.mark.cost(2)
@settings(max_examples=12, deadline=None)
@given(trainings(), st.sampled_from(["", "expandable_segments:True", "max_split_size_mb:64", "roundup_power2_divisions:4"]))
def test_the_answer_runs_and_the_next_does_not_whatever_the_step(training, conf):
    step, limit = training
    bench = Simulated(step, limit, conf=conf)
    result = searched(bench, 1, None)
    assert not bench.truth(result.batch + 1)
    assert result.batch == 0 or (result.exact and bench.truth(result.batch))
    assert len(result.made) <= 9
    assert result.ooms <= 3  # two in nearly all; a buffer that stops growing between the tries costs one more


def plain(limit: int = 600 * MIB, **more) -> Simulated:
    return Simulated(Training([8 * MIB] * 4, [3 * MIB] * 4, **more), limit)


def test_a_plain_step_takes_five_tries_and_one_refusal():
    result = searched(plain(), 1, None)
    assert (len(result.made), result.ooms, result.exact) == (5, 1, True)
    assert [t.purpose for t in result.made] == ["probe", "probe", "nearer", "jump", "confirm"]


def test_the_prediction_counts_what_a_flush_gives_back():
    """The true maximum needs the cache flushed: the peak of reserved bytes without a limit would answer less."""
    bench = Simulated(Training([8 * MIB] * 4, [3 * MIB, MIB, 13 * MIB // 2, 2 * MIB], temporaries=13 * MIB // 3), 300 * MIB)
    answer = searched(bench, 1, None)
    assert answer.exact
    assert next(t for t in answer.made if t.batch == answer.batch).retries > 0
    free = Simulated(bench.step, None)
    unlimited, _ = free.run(answer.batch, "probe")
    assert unlimited.peak_reserved_bytes > bench.limit


def test_state_that_appears_in_the_second_step_counts():
    """The field case: 32 MiB a sample, 600 MiB of state after the first step; one-step probes say 64, doubling finders 32."""

    def step(device, state, batch):
        held = [device.malloc(32 * MIB) for _ in range(batch)]
        for addr in held:
            device.free(addr)
        if "moments" not in state:
            state["moments"] = device.malloc(600 * MIB)

    result = searched(Simulated(step, 2048 * MIB + 4096), 1, None)
    assert (result.batch, result.exact, result.ooms, result.per_sample_bytes, result.fixed_bytes) == (45, True, 1, 32 * MIB, 600 * MIB)
    assert len(result.made) <= 8


def test_a_dimension_that_memory_grows_with_the_square_of():
    bench = Simulated(Training([MIB] * 2, [5000, 7000], power=2), 700 * MIB)
    result = searched(bench, 1, None)
    assert result.exact
    assert (result.batch > 100, len(result.made) <= 8, result.ooms <= 2) == (True, True, True)


def test_a_highest_batch_that_fits_is_the_answer_without_a_refusal():
    result = searched(plain(), 1, 6)
    assert (result.batch, result.exact, result.ooms) == (6, True, 0)
    assert "highest that was asked for" in result.sentence


def test_a_lowest_batch_that_does_not_fit_is_told():
    result = searched(plain(limit=40 * MIB), 4, None)
    assert (result.batch, result.exact, len(result.made)) == (0, False, 1)
    assert result.sentence.startswith("Not even 4 fits in 40 MiB")


def test_without_confirming_two_probes_and_the_rules_answer():
    bench = plain()
    result = searched(bench, 1, None, confirm=False)
    assert (len(result.made), result.exact, result.origin) == (2, False, "predicted")
    assert bench.truth(result.batch)
    assert not bench.truth(result.batch + 1)


def test_no_further_try_begins_after_the_time_limit():
    result = searched(plain(), 1, None, seconds=0.0)
    assert (len(result.made), result.exact) == (1, False)
    assert "time limit of 0 s" in result.sentence


def test_a_callable_that_tells_nothing_is_doubled_and_halved():
    result = searched(Simulated(Training([8 * MIB] * 4, [3 * MIB] * 4), 600 * MIB, recorded=False), 1, None)
    assert result.exact
    assert result.batch == searched(plain(), 1, None).batch
    assert result.per_sample_bytes is None
    assert result.peak_bytes(3) is None


@pytest.mark.parametrize("batch", [0, -5, 2.5, True, "8"])
def test_the_peak_at_what_is_no_batch_is_refused(batch):
    with pytest.raises(NbmemprofError, match="is not a batch size"):
        searched(plain(), 1, 4).peak_bytes(batch)


def test_the_peak_far_from_what_was_tried_is_refused_with_the_range():
    result = searched(plain(), 2, 8)
    with pytest.raises(NbmemprofError, match=r"peak_bytes\(1\) is outside of the batches that were tried, 2 to 8"):
        result.peak_bytes(1)
    with pytest.raises(NbmemprofError, match=r"mp\.predict\(step, 900\)"):
        result.peak_bytes(900)
    assert result.peak_bytes(7) is not None


def test_a_step_that_does_not_grow_ends_with_a_word():
    result = searched(Simulated(lambda device, state, batch: device.free(device.malloc(MIB)), 100 * MIB), 1, None)
    assert not result.exact
    assert "give high=" in result.sentence


def test_a_prediction_that_keeps_failing_is_not_believed():
    """A limit that the bench does not tell of: the model says far too much, and the search halves."""

    class Hidden(Simulated):
        def run(self, batch, purpose):
            if batch > 21:
                from nbmemprof.searching.trying import Try

                return Try(batch, False, purpose, None, None, 0, 0.0, "OutOfMemoryError: hidden", self.origin), None
            return super().run(batch, purpose)

    result = searched(Hidden(Training([MIB], [3 * MIB]), 4096 * MIB), 1, None)
    assert (result.batch, result.exact) == (21, True)
    assert len(result.made) <= 14


def test_the_bytes_of_a_sample_are_a_line_through_the_upper_tries():
    result = searched(plain(), 1, None)
    tried = {t.batch: t.peak_allocated_bytes for t in result.made if t.fits}
    assert result.peak_bytes(result.batch) == tried[result.batch]
    assert abs(result.peak_bytes(result.batch - 1) - (tried[result.batch] - result.per_sample_bytes)) <= 2 * MIB
    assert result.residual_bytes == 0
    assert result.tries["number"].to_list() == list(range(1, 6))


def test_each_try_is_announced_with_what_is_known():
    said: list[tuple[int, int]] = []
    search = Search(plain(), told=lambda tries, batch, room: said.append((len(tries), batch)))
    search.run()
    assert [n for n, _ in said] == list(range(len(search.tries)))
    assert [b for _, b in said] == [t.batch for t in search.tries]
