"""Strangers at the ports that a run opens. They know no token and speak no protocol to its end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket as sockets
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil

from benchmarks.parts.hostile.behaviour import socket

STAY_S = 4.0  # of a connection that is held open
REPLY_WAIT_S = 0.5
MANY = 200  # connections at once
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(frozen=True)
class Listener:
    """A port on which a process of the run listens."""

    host: str
    port: int
    process: str  # what it runs


def listeners(processes: list[psutil.Process]) -> list[Listener]:
    """All TCP ports that ``processes`` listen on."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            command = " ".join(process.cmdline()[-3:])[:60]
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    host = "::1" if connection.family == sockets.AF_INET6 else "127.0.0.1"
                    found.append(Listener(host, connection.laddr.port, command))
    unique = {listener.port: listener for listener in found}
    return [unique[port] for port in sorted(unique)]


@asynccontextmanager
async def _connected(listener: Listener) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection(listener.host, listener.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def _say(listener: Listener, *parts: bytes, stay_s: float = REPLY_WAIT_S) -> int:
    """One connection that sends ``parts`` and stays for a while."""
    with contextlib.suppress(ConnectionError):
        async with _connected(listener) as (reader, writer):
            for part in parts:
                writer.write(part)
                await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(stay_s):
                    while await reader.read(2**16):
                        pass
    return 1


@socket
async def noise(listener: Listener, rng: random.Random) -> int:
    """Four kilobytes of noise, from ten connections."""
    return sum([await _say(listener, rng.randbytes(4096)) for _ in range(10)])


@socket
async def silence(listener: Listener, rng: random.Random) -> int:
    """Connections that never say anything."""
    return sum(await asyncio.gather(*(_say(listener, stay_s=STAY_S) for _ in range(20))))


@socket
async def half_a_request(listener: Listener, rng: random.Random) -> int:
    """A GET whose headers do not end."""
    return await _say(listener, b"GET /health HTTP/1.1\r\nHost: ", stay_s=STAY_S)


@socket
async def huge_header(listener: Listener, rng: random.Random) -> int:
    """A GET with a header of 64 megabytes."""
    parts = [b"GET / HTTP/1.1\r\nX: ", *[b"a" * 2**20] * 64, b"\r\n\r\n"]
    return await _say(listener, *parts)


@socket
async def many_headers(listener: Listener, rng: random.Random) -> int:
    """A GET with half a million headers."""
    parts = [b"GET / HTTP/1.1\r\n", *[b"X-Header: a\r\n" * 5000] * 100, b"\r\n"]
    return await _say(listener, *parts)


@socket
async def wrong_tokens(listener: Listener, rng: random.Random) -> int:
    """Requests for weights with tokens that are not the run's."""
    path = b"GET /v0/chunk-00000.safetensors HTTP/1.1\r\nHost: a\r\n"
    tokens = [b"", b"Bearer ", b"Bearer " + rng.randbytes(24).hex().encode(), b"Basic YTph",
              b"Bearer \xff\xfe", b"Bearer " + b"a" * 60_000]  # fmt: skip
    heads = [path + b"Authorization: " + token + b"\r\n\r\n" for token in tokens]
    return sum([await _say(listener, head) for head in heads])


@socket
async def other_paths(listener: Listener, rng: random.Random) -> int:
    """Requests for files that are no weights."""
    paths = [b"/../../etc/passwd", b"/%2e%2e/owner", b"/v0/..%2fannouncement", b"//", b"*",
             b"/v0/chunk-00000.safetensors\x00", b"http://localhost/",
             b"/" + b"a" * 60_000]  # fmt: skip
    return sum([await _say(listener, b"GET " + path + b" HTTP/1.1\r\n\r\n") for path in paths])


@socket
async def slowloris(listener: Listener, rng: random.Random) -> int:
    """Two hundred connections that send a byte of a header now and then."""

    async def drip() -> int:
        with contextlib.suppress(ConnectionError):
            async with _connected(listener) as (_, writer):
                writer.write(b"GET / HTTP/1.1\r\n")
                for _ in range(int(STAY_S / 0.5)):
                    writer.write(b"X")
                    await writer.drain()
                    await asyncio.sleep(0.5)
        return 1

    return sum(await asyncio.gather(*(drip() for _ in range(MANY))))


@socket
async def tls_handshake(listener: Listener, rng: random.Random) -> int:
    """The beginning of a TLS handshake."""
    return await _say(
        listener, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500)
    )


@socket
async def reset_storm(listener: Listener, rng: random.Random) -> int:
    """Two hundred connections that are reset at once."""
    for _ in range(MANY):
        with contextlib.suppress(ConnectionError):
            async with _connected(listener) as (_, writer):
                sock = writer.get_extra_info("socket")
                linger = struct.pack("ii", 1, 0)
                sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, linger)
                writer.write(b"\x00")
                writer.transport.abort()
    return MANY


@socket
async def long_frames(listener: Listener, rng: random.Random) -> int:
    """Length prefixes of up to 2^63 bytes, little and big endian, with a few bytes behind them."""
    lengths = [struct.pack(form, value) for form in ("<Q", ">Q") for value in (2**31, 2**40, 2**63)]
    frames = [bytes([kind]) + length + b"abc" for kind in (0, 1, 8) for length in lengths]
    return sum(await asyncio.gather(*(_say(listener, frame) for frame in frames)))


@socket
async def endless_upload(listener: Listener, rng: random.Random) -> int:
    """A POST of 64 megabytes that announces a petabyte."""
    head = b"POST / HTTP/1.1\r\nContent-Length: 1000000000000000\r\n\r\n"
    return await _say(listener, head, *[b"\x00" * 2**20] * 64)


@socket
async def store_commands(listener: Listener, rng: random.Random) -> int:
    """What a client of torch's TCP store says first, then a command for a key without an end."""
    hello = b"\x00" + struct.pack("<I", 0x3C85F7CE)
    key = struct.pack("<Q", 2**40)
    return sum([await _say(listener, hello, bytes([command]) + key) for command in range(1, 16)])
