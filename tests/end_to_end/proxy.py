"""An endpoint in front of a real one, for tests: holds responses back, or lies."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
from aiohttp import web

GENERATE = "/inference/v1/generate"
# said for the upstream: each response is asked for by itself and can be held back or changed
STREAMS, DOES_NOT = b'"streams_samples":true', b'"streams_samples":false'


def reply(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


class Proxy:
    """Forwards everything to ``upstream`` from a thread of its own; ``answer`` may step in."""

    hides_streams = True  # of samples

    def __init__(self, upstream: str) -> None:
        self._upstream = upstream
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    async def answer(self, request: web.Request, body: bytes) -> web.Response | None:
        """An answer of the proxy's own, or None to forward the request."""
        return None

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def forward(self, method: str, path: str, content: Any = None) -> web.Response:
        body = content if isinstance(content, bytes) else orjson.dumps(content)
        headers = {"Content-Type": "application/json"} if content else {}
        data = body if content else None
        url = self._upstream + path
        async with self._session.request(method, url, data=data, headers=headers) as answer:
            said = await answer.read()
            if self.hides_streams:
                said = said.replace(STREAMS, DOES_NOT)
            return web.Response(body=said, status=answer.status, content_type="application/json")

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        # a request on a connection that the server is just closing would fail, and count
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as self._session:
            self._ready.set()
            await self._stop.wait()
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        own = await self.answer(request, body)
        if own is not None:
            return own
        return await self.forward(request.method, request.path_qs, body)


class GatedProxy(Proxy):
    """Holds back the responses to prompts for which ``held(token_ids)`` until ``open_gate``."""

    def __init__(self, upstream: str, held: Callable[[list[int]], bool]) -> None:
        self._held = held
        self._gate: asyncio.Event | None = None
        self.num_waiting = 0
        super().__init__(upstream)

    async def answer(self, request, body):
        if request.path != GENERATE or not self._held(orjson.loads(body)["token_ids"]):
            return None
        response = await self.forward(request.method, request.path_qs, body)
        self._gate = self._gate or asyncio.Event()
        self.num_waiting += 1
        await self._gate.wait()
        return response

    def open_gate(self) -> None:
        assert self._gate is not None
        self.loop.call_soon_threadsafe(self._gate.set)
