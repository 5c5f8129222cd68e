"""Strangers at the ports that a run opens. They know no token and speak no protocol to its end."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket as sockets
import struct
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import psutil

from benchmarks.parts.hostile.behaviour import socket
from benchmarks.parts.store_protocol import HELLO, is_store

STAY_S = 4.0  # of a connection that is held open
REPLY_WAIT_S = 0.5
MANY = 200  # connections at once
WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


WEIGHTS, MASTER_STORE, OTHER_STORE = "weights", "store at MASTER_PORT", "other store"


@dataclass(frozen=True)
class Listener:
    """A port on which a process of the run listens; ``kind`` is one of ``kinds_of``."""

    host: str
    port: int
    kind: str


def kinds_of(num_ranks: int) -> frozenset[str]:
    """What listens in a run of so many ranks, several, that streams its weights."""
    gloo = {_gloo(str(rank)) for rank in range(num_ranks)}
    return frozenset({WEIGHTS, MASTER_STORE, OTHER_STORE, *gloo})


def listeners(
    processes: list[psutil.Process], known: dict[tuple[int, int], Listener]
) -> list[Listener]:
    """All TCP ports that ``processes`` listen on; ``known`` are those seen before, by process."""
    found: dict[int, tuple[psutil.Process, str]] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for connection in process.net_connections("tcp"):
                address = connection.laddr
                if connection.status == psutil.CONN_LISTEN and address.port not in found:
                    found[address.port] = process, WILDCARDS.get(address.ip, address.ip)
    new = {
        (process.pid, port): (process, host, port)
        for port, (process, host) in found.items()
        if (process.pid, port) not in known
    }
    with ThreadPoolExecutor(len(new) or 1) as pool:  # gloo lets each wait for an answer
        told = pool.map(lambda place: _listener(*place), new.values())
        known.update((key, each) for key, each in zip(new, told, strict=True) if each is not None)
    seen = [(process.pid, port) for port, (process, _) in sorted(found.items())]
    return [known[key] for key in seen if key in known]


def _listener(process: psutil.Process, host: str, port: int) -> Listener | None:
    """None if the process has ended."""
    try:
        command, environment = " ".join(process.cmdline()), process.environ()
    except psutil.Error:
        return None
    kind = command[-60:]
    if "chunk_server" in command:
        kind = WEIGHTS
    elif "easyrl.train" in command and str(port) == environment.get("MASTER_PORT"):
        kind = MASTER_STORE
    elif "easyrl.train" in command:
        kind = OTHER_STORE if is_store(host, port) else _gloo(environment.get("RANK", "0"))
    return Listener(host, port, kind)


def _gloo(rank: str) -> str:
    return f"gloo of rank {rank}"


async def _talk(listener: Listener, talk: Talk) -> int:
    """How many connections came about, 0 or 1; ``talk`` says what there is to say in it."""
    try:
        reader, writer = await asyncio.open_connection(listener.host, listener.port)
    except OSError:
        return 0  # nobody was met
    try:
        with contextlib.suppress(ConnectionError):
            await talk(reader, writer)
    finally:
        writer.close()
    return 1


async def _say(listener: Listener, *parts: bytes, stay_s: float = REPLY_WAIT_S) -> int:
    """One connection that sends ``parts`` and stays for a while; whether it came about."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(stay_s):
                while await reader.read(2**16):
                    pass

    return await _talk(listener, talk)


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

    async def drip(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"GET / HTTP/1.1\r\n")
        for _step in range(int(STAY_S / 0.5)):
            writer.write(b"X")
            await writer.drain()
            await asyncio.sleep(0.5)

    return sum(await asyncio.gather(*(_talk(listener, drip) for _ in range(MANY))))


@socket
async def tls_handshake(listener: Listener, rng: random.Random) -> int:
    """The beginning of a TLS handshake."""
    return await _say(
        listener, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500)
    )


@socket
async def reset_storm(listener: Listener, rng: random.Random) -> int:
    """Two hundred connections that are reset at once."""

    async def reset(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        linger = struct.pack("ii", 1, 0)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(sockets.SOL_SOCKET, sockets.SO_LINGER, linger)
        writer.write(b"\x00")
        writer.transport.abort()

    return sum([await _talk(listener, reset) for _ in range(MANY)])


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
    key = struct.pack("<Q", 2**40)
    return sum([await _say(listener, HELLO, bytes([command]) + key) for command in range(1, 16)])
