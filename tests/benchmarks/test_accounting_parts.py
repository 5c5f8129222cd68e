"""The parts that ``benchmarks.accounting`` holds up exist, and every cause has one."""

from __future__ import annotations

import inspect

import pytest

from benchmarks.accounting import _of_modes
from benchmarks.parts.accounting.growth import growth
from benchmarks.parts.accounting.parts import PARTS
from easyrl.metrics.step_progress import DOES
from easyrl.timeline.accounting import (
    ENVIRONMENTS,
    FAILING,
    FIRST_GROUP,
    GENERATING,
    IDLE,
    NO_PROMPT,
    STARVED,
    TAIL,
    UNEXPLAINED,
)
from easyrl.timeline.spans import BatchSpans, Span
from tests.easyrl.timeline.made_spans import TRAINER, A, B, batch, phases, requests

# in the accounts of endpoints: without environments, failures and rejected groups; once in a run;
# beside training's own requests
NOT_OF_A_PART = {ENVIRONMENTS, FAILING, NO_PROMPT, "probe", "evaluation"}
OF_ENDPOINTS = {GENERATING, TAIL, FAILING, UNEXPLAINED} | IDLE
OF_ENDPOINTS |= {"push", "proof", "canary", "probe", "evaluation"}


@pytest.mark.parametrize("name", PARTS)
def test_what_is_held_up_is_there_and_awaited_as_it_is_called(name: str) -> None:
    part = PARTS[name]
    assert inspect.iscoroutinefunction(getattr(part.owner, part.method)) == part.is_async


def test_every_cause_has_a_part() -> None:
    planted = {lane: set() for lane in ("rank", "endpoint")}
    for part in PARTS.values():
        planted[part.lane] |= set(part.causes)
    assert planted["endpoint"] == OF_ENDPOINTS - NOT_OF_A_PART
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
        for number, s in enumerate(train_s)
    ]


def test_a_delay_is_seen_batch_by_batch_whatever_their_lengths() -> None:
    found = growth("rank", ["train"], of_training(3.0, 5.0, 4.0), of_training(3.5, 5.5, 4.5))
    assert (found.own_s, found.wall_s) == pytest.approx((0.5, 0.5))
    assert found.most_other[1] == pytest.approx(0) and found.off(0.5) == pytest.approx(0)
    assert found.off(0.2) == pytest.approx(0.3)  # the batch takes more than was planted


def test_a_delay_beside_which_something_is_waited_for_is_not_missing() -> None:
    found = growth("rank", ["train"], of_training(1.0), of_training(1.5))
    assert (found.own_s, found.wall_s) == pytest.approx((0.5, 0.0))
    assert found.others["starved"] == pytest.approx(-0.5) and found.off(0.5) == pytest.approx(0)


def test_a_delay_that_appears_twice_is_found() -> None:
    before = [[batch(phases(("train", 1), ("step", 1)), 2)]]
    after = [[batch(phases(("train", 1.5), ("step", 1.5)), 3)]]
    found = growth("rank", ["train"], before, after)
    assert found.most_other == ("step", pytest.approx(0.5)) and found.off(0.5) == pytest.approx(0.5)


def test_the_lane_is_the_one_in_which_the_delay_is() -> None:
    def answered(seconds: float) -> list[list[BatchSpans]]:
        spans: list[Span] = [*TRAINER, *requests(A, (0.5, 2.0)), *requests(B, (0.5, seconds))]
        return [[batch(spans, 10)]]

    found = growth("endpoint", ["idle: others' tail"], answered(3.0), answered(3.5))
    assert found.own_s == pytest.approx(0.5)  # of A; B has a longer request
    assert found.most_other[1] == pytest.approx(0) and found.others["idle: training"] < 0
