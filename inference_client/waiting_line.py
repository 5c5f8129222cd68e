"""Requests that wait for a place at an endpoint, served in the order of asking."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from easyrl.inference_client.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class Need:
    """Which endpoints will do. Requests with equal needs differ only in their order."""

    version: str | None
    avoid: Endpoint | None  # failed this request last; used again only if there is no other


@dataclass(order=True, slots=True)
class Waiting:
    """One request in line; a retry keeps its ``order``, so that it goes before younger requests."""

    order: int
    need: Need = field(compare=False)
    num_tokens: int = field(compare=False)
    place: asyncio.Future[Endpoint] = field(compare=False)


class WaitingLine:
    """A heap per need, of which there are few; every operation costs O(needs + log requests).

    One heap for all would let a request that has to avoid the only free endpoint block all behind
    it, and a scan past it would cost O(requests) per event.
    """

    def __init__(self) -> None:
        self._heaps: dict[Need, list[Waiting]] = {}

    def add(self, waiting: Waiting) -> None:
        heapq.heappush(self._heaps.setdefault(waiting.need, []), waiting)

    def pop(self, find: Callable[[Need], Endpoint | None]) -> tuple[Waiting, Endpoint] | None:
        """Takes the oldest request for which ``find`` has an endpoint."""
        best: tuple[Waiting, Endpoint] | None = None
        for need in list(self._heaps):
            oldest = self._oldest(need)
            if oldest is None or (best is not None and best[0] < oldest):
                continue
            if (endpoint := find(need)) is not None:
                best = oldest, endpoint
        if best is not None:
            heapq.heappop(self._heaps[best[0].need])
        return best

    def needs(self) -> list[Need]:
        return [need for need in list(self._heaps) if self._oldest(need) is not None]

    def fail(self, need: Need, error: Exception) -> None:
        """Ends the waiting of all with this need."""
        for waiting in self._heaps.pop(need, []):
            if not waiting.place.done():
                waiting.place.set_exception(error)

    def _oldest(self, need: Need) -> Waiting | None:
        heap = self._heaps[need]
        while heap and heap[0].place.done():  # cancelled while it waited
            heapq.heappop(heap)
        if not heap:
            del self._heaps[need]
            return None
        return heap[0]
