"""The loop against a fake engine, producer and weight sync: order of events, what is refused."""

import json
import math
from contextlib import closing
from dataclasses import asdict, replace

import pytest

from easyrl.engines.base import NonFiniteLossError, StepResult
from easyrl.ledger.journal import record_file
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    APART,
    NEEDS_CHANGE,
    TEMPORARY_FAILURE,
    ExcludedPrompt,
    Exclusion,
    InterruptedRun,
    NoEndpointServes,
    Progress,
    Published,
    RewardError,
    ServedWeights,
    StopRequested,
    TooManyExcluded,
    VersionSpan,
)
from easyrl.trainer.accumulation import OnPolicyViolation
from easyrl.trainer.loop import OtherWeights, TooManyBadSteps
from tests.dataloaders.rollout_parts import ScriptedGenerate, generator, prompt
from tests.easyrl.ledger.journal_groups import rollouts_of
from tests.easyrl.trainer.fake_parts import (
    GOOD,
    VERSION,
    FakeEngine,
    FakeEvaluation,
    FakeLedger,
    FakeOutage,
    FakeRollouts,
    FakeStream,
    FakeSync,
    ListTracker,
    OutageStream,
    group,
    make_trainer,
)


def test_a_run_is_publish_begin_backward_step_publish():
    events = []
    trainer, reported = make_trainer(events)
    trainer.fit()
    assert events == [
        "publish run:0:0",
        "begin [0, 1] run:0:0",
        "backward",
        "backward",
        "step /12",
        "sync",
        "certify 0",
        "publish run:0:1",
        "begin [2, 3] run:0:1",
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


def test_sync_mode_packs_trains_and_counts_the_same():
    said = []
    for synchronous in (False, True):
        trainer, reported = make_trainer([], num_batches=1, synchronous=synchronous)
        trainer.fit()
        times = ("time/", "throughput/", "memory/")
        said.append({k: v for k, v in reported[1][1].items() if not k.startswith(times)})
    assert said[0] == said[1] and "batch/micro_batches" in said[0]


def test_metrics_are_divided_once():
    trainer, reported = make_trainer([], num_batches=1)
    trainer.fit()
    metrics = reported[1][1]
    assert metrics["reward/mean"] == 0.5
    assert metrics["loss"] == 2.0  # 2 per token, divided by the batch's token count
    assert metrics["tokens/packed"] == 2 * (2 + 6)
    assert metrics["tokens/sequences"] == 2 * (2 * 2 + 6)  # a prompt for each of two responses
    tpspd = metrics["tokens/sequences"] / metrics["time/step_s"] / 2
    assert metrics["throughput/tpspd"] == tpspd
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
    assert events[-1] == "batch closed"


def test_bad_steps_are_counted_and_end_the_run():
    events = []
    bad = StepResult(math.nan, 1e-3, skipped=True)
    trainer, reported = make_trainer(events, num_batches=5, results=[bad] * 5, max_bad_steps=2)
    with pytest.raises(TooManyBadSteps, match="2 steps in a row .*lower trainer") as raised:
        trainer.fit()
    assert raised.value.status == NEEDS_CHANGE
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
    assert sum(e.startswith("begin") for e in events) == 1


# ---- what is said of a step ----------------------------------------------------------------------


def telling(events):
    """Evaluation, tracker and checkpoint that tell when they are called."""

    class Running:
        def __init__(self, step):
            self.step = step

        def finish(self):
            events.append(f"evaluated {self.step}")
            return {"eval/avg": 0.25}

        def close(self):
            events.append(f"evaluation of {self.step} closed")

    class Tells(ListTracker):
        def log(self, step, metrics):
            what = [name for name in ("reward/mean", "eval/avg") if name in metrics]
            events.append(f"report {step} {what}")
            super().log(step, metrics)

    class Begins(FakeEvaluation):
        def begin(self, step, version, *, is_last, again=False):
            events.append(f"evaluate {step} {version}")
            return Running(step)

    class Saves(FakeLedger):
        def save_if_due(self, progress):
            missing = " without its evaluation" if progress.unevaluated else ""
            events.append(f"save {progress.step} of {progress.closed_batches} batches{missing}")

    return {
        "evaluation": Begins(),
        "trackers": [Tells([])],
        "ledger": Saves(events),
    }


def test_a_version_is_evaluated_beside_its_batch_whose_last_step_waits_and_the_last_alone():
    events = []
    trainer, reported = make_trainer(events, num_batches=1, **telling(events))
    trainer.fit()
    assert events == [
        "publish run:0:0",
        "begin [0, 1] run:0:0",
        "evaluate 0 run:0:0",
        "report 0 []",  # behind the first requests of the batch
        "save 0 of 0 batches without its evaluation",
        "backward",
        "backward",
        "evaluated 0",
        "step /12",
        "evaluation of 0 closed",
        "sync",
        "certify 0",
        "report 0 ['eval/avg']",
        "publish run:0:1",
        "evaluate 1 run:0:1",
        "evaluated 1",
        "evaluation of 1 closed",
        "report 1 ['reward/mean', 'eval/avg']",
        "save 1 of 1 batches",
        "end weights 1",
    ]
    assert reported[2][1]["eval/avg"] == 0.25


class Settles(FakeSync):
    """Each version owes its canaries, which end with ``error`` or their figures."""

    error = None

    def settle(self, published):
        self.events.append(f"settle {published.served.version}")
        if self.error is not None:
            raise self.error
        return replace(published, metrics={**published.metrics, "sync/canary_mean": 0.5})


def test_canaries_are_waited_for_behind_the_first_requests_and_before_all_that_follows():
    """Before the report, which has their figures, the checkpoint, and anything is trained."""
    events = []
    trainer, reported = make_trainer(
        events, num_batches=1, weight_sync=Settles(events), **telling(events)
    )
    trainer.fit()
    assert events == [
        "publish run:0:0",
        "begin [0, 1] run:0:0",
        "evaluate 0 run:0:0",
        "settle run:0:0",
        "report 0 []",
        "save 0 of 0 batches without its evaluation",
        "backward",
        "backward",
        "evaluated 0",
        "step /12",
        "evaluation of 0 closed",
        "sync",
        "certify 0",
        "report 0 ['eval/avg']",
        "publish run:0:1",
        "settle run:0:1",  # nothing is begun beside it
        "evaluate 1 run:0:1",
        "evaluated 1",
        "evaluation of 1 closed",
        "report 1 ['reward/mean', 'eval/avg']",
        "save 1 of 1 batches",
        "end weights 1",
    ]
    of_steps = [metrics for _, metrics in reported if "time/sync_s" in metrics]
    assert [metrics["sync/canary_mean"] for metrics in of_steps] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StopRequested("SIGTERM"), 0),
        (NoEndpointServes("no usable endpoint: http://fake:1: canary"), TEMPORARY_FAILURE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_the_wait_for_canaries_ends_the_batch_and_saves_the_one_before(error, status):
    events = []

    class Ends(Settles):
        def settle(self, published):
            self.error = error if published.served.version.v else None
            return super().settle(published)

    trainer, reported = make_trainer(events, weight_sync=Ends(events))
    with pytest.raises(InterruptedRun, match="step 1 is saved") as raised:
        trainer.fit()
    assert raised.value.status == status
    ended = ["begin [2, 3] run:0:1", "settle run:0:1", "batch closed", "save"]
    assert events[-len(ended) :] == ended
    assert [step for step, _ in reported] == [0]
    assert trainer.progress.unreported["reward/mean"] == 0.5  # goes out with --resume


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StopRequested("SIGTERM"), 0),
        (FakeOutage("all endpoints are gone"), TEMPORARY_FAILURE),
        (TooManyExcluded("evaluation: data.max_excluded: 6 prompts"), NEEDS_CHANGE),
        (RewardError("rewards[0]: all calls failed"), NEEDS_CHANGE),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_the_wait_for_an_evaluation_saves_its_version_and_resume_repeats_it(
    error, status
):
    """The step is not taken: the weights that are evaluated are still there."""
    events = []

    def evaluate(step, version):
        raise error

    trainer, _ = make_trainer(events, evaluation=FakeEvaluation(evaluate))
    with pytest.raises(InterruptedRun, match="step 0 is saved") as raised:
        trainer.fit()
    assert raised.value.status == status
    assert events[-3:] == ["discard", "batch closed", "save"]
    assert not any(event.startswith("step") for event in events)
    saved = Progress(**json.loads(json.dumps(asdict(trainer.progress))))
    assert saved == Progress(weights="weights 0", reported_step=0, unevaluated=True)
    again = telling(events := [])
    resumed, _ = make_trainer(events, num_batches=1, progress=saved, **again)
    resumed.fit()
    assert events[2:4] == ["evaluate 0 run:0:0", "save 0 of 0 batches without its evaluation"]
    assert "report 0 ['eval/avg']" in events and "report 0 []" not in events


