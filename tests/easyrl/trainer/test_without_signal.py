"""Groups whose gradient is exactly zero: what is run of them, counted of them, and stepped with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from easyrl.engines.base import MetricSums
from easyrl.metrics.batch_metrics import BatchTotals, Update, batch_metrics
from easyrl.metrics.event_log import ignore
from easyrl.recipes import Recipe
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Key, MicroBatch, RolloutGroup, Score
from easyrl.trainer.accumulation import Accumulator, GroupFunctions
from tests.recipes import group_functions, run_settings, token_grpo
from tests.tiny_models import random_group


def group(index: int, rewards: list[float], *endpoints: str, **settings: Any) -> RolloutGroup:
    """Two or more responses of 3 tokens, made by ``endpoints`` in turn."""
    made = random_group(
        np.random.default_rng(index), 2, [3] * len(rewards), index=index, **settings
    )
    completions = tuple(
        replace(c, endpoint=(endpoints or ("http://a",))[i % max(1, len(endpoints))])
        for i, c in enumerate(made.completions)
    )
    scores = tuple(Score(reward, {}) for reward in rewards)
    return replace(made, completions=completions, scores=scores)


class Drains:
    """A ``GroupSource`` whose groups come in given drains."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset({"run:0:0"})
    recovered: frozenset[Key] = frozenset()
    discarded: frozenset[Key] = frozenset()

    def __init__(self, *drains: list[RolloutGroup]) -> None:
        self._drains = list(drains)

    def note_trained(self, num_tokens: int) -> None: ...

    def drain_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
        return self._drains.pop(0) if self._drains else []

    def complete(self) -> None: ...
    def interrupt(self, error: BaseException) -> None: ...


class Engine:
    """Remembers the prompts that it was given."""

    device = torch.device("cpu")
    lockstep = False

    def __init__(self) -> None:
        self.prompts: list[int] = []

    def finish_backwards(self) -> list[MetricSums]:
        return []

    def prepare(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        return rows

    def forward_backward(self, rows: list[MicroBatch]) -> list[MetricSums]:
        self.prompts += [p for row in rows for p in {key.prompt for key in row.sequences}]
        tokens = float(sum(row.num_loss_tokens for row in rows))
        return [MetricSums({"num_loss_tokens": tokens, "loss_sum": 0.0})]


def plain_accumulator(
    engine: Any,
    functions: GroupFunctions,
    stop: StopRequest,
    max_tokens: int = 100,
    **settings: Any,
) -> Accumulator:
    """Of one rank, which no interruption ends."""
    return Accumulator(
        engine=engine,
        collectives=Collectives(Ranks.data_parallel(0, 1)),
        functions=functions,
        stop=stop,
        is_interruption=lambda error: False,
        record=ignore,
        max_tokens=max_tokens,
        synchronous=False,
        **settings,
    )


def run(
    stop: StopRequest, *drains: list[RolloutGroup], recipe: Recipe | None = None, skip: bool = True
) -> tuple[list[int], BatchTotals]:
    """The prompts that went through the model, and the update's sums."""
    engine = Engine()
    functions = group_functions(recipe, run_settings(), max_tokens_per_micro_batch=100)
    accumulator = plain_accumulator(engine, functions, stop, skip_without_signal=skip)
    totals = accumulator.accumulate(cast(Any, Drains(*drains)))
    return sorted(engine.prompts), totals


FLAT, OTHER = [1.0, 1.0], [0.0, 1.0]


def test_they_cost_nothing_and_count(stop: StopRequest) -> None:
    groups = [group(0, OTHER), group(1, FLAT), group(2, FLAT), group(3, OTHER)]
    prompts, totals = run(stop, groups)
    assert prompts == [0, 3]
    metrics = batch_metrics([Update(totals)], totals.groups)
    assert metrics["batch/groups_without_signal"] == 2 and metrics["batch/groups"] == 4
    assert metrics["tokens/compared"] == 12 and metrics["tokens/response"] == 24
    assert totals.denominator == metrics["batch/denominator"] == 24
    assert [fate.key for fate in totals.groups] == [(0, i) for i in range(4)]  # trained, all


def test_none_is_left_out_where_it_is_not_asked_for(stop: StopRequest) -> None:
    prompts, totals = run(stop, [group(0, OTHER), group(1, FLAT)], skip=False)
    assert prompts == [0, 1]
    assert totals.metrics.sums["groups_without_signal"] == 1


@pytest.mark.parametrize(
    "settings", [{"kl_coef": 0.1}, {"kl_in_reward_coef": 0.1}, {"entropy_coef": 0.1}]
)
def test_none_is_left_out_of_a_loss_with_another_term(
    stop: StopRequest, settings: dict[str, float]
) -> None:
    """Its gradient does not vanish with the advantages."""
    prompts, totals = run(stop, [group(0, OTHER), group(1, FLAT)], recipe=token_grpo(**settings))
    assert prompts == [0, 1]
    assert "groups_without_signal" not in totals.metrics.sums


def test_each_endpoint_keeps_a_group_that_is_compared(stop: StopRequest) -> None:
    groups = [
        group(0, FLAT, "http://a"),
        group(1, OTHER, "http://b"),
        group(2, FLAT, "http://b"),
        group(3, FLAT, "http://a"),
        group(4, FLAT, "http://a", "http://c"),  # after an answer that was asked for again
        group(5, FLAT, "http://c"),
    ]
    assert run(stop, groups)[0] == [0, 1, 4]
    # a group with signal comes too late to spare the flat one before it in another take
    assert run(stop, groups[2:3], groups[1:2])[0] == [1, 2]
    assert run(stop, groups[1:2], groups[2:3])[0] == [1]


def test_a_batch_of_nothing_else_still_has_a_row_to_step_with(stop: StopRequest) -> None:
    prompts, totals = run(stop, [group(i, FLAT) for i in range(3)])
    assert prompts == [0] and totals.denominator == 18


def test_what_has_no_trained_token_spares_no_group(stop: StopRequest) -> None:
    """Else nothing of the endpoint would be compared, and nothing stepped with."""
    groups = [group(0, FLAT, truncated=(0, 1)), group(1, FLAT), group(2, FLAT)]
    prompts, totals = run(stop, groups, recipe=token_grpo(mask_truncated=True))
    assert prompts == [1]
    assert totals.metrics.sums["groups_without_signal"] == 2
