"""Choice of the next request and its endpoint: by outstanding tokens, short groups first.

What goes first before all: the groups of the batch's earlier update.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.inference_client.pool.request_queue import Waiting, WaitingLine


class Dispatcher:
    """Gives places at endpoints to samples, and turns to groups.

    A group is given its turn when an endpoint has room for it, and the places of its samples are
    held there until they come: the prompt is in that endpoint's prefix cache. A sample leaves its
    group's endpoint only when that is full and no other group waits that could keep the others
    busy. Groups enter the line together, so turns are given one round of the loop later: the
    shortest of all goes first, not the first that asked, and none before a group of an earlier
    update (``GroupAssignment.rank``).

    Args:
        begun_to_wait: called when somebody has: maybe no endpoint is usable.
    """

    def __init__(self, begun_to_wait: Callable[[], None]) -> None:
        self.endpoints: Sequence[Endpoint] = ()  # replaced, never changed
        self._begun_to_wait = begun_to_wait
        self._lines: dict[str | None, WaitingLine] = {}  # by version
        self._numbers = itertools.count()
        self._turns_are_due = False

    async def turn(self, group: GroupAssignment) -> None:
        """Waits until ``group`` may send its samples. Raises ``NoEndpointError``."""
        waiting = self._waiting(group)
        line = self._line(group.version)
        line.add_group(waiting)
        self._give_turns_soon()
        self._begun_to_wait()
        try:
            await waiting.place
        except asyncio.CancelledError:
            line.remove(waiting)
            self.leave(group)
            raise

    def leave(self, group: GroupAssignment) -> None:
        """No further sample of ``group`` comes."""
        endpoint = group.endpoint
        if endpoint is not None and group.num_reserved:
            group.leave()
            self._fill(endpoint)

    async def place(self, group: GroupAssignment, avoid: Endpoint | None) -> Endpoint:
        """An endpoint for one sample of ``group``, as soon as one has room.

        Raises ``NoEndpointError``.
        """
        endpoint = self._choose(group, avoid)
        if endpoint is not None:
            group.settle(endpoint)
            endpoint.begin(group.sample_tokens)
            return endpoint
        waiting = self._waiting(group, avoid)
        line = self._line(group.version)
        line.add(waiting)
        self._begun_to_wait()
        try:
            endpoint = await waiting.place
        except asyncio.CancelledError:
            line.remove(waiting)
            place = waiting.place
            if place.done() and not place.cancelled() and place.exception() is None:
                given = place.result()  # in the moment of the cancellation
                assert given is not None
                self.release(given, group.sample_tokens)
            raise
        assert endpoint is not None
        return endpoint

    def release(self, endpoint: Endpoint, num_tokens: int) -> None:
        """A request to ``endpoint`` has ended."""
        endpoint.end(num_tokens)
        self._fill(endpoint)

    def changed(self, endpoint: Endpoint) -> None:
        """``endpoint`` may have become usable, or unusable."""
        for version, line in self._lines.items():
            if not endpoint.usable(version):
                line.forsake(endpoint)
        for other in self.endpoints:
            self._fill(other)
        self._give_turns_soon()

    def waiting_versions(self) -> list[str | None]:
        return [version for version, line in self._lines.items() if line]

    def fail(self, version: str | None, error: Exception) -> None:
        """Ends the waiting of all that need ``version``."""
        if (line := self._lines.pop(version, None)) is not None:
            line.fail(error)

    def _waiting(self, group: GroupAssignment, avoid: Endpoint | None = None) -> Waiting:
        place: asyncio.Future[Endpoint | None] = asyncio.get_running_loop().create_future()
        return Waiting(group, next(self._numbers), place, avoid)

    def _line(self, version: str | None) -> WaitingLine:
        line = self._lines.get(version)
        if line is None:
            self._lines = {v: old for v, old in self._lines.items() if old}  # past versions
            line = self._lines[version] = WaitingLine()
        return line

    def _choose(self, group: GroupAssignment, avoid: Endpoint | None) -> Endpoint | None:
        home = group.endpoint
        if home is not None and home is not avoid and home.usable(group.version):
            group.release(1)
            if home.has_room:
                return home
            line = self._lines.get(group.version)
            if line is not None and line.num_groups:
                return None  # the others are kept busy by other groups
        else:
            group.leave()
        usable = [endpoint for endpoint in self.endpoints if endpoint.usable(group.version)]
        others = [e for e in usable if e is not avoid] or usable
        return min((e for e in others if e.has_free_room), key=_load, default=None)

    def _fill(self, endpoint: Endpoint) -> None:
        """Gives the free places of ``endpoint`` to those who wait."""
        for version, line in self._lines.items():
            while line and endpoint.has_room and endpoint.usable(version):
                is_only = not any(
                    other is not endpoint and other.usable(version) for other in self.endpoints
                )
                waiting = line.next_for(endpoint, is_only=is_only)
                if waiting is None and not line.num_groups and endpoint.has_free_room:
                    waiting = line.steal()
                if waiting is None:
                    if endpoint.has_free_room:
                        self._give_turns_soon()
                    break
                group = waiting.group
                if group.endpoint is not None and not group.endpoint.usable(version):
                    group.leave()
                group.settle(endpoint)
                endpoint.begin(group.sample_tokens)
                waiting.place.set_result(endpoint)

    def _give_turns_soon(self) -> None:
        if not self._turns_are_due:
            self._turns_are_due = True
            asyncio.get_running_loop().call_soon(self._give_turns)

    def _give_turns(self) -> None:
        self._turns_are_due = False
        for version, line in self._lines.items():
            while line.num_groups:
                usable = [endpoint for endpoint in self.endpoints if endpoint.usable(version)]
                ready = [endpoint for endpoint in usable if endpoint.has_free_room]
                if not ready:
                    break
                few = line.num_groups < sum(endpoint.is_idle for endpoint in ready)
                waiting = line.next_group()
                if waiting is None:
                    break  # all were cancelled
                if few:
                    waiting.group.spread = True
                else:
                    waiting.group.reserve(min(ready, key=_load))
                waiting.place.set_result(None)


def _load(endpoint: Endpoint) -> tuple[int, int]:
    return endpoint.outstanding_tokens, endpoint.num_requests
