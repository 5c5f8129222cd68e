"""A hostile inference endpoint: a proxy before a real embedded server that misbehaves when it may.

It reads requests and writes answers byte by byte, so that no HTTP library makes good what a
behaviour does wrong. What no behaviour takes goes to the server behind it.

Whether it says that it streams samples, as the server behind does, is drawn for a behaviour that
meets both routes, and follows from one that meets one of them. A sample's second attempt is asked
for by ``/inference/v1/generate`` all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from benchmarks.parts.hostile.behaviour import RESPONSES, EndpointBehaviour, NotNow
from benchmarks.parts.hostile.samples import Json, body_of, sample_of, samples_of, tree_of
from easyrl.inference_client.sample_stream import SAMPLES
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer

HOST = "127.0.0.1"
KEPT_ANSWERS = 64  # of the server behind, per route
LOOK_INTERVAL_S = 0.2  # whether the client has hung up


@dataclass(frozen=True)
class Request:
    """What the trainer sent."""

    method: str
    target: str  # path and query
    headers: dict[str, str]  # by lower-case name
    body: bytes

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def json(self) -> Json:
        return orjson.loads(self.body)

    @property
    def prompts(self) -> list[list[int]]:
        """Of each response that it asks for, on either route."""
        json = self.json
        if self.path == SAMPLES:
            return [prompt["token_ids"] for prompt in json["prompts"] for _ in prompt["seeds"]]
        return [json["token_ids"]]


@dataclass(frozen=True)
class Answer:
    """What a server says."""

    status: int
    body: bytes
    content_type: str = "application/json"

    @property
    def json(self) -> Json:
        return orjson.loads(self.body)

    @property
    def trees(self) -> list[Json]:
        """Its JSON; of a stream that of each sample, as a response of its own."""
        if self.content_type == STREAM:
            return [tree_of(sample) for sample in samples_of(self.body)]
        return [self.json]

    def changed(self, change: Callable[[Json], object]) -> Answer:
        """With ``change`` made to its JSON, or to that of each sample."""
        for tree in (trees := self.trees):
            change(tree)
        return self.with_trees(trees)

    def with_trees(self, trees: list[Json]) -> Answer:
        if self.content_type == STREAM:
            samples = [sample_of(index, tree) for index, tree in enumerate(trees)]
            return Answer(self.status, body_of(samples), STREAM)
        (tree,) = trees
        return Answer(self.status, orjson.dumps(tree), self.content_type)

    def replaced(self, old: bytes, new: bytes) -> Answer:
        """With the first ``old`` of its body as ``new``; ``NotNow`` if there is none."""
        if old not in self.body:
            raise NotNow
        return Answer(self.status, self.body.replace(old, new, 1), self.content_type)


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A whole answer; the connection ends behind it."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


STREAM = "application/octet-stream"
STREAMS, DOES_NOT = b'"streams_samples":true', b'"streams_samples":false'


@dataclass
class Exchange:
    """A request, and what may be done with it."""

    request: Request
    endpoint: HostileEndpoint
    rng: random.Random
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def forward(self) -> Answer:
        """What the server behind answers; ``NotNow`` if it is no success."""
        answer = await self.endpoint.forward(self.request)
        if answer.status != 200:
            raise NotNow
        return answer

    async def answer(self, answer: Answer | bytes, status: str = "200 OK", *headers: str) -> None:
        """A well-formed answer."""
        body = answer.body if isinstance(answer, Answer) else answer
        await self.send(http(body, status, "Content-Type: application/json", *headers))

    async def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self.writer.write(data)
        await self.writer.drain()

    async def send_for_ever(self, block: bytes, pause_s: float = 0.0) -> None:
        """Until the client hangs up."""
        while not self.reader.at_eof():
            await self.send(block)
            await asyncio.sleep(pause_s)

    async def hold(self, limit_s: float = 600.0) -> None:
        """Says nothing until the client hangs up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self.reader.at_eof():
                    await asyncio.sleep(LOOK_INTERVAL_S)

    def reset(self) -> None:
        """Ends the connection with RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


class HostileEndpoint:
    """Entered on a loop; serves there until it is closed, always at ``url``.

    Args:
        model: folder that the server behind serves.
        other_model: of the same shape, with other weights; what it comes back with.

    Attributes:
        behaviour: what it does once it may act; None: it only forwards.
        may_act: from now on.
        streams: it says that it streams samples.
        happened: how often ``behaviour`` did.
        streamed: how often to a request for a stream; what counts for one that is asked for them.
        problem: what the benchmark itself did wrong.
    """

    def __init__(self, model: Path, other_model: Path, max_model_len: int) -> None:
        self.model, self.other_model = model, other_model
        self._max_model_len = max_model_len
        self.history: dict[str, deque[tuple[Request, Answer]]] = {}
        # requests, their own answers, and where another's goes
        self.waiting: deque[tuple[Request, Answer, asyncio.Future[Answer]]] = deque()
        self.elsewhere = ""  # URL of a server that nobody was told of
        self.engine: EmbeddedEngine | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.set_behaviour(None, random.Random(0))

    @property
    def has_met(self) -> int:
        """How often its behaviour did on the route that it is there for."""
        assert self.behaviour is not None
        return self.streamed if self.streams and self.behaviour.either else self.happened

    def set_behaviour(
        self, behaviour: EndpointBehaviour | None, rng: random.Random, may_act: bool = False
    ) -> None:
        """What it does; a seeded number of requests after ``may_act`` if not at once."""
        self.behaviour = behaviour
        self.rng = rng
        self.may_act = may_act
        self.happened = self.streamed = 0
        self.problem: BaseException | None = None
        self.has_failed = False  # once, where a behaviour needs it
        self.back_s = 0.0  # when it is there again, where a behaviour is away
        self.share = 0.0 if behaviour is None else behaviour.share
        self._calm = 0 if may_act else rng.randrange(2)  # further requests that are only forwarded
        met = () if behaviour is None else behaviour.routes.intersection(RESPONSES)
        self.streams = SAMPLES in met if len(met) == 1 else rng.random() < 0.5
        self.history.clear()
        self.waiting.clear()

    async def open(self) -> None:
        await self.restart(self.model)
        # the upstream may be restarted meanwhile: no connection outlives its request
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        self._session = aiohttp.ClientSession(connector=connector)
        self._server = await asyncio.start_server(self._serve, HOST, 0, limit=2**24)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()
        await self._stop()

    async def restart(self, model: Path) -> None:
        """The server behind comes back with ``model`` and no version."""
        if self.engine is not None:
            await self._stop()
        self.engine = await asyncio.to_thread(
            EmbeddedEngine, model, max_model_len=self._max_model_len
        )
        app = EmbeddedServer(self.engine, str(self.model)).app()
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self._upstream = f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def _stop(self) -> None:
        assert self.engine is not None
        engine, self.engine = self.engine, None
        await asyncio.to_thread(engine.close)
        await self._runner.cleanup()

    async def forward(self, request: Request) -> Answer:
        """What the server behind answers, remembered by route."""
        try:
            async with self._session.request(
                request.method,
                self._upstream + request.target,
                data=request.body or None,
                headers={"Content-Type": "application/json"},
            ) as response:
                body = await response.read()
                if not self.streams and request.path == "/v1/models":
                    body = body.replace(STREAMS, DOES_NOT)
                answer = Answer(response.status, body, response.content_type)
        except aiohttp.ClientError as error:  # it is being restarted
            return Answer(503, orjson.dumps({"error": str(error)}))
        kept = self.history.setdefault(request.path, deque(maxlen=KEPT_ANSWERS))
        if answer.status == 200:
            kept.append((request, answer))
        return answer

    def background(self, work: Coroutine[Any, Any, None]) -> None:
        """Goes on beside what is answered."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ---- connections -----------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while (request := await _read_request(reader)) is not None:
                    exchange = Exchange(request, self, self.rng, reader, writer)
                    if await self._misbehave(exchange):
                        break
                    if not await self._forward_unless_gone(exchange):
                        break
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _misbehave(self, exchange: Exchange) -> bool:
        """Whether the behaviour took this request."""
        behaviour = self.behaviour
        if behaviour is None or not self.may_act:
            return False
        if not behaviour.is_for(exchange.request.path, streams=self.streams):
            return False
        if self._calm:
            self._calm -= 1
            return False
        is_stream = exchange.request.path == SAMPLES
        spared = (1 - self.share) ** (len(exchange.request.prompts) if is_stream else 1)
        if self.rng.random() < spared:
            return False
        try:
            self.happened += 1
            self.streamed += is_stream
            await behaviour.act(exchange)
        except NotNow:
            self.happened -= 1
            self.streamed -= is_stream
            return False
        except ConnectionError:  # the client has had enough
            return True
        except Exception as error:  # the benchmark's own; told at the end of the run
            self.problem = error
        return True

    async def _forward_unless_gone(self, exchange: Exchange) -> bool:
        """Forwards; a client that hangs up aborts its request. Whether the connection goes on."""
        task = asyncio.ensure_future(self.forward(exchange.request))
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=LOOK_INTERVAL_S)
                if exchange.reader.at_eof():
                    return False
        finally:
            task.cancel()
        answer = task.result()
        goes_on = exchange.request.headers.get("connection", "").lower() != "close"
        head = (
            f"HTTP/1.1 {answer.status} {'OK' if answer.status == 200 else 'Error'}\r\n"
            f"Content-Type: {answer.content_type}\r\nContent-Length: {len(answer.body)}\r\n"
            f"Connection: {'keep-alive' if goes_on else 'close'}\r\n\r\n"
        )
        await exchange.send(head.encode() + answer.body)
        return goes_on


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    """The next request of a connection; None at its end."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.rstrip("\r\n").split("\r\n")
    method, target, _ = first.split(" ", 2)
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, target, headers, body)


class Stranger:
    """A server that nobody was told of: it counts who comes all the same."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self.url = f"http://{HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_requests += 1
        writer.close()
