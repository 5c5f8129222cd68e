"""Rollouts of one environment that may be open at a time (``environments[].max_rollouts``).

Consumes: groups that want to begin, and their members. Waits for: an open rollout to end. Is
unblocked by: that. Produces: places, members of groups that have begun first, so that these become
complete; then groups in their order. Belongs to the producer's loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

# of a group, as the pool of endpoints has it: priority, expected length, order of asking
Rank = tuple[int, float, int]
Key = tuple[bool, Rank, int]  # a group's, not a member's; the group's rank; number of asking
MOST = 4096  # without another limit


@dataclass(eq=False)
class RolloutRoom:
    """Places for rollouts.

    No place is ever waited for by who keeps the room's only one: a group that has its turn has a
    place, and any member that has one plays, whether the others have begun or not.
    """

    limit: Callable[[], int] = lambda: MOST  # now; may change
    num_open: int = field(default=0, init=False)  # places that are taken

    def __post_init__(self) -> None:
        self._waiting: list[tuple[Key, asyncio.Future[None]]] = []
        self._numbers = itertools.count()
        self._is_due = False

    @asynccontextmanager
    async def group(self, num_members: int, rank: Rank) -> AsyncIterator[Members]:
        """Entered when one member at least may be played."""
        await self.take(True, rank)
        num_free = max(0, min(self.limit() - self.num_open, num_members - 1))
        if self._waiting:  # others are before its further members
            num_free = 0
        self.num_open += num_free
        members = Members(self, rank, 1 + num_free)
        try:
            yield members
        finally:
            self.give_back(members.num_held)

    async def take(self, is_first: bool, rank: Rank) -> None:
        """Waits for a place, which is taken then; ``is_first``: with it the group begins."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        key = is_first, rank, next(self._numbers)
        heapq.heappush(self._waiting, (key, place))
        self._look_soon()
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.give_back(1)  # it was given in the moment of the cancellation
            raise

    def give_back(self, num_places: int) -> None:
        self.num_open -= num_places
        self._look_soon()

    def _look_soon(self) -> None:
        """A round of the loop later: the first of all that ask together is before the others."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._look)

    def _look(self) -> None:
        self._is_due = False
        limit = max(1, self.limit())
        while self._waiting and (self._waiting[0][1].done() or self.num_open < limit):
            _, place = heapq.heappop(self._waiting)
            if not place.done():  # else cancelled while it waited
                self.num_open += 1
                place.set_result(None)


@dataclass(eq=False)
class Members:
    """The members of a group that has begun."""

    room: RolloutRoom
    rank: Rank  # of the group
    num_held: int  # places for those that have not begun

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Entered when one of them may be played."""
        if self.num_held:
            self.num_held -= 1
        else:
            await self.room.take(False, self.rank)
        try:
            yield
        finally:
            self.room.give_back(1)
