"""Which rank trains a finished group, and what a stream says of its queue."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from easyrl.dataloaders.packing.cost import DEFAULT_COST, RowCost
from easyrl.dataloaders.producer.balance import Balance
from easyrl.dataloaders.producer.group_stream import GroupStream, ReadyGroup
from easyrl.schema import RolloutGroup
from tests.dataloaders.rollout_parts import completion, prompt


class Queues:
    """``SharedQueues`` in memory."""

    def __init__(self, *queued: int) -> None:
        self.costs = list(queued)

    def queued(self) -> list[int]:
        return list(self.costs)

    def enqueue(self, rank: int, cost: int) -> None:
        self.costs[rank] += cost

    def put_group(self, position: int, payload: bytes) -> None: ...
    def take_group(self, position: int) -> bytes:
        raise LookupError


def balance(queues: Queues, rank: int) -> Balance:
    return Balance(queues, rank, lambda prompt, responses: prompt + sum(responses))


@pytest.mark.parametrize(
    ("queued", "rank", "cost", "chosen"),
    [
        ([0, 0], 1, 80, 1),  # nobody has anything: it stays
        ([80, 80], 0, 80, 0),
        ([90, 80], 0, 80, 0),  # an eighth of its own cost is not worth it
        ([91, 80], 0, 80, 1),
        ([91, 80], 1, 80, 1),
        ([50, 30, 0, 40], 0, 8, 2),
        ([0, 30, 0, 40], 2, 8, 2),
    ],
)
def test_a_group_goes_to_the_rank_that_has_least_to_train(
    queued: list[int], rank: int, cost: int, chosen: int
) -> None:
    queues = Queues(*queued)
    assert balance(queues, rank).choose(cost) == chosen
    expected = list(queued)
    if chosen != rank:  # its own rank notes it when it is queued
        expected[chosen] += cost
    assert queues.costs == expected


def test_what_a_rank_has_noted_counts_before_it_chooses() -> None:
    queues = Queues(0, 10)
    mine = balance(queues, 0)
    mine.note(100)
    assert queues.costs == [0, 10] and mine.choose(8) == 1
    assert queues.costs == [100, 18]
    mine.note(-100)
    assert mine.choose(8) == 0 and queues.costs == [0, 18]


def test_notes_of_several_threads_all_count() -> None:
    queues = Queues(0)
    mine = balance(queues, 0)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(4):
            pool.submit(lambda: [mine.note(1) for _ in range(1000)])
        for _ in range(50):
            mine.tell()
    mine.tell()
    assert queues.costs == [4000]


def test_queues_stay_within_one_group_of_each_other() -> None:
    """Whoever draws: the largest difference is at most the largest cost, and the margin."""
    rng, queues = random.Random(0), Queues(0, 0, 0)
    ranks = [balance(queues, rank) for rank in range(3)]
    for _ in range(300):
        rank, cost = rng.choice([0, 0, 0, 1, 2]), rng.randint(1, 100)
        if ranks[rank].choose(cost) == rank:
            ranks[rank].note(cost)
            ranks[rank].tell()
        assert max(queues.costs) - min(queues.costs) <= 100 * 1.125


# ---- costs ---------------------------------------------------------------------------------------


def test_the_cost_of_a_group_counts_each_token_once_and_all_that_it_attends_to() -> None:
    cost = RowCost(per_token=7.0, per_pair=3.0, per_label=2.0)
    prompt_length, responses = 5, (4, 9)
    pairs = sum(range(1, 6)) + sum(range(6, 10)) + sum(range(6, 15))  # token by token
    expected = (7 * (5 + 13) + 3 * pairs + 2 * 13) / (7 + 3)
    assert cost.of_group(prompt_length, responses) == round(expected)


def test_long_groups_cost_more_than_their_tokens() -> None:
    short, long = DEFAULT_COST.of_group(100, [1000] * 8), DEFAULT_COST.of_group(100, [32_000] * 8)
    assert long > 2 * 32 * short
    assert DEFAULT_COST.of_group(1, []) == 1  # the unit


# ---- what a stream says of its queue -------------------------------------------------------------


def ready(index: int, num_tokens: int, cost: int) -> ReadyGroup:
    made = RolloutGroup(prompt(index), (completion("v"),), (), "v", 0.0, 0.0)
    return ReadyGroup((0, index), num_tokens, made, cost=cost)


def stream(*groups: ReadyGroup, trained_at_end: bool = False) -> tuple[GroupStream, list[int]]:
    made, told = GroupStream(cancel=lambda: None), []
    made.on_trained = told.append
    made.trained_at_end = trained_at_end
    for group in groups:
        made.put(group)
    made.end()
    return made, told


def test_a_drain_is_trained_row_by_row_and_the_rest_when_the_next_one_begins() -> None:
    groups, told = stream(ready(0, 10, 300), ready(1, 30, 700), ready(2, 50, 900))
    assert [g.prompt.index for g in groups.drain_ready(40)] == [0, 1] and told == []
    groups.note_trained(10)
    assert told == [250]  # a quarter of the tokens
    groups.note_trained(20)  # the others of its tokens were not run
    assert told == [250, 500]
    assert len(groups.drain_ready(40)) == 1 and told == [250, 500, 250]
    groups.note_trained(500)  # a prompt that is in two rows has more tokens than once
    assert told[3:] == [900]
    assert groups.drain_ready(40) == [] and sum(told) == 1900


def test_what_is_drained_before_training_begins_is_not_trained() -> None:
    groups, told = stream(ready(0, 10, 300), ready(1, 30, 700), trained_at_end=True)
    while groups.drain_ready(10):
        pass
    assert told == []
    groups.note_trained(20)
    groups.note_trained(20)
    assert told == [500, 500]


def test_nobody_is_told_of_groups_without_a_cost() -> None:
    groups, told = stream(ready(0, 10, 0))
    groups.drain_ready(10)
    groups.note_trained(10)
    groups.drain_ready(10)
    assert told == [] and np.isclose(groups.wait_s, 0.0, atol=0.5)