def test_between_two_updates_the_wait_has_the_rule_of_every_interruption():
    """Only the step that ends the batch waits; one before it has moved the trainer's weights."""
    events = []

    def evaluate(step, version):
        events.append(f"evaluated {step}")
        raise StopRequested("SIGTERM")

    trainer, _ = make_trainer(events, updates_per_batch=2, evaluation=FakeEvaluation(evaluate))
    with pytest.raises(InterruptedRun, match="1 of 2 updates of the open batch were taken"):
        trainer.fit()
    assert events[-6:] == [
        "backward", "step /6", "backward", "evaluated 0", "discard", "batch closed",
    ]  # fmt: skip


def test_a_doubt_in_the_wait_for_an_evaluation_withdraws_the_batch_and_begins_it_again():
    """Its figures go out once, when no doubt of them can come any more."""
    events, opened = [], []

    class Rollouts(FakeRollouts):
        def begin(self, served, position, excluded=()):
            opened.append(super().begin(served, position, excluded))
            return opened[-1]

    def evaluate(step, version):
        events.append(f"evaluated {step}")
        if len(opened) == 1:
            opened[0].withdrawn = "http://fake:1 failed its proof"
        return {"eval/avg": float(len(opened))}

    trainer, reported = make_trainer(
        events, num_batches=1, evaluation=FakeEvaluation(evaluate), progress=Progress()
    )
    trainer.rollouts.__class__ = Rollouts
    trainer.fit()
    a_batch = ["begin [0, 1] run:0:0", "backward", "backward", "evaluated 0"]
    assert events == [
        "publish run:0:0",
        *a_batch, "discard", "batch closed", "share withdrawals",
        *a_batch, "step /12", "sync", "certify 0", "publish run:0:1",
        "evaluated 1", "end weights 1",
    ]  # fmt: skip
    assert [m["eval/avg"] for step, m in reported if step == 0 and "eval/avg" in m] == [2.0]


