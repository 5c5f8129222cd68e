"""Requests for responses, sent and decoded in processes of their own: the fetchers.

A response of 1,000 tokens is 140 kB of JSON. Reading that beside the trainer would slow it down, so
that a fetcher does, and what comes back here are two arrays and a few words (DESIGN §3).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np

from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import MalformedResponse
from easyrl.inference_client.fetching.fetcher_messages import (
    HEARTBEAT_S,
    Cancel,
    Fetched,
    Reply,
    Send,
    decode_replies,
    encode,
)
from easyrl.inference_client.responses import parse_generate_response
from easyrl.runtime.workers.child_process import Child, FrameSplitter, frame, start_child
from easyrl.schema import Completion

Fetch = Callable[[str, np.ndarray, SamplingConfig, int], Awaitable[Completion]]

log = logging.getLogger(__name__)

ENTRY = "easyrl.inference_client.fetching.fetcher_process:fetcher_main"
MAX_DEATHS = 3  # of fetchers while they had one request; more, and the request is what kills them
# A fetcher that says nothing for so many heartbeats hangs, or is stopped: it is killed. Before its
# first one it has to import what it needs, maybe on a busy machine.
MAX_SILENT_BEATS = 10
MAX_SILENT_BEATS_AT_START = 120
RECEIVE_BYTES = 2**18
# A megabyte that is freed stays at hand (glibc): mapping a response's buffers anew, page by page,
# would be a tenth of a fetcher's work.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(128 * 2**20),
}
SAMPLINGS_KEPT = 64


class FetcherDied(RuntimeError):
    """Fetchers ended again and again while they had this request; no endpoint is to blame."""


def local_fetch(session: aiohttp.ClientSession, api_key: str | None = None) -> Fetch:
    """A ``Fetch`` in this loop: what each fetcher runs, and tests.

    ``await fetch(url, prompt_token_ids int32 [P], sampling, seed)`` gives one response. Raises
    subclasses of ``EndpointError``, and ``ValueError`` if the server cannot do what ``sampling``
    asks. Cancelling closes the connection, upon which the server aborts the request.
    """
    clients: dict[str, EndpointClient] = {}

    async def fetch(
        url: str, prompt_token_ids: np.ndarray, sampling: SamplingConfig, seed: int
    ) -> Completion:
        client = clients.get(url)
        if client is None:
            client = clients[url] = EndpointClient(url, session, api_key=api_key)
        body = await client.generate(prompt_token_ids, sampling, seed)
        completions = parse_generate_response(body, url, len(prompt_token_ids))
        if len(completions) != 1:
            raise MalformedResponse(url, f"{len(completions)} choices, asked for 1")
        return completions[0]

    return fetch


class FetcherPool:
    """A ``Fetch`` (see ``local_fetch``) by ``num_fetchers`` processes.

    A fetcher that dies or hangs is replaced and its requests are sent again, with the same seeds:
    that is no endpoint's fault. ``FetcherDied`` is raised by a request that had it happen
    ``MAX_DEATHS`` times. ``close`` leaves no process behind; on Linux neither does a parent that is
    killed.

    Args:
        num_fetchers: processes; a request goes to the one with the fewest in flight.
        api_key: sent to every endpoint as bearer token.
    """

    def __init__(self, num_fetchers: int, api_key: str | None = None) -> None:
        if num_fetchers < 1:
            raise ValueError(f"num_fetchers: {num_fetchers}, needs at least 1")
        self._fetchers = [_Fetcher(api_key) for _ in range(num_fetchers)]
        self._samplings = _EncodedSamplings()
        self._closed = True

    async def start(self) -> None:
        """Starts the processes; calls belong to this loop from now on.

        Its thread has to outlive the pool: on Linux processes end with the thread that started
        them.
        """
        assert self._closed, "started twice"
        self._closed = False
        for fetcher in self._fetchers:
            await fetcher.start()

    async def close(self) -> None:
        """Cancels all requests and ends the processes. Safe to call twice."""
        self._closed = True
        for fetcher in self._fetchers:
            await fetcher.close()

    async def __call__(
        self, url: str, prompt_token_ids: np.ndarray, sampling: SamplingConfig, seed: int
    ) -> Completion:
        if self._closed:
            raise RuntimeError("the fetchers are not running")
        prompt = np.asarray(prompt_token_ids, dtype=np.int32).tobytes()
        message = Send(0, url, prompt, self._samplings.encoded(sampling), seed)
        return await min(self._fetchers, key=_load).fetch(message)


def _load(fetcher: _Fetcher) -> int:
    return len(fetcher.requests)


class _Fetcher:
    """One process after the other, and the requests that it has."""

    def __init__(self, api_key: str | None) -> None:
        self.requests: dict[int, _Request] = {}  # by number
        self._greeting = frame(msgspec.msgpack.encode(api_key))
        self._num_sent = 0
        self._outbox: list[Send | Cancel] = []
        self._link: _Link | None = None
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> None:
        """Starts a process and sends it all the requests there are."""
        self._loop = asyncio.get_running_loop()
        link = _Link(start_child(ENTRY, ENVIRONMENT), self._settle, self._on_death)
        try:
            await self._loop.create_unix_connection(lambda: link, sock=link.child.socket)
        except BaseException:
            link.child.kill()
            raise
        link.transport.write(self._greeting)
        self._link = link
        self._starting = None
        self._outbox = [request.message for request in self.requests.values()]
        self._flush()

    async def fetch(self, message: Send) -> Completion:
        self._num_sent += 1
        number = message.number = self._num_sent
        request = _Request(message, self._loop.create_future())
        self.requests[number] = request
        if self._link is None and self._starting is None:
            self._starting = self._loop.create_task(self._start_again())
        self._post(message)
        try:
            return await request.future
        finally:
            if self.requests.pop(number, None) is not None:  # cancelled
                self._post(Cancel(number))

    async def close(self) -> None:
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait([self._starting])
        if self._link is not None:
            self._link.close()
        for request in list(self.requests.values()):
            request.future.cancel()

    async def _start_again(self) -> None:
        try:
            await self.start()
        except Exception as error:  # such as no memory, no process, no file left
            log.warning("no fetcher process can be started", exc_info=True)
            for request in self.requests.values():
                request.fail(f"none can be started: {type(error).__name__}: {error}")
        finally:
            self._starting = None

    def _post(self, message: Send | Cancel) -> None:
        """Sends it with the others of this turn of the loop."""
        if not self._outbox:
            self._loop.call_soon(self._flush)
        self._outbox.append(message)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if self._link is not None and outbox:  # without a link, start() sends all
            self._link.transport.write(frame(encode(outbox)))

    def _settle(self, reply: Reply) -> None:
        request = self.requests.pop(reply.number, None)
        if request is None or request.future.done():  # cancelled
            return
        if isinstance(reply, Fetched):
            request.future.set_result(reply.completion(request.message.url))
        else:
            request.future.set_exception(reply.exception(request.message.url))

    def _on_death(self, child: Child, hung: str | None) -> None:
        """Has another process do what this one had to, at once or with the next request."""
        if self._closed:
            return
        self._link = None
        ending = child.ending()
        how = hung or ending
        log.warning("a fetcher process ended: %s; %d requests wait", how, len(self.requests))
        for number, request in list(self.requests.items()):
            request.num_deaths += 1
            if request.num_deaths >= MAX_DEATHS:
                del self.requests[number]
                request.fail(how)
        if self.requests:
            self._starting = self._loop.create_task(self._start_again())


@dataclass(slots=True, eq=False)
class _Request:
    message: Send
    future: asyncio.Future[Completion]
    num_deaths: int = 0

    def fail(self, how: str) -> None:
        if not self.future.done():
            self.future.set_exception(
                FetcherDied(
                    f"{self.num_deaths} fetcher processes ended while they had this request to "
                    f"{self.message.url}; the last one: {how}"
                )
            )


class _Link(asyncio.BufferedProtocol):
    """The connection to one fetcher process."""

    def __init__(
        self,
        child: Child,
        settle: Callable[[Reply], None],
        on_death: Callable[[Child, str | None], None],
    ) -> None:
        self.child = child
        self._settle = settle
        self._on_death = on_death
        self._frames = FrameSplitter()
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._silent_beats = 0
        self._max_silent_beats = MAX_SILENT_BEATS_AT_START
        self._hung: str | None = None

    def close(self) -> None:
        self.transport.abort()
        self.child.kill()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._loop = asyncio.get_running_loop()
        self._next_look = self._loop.call_later(HEARTBEAT_S, self._look)

    def _look(self) -> None:
        """Kills a fetcher that is silent for too long.

        Looks are counted, not seconds: time in which this process was stopped or busy itself is
        one look, and what has arrived meanwhile is read before it.
        """
        self._silent_beats += 1
        if self._silent_beats <= self._max_silent_beats:
            self._next_look = self._loop.call_later(HEARTBEAT_S, self._look)
            return
        self._hung = f"silent for {self._max_silent_beats * HEARTBEAT_S:.0f} s, and killed"
        self.child.kill()  # upon which the connection is lost

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._silent_beats = 0
        self._max_silent_beats = MAX_SILENT_BEATS
        for payload in self._frames.feed(self._buffer[:nbytes]):
            for reply in decode_replies(payload):
                self._settle(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._next_look.cancel()
        self._on_death(self.child, self._hung)


class _EncodedSamplings:
    """Sampling parameters as JSON; a run has few, and asks for them with every request."""

    def __init__(self) -> None:
        self._encoded: dict[int, tuple[SamplingConfig, bytes]] = {}  # by identity

    def encoded(self, sampling: SamplingConfig) -> bytes:
        known = self._encoded.get(id(sampling))
        if known is not None:
            return known[1]
        if len(self._encoded) >= SAMPLINGS_KEPT:
            self._encoded.clear()
        fields = sampling.model_dump(include=set(SamplingConfig.model_fields))
        encoded = msgspec.json.encode(fields)
        self._encoded[id(sampling)] = sampling, encoded
        return encoded
