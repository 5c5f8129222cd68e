"""The fetcher's side of ``fetching``: one loop, one HTTP session, many requests in flight."""

from __future__ import annotations

import asyncio
import functools
import pickle
import resource
import socket

import aiohttp
import msgspec
import numpy as np

from easyrl.config import SamplingConfig
from easyrl.inference_client.fetching.fetcher_messages import (
    HEARTBEAT_S,
    Cancel,
    Failed,
    Fetched,
    Reply,
    Send,
    decode_orders,
    encode,
)
from easyrl.inference_client.fetching.fetcher_pool import Fetch, local_fetch
from easyrl.runtime.workers.child_process import FrameSplitter, frame
from easyrl.runtime.workers.failure import Failure

KEEP_ALIVE_S = 2.0  # below vLLM's 5 s, so that no request is sent into a connection being closed
READ_BUFFER_BYTES = 2**20  # a response fits: reading is not stopped and started again
# Each delivery takes the interpreter from the training loop for a moment, so that replies travel
# together: one may wait for others for a part of the time that it took.
DELIVERY_DELAY = 0.02
MAX_DELIVERY_DELAY_S = 0.1


def fetcher_main(connection: socket.socket) -> None:
    """What a fetcher process runs, until the other end of ``connection`` is closed."""
    _allow_open_files()
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=READ_BUFFER_BYTES
    ) as session:
        fetcher = _Fetcher(session)
        await loop.create_unix_connection(lambda: fetcher, sock=connection)
        await fetcher.closed


class _Fetcher(asyncio.Protocol):
    """Turns orders into requests and responses into replies."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._session = session
        self._fetch: Fetch | None = None  # known with the first frame, which is the API key
        self._frames = FrameSplitter()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._outbox: list[Reply] = []
        self._delivery: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._beat()

    def _beat(self) -> None:
        """Says that this process lives; it need not have anything to say."""
        if not self.closed.done():
            self._transport.write(frame(encode([])))
            self._loop.call_later(HEARTBEAT_S, self._beat)

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            if self._fetch is None:
                api_key = msgspec.msgpack.decode(payload, type=str | None)
                self._fetch = local_fetch(self._session, api_key)
                continue
            for order in decode_orders(payload):
                self._obey(order)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def _obey(self, order: Send | Cancel) -> None:
        if isinstance(order, Cancel):
            task = self._tasks.get(order.number)
            if task is not None:
                task.cancel()
            return
        assert self._fetch is not None
        self._tasks[order.number] = self._loop.create_task(self._respond(self._fetch, order))

    async def _respond(self, fetch: Fetch, order: Send) -> None:
        reply: Reply
        start_s = self._loop.time()
        try:
            prompt = np.frombuffer(order.prompt, np.int32)
            completion = await fetch(order.url, prompt, _sampling(order.sampling), order.seed)
            reply = Fetched(
                order.number,
                bytearray(completion.token_ids),
                bytearray(completion.logprobs),
                completion.finish_reason,
                completion.version_spans,
            )
        except Exception as error:
            reply = Failed(order.number, pickle.dumps(Failure.of(error), 5))
        finally:
            del self._tasks[order.number]
        now_s = self._loop.time()
        self._outbox.append(reply)
        self._deliver_by(now_s + min(DELIVERY_DELAY * (now_s - start_s), MAX_DELIVERY_DELAY_S))

    def _deliver_by(self, due_s: float) -> None:
        if self._delivery is not None:
            if self._delivery.when() <= due_s:
                return
            self._delivery.cancel()
        self._delivery = self._loop.call_at(due_s, self._deliver)

    def _deliver(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._delivery = None
        self._transport.write(frame(encode(outbox)))


@functools.lru_cache(maxsize=64)
def _sampling(encoded: bytes) -> SamplingConfig:
    return SamplingConfig.model_validate_json(encoded)


def _allow_open_files() -> None:
    """As many as the system lets us have, by default 1024; each request is a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
