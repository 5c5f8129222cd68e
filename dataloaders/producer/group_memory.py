"""How many finished groups may be in memory, and what becomes of the others.

Without a store a group waits until there is room for it. With one nothing waits: every group is
stored as it finishes, and those that find no room in memory are read back when they are wanted.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Protocol

from easyrl.schema import Prompt, RolloutGroup


class StoredGroup(Protocol):
    """A finished group that is somewhere else than in memory."""

    @property
    def num_tokens(self) -> int:
        """Of the group packed with its prompt once: P + ΣR."""
        ...

    @property
    def refused(self) -> bool:
        """Rejected or excluded: it is not trained."""
        ...

    @property
    def is_recovered(self) -> bool:
        """Finished in an earlier attempt of the run."""
        ...

    def load(self) -> RolloutGroup:
        """Reads it back. Raises what the store raises where it is damaged."""
        ...


class GroupStore(Protocol):
    """Keeps finished groups over the end of the process. ``add`` and ``flush`` do disk I/O."""

    def find(self, prompt: Prompt) -> StoredGroup | None:
        """The prompt's group, if it was finished before and may be trained now."""
        ...

    def add(self, group: RolloutGroup) -> tuple[RolloutGroup, StoredGroup]:
        """Stores a finished group; returns it with ``digest`` set, and how to read it back."""
        ...

    def flush(self) -> None:
        """Nothing more comes for now: what takes long may be done while the trainer is busy."""
        ...


class GroupMemory(Protocol):
    """Bounds the groups that wait in memory; one per batch."""

    async def keep(self, group: RolloutGroup) -> RolloutGroup | StoredGroup:
        """What of a finished group waits for the consumer. On the producer's loop."""
        ...

    async def put_away(self, group: RolloutGroup) -> RolloutGroup:
        """A finished group that no consumer is given. On the producer's loop."""
        ...

    async def finish(self) -> None:
        """All groups were kept. On the producer's loop."""
        ...

    def received(self) -> None:
        """The consumer has a group off the queue. On its thread."""
        ...

    def handed_out(self) -> None:
        """A group that was in memory no longer waits. On the consumer's thread."""
        ...


class UnboundedMemory:
    """Every group stays in memory."""

    async def keep(self, group: RolloutGroup) -> RolloutGroup:
        return group

    async def put_away(self, group: RolloutGroup) -> RolloutGroup:
        return group

    async def finish(self) -> None:
        pass

    def received(self) -> None:
        pass

    def handed_out(self) -> None:
        pass


class BlockingMemory:
    """A finished group waits, off the queue, until the consumer has taken one.

    For groups that go to the consumer as they finish: one that is held back would keep the place
    that those in front of it wait for.
    """

    def __init__(self, size: int, loop: asyncio.AbstractEventLoop) -> None:
        self._free = asyncio.Semaphore(size)
        self._loop = loop

    async def keep(self, group: RolloutGroup) -> RolloutGroup:
        await self._free.acquire()
        return group

    async def put_away(self, group: RolloutGroup) -> RolloutGroup:
        return group

    async def finish(self) -> None:
        pass

    def received(self) -> None:
        self._loop.call_soon_threadsafe(self._free.release)

    def handed_out(self) -> None:
        pass


class SpillingMemory:
    """A finished group is stored; one that finds no room is kept as a reference to what is stored.

    Args:
        disk: held while the store is written; shared by all batches, so that one thread at a time
            is busy with it.
    """

    def __init__(self, size: int, store: GroupStore, disk: asyncio.Lock) -> None:
        self._free = threading.Semaphore(size)
        self._store = store
        self._disk = disk

    async def keep(self, group: RolloutGroup) -> RolloutGroup | StoredGroup:
        group, stored = await self._add(group)
        return group if self._free.acquire(blocking=False) else stored

    async def put_away(self, group: RolloutGroup) -> RolloutGroup:
        return (await self._add(group))[0]

    async def finish(self) -> None:
        async with self._disk:
            await asyncio.to_thread(self._store.flush)

    def received(self) -> None:
        pass

    def handed_out(self) -> None:
        self._free.release()

    async def _add(self, group: RolloutGroup) -> tuple[RolloutGroup, StoredGroup]:
        async with self._disk:  # the loop goes on meanwhile
            return await asyncio.to_thread(self._store.add, group)