def test_a_proof_that_fails_behind_the_last_step_certifies_and_reports_nothing():
    """The batch is known to be withdrawn: a resumed run makes it, and the evaluation, again."""
    events = []

    class Doubts(FakeSync):
        def publish(self, version, meanwhile, *, canary_follows):
            if version.v == 1:
                raise InterruptedRun("batch 0 was trained when an endpoint failed its proof")
            return super().publish(version, meanwhile)

    evaluation = FakeEvaluation(lambda step, version: {"eval/avg": 0.25})
    trainer, reported = make_trainer(events, weight_sync=Doubts(events), evaluation=evaluation)
    with pytest.raises(InterruptedRun, match="batch 0 was trained when"):
        trainer.fit()
    assert events[-1] == "step /12"
    assert [metrics for _, metrics in reported if "eval/avg" in metrics] == []


def test_a_run_that_is_resumed_without_an_evaluation_owes_none():
    trainer, _ = make_trainer([], num_batches=1, progress=Progress(unevaluated=True))
    trainer.fit()
    assert not trainer.progress.unevaluated


def test_what_began_before_an_error_is_closed():
    events = []

    class Full(FakeLedger):
        def save_if_due(self, progress):
            raise OSError("no room")

    parts = telling(events) | {"ledger": Full(events)}
    trainer, _ = make_trainer(events, **parts)
    with pytest.raises(OSError, match="no room"):
        trainer.fit()
    assert events[-2:] == ["evaluation of 0 closed", "batch closed"]


def test_a_resumed_run_publishes_without_repeating_the_evaluation():
    events = []
    progress = Progress(step=5, closed_batches=5, reported_step=5)
    trainer, reported = make_trainer(events, num_batches=1, progress=progress, **telling(events))
    trainer.fit()
    assert events[:2] == ["publish run:0:5", "begin [0, 1] run:0:5"]
    assert [step for step, _ in reported] == [6]
    assert events[-2] == "save 6 of 6 batches"


