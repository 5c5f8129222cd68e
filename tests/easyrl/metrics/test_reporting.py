"""Metrics, evaluation figures, the console and the reward curve."""

import io
import itertools
import json
import os
import queue
import re
import resource
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from rich.text import Text

from easyrl.build.trackers import open_trackers, trackers_of
from easyrl.config import EvaluationConfig, EvaluationSetConfig
from easyrl.config.metrics import MetricsConfig
from easyrl.config.samples import SamplesConfig
from easyrl.inference_client.errors import Outage, is_outage
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.metrics.console import COLUMNS, RECORD_COLUMNS, ConsoleView, with_sets
from easyrl.metrics.event_log import EventLog, read_events
from easyrl.metrics.plot import plot_reward_curve
from easyrl.metrics.reporter import StepReporter
from easyrl.metrics.trackers import JsonlTracker, OptionalTracker, read_metrics
from easyrl.metrics.trackers.ending import RunEnding
from easyrl.metrics.trackers.state import TrackerState
from easyrl.metrics.trackers.tensorboard import TensorBoardTracker
from easyrl.metrics.trackers.wandb import WandbTracker
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.seeding import sample_seed
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import (
    Completion,
    Exclusion,
    InterruptedRun,
    PeerOutage,
    PolicyVersion,
    Progress,
    Prompt,
    RolloutGroup,
    Score,
    StopRequested,
    TooManyExcluded,
    other_run,
)
from easyrl.trainer import evaluation
from easyrl.trainer.evaluation import Evaluator, ScheduledEvaluation
from easyrl.trainer.held_out_set import HeldOutSet, pass_at_k
from tests.thread_ranks import on_ranks


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 0, 2), (4, 4, 3), (6, 2, 3), (5, 1, 5)])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(n, correct, k):
    samples = [True] * correct + [False] * (n - correct)
    subsets = list(itertools.combinations(samples, k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


class FakeStream:
    """Groups, and then what keeps further ones from coming."""

    def __init__(self, groups, ending=None):
        self.groups, self.ending, self.closed = groups, ending, False
        self.interrupted = queue.SimpleQueue()

    def __iter__(self):
        yield from self.groups
        if self.ending is not None:
            raise self.ending

    def interrupt(self, error):
        self.interrupted.put(error)

    def close(self):
        self.closed = True


class FakeRollouts:
    """Two samples a prompt; prompt ``i`` has ``i`` correct ones."""

    def produce(self, prompts, version):
        groups = []
        for prompt in prompts:
            scores = [Score(0.0, {"exact": float(i < prompt.index)}) for i in range(2)]
            groups.append(RolloutGroup(prompt, (), tuple(scores), version, 0.0, 0.0))
        return FakeStream(groups)


@pytest.fixture
def stop():
    request = StopRequest(60)
    yield request
    request.close()


def held_out(rollouts, num_prompts=3, name="", num_samples=2, pass_at=(1, 2), max_excluded=1.0):
    return HeldOutSet(
        name,
        EvaluationSetConfig(
            data={"files": ["held-out.jsonl"]}, num_samples=num_samples, pass_at=list(pass_at)
        ),
        prompts=[Prompt(i, np.zeros(1, dtype=np.int32), "", None) for i in range(num_prompts)],
        rollouts=rollouts,
        reward_name="exact",
        max_excluded=max_excluded,
    )


def evaluator_of(sets, collectives, stop):
    config = EvaluationConfig(data={"files": ["held-out.jsonl"]})  # of it when it is due counts
    return Evaluator(
        config, sets, lambda e: is_outage(e) or isinstance(e, StopRequested), collectives, stop
    )


def make_evaluator(rollouts, collectives, stop, num_prompts=3, **limits):
    return evaluator_of([held_out(rollouts, num_prompts, **limits)], collectives, stop)


def test_evaluator_counts_correct_samples(stop):
    evaluator = make_evaluator(FakeRollouts(), Collectives(Ranks.data_parallel(0, 1)), stop)
    metrics = evaluator.evaluate("v")
    assert metrics == {
        "eval/accuracy": 0.5,
        "eval/avg@2": 0.5,
        "eval/excluded": 0.0,
        "eval/pass@1": 0.5,
        "eval/pass@2": pytest.approx(2 / 3),
        "time/evaluation_s": 0.0,
    }


def test_an_episode_is_correct_by_its_environments_reward(stop):
    """One that failed is not, whatever the threshold."""
    said = [(1.0, False), (0.4, False), (0.5, False), (0.0, True), (-1.0, False)]
    scores = [Score(reward, {"game/exact": 0.0}, failed) for reward, failed in said]

    class Episodes:
        def produce(self, prompts, version):
            groups = [
                RolloutGroup(prompt, (), tuple(scores), version, 0.0, 0.0) for prompt in prompts
            ]
            return FakeStream(groups)

    of = held_out(Episodes(), 2, num_samples=5, pass_at=(1,))
    for threshold, accuracy in ((0.5, 0.4), (0.3, 0.6), (-0.5, 0.6), (-1.0, 0.8)):
        config = of.config.model_copy(update={"threshold": threshold})
        sets = [replace(of, reward_name=None, config=config)]
        metrics = evaluator_of(sets, Collectives(Ranks.data_parallel(0, 1)), stop).evaluate("v")
        assert metrics["eval/avg@5"] == metrics["eval/pass@1"] == pytest.approx(accuracy)


class TimedRollouts(FakeRollouts):
    """The groups of prompts 0, 1, 2, … are scored at these times."""

    def __init__(self, *completed_s):
        self.completed_s = completed_s

    def produce(self, prompts, version):
        groups = super().produce(prompts, version).groups
        times = [self.completed_s[group.prompt.index] for group in groups]
        pairs = zip(groups, times, strict=True)
        return FakeStream([replace(group, completed_s=at_s) for group, at_s in pairs])


def test_an_evaluation_lasts_until_its_last_score_on_any_rank(stop, monkeypatch):
    """Not until somebody looks, nor as long as what came first."""
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: 100.0))
    rollouts = TimedRollouts(103.0, 107.5, 105.0)
    alone = Collectives(Ranks.data_parallel(0, 1))
    assert make_evaluator(rollouts, alone, stop).evaluate("v")["time/evaluation_s"] == 7.5

    def work(collectives):
        return make_evaluator(rollouts, collectives, stop).evaluate("v")["time/evaluation_s"]

    assert on_ranks(2, work) == [7.5, 7.5]  # rank 0 has prompts 0 and 2


