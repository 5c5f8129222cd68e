"""Advantages that need the whole batch: of all ranks, in any order, before the first gradient."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest
import torch

from easyrl.engines.base import MetricSums
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.recipes import Recipe, ReinforcePP
from easyrl.runtime.stopping import StopRequest
from easyrl.schema import Key, MicroBatch, RolloutGroup
from easyrl.trainer.accumulation import Accumulator
from tests.recipes import group_functions, run_settings
from tests.tiny_models import random_group


@dataclass(frozen=True)
class Whole(Recipe):
    """r less the mean of all responses of the batch."""

    scope = "batch"

    def advantages(self, groups, run, inputs):  # type: ignore[no-untyped-def]
        mean = np.concatenate(inputs.rewards).astype(np.float64).mean()
        return [group.rewards - mean for group in groups]

    def loss(self, logprobs, entropy, terms):  # type: ignore[no-untyped-def]
        return -terms.loss_weights * terms.advantages * logprobs


class Outage(RuntimeError):
    """No endpoint answers."""


class Source:
    """A ``GroupSource`` of given takes, or of an outage where one is an error."""

    wait_s = load_s = 0.0
    first_group_wait_s = None
    accepted_versions = frozenset({"run:0:0"})
    recovered: frozenset[Key] = frozenset()
    discarded: frozenset[Key] = frozenset()

    def __init__(self, takes: list[list[RolloutGroup] | Exception]) -> None:
        self._takes = list(takes)

    def note_trained(self, num_tokens: int) -> None: ...

    def drain_ready(self, max_tokens: int, idle: Any = None) -> list[RolloutGroup]:
        take = self._takes.pop(0) if self._takes else []
        if isinstance(take, Exception):
            raise take
        return take

    def complete(self) -> None: ...
    def interrupt(self, error: BaseException) -> None: ...


class Engine:
    """Remembers rows, and what had come of all ranks when it got the first."""

    device = torch.device("cpu")
    lockstep = False

    def __init__(self) -> None:
        self.rows: list[MicroBatch] = []

    def finish_backwards(self) -> list[MetricSums]:
        return []

    def prepare(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        return rows

    def forward_backward(self, rows: list[MicroBatch]) -> list[MetricSums]:
        self.rows += rows
        return [MetricSums({"num_loss_tokens": 1.0})]


class Threads:
    """An ``Collectives`` of ranks that are threads of this process."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks, timeout=30)
        self._said: list[Any] = [None] * num_ranks

    def of(self, rank: int) -> Any:
        class Collectives:
            def all_gather(_, value: Any) -> list[Any]:
                self._said[rank] = value
                self._barrier.wait()
                said = list(self._said)
                self._barrier.wait()
                return said

        return Collectives()


def group(index: int, size: int = 3) -> RolloutGroup:
    return random_group(np.random.default_rng(index), 2, [4] * size, index=index)


def run(
    ranks: list[list[list[RolloutGroup] | Exception]], recipe: Recipe | None = None
) -> tuple[list[list[MicroBatch]], list[BatchTotals], list[list[str]]]:
    """Rows, sums and events of each rank."""
    threads, engines = Threads(len(ranks)), [Engine() for _ in ranks]
    totals: list[Any] = [None] * len(ranks)
    events: list[list[str]] = [[] for _ in ranks]

    def work(rank: int, stop: StopRequest) -> None:
        recorded: Callable[..., None] = lambda event, **_: events[rank].append(event)  # noqa: E731
        accumulator = Accumulator(
            engine=cast(Any, engines[rank]),
            collectives=threads.of(rank),
            functions=group_functions(
                recipe or Whole(), run_settings(), max_tokens_per_micro_batch=40
            ),
            stop=stop,
            is_interruption=lambda error: isinstance(error, Outage),
            record=recorded,
            max_tokens=40,
            synchronous=False,
        )
        totals[rank] = accumulator.accumulate(cast(Any, Source(ranks[rank])))

    with closing(StopRequest(60.0)) as stop:
        started = [threading.Thread(target=work, args=(r, stop)) for r in range(len(ranks))]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join(60)
            assert not thread.is_alive()
    return [engine.rows for engine in engines], totals, events


