"""Each reward by itself in a batch's metrics: mean and deviation over its responses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.group_counts import GroupCounts
from easyrl.schema import RolloutGroup, Score
from tests.tiny_models import random_group


def group(*components: dict[str, float]) -> RolloutGroup:
    made = random_group(np.random.default_rng(0), 2, [3] * len(components))
    return replace(made, scores=tuple(Score(sum(c.values()), c) for c in components))


def scored(rng: np.random.Generator, num_groups: int) -> list[list[dict[str, float]]]:
    return [
        [{"math": float(rng.integers(2)), "length_sum": rng.normal(-3.0, 0.5)} for _ in range(4)]
        for _ in range(num_groups)
    ]


def totals(groups: list[list[dict[str, float]]]) -> BatchTotals:
    made = BatchTotals()
    for components in groups:
        made.add_counts(GroupCounts.of(group(*components)))
    return made


@pytest.mark.parametrize("num_updates", [1, 2])
def test_mean_and_deviation_are_of_all_responses_of_all_ranks(num_updates):
    rng = np.random.default_rng(1)
    updates, everything = [], []
    for _ in range(num_updates):
        of_ranks = [scored(rng, count) for count in (2, 5)]
        everything += [each for groups in of_ranks for row in groups for each in row]
        rows: list[object] = []
        for groups in of_ranks:
            totals(groups).merge(
                SimpleNamespace(all_gather=lambda row, rows=rows: rows.append(row) or [row])  # type: ignore[arg-type, func-returns-value]
            )
        merged = BatchTotals().merge(SimpleNamespace(all_gather=lambda row, rows=rows: rows))  # type: ignore[arg-type]
        updates.append(Update(merged))
    metrics = batch_metrics(updates, ())
    for name in ("math", "length_sum"):
        values = np.array([each[name] for each in everything])
        assert metrics[f"reward/{name}/mean"] == pytest.approx(values.mean(), abs=1e-12)
        assert metrics[f"reward/{name}/std"] == pytest.approx(values.std(), abs=1e-7)
    assert not [name for name in metrics if "squares" in name or "opinions" in name]


def test_a_reward_is_averaged_over_what_it_has_an_opinion_on():
    rows = [[{"math": 1.0, "judge": 3.0, "judge/short": 1.0}, {"math": 0.0}], [{"math": 1.0}] * 2]
    metrics = batch_metrics([Update(totals(rows))], ())
    assert metrics["reward/judge/mean"] == 3.0 and metrics["reward/judge/std"] == 0.0
    assert metrics["reward/judge/short/mean"] == 1.0
    assert metrics["reward/math/mean"] == 0.75


def test_a_constant_reward_has_no_deviation():
    metrics = batch_metrics([Update(totals([[{"math": 0.1}] * 3] * 7))], ())
    assert metrics["reward/math/mean"] == pytest.approx(0.1)
    assert metrics["reward/math/std"] == pytest.approx(0.0, abs=1e-7)
