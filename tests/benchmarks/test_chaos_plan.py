"""The plan of strikes keeps to what the benchmark promises, and phases are told from events."""

from __future__ import annotations

import pytest

from benchmarks.parts.chaos.plan import ENDPOINT_STRIKES, TRAINER_STRIKES, plan_strikes
from benchmarks.parts.run_phase import (
    CLOSING,
    GENERATING,
    STARTING,
    STOPPING,
    SYNCING,
    TRAINING,
    RunPhase,
)


@pytest.mark.parametrize(("num_kills", "num_batches"), [(200, 100), (7, 3), (1, 1), (0, 5)])
def test_at_least_half_hit_the_trainer_and_all_fall_before_the_end(num_kills, num_batches):
    strikes = plan_strikes(num_kills, num_batches, seed=0)
    at_trainer = sum(strike.hits_trainer for strike in strikes)
    assert len(strikes) == num_kills and num_kills <= 2 * at_trainer
    dues = [strike.due for strike in strikes]
    assert dues == sorted(dues) and all(0 <= due < num_batches for due in dues)


def test_every_way_is_used_and_the_seed_decides():
    strikes = plan_strikes(200, 100, seed=0)
    assert {strike.how for strike in strikes} == {*TRAINER_STRIKES, *ENDPOINT_STRIKES}
    assert max(strike.due for strike in strikes) < 90
    assert strikes == plan_strikes(200, 100, seed=0) != plan_strikes(200, 100, seed=1)


def test_phases_of_an_attempt():
    phase = RunPhase()
    seen = [phase.name]
    for event in (
        {"event": "sync_start"},
        {"event": "sync_end"},
        {"event": "batch_dispatched", "num_recovered": 1},
        {"event": "group_ready"},
        {"event": "micro_batch_start"},
        {"event": "micro_batch_end"},  # one group is missing
        {"event": "group_ready"},
        {"event": "batch_generated"},
        {"event": "micro_batch_start"},
        {"event": "micro_batch_end"},
        {"event": "step", "step": 4, "version": "run:0:3"},
    ):
        phase.take(event)
        seen.append(phase.name)
    assert seen == [
        *(STARTING, SYNCING, CLOSING, GENERATING, GENERATING, TRAINING, GENERATING, GENERATING),
        *(GENERATING, TRAINING, CLOSING, CLOSING),
    ]
    assert phase.closed_batches == 4 and phase.has_dispatched


def test_a_new_attempt_starts_and_may_be_behind_the_last_one():
    phase = RunPhase()
    for event in (
        {"event": "step", "step": 4, "version": "run:0:3"},
        {"event": "checkpoint_copied"},
    ):
        phase.take(event)
    assert phase.writes_checkpoint
    phase.take({"event": "interrupted"})
    assert phase.name == STOPPING
    phase.begin_attempt()
    phase.take({"event": "step", "step": 3, "version": "run:1:2"})
    assert not phase.writes_checkpoint and phase.closed_batches == 4
