"""Places that sessions hold at their endpoints, for requests that are sent before they are told of.

Consumes: sessions with a place, or for which there is a free one. Waits for: nothing. Produces:
places taken back, for who waits for one, or where an endpoint cannot be used any more; whoever may
send the session's requests is told. Belongs to the pool's loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.group_assignment import GroupAssignment


class Lent(NamedTuple):
    on_recall: Callable[[], object]
    is_first: bool  # the place that its group held for the session: kept, whoever waits


class LentPlaces:
    """By session, in the order in which they were lent.

    ``give_back`` makes a session's place anybody's, and calls ``end``.
    """

    def __init__(self, give_back: Callable[[GroupAssignment], object]) -> None:
        self._give_back = give_back
        self._lent: dict[GroupAssignment, Lent] = {}

    def lend(
        self, session: GroupAssignment, endpoint: Endpoint, on_recall: Callable[[], object]
    ) -> None:
        """The place at ``endpoint`` that ``session`` holds, or else a free one."""
        is_first = session.num_reserved > 0
        if (before := self._lent.get(session)) is not None:
            is_first = before.is_first
        if not session.num_reserved:
            session.reserve(endpoint)
        self._lent[session] = Lent(on_recall, is_first)

    def end(self, session: GroupAssignment) -> None:
        """It has used its place, or needs it no more."""
        self._lent.pop(session, None)

    def recall(
        self,
        is_meant: Callable[[GroupAssignment, Endpoint], bool],
        is_enough: Callable[[], bool],
        *,
        also_first: bool = False,
    ) -> None:
        """Takes places back, those that were lent first before others, until it ``is_enough``."""
        if is_enough():  # as for most requests: nothing is gone through
            return
        for session, lent in list(self._lent.items()):
            if is_enough():
                return
            endpoint = session.endpoint
            if endpoint is None or not is_meant(session, endpoint):
                continue
            if session in self._lent and (also_first or not lent.is_first):
                self._give_back(session)
                lent.on_recall()
