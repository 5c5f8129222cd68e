"""Room at the endpoints that the open batch cannot need: for what may wait, as an evaluation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class IdleRoom:
    """Admits groups while there are places for them beside all that the batch may still ask for.

    Consumes: how many samples are asked for. Waits for: groups of the batch to be decided, admitted
    groups to end. Is unblocked by: ``look``. Produces: turns, in the order of asking. Belongs to
    the pool's loop.

    Args:
        capacity: requests that the endpoints take at a time.
        needed: samples of the batch's undecided groups, which may each be replaced by another: none
            of them ever waits for an admitted one.
    """

    def __init__(self, capacity: Callable[[], int], needed: Callable[[], int]) -> None:
        self._capacity = capacity
        self._needed = needed
        self._num_admitted = 0  # samples
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def places(self, num_samples: int) -> AsyncIterator[None]:
        """Inside, ``num_samples`` may be asked for."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_samples, turn))
        self.look()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._num_admitted -= num_samples
            self.look()

    def look(self) -> None:
        """Admits those for whom there is room now; call it when the batch needs less."""
        while self._waiting:
            num_samples, turn = self._waiting[0]
            if not turn.done() and not self._has_room(num_samples):
                return
            self._waiting.popleft()
            if not turn.done():  # cancelled while it waited
                self._num_admitted += num_samples
                turn.set_result(None)

    def _has_room(self, num_samples: int) -> bool:
        needed = self._needed()
        if needed == 0 and self._num_admitted == 0:
            return True  # nobody is there to wait for: more than all places, or none at all
        return self._num_admitted + needed + num_samples <= self._capacity()
