"""A server whose answers are written byte by byte, past any HTTP library's own checks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


def http(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    """A whole answer."""
    fixed = [f"Content-Length: {len(body)}", "Connection: close"]
    lines = [f"HTTP/1.1 {status}", *fixed, *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


class RawServer:
    """Sends ``answer`` to every request, then closes the connection.

    ``answer`` may be bytes or a coroutine function that is given the connection; ``requests`` are
    the heads of what was asked.
    """

    answer: bytes | Script = b""

    async def __aenter__(self) -> RawServer:
        self.requests: list[bytes] = []
        self.num_sent = 0  # bytes that the client's side has taken
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def send_on(self, writer: asyncio.StreamWriter, block: bytes, limit: int) -> None:
        """``block`` again and again until the client hangs up or has taken ``limit`` bytes."""
        self.num_sent = 0
        while self.num_sent < limit:
            writer.write(block)
            await writer.drain()
            self.num_sent += len(block)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            self.requests.append(head)
            length = 0
            for line in head.lower().split(b"\r\n"):
                if line.startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            await reader.readexactly(length)
            if isinstance(self.answer, bytes):
                writer.write(self.answer)
            else:
                await self.answer(writer)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
