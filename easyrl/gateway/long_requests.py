"""Long requests are worked on as far as memory goes: the others wait, in the order of asking."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from easyrl.gateway.errors import GatewayError


class LongRequests:
    """Room for bodies that are parsed and rendered. Belongs to one loop.

    Args:
        most_bytes: of bodies that are worked on at once; a longer one is by itself.
        most_waiting: bytes of those that wait.
    """

    def __init__(self, most_bytes: int, most_waiting: int) -> None:
        self._most_bytes, self._most_waiting = most_bytes, most_waiting
        self._num_bytes = self._num_waiting = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def place(self, num_bytes: int) -> AsyncIterator[None]:
        """Inside, ``num_bytes`` are worked on. Raises ``GatewayError`` where too many wait."""
        if self._num_waiting and self._num_waiting + num_bytes > self._most_waiting:
            raise too_many()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((num_bytes, turn))
        self._num_waiting += num_bytes
        self._look()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._num_bytes -= num_bytes
            self._look()

    def _look(self) -> None:
        while self._waiting:
            num_bytes, turn = self._waiting[0]
            has_room = not self._num_bytes or self._num_bytes + num_bytes <= self._most_bytes
            if not turn.done() and not has_room:
                return
            self._waiting.popleft()
            self._num_waiting -= num_bytes
            if not turn.done():  # else cancelled while it waited
                self._num_bytes += num_bytes
                turn.set_result(None)


def too_many() -> GatewayError:
    """429: to be sent again."""
    return GatewayError(429, "too many long requests at once; wait for an answer")