def test_what_is_answered_of_an_evaluation(stop):
    rollouts = FakeRollouts()
    alone = Collectives(Ranks.data_parallel(0, 1))
    scheduled = ScheduledEvaluation(make_evaluator(rollouts, alone, stop), 0)
    assert scheduled.answered is None
    running = scheduled.begin(0, PolicyVersion("r", 0, 0), is_last=True)
    (stream,) = (each._groups for each in running._sets)
    stream.waiting = 2  # of a GroupStream: scored, and nobody has looked
    assert scheduled.answered == (2, 3)
    stream.waiting = 0
    running.finish()
    assert scheduled.answered == (3, 3)
    running.close()
    assert scheduled.answered is None


def test_named_sets_have_figures_of_their_own_and_last_as_long_as_the_longest(stop, monkeypatch):
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: 100.0))
    sets = [
        held_out(TimedRollouts(103.0, 109.5, 105.0), name="aime24"),  # 0, 1 and 2 of 2 correct
        held_out(TimedRollouts(101.0, 102.0), 2, name="math500", pass_at=[1]),
    ]
    told = []

    def work(collectives):
        whole = evaluator_of(sets, collectives, stop)
        if collectives.ranks.rank == 0:
            whole = replace(whole, on_group=lambda name, group: told.append((name, group.prompt)))
        return whole.evaluate("v")

    (one,), two = on_ranks(1, work), on_ranks(2, work)
    assert (
        one
        == two[0]
        == two[1]
        == {
            "eval/aime24/accuracy": 0.5,
            "eval/aime24/avg@2": 0.5,
            "eval/aime24/excluded": 0.0,
            "eval/aime24/pass@1": 0.5,
            "eval/aime24/pass@2": pytest.approx(2 / 3),
            "eval/math500/accuracy": 0.25,
            "eval/math500/avg@2": 0.25,
            "eval/math500/excluded": 0.0,
            "eval/math500/pass@1": 0.25,
            "time/evaluation_s": 9.5,
        }
    )
    assert [(name, prompt.index) for name, prompt in told] == [
        *(("aime24", 0), ("aime24", 1), ("aime24", 2), ("math500", 0), ("math500", 1)),
        *(("aime24", 0), ("aime24", 2), ("math500", 0)),  # the first of two ranks
    ]


def test_all_sets_are_asked_for_at_once_and_doubted_and_given_up_together(stop):
    alone = Collectives(Ranks.data_parallel(0, 1))
    first, second = TwoEndpoints(), TwoEndpoints()
    sets = [held_out(first, 4, name="a"), held_out(second, 2, name="b")]
    running = evaluator_of(sets, alone, stop).prepare("v")
    assert running.answered is None
    running.start()
    assert [each.asked for each in (first, second)] == [[([0, 1, 2, 3], "v")], [([0, 1], "v")]]
    streams = [each._groups for each in running._sets]
    streams[0].waiting, streams[1].waiting = 1, 2
    assert running.answered == (3, 6)
    # an endpoint is doubted while the second set is waited for: the first has some of it too
    groups = streams[1].groups
    streams[1].groups = (running.withdraw("http://1", 3) or group for group in groups[:1])
    streams[1].groups = itertools.chain(streams[1].groups, groups[1:])
    running.finish()
    assert (first.asked[1:], second.asked[1:]) == ([([1, 3], "v")], [([1], "v")])
    running.close()
    assert all(each._groups.closed for each in running._sets)


