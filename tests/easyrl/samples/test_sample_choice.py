"""Which groups are kept: the worst and the best among them, whatever the order of arrival."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.engines.base import ResponseDifference
from easyrl.metrics.batch_metrics import BatchTotals
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
from easyrl.samples.choice import ChosenGroups, choose
from easyrl.schema import SampleKey
from tests.easyrl.samples.sample_groups import trained
from tests.thread_ranks import on_ranks

MEANS = {(0, i): mean for i, mean in enumerate([0.5, 0.25, 1.0, 0.5, 0.75, 0.0, 0.5])}


def test_the_worst_comes_first_then_the_best_then_drawn_ones():
    assert choose(MEANS, 0) == {}
    assert choose(MEANS, 1) == {(0, 5): "worst"}
    assert choose(MEANS, 2) == {(0, 5): "worst", (0, 2): "best"}
    four = choose(MEANS, 4)
    assert len(four) == 4 and list(four.values()) == ["worst", "best", "drawn", "drawn"]
    assert choose(MEANS, 99).keys() == MEANS.keys()


def test_the_draw_is_by_prompt_and_epoch():
    """Not always the first of the order, nor in each epoch the same prompts."""
    drawn = [
        {index for _, index in choose({(epoch, i): None for i in range(50)}, 5)}
        for epoch in range(3)
    ]
    assert len({frozenset(each) for each in drawn}) == 3
    assert all(each != set(range(5)) for each in drawn)


def test_equal_rewards_are_one_end_and_not_two():
    assert list(choose({(0, i): 0.5 for i in range(5)}, 3).values()) == ["worst", "drawn", "drawn"]


REWARDS = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))


@given(st.lists(st.tuples(REWARDS, st.integers(0, 3)), max_size=12), st.integers(0, 5))
def test_what_is_chosen_of_parts_is_what_is_chosen_of_all(groups, most):
    """So groups can be let go as they arrive, and ranks need not see each other's."""
    means = {(0, i): mean for i, (mean, _) in enumerate(groups)}
    left = {}
    for part in range(4):
        own = {(0, i): mean for i, (mean, its) in enumerate(groups) if its == part}
        left |= {key: own[key] for key in choose(own, most)}
    assert choose(left, most) == choose(means, most)


def test_groups_that_are_not_chosen_are_let_go_at_once():
    chosen = ChosenGroups(2)
    for index in range(20):
        chosen.add([trained(index, [index / 20, index / 20])])
        assert len(chosen.groups) <= 2
    assert chosen.why == {(0, 0): "worst", (0, 19): "best"}
    assert chosen.seconds > 0


def test_nothing_is_kept_where_nothing_is_asked_for():
    chosen = ChosenGroups()
    chosen.add([trained(0, [1.0])])
    assert chosen.groups == {} and chosen.seconds == 0


def test_a_reward_that_is_no_number_counts_as_none():
    chosen = ChosenGroups(1)
    chosen.add([trained(0, [math.nan]), trained(1, [0.5])])
    assert chosen.why == {(0, 1): "worst"}


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_ranks_keep_together_what_one_rank_would(num_ranks):
    groups = [trained(i, [mean]) for i, mean in enumerate([0.5, 0.1, 0.9, 0.5, 0.2, 0.8, 0.3])]
    alone = ChosenGroups(4)
    alone.add(groups)

    def merged(collectives):
        totals = BatchTotals(samples=ChosenGroups(4))
        totals.samples.add(groups[collectives.ranks.dp_rank :: num_ranks])
        return totals.merge(collectives).samples

    kept = on_ranks(num_ranks, merged)
    assert {key: why for own in kept for key, why in own.why.items()} == alone.why
    assert sum(len(own.groups) for own in kept) == 4


def test_differences_are_of_what_is_kept():
    totals = BatchTotals(samples=ChosenGroups(1))
    totals.samples.add([trained(0, [0.0, 0.0]), trained(1, [1.0])])
    differences = [
        ResponseDifference(SampleKey(0, 0, 0), 4.0, 0.5),
        ResponseDifference(SampleKey(0, 0, 1), 0.0, 0.0),  # no token of it was trained
        ResponseDifference(SampleKey(0, 1, 0), 3.0, 0.5),
    ]
    totals.samples.compare(differences)
    merged = totals.merge(Collectives(Ranks.data_parallel(0, 1)))
    assert merged.samples.compared == {SampleKey(0, 0, 0): differences[0]}
    totals.samples.add([trained(2, [-1.0])])  # worse: chosen in its place
    assert totals.samples.compared == {}
