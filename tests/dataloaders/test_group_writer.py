"""``GroupWriter``: groups that finish together are stored in one go, each with its own outcome."""

from __future__ import annotations

import asyncio

import pytest

from easyrl.dataloaders.producer import group_writer
from easyrl.dataloaders.producer.group_writer import GroupWriter
from easyrl.schema import RolloutGroup
from tests.dataloaders.rollout_parts import MemoryStore, completion, prompt


def group(index: int) -> RolloutGroup:
    return RolloutGroup(prompt(index), (completion("v"),), (), "v", 0.0, 0.0)


class Disk(MemoryStore):
    """Has no room for some prompts."""

    full_for: frozenset[int] = frozenset()

    def add(self, group):
        if group.prompt.index in self.full_for:
            raise OSError(f"no space for {group.prompt.index}")
        return super().add(group)


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """Of the disk's thread: how many groups each has written."""
    made: list[int] = []
    to_thread = asyncio.to_thread

    async def counted(write, taken):
        made.append(len(taken))
        return await to_thread(write, taken)

    monkeypatch.setattr(group_writer.asyncio, "to_thread", counted)
    return made


async def test_groups_that_wait_for_the_disk_are_written_in_one_go(calls):
    disk = Disk()
    disk.free.clear()
    writer = GroupWriter(disk.add, asyncio.Lock())
    first = asyncio.ensure_future(writer.add(group(0)))
    await asyncio.sleep(0)
    others = [asyncio.ensure_future(writer.add(group(index))) for index in range(1, 6)]
    await asyncio.sleep(0.01)
    assert not first.done() and disk.groups == {}
    disk.free.set()
    written = await asyncio.gather(first, *others)
    assert calls == [1, 5]
    assert [made.digest for made, _ in written] == [f"digest {index}" for index in range(6)]
    assert [stored.load().prompt.index for _, stored in written] == list(range(6))
    await writer.add(group(6))
    assert calls == [1, 5, 1], "what comes later is written by itself"


async def test_one_that_cannot_be_stored_fails_alone(calls):
    disk = Disk()
    disk.full_for = frozenset({1, 3})
    lock = asyncio.Lock()
    writer = GroupWriter(disk.add, lock)
    async with lock:
        adds = [asyncio.ensure_future(writer.add(group(index))) for index in range(5)]
        await asyncio.sleep(0)
        assert not calls, "the disk is held by somebody else"
    outcomes = await asyncio.gather(*adds, return_exceptions=True)
    assert calls == [5]
    assert [
        str(each) if isinstance(each, OSError) else each[0].prompt.index for each in outcomes
    ] == [
        0,
        "no space for 1",
        2,
        "no space for 3",
        4,
    ]


async def test_writers_of_two_batches_take_turns_at_one_disk(calls):
    disk, lock = Disk(), asyncio.Lock()
    disk.free.clear()
    old, new = GroupWriter(disk.add, lock), GroupWriter(disk.add, lock)
    adds = [asyncio.ensure_future(writer.add(group(i))) for i, writer in enumerate((old, new))]
    await asyncio.sleep(0.01)
    assert calls == [1]
    disk.free.set()
    await asyncio.gather(*adds)
    assert calls == [1, 1]
