"""The dynamic sampling benchmark: its simulation, by hand, and what both sides train."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from benchmarks.dynamic_sampling import train_s_of_group
from benchmarks.parts.dynamic_sampling.load import Load, same_batch
from benchmarks.parts.dynamic_sampling.run import run_batch
from benchmarks.parts.dynamic_sampling.simulation import simulate


@dataclass(frozen=True)
class Scripted:
    """Lengths and rejected positions as the test says; two responses of equal length per group."""

    lengths: tuple[float, ...]
    rejected: frozenset[int] = frozenset()
    num_groups: int = 2
    num_samples: int = 2
    num_slots: int = 4
    num_ranks: int = 1

    def seconds(self, position: int, sample: int) -> float:
        return self.lengths[position]

    def accepts(self, position: int) -> bool:
        return position not in self.rejected

    def rank_of(self, position: int) -> int:
        return position % self.num_ranks


def test_replacements_overlap_with_the_groups_that_are_still_running() -> None:
    """Group 0 is rejected after 1 s, group 1 ends at 5 s, group 2 takes 3 s."""
    timing = Scripted((1, 5, 3), rejected=frozenset({0}))
    overlapped, after = (simulate(timing, overlapped=yes) for yes in (True, False))
    assert overlapped.ready == [(4, 2), (5, 1)] and overlapped.generation_s == 5
    assert after.ready == [(5, 1), (8, 2)] and after.generation_s == 8
    # trained as they come, 2 s each: 4 to 6 and 6 to 8, against 5 to 7 and 8 to 10
    assert overlapped.batch_s(2) == 8 and after.batch_s(2) == 10


def test_a_batch_lasts_until_the_last_rejection_too() -> None:
    """Nothing is trained behind it, yet the batch is not known before."""
    timing = Scripted((1, 1, 9, 1), rejected=frozenset({0, 1, 2}), num_groups=1)
    batch = simulate(timing, overlapped=True)
    assert batch.ready == [(12, 3)] and batch.batch_s(1) == 13
    assert simulate(timing, overlapped=False).ready == batch.ready  # one at a time, anyway


def test_requests_wait_for_a_slot_in_the_order_of_their_prompts() -> None:
    """Two slots: group 0 until 1 s, 1 until 3 s; 3 replaces 0 and waits behind 2."""
    timing = Scripted((1, 2, 4, 1), rejected=frozenset({0}), num_groups=3, num_slots=2)
    assert simulate(timing, overlapped=True).ready == [(3, 1), (7, 2), (8, 3)]


def test_ranks_train_their_own_groups_at_the_same_time() -> None:
    timing = Scripted((1, 1, 1, 1), num_groups=4, num_slots=8, num_ranks=2)
    assert simulate(timing, overlapped=True).batch_s(3) == 7  # two each
    assert simulate(replace(timing, num_ranks=1), overlapped=True).batch_s(3) == 13


def test_the_load_is_the_same_whoever_asks_and_rejects_more_and_more() -> None:
    some, others = Load(8, 4, 4, 0.2), Load(8, 4, 4, 0.4, num_ranks=2)
    assert [some.seconds(p, 1) for p in range(9)] == [others.seconds(p, 1) for p in range(9)]
    accepted = [{p for p in range(500) if load.accepts(p)} for load in (some, others)]
    assert accepted[1] < accepted[0]
    assert [len(a) / 500 for a in accepted] == pytest.approx([0.8, 0.6], abs=0.06)
    mean = sum(some.seconds(p, s) for p in range(500) for s in range(4)) / 2000
    assert mean == pytest.approx(some.mean_s, rel=0.1)


def test_training_is_as_long_as_generation_without_rejections() -> None:
    load = Load(8, 4, 4, 0.4, num_ranks=2)
    generation_s = simulate(replace(load, rejection=0.0), overlapped=True).generation_s
    assert 4 * train_s_of_group(load) == pytest.approx(generation_s)


def test_batches_of_other_prompts_are_not_the_same() -> None:
    assert same_batch([3, 1, 2], [1, 2, 3])
    assert not same_batch([1, 2, 3], [1, 2, 4])
    assert not same_batch([1, 2], [1, 2, 3])
    assert not same_batch([1, 2, 2], [1, 2, 2])  # trained twice, on both sides


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_real_producer_trains_what_the_simulation_says(num_ranks: int) -> None:
    """The shortest prefix with B accepted groups; nobody before has ended before it might."""
    load = Load(8, 2, 4, 0.4, num_ranks=num_ranks, mean_s=0.01, seed=1)
    shortest = [p for p in range(100) if load.accepts(p)][:8]
    for overlapped in (True, False):
        run = run_batch(load, 0.001, overlapped=overlapped)
        simulated = simulate(load, overlapped=overlapped)
        assert sorted(run.trained) == sorted(simulated.trained) == shortest
        assert run.batch_s >= run.generation_s >= simulated.generation_s
