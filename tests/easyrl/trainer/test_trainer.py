"""The loop against a fake engine, producer and weight sync: order of events, what is refused."""

import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from easyrl.engines.base import MetricSums, NonFiniteLossError, StepResult
from easyrl.metrics.throughput import Throughput
from easyrl.runtime.collectives import Agreement
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    Completion,
    Confirmation,
    InterruptedRun,
    PolicyVersion,
    Prompt,
    Published,
    RolloutGroup,
    Score,
    ServedWeights,
    StopRequested,
    VersionSpan,
)
from easyrl.trainer.accumulation import Accumulator, OnPolicyViolation
from easyrl.trainer.loop import Progress, TooManyBadSteps, Trainer
from tests.recipes import group_functions, run_settings

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
    load_s = 0.0
    recovered = frozenset()
    discarded = frozenset()

    def __init__(self, events, groups, version):
        self.events = events
        self.groups = groups
        self.accepted_versions = frozenset([version])
        self.error = None

    def drain_ready(self, max_tokens, idle=None):
        if self.error is not None:
            raise self.error
        return [self.groups.pop(0)] if self.groups else []

    def interrupt(self, error):
        self.error = error

    def complete(self):
        self.events.append("complete")

    def close(self):
        self.events.append("stream closed")


class FakeRollouts:
    stream = FakeStream

    def __init__(self, events, make=group):
        self.events = events
        self.make = make

    def produce(self, prompts, served, *, priority=0):
        version = str(served.version)
        later = f" after {priority}" if priority else ""
        self.events.append(f"produce {[p.index for p in prompts]} {version}{later}")
        return self.stream(self.events, [self.make(p.index, version) for p in prompts], version)

    def sync(self):
        self.events.append("sync")


class FakeEngine:
    rank = dp_rank = 0
    dp_size = 1
    lockstep = False

    def __init__(self, events, results=()):
        self.events = events
        self.results = list(results)

    def begin_batch(self):
        pass

    def forward_backward(self, micro_batches):
        self.events.append("backward")
        tokens = sum(m.num_loss_tokens for m in micro_batches)
        sums = {"loss_sum": 2.0 * tokens, "num_loss_tokens": tokens, "logprob_diff_sum": 0.0}
        return [MetricSums(sums, {"logprob_diff_max": 0.0})]

    def optimizer_step(self, denominator):
        self.events.append(f"step /{denominator:g}")
        return self.results.pop(0) if self.results else GOOD

    def discard_gradients(self):
        self.events.append("discard")


class FakeBatches:
    """Batches with a cursor that counts those handed out."""

    def __init__(self, batches):
        self.batches = batches
        self.position = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.position == len(self.batches):
            raise StopIteration
        self.position += 1
        return self.batches[self.position - 1]

    def state(self):
        return {"position": self.position}


class FakeOutage(RuntimeError):
    """No endpoint answers."""


class FakeSync:
    def __init__(self, events):
        self.events = events

    confirmations = (Confirmation("http://fake:1", "any", True, None),)

    def publish(self, version):
        self.events.append(f"publish {version}")
        return Published(ServedWeights(version, f"weights {version.v}"), {"time/sync_s": 0.1})


class FakeIdle:
    def idle_s(self):
        return 0.0


class FakeNotary:
    """Keeps what it was given."""

    def __init__(self, events):
        self.events = events
        self.checked = []
        self.closed = []

    def check(self, record):
        self.checked.append(record)

    def close_batch(self, record):
        self.events.append(f"certify {record.batch}")
        self.closed.append(record)

    def end(self, weights):
        self.events.append(f"end {weights}")


