"""The loop against a fake engine, producer and weight sync: order of events, what is refused."""

import math

import numpy as np
import pytest

from easyrl.agreement import Agreement
from easyrl.dataloaders.packing import batch_denominator, dummy_micro_batch, pack_groups
from easyrl.engines.base import MetricSums, NonFiniteLossError, StepResult
from easyrl.schema import Completion, PolicyVersion, Prompt, RolloutGroup, Score, VersionSpan
from easyrl.trainer import OnPolicyViolation, Progress, TooManyBadSteps, Trainer

VERSION = PolicyVersion("run", 0, 0)
GOOD = StepResult(1.0, 1e-3, skipped=False)


def group(index: int, version: str, spans=None) -> RolloutGroup:
    length = 3
    completion = Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        finish_reason="stop",
        version_spans=spans or (VersionSpan(version, 0, length),),
        endpoint="http://fake:1",
        loss_mask=np.ones(length, dtype=bool),
    )
    prompt = Prompt(index, np.arange(2, dtype=np.int32), "", None)
    scores = (Score(0.0, {"r": 0.0}), Score(1.0, {"r": 1.0}))
    return RolloutGroup(prompt, (completion, completion), scores, version, 0.0, 1.0)


class FakeStream:
    wait_s = 0.5
    first_group_wait_s = 0.25

    def __init__(self, events, groups):
        self.events = events
        self.groups = groups

    def take_ready(self, max_tokens):
        return [self.groups.pop(0)] if self.groups else []

    def complete(self):
        self.events.append("complete")

    def close(self):
        self.events.append("stream closed")


class FakeRollouts:
    def __init__(self, events, make=group):
        self.events = events
        self.make = make

    def produce(self, prompts, version):
        self.events.append(f"produce {[p.index for p in prompts]} {version}")
        return FakeStream(self.events, [self.make(p.index, version) for p in prompts])


class FakeEngine:
    rank = dp_rank = 0
    dp_size = 1
    lockstep = False

    def __init__(self, events, results=()):
        self.events = events
        self.results = list(results)

    def forward_backward(self, micro_batches):
        self.events.append("backward")
        tokens = sum(m.num_loss_tokens for m in micro_batches)
        return [MetricSums({"loss_sum": 2.0 * tokens, "num_loss_tokens": tokens}, {})]

    def optimizer_step(self, denominator):
        self.events.append(f"step /{denominator:g}")
        return self.results.pop(0) if self.results else GOOD

    def discard_gradients(self):
        self.events.append("discard")


class FakeSync:
    def __init__(self, events):
        self.events = events

    def publish(self, version):
        self.events.append(f"publish {version}")
        return {"time/sync_s": 0.1}


def make_trainer(
    events,
    *,
    num_batches=2,
    make=group,
    results=(),
    engine=None,
    agreement=None,
    on_step=(),
    **options,
):
    engine = engine or FakeEngine(events, results)
    batches = [
        [Prompt(2 * b + i, np.arange(2, dtype=np.int32), "", None) for i in range(2)]
        for b in range(num_batches)
    ]
    reported = []

    def pack(groups, advantages):
        return pack_groups(
            groups,
            advantages,
            aggregation="token",
            max_tokens=3,
            mask_truncated=False,
            max_tokens_per_micro_batch=100,
        )

    trainer = Trainer(
        engine=engine,
        batches=batches,
        rollouts=FakeRollouts(events, make),
        weight_sync=FakeSync(events),
        agreement=agreement or Agreement(0, 1),
        advantages=lambda group: group.rewards - group.rewards.mean(),
        pack=pack,
        denominator=lambda groups: batch_denominator(groups, "token", False),
        dummy=dummy_micro_batch,
        record=lambda event, **fields: None,
        on_step=[lambda step, metrics: reported.append((step, dict(metrics))), *on_step],
        version=VERSION,
        max_tokens=100,
        **options,
    )
    return trainer, reported


def test_a_run_is_publish_produce_backward_step_publish():
    events = []
    trainer, reported = make_trainer(events)
    trainer.fit()
    assert events == [
        "publish run:0:0",
        "produce [0, 1] run:0:0",
        "backward",
        "backward",
        "step /12",
        "publish run:0:1",
        "produce [2, 3] run:0:1",
        "backward",
        "backward",
        "step /12",
        "publish run:0:2",
    ]
    assert [step for step, _ in reported] == [0, 1, 2]


def test_sync_mode_waits_for_the_whole_batch_first():
    events = []
    trainer, _ = make_trainer(events, num_batches=1, synchronous=True)
    trainer.fit()
    assert events[2:4] == ["complete", "backward"]


def test_metrics_are_divided_once():
    trainer, reported = make_trainer([], num_batches=1)
    trainer.fit()
    metrics = reported[1][1]
    assert metrics["reward/mean"] == 0.5
    assert metrics["loss"] == 2.0  # 2 per token, divided by the batch's token count
    assert metrics["tokens/packed"] == 2 * (2 + 6)
    assert metrics["time/wait_s"] == 0.5
    assert metrics["time/first_group_wait_s"] == 0.25


