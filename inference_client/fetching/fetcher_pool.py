"""Requests for responses, sent and decoded in processes of their own: the fetchers.

A response of 1,000 tokens is 140 kB of JSON. Reading that beside the trainer would slow it down, so
that a fetcher does, and what comes back here are two arrays and a few words (docs/architecture.md).
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from dataclasses import dataclass

import numpy as np

from easyrl.config import SamplingConfig
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.fetching.fetcher_process import (
    ENTRY,
    HEARTBEAT_S,
    Cancel,
    Fetched,
    Order,
    Send,
    decode_replies,
    encode,
)
from easyrl.runtime.workers.child_process import Child
from easyrl.runtime.workers.supervised_child import SupervisedChild
from easyrl.schema import Completion

log = logging.getLogger(__name__)

MAX_DEATHS = 3  # of fetchers while they had one request; more, and the request is what kills them
# A fetcher that says nothing for so many heartbeats hangs, or is stopped: it is killed. Before its
# first one it has to import what it needs, maybe on a busy machine.
MAX_SILENT_BEATS = 10
MAX_SILENT_BEATS_AT_START = 120
# A megabyte that is freed stays at hand (glibc): mapping a response's buffers anew, page by page,
# would be a tenth of a fetcher's work.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
}
SAMPLING_FIELDS = set(SamplingConfig.model_fields)  # not those of its subclasses


class FetcherDied(RuntimeError):
    """Fetchers ended again and again while they had this request; no endpoint is to blame."""


class FetcherPool:
    """A ``Fetch`` (see ``local_fetch``) by ``num_fetchers`` processes.

    A fetcher that dies or hangs is replaced and its requests are sent again, with the same seeds;
    one that had it happen ``MAX_DEATHS`` times raises ``FetcherDied``. ``close`` leaves no process
    behind; on Linux neither does a parent that is killed.
    """

    def __init__(self, num_fetchers: int, api_keys: ApiKeys | None = None) -> None:
        self._fetchers = [_Fetcher() for _ in range(num_fetchers)]
        self._api_keys = api_keys or ApiKeys()
        self._running = False

    async def start(self) -> None:
        """Starts the processes; calls belong to this loop, and its thread, from now on."""
        self._running = True
        for fetcher in self._fetchers:
            fetcher.ensure_started()

    async def close(self) -> None:
        """Cancels all requests and ends the processes. Safe to call twice."""
        self._running = False
        for fetcher in self._fetchers:
            await fetcher.close()
            for request in fetcher.requests.values():
                request.future.cancel()

    async def __call__(
        self, url: str, prompt_token_ids: np.ndarray, sampling: SamplingConfig, seed: int
    ) -> Completion:
        if not self._running:
            raise RuntimeError("the fetchers are not running")
        prompt = np.asarray(prompt_token_ids, dtype=np.int32).tobytes()
        encoded = sampling.model_dump_json(include=SAMPLING_FIELDS).encode()
        fetcher = min(self._fetchers, key=lambda fetcher: len(fetcher.requests))
        api_key = self._api_keys.of(url)
        return await fetcher.fetch(Send(0, url, prompt, encoded, seed, api_key))


@dataclass(slots=True, eq=False)
class _Request:
    message: Send
    future: asyncio.Future[Completion]
    num_deaths: int = 0


class _Fetcher(SupervisedChild):
    """One process at a time, and the requests that it has."""

    def __init__(self) -> None:
        super().__init__(ENTRY, encode([]), ENVIRONMENT)  # it is greeted with no order
        self.requests: dict[int, _Request] = {}  # by number
        self._num_sent = 0
        self._outbox: list[Order] = []

    async def fetch(self, message: Send) -> Completion:
        loop = asyncio.get_running_loop()
        self._num_sent += 1
        number = message.number = self._num_sent
        request = self.requests[number] = _Request(message, loop.create_future())
        self.ensure_started()
        self._post(message)
        try:
            return await request.future
        finally:
            if self.requests.pop(number, None) is not None:  # cancelled
                self._post(Cancel(number))

    def _post(self, order: Order) -> None:
        """Sends it with the others of this turn of the loop."""
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(order)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox:
            self.send(encode(outbox))

    def on_start(self) -> None:
        self._outbox = [request.message for request in self.requests.values()]
        self._flush()
        self._num_silent_beats, self._max_silent_beats = 0, MAX_SILENT_BEATS_AT_START
        asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_silence, self.child)

    def on_message(self, payload: bytes) -> None:
        self._num_silent_beats, self._max_silent_beats = 0, MAX_SILENT_BEATS
        for reply in decode_replies(payload):
            request = self.requests.pop(reply.number, None)
            if request is None or request.future.done():  # cancelled
                continue
            if isinstance(reply, Fetched):
                request.future.set_result(reply.completion(request.message.url))
            else:
                request.future.set_exception(pickle.loads(reply.failure).exception())

    def _check_silence(self, child: Child | None) -> None:
        """Kills a fetcher that is silent for too long.

        Checks are counted, not seconds: time in which this process was stopped or busy itself is
        one check, and what has arrived meanwhile is read before it.
        """
        if child is not self.child:  # it has ended
            return
        self._num_silent_beats += 1
        if self._num_silent_beats > self._max_silent_beats:
            self.kill(f"silent for {self._max_silent_beats * HEARTBEAT_S:.0f} s, and killed")
        else:
            asyncio.get_running_loop().call_later(HEARTBEAT_S, self._check_silence, child)

    def on_end(self, how: str) -> None:
        log.warning("a fetcher process ended: %s; %d requests wait", how, len(self.requests))
        for number, request in list(self.requests.items()):
            request.num_deaths += 1
            if request.num_deaths >= MAX_DEATHS and not request.future.done():
                del self.requests[number]
                request.future.set_exception(
                    FetcherDied(
                        f"{MAX_DEATHS} fetcher processes ended while they had this request to "
                        f"{request.message.url}; the last one: {how}"
                    )
                )
        if self.requests:
            self.ensure_started()
