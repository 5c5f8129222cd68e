"""Ranks that fill one batch over a store, here threads with connections of their own."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from easyrl.dataloaders.producer.draws import Draws
from easyrl.dataloaders.producer.membership import BatchMembership
from easyrl.runtime.machine import free_port
from easyrl.runtime.rank_coordination import CHUNK_BYTES, SharedBatch


@pytest.fixture
def stores() -> Iterator[list[dist.TCPStore]]:
    port = free_port()
    yield [
        dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
        for rank in range(2)
    ]


def on_both(work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` of each rank returns; the ranks run at the same time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


def test_a_number_is_claimed_once(stores: list[dist.TCPStore]) -> None:
    def work(rank: int) -> list[int]:
        batch = SharedBatch(stores[rank], "batch", rank)
        return [batch.claim() for _ in range(50)]

    mine, theirs = on_both(work)
    assert sorted(mine + theirs) == list(range(100))
    assert mine == sorted(mine) and theirs == sorted(theirs)
    assert SharedBatch(stores[0], "next batch", 0).claim() == 0


def test_what_the_other_rank_decides_is_heard_once_and_in_its_order(
    stores: list[dist.TCPStore],
) -> None:
    def work(rank: int) -> list[tuple[int, bool]]:
        batch, rng = SharedBatch(stores[rank], "batch", rank), random.Random(rank)
        heard: list[tuple[int, bool]] = []
        for number in range(60):
            batch.publish(number, rng.random() < 0.5)
            heard += batch.news()
        while len(heard) < 60:
            heard += batch.news()
        assert list(batch.news()) == []
        return heard

    heard = on_both(work)
    for rank in range(2):
        rng = random.Random(1 - rank)  # the other's
        assert heard[rank] == [(number, rng.random() < 0.5, None, None) for number in range(60)]


def test_a_decision_is_heard_behind_those_that_it_rests_on(stores: list[dist.TCPStore]) -> None:
    """One that was numbered first and is written late holds up those that follow."""
    slow, quick, reader = (SharedBatch(stores[number % 2], "batch", number) for number in range(3))
    written = threading.Event()

    class Late:
        """Its first decision has a number and no value yet."""

        add, check, get, delete_key = (
            staticmethod(getattr(stores[0], name)) for name in ("add", "check", "get", "delete_key")
        )

        @staticmethod
        def set(key: str, value: str) -> None:
            written.wait(10)
            stores[0].set(key, value)

    slow._store = Late
    writing = threading.Thread(target=slow.publish, args=(0, False))
    writing.start()
    while not stores[1].check(["batch/decisions"]):
        pass
    quick.publish(1, True)
    assert list(reader.news()) == []
    written.set()
    writing.join(10)
    assert list(reader.news()) == [(0, False, None, None), (1, True, None, None)]


def test_what_a_rank_has_written_is_removed(stores: list[dist.TCPStore]) -> None:
    batch = SharedBatch(stores[0], "batch", 0)
    for position in range(3):
        batch.publish(position, True)
    assert stores[1].check(["batch/0", "batch/1", "batch/2"])
    batch.forget()
    assert not any(stores[1].check([f"batch/{number}"]) for number in range(3))


def test_queues_are_sums_that_every_rank_sees(stores: list[dist.TCPStore]) -> None:
    def work(rank: int) -> None:
        batch = SharedBatch(stores[rank], "batch", rank, 2)
        for _ in range(50):
            batch.enqueue(0, 3)
            batch.enqueue(1, -1 - rank)

    on_both(work)
    for rank in range(2):
        assert SharedBatch(stores[rank], "batch", rank, 2).queued() == [300, -150]
        assert SharedBatch(stores[rank], "next batch", rank, 2).queued() == [0, 0]


@pytest.mark.parametrize("num_bytes", [1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 5])
def test_a_group_of_any_size_and_any_bytes_arrives_and_is_gone(
    stores: list[dist.TCPStore], num_bytes: int
) -> None:
    """A value of 8 MiB and more would break the connection."""
    payload = random.Random(num_bytes).randbytes(num_bytes - 1) + b"\0"
    giver, taker = (SharedBatch(stores[rank], "batch", rank, 2) for rank in range(2))
    giver.put_group(7, payload)
    giver.publish(7, True, trains=1)
    assert [each.trains for each in taker.news()] == [1]
    assert taker.take_group(7) == payload
    assert not stores[0].check(["batch/group/7/0"])
    with pytest.raises(LookupError, match="position 7"):
        taker.take_group(7)


def test_a_group_that_nobody_has_taken_is_removed_with_its_batch(
    stores: list[dist.TCPStore],
) -> None:
    batch = SharedBatch(stores[0], "batch", 0, 2)
    batch.put_group(0, b"group")
    batch.enqueue(0, 5)
    batch.forget()
    assert not any(stores[1].check([key]) for key in ("batch/group/0/0", "batch/queued/0"))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fixed", [False, True])
def test_two_ranks_fill_a_batch_over_a_real_store(
    stores: list[dist.TCPStore], seed: int, fixed: bool
) -> None:
    rng = random.Random(seed)
    accepted = [rng.random() < 0.6 for _ in range(30)] + [True] * 8

    def work(rank: int) -> list[int]:
        mine = random.Random(10 * seed + rank)

        async def generate(position: int, draws: Draws) -> None:
            await asyncio.sleep(mine.random() / 100)
            draws.decide(position, accepted[position])

        async def batch() -> list[int]:
            draws = Draws(
                BatchMembership(8),
                SharedBatch(stores[rank], "batch", rank),
                fixed=(rank, 2) if fixed else None,
                room=4,
            )
            drawn = []
            async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
                async for position in draws:
                    drawn.append(position)
                    tasks.create_task(generate(position, draws))
            assert draws.membership.num_accepted == 8
            return drawn

        return asyncio.run(batch())

    mine, theirs = on_both(work)
    num_drawn = next(n for n in range(len(accepted)) if sum(accepted[:n]) == 8)
    assert sorted(mine + theirs) == list(range(num_drawn))
    if fixed:
        assert {p % 2 for p in mine} == {0} and {p % 2 for p in theirs} <= {1}
