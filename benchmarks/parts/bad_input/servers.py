"""HTTP servers that are not what a run needs, one per way of being wrong, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import socket
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
KEY = "right-key"


def _json(value: Any, status: int = 200) -> web.Response:
    return web.json_response(value, status=status)


def _models(max_model_len: int = 512) -> dict[str, Any]:
    return {"data": [{"id": "model", "max_model_len": max_model_len}]}


async def good(request: web.Request) -> web.StreamResponse:
    """Looks like vLLM as long as nobody asks for weights or tokens."""
    answers = {
        "/health": {},
        "/v1/models": _models(),
        "/weight_info": {"weight_version": "default"},
    }
    return _json(answers[request.path]) if request.path in answers else await nothing(request)


async def nothing(request: web.Request) -> web.StreamResponse:
    return _json({"detail": "Not Found"}, 404)


async def with_key(request: web.Request) -> web.StreamResponse:
    given = request.headers.get("Authorization")
    if request.path.startswith("/v1") and given != f"Bearer {KEY}":
        return _json({"error": "Unauthorized"}, 401)
    return await good(request)


async def forbidden(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>Forbidden by the proxy</html>", status=403)


async def web_page(request: web.Request) -> web.StreamResponse:
    return web.Response(text="<html>It works!</html>", content_type="text/html")


async def no_weight_routes(request: web.Request) -> web.StreamResponse:
    known = request.path in ("/health", "/v1/models")
    return await (good(request) if known else nothing(request))


async def short_context(request: web.Request) -> web.StreamResponse:
    return _json(_models(1)) if request.path == "/v1/models" else await good(request)


async def no_model(request: web.Request) -> web.StreamResponse:
    return _json({"data": []}) if request.path == "/v1/models" else await good(request)


async def other_json(request: web.Request) -> web.StreamResponse:
    return _json({"status": "ok", "service": "grafana"})


async def loading(request: web.Request) -> web.StreamResponse:
    return _json({"error": "loading"}, 503)


async def redirecting(request: web.Request) -> web.StreamResponse:
    raise web.HTTPFound("https://login.example/")


async def silent(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


SERVERS: dict[str, Answer] = {
    "good": good,
    "nothing": nothing,
    "with-key": with_key,
    "forbidden": forbidden,
    "web-page": web_page,
    "no-weight-routes": no_weight_routes,
    "short-context": short_context,
    "no-model": no_model,
    "other-json": other_json,
    "loading": loading,
    "redirecting": redirecting,
    "silent": silent,
}


@contextlib.contextmanager
def wrong_servers() -> Iterator[dict[str, str]]:
    """URLs by name; ``closed`` is one where nobody listens, ``no-http`` one that speaks none."""
    # bound and not listening: nobody else gets the port
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ours, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_serve, args=(theirs,))
        process.start()
        try:
            urls = ours.recv()
            yield urls | {"closed": f"http://127.0.0.1:{closed.getsockname()[1]}"}
        finally:
            process.kill()
            process.join()


def _serve(pipe: Connection) -> None:
    asyncio.run(_serve_all(pipe))


async def _serve_all(pipe: Connection) -> None:
    urls = {}
    for name, answer in SERVERS.items():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        urls[name] = f"http://127.0.0.1:{runner.addresses[0][1]}"
    no_http = await asyncio.start_server(_ssh, "127.0.0.1", 0)
    urls["no-http"] = f"http://127.0.0.1:{no_http.sockets[0].getsockname()[1]}"
    pipe.send(urls)
    await asyncio.Event().wait()


async def _ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await writer.drain()
    with contextlib.suppress(OSError):
        await reader.read(4096)
    writer.close()