def test_the_seconds_of_all_steps_are_those_of_the_run_but_for_its_ends(monkeypatch):
    """Also what is between two batches: prompts, report, checkpoint, and an evaluation's tail."""
    now = 0.0

    def take(seconds, result=None):
        nonlocal now
        now += seconds
        return result

    monkeypatch.setattr("easyrl.trainer.loop.time.monotonic", lambda: now)

    class Slow(FakeLedger):
        def save_if_due(self, progress):
            take(1000.0)

    class Begins(FakeRollouts):
        def begin(self, served, position, excluded=()):
            return take(10000.0, super().begin(served, position))

    trainer, reported = make_trainer(
        [],
        num_batches=2,
        evaluation=FakeEvaluation(lambda step, version: take(100.0, {})),
        ledger=Slow([]),
    )
    trainer.rollouts.__class__ = Begins
    published = Published(ServedWeights(VERSION, "weights"), {})

    def publish(self, version, meanwhile, *, canary_follows):
        meanwhile()
        return take(2.0, published)

    monkeypatch.setattr(FakeSync, "publish", publish)
    monkeypatch.setattr(FakeEngine, "optimizer_step", lambda self, *_: take(1.0, GOOD))
    trainer.fit()
    steps = [metrics for _, metrics in reported if "reward/mean" in metrics]
    assert [metrics["time/step_s"] for metrics in steps] == [11103.0, 11103.0]
    assert now == 2.0 + 2 * 11103.0 + 1100.0  # the first publication; the last version's end


def test_the_journal_is_on_the_disk_before_the_line_while_the_weights_are_on_their_way(
    tmp_path, monkeypatch
):
    """With the real journal, whose batch ends before the weights move."""
    events = []

    def noting(name, function):
        def call(*arguments):
            events.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(record_file, "fsync", noting("fsync", record_file.fsync))
    append = noting("record", record_file.RecordWriter.append)
    monkeypatch.setattr(record_file.RecordWriter, "append", append)

    class Moves(FakeSync):
        def publish(self, version, meanwhile, *, canary_follows):
            trainer.rollouts.end_batch()
            events.append("the weights move")
            return super().publish(version, meanwhile)

    class Generated(JournalledRollouts):
        def begin(self, *arguments):  # so that what the trainer drains is behind the early sync
            batch = super().begin(*arguments)
            batch.producing.result(10)
            return batch

    with LoopThread() as thread:
        trainer, reported = make_trainer(events, weight_sync=Moves(events))
        made = generator(thread, ScriptedGenerate(range(2)))
        trainer.rollouts = rollouts_of(tmp_path, 0, made, [prompt(index) for index in range(2)])
        trainer.rollouts.__class__ = Generated
        trainer.rollouts.journal = replace(trainer.rollouts.journal, fsync="batch")
        trainer.fit()
        trainer.rollouts.close()
    last = events.index("certify 0")
    assert events[last - 2 : last] == ["the weights move", "fsync"]
    assert "record" not in events[last:]
    assert reported[1][1]["time/journal_s"] > 0


# ---- micro-batches without weight --------------------------------------------------------------


class PeerWithMoreWork(Collectives):
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
        events, num_batches=1, engine=engine, collectives=PeerWithMoreWork(Ranks.data_parallel())
    )
    trainer.fit()
    assert events.count("backward") == 4
    assert reported[1][1]["batch/micro_batches"] == 2
    assert reported[1][1]["tokens/packed"] == 2 * (2 + 6)


def test_an_outage_gives_up_the_open_batch_and_saves_the_last_closed_one(monkeypatch):
    events = []
    trainer, _ = make_trainer(events, num_batches=3)
    streams = iter([FakeStream, OutageStream])
    monkeypatch.setattr(
        FakeRollouts, "stream", lambda self, *arguments: next(streams)(*arguments), raising=True
    )
    with pytest.raises(InterruptedRun, match="(?s)are gone.*step 1 is saved.*--resume"):
        trainer.fit()
    assert events[-4:] == ["backward", "discard", "batch closed", "save"]
    # not 2: that batch is given up
    assert trainer.progress == Progress(1, 1, 0, 2, "weights 1", 1)