def test_too_many_refused_prompts_are_told_of_with_the_name_of_their_set(stop):
    sets = [
        held_out(FakeRollouts(), name="aime24"),
        held_out(RefusedRollouts("refused"), 7, name="math500", max_excluded=0.05),
    ]
    alone = Collectives(Ranks.data_parallel(0, 1))
    with pytest.raises(TooManyExcluded, match=r"evaluation\.math500: (?s:.*)not today"):
        evaluator_of(sets, alone, stop).evaluate("v")


def test_an_outage_in_one_set_gives_up_all(stop):
    alone = Collectives(Ranks.data_parallel(0, 1))
    sets = [held_out(OutageRollouts(), name="a"), held_out(FakeRollouts(), name="b")]
    running = evaluator_of(sets, alone, stop).prepare("v")
    running.start()
    with pytest.raises(RuntimeError, match="production failed"):
        running.finish()
    assert all(each._groups.closed for each in running._sets) and running.answered is None


def test_a_response_without_an_opinion_is_not_correct(stop):
    of_one = held_out(FakeRollouts())
    (group, *_) = of_one.rollouts.produce(of_one.prompts[2:], "v")
    assert of_one.judge(group).num_correct == 2
    scores = (Score(1.0, {"other": 1.0}), group.scores[1])
    assert of_one.judge(replace(group, scores=scores)).num_correct == 1


class TwoEndpoints(FakeRollouts):
    """Prompt ``i``'s response is made by endpoint ``i % 2``, which has passed proof ``proof``.

    With two ranks, of every second prompt: by ``i // 2 % 2``.
    """

    def __init__(self, num_ranks=1):
        self.asked = []
        self.proof = 3
        self.num_ranks = num_ranks

    def produce(self, prompts, version):
        self.asked.append(([prompt.index for prompt in prompts], version))
        groups = [
            replace(group, completions=(made_by(self.endpoint(group.prompt.index), self.proof),))
            for group in super().produce(prompts, version).groups
        ]
        return FakeStream(groups)

    def endpoint(self, index):
        return f"http://{index // self.num_ranks % 2}"


def made_by(endpoint, proof):
    nothing = np.zeros(0, dtype=np.int32)
    logprobs, mask = nothing.astype(np.float32), nothing.astype(bool)
    return Completion(nothing, logprobs, "stop", (), endpoint, mask, proof=proof)


def test_what_an_endpoint_made_since_its_last_good_proof_is_generated_again(stop):
    rollouts = TwoEndpoints()
    alone = Collectives(Ranks.data_parallel(0, 1))
    running = make_evaluator(rollouts, alone, stop, num_prompts=4).prepare("v")
    running.start()
    running.withdraw("http://1", 4)  # all that it made was before
    running.withdraw("http://1", 3)
    rollouts.proof = 5
    assert running.finish()["eval/accuracy"] == (0 + 1 + 2 + 2) / 8
    assert rollouts.asked == [([0, 1, 2, 3], "v"), ([1, 3], "v")]
    running.finish()
    assert len(rollouts.asked) == 2
    running.withdraw("http://0", 3)  # behind the last look: its batch has begun again
    assert running.finish()["eval/accuracy"] == (0 + 1 + 2 + 2) / 8
    assert rollouts.asked[2:] == [([0, 2], "v")]


def test_what_one_rank_doubts_all_ranks_generate_again(stop):
    """Nobody else tells them: with the last version there is no batch to be withdrawn."""

    def work(collectives):
        rollouts = TwoEndpoints(num_ranks=2)
        rollouts.proof = 3 if collectives.ranks.rank == 0 else 1  # each counts for itself
        running = make_evaluator(rollouts, collectives, stop, num_prompts=8).prepare("v")
        running.start()
        if collectives.ranks.rank == 0:
            running.withdraw("http://0", 3)
        else:
            running.withdraw("http://1", 7)  # rank 1's own number, after all that it has of it
        return running.finish()["eval/accuracy"], [indices for indices, _ in rollouts.asked]

    first, second = on_ranks(2, work)
    assert first == ((0 + 1 + 6 * 2) / 16, [[0, 2, 4, 6], [0, 2, 4, 6]])
    assert second == (first[0], [[1, 3, 5, 7], [1, 5]])


class RefusedRollouts(FakeRollouts):
    """The endpoints refuse every prompt but the first, or have no context for them."""

    def __init__(self, kind):
        self.told = Exclusion(kind, "400: not today")

    def produce(self, prompts, version):
        first = super().produce(prompts[:1], version).groups
        others = [
            RolloutGroup(prompt, (), (), version, 0.0, 0.0, excluded=self.told)
            for prompt in prompts[1:]
        ]
        return FakeStream([*first, *others])


