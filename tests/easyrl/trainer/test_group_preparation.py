"""What is made of groups as they arrive: once each, as behind the wait, counted if handed out."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.recipes import Recipe
from easyrl.runtime.loop_thread import LoopThread
from easyrl.runtime.phase_clock import PhaseClock
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import RolloutGroup, Score
from easyrl.trainer.group_preparation import GroupPreparation
from tests.dataloaders.rollout_parts import MemoryStore, ScriptedGenerate, generator, produce
from tests.dataloaders.rollout_parts import prompt as made_up_prompt
from tests.easyrl.trainer.test_batch_scope import Whole
from tests.easyrl.trainer.test_without_signal import Drains, Engine, plain_accumulator
from tests.recipes import group_functions, run_settings, token_grpo
from tests.tiny_models import random_group


def group(index: int, lengths: Sequence[int] = (3, 5, 4)) -> RolloutGroup:
    made = random_group(np.random.default_rng(index), 2, list(lengths), index=index)
    scores = tuple(Score(0.1 * index * place, {"r": 0.1 * place}) for place in range(len(lengths)))
    return replace(made, scores=scores, dispatched_s=float(index), completed_s=2.0 + index)


class Arriving(Drains):
    """Says of all groups that they have arrived, and hands out some of them."""

    on_arrival: Any

    def __init__(self, arrived: list[RolloutGroup], *drains: list[RolloutGroup]) -> None:
        super().__init__(*drains)
        self._arrived = arrived

    def drain_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
        while self._arrived:
            self.on_arrival(self._arrived.pop(0))
        return super().drain_ready(max_tokens, idle)


def run(
    stop: StopRequest, source: Drains, recipe: Recipe | None = None
) -> tuple[BatchTotals, list[list[int]]]:
    """The update's sums, and the prompts of each call of the recipe."""
    functions = group_functions(recipe, run_settings(), max_tokens_per_micro_batch=100)
    calls: list[list[int]] = []

    def trained(groups: Any, rewards: Any, said: Any) -> Any:
        calls.append([each.prompt.index for each in groups])
        return functions.trained(groups, rewards, said)

    accumulator = plain_accumulator(Engine(), replace(functions, trained=trained), stop)
    return accumulator.accumulate(cast(Any, source)), calls


def said(totals: BatchTotals) -> tuple[Any, ...]:
    """What depends on the groups alone, in the order in which they were added."""
    return (
        totals.denominator,
        astuple(totals.metrics),
        totals.dispatched_s,
        totals.arrived_s,
        totals.groups,
        totals.num_packed_tokens,
    )


def test_groups_are_prepared_once_and_come_to_the_same(stop: StopRequest) -> None:
    drains = [[group(3), group(1)], [group(2)]]
    arrived = [drains[1][0], *drains[0]]  # in another order
    behind, late_calls = run(stop, Drains(*map(list, drains)))
    before, calls = run(stop, Arriving(arrived, *map(list, drains)))
    assert said(before) == said(behind)
    assert calls == [[2], [3], [1]] and late_calls == [[3], [1], [2]]


def test_a_group_that_is_not_handed_out_is_not_counted(stop: StopRequest) -> None:
    taken = group(1)
    totals, _ = run(stop, Arriving([group(2), taken], [taken]))
    assert [outcome.index for outcome in totals.groups] == [1]
    assert totals.metrics.sums["groups"] == 1 and totals.arrived_s == [3.0]


def test_another_group_of_the_same_prompt_is_prepared_itself(stop: StopRequest) -> None:
    """What was read back from a disk is another object than what has arrived."""
    totals, calls = run(stop, Arriving([group(1, (3, 3))], [group(1, (4, 4, 4))]))
    assert totals.metrics.sums["response_tokens"] == 12 and calls == [[1], [1]]


def test_a_recipe_that_needs_the_batch_is_not_asked_as_groups_arrive(stop: StopRequest) -> None:
    groups = [group(1), group(2)]
    totals, calls = run(stop, Arriving(list(groups), [groups[0]], [groups[1]]), Whole())
    assert calls == [[1, 2]] and totals.metrics.sums["groups"] == 2


@dataclass(frozen=True)
class Broken(Recipe):
    def advantages(self, groups, run, inputs):  # type: ignore[no-untyped-def]
        raise ZeroDivisionError("of the recipe")

    def loss(self, logprobs, entropy, terms):  # type: ignore[no-untyped-def]
        return logprobs


def test_what_the_recipe_raises_ends_the_update(stop: StopRequest) -> None:
    with pytest.raises(ZeroDivisionError, match="of the recipe"):
        run(stop, Arriving([group(1)], [group(1)]), Broken())


def test_preparing_counts_as_packing() -> None:
    clock = PhaseClock()
    functions = group_functions(token_grpo(), run_settings(), max_tokens_per_micro_batch=100)
    with clock.phase("wait"):
        GroupPreparation(functions, frozenset(), clock).prepare(group(1))
    assert clock.take()["pack"] > 0


def test_a_stream_tells_of_what_arrives_in_memory_on_the_consumers_thread() -> None:
    told: list[tuple[int, int]] = []
    prompts = [made_up_prompt(index) for index in range(3)]

    def note(each: RolloutGroup) -> None:
        told.append((each.prompt.index, threading.get_ident()))

    with LoopThread() as thread:
        store = MemoryStore()
        generate = ScriptedGenerate(open_indices=[0, 1])
        produce(generator(thread, generate), prompts[:2], "v", store=store).complete()
        generate = ScriptedGenerate(open_indices=range(3))
        stream = produce(generator(thread, generate), prompts, "v", store=store)
        stream.on_arrival = note
        drains = [*iter(lambda: stream.drain_ready(10_000), [])]
    assert sorted(each.prompt.index for drain in drains for each in drain) == [0, 1, 2]
    # the others were finished before: they lie in the store until they are handed out
    assert told == [(2, threading.get_ident())]
