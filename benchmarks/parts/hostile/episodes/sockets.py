"""Clients that misuse connections to the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from benchmarks.parts.hostile.episodes.catalogue import behaviour
from benchmarks.parts.hostile.episodes.scene import TOKENS, Scene
from benchmarks.parts.hostile.episodes.turns import behave

NUM_CONNECTIONS, NUM_SLOW, NUM_PIPELINED = 1000, 50, 2000
NOISE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # how TLS begins
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x00" * 4096,
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST\r\n\r\n",
    b"\r\n" * 1000,
)


@behaviour("socket")
async def a_thousand_connections(scene: Scene) -> float:
    """A thousand connections that say nothing."""
    opened: list[asyncio.StreamWriter] = []
    try:
        for _ in range(NUM_CONNECTIONS):
            opened.append((await asyncio.open_connection("127.0.0.1", scene.port))[1])
        reward = await behave(scene)
    finally:
        for writer in opened:
            writer.transport.abort()
    scene.check(len(opened) == NUM_CONNECTIONS, f"{len(opened)} connections")
    scene.happened()
    return reward


@behaviour("socket")
async def slow_loris(scene: Scene) -> float:
    """Fifty requests that arrive byte by byte, some in the headers, some in the body."""
    head = f"POST {_path(scene)} HTTP/1.1\r\nHost: localhost\r\n".encode()
    body = f"Authorization: Bearer {scene.key}\r\nContent-Length: 9999\r\n\r\n{{".encode()
    opened = []
    for number in range(NUM_SLOW):
        _, writer = await asyncio.open_connection("127.0.0.1", scene.port)
        writer.write(head + (body if number % 2 else b"X-Slow: "))
        opened.append(writer)
    turns = asyncio.ensure_future(behave(scene))
    while not turns.done():
        for writer in opened:
            writer.write(b"a")
        await asyncio.sleep(0.02)
    for writer in opened:
        writer.transport.abort()
    scene.happened()
    return await turns


@behaviour("socket")
async def noise(scene: Scene) -> float:
    """Bytes that are no HTTP: TLS, HTTP/2, zeros, a megabyte of them."""
    for data in (*NOISE, b"A" * 2**20):
        await _sent(scene, [data])
    scene.happened()
    return await behave(scene)


@behaviour("socket")
async def smuggles(scene: Scene) -> float:
    """Two lengths, a length and chunks, a line's end in a header, chunks of negative length."""
    start = f"POST {_path(scene)} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {scene.key}\r\n"
    for lines in (
        "Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}   ",
        "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-5\r\n{}\r\n0\r\n\r\n",
        "Content-Length: -1\r\n\r\n",
        "Content-Length: 99999999999999999999999\r\n\r\n",
        "X-A: b\rc\nd\r\nContent-Length: 2\r\n\r\n{}",
    ):
        said = await _sent(scene, [(start + lines).encode()])
        scene.check(b" 200 " not in said[:20], f"{said[:100]!r} to {lines[:60]!r}")
    scene.happened()
    return await behave(scene)


@behaviour("socket")
async def reads_nothing(scene: Scene) -> float:
    """Two thousand requests on one connection, whose answers it does not read."""
    request = (
        f"POST {_path(scene)} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {scene.key}\r\n"
        "Content-Length: 2\r\n\r\n{}"
    ).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    writer.write(request * NUM_PIPELINED)
    reward = await behave(scene)
    writer.transport.abort()
    scene.happened()
    return reward


async def _sent(scene: Scene, pieces: Sequence[bytes]) -> bytes:
    """What is answered to ``pieces`` in a fifth of a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", scene.port)
    try:
        for piece in pieces:
            writer.write(piece)
        await asyncio.wait_for(writer.drain(), 0.2)
        return await asyncio.wait_for(reader.read(2**16), 0.2)
    except (TimeoutError, ConnectionError):
        return b""
    finally:
        writer.transport.abort()


def _path(scene: Scene) -> str:
    return scene.url.partition(str(scene.port))[2] + TOKENS
