"""Room at the endpoints that the open batch does not need: for what may wait, as an evaluation."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class IdleRoom:
    """Admits groups while there are places for them beside all that the batch may still ask for.

    Consumes: how many samples are asked for. Waits for: groups of the batch to be decided, admitted
    samples to return. Is unblocked by: ``look``. Produces: turns, in the order of asking. Belongs
    to the pool's loop.

    Args:
        capacity: requests that batch and admitted groups may have in flight together.
        needed: samples of the batch's undecided groups, which may each be replaced by another: none
            of them ever waits for an admitted one. Once there is none, nobody has to wait.
        is_wanted: whether a group of the batch waits for a place all the same.
    """

    def __init__(
        self,
        capacity: Callable[[], float],
        needed: Callable[[], int],
        is_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self._capacity = capacity
        self._needed = needed
        self._is_wanted = is_wanted
        self._num_admitted = 0  # samples
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def places(self, num_samples: int) -> AsyncIterator[Callable[[], None]]:
        """Inside, ``num_samples`` may be asked for; to be called when one of them has returned."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_samples, turn))
        self.look()
        num_held = num_samples

        def leave() -> None:
            nonlocal num_held
            num_held -= 1
            self._num_admitted -= 1
            self.look()

        try:
            await turn
            yield leave
        finally:
            if turn.done() and not turn.cancelled():
                self._num_admitted -= num_held
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
        if needed == 0:
            return True
        has_room = self._num_admitted + num_samples + needed <= self._capacity()
        return has_room and not self._is_wanted()