def advantages_of(rows: list[MicroBatch]) -> dict[tuple[int, int], float]:
    """By prompt and sample."""
    found = {}
    for row in rows:
        for q, key in enumerate(row.sequences):
            (value,) = set(row.advantages[row.sequence_index == q].tolist())
            found[key.prompt, key.sample] = value
    return found


def test_statistics_are_those_of_all_ranks_in_any_order() -> None:
    groups = [group(i, size=2 + i % 3) for i in range(5)]
    mean = np.concatenate([g.rewards for g in groups]).astype(np.float64).mean()
    expected = {
        (g.prompt.index, s): float(np.float32(reward - mean))
        for g in groups
        for s, reward in enumerate(g.rewards)
    }
    ways = [
        [[groups[:2], groups[2:]]],
        [[groups[3:], [groups[1]]], [[groups[2]], [groups[0]]]],
        [[groups], []],
    ]
    for ranks in ways:
        rows, totals, events = run(cast(Any, ranks))
        got = [advantages_of(of_rank) for of_rank in rows]
        # the mean is summed in prompt order on every rank: equal to the bit
        assert {key: value for part in got for key, value in part.items()} == expected
        assert all(said[0] == "waiting_for_batch" for said in events)
        assert sum(t.denominator for t in totals) == sum(4 * len(g.completions) for g in groups)
    own = {
        (g.prompt.index, s): float(np.float32(r - g.rewards.astype(np.float64).mean()))
        for g in groups
        for s, r in enumerate(g.rewards)
    }
    assert own != expected  # a mean of the group's own is another number


def test_ranks_exchange_what_the_recipe_asks_for() -> None:
    """REINFORCE++ wants lengths too: mean and deviation over the tokens of all ranks."""
    groups = [random_group(np.random.default_rng(i), 2, [2 + i, 5, 3], index=i) for i in range(3)]
    lengths = [[len(c.token_ids) for c in g.completions] for g in groups]
    tokens = np.concatenate(
        [np.repeat(g.rewards.astype(np.float64), n) for g, n in zip(groups, lengths, strict=True)]
    )
    expected = {
        (g.prompt.index, s): (float(reward) - tokens.mean()) / tokens.std()
        for g in groups
        for s, reward in enumerate(g.rewards)
    }
    for ranks in ([[groups]], [[[groups[2]]], [groups[:2]]]):
        rows, _, _ = run(cast(Any, ranks), ReinforcePP())
        got = {k: v for of_rank in rows for k, v in advantages_of(of_rank).items()}
        assert got == pytest.approx(expected, rel=1e-6)
    assert abs(tokens.mean() - np.concatenate([g.rewards for g in groups]).mean()) > 1e-3


def test_rows_are_those_of_the_takes() -> None:
    """As they are journalled, so that a replay packs the same rows."""
    groups = [group(i) for i in range(4)]  # 14 tokens each, two in a row
    rows, _, _ = run([[[groups[2]], [groups[0], groups[1]], [groups[3]]]])
    prompts = [sorted({key.prompt for key in row.sequences}) for row in rows[0]]
    assert prompts == [[2], [0, 1], [3]]


def test_an_outage_of_one_rank_ends_the_batch_of_all() -> None:
    outage = Outage("nobody answers")
    rows, totals, _ = run([[[group(0)], outage], [[group(1)]]])
    assert rows == [[], []]  # nothing was trained before the statistics were known
    assert [t.interruption for t in totals] == [outage, None]


def test_another_failure_is_raised() -> None:
    with pytest.raises(RuntimeError, match="broken"), closing(StopRequest(60.0)) as stop:
        Accumulator(
            engine=cast(Any, Engine()),
            collectives=Threads(1).of(0),
            functions=group_functions(Whole(), run_settings(), max_tokens_per_micro_batch=40),
            stop=stop,
            is_interruption=lambda error: isinstance(error, Outage),
            record=lambda event, **_: None,
            max_tokens=40,
            synchronous=False,
        ).accumulate(cast(Any, Source([RuntimeError("broken")])))
