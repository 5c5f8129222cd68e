"""The gateway's process: an HTTP server for environments, and a socket to the trainer's process."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from aiohttp import ClientSession, web

from easyrl.gateway.messages import (
    NO_TEMPLATE,
    Ask,
    Ready,
    Request,
    Settings,
    decode_orders,
    decode_settings,
    encode,
)
from easyrl.gateway.prompts import template_continues
from easyrl.gateway.rendering import Renderer
from easyrl.gateway.server import Gateway
from easyrl.inference_client.fetching.fetcher_process import endpoint_session
from easyrl.runtime.frames import FrameSplitter, frame
from easyrl.runtime.garbage import collect_rarely
from easyrl.runtime.machine import allow_open_files, limit_memory
from easyrl.runtime.workers.child_process import HEARTBEAT_S

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENTRY = f"{__name__}:gateway_main"
HOST = "127.0.0.1"
ORDERS_BYTES = 2**18  # read at once
MEMORY_SHARE = 0.25  # of the machine's: what floods it is to end here, and not the trainer
BYTES_PER_BYTE = 220  # of memory, for a text that is tokenised; measured (tokenizers 0.23)
BYTES_PER_PARSED_BYTE = 2  # ... that waits as an object
# A request that an endpoint has already is told with others: each message wakes the trainer's
# process, beside the training loop.
SENT_AHEAD_S = 0.1
BACKLOG = 1024  # connections that wait to be accepted


def gateway_main(connection: socket.socket) -> None:
    """What the process runs, until the other end of ``connection`` is closed."""
    allow_open_files()
    memory = limit_memory(MEMORY_SHARE)
    _do_without_torch()
    # a traceback for all bytes that are no HTTP: a client could fill the run's log with them; what
    # fails in our own handlers is logged there
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    asyncio.run(serve(connection, memory))


def _do_without_torch() -> None:
    """transformers has a tokenizer without it too, in half the time and memory."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would say that it is missing
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]


async def serve(connection: socket.socket, memory: int | None = None) -> None:
    """Serves what the first message says, until ``connection``'s other end is closed; ``memory``:
    bytes that this process may have, None: any number."""
    reader, writer = await asyncio.open_unix_connection(sock=connection)
    frames, gateway, runner, http = FrameSplitter(), None, None, endpoint_session()
    try:
        while data := await reader.read(ORDERS_BYTES):
            for payload in frames.feed(data):
                if gateway is not None:
                    for order in decode_orders(payload):
                        gateway.obey(order)
                    continue
                outbox = _Outbox(writer)
                settings = within(decode_settings(payload), memory)
                gateway, problem = _gateway(settings, outbox, http)
                runner, port = await _started(gateway)
                collect_rarely()
                outbox.send(Ready(port, problem, gateway.tool_parser))
                beating = asyncio.create_task(_beat(outbox, gateway))
                beating.add_done_callback(lambda task: task.cancelled() or task.result())
    except ConnectionError:
        pass  # the trainer's process has died
    finally:
        if runner is not None:
            beating.cancel()
            await runner.cleanup()
        await http.close()
        writer.close()


def within(settings: Settings, memory: int | None) -> Settings:
    """``settings`` with limits of bodies that ``memory`` bytes are enough for: those that are
    rendered at a time, and those that wait for them."""
    if memory is None:
        return settings
    return msgspec.structs.replace(
        settings,
        max_body_bytes=min(settings.max_body_bytes, memory // (2 * BYTES_PER_BYTE)),
        max_long_bytes=min(settings.max_long_bytes, memory // (4 * BYTES_PER_PARSED_BYTE)),
    )


def _gateway(
    settings: Settings, outbox: _Outbox, http: ClientSession
) -> tuple[Gateway, str | None]:
    """The gateway, and why its template cannot continue what was sampled."""
    tokenizer = read_tokenizer(Path(settings.tokenizer))
    renderer: Renderer | None = None
    problem: str | None = NO_TEMPLATE
    if settings.chat_template is not None or tokenizer.chat_template is not None:
        renderer = Renderer(
            tokenizer,
            settings.chat_template,
            settings.chat_template_kwargs,
            end_ids=settings.vocabulary.end_ids,
            max_context=settings.max_context,
        )
        problem = template_continues(renderer)
    return Gateway(settings, renderer, outbox.send, http), problem


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


async def _started(gateway: Gateway) -> tuple[web.AppRunner, int]:
    """The running server, and its port: the system's choice."""
    runner = web.AppRunner(gateway.app(), access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    listener = socket.create_server((HOST, 0), backlog=BACKLOG)
    await web.SockSite(runner, listener, backlog=BACKLOG).start()
    port: int = listener.getsockname()[1]
    return runner, port


async def _beat(outbox: _Outbox, gateway: Gateway) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_S)
        gateway.close_idle()
        outbox.beat()


class _Outbox:
    """What goes to the trainer's process: together, what one turn of the loop has to say, and
    before that, in its order, what could wait."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer, self._requests = writer, list[Request]()
        self._is_due = False
        self._later: asyncio.TimerHandle | None = None

    def send(self, request: Request) -> None:
        self._requests.append(request)
        loop = asyncio.get_running_loop()
        if isinstance(request, Ask) and request.ahead is not None:
            if self._later is None:
                self._later = loop.call_later(SENT_AHEAD_S, self.beat)
        elif not self._is_due:
            self._is_due = True
            loop.call_soon(self.beat)

    def beat(self) -> None:
        """Sends what there is, if nothing an empty list."""
        requests, self._requests = self._requests, []
        if self._later is not None:
            self._later.cancel()
        self._later, self._is_due = None, False
        self._writer.write(frame(encode(requests)))
