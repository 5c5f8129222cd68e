"""A proxy that passes bytes on: the least that any HTTP process between client and server costs."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
from aiohttp import web

HEADERS = {"Content-Type": "application/json"}


def serve(connection: socket.socket) -> None:
    """Is told the server's URL, tells its port, and serves until the other end is closed."""
    asyncio.run(_serve(connection.recv(2**12).decode(), connection))


async def _serve(server_url: str, connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(server_url, connector=connector) as session:

        async def passed_on(http: web.Request) -> web.Response:
            body = await http.read()
            async with session.post(http.path, data=body, headers=HEADERS) as answer:
                return web.Response(body=await answer.read(), headers=HEADERS)

        app = web.Application()
        app.router.add_post("/{path:.*}", passed_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        await web.SockSite(runner, listener).start()
        connection.sendall(str(listener.getsockname()[1]).encode())
        connection.setblocking(False)
        await loop.sock_recv(connection, 1)
        await runner.cleanup()
