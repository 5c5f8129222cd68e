"""The embedded server in a process that tells what it spent, and how much of that on decoding."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from easyrl.inference_client.servers.embedded.batch import RunningBatch
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.server import start_site

# Methods of the batch: whether what they do is decoding. Not every revision has all of them.
IS_DECODING = {"step": True, "_prefill": True, "_start": False, "remove": False}


class DecodingClock:
    """Processor seconds of the engine's thread in decoding."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._runs = False
        self._since_s = 0.0

    def timed(self, method: Callable[..., Any], is_decoding: bool) -> Callable[..., Any]:
        """``method``, in which the clock runs or stands still."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._switch(is_decoding)
            try:
                return method(*args, **kwargs)
            finally:
                self._switch(before)

        return run

    def _switch(self, runs: bool) -> bool:
        now_s = time.thread_time()
        if self._runs:
            self.seconds += now_s - self._since_s
        before, self._runs, self._since_s = self._runs, runs, now_s
        return before


def serve(connection: socket.socket) -> None:
    """Is told the model's folder, tells its port, then [all, decoding] seconds whenever asked.

    Decoding is the forward over prompts and the decode step, without taking sequences into the
    batch and out of it: what a sequence costs before and after counts as the response's.
    """
    model = Path(connection.recv(2**16).decode())
    torch.set_num_threads(1)
    decoding, methods = DecodingClock(), vars(RunningBatch)
    for name, is_decoding in IS_DECODING.items():
        if name in methods:
            setattr(RunningBatch, name, decoding.timed(methods[name], is_decoding))
    engine = EmbeddedEngine(model, max_model_len=128)
    try:
        asyncio.run(_serve(engine, connection, decoding))
    finally:
        engine.close()


async def _serve(
    engine: EmbeddedEngine, connection: socket.socket, decoding: DecodingClock
) -> None:
    loop = asyncio.get_running_loop()
    runner, url = await start_site(EmbeddedServer(engine, "random").app(), "127.0.0.1", 0)
    gc.collect()
    gc.freeze()  # as easyrl serve does
    connection.sendall(url.encode())
    connection.setblocking(False)
    while await loop.sock_recv(connection, 1):
        spent = msgspec.json.encode([time.process_time(), decoding.seconds])
        await loop.sock_sendall(connection, spent)
    await runner.cleanup()
