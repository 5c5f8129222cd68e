"""Groups that may wait are admitted to places that the open batch cannot need."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from easyrl.inference_client.pool.idle_room import IdleRoom
from tests.inference_client.pool_cases import V1, pool_of, servers


class Asking:
    """Groups of so many samples that ask for places, and leave when the test says so."""

    def __init__(self, room: IdleRoom) -> None:
        self.room = room
        self.admitted: list[str] = []
        self.leave: dict[str, asyncio.Event] = {}
        self.returned: dict[str, Callable[[], None]] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, num_samples: int) -> None:
        self.leave[name] = asyncio.Event()

        async def group() -> None:
            async with self.room.places(num_samples) as self.returned[name]:
                self.admitted.append(name)
                await self.leave[name].wait()

        self.tasks[name] = asyncio.create_task(group())
        await settle()

    async def end(self, name: str) -> None:
        self.leave[name].set()
        await self.tasks[name]
        await settle()


async def settle() -> None:
    """Everything that can run now has run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_room_is_left_for_all_that_the_batch_may_still_ask_for():
    needed = 8
    asking = Asking(room := IdleRoom(lambda: 8, lambda: needed))
    await asking.ask("a", 2)
    await asking.ask("b", 4)
    assert asking.admitted == []
    needed = 6  # a group of two is decided
    room.look()
    await settle()
    assert asking.admitted == ["a"]
    needed = 4  # "b" has room only beside nobody
    room.look()
    await settle()
    assert asking.admitted == ["a"]
    await asking.end("a")
    assert asking.admitted == ["a", "b"]
    needed = 8  # the batch begins again, and gets the rest
    await asking.ask("c", 1)
    await asking.end("b")
    assert asking.admitted == ["a", "b"]
    needed = 0
    room.look()
    await settle()
    assert asking.admitted == ["a", "b", "c"]


async def test_who_asks_first_goes_first_and_who_is_cancelled_holds_nobody_up():
    needed = 4
    asking = Asking(room := IdleRoom(lambda: 4, lambda: needed))
    for name, num_samples in (("large", 4), ("small", 1), ("last", 1)):
        await asking.ask(name, num_samples)
    needed = 2
    room.look()
    await settle()
    assert asking.admitted == []  # "small" does not overtake
    asking.tasks["large"].cancel()
    await settle()
    assert asking.admitted == ["small", "last"]
    asking.tasks["small"].cancel()  # its place is free again
    await settle()
    await asking.ask("next", 1)
    assert asking.admitted == ["small", "last", "next"]


async def test_without_a_batch_nobody_has_to_wait():
    """Places are the endpoints' to give then. With all of them down, too: that somebody waits for
    one is what ends an outage."""
    asking = Asking(IdleRoom(lambda: 0, lambda: 0))
    await asking.ask("a", 2)
    await asking.ask("b", 2)
    assert asking.admitted == ["a", "b"]


async def test_a_place_is_free_when_its_sample_returns_whatever_is_left_of_the_group():
    asking = Asking(IdleRoom(lambda: 8, lambda: 4))
    await asking.ask("a", 4)
    await asking.ask("b", 2)
    asking.returned["a"]()
    await settle()
    assert asking.admitted == ["a"]
    asking.returned["a"]()
    await settle()
    assert asking.admitted == ["a", "b"]  # while the last two of "a" are made, and all are scored
    await asking.ask("c", 2)
    await asking.end("a")  # given up: what has not returned
    assert asking.admitted == ["a", "b", "c"]
    await asking.ask("d", 1)
    assert asking.admitted == ["a", "b", "c"]


async def test_nobody_is_admitted_while_a_group_of_the_batch_waits_for_a_place():
    is_wanted = True
    asking = Asking(room := IdleRoom(lambda: 8, lambda: 2, lambda: is_wanted))
    await asking.ask("a", 2)
    assert asking.admitted == []
    is_wanted = False
    room.look()
    await settle()
    assert asking.admitted == ["a"]


async def test_an_endpoint_that_has_yet_to_prove_its_weights_has_no_room():
    """The batch needs the places of the other."""
    async with pool_of(*servers(2), confirmed=False, max_inflight=8) as pool:
        asking = Asking(room := IdleRoom(lambda: pool.capacity(in_batch=True), lambda: 6))
        pool.confirm(pool.endpoints[0], V1)
        await asking.ask("a", 4)
        assert asking.admitted == []
        pool.confirm(pool.endpoints[1], V1)
        room.look()
        await settle()
        assert asking.admitted == ["a"]
        pool.withdraw_confirmations()
        assert pool.capacity(in_batch=True) == 0
