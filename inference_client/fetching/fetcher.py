"""One fetcher process after another, and the requests that it has."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from easyrl.inference_client.fetching.fetcher_process import ENTRY
from easyrl.inference_client.fetching.messages import (
    Cancel,
    Fetched,
    Order,
    Send,
    Settings,
    decode_replies,
    encode,
)
from easyrl.runtime.workers.reporting_child import ReportingChild
from easyrl.schema import Completion

log = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3  # in a row
# A megabyte that is freed stays at hand (glibc): mapping a response's buffers anew, page by page,
# would be a tenth of a fetcher's work.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
}


class FetcherDied(RuntimeError):
    """No fetcher process comes up; no endpoint is to blame."""


@dataclass(slots=True, eq=False)
class Request:
    """A request for one response; its ``future`` is done when it was answered or cancelled."""

    message: Send
    future: asyncio.Future[Completion]
    fetcher: Fetcher | None = None  # that has it


class Fetcher(ReportingChild):
    """One process at a time, and the requests that it has.

    ``on_death`` is given the requests that were in flight when a process ended, and how it did.
    They are no longer this one's.
    """

    def __init__(
        self, settings: Settings, on_death: Callable[[Sequence[Request], str], object]
    ) -> None:
        super().__init__(ENTRY, msgspec.msgpack.encode(settings), ENVIRONMENT)
        self.requests: dict[int, Request] = {}  # by number
        self._on_death = on_death
        self._serves = False  # the present process has said something
        self._num_failed_starts = 0

    def take(self, request: Request) -> None:
        """Sends it."""
        request.fetcher = self
        self.requests[request.message.number] = request
        self.ensure_started()
        self.post(request.message)

    def drop(self, request: Request) -> None:
        """Nobody waits for it any more."""
        if self._release(request.message.number) is not None:
            self.post(Cancel(request.message.number))

    def _release(self, number: int) -> Request | None:
        request = self.requests.pop(number, None)
        if request is not None:
            request.fetcher = None
        return request

    def batch(self, messages: Sequence[Order]) -> bytes:
        return encode(messages)

    def on_start(self) -> None:
        self._outbox = [request.message for request in self.requests.values()]
        self._flush()
        super().on_start()

    def on_message(self, payload: bytes) -> None:
        self._serves, self._num_failed_starts = True, 0
        super().on_message(payload)
        for reply in decode_replies(payload):
            request = self._release(reply.number)
            if request is None or request.future.done():  # cancelled
                continue
            if isinstance(reply, Fetched):
                request.future.set_result(reply.completion(request.message.url))
            else:
                request.future.set_exception(pickle.loads(reply.failure).exception())

    def on_end(self, how: str) -> None:
        log.warning("a fetcher process ended: %s; %d requests wait", how, len(self.requests))
        served, self._serves = self._serves, False
        if not served:  # by no answer: none had come
            self._num_failed_starts += 1
            if self._num_failed_starts < MAX_FAILED_STARTS:
                if self.requests:
                    self.ensure_started()
                return
        requests = [request for n in list(self.requests) if (request := self._release(n))]
        waiting = [request for request in requests if not request.future.done()]
        if served:
            self._on_death(waiting, how)
            return
        for request in waiting:
            problem = (
                f"{self._num_failed_starts} fetcher processes did not come up; the last: {how}"
            )
            request.future.set_exception(FetcherDied(problem))
        self._num_failed_starts = 0