def test_an_outage_while_publishing_saves_too():
    events = []

    class Gone(FakeSync):
        def publish(self, version, meanwhile, *, canary_follows):
            if version.v == 1:
                raise FakeOutage("all endpoints are gone")
            return super().publish(version, meanwhile)

    trainer, reported = make_trainer(events, weight_sync=Gone(events))
    with pytest.raises(InterruptedRun):
        trainer.fit()
    assert events[-2:] == ["certify 0", "save"]
    assert [step for step, _ in reported] == [0]
    assert trainer.progress.position == 2
    assert trainer.progress.unreported["reward/mean"] == 0.5

    def evaluate(step, version):
        return {"eval/avg": 0.25}

    resumed, reported = make_trainer(
        events := [], progress=trainer.progress, evaluation=FakeEvaluation(evaluate)
    )
    resumed.fit()
    assert events[1] == "begin [2, 3] run:0:1"
    assert [step for step, _ in reported] == [1, 1, 2]
    first = reported[0][1] | reported[1][1]
    assert (first["reward/mean"], first["time/sync_s"], first["eval/avg"]) == (0.5, 0.1, 0.25)


@pytest.mark.parametrize("ends", ["publish", "evaluate"])
def test_throughput_does_not_hide_an_interruption_after_a_batch(ends):
    """Its figures are of whole steps; what ends the run before one is complete goes through it."""

    class Gone(FakeSync):
        def publish(self, version, meanwhile, *, canary_follows):
            if version.v == 1 and ends == "publish":
                raise StopRequested("SIGTERM")
            return super().publish(version, meanwhile)

    def evaluate(step, version):
        if step == 2 and ends == "evaluate":  # the last, which runs alone
            raise StopRequested("SIGTERM")
        return {}

    events = []
    trainer, _ = make_trainer(events, weight_sync=Gone(events), evaluation=FakeEvaluation(evaluate))
    with pytest.raises(InterruptedRun) as raised:
        trainer.fit()
    assert raised.value.status == 0
    assert events[-1] == "save"
    assert trainer.progress.unreported["tokens/packed"] == 2 * (2 + 6)


@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), InterruptedRun("batch 0 is certified and in doubt")]
)
def test_any_other_error_does_not_save(error):
    events = []

    class Broken(FakeSync):
        def publish(self, version, meanwhile, *, canary_follows):
            if version.v == 1:
                meanwhile()
                raise error
            return super().publish(version, meanwhile)

    trainer, _ = make_trainer(events, weight_sync=Broken(events))
    with pytest.raises(RuntimeError) as raised:
        trainer.fit()
    assert raised.value is error
    assert "certify 0" in events and "save" not in events


class RefusedStream(FakeStream):
    """One group, then too many prompts are refused."""

    def drain_ready(self, max_tokens, idle=None):
        if len(self.groups) == 1:
            raise TooManyExcluded("data.max_excluded: 6 prompts")
        return super().drain_ready(max_tokens, idle)


def test_too_many_exclusions_give_up_the_open_batch_and_ask_for_a_change():
    """Not with the status that has a scheduler start the run again: it would stop again."""
    events = []
    trainer, _ = make_trainer(events, num_batches=3)
    streams = iter([FakeStream, RefusedStream])
    trainer.rollouts.stream = lambda *arguments: next(streams)(*arguments)
    with pytest.raises(InterruptedRun, match="(?s)max_excluded.*step 1 is saved") as caught:
        trainer.fit()
    assert caught.value.status == NEEDS_CHANGE != TEMPORARY_FAILURE
    assert events[-4:] == ["backward", "discard", "batch closed", "save"]


class FailingReward(FakeStream):
    """One group, then the reward of the next cannot be had."""

    def drain_ready(self, max_tokens, idle=None):
        if len(self.groups) == 1:
            raise RewardError("rewards[0]: reward judge failed on prompt 3 of epoch 0")
        return super().drain_ready(max_tokens, idle)


