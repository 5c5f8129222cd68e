"""Those who wait for a place at an endpoint, in the order in which they shall go."""

from __future__ import annotations

import asyncio
import heapq
import math
import sys
from collections import defaultdict
from dataclasses import dataclass
from operator import itemgetter

from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.group_assignment import GroupAssignment, Rank

Key = tuple[Rank, int]  # rank of the group, number: smaller goes first
BEHIND_ALL: Key = (sys.maxsize, math.inf, sys.maxsize), sys.maxsize


@dataclass(eq=False, slots=True)
class Waiting:
    """A sample that waits for a place, or a group for its turn."""

    group: GroupAssignment
    number: int
    place: asyncio.Future[Endpoint | None]
    avoid: Endpoint | None = None  # failed it last; asked again only if there is no other
    is_group: bool = False
    waits: bool = True  # counted in its line

    @property
    def key(self) -> Key:
        """A retry has its group's rank: it goes before younger ones."""
        return self.group.rank, self.number


Heap = list[tuple[Key, Waiting]]  # keys differ, so that no two ``Waiting`` are ever compared


class WaitingLine:
    """Samples and groups that wait for endpoints of one version.

    A heap for each endpoint that samples wait for because it holds their prompt (another one for
    those that no other endpoint shall have), one for each that samples avoid, one for those that
    take any. A single heap would let a sample that waits for a full endpoint hold up all behind it.
    Every operation costs O(endpoints + log samples) at most.
    """

    def __init__(self) -> None:
        self._any: Heap = []
        self._home: defaultdict[Endpoint, Heap] = defaultdict(list)
        self._staying: defaultdict[Endpoint, Heap] = defaultdict(list)
        self._avoiding: defaultdict[Endpoint, Heap] = defaultdict(list)
        self._groups: Heap = []
        self.num_samples = 0
        self.num_groups = 0

    def __bool__(self) -> bool:
        return self.num_samples + self.num_groups > 0

    def add(self, waiting: Waiting) -> None:
        """A sample."""
        if waiting.avoid is not None:
            heap = self._avoiding[waiting.avoid]
        elif waiting.group.endpoint is not None:
            heap = (self._staying if waiting.group.stays else self._home)[waiting.group.endpoint]
        else:
            heap = self._any
        heapq.heappush(heap, (waiting.key, waiting))
        self.num_samples += 1

    def add_group(self, waiting: Waiting) -> None:
        waiting.is_group = True
        heapq.heappush(self._groups, (waiting.key, waiting))
        self.num_groups += 1

    def next_for(self, endpoint: Endpoint, *, is_only: bool) -> Waiting | None:
        """Takes the first sample that may go to ``endpoint`` and does not wait for another.

        Args:
            is_only: no other endpoint will do, so that nobody can avoid this one.
        """
        heaps = [self._any, self._home[endpoint], self._staying[endpoint]]
        heaps += [h for avoided, h in self._avoiding.items() if is_only or avoided != endpoint]
        return self._pop_first(heaps)

    def steal(self) -> Waiting | None:
        """Takes the first sample of those that wait for the endpoint that holds their prompt."""
        return self._pop_first(list(self._home.values()))

    def next_group(self) -> Waiting | None:
        return self._pop_first([self._groups])

    def first_key(self) -> Key:
        """Of who goes first here, sample or group; ``BEHIND_ALL`` if nobody waits."""
        return min(map(self._first_key, self._heaps()))

    def first_group_key(self) -> Key:
        return self._first_key(self._groups)

    def forsake(self, endpoint: Endpoint) -> None:
        """Nothing can be had of ``endpoint`` now: who waited for it takes any."""
        self._any += self._home.pop(endpoint, []) + self._staying.pop(endpoint, [])
        heapq.heapify(self._any)

    def remove(self, waiting: Waiting) -> None:
        """It is no longer in line: taken, or cancelled while it waited."""
        if waiting.waits:
            waiting.waits = False
            if waiting.is_group:
                self.num_groups -= 1
            else:
                self.num_samples -= 1

    def fail(self, error: Exception) -> None:
        for heap in self._heaps():
            while (waiting := self._first(heap)) is not None:
                self.remove(waiting)
                waiting.place.set_exception(error)

    def _heaps(self) -> list[Heap]:
        of_endpoints = (self._home, self._staying, self._avoiding)
        return [self._any, *(heap for each in of_endpoints for heap in each.values()), self._groups]

    def _pop_first(self, heaps: list[Heap]) -> Waiting | None:
        filled = [heap for heap in heaps if self._first(heap) is not None]
        if not filled:
            return None
        waiting = heapq.heappop(min(filled, key=itemgetter(0)))[1]
        self.remove(waiting)
        return waiting

    def _first_key(self, heap: Heap) -> Key:
        first = self._first(heap)
        return BEHIND_ALL if first is None else first.key

    def _first(self, heap: Heap) -> Waiting | None:
        while heap and heap[0][1].place.done():  # cancelled while it waited, or failed
            self.remove(heapq.heappop(heap)[1])
        return heap[0][1] if heap else None
