"""Ranks that fill one batch, each drawing what it may and hearing of the others late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from easyrl.dataloaders.producer import draws as draws_module
from easyrl.dataloaders.producer.draws import Draws, Notice
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.schema import Decision, Exclusion
from tests.dataloaders.packed_rows import BUSY


@dataclass
class Board:
    """A store that all ranks see."""

    num_claims: int = 0
    said: list[tuple[int, int, bool]] = field(default_factory=list)  # rank, position, accepted
    announced: dict[Notice, str] = field(default_factory=dict)


class Shared:
    """One rank's ``SharedDecisions``; it may hear of some news later than of others."""

    def __init__(self, board: Board, rank: int, rng: random.Random) -> None:
        self.board, self.rank, self.rng = board, rank, rng
        self.num_read = 0

    def claim(self) -> int:
        self.board.num_claims += 1
        return self.board.num_claims - 1

    def publish(
        self,
        position: int,
        accepted: bool,
        exclusion: Exclusion | None = None,
        trains: int | None = None,
    ) -> None:
        self.board.said.append((self.rank, position, accepted))

    def news(self) -> Sequence[Decision]:
        until = self.rng.randint(self.num_read, len(self.board.said))
        news, self.num_read = self.board.said[self.num_read : until], until
        return [
            Decision(position, accepted) for rank, position, accepted in news if rank != self.rank
        ]

    def announce(self, notice: Notice, reason: str) -> None:
        self.board.announced[notice] = reason

    def announced(self, notice: Notice) -> str | None:
        return self.board.announced.get(notice)


class Batch:
    """A batch on several ranks, drawn to its end in a random schedule."""

    def __init__(
        self,
        batch_size: int,
        accepted: Sequence[bool],
        *,
        num_ranks: int,
        seed: int = 0,
        fixed: bool = False,
        known: Collection[int] = (),
        room: int | None = None,
        num_left: int | None = None,
    ) -> None:
        self.accepted, self.rng, self.room = accepted, random.Random(seed), room
        self.drawn: list[list[int]] = [[] for _ in range(num_ranks)]
        self.most_open = [0] * num_ranks
        board = Board()
        self.ranks = []
        for rank in range(num_ranks):
            membership = BatchMembership(batch_size, num_left=num_left)
            for position in sorted(known):
                membership.decide(position, accepted[position])
            self.ranks.append(
                Draws(
                    membership,
                    Shared(board, rank, self.rng),
                    fixed=(rank, num_ranks) if fixed else None,
                    room=room,
                )
            )

    async def _rank(self, rank: int) -> None:
        draws, num_open = self.ranks[rank], 0

        async def generate(position: int) -> None:
            nonlocal num_open
            await asyncio.sleep(self.rng.random() / 500)
            num_open -= 1
            draws.decide(position, self.accepted[position])

        async with asyncio.TaskGroup() as tasks:
            async for position in draws:
                self.drawn[rank].append(position)
                num_open += 1
                self.most_open[rank] = max(self.most_open[rank], num_open)
                tasks.create_task(generate(position))

    def run(self) -> None:
        async def all_ranks() -> None:
            async with asyncio.timeout(20):
                await asyncio.gather(*map(self._rank, range(len(self.ranks))))

        asyncio.run(all_ranks())


def prefix(batch_size: int, accepted: Sequence[bool], num_left: int | None = None) -> list[int]:
    """Positions up to the ``batch_size``-th accepted one."""
    positions: list[int] = []
    while sum(accepted[p] for p in positions) < batch_size and len(positions) != num_left:
        positions.append(len(positions))
    return positions


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "POLL_S", 0.001)