@pytest.mark.parametrize("kind", ["refused", "too_long"])
def test_an_evaluation_counts_prompts_that_nobody_answers_and_stops_at_too_many(stop, kind):
    alone = Collectives(Ranks.data_parallel(0, 1))
    few = make_evaluator(RefusedRollouts(kind), alone, stop, num_prompts=6, max_excluded=0.05)
    assert few.evaluate("v")["eval/excluded"] == 5.0
    many = make_evaluator(RefusedRollouts(kind), alone, stop, num_prompts=7, max_excluded=0.05)
    if kind == "too_long":
        assert many.evaluate("v")["eval/excluded"] == 6.0
    else:
        with pytest.raises(TooManyExcluded, match="(?s)6 prompts .*not today"):
            many.evaluate("v")


class OutageRollouts(FakeRollouts):
    """One group, then no endpoint is left."""

    def produce(self, prompts, version):
        ending = RuntimeError("production failed")
        ending.__cause__ = Outage("all endpoints are down")
        return FakeStream(super().produce(prompts[:1], version).groups, ending)


class WaitingRollouts:
    """The next group never comes; a stop is asked for meanwhile."""

    def __init__(self, stop):
        self.stop = stop
        self.stream = FakeStream([])

    def produce(self, prompts, version):
        stream = self.stream

        def groups():
            self.stop.request("SIGTERM")
            raise stream.interrupted.get(timeout=10)
            yield

        stream.groups = groups()
        return stream


class TwoRanks(Collectives):
    """This rank, and another whose words are given."""

    def __init__(self, other):
        super().__init__(Ranks.data_parallel())
        self.other = list(other)

    def all_gather(self, value):
        return [value, self.other.pop(0)]


def test_an_outage_of_one_rank_ends_the_evaluation_of_all(stop):
    with pytest.raises(RuntimeError, match="production failed") as caught:
        make_evaluator(OutageRollouts(), TwoRanks([None]), stop).evaluate("v")
    assert is_outage(caught.value)
    told = [2, "all endpoints are down"]  # an outage
    with pytest.raises(PeerOutage, match="rank 1: all endpoints are down"):
        make_evaluator(FakeRollouts(), TwoRanks([told]), stop).evaluate("v")


def test_a_stop_wakes_an_evaluation_and_ends_it_on_all_ranks(stop):
    other = StopRequest(60)
    rollouts = WaitingRollouts(stop)
    with pytest.raises(StopRequested, match="SIGTERM"):
        make_evaluator(rollouts, TwoRanks([None]), stop).evaluate("v")
    assert rollouts.stream.closed
    with pytest.raises(StopRequested, match="rank 1: SIGTERM"):
        make_evaluator(FakeRollouts(), TwoRanks([[0, "SIGTERM"]]), other).evaluate("v")
    other.close()


@pytest.mark.parametrize("name", ["eval/accuracy", "eval/aime24/avg@8", "eval/loss"])
def test_jsonl_drops_an_evaluation_that_comes_again(tmp_path, name):
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path, 0)
    first.log(2, {"loss": 1.0})
    first.log(2, {name: 0.5})
    first.close()
    JsonlTracker(path, 2).close()
    assert read_metrics(path) == [{"step": 2, "loss": 1.0, name: 0.5}]
    JsonlTracker(path, 2, unevaluated=True).close()
    assert read_metrics(path) == [{"step": 2, "loss": 1.0}]


def test_the_console_has_a_column_for_each_of_the_first_sets():
    names = ["aime24", "math500", "gsm8k"]
    headings = [heading for heading, _, _ in with_sets(COLUMNS, names)]
    assert headings[:5] == ["reward", "failed", "aime24", "math500", "tok/s/dev"]
    assert with_sets(COLUMNS, []) == COLUMNS
    view = ConsoleView(None, stream := io.StringIO(), with_sets(COLUMNS, names))
    view.log(3, {"eval/aime24/accuracy": 0.25, "eval/math500/accuracy": 0.5})
    assert "aime24 0.250  math500 0.500" in stream.getvalue()


def test_jsonl_drops_the_steps_that_a_resumed_run_takes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path, 0)
    for step in range(5):
        first.log(step, {"loss": float(step)})
    first.close()
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # cut off by a crash
    second = JsonlTracker(path, 2)
    second.log(3, {"loss": -3.0})
    second.close()
    assert [(m["step"], m["loss"]) for m in read_metrics(path)] == [
        (0, 0.0),
        (1, 1.0),
        (2, 2.0),
        (3, -3.0),
    ]


