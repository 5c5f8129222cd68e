"""The embedded server in a process that tells what it spent, and how much of that on decoding."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from easyrl.inference_client.servers.embedded.batch import RunningBatch
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.routes import EmbeddedServer
from easyrl.inference_client.servers.embedded.server import start_site


@dataclass
class Spent:
    """Processor seconds of the engine's thread inside what it is added to."""

    seconds: float = 0.0

    def add(self, method: Callable[..., Any], sign: float = 1.0) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.thread_time()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += sign * (time.thread_time() - start_s)

        return timed


def serve(connection: socket.socket) -> None:
    """Is told the model's folder, tells its port, then [all, decoding] seconds whenever asked.

    Decoding is the forward over prompts and the decode step without taking sequences out of the
    batch; what a sequence costs before and after counts as the response's.
    """
    model = Path(connection.recv(2**16).decode())
    torch.set_num_threads(1)
    decoding, patched = Spent(), vars(RunningBatch)
    for name, sign in (("step", 1.0), ("_prefill", 1.0), ("remove", -1.0)):
        setattr(RunningBatch, name, decoding.add(patched[name], sign))
    engine = EmbeddedEngine(model, max_model_len=128)
    try:
        asyncio.run(_serve(engine, connection, decoding))
    finally:
        engine.close()


async def _serve(engine: EmbeddedEngine, connection: socket.socket, decoding: Spent) -> None:
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