@settings(BUSY, max_examples=30, deadline=None)
@given(data=st.data())
def test_ranks_draw_each_position_of_the_prefix_once(data: st.DataObject) -> None:
    """With claims and fixed shares, whatever the schedule and what the journal knows."""
    num_ranks = data.draw(st.integers(1, 3))
    batch_size = data.draw(st.integers(1, 7))
    accepted = [*data.draw(st.lists(st.booleans(), max_size=12)), *[True] * 10]
    known = data.draw(st.sets(st.integers(0, batch_size - 1)))
    fixed = data.draw(st.booleans())
    num_left = data.draw(st.none() | st.integers(batch_size, 14))
    batch = Batch(
        batch_size,
        accepted,
        num_ranks=num_ranks,
        seed=data.draw(st.integers(0, 1000)),
        fixed=fixed,
        known=known,
        room=data.draw(st.none() | st.integers(1, 3)),
        num_left=num_left,
    )
    batch.run()
    expected = prefix(batch_size, accepted, num_left)
    assert sorted(p for drawn in batch.drawn for p in drawn) == sorted(set(expected) - known)
    for rank, draws in enumerate(batch.ranks):
        assert batch.drawn[rank] == sorted(batch.drawn[rank])
        assert draws.membership.complete
        assert draws.membership.num_accepted == sum(accepted[p] for p in expected)
        if fixed:
            assert all(position % num_ranks == rank for position in batch.drawn[rank])
        if batch.room is not None:
            assert batch.most_open[rank] <= batch.room


def test_a_rank_that_is_slow_leaves_the_rest_to_the_others() -> None:
    """It has room for one group, and holds the first of the order until the others are done."""

    async def scenario() -> tuple[list[int], list[int]]:
        board, rng = Board(), random.Random(0)
        slow, quick = (
            Draws(BatchMembership(4), Shared(board, rank, rng), room=1) for rank in range(2)
        )
        held = await anext(slow)
        theirs = []
        for _ in range(4):
            theirs.append(await anext(quick))
            quick.decide(theirs[-1], len(theirs) > 1)  # the first is refused
        slow.decide(held, True)
        async with asyncio.timeout(10):
            for draws in (slow, quick):
                with pytest.raises(StopAsyncIteration):
                    await anext(draws)
        return [held], theirs

    assert asyncio.run(scenario()) == ([0], [1, 2, 3, 4])


def test_a_fixed_share_waits_for_the_rank_that_it_belongs_to() -> None:
    """Position 2 is the first rank's; the other has nothing to draw though there is room."""

    async def scenario() -> None:
        board, rng = Board(), random.Random(0)
        first, second = (
            Draws(BatchMembership(2), Shared(board, rank, rng), fixed=(rank, 2))
            for rank in range(2)
        )
        assert (await anext(first), await anext(second)) == (0, 1)
        second.decide(1, False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await anext(second)
        first.decide(0, True)
        assert await anext(first) == 2
        first.decide(2, False)
        async with asyncio.timeout(10):
            assert await anext(second) == 3
        second.decide(3, True)
        async with asyncio.timeout(10):
            with pytest.raises(StopAsyncIteration):
                await anext(first)

    asyncio.run(scenario())


def test_a_batch_that_the_journal_has_whole_draws_nothing() -> None:
    batch = Batch(2, [False, True, True], num_ranks=2, known=[0, 1, 2], room=1)
    batch.run()
    assert batch.drawn == [[], []]


def test_the_first_open_position_is_told_before_it_is_drawn() -> None:
    async def scenario() -> list[int]:
        membership = BatchMembership(4)
        membership.decide(1, True)
        draws = Draws(membership)
        seen = [draws.first_open]
        first, second = await anext(draws), await anext(draws)
        assert (first, second) == (0, 2)
        seen.append(draws.first_open)
        for position, accepted in ((2, True), (0, False), (3, True)):
            if position == 3:
                assert await anext(draws) == 3
            draws.decide(position, accepted)
            seen.append(draws.first_open)
        return seen

    #  nothing drawn, 0 and 2 drawn, 2 decided, 0 decided, 3 decided
    assert asyncio.run(scenario()) == [0, 0, 0, 3, 4]


def test_every_decision_is_told() -> None:
    async def scenario() -> list[int]:
        board, rng = Board(), random.Random(3)
        draws = Draws(BatchMembership(3), Shared(board, 0, rng))
        seen: list[int] = []
        draws.on_change = lambda: seen.append(draws.membership.num_accepted)
        position = await anext(draws)
        draws.decide(position, True)
        board.said += [(1, 1, True), (1, 2, True)]
        board.num_claims = 3
        async with asyncio.timeout(10):
            with pytest.raises(StopAsyncIteration):
                while True:
                    await anext(draws)
        return seen

    assert asyncio.run(scenario())[-1] == 3
