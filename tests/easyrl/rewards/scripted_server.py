"""A small HTTP server of a test that answers each request as the test says, and keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from easyrl.inference_client.servers.embedded.server import start_site

# status and body, or the seconds to wait first and these
Answer = tuple[int, Any] | tuple[float, int, Any]


@dataclass
class ScriptedServer:
    """``answer(number, body)`` decides; ``requests`` are path, headers and JSON of each."""

    answer: Callable[[int, Any], Answer]
    url: str = ""
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)

    async def handle(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.requests.append((http.path, dict(http.headers), body))
        *wait, status, content = self.answer(len(self.requests) - 1, body)
        if wait:
            await asyncio.sleep(wait[0])
        if isinstance(content, str):
            return web.Response(text=content, status=status)
        return web.json_response(content, status=status)


@asynccontextmanager
async def scripted(answer: Callable[[int, Any], Answer]) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(answer)
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/{path:.*}", server.handle)
    runner, server.url = await start_site(app, "127.0.0.1", 0)
    try:
        yield server
    finally:
        await runner.cleanup()
