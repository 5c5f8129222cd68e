"""The parts that ``benchmarks.accounting`` holds up exist, and every cause has one."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from functools import partial
from pathlib import Path

import pytest

from benchmarks.accounting import _of_modes
from benchmarks.parts.accounting.delays import Delay, hold_up_calls, write_records
from benchmarks.parts.accounting.growth import growth
from benchmarks.parts.accounting.parts import PARTS
from easyrl.dataloaders.producer.rollout_generator import RolloutGenerator
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.ledger.journal.rollouts import JournalledRollouts
from easyrl.metrics.step_progress import DOES
from easyrl.rewards.scorer import Scorer
from easyrl.timeline.accounting import (
    FAILING,
    FIRST_GROUP,
    GENERATING,
    IDLE,
    STARVED,
    TAIL,
    UNEXPLAINED,
)
from easyrl.timeline.spans import BatchSpans, Span
from easyrl.trainer.look_ahead import LookAhead
from easyrl.weight_sync.proof import Probe, Prover
from easyrl.weight_sync.push import WeightPusher
from tests.easyrl.timeline.made_spans import TRAINER, A, B, batch, phases, requests

OF_ENDPOINTS = {GENERATING, TAIL, FAILING, UNEXPLAINED} | IDLE
OF_ENDPOINTS |= {"push", "proof", "canary", "probe", "evaluation"}


REPLACED = (
    (RolloutGenerator, "_group"),
    (RolloutGenerator, "produce_batch"),
    (EndpointPool, "ask"),
    (Scorer, "score_group"),
    (LookAhead, "work"),
    (Prover, "sample"),
    (WeightPusher, "has_restarted"),
    (Probe, "check"),
    (Probe, "visible"),
)


@pytest.mark.parametrize("name", PARTS)
def test_a_part_that_is_held_up_is_another_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PARTS[name].plant
    replaced = [plant.args] if isinstance(plant, partial) else REPLACED
    before = [inspect.getattr_static(owner, method) for owner, method in replaced]
    for (owner, method), original in zip(replaced, before, strict=True):
        monkeypatch.setattr(owner, method, original)  # put back in the end
    plant(Delay(0.5))
    after = [inspect.getattr_static(owner, method) for owner, method in replaced]
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if new is not old]
    # an environment is held up by its records
    assert bool(pairs) == (name != "environment")
    for old, new in pairs:
        assert inspect.iscoroutinefunction(old) == inspect.iscoroutinefunction(new)


def test_what_a_restarted_endpoint_is_made_of_is_there() -> None:
    assert inspect.iscoroutinefunction(WeightPusher.has_restarted)
    assert inspect.iscoroutinefunction(Prover.sample)
    assert {"self", "samples"} <= inspect.signature(Probe.check).parameters.keys()
    assert {"self", "samples"} == inspect.signature(Probe.visible).parameters.keys()


def test_every_cause_has_a_part() -> None:
    planted = {lane: set() for lane in ("rank", "endpoint")}
    for part in PARTS.values():
        planted[part.lane] |= set(part.causes)
    assert planted["endpoint"] == OF_ENDPOINTS
    of_ranks = set(DOES) - {"wait", "other"} | {FIRST_GROUP, STARVED}
    assert planted["rank"] == of_ranks


def test_each_part_is_run_in_the_modes_that_have_it() -> None:
    found = list(_of_modes(("sync", "async"), ""))
    assert {name for mode, name in found if mode == "async"} == set(PARTS)
    only_async = {"first response", "later responses", "look-ahead"}
    assert {name for mode, name in found if mode == "sync"} == set(PARTS) - only_async
    chosen = [name for _, name in _of_modes(("async",), "push,tail")]
    assert chosen == ["tail", "others' tail", "push", "push, at the trainer"]


def of_training(*train_s: float) -> list[list[BatchSpans]]:
    """Batches that wait for a second, train so long, and wait until four are over."""
    return [
        [batch(phases(("wait", 1), ("train", s), ("wait", max(3 - s, 0))), max(4, s + 1), number)]
        for number, s in enumerate(train_s, start=1)
    ]


def test_a_delay_is_seen_batch_by_batch_whatever_their_lengths() -> None:
    found = growth("rank", ["train"], of_training(3.0, 3.5, 5.0, 5.5, 4.0, 4.5))
    assert (found.own_s, found.wall_s) == pytest.approx((0.5, 0.5))
    assert found.most_other[1] == pytest.approx(0) and found.off(0.5) == pytest.approx(0)
    assert found.off(0.2) == pytest.approx(0.3)  # the batch takes more than was planted


def test_a_delay_beside_which_something_is_waited_for_is_not_missing() -> None:
    found = growth("rank", ["train"], of_training(1.0, 1.5))
    assert (found.own_s, found.wall_s) == pytest.approx((0.5, 0.0))
    assert found.others["starved"] == pytest.approx(-0.5) and found.off(0.5) == pytest.approx(0)


def test_a_delay_that_appears_twice_is_found() -> None:
    before = [batch(phases(("train", 1), ("step", 1)), 2, 1)]
    after = [batch(phases(("train", 1.5), ("step", 1.5)), 3, 2)]
    found = growth("rank", ["train"], [before, after])
    assert found.most_other == ("step", pytest.approx(0.5)) and found.off(0.5) == pytest.approx(0.5)


def test_the_lane_is_the_one_in_which_the_delay_is() -> None:
    def answered(seconds: float, number: int) -> list[BatchSpans]:
        spans: list[Span] = [*TRAINER, *requests(A, (0.5, 2.0)), *requests(B, (0.5, seconds))]
        return [batch(spans, 10, number)]

    found = growth("endpoint", ["idle: others' tail"], [answered(3.0, 1), answered(3.5, 2)])
    assert found.own_s == pytest.approx(0.5)  # of A; B has a longer request
    assert found.most_other[1] == pytest.approx(0) and found.others["idle: training"] < 0


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JournalledRollouts, "begin", lambda: None)


def test_every_second_batch_is_held_up_once(begin: None) -> None:
    delay = Delay(0.5)
    delay.install()
    assert delay.take() == 0  # whatever comes before the first batch
    found = []
    for _ in range(6):
        JournalledRollouts.begin()  # type: ignore[call-arg]
        found.append((delay.number, delay.of_batch_s, delay.due_s, delay.take(), delay.take()))
    late, not_late = (0.5, 0.5, 0.5, 0), (0, 0, 0, 0)
    assert found == [(n, *(late if n in (2, 4) else not_late)) for n in range(6)]


def test_what_is_asked_for_first_is_so_in_each_batch(begin: None) -> None:
    delay = Delay(0.5)
    delay.install()
    found = []
    for _ in range(3):
        JournalledRollouts.begin()  # type: ignore[call-arg]
        found += [delay.begins(), delay.begins()]
    assert found == [True, False] * 3


def test_what_comes_before_a_batch_is_of_that_batch(begin: None) -> None:
    delay = Delay(0.5, before_begin=True)
    delay.install()
    found = []
    for _ in range(6):
        found.append(delay.take())
        JournalledRollouts.begin()  # type: ignore[call-arg]
    assert found == [0, 0, 0.5, 0, 0.5, 0]


class Worker:
    """Counts the seconds after which it is called."""

    def __init__(self) -> None:
        self.called_s: list[float] = []

    def work(self) -> str:
        self.called_s.append(time.monotonic())
        return "done"

    async def work_later(self) -> str:
        return self.work()


@pytest.mark.parametrize("method", ["work", "work_later"])
def test_the_first_call_of_a_late_batch_waits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, method, getattr(Worker, method))  # put back in the end
    delay = Delay(0.2)
    hold_up_calls(Worker, method, delay)
    worker, delay.due_s = Worker(), 0.2
    for _ in range(2):
        began_s, done = time.monotonic(), getattr(worker, method)()
        assert (done if isinstance(done, str) else asyncio.run(done)) == "done"
        waited = worker.called_s[-1] - began_s
        assert waited >= 0.2 if len(worker.called_s) == 1 else delay.due_s == 0


def test_records_say_how_long_the_environment_works(tmp_path: Path) -> None:
    prompts, records = tmp_path / "prompts.jsonl", tmp_path / "records.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(8)))
    write_records(prompts, records, 2, 0.5)
    read = [json.loads(line) for line in records.read_text().splitlines()]
    assert [record["prompt"] for record in read] == [str(n) for n in range(8)]
    assert [record["works_s"] for record in read] == [0, 0, 0, 0, 0.5, 0.5, 0, 0]
