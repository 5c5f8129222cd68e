"""Choice of the next request and its endpoint, and the end of those that wait in vain."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Sequence

from easyrl.inference_client.errors import NoEndpointError, Outage
from easyrl.inference_client.pool.endpoint import Endpoint, Need
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.inference_client.pool.lent_places import LentPlaces
from easyrl.inference_client.pool.request_queue import Waiting, WaitingLine

log = logging.getLogger(__name__)

SAY_INTERVAL_S = 30.0
POLL_S = 0.1
NO_NEED = Need(None)


class NeedChanged(NoEndpointError):
    """Nobody will be there for what a request needs: it is to be looked at again."""


class Dispatcher:
    """Gives places at endpoints to samples, and turns to groups.

    A group is given its turn when an endpoint has room for it, and the places of its samples are
    held there until they come: the prompt is in that endpoint's prefix cache. A sample leaves its
    group's endpoint only when that is full and no other group waits that could keep the others
    busy; a session (``GroupAssignment.session``) waits for it. Groups enter the line together, so
    turns are given one round of the loop later: the shortest of all goes first, not the first that
    asked, and none before a group of an earlier update (``GroupAssignment.rank``).

    Waiting for which no endpoint is usable ends with ``Outage`` after ``max_outage_s``, with
    ``NoEndpointError`` at once when there is nothing to hope for: every endpoint failed its proof.
    Waiting for another endpoint than the one that refused a prompt ends with ``NeedChanged`` when
    no other has been usable for ``max_outage_s``.
    """

    def __init__(self, max_outage_s: float) -> None:
        self.endpoints: Sequence[Endpoint] = ()  # replaced, never changed
        self._max_outage_s = max_outage_s
        self._outage: asyncio.Task[None] | None = None  # ends those who wait during it
        self._lone: asyncio.Task[None] | None = None  # ends those who wait for another endpoint
        self._lines: dict[Need, WaitingLine] = {}
        self._lent = LentPlaces(self.give_back)
        self._numbers = itertools.count()
        self._turns_are_due = False

    async def turn(self, group: GroupAssignment) -> None:
        """Waits until ``group`` may send its samples.

        Raises ``NoEndpointError``, ``NeedChanged`` where its need has to be looked at again.
        """
        waiting = self._waiting(group)
        line = self._line(group.need)
        line.add_group(waiting)
        self._give_turns_soon()
        self.look_for_outage()
        try:
            await waiting.place
        except asyncio.CancelledError:
            line.remove(waiting)
            self.leave(group)
            raise

    def leave(self, group: GroupAssignment) -> None:
        """No further sample of ``group`` comes."""
        self._lent.end(group)
        endpoint = group.endpoint
        if endpoint is not None and group.num_reserved:
            group.leave()
            self._fill(endpoint)

    def give_back(self, group: GroupAssignment) -> None:
        """A sample of ``group`` does not come yet: the place that is held for it is anybody's."""
        self._lent.end(group)
        endpoint = group.endpoint
        if endpoint is not None and group.num_reserved:
            group.release(1)
            self._fill(endpoint)

    def lend(self, session: GroupAssignment, on_recall: Callable[[], object]) -> Endpoint | None:
        """The endpoint at which a place is held for the next request of ``session``; None where
        that would have to wait.

        Until others wait, or the endpoint cannot be used: then ``on_recall`` is called. The first
        place of a session, which its group has held for it, is kept from those who wait.
        """
        endpoint = session.endpoint
        if endpoint is None or not endpoint.serves(session.need):
            return None
        if not session.num_reserved:
            if any(self._lines.values()) or not endpoint.has_free_room:
                return None
        self._lent.lend(session, endpoint, on_recall)
        return endpoint

    async def place(
        self,
        group: GroupAssignment,
        avoid: Endpoint | None,
        on_wait: Callable[[], object] = lambda: None,
    ) -> Endpoint:
        """An endpoint for one sample of ``group``, as soon as one has room.

        ``on_wait`` is called where that is not at once. Raises as ``turn`` does.
        """
        self._lent.end(group)
        endpoint = self._choose(group, avoid)
        if endpoint is not None:
            self._begin(group, endpoint)
            return endpoint
        on_wait()
        waiting = self._waiting(group, avoid)
        line = self._line(group.need)
        line.add(waiting)
        home = group.endpoint if group.stays else None
        self._recall(group.need, waiting.place.done, home)
        self.look_for_outage()
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
        self._lent.recall(
            lambda session, at: at is endpoint and not at.serves(session.need),
            lambda: False,
            also_first=True,
        )
        for need, line in self._lines.items():
            if not endpoint.serves(need):
                line.forsake(endpoint)
        for other in self.endpoints:
            self._fill(other)
        self._give_turns_soon()
        self.look_for_outage()

    def is_wanted(self, before: int) -> bool:
        """Whether a place is waited for with a priority smaller than ``before``."""
        return any(line.first_key()[0][0] < before for line in self._lines.values() if line)

    def waiting_needs(self) -> list[Need]:
        return [need for need, line in self._lines.items() if line]

    def fail(self, need: Need, error: Exception) -> None:
        """Ends the waiting of all with this ``need``."""
        if (line := self._lines.pop(need, None)) is not None:
            line.fail(error)

    # ---- outages ---------------------------------------------------------------------------------

    @property
    def in_outage(self) -> bool:
        """Somebody waits while nobody can answer."""
        return self._outage is not None or self._lone is not None

    def look_for_outage(self) -> None:
        """Call it when somebody waits, or an endpoint has changed."""
        stuck = self._stuck_needs()
        for need in [need for need in stuck if self._has_changed(need)]:
            stuck.remove(need)
            self.fail(need, NeedChanged(str(self.no_endpoint(need))))
        for_another = [need for need in stuck if need.other_than is not None]
        for_any = [need for need in stuck if need.other_than is None]
        if for_another and self._lone is None:
            work = self._await_another(for_another[0])
            self._lone = asyncio.get_running_loop().create_task(work)
        if for_any and self.all_excluded():
            for need in for_any:
                self.fail(need, self.no_endpoint(need))
        elif for_any and self._outage is None:
            self._outage = asyncio.get_running_loop().create_task(self._end_outage())

    def no_endpoint(self, need: Need = NO_NEED) -> NoEndpointError:
        """Names each endpoint and why it is not usable."""
        what = "" if need.version is None else f" for version {need.version}"
        if need.context:
            what += f" with a context of {need.context} tokens"
        return NoEndpointError(f"no usable endpoint{what}:{status_lines(self.endpoints, need)}")

    def all_excluded(self) -> bool:
        return bool(self.endpoints) and all(e.excluded is not None for e in self.endpoints)

    async def close(self) -> None:
        tasks = [task for task in (self._outage, self._lone) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stuck_needs(self) -> list[Need]:
        return [n for n in self.waiting_needs() if not any(e.serves(n) for e in self.endpoints)]

    def _has_changed(self, need: Need) -> bool:
        """Of a stuck need: an endpoint has room for a shorter response, or none will for this."""
        others = [endpoint for endpoint in self.endpoints if endpoint is not need.other_than]
        if need.context and any(e.usable(need.version) and e.context >= need.least for e in others):
            return True
        if need.other_than is not None:
            return not any(
                e.is_awaited(need.version, self._max_outage_s) and e.may_have_room(need.context)
                for e in others
            )
        return need.context > 0 and not any(
            e.is_in_use and e.context >= need.context for e in others
        )

    async def _await_another(self, need: Need) -> None:
        """Looks again and again, as time passes, whether another endpoint is still awaited."""
        log.warning(
            "%s\na prompt that it refused waits for another to return, for %.0f s at most",
            self.no_endpoint(need),
            self._max_outage_s,
        )
        try:
            while any(need.other_than is not None for need in self._stuck_needs()):
                await asyncio.sleep(POLL_S)
                self.look_for_outage()
        finally:
            self._lone = None

    async def _end_outage(self) -> None:
        def stuck() -> list[Need]:
            return [need for need in self._stuck_needs() if need.other_than is None]

        try:
            is_over = await wait_out(
                lambda: not stuck(),
                self._max_outage_s,
                lambda: str(self.no_endpoint(next(iter(stuck()), NO_NEED))),
                goes_on=lambda: any(endpoint.repairing for endpoint in self.endpoints),
            )
        finally:
            self._outage = None
        for need in [] if is_over else stuck():
            self.fail(need, Outage.after(self._max_outage_s, self.no_endpoint(need)))
        self.look_for_outage()  # somebody may have begun to wait since

    # ---- who goes where --------------------------------------------------------------------------

    def _waiting(self, group: GroupAssignment, avoid: Endpoint | None = None) -> Waiting:
        place: asyncio.Future[Endpoint | None] = asyncio.get_running_loop().create_future()
        return Waiting(group, next(self._numbers), place, avoid)

    def _line(self, need: Need) -> WaitingLine:
        line = self._lines.get(need)
        if line is None:
            self._lines = {n: old for n, old in self._lines.items() if old}  # past ones
            line = self._lines[need] = WaitingLine()
        return line

    def _choose(self, group: GroupAssignment, avoid: Endpoint | None) -> Endpoint | None:
        home = group.endpoint
        if home is not None and home is not avoid and home.serves(group.need):
            group.release(1)
            if home.has_room:
                return home
            if group.stays:
                return None
            line = self._lines.get(group.need)
            if line is not None and line.num_groups:
                return None  # the others are kept busy by other groups
        else:
            group.leave()
        usable = [endpoint for endpoint in self.endpoints if endpoint.serves(group.need)]
        others = [e for e in usable if e is not avoid] or usable
        return min((e for e in others if e.has_free_room), key=_load, default=None)

    def _fill(self, endpoint: Endpoint) -> None:
        """Gives the free places of ``endpoint`` to those who wait, whatever line they are in."""
        lines = {n: line for n, line in self._lines.items() if line and endpoint.serves(n)}
        while lines and endpoint.has_room:
            need = min(lines, key=lambda n: lines[n].first_key()) if len(lines) > 1 else [*lines][0]
            if not self._give_place(endpoint, need, lines[need]):
                del lines[need]

    def _give_place(self, endpoint: Endpoint, need: Need, line: WaitingLine) -> bool:
        """A free place of ``endpoint`` to a sample of ``line``; False if none may have it."""
        is_only = not any(other is not endpoint and other.serves(need) for other in self.endpoints)
        waiting = line.next_for(endpoint, is_only=is_only)
        if waiting is None and not line.num_groups and endpoint.has_free_room:
            waiting = line.steal()
        if waiting is None:
            if line and endpoint.has_free_room:
                self._give_turns_soon()
            return False
        group = waiting.group
        if group.endpoint is not None and not group.endpoint.serves(need):
            group.leave()
        self._begin(group, endpoint)
        waiting.place.set_result(endpoint)
        return True

    def _begin(self, group: GroupAssignment, endpoint: Endpoint) -> None:
        """Takes a place there, of those that are lent if there is no other."""
        group.settle(endpoint)
        endpoint.begin(group.sample_tokens)
        self._lent.recall(
            lambda session, at: at is endpoint,
            lambda: endpoint.num_inflight + endpoint.num_reserved <= endpoint.max_inflight,
        )

    def _recall(
        self, need: Need, is_enough: Callable[[], bool], home: Endpoint | None = None
    ) -> None:
        """Somebody waits: gives away places that are lent where they can be used, at ``home`` if
        there is one."""
        self._lent.recall(
            lambda session, at: at.serves(need) and (home is None or at is home), is_enough
        )

    def _give_turns_soon(self) -> None:
        if not self._turns_are_due:
            self._turns_are_due = True
            asyncio.get_running_loop().call_soon(self._give_turns)

    def _give_turns(self) -> None:
        self._turns_are_due = False
        lines = {need: line for need, line in self._lines.items() if line.num_groups}
        while lines:
            need = min(lines, key=lambda n: lines[n].first_group_key())
            if not self._give_turn(need, lines[need]):
                del lines[need]

    def _give_turn(self, need: Need, line: WaitingLine) -> bool:
        """To the first group of ``line``; False if there is none, or no room for it."""
        usable = [endpoint for endpoint in self.endpoints if endpoint.serves(need)]
        if line.num_groups:  # else all have had theirs
            self._recall(need, lambda: any(endpoint.has_free_room for endpoint in usable))
        ready = [endpoint for endpoint in usable if endpoint.has_free_room]
        if not ready:
            return False
        few = line.num_groups < sum(endpoint.is_idle for endpoint in ready)
        waiting = line.next_group()
        if waiting is None:
            return False  # all were cancelled
        if few:
            waiting.group.spread = True
        else:
            waiting.group.reserve(min(ready, key=_load))
        waiting.place.set_result(None)
        return True


def _load(endpoint: Endpoint) -> tuple[int, int]:
    return endpoint.outstanding_tokens, endpoint.num_requests


async def wait_out(
    is_over: Callable[[], bool],
    limit_s: float,
    describe: Callable[[], str],
    *,
    goes_on: Callable[[], bool] = lambda: False,
) -> bool:
    """Waits until ``is_over``; False if it is not after ``limit_s``.

    Logs what ``describe`` says once, then every 30 s, with the seconds left. While ``goes_on``
    (something that will end the outage is under way) the limit does not end the waiting.
    """
    if is_over():
        return True
    start_s = said_s = time.monotonic()
    log.warning("%s\nwaiting for one to return, for %.0f s at most", describe(), limit_s)
    while not is_over():
        now_s = time.monotonic()
        left_s = start_s + limit_s - now_s
        if left_s <= 0 and not goes_on():
            return False
        if now_s - said_s >= SAY_INTERVAL_S:
            said_s = now_s
            log.warning("%s\nstill waiting, for %.0f s at most", describe(), max(left_s, 0.0))
        await asyncio.sleep(min(POLL_S, left_s) if left_s > 0 else POLL_S)
    log.warning("an endpoint is there again after %.1f s", time.monotonic() - start_s)
    return True


def status_lines(endpoints: Sequence[Endpoint], need: Need = NO_NEED) -> str:
    """A line for each endpoint: how it is, seen from ``need``."""
    if not endpoints:
        return " there is none; add one with easyrl endpoints add"
    return "".join(f"\n  {e.url}: {_status(e, need)}" for e in endpoints)


def _status(endpoint: Endpoint, need: Need) -> str:
    if endpoint is need.other_than:
        return "refused the prompt"
    status = endpoint.status(need.version)
    if endpoint.usable(need.version) and endpoint.context < need.context:
        return f"{status}, with a context of {endpoint.context} tokens"
    return status