def test_a_reward_that_fails_is_one_sentence_and_the_batches_before_are_saved():
    events = []
    trainer, _ = make_trainer(events, num_batches=3)
    streams = iter([FakeStream, FailingReward])
    trainer.rollouts.stream = lambda *arguments: next(streams)(*arguments)
    with pytest.raises(InterruptedRun) as caught:
        trainer.fit()
    assert str(caught.value).splitlines() == [
        "rewards[0]: reward judge failed on prompt 3 of epoch 0",
        "step 1 is saved; go on with --resume",
    ]
    assert caught.value.status == NEEDS_CHANGE
    assert events[-4:] == ["backward", "discard", "batch closed", "save"]


@pytest.mark.parametrize(("num_published", "status"), [(0, NEEDS_CHANGE), (1, TEMPORARY_FAILURE)])
def test_nobody_takes_the_weights_is_one_sentence(num_published, status):
    """Before the first batch the servers are not what they should be; later they may come back."""

    class NobodyTakes(FakeSync):
        def publish(self, version, meanwhile, *, canary_follows):
            if version.v == num_published:
                raise NoEndpointServes("no usable endpoint: http://fake:1: another model")
            return super().publish(version, meanwhile)

    trainer, _ = make_trainer([], weight_sync=NobodyTakes([]))
    with pytest.raises(InterruptedRun, match="(?s)another model.*go on with --resume") as caught:
        trainer.fit()
    assert caught.value.status == status
    assert str(caught.value).startswith("inference.endpoints: ") == (num_published == 0)


def test_the_exclusions_of_closed_batches_go_into_the_progress_and_to_the_next_batch():
    told = []

    class Rollouts(FakeRollouts):
        def begin(self, served, position, excluded=()):
            told.append(list(excluded))
            return super().begin(served, position)

    def make(index, version):
        kinds = {1: "refused", 2: "too_long", 5: "refused"}
        if index not in kinds:
            return group(index, version)
        why = Exclusion(kinds[index], f"no {index}")
        return replace(group(index, version), completions=(), scores=(), excluded=why)

    trainer, reported = make_trainer([], num_prompts=9, make=make)
    trainer.rollouts.__class__ = Rollouts
    trainer.fit()
    first, second = ExcludedPrompt(1, 0, 1, "no 1"), ExcludedPrompt(5, 0, 5, "no 5")
    assert told == [[], [first], [first, second]]
    stored = json.loads(json.dumps(asdict(trainer.progress)))  # as a checkpoint has it
    assert Progress(**stored).excluded == [first, second]
    assert [r[1]["batch/groups_excluded_refused"] for r in reported[1:]] == [1.0, 1.0, 0.0]
    assert [r[1]["batch/groups_excluded_too_long"] for r in reported[1:]] == [1.0, 0.0, 0.0]


def test_what_became_of_each_group_is_recorded():
    record = []
    bad = StepResult(math.nan, 1e-3, skipped=True)

    def make(index, version):
        made = group(index, version)
        too_long = Exclusion("too_long", "too long")
        return replace(made, completions=(), scores=(), excluded=too_long) if index == 1 else made

    trainer, reported = make_trainer(
        [],
        num_prompts=5,
        make=make,
        results=[GOOD, bad],
        record=lambda event, **fields: record.append({"event": event, **fields}),
    )
    trainer.fit()
    closed = [r for r in record if r["event"].startswith("group_")]
    assert {r["event"] for r in closed} == {"group_closed"}
    assert [(r["epoch"], r["index"], r["outcome"], r["stamped"]) for r in closed] == [
        (0, 0, "trained", ["run:0:0"]),
        (0, 1, "excluded", []),
        (0, 2, "trained", ["run:0:0"]),
        (0, 3, "skipped", ["run:0:1"]),
        (0, 4, "skipped", ["run:0:1"]),
    ]
    assert closed[1] == {
        **{"event": "group_closed", "version": "run:0:0", "epoch": 0, "index": 1, "position": 1},
        **{"outcome": "excluded", "reason": "too long", "digest": None},
        **{"exclusion": "too_long"},
        **{"stamped": [], "endpoints": []},
    }
    assert reported[1][1]["batch/groups_excluded"] == 1.0
    assert reported[1][1]["batch/groups_drawn"] == 3.0
    assert reported[1][1]["batch/groups"] == 2.0


# ---- several updates per batch -------------------------------------------------------------------


