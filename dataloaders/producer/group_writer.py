"""Writes finished groups to a store, on a thread: all that wait, in one go.

Consumes: groups, from coroutines of the producer's loop. Waits for: the disk. Produces: each group
as it is stored. Groups of like lengths finish within milliseconds of one another, and each change
of threads waits for an interpreter that is busy with the next of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from easyrl.dataloaders.producer.group_stream import StoredGroup
from easyrl.schema import RolloutGroup

Stored = tuple[RolloutGroup, StoredGroup]  # as it is from now on, and how to read it back


@dataclass(slots=True)
class _Waiting:
    """A group, and what came of writing it: None until then."""

    group: RolloutGroup
    outcome: Stored | Exception | None = None


class GroupWriter:
    """Of one batch, whose tasks are cancelled together or not at all."""

    def __init__(self, store: Callable[[RolloutGroup], Stored], disk: asyncio.Lock) -> None:
        """``disk``: is held while anything is written, so that one thread at a time is busy."""
        self._store, self._disk = store, disk
        self._waiting: list[_Waiting] = []

    async def add(self, group: RolloutGroup) -> Stored:
        """Returns when ``group`` is stored; raises what the store raises for it."""
        own = _Waiting(group)
        self._waiting.append(own)
        async with self._disk:
            if own.outcome is None:  # nobody has written it while this waited
                taken, self._waiting = self._waiting, []
                await asyncio.to_thread(self._write, taken)
        assert own.outcome is not None
        if isinstance(own.outcome, Exception):
            raise own.outcome
        return own.outcome

    def _write(self, taken: Sequence[_Waiting]) -> None:
        for each in taken:
            try:
                each.outcome = self._store(each.group)
            except Exception as error:
                each.outcome = error