def test_an_evaluation_has_a_line_behind_its_steps_and_comes_again_if_it_was_not_finished(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = JsonlTracker(path, 0)
    for step in range(3):
        first.log(step, {"loss": float(step)})
        first.log(step, {"eval/accuracy": 0.5})
    first.close()
    of_steps = [{"step": n, "loss": float(n), "eval/accuracy": 0.5} for n in range(3)]
    assert read_metrics(path) == of_steps
    JsonlTracker(path, 1, unevaluated=False).close()
    assert read_metrics(path) == of_steps[:2]
    JsonlTracker(path, 1, unevaluated=True).close()
    assert read_metrics(path) == [of_steps[0], {"step": 1, "loss": 1.0}]


def logged(path, *steps):
    tracker = JsonlTracker(path, 0)
    for step in steps:
        tracker.log(step, {"loss": float(step)})
    tracker.close()


def steps_of(path):
    return [line["step"] for line in read_metrics(path)]


class Killed(BaseException):
    pass


@pytest.mark.parametrize(("from_step", "kept"), [(-1, []), (0, [0]), (1, [0, 1])])
def test_the_report_before_the_first_step_is_kept_like_any_other(from_step, kept, tmp_path):
    """An attempt that is stopped in its first batch has evaluated; the next one does not again."""
    path = tmp_path / "metrics.jsonl"
    logged(path, 0, 1)
    JsonlTracker(path, from_step).close()
    assert steps_of(path) == kept


def killed(*_):
    raise Killed


@pytest.mark.parametrize("steps", [(1, 2, 3, 4), (1, 4, 2, 3)], ids=["prefix", "not-a-prefix"])
def test_a_kill_while_jsonl_is_shortened_loses_no_step_that_is_kept(steps, tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    logged(path, *steps)
    with monkeypatch.context() as patched, room_of(40):  # not for all of what is kept
        patched.setattr(os, "fsync", killed)
        try:
            JsonlTracker(path, 3).close()
        except (Killed, OSError):
            assert steps_of(path) == list(steps)
        assert {1, 2, 3} <= set(steps_of(path))
    JsonlTracker(path, 3).close()
    assert steps_of(path) == [1, 2, 3]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


class room_of:  # noqa: N801
    """No file may grow beyond so many bytes; the kernel answers EFBIG."""

    def __init__(self, num_bytes):
        self.num_bytes = num_bytes

    def __enter__(self):
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.num_bytes, self.before[1]))

    def __exit__(self, *_):
        resource.setrlimit(resource.RLIMIT_FSIZE, self.before)


def test_jsonl_without_room_names_file_and_remedy_and_keeps_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    tracker = JsonlTracker(path, 0)
    tracker.log(1, {"loss": 1.0})
    with room_of(path.stat().st_size + 5), pytest.raises(OSError, match="step 2 .*make room") as e:
        tracker.log(2, {"loss": 2.0})
    assert str(path) in str(e.value) and "--resume" in str(e.value)
    tracker.log(3, {"loss": 3.0})  # there is room again
    tracker.close()
    assert steps_of(path) == [1, 3]


DAMAGED = {
    "zeros": bytes(300),
    "noise": b"\xff\x0d\x80{",
    "no-step": b'{"loss": 1.0}',
    "no-object": b"[1, 2]",
    "nothing": b"",
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("from_step", [2, 4])
def test_a_damaged_line_of_metrics_costs_itself_alone(damage, from_step, tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    logged(path, 1, 2, 3, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], DAMAGED[damage] + b"\n", *lines[1:]]))
    assert steps_of(path) == [1, 2, 3, 4]
    assert f"{path}: line 2 is damaged" in caplog.text
    JsonlTracker(path, from_step).close()
    assert path.read_bytes() == b"".join(lines[:from_step])


class FailingTracker:
    """A library that fails whatever is asked of it."""

    def fail(self, *_):
        raise NotADirectoryError(20, "Not a directory")

    log = note = close = fail


def test_trackers_that_fail_are_told_of_once_and_end_nothing(tmp_path, caplog):
    tracker = OptionalTracker("wandb", FailingTracker)
    for step in range(3):
        tracker.log(step, {"loss": 1.0})
    tracker.note("certificate", "ab12")
    tracker.close()
    assert caplog.text.count("wandb: NotADirectoryError") == 1


@pytest.mark.parametrize("can_open", [True, False])
def test_only_the_file_of_metrics_can_end_a_run(can_open, tmp_path):
    if not can_open:
        (tmp_path / "tensorboard").write_text("a file where the folder should be")
    run = {"trackers": ["tensorboard"], "console": True, "name": "n", "project": "p"}
    config = SimpleNamespace(
        run=SimpleNamespace(**run),
        source="rollouts",
        samples=SamplesConfig(),
        metrics=MetricsConfig(),
        evaluation=None,
    )
    trackers = trackers_of(config, tmp_path, Progress(), 3, look=None, ending=RunEnding())
    kinds = [type(tracker) for tracker in trackers]
    for tracker in trackers[:2]:
        tracker.log(0, {"loss": 1.0})
    for tracker in trackers:
        tracker.close()
    assert kinds == [JsonlTracker, OptionalTracker, OptionalTracker]