@pytest.mark.parametrize(
    "spans",
    [
        (VersionSpan("run:0:7", 0, 3),),
        (VersionSpan("run:0:0", 0, 2), VersionSpan("run:0:1", 2, 3)),
        (VersionSpan("default", 0, 3),),
        (VersionSpan("run:1:0", 0, 3),),
    ],
)
def test_a_sample_of_another_version_is_refused(spans):
    events = []
    trainer, _ = make_trainer(events, make=lambda index, version: group(index, version, spans))
    with pytest.raises(OnPolicyViolation, match="http://fake:1 stamped version"):
        trainer.fit()
    assert "backward" not in events
    assert events[-1] == "stream closed"


def test_bad_steps_are_counted_and_end_the_run():
    events = []
    bad = StepResult(math.nan, 1e-3, skipped=True)
    trainer, reported = make_trainer(events, num_batches=5, results=[bad] * 5, max_bad_steps=2)
    with pytest.raises(TooManyBadSteps, match="2 steps in a row"):
        trainer.fit()
    assert reported[1][1]["step_skipped"] == 1.0


def test_one_good_step_forgives():
    bad = StepResult(math.nan, 1e-3, skipped=True)
    trainer, _ = make_trainer([], num_batches=4, results=[bad, GOOD, bad, GOOD], max_bad_steps=2)
    trainer.fit()
    assert trainer.progress.step == 4


def test_a_non_finite_loss_does_not_stop_the_batch(monkeypatch):
    events = []

    def explode(self, micro_batches):
        events.append("backward")
        raise NonFiniteLossError("loss sum is nan")

    monkeypatch.setattr(FakeEngine, "forward_backward", explode)
    bad = StepResult(math.nan, 1e-3, skipped=True)
    trainer, reported = make_trainer(events, num_batches=1, results=[bad])
    trainer.fit()
    assert events.count("backward") == 2
    assert reported[1][1]["step_skipped"] == 1.0


def test_max_steps_ends_the_run_without_taking_another_batch():
    events = []
    trainer, _ = make_trainer(events, num_batches=5, max_steps=1)
    trainer.fit()
    assert sum(e.startswith("produce") for e in events) == 1


# ---- hooks -------------------------------------------------------------------------------------


def hooks(events):
    """One of each kind; all tell when they are called."""

    def evaluate(step, version):
        events.append(f"evaluate {step} {version}")
        return {"eval/avg": 0.25}

    return {
        "after_publish": [evaluate],
        "on_step": [lambda step, metrics: events.append(f"report {step} {metrics['eval/avg']}")],
        "after_report": [lambda step, version: events.append(f"save {step} {version}")],
    }


def test_a_step_is_published_evaluated_reported_saved():
    events = []
    trainer, reported = make_trainer(events, num_batches=1, **hooks(events))
    trainer.fit()
    assert events[:3] == ["publish run:0:0", "evaluate 0 run:0:0", "report 0 0.25"]
    assert events[events.index("step /12") + 1 :] == [
        "publish run:0:1",
        "evaluate 1 run:0:1",
        "report 1 0.25",
        "save 1 run:0:1",
    ]
    assert reported[1][1]["eval/avg"] == 0.25


def test_a_resumed_run_publishes_without_repeating_the_evaluation():
    events = []
    progress = Progress(step=5, closed_batches=5)
    trainer, reported = make_trainer(events, num_batches=1, progress=progress, **hooks(events))
    trainer.fit()
    assert events[:2] == ["publish run:0:5", "produce [0, 1] run:0:5"]
    assert [step for step, _ in reported] == [6]
    assert events[-1] == "save 6 run:0:6"


def test_the_seconds_of_a_step_are_without_evaluation_and_checkpoint(monkeypatch):
    now = 0.0

    def take(seconds, result=None):
        nonlocal now
        now += seconds
        return result

    monkeypatch.setattr("easyrl.trainer.time.monotonic", lambda: now)
    trainer, reported = make_trainer(
        [],
        num_batches=2,
        after_publish=[lambda step, version: take(100.0, {})],
        after_report=[lambda step, version: take(1000.0)],
    )
    monkeypatch.setattr(FakeSync, "publish", lambda self, version: take(2.0, {}))
    monkeypatch.setattr(FakeEngine, "optimizer_step", lambda self, _: take(1.0, GOOD))
    trainer.fit()
    assert [metrics["time/step_s"] for _, metrics in reported[1:]] == [3.0, 3.0]


# ---- micro-batches without weight --------------------------------------------------------------


class PeerWithMoreWork(Agreement):
    """A rank whose peer has two micro-batches more."""

    def in_lockstep(self, work, dummy):
        yield from work
        yield dummy()
        yield dummy()


def test_dummies_run_but_are_not_counted():
    events = []
    engine = FakeEngine(events)
    engine.lockstep = True
    trainer, reported = make_trainer(
        events, num_batches=1, engine=engine, agreement=PeerWithMoreWork(0, 1)
    )
    trainer.fit()
    assert events.count("backward") == 4
    assert reported[1][1]["batch/micro_batches"] == 2
    assert reported[1][1]["tokens/packed"] == 2 * (2 + 6)