def make_trainer(
    events,
    *,
    num_batches=2,
    make=group,
    results=(),
    engine=None,
    agreement=None,
    on_step=(),
    weight_sync=None,
    notary=None,
    stop=None,
    synchronous=False,
    record=lambda event, **fields: None,
    **options,
):
    engine = engine or FakeEngine(events, results)
    agreement = agreement or Agreement(0, 1)
    batches = [
        [Prompt(2 * b + i, np.arange(2, dtype=np.int32), "", None) for i in range(2)]
        for b in range(num_batches)
    ]
    reported = []

    trainer = Trainer(
        engine=engine,
        batches=FakeBatches(batches),
        rollouts=FakeRollouts(events, make),
        weight_sync=weight_sync or FakeSync(events),
        agreement=agreement,
        accumulator=Accumulator(
            engine=engine,
            agreement=agreement,
            functions=group_functions(run=run_settings(3), max_tokens_per_micro_batch=100),
            stop=stop or StopRequest(grace_s=60.0),
            is_interruption=lambda error: isinstance(error, FakeOutage | StopRequested),
            record=record,
            max_tokens=100,
            synchronous=synchronous,
        ),
        notary=notary or FakeNotary(events),
        save=lambda: events.append("save"),
        record=record,
        on_step=[lambda step, metrics: reported.append((step, dict(metrics))), *on_step],
        version=VERSION,
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
        "sync",
        "certify 0",
        "publish run:0:1",
        "produce [2, 3] run:0:1",
        "backward",
        "backward",
        "step /12",
        "sync",
        "certify 1",
        "publish run:0:2",
        "end weights 2",
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
    assert events[events.index("certify 0") + 1 :] == [
        "publish run:0:1",
        "evaluate 1 run:0:1",
        "report 1 0.25",
        "save 1 run:0:1",
        "end weights 1",
    ]
    assert reported[1][1]["eval/avg"] == 0.25


def test_a_resumed_run_publishes_without_repeating_the_evaluation():
    events = []
    progress = Progress(step=5, closed_batches=5, reported_step=5)
    trainer, reported = make_trainer(events, num_batches=1, progress=progress, **hooks(events))
    trainer.fit()
    assert events[:2] == ["publish run:0:5", "produce [0, 1] run:0:5"]
    assert [step for step, _ in reported] == [6]
    assert events[-2] == "save 6 run:0:6"


def test_the_seconds_of_a_step_are_without_evaluation_and_checkpoint(monkeypatch):
    now = 0.0

    def take(seconds, result=None):
        nonlocal now
        now += seconds
        return result

    monkeypatch.setattr("easyrl.trainer.loop.time.monotonic", lambda: now)
    trainer, reported = make_trainer(
        [],
        num_batches=2,
        after_publish=[lambda step, version: take(100.0, {})],
        after_report=[lambda step, version: take(1000.0)],
    )
    published = Published(ServedWeights(VERSION, "weights"), {})
    monkeypatch.setattr(FakeSync, "publish", lambda self, version: take(2.0, published))
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


class OutageStream(FakeStream):
    """One group, then no endpoint is left."""

    def drain_ready(self, max_tokens, idle=None):
        if len(self.groups) == 1:
            raise FakeOutage("all endpoints are gone")
        return super().drain_ready(max_tokens, idle)


def test_an_outage_gives_up_the_open_batch_and_saves_the_last_closed_one(monkeypatch):
    events = []
    trainer, _ = make_trainer(events, num_batches=3)
    streams = iter([FakeStream, OutageStream])
    monkeypatch.setattr(
        FakeRollouts, "stream", lambda self, *arguments: next(streams)(*arguments), raising=True
    )
    with pytest.raises(InterruptedRun, match="(?s)are gone.*step 1 is saved.*--resume"):
        trainer.fit()
    assert events[-4:] == ["backward", "discard", "stream closed", "save"]
    # not 2: that batch is given up
    assert trainer.progress == Progress(1, 1, 0, {"position": 1}, "weights 1", 1)


def test_an_outage_while_publishing_saves_too():
    events = []

    class Gone(FakeSync):
        def publish(self, version):
            if version.v == 1:
                raise FakeOutage("all endpoints are gone")
            return super().publish(version)

    trainer, reported = make_trainer(events, weight_sync=Gone(events))
    with pytest.raises(InterruptedRun):
        trainer.fit()
    assert events[-2:] == ["certify 0", "save"]
    assert [step for step, _ in reported] == [0]
    assert trainer.progress.cursor == {"position": 1}
    assert trainer.progress.unreported["reward/mean"] == 0.5

    def evaluate(step, version):
        return {"eval/avg": 0.25}

    resumed, reported = make_trainer([], progress=trainer.progress, after_publish=[evaluate])
    resumed._batches.position = 1
    resumed.fit()
    assert [step for step, _ in reported] == [1, 2]
    first = reported[0][1]
    assert (first["reward/mean"], first["time/sync_s"], first["eval/avg"]) == (0.5, 0.1, 0.25)


@pytest.mark.parametrize("ends", ["publish", "evaluate"])
def test_throughput_does_not_hide_an_interruption_after_a_batch(ends):
    """Its figures are of whole steps; what ends the run before one is complete goes through it."""
    throughput = Throughput(FakeIdle(), num_devices=2)

    class Gone(FakeSync):
        def publish(self, version):
            if version.v == 1 and ends == "publish":
                raise StopRequested("SIGTERM")
            return super().publish(version)

    def evaluate(step, version):
        if step == 1 and ends == "evaluate":
            raise StopRequested("SIGTERM")
        return {}

    events = []
    trainer, _ = make_trainer(
        events, weight_sync=Gone(events), after_publish=[evaluate], on_step=[throughput.add]
    )
    with pytest.raises(InterruptedRun) as raised:
        trainer.fit()
    assert raised.value.status == 0
    assert events[-1] == "save"
    assert trainer.progress.unreported["tokens/packed"] == 2 * (2 + 6)


def test_any_other_error_does_not_save():
    events = []

    class Broken(FakeSync):
        def publish(self, version):
            raise RuntimeError("broken")

    trainer, _ = make_trainer(events, weight_sync=Broken(events))
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert "save" not in events


def test_what_became_of_each_group_is_recorded():
    record = []
    bad = StepResult(math.nan, 1e-3, skipped=True)

    def make(index, version):
        made = group(index, version)
        return replace(made, completions=(), scores=(), excluded="too long") if index == 1 else made

    trainer, reported = make_trainer(
        [],
        make=make,
        results=[GOOD, bad],
        record=lambda event, **fields: record.append({"event": event, **fields}),
    )
    trainer.fit()
    fates = [r for r in record if r["event"].startswith("group_")]
    assert fates == [
        {"event": "group_trained", "epoch": 0, "index": 0, "stamped": ["run:0:0"]},
        {"event": "group_excluded", "epoch": 0, "index": 1, "stamped": []},
        {"event": "group_skipped", "epoch": 0, "index": 2, "stamped": ["run:0:1"]},
        {"event": "group_skipped", "epoch": 0, "index": 3, "stamped": ["run:0:1"]},
    ]
    assert reported[1][1]["batch/groups_excluded"] == 1.0
    assert reported[1][1]["batch/groups"] == 1.0


# ---- several updates per batch -------------------------------------------------------------------


def test_each_update_has_its_slice_by_prompt_order_and_its_denominator():
    events = []
    notary = FakeNotary(events)
    trainer, reported = make_trainer(events, num_batches=1, updates_per_batch=2, notary=notary)
    trainer.fit()
    assert events == [
        "publish run:0:0",
        "produce [0] run:0:0",
        "produce [1] run:0:0 after 1",
        "backward",
        "step /6",
        "backward",
        "step /6",
        "sync",
        "certify 0",
        "publish run:0:1",
        "end weights 1",
    ]
    assert notary.closed[0].updates == [[(0, 0)], [(0, 1)]]
    assert trainer.progress.step == 2 and trainer.progress.closed_batches == 1
    step, metrics = reported[-1]
    assert step == 2
    assert metrics["loss"] == metrics["update1/loss"] == metrics["update2/loss"] == 2.0
    assert metrics["tokens/packed"] == 2 * (2 + 6)


def test_an_interruption_between_two_updates_leaves_the_last_checkpoint():
    events = []
    trainer, _ = make_trainer(events, num_batches=2, updates_per_batch=2)
    streams = iter([FakeStream, OutageStream])
    trainer._rollouts.stream = lambda *arguments: next(streams)(*arguments)
    with pytest.raises(InterruptedRun, match="1 of 2 updates of the open batch were taken"):
        trainer.fit()
    assert "save" not in events and "certify 0" not in events
    assert trainer.progress == Progress(0, 0, 0, {"position": 0}, "weights 0", 0)


# ---- the account of a batch ----------------------------------------------------------------------


def test_the_account_names_every_group_and_what_made_it():
    notary = FakeNotary([])
    trainer, _ = make_trainer([], num_batches=1, notary=notary)
    trainer.fit()
    (record,) = notary.closed
    assert (record.batch, record.step, record.version) == (0, 1, "run:0:0")
    assert record.weights == "weights 0"
    assert [(g.epoch, g.index, g.outcome) for g in record.groups] == [
        (0, 0, "trained"),
        (0, 1, "trained"),
    ]
    assert record.groups[0].stamped == ["run:0:0"]
    assert record.groups[0].endpoints == ["http://fake:1"]
    assert [c.url for c in record.confirmations] == ["http://fake:1"]
    assert [c.batch for c in notary.checked] == [0]


def test_a_bad_update_counts_wherever_it_is_in_its_batch():
    bad = StepResult(math.nan, 1e-3, skipped=True)
    trainer, _ = make_trainer([], updates_per_batch=2, results=[bad, GOOD], max_bad_steps=1)
    with pytest.raises(TooManyBadSteps, match="1 steps in a row"):
        trainer.fit()


def test_what_the_notary_refuses_is_not_trained():
    events = []

    class Refuses(FakeNotary):
        def check(self, record):
            raise OnPolicyViolation("prompt 1 was trained before")

    trainer, _ = make_trainer(events, notary=Refuses(events))
    with pytest.raises(OnPolicyViolation, match="prompt 1"):
        trainer.fit()
    assert not any(event.startswith(("step", "certify", "save")) for event in events)


def test_a_line_that_cannot_be_written_does_not_count():
    class FullDisk(FakeNotary):
        def close_batch(self, record):
            raise OSError("no space left on device")

    trainer, reported = make_trainer([], notary=FullDisk([]))
    with pytest.raises(OSError, match="no space"):
        trainer.fit()
    assert trainer.progress.step == 0
    assert [step for step, _ in reported] == [0]


# ---- stop ----------------------------------------------------------------------------------------


def test_a_stop_gives_up_the_open_batch_and_saves():
    events = []
    with closing(StopRequest(grace_s=60.0)) as stop:

        def make(index, version):
            if index == 3:
                stop.request("SIGTERM")
            return group(index, version)

        trainer, _ = make_trainer(events, num_batches=3, stop=stop, make=make)
        with pytest.raises(InterruptedRun, match="SIGTERM.*\n.*step 1 is saved") as raised:
            trainer.fit()
    assert raised.value.status == 0
    assert events[-3:] == ["discard", "stream closed", "save"]
    assert trainer.progress == Progress(1, 1, 0, {"position": 1}, "weights 1", 1)
