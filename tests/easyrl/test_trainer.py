"""The loop against a fake engine, producer and weight sync: order of events, what is refused."""

import math

import numpy as np
import pytest

from easyrl.agreement import Agreement
from easyrl.dataloaders.packing import batch_denominator, dummy_micro_batch, pack_groups
from easyrl.engines.base import MetricSums, NonFiniteLossError, StepResult
from easyrl.schema import Completion, PolicyVersion, Prompt, RolloutGroup, Score, VersionSpan
from easyrl.trainer import OnPolicyViolation, TooManyBadSteps, Trainer

VERSION = PolicyVersion("run", 0, 0)


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
        return self.results.pop(0) if self.results else StepResult(1.0, 1e-3, skipped=False)

    def discard_gradients(self):
        self.events.append("discard")


class FakeSync:
    def __init__(self, events):
        self.events = events

    def publish(self, version):
        self.events.append(f"publish {version}")
        return {"time/sync_s": 0.1}


def make_trainer(events, *, num_batches=2, make=group, results=(), **options):
    engine = FakeEngine(events, results)
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
        agreement=Agreement(0, 1),
        advantages=lambda group: group.rewards - group.rewards.mean(),
        pack=pack,
        denominator=lambda groups: batch_denominator(groups, "token", False),
        dummy=dummy_micro_batch,
        record=lambda event, **fields: None,
        on_step=[lambda step, metrics: reported.append((step, dict(metrics)))],
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
    bad, good = StepResult(math.nan, 1e-3, skipped=True), StepResult(1.0, 1e-3, skipped=False)
    trainer, _ = make_trainer([], num_batches=4, results=[bad, good, bad, good], max_bad_steps=2)
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
