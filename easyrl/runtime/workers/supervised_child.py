"""A child process on an asyncio loop: started when it is needed, read, and replaced when it ends.

No other thread wakes up for a message. Every method belongs to one loop, whose thread has to
outlive the child (see ``start_child``).
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, Protocol

from easyrl.runtime.frames import FrameSplitter, frame
from easyrl.runtime.workers.child_process import END_LIMIT_S, Child, start_child

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 2**18


class Splitter(Protocol):
    """Cuts a stream of bytes into messages."""

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]: ...


class SupervisedChild(asyncio.BufferedProtocol, ABC):
    """One process at a time, one after another, and the connection to it.

    ``greeting`` is the first message to each of them; see ``start_child`` for the others.
    """

    def __init__(
        self, entry: str, greeting: bytes, environment: Mapping[str, str] | None = None
    ) -> None:
        self.child: Child | None = None
        self._entry, self._greeting, self._environment = entry, greeting, environment
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._transport: asyncio.Transport | None = None
        self._why_killed: str | None = None
        self._endings: set[asyncio.Task[None]] = set()  # of processes that have yet to be gone

    def start_process(self) -> Child:
        """A new process and the socket to it."""
        return start_child(self._entry, self._environment)

    def new_splitter(self) -> Splitter:
        """For what a new process sends."""
        return FrameSplitter()

    def encoded(self, payload: bytes) -> bytes:
        """A message to the process, as bytes of the stream."""
        return frame(payload)

    def on_start(self) -> None:
        """A process has been started and can be sent messages."""

    @abstractmethod
    def on_message(self, payload: bytes) -> None: ...

    @abstractmethod
    def on_end(self, how: str) -> None:
        """The process has ended, or none could be started; the next is started on demand."""

    def ensure_started(self) -> None:
        """Starts a process if there is none. What prevents it is told by ``on_end``."""
        if self.child is not None:
            return
        loop = asyncio.get_running_loop()
        try:
            self.child = self.start_process()
        except Exception as error:  # such as no memory, no process, no file left
            loop.call_soon(self.on_end, f"none can be started: {type(error).__name__}: {error}")
            return
        self._splitter = self.new_splitter()
        connection = loop.create_unix_connection(lambda: self, sock=self.child.socket)
        self._connecting = loop.create_task(connection)

    @property
    def alive(self) -> bool:
        """Whether the process runs, is to go on, and can be sent messages."""
        child, is_usable = self.child, self._transport is not None and self._why_killed is None
        return is_usable and child is not None and child.process.poll() is None

    def send(self, *payloads: bytes) -> None:
        """To the present process, in one write; lost without one."""
        if self._transport is not None and payloads:
            self._transport.write(b"".join(map(self.encoded, payloads)))

    def kill(self, why: str) -> None:
        """Kills the process; ``on_end`` is told ``why`` when all that it had sent has been read.

        Returns at once. One that does not die is left behind after ``END_LIMIT_S``.
        """
        assert self.child is not None
        self._why_killed = why
        self.child.kill()
        asyncio.get_running_loop().call_later(END_LIMIT_S, self._leave_behind, self.child)

    async def close(self) -> None:
        """Kills the process and what is left of those before it, without ``on_end``."""
        child, self.child = self.child, None
        if child is not None:
            child.kill()
            await asyncio.wait([self._connecting])
            if self._transport is not None:
                self._transport.abort()
                self._transport = None
            self._end_all_of(child)
        while self._endings:
            await asyncio.wait(list(self._endings))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.send(self._greeting)
        self.on_start()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        for payload in self._splitter.feed(self._buffer[:nbytes]):
            self.on_message(payload)

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self.child is not None:  # else it was closed
            self._keep(self._on_lost(self.child))

    async def _on_lost(self, child: Child) -> None:
        how = self._why_killed
        if how is None:
            how = await asyncio.to_thread(child.ending)
        self._end_all_of(child)
        if self.child is child:  # else it was closed meanwhile
            self.child, self._why_killed = None, None
            self.on_end(how)

    def _leave_behind(self, child: Child) -> None:
        if self.child is child and self._transport is not None:
            self._transport.abort()  # connection_lost follows

    def _end_all_of(self, child: Child) -> None:
        """In a thread: what cannot be killed must not hold up the loop."""
        self._keep(self._wait_for_end(child))

    async def _wait_for_end(self, child: Child) -> None:
        if left := await asyncio.to_thread(child.end):
            logger.error("processes %s cannot be killed; they are left behind", left)

    def _keep(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._endings.add(task)
        task.add_done_callback(self._endings.discard)