def test_trackers_are_closed_once_it_is_known_how_the_run_ends(tmp_path, monkeypatch):
    seen = []

    def opened_trackers(config, output, progress, total_steps, look, ending):
        class Closing:
            def close(self):
                seen.append(ending.state)

        return [Closing()]

    monkeypatch.setattr("easyrl.build.trackers.trackers_of", opened_trackers)
    with pytest.raises(InterruptedRun), ExitStack() as opened:
        run = SimpleNamespace(
            ranks=Ranks.data_parallel(0, 1), config=None, output=tmp_path, opened=opened
        )
        open_trackers(run, None, Progress(), 3, look=None)
        raise InterruptedRun("stopped, saved", status=0)
    assert seen == ["stopped"]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_console_without_a_reader_ends_nothing(is_terminal, monkeypatch, caplog):
    reading, writing = os.pipe()
    os.close(reading)
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(writing, "w") as stream:
        view = ConsoleView(total_steps=3, stream=stream)
        for step in range(3):
            view.log(step, {"reward/mean": 0.5})
        view.close()
    assert caplog.text.count("cannot be written (Broken pipe)") == 1


def test_tensorboard_files_hold_the_figures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = TensorBoardTracker(tmp_path, 0)
    tracker.log(1, {"reward/mean": 0.25, "loss": 2.0})
    tracker.log(2, {"reward/mean": 0.5})
    tracker.note("certificate", "ab12")
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.0)]
    (told,) = events.Tensors("certificate/text_summary")
    assert list(told.tensor_proto.string_val) == [b"ab12"]


@pytest.fixture
def wandb_calls(monkeypatch):
    """What a stand-in for the package is called with, and its run's summary."""
    calls = []

    class FakeRun:
        summary: dict[str, str] = {}

        def define_metric(self, name, **settings):
            pass

        def log(self, row):
            calls.append(row)

        def finish(self, exit_code):
            calls.append(("finish", exit_code))

    class FakeWandb:
        @staticmethod
        def Table(columns, data):
            return "table", columns, data

        @staticmethod
        def init(**settings):
            calls.append((settings["project"], settings["id"], settings["resume"]))
            return FakeRun()

    module = ModuleType("wandb")
    module.Table, module.init = FakeWandb.Table, FakeWandb.init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls, FakeRun.summary


def test_wandb_gets_steps_by_name_and_goes_on_in_its_run(tmp_path, wandb_calls):
    calls, summary = wandb_calls
    for _ in range(2):
        state = TrackerState(tmp_path, "wandb")
        tracker = WandbTracker("project", "name", tmp_path, {}, state, RunEnding())
        tracker.log(3, {"loss": 1.0})
        tracker.note("certificate", "ab12")
        tracker.close()
    assert summary == {"certificate": "ab12"}
    assert calls[1:3] == [{"step": 3, "loss": 1.0}, ("finish", 0)]
    (project, run_id, resume), again = calls[0], calls[3]
    assert (project, resume) == ("project", "allow") and run_id
    assert again == calls[0]


def test_wandb_gets_a_table_of_the_steps_that_have_one(tmp_path, wandb_calls):
    calls, _ = wandb_calls
    rows = {4: [[4, "text"]]}
    samples = ("step", "text"), lambda step: rows.get(step, [])
    state = TrackerState(tmp_path, "wandb")
    tracker = WandbTracker("project", "name", tmp_path, {}, state, RunEnding(), samples)
    for step in (3, 4):
        tracker.log(step, {"loss": 1.0})
    table = "table", ["step", "text"], [[4, "text"]]
    assert calls[1:] == [{"step": 3, "loss": 1.0}, {"step": 4, "loss": 1.0, "samples": table}]


def test_console_prints_a_line_per_step_where_there_is_no_terminal():
    stream = io.StringIO()
    view = ConsoleView(total_steps=7, stream=stream)
    view.log(0, {"eval/accuracy": 0.25})
    view.log(1, {"reward/mean": 0.5, "time/step_s": 90.0, "time/wait_s": 1.5})
    view.log(2, {"reward/mean": 0.5, "time/step_s": 30.0})
    view.close()
    times, lines = zip(
        *(line.split("  ", 1) for line in stream.getvalue().splitlines()), strict=True
    )
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d", each) for each in times)
    assert lines == (
        "step 0/7  eval 0.250",
        "step 1/7  reward 0.500  step s 90.00  wait 1.50  left 0:09:00",
        "step 2/7  reward 0.500  step s 30.00  left 0:05:00",  # at the median of both
    )


def test_console_tells_of_failed_rewards_where_there_are_any():
    stream = io.StringIO()
    view = ConsoleView(total_steps=None, stream=stream)
    view.log(1, {"reward/mean": 0.5, "reward/failures": 0.0})
    view.log(2, {"reward/mean": 0.5, "reward/failures": 3.0})
    view.close()
    lines = [line.split("  ", 1)[1] for line in stream.getvalue().splitlines()]
    assert lines == ["step 1  reward 0.500", "step 2  reward 0.500  failed 3"]


