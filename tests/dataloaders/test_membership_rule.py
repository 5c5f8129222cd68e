"""Which prompts a batch draws, against the shortest prefix that holds enough accepted groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from easyrl.dataloaders.producer.membership import BatchMembership

ORDER = 40  # positions whose outcomes are drawn; behind them all are accepted


class Case(NamedTuple):
    """A batch, the outcome of each position of the order, and who decides next."""

    batch_size: int
    num_updates: int
    num_left: int | None
    max_draws: int | None
    accepted: tuple[bool, ...]
    choose: Callable[[list[int]], int]

    def membership(self) -> BatchMembership:
        return BatchMembership(
            self.batch_size, self.num_updates, num_left=self.num_left, max_draws=self.max_draws
        )

    def outcome(self, position: int) -> bool:
        return self.accepted[position] if position < ORDER else True

    def shortest_prefix(self) -> list[bool]:
        """Outcomes of the positions up to the B-th accepted one, or to what ends the batch."""
        limits = [n for n in (self.num_left, self.max_draws) if n is not None]
        prefix: list[bool] = []
        while sum(prefix) < self.batch_size and len(prefix) < min(limits, default=10**9):
            prefix.append(self.outcome(len(prefix)))
        return prefix

    def slices(self) -> dict[int, int]:
        """Accepted positions of the shortest prefix → their update."""
        size = self.batch_size // self.num_updates
        prefix = self.shortest_prefix()
        places = [position for position, accepted in enumerate(prefix) if accepted]
        return {position: number // size for number, position in enumerate(places)}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_updates = draw(st.integers(1, 4))
    rng = draw(st.randoms(use_true_random=False))
    return Case(
        num_updates * draw(st.integers(1, 4)),
        num_updates,
        draw(st.none() | st.integers(0, ORDER)),
        draw(st.none() | st.integers(1, ORDER)),
        tuple(draw(st.lists(st.booleans(), min_size=ORDER, max_size=ORDER))),
        rng.choice,
    )


@given(cases())
def test_what_is_drawn_is_the_shortest_prefix_with_enough_accepted_groups(case: Case) -> None:
    """Whatever the order in which groups finish."""
    membership, decided = case.membership(), set[int]()
    while waiting := [p for p in range(membership.bound) if p not in decided]:
        assert not membership.complete
        position = case.choose(waiting)
        membership.decide(position, case.outcome(position))
        decided.add(position)
    prefix = case.shortest_prefix()
    assert membership.complete
    assert decided == set(range(len(prefix)))
    assert membership.num_accepted == sum(prefix)


@given(cases())
def test_each_update_has_its_slice_and_no_group_is_promised_to_another(case: Case) -> None:
    membership, slices, decided = case.membership(), case.slices(), set[int]()
    promised: dict[int, int] = {}
    known = 0
    while True:
        for position in range(membership.bound):
            update = membership.update_of(position)
            if position in promised:  # also of a position that is not decided
                assert update == promised[position]
            elif update is not None:
                promised[position] = update
        assert known <= membership.num_known_updates
        known = membership.num_known_updates
        for position, update in slices.items():
            if update < known:
                assert position in decided and promised[position] == update
        waiting = [p for p in range(membership.bound) if p not in decided]
        if not waiting:
            break
        position = case.choose(waiting)
        membership.decide(position, case.outcome(position))
        decided.add(position)
    assert {position: promised[position] for position in slices} == slices
    assert known == len(set(slices.values()))


@given(cases())
def test_it_is_told_what_ended_the_batch(case: Case) -> None:
    membership = case.membership()
    for position in itertools.count():
        if position >= membership.bound:
            break
        membership.decide(position, case.outcome(position))
    drawn = case.shortest_prefix()
    if sum(drawn) == case.batch_size:
        assert membership.ended_by == "accepted"
    elif len(drawn) == case.num_left:
        assert membership.ended_by == "data"
    else:
        assert membership.ended_by == "max_draws" and len(drawn) == case.max_draws


def test_a_refused_position_makes_room_for_one_more() -> None:
    membership = BatchMembership(2)
    assert membership.bound == 2
    membership.decide(1, False)
    assert membership.bound == 3 and not membership.complete
    membership.decide(2, True)
    assert membership.bound == 3 and not membership.complete  # position 0 is open
    membership.decide(0, False)
    assert membership.bound == 4
    membership.decide(3, True)
    assert membership.complete and membership.num_accepted == 2


def test_an_update_is_certain_when_what_is_open_before_it_cannot_move_it() -> None:
    membership = BatchMembership(4, 2)
    assert [membership.update_of(p) for p in range(4)] == [0, 0, None, None]
    membership.decide(3, True)
    assert membership.update_of(3) is None  # number 1, 2 or 3 of the accepted
    membership.decide(0, True)
    assert membership.update_of(2) is None and membership.num_known_updates == 0
    membership.decide(1, False)
    assert [membership.update_of(p) for p in (2, 3, 4)] == [0, None, 1]
    membership.decide(2, True)
    assert membership.update_of(3) == 1 and membership.num_known_updates == 1


def test_an_outcome_may_be_told_again_and_not_otherwise() -> None:
    membership = BatchMembership(2)
    membership.decide(0, False)
    membership.decide(0, False)
    assert membership.bound == 3  # counted once
    with pytest.raises(AssertionError, match="position 0 was decided otherwise"):
        membership.decide(0, True)


@pytest.mark.parametrize("limits", [{}, {"num_left": 1}, {"max_draws": 1}])
def test_a_position_that_is_not_drawn_has_no_outcome(limits: dict[str, int]) -> None:
    membership = BatchMembership(2, **limits)
    with pytest.raises(AssertionError, match="position 2 is not drawn"):
        membership.decide(2, True)


def test_a_batch_without_prompts_is_complete() -> None:
    membership = BatchMembership(4, num_left=0)
    assert membership.complete and membership.ended_by == "data" and membership.num_accepted == 0


def test_expected_updates_are_those_of_a_batch_that_refuses_nothing() -> None:
    membership = BatchMembership(6, 3)
    assert [membership.expected_update_of(p) for p in range(8)] == [0, 0, 1, 1, 2, 2, 2, 2]
