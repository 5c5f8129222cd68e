"""How many rollouts of an environment are open at a time, and which are next."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack

import pytest

from easyrl.episodes.rooms import RolloutRoom


class Play:
    """Groups in a room; each rollout takes until the test, or the loop, lets it end."""

    def __init__(self, room: RolloutRoom, num_members: int = 3) -> None:
        self.room, self.num_members = room, num_members
        self.began: list[str] = []
        self.numbers = itertools.count()
        self.most = 0
        self.is_open = 0

    async def group(self, name: str, length: float = 0.0, priority: int = 0) -> None:
        rank = priority, length, next(self.numbers)
        async with self.room.group(self.num_members, rank) as members:

            async def rollout(number: int) -> None:
                async with members.place():
                    self.began.append(f"{name}{number}")
                    self.is_open += 1
                    self.most = max(self.most, self.is_open)
                    for _ in range(5):
                        await asyncio.sleep(0)
                    self.is_open -= 1

            await asyncio.gather(*(rollout(n) for n in range(self.num_members)))


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7, 100])
async def test_no_more_than_the_limit_and_all_are_played(limit: int):
    play = Play(RolloutRoom(lambda: limit))
    await asyncio.wait_for(asyncio.gather(*(play.group(f"g{n}.") for n in range(20))), 20)
    assert play.most == min(limit, 60) and len(play.began) == 60
    assert play.room.num_open == 0


async def test_groups_in_their_order_and_members_of_one_that_has_begun_first():
    play = Play(RolloutRoom(lambda: 1), num_members=2)
    lengths = {"long": 9.0, "short": 1.0, "middle": 5.0}
    groups = [play.group(name, length) for name, length in lengths.items()]
    groups.append(play.group("urgent", 99.0, priority=-1))
    await asyncio.wait_for(asyncio.gather(*groups), 10)
    assert play.began == [
        f"{name}{n}" for name in ("urgent", "short", "middle", "long") for n in range(2)
    ]


async def test_the_limit_may_change():
    limits: Iterator[int] = iter([1, 1, 1])
    room = RolloutRoom(lambda: next(limits, 5))
    play = Play(room)
    await asyncio.wait_for(asyncio.gather(*(play.group(f"g{n}.") for n in range(4))), 10)
    assert play.most == 5


async def test_whoever_is_cancelled_leaves_no_place_taken():
    room = RolloutRoom(lambda: 2)
    async with AsyncExitStack() as held:
        first = await held.enter_async_context(room.group(3, (0, 0.0, 0)))
        assert (first.num_held, room.num_open) == (2, 2)
        waiting = [asyncio.ensure_future(_enter(room)) for _ in range(3)]
        await asyncio.sleep(0.01)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        given: Callable[[], int] = lambda: room.num_open  # noqa: E731
        assert given() == 2
        late = asyncio.ensure_future(_enter(room))
        await asyncio.sleep(0.01)
    late.cancel()  # in the moment in which it is given its place
    await asyncio.gather(late, return_exceptions=True)
    await asyncio.sleep(0.01)
    assert room.num_open == 0
    play = Play(room)
    await asyncio.wait_for(play.group("g"), 10)


async def _enter(room: RolloutRoom) -> None:
    async with room.group(1, (0, 0.0, 1)):
        await asyncio.sleep(0)