def test_console_on_a_terminal_has_the_column_once_a_reward_has_failed(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    stream = io.StringIO()
    view = ConsoleView(total_steps=None, stream=stream)
    view.log(1, {"reward/mean": 0.5, "reward/failures": 0.0})
    assert "failed" not in stream.getvalue()
    view.log(2, {"reward/mean": 0.5, "reward/failures": 3.0})
    view.close()
    assert "failed" in stream.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_console_shows_a_sample_behind_its_step(is_terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    if is_terminal:
        stream.isatty = lambda: True
    long = "a [red] " + "word " * 40
    view = ConsoleView(None, stream, sample=lambda step: f"{long}\nof {step}" if step == 2 else "")
    for step in (1, 2, 3):
        view.log(step, {"reward/mean": 0.5})
    view.close()
    shown = stream.getvalue()
    assert shown.count("of 2") == 1 and "a [red] word" in shown and "of 1" not in shown
    if not is_terminal:
        lines = shown.splitlines()
        steps = [line.split("  ")[1] if "  step " in line else line for line in lines]
        assert steps == ["step 1", "step 2", long, "of 2", "step 3"]


def test_console_tells_the_last_step_only_where_it_is_known():
    stream = io.StringIO()
    view = ConsoleView(total_steps=None, stream=stream)
    view.log(3, {"reward/mean": 0.5, "time/step_s": 1.0})
    view.close()
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("  step 3  reward 0.500  step s 1.00")


@pytest.mark.parametrize("columns", [COLUMNS, RECORD_COLUMNS])
def test_the_columns_of_a_terminal_fit_80_characters(columns, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    view = ConsoleView(total_steps=9999, stream=stream, columns=columns)
    columns = tuple(c for c in columns if c[1] != "reward/failures")
    figures = {metric: 123.456 for _, metric, _ in columns}
    figures |= {"throughput/tokens_per_s_per_device": 12345.6, "response/mean_tokens": 12345.0}
    view.log(9998, figures)
    view.close()
    text = Text.from_ansi(stream.getvalue()).plain
    assert "9998/9999" in text and "left 0:02:03" in text
    for heading, metric, form in columns:
        assert heading in text and form.format(figures[metric]) in text  # nothing is cut off
    assert all(len(line) <= 80 for line in text.splitlines())


def test_reward_curve_is_a_png(tmp_path):
    path = tmp_path / "reward.png"
    plot_reward_curve([{"step": 0, "eval/accuracy": 0.1}, {"step": 1, "reward/mean": 0.2}], path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_events_that_cannot_be_written_leave_a_gap_and_end_nothing(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    log.record("before")
    with room_of(path.stat().st_size + 5):  # for half a line
        log.record("lost")
        log.record("lost too")
    log.record("after")
    log.close()
    assert [(e["seq"], e["event"]) for e in read_events(path)] == [(0, "before"), (3, "after")]
    assert caplog.text.count("cannot be written") == 1 and str(path) in caplog.text


def test_an_event_log_that_is_no_file_ends_nothing(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    path.mkdir()
    log = EventLog(path)
    log.record("lost")
    log.close()
    assert str(path) in caplog.text


def test_event_log_is_ordered_and_on_disk_at_once(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    log.record("a", x=1)
    log.record("b")
    events = read_events(tmp_path / "events.jsonl")
    log.close()
    assert [(e["seq"], e["event"], e.get("x")) for e in events] == [(0, "a", 1), (1, "b", None)]
    log.record("after the end")  # a late thread must not fail
    assert len(read_events(tmp_path / "events.jsonl")) == 2


IDLE = "time/inference_idle_s"


def idle(*values):
    return iter(values).__next__


def test_throughput_is_per_step_and_device():
    reporter = StepReporter(
        lambda: 4, seconds={IDLE: idle(1.0, 1.5, 4.0), "time/reward_s": idle(5.0, 6.0, 9.0)}
    )
    metrics = {"tokens/packed": 600.0, "tokens/sequences": 1200.0, "time/step_s": 3.0}
    reporter.report(1, metrics)
    assert metrics["time/inference_idle_s"] == 0.5 and metrics["time/reward_s"] == 1.0
    assert metrics["throughput/tokens_per_s"] == 200.0
    assert metrics["throughput/tokens_per_s_per_device"] == 50.0
    assert metrics["throughput/tpspd"] == 100.0 and metrics["throughput/devices"] == 4.0
    start = {}
    reporter.report(0, start)
    assert start == {"time/inference_idle_s": 2.5, "time/reward_s": 3.0}


# ---- what is said of a step ----------------------------------------------------------------------

VERSION = PolicyVersion("run", 0, 1)


class Figures:
    """A tracker that keeps what it was given."""

    def __init__(self):
        self.logged = []

    def log(self, step, metrics):
        self.logged.append((step, metrics))

    def close(self):
        pass


def test_a_step_is_reported_with_throughput_and_its_evaluation_later_to_every_tracker():
    first, second = Figures(), Figures()
    reporter = StepReporter(
        lambda: 1, seconds={IDLE: idle(0.0, 1.0, 1.5)}, trackers=[first, second]
    )
    reporter.report(0, {"time/sync_s": 0.5})
    reporter.report_evaluation(0, {"eval/accuracy": 0.5})
    counted = {"tokens/packed": 600.0, "tokens/sequences": 600.0, "time/step_s": 3.0}
    reporter.report(1, counted | {"eval/accuracy": 0.5})
    assert first.logged == second.logged
    (zero, start), later, (one, metrics) = first.logged
    assert (zero, one) == (0, 1)
    assert start == {"time/sync_s": 0.5, "time/inference_idle_s": 1.0}
    assert later == (0, {"eval/accuracy": 0.5})
    assert metrics["eval/accuracy"] == 0.5 and metrics["throughput/tokens_per_s"] == 200.0


def test_a_step_without_evaluation_is_reported_as_it_is():
    tracker = Figures()
    reporter = StepReporter(lambda: 1, seconds={IDLE: idle(0.0, 0.0)}, trackers=[tracker])
    reporter.compare(BatchTotals())  # nobody looks: another rank's task
    reporter.report(0, {"a": 1.0})
    assert tracker.logged == [(0, {"a": 1.0, "time/inference_idle_s": 0.0})]


class Counts:
    def __init__(self, config):
        self.config = config
        self.on_start = lambda: None

    def prepare(self, version):
        return Prepared(version, lambda: self.on_start())


@dataclass
class Prepared:
    version: str
    start: Callable[[], object]
    withdrawn: list = field(default_factory=list)

    def withdraw(self, endpoint, proof):
        self.withdrawn.append((endpoint, proof))


@pytest.mark.parametrize(
    ("schedule", "steps", "expected"),
    [
        ({"every_steps": 2}, [0, 1, 2, 3, 4, 5], [0, 2, 4, 5]),
        ({"every_steps": 2, "at_start": False, "at_end": False}, [0, 1, 2, 3], [2]),
        ({"every_steps": 0}, [0, 1, 2, 3], [0, 3]),
        ({"every_steps": 3}, [0, 2, 4, 6, 8], [0, 4, 6, 8]),  # several steps at once
        ({"every_steps": 2, "at_end": False}, [4, 5, 6, 7], [6]),  # resumed behind step 4
    ],
)
def test_an_evaluation_is_due_every_so_many_steps_at_start_and_at_end(schedule, steps, expected):
    config = EvaluationConfig(data={"files": ["held-out.jsonl"]}, **schedule)
    evaluation = ScheduledEvaluation(Counts(config), steps[0])
    asked = [step for step in steps if evaluation.begin(step, VERSION, is_last=step == steps[-1])]
    assert asked == expected
    again = evaluation.begin(steps[-1], VERSION, is_last=False, again=True)
    assert again.version == "run:0:1"


def test_what_fails_while_an_evaluation_starts_is_withdrawn_from_it():
    """Its first requests are out before ``begin`` returns."""
    evaluator = Counts(EvaluationConfig(data={"files": ["held-out.jsonl"]}))
    evaluation = ScheduledEvaluation(evaluator, 0)
    evaluation.withdraw("http://0", 1)  # nothing is under way
    evaluator.on_start = lambda: evaluation.withdraw("http://0", 2)
    running = evaluation.begin(0, VERSION, is_last=False)
    assert running.withdrawn == [("http://0", 2)]


def test_policy_version_round_trips_and_refuses_others():
    version = PolicyVersion("a-run", 3, 17)
    assert PolicyVersion.parse(str(version)) == version
    for text in ("default", "a:b", "run:x:1", ""):
        with pytest.raises(ValueError, match="not a policy version"):
            PolicyVersion.parse(text)


@pytest.mark.parametrize(
    "shown", ["b:0:3", "b:2:0:updating", "b:0:0:probe", "b:0:0:probe:updating"]
)
def test_a_stamp_of_another_run_is_told_from_other_stamps(shown):
    assert "another run (b) " in other_run("a:0:3:updating", "a:0:3", shown)
    assert other_run("b:1:1", shown) == other_run(None, shown) == ""
    for no_stamp in ("default", "b:0:3:of-our-own", "b", ""):
        assert other_run("a:0:3", no_stamp) == other_run(no_stamp, shown) == ""


def test_seeds_differ_and_do_not_depend_on_time():
    seeds = {sample_seed(0, e, i, s) for e in range(3) for i in range(50) for s in range(8)}
    assert len(seeds) == 3 * 50 * 8
    assert sample_seed(0, 1, 2, 3) == sample_seed(0, 1, 2, 3) != sample_seed(1, 1, 2, 3)
    assert json.dumps(sample_seed(0, 0, 0, 0)) and 0 <= sample_seed(5, 1, 1, -1) < 2**31


def test_an_attempt_does_not_write_behind_half_a_line(tmp_path):
    path = tmp_path / "events.jsonl"
    for event in ("first", "second"):
        log = EventLog(path)
        log.record(event)
        log.record("last")
        log.close()
        os.truncate(path, path.stat().st_size - 5)
    assert [event["event"] for event in read_events(path)] == ["first", "second"]
