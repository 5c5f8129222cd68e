"""When the groups of a batch were complete, in its metrics."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.group_counts import GroupCounts
from tests.tiny_models import random_group

NAMES = ("time/first_group_s", "time/median_group_s", "time/last_group_s")


def totals(*times_s: tuple[float, float], recovered: bool = False) -> BatchTotals:
    """Of groups that were sent and complete at these times of a rank's own clock."""
    made = BatchTotals()
    for sent_s, complete_s in times_s:
        group = random_group(np.random.default_rng(0), 2, [3, 3])
        group = replace(group, dispatched_s=sent_s, completed_s=complete_s)
        made.add_counts(GroupCounts.of(group, recovered=recovered))
    return made


def merged(*ranks: BatchTotals) -> BatchTotals:
    rows: list[object] = []
    for rank in ranks:
        rank.merge(SimpleNamespace(all_gather=lambda row: rows.append(row) or [row]))  # type: ignore[arg-type, func-returns-value]
    return ranks[0].merge(SimpleNamespace(all_gather=lambda row: rows))  # type: ignore[arg-type]


def arrivals(*updates: BatchTotals) -> list[float]:
    metrics = batch_metrics([Update(update) for update in updates], ())
    return [metrics[name] for name in NAMES]


def test_they_count_from_the_first_request_of_the_rank():
    first = totals((100.0, 104.0), (101.0, 102.0), (100.5, 110.0))
    assert arrivals(merged(first)) == pytest.approx([2.0, 4.0, 10.0])
    second = totals((9000.0, 9001.0), (9000.5, 9020.0))  # another machine's clock
    assert arrivals(merged(first, second)) == pytest.approx([1.0, 4.0, 20.0])


def test_what_an_earlier_attempt_made_has_no_time_of_arrival():
    first = totals((100.0, 104.0), (101.0, 102.0))
    old = totals((1.0, 5.0), recovered=True)
    first.groups += old.groups
    assert arrivals(merged(first, old)) == pytest.approx([2.0, 3.0, 4.0])
    assert not set(NAMES) & set(batch_metrics([Update(merged(old))], ()))


def test_those_of_all_updates_of_a_batch_count():
    updates = [merged(totals((0.0, 1.0), (0.0, 2.0))), merged(totals((5.0, 8.0)))]
    assert arrivals(*updates) == pytest.approx([1.0, 2.0, 3.0])
