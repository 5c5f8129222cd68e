"""The fetcher's side of ``fetching``: one loop, one HTTP session, many requests in flight."""

from __future__ import annotations

import asyncio
import functools
import pickle
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import aiohttp
import msgspec
import numpy as np

from easyrl.completion_check import ANY_INT32, Vocabulary, limits_of
from easyrl.config import SamplingConfig
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.client import KEEP_ALIVE_S, EndpointClient, Fetch
from easyrl.inference_client.errors import EndpointUnavailable
from easyrl.inference_client.fetching.messages import (
    Cancel,
    Failed,
    Fetched,
    Order,
    Reply,
    Send,
    Settings,
    decode_orders,
    encode,
)
from easyrl.inference_client.fetching.single_requests import SingleRequests
from easyrl.inference_client.fetching.streamed_requests import StreamedRequests
from easyrl.inference_client.responses import parse_generate_response
from easyrl.runtime.frames import FrameSplitter, frame
from easyrl.runtime.garbage import collect_rarely
from easyrl.runtime.machine import allow_open_files, limit_memory
from easyrl.runtime.workers.child_process import HEARTBEAT_S, Failure
from easyrl.schema import Completion

ClientOf: TypeAlias = Callable[[str, str | None], EndpointClient]  # url, API key

ENTRY = f"{__name__}:fetcher_main"
ORDERS_BYTES = 2**16  # read at once
# Of the machine's. Each answer is bounded, yet all endpoints could send as much as they may at
# once: that is to fail here, and not to have the system end whoever is largest, the trainer.
MEMORY_SHARE = 0.25
NO_MEMORY = "its answer did not fit into the memory of the process that reads it"
READ_BUFFER_BYTES = 2**20  # a response fits: reading is not stopped and started again
# Replies travel together: one waits while others are to come, a part of the time that it took and
# at most
MAX_DELIVERY_DELAY_S = 0.1


def local_fetch(
    session: aiohttp.ClientSession,
    vocabulary: Vocabulary = ANY_INT32,
    api_keys: ApiKeys | None = None,
    client_of: ClientOf | None = None,
    adapters: AdapterNames | None = None,
) -> Fetch:
    """A ``Fetch`` in this loop: what each fetcher runs, and tests.

    ``await fetch(url, prompt_token_ids int32 [P], sampling, seed)`` gives one response. Raises
    subclasses of ``EndpointError``, also for a token that is none of the policy's
    ``vocabulary``, and for a response that ends before its end.
    Cancelling closes the connection, upon which the server aborts the request.
    """
    keys, names = api_keys or ApiKeys(), adapters or AdapterNames()
    client_of = client_of or _clients(session)

    async def fetch(
        url: str, prompt_token_ids: np.ndarray, sampling: SamplingConfig, seed: int
    ) -> Completion:
        client = client_of(url, keys.of(url))
        body = await client.generate(prompt_token_ids, sampling, seed, model=names.of(url))
        limits = limits_of(sampling, vocabulary, told_length=True)
        return parse_generate_response(body, url, len(prompt_token_ids), limits, n=1)[0]

    return fetch


def _clients(session: aiohttp.ClientSession) -> ClientOf:
    """One for each endpoint and key."""
    return functools.cache(lambda url, key: EndpointClient(url, session, api_key=key))


def fetcher_main(connection: socket.socket) -> None:
    """What a fetcher process runs, until the other end of ``connection`` is closed."""
    allow_open_files()
    limit_memory(MEMORY_SHARE)
    collect_rarely()
    asyncio.run(_serve(connection))


async def _serve(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    async with endpoint_session() as session:
        frames, api_keys, adapters, fetcher = FrameSplitter(), ApiKeys(), AdapterNames(), None
        client_of = _clients(session)
        while data := await reader.read(ORDERS_BYTES):
            for payload in frames.feed(data):
                if fetcher is None:
                    settings = msgspec.msgpack.decode(payload, type=Settings)
                    limits = settings.vocabulary
                    fetch = local_fetch(session, limits, api_keys, client_of, adapters)
                    fetcher = _Fetcher(
                        fetch,
                        api_keys,
                        adapters,
                        writer,
                        client_of,
                        limits,
                        settings.delivery_delay,
                    )
                    continue
                for order in decode_orders(payload):
                    fetcher.obey(order)


def endpoint_session() -> aiohttp.ClientSession:
    """Of this loop, for any number of requests to endpoints side by side."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(
        connector=connector, cookie_jar=aiohttp.DummyCookieJar(), read_bufsize=READ_BUFFER_BYTES
    )


class _Fetcher:
    """Turns orders into requests and responses into replies."""

    def __init__(
        self,
        fetch: Fetch,
        api_keys: ApiKeys,
        adapters: AdapterNames,
        writer: asyncio.StreamWriter,
        client_of: ClientOf,
        vocabulary: Vocabulary,
        delivery_delay: float,
    ) -> None:
        self._writer, self._delivery_delay = writer, delivery_delay
        self._loop = asyncio.get_running_loop()
        self._single = SingleRequests(fetch, api_keys, adapters, self._answered)
        self._streamed = StreamedRequests(
            lambda order: client_of(order.url, order.api_key),
            vocabulary,
            self._answered,
            self._single.add,
        )
        self._outbox: list[Reply] = []
        self._delivery: asyncio.TimerHandle | None = None
        self._beat()

    def _beat(self) -> None:
        self._send([])
        self._loop.call_later(HEARTBEAT_S, self._beat)

    def _send(self, replies: list[Reply]) -> None:
        self._writer.write(frame(encode(replies)))

    def obey(self, order: Order) -> None:
        if isinstance(order, Cancel):
            self._streamed.cancel(order.number)
            self._single.cancel(order.number)
        elif order.is_streamed:
            self._streamed.add(order)
        else:
            self._single.add(order)

    def _answered(
        self, orders: Sequence[Send], result: Completion | Exception, start_s: float
    ) -> None:
        self._outbox += _replies(orders, result)
        due_s = now_s = self._loop.time()
        if self._single.in_flight or self._streamed.in_flight:
            due_s += min(self._delivery_delay * (now_s - start_s), MAX_DELIVERY_DELAY_S)
        if self._delivery is None or due_s < self._delivery.when():
            if self._delivery is not None:
                self._delivery.cancel()
            self._delivery = self._loop.call_at(due_s, self._deliver)

    def _deliver(self) -> None:
        outbox, self._outbox = self._outbox, []
        self._delivery = None
        self._send(outbox)


def _replies(orders: Sequence[Send], result: Completion | Exception) -> Iterator[Reply]:
    """One to each."""
    if isinstance(result, Completion):
        for order in orders:
            yield Fetched.of(order.number, result)
        return
    if isinstance(result, MemoryError):
        result = EndpointUnavailable(orders[0].url, NO_MEMORY)
    try:
        raise result  # with a traceback, if it has none
    except Exception as error:
        failure = pickle.dumps(Failure.of(error), 5)  # once: it may have ended hundreds
    for order in orders:
        yield Failed(order.number, failure)
