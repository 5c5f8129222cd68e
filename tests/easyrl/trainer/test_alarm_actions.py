"""What follows from an alarm in the training loop: nothing, a kept checkpoint, or the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from easyrl.config import AlarmsConfig
from easyrl.metrics.alarms.alarms import Alarms
from easyrl.metrics.event_log import ignore
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.schema import NEEDS_CHANGE, InterruptedRun, Progress, Score, StoppedByAlarm
from easyrl.trainer.alarm_actions import AlarmActions
from tests.easyrl.trainer.fake_parts import FakeLedger, group, make_trainer
from tests.thread_ranks import on_ranks

ALONE = Collectives(Ranks.data_parallel(0, 1))


def flat_from_prompt_2(index: int, version: str) -> Any:
    """A group; from the second batch on all rewards are equal."""
    made = group(index, version)
    return made if index < 2 else replace(made, scores=(Score(1.0, {"r": 1.0}),) * 2)


def alarmed_trainer(events: list[str], on_alarm: Any, **options: Any) -> Any:
    config = AlarmsConfig(on_alarm=on_alarm, warmup_batches=0, window=1)
    alarms = Alarms(config, ignore)
    trainer, reported = make_trainer(
        events,
        make=flat_from_prompt_2,
        alarms=AlarmActions(on_alarm, alarms, ALONE),
        **({"num_batches": 4} | options),
    )
    trainer.reporter.alarms = alarms
    return trainer, reported


def test_a_warning_changes_nothing_but_the_metrics() -> None:
    events: list[str] = []
    trainer, reported = alarmed_trainer(events, "warn")
    trainer.fit()
    plain: list[str] = []
    make_trainer(plain, make=flat_from_prompt_2, num_batches=4)[0].fit()
    assert events == plain
    shown = [metrics["alarm/no_signal"] for _, metrics in reported if "reward/mean" in metrics]
    assert shown == [0.0, 1.0, 1.0, 1.0]


def test_a_checkpoint_is_written_once_behind_the_batch_of_the_alarm() -> None:
    events: list[str] = []
    trainer, _ = alarmed_trainer(events, "checkpoint")
    trainer.fit()
    assert [event for event in events if event.startswith("save")] == ["save for alarm no_signal"]
    at = events.index("save for alarm no_signal")
    assert events[at - 2 : at] == ["publish run:0:2", "begin [4, 5] run:0:2"]
    assert events[-1] == "end weights 4"


def test_a_stop_saves_gives_the_open_batch_up_and_can_be_resumed() -> None:
    events: list[str] = []
    trainer, reported = alarmed_trainer(events, "stop")
    with pytest.raises(InterruptedRun) as raised:
        trainer.fit()
    assert raised.value.status == NEEDS_CHANGE
    text = str(raised.value)
    assert text.startswith("alarm no_signal behind step 2: 100% of the groups have equal rewards")
    assert text.endswith("\nstep 2 is saved; go on with --resume")
    assert events[-3:] == ["begin [4, 5] run:0:2", "batch closed", "save"]
    assert reported[-1][0] == 2 and reported[-1][1]["alarm/no_signal"] == 1.0

    progress = Progress(**trainer.progress.__dict__)
    assert progress.reported_step == 2 and progress.unreported == {}
    events.clear()
    resumed, _ = alarmed_trainer(events, "stop", progress=progress)
    resumed.reporter.alarms.add_earlier(metrics for _, metrics in reported)
    resumed.fit()  # the alarm has not ceased, so it is not raised again
    assert events[-1] == "end weights 4"


def test_behind_the_last_batch_there_is_nothing_to_stop() -> None:
    events: list[str] = []
    trainer, reported = alarmed_trainer(events, "stop", num_batches=2)
    trainer.fit()
    assert reported[-1][1]["alarm/no_signal"] == 1.0 and events[-1] == "end weights 2"


@pytest.mark.parametrize("on_alarm", ["checkpoint", "stop"])
def test_two_ranks_act_alike_though_only_the_first_judges(on_alarm: Any) -> None:
    """Both save, or both raise the same, behind the same step."""

    def one_rank(collectives: Collectives) -> list[Any]:
        events: list[str] = []
        alarms = None
        if collectives.ranks.is_first:
            alarms = Alarms(AlarmsConfig(warmup_batches=0, window=1), ignore)
        actions = AlarmActions(on_alarm, alarms, collectives)
        outcome: list[Any] = []
        for step, share in enumerate([0.0, 0.0, 1.0, 1.0], start=1):
            if alarms is not None:
                figures = {"reward/mean": 0.5, "reward/flat_groups": share}
                alarms.look(step, figures | {"batch/groups": 4.0, "batch/groups_rejected": 0.0})
            try:
                actions.act(FakeLedger(events), Progress(step=step))
            except StoppedByAlarm as error:
                return [*outcome, f"{step}: {error}"]
            outcome.append(list(events))
        return outcome

    first, second = on_ranks(2, one_rank)
    assert first == second
    if on_alarm == "checkpoint":
        saved = ["save for alarm no_signal"]
        assert first == [[], [], saved, saved]
    else:
        assert first[:2] == [[], []] and len(first) == 3
        assert first[2].startswith("3: alarm no_signal behind step 3: 100% of the groups")
