"""Extremes and deviation of rewards, lengths and generation rate, of all updates and ranks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.group_counts import GroupCounts
from easyrl.schema import RolloutGroup, Score
from tests.tiny_models import random_group


def group(
    rng: np.random.Generator, rewards: list[float], begun_s: float, ended_s: float
) -> RolloutGroup:
    lengths = rng.integers(1, 9, len(rewards)).tolist()
    made = random_group(rng, 2, lengths)
    scores = tuple(Score(reward, {"r": reward}) for reward in rewards)
    return replace(made, scores=scores, dispatched_s=begun_s, completed_s=ended_s)


def merged(of_ranks: list[list[RolloutGroup]], recovered: frozenset[int] = frozenset()) -> Any:
    rows: list[Any] = []
    for groups in of_ranks:
        totals = BatchTotals()
        for each in groups:
            totals.add_counts(GroupCounts.of(each, recovered=id(each) in recovered))
        gather: Any = SimpleNamespace(all_gather=lambda row: rows.append(row) or [row])  # type: ignore[func-returns-value]
        totals.merge(gather)
    final: Any = SimpleNamespace(all_gather=lambda row: rows)
    return BatchTotals().merge(final)


@pytest.mark.parametrize("num_updates", [1, 2])
def test_they_are_those_of_all_responses(num_updates: int) -> None:
    rng = np.random.default_rng(num_updates)
    updates, everything = [], []
    for _ in range(num_updates):
        of_ranks = [
            [group(rng, rng.normal(-2.0, 1.0, 4).tolist(), 1.0, 2.0) for _ in range(count)]
            for count in (1, 3)
        ]
        everything += [each for groups in of_ranks for each in groups]
        updates.append(Update(merged(of_ranks)))
    metrics = batch_metrics(updates, ())
    rewards = np.concatenate([each.rewards for each in everything]).astype(np.float64)
    lengths = [len(c.token_ids) for each in everything for c in each.completions]
    assert metrics["reward/min"] == rewards.min() < 0
    assert metrics["reward/max"] == rewards.max()
    # sums of squares cancel: a relative 1e-16 of 2² times the number of terms, far below 1e-9
    assert metrics["reward/std"] == pytest.approx(rewards.std(ddof=1), rel=1e-9)
    assert metrics["response/min_tokens"] == min(lengths)
    assert metrics["response/max_tokens"] == max(lengths)
    assert not [name for name in metrics if "minus" in name or "square" in name]


def test_equal_rewards_do_not_deviate_and_records_have_none() -> None:
    rng = np.random.default_rng(0)
    same = batch_metrics([Update(merged([[group(rng, [0.5] * 3, 0.0, 1.0)]]))], ())
    assert same["reward/std"] == 0.0 and same["reward/min"] == same["reward/max"] == 0.5
    unscored = replace(group(rng, [0.5, 0.5], 0.0, 0.0), scores=())
    metrics = batch_metrics([Update(merged([[unscored]]))], ())
    assert "reward/min" not in metrics and "reward/std" not in metrics
    assert "throughput/generated_tokens_per_s" not in metrics  # nothing took time


def test_generated_tokens_are_over_the_seconds_of_the_slowest_rank() -> None:
    """Each rank has a clock of its own; what an earlier attempt has generated is not counted."""
    rng = np.random.default_rng(3)
    one = [group(rng, [0.0, 1.0], 100.0, 103.0), group(rng, [0.0, 1.0], 101.0, 104.0)]
    other = [group(rng, [0.0, 1.0], 7.0, 9.5), group(rng, [0.0, 1.0], 0.0, 0.0)]
    later = [[group(rng, [0.0, 1.0], 102.0, 108.0)], [group(rng, [0.0, 1.0], 8.0, 12.0)]]
    known = frozenset({id(other[1])})
    first, second = Update(merged([one, other], known)), Update(merged(later))

    def tokens(*groups: RolloutGroup) -> int:
        return sum(len(c.token_ids) for each in groups for c in each.completions)

    name = "throughput/generated_tokens_per_s"
    of_first = batch_metrics([first], ())[name]
    assert of_first == pytest.approx(tokens(*one, other[0]) / 4.0)  # rank 0: 100 to 104
    whole = batch_metrics([first, second], ())[name]
    assert whole == pytest.approx(tokens(*one, other[0], later[0][0], later[1][0]) / 8.0)
