"""Whose answer ends the fetcher that receives it: group testing of the requests in flight."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence

from easyrl.inference_client.errors import MalformedResponse
from easyrl.inference_client.fetching.fetcher import Fetcher, Request
from easyrl.inference_client.fetching.messages import Settings

log = logging.getLogger(__name__)


class Suspects:
    """Requests in flight when a fetcher process ended, sent again until the one at fault is alone.

    They have a process to themselves, so that others are not held up. First they go there all
    together: what ended their process from outside does not meet them again. If it ends too they go
    in halves, one after another, and a half that ends it is halved. The endpoint of a request that
    was alone is at fault. So one of n costs log2(n) + 2 processes, and the others nothing but time.
    An endpoint that is found so twice takes the rest of its suspects with it.
    """

    def __init__(self, settings: Settings) -> None:
        self.fetcher = Fetcher(settings, self._on_death)
        self._groups: deque[list[Request]] = deque()  # that wait for their turn
        self._at_fault: set[str] = set()  # URLs, since there were no suspects

    def add(self, requests: Sequence[Request], how: str) -> None:
        """Takes over ``requests``: their process ended, ``how`` in words."""
        for request in requests:
            request.future.add_done_callback(lambda _: self._send_next())
        self._groups.append(list(requests))
        self._send_next()

    @property
    def waiting(self) -> list[Request]:
        """Those that no process has."""
        return [request for group in self._groups for request in group]

    def _send_next(self) -> None:
        """The next group, if the one before it is done."""
        while self._groups and all(r.future.done() for r in self.fetcher.requests.values()):
            for request in self._groups.popleft():
                if not request.future.done():
                    self.fetcher.take(request)
        if not self._groups and not self.fetcher.requests:
            self._at_fault.clear()

    def _on_death(self, requests: Sequence[Request], how: str) -> None:
        if len(requests) == 1:
            self._blame(requests[0], how)
        else:
            middle = len(requests) // 2
            self._groups.extendleft((list(requests[middle:]), list(requests[:middle])))
        self._send_next()

    def _blame(self, request: Request, how: str) -> None:
        url, failed = request.message.url, [request]
        reason = f"its answer ended two processes that received it, the second alone: {how}"
        log.warning("%s: %s", url, reason)
        if url in self._at_fault:
            failed += [other for other in self.waiting if other.message.url == url]
        self._at_fault.add(url)
        for one in failed:
            if not one.future.done():
                one.future.set_exception(MalformedResponse(url, reason))