def test_each_update_has_its_slice_by_prompt_order_and_its_denominator():
    events = []
    ledger = FakeLedger(events)
    trainer, reported = make_trainer(events, num_batches=1, updates_per_batch=2, ledger=ledger)
    trainer.fit()
    assert events == [
        "publish run:0:0",
        "begin [0, 1] run:0:0",
        "backward",
        "step /6",
        "backward",
        "step /6",
        "sync",
        "certify 0",
        "publish run:0:1",
        "end weights 1",
    ]
    assert [(g.key, g.update) for g in ledger.closed[0].groups] == [((0, 0), 0), ((0, 1), 1)]
    assert [(len(each.groups), whole) for each, whole in ledger.checked] == [(1, False), (2, True)]
    assert trainer.progress.step == 2 and trainer.progress.closed_batches == 1
    step, metrics = reported[-1]
    assert step == 2
    assert metrics["loss"] == metrics["update1/loss"] == metrics["update2/loss"] == 2.0
    assert metrics["tokens/packed"] == 2 * (2 + 6)


def test_an_interruption_between_two_updates_leaves_the_last_checkpoint():
    events = []
    trainer, _ = make_trainer(events, num_batches=2, updates_per_batch=2)
    streams = iter([FakeStream, OutageStream])
    trainer.rollouts.stream = lambda *arguments: next(streams)(*arguments)
    with pytest.raises(InterruptedRun, match="1 of 2 updates of the open batch were taken"):
        trainer.fit()
    assert "save" not in events and "certify 0" not in events
    assert trainer.progress == Progress(0, 0, 0, 0, "weights 0", 0)


# ---- the account of a batch ----------------------------------------------------------------------


def test_the_account_names_every_group_and_what_made_it():
    ledger = FakeLedger([])
    trainer, _ = make_trainer([], num_batches=1, ledger=ledger)
    trainer.fit()
    (record,) = ledger.closed
    assert (record.batch, record.step, record.version) == (0, 1, "run:0:0")
    assert record.weights == "weights 0"
    assert [(g.epoch, g.index, g.outcome) for g in record.groups] == [
        (0, 0, "trained"),
        (0, 1, "trained"),
    ]
    assert record.groups[0].stamped == ["run:0:0"]
    assert record.groups[0].endpoints == ["http://fake:1"]
    assert [c.url for c in record.confirmations] == ["http://fake:1"]
    assert [(each.batch, whole) for each, whole in ledger.checked] == [(0, True)]
    assert (record.num_drawn, record.ended_by, record.num_updates) == (2, "accepted", 1)


def test_a_bad_update_counts_wherever_it_is_in_its_batch():
    bad = StepResult(math.nan, 1e-3, skipped=True)
    trainer, _ = make_trainer([], updates_per_batch=2, results=[bad, GOOD], max_bad_steps=1)
    with pytest.raises(TooManyBadSteps, match="1 steps in a row"):
        trainer.fit()


def test_what_the_ledger_refuses_is_not_trained():
    events = []

    class Refuses(FakeLedger):
        def check(self, account, *, whole):
            raise OnPolicyViolation("prompt 1 was trained before")

    trainer, _ = make_trainer(events, ledger=Refuses(events))
    with pytest.raises(OnPolicyViolation, match="prompt 1"):
        trainer.fit()
    assert not any(event.startswith(("step", "certify", "save")) for event in events)


def test_a_line_that_cannot_be_written_does_not_count():
    class FullDisk(FakeLedger):
        def close_batch(self, account):
            raise OSError("no space left on device")

    trainer, reported = make_trainer([], ledger=FullDisk([]))
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
    assert events[-3:] == ["discard", "batch closed", "save"]
    assert trainer.progress == Progress(1, 1, 0, 2, "weights 1", 1)


def test_weights_other_than_the_checkpoint_says_are_refused():
    trainer, _ = make_trainer([], progress=Progress(weights="weights 9"))
    with pytest.raises(OtherWeights, match="are weights 0 and were weights 9"):
        trainer.fit()


@pytest.mark.parametrize("saved", ["", "weights 0", APART + "weights 9"])
def test_weights_that_were_served_in_another_form_cannot_be_compared(saved):
    """An adapter that travelled alone before the resume, and is merged into the model now."""
    trainer, _ = make_trainer([], num_batches=1, progress=Progress(weights=saved))
    trainer.fit()
    assert trainer.progress.weights == "weights 1"
