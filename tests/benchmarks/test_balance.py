"""``python -m benchmarks.balance``: what it counts as idle, its bound, and that it runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.parts.balance.hindsight import longest_first
from benchmarks.parts.balance.idle import Trained, idle_share
from benchmarks.parts.balance.workload import Load, make_load

ROOT = Path(__file__).parents[2]


def test_waiting_counts_where_a_finished_group_lies_or_the_other_trains_its_last() -> None:
    """Rank 0 waits from 2 to 5; group 2 is finished at 3 and begun at 4. It has ended at 6."""
    ranks = [
        Trained([(1.0, 2.0), (5.0, 6.0)], {0: 1.0, 3: 5.0}),
        Trained([(0.0, 4.0), (4.0, 8.0)], {1: 0.0, 2: 4.0}),
    ]
    arrivals = [1.0, 0.0, 3.0, 5.0]
    # rank 0: from 3 to 4, and 6 to 8; rank 1 never
    assert idle_share(ranks, arrivals) == pytest.approx((1.0 + 2.0) / 16)


def test_waiting_for_what_nobody_has_finished_does_not_count() -> None:
    ranks = [Trained([(3.0, 5.0)], {0: 3.0}), Trained([(4.0, 5.0)], {1: 4.0})]
    assert idle_share(ranks, [3.0, 4.0]) == 0.0


def test_a_rank_without_a_row_waits_for_all_of_the_other() -> None:
    assert idle_share([Trained([], {}), Trained([(1.0, 5.0)], {0: 1.0})], [1.0]) == 0.5


def test_a_group_that_was_not_trained_is_found() -> None:
    with pytest.raises(AssertionError, match="not trained"):
        idle_share([Trained([(0.0, 1.0)], {0: 0.0})], [0.0, 0.0])


def test_the_bound_is_what_all_assignments_at_once_cannot_beat_by_much() -> None:
    """All are finished at the start: against every partition of ten groups."""
    load = make_load(10, 4, 1.0, 1.5, seed=3)
    load = Load(load.lengths, [0.0] * 10, load.train_s)
    total = sum(load.train_s)
    best = min(
        max(own, total - own)
        for size in range(11)
        for own in map(sum, itertools.combinations(load.train_s, size))
    )
    ranks = longest_first(load, 2)
    ends = [rank.rows[-1][1] for rank in ranks]
    assert best <= max(ends) + 1e-9 <= 7 / 6 * best + 1e-9  # Graham's bound for two machines
    assert sum(end - begin for rank in ranks for begin, end in rank.rows) == pytest.approx(total)


def test_a_load_is_as_long_as_asked() -> None:
    load = make_load(256, 8, 20.0, 1.5, seed=0)
    assert sum(load.train_s) == pytest.approx(40.0)
    assert max(load.arrivals_s) == pytest.approx(20.0 / 1.5)
    longest = max(range(256), key=lambda group: max(load.lengths[group][1:]))
    assert load.arrivals_s[longest] == max(load.arrivals_s)
    assert idle_share(longest_first(load, 2), load.arrivals_s) <= 0.01


@pytest.mark.slow
def test_the_quick_form() -> None:
    """On a busy machine threads are late; what they are not is as far apart as fixed shares are."""
    command = [sys.executable, "-m", "benchmarks.balance", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["idle_hindsight"] <= 0.01
    assert row["idle_handover"] <= 0.08 < row["idle_strides"]
    assert 20 < row["groups_moved"] < row["groups"] == 256
    assert 0 < row["bytes_moved"] < row["bytes_dock"]
