"""Strangers know what they have met, and count the connections that came about."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys

import psutil
import pytest

from benchmarks.parts.hostile.behaviour import SocketBehaviour
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.sockets import WEIGHTS, Listener, kinds_of, listeners
from benchmarks.parts.store_protocol import is_store
from easyrl.runtime.machine import free_port
from easyrl.runtime.rank_store import serve_store

# Rank 1 of 2 as easyrl.train has it: gloo, and the ports that rank 0 opens for both.
RANK = """
import sys
from easyrl.engines.process_group import start_process_group
start_process_group()
import torch.distributed as dist
from easyrl.runtime.collectives import Collectives
from easyrl.runtime.ranks import Ranks
collectives = Collectives(Ranks.data_parallel(dist.get_rank(), dist.get_world_size()))
store = collectives.open_store()
collectives.all_gather(None)
print("ready", flush=True)
sys.stdin.read()
"""


def test_what_ranks_listen_at_is_told_apart() -> None:
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, "easyrl.train"],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == b"ready\n"
        known: dict[tuple[int, int], Listener] = {}
        processes = [psutil.Process(rank.pid) for rank in ranks]
        found = listeners(processes, known)
        assert len(known) == len(found) and listeners(processes, known) == found
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert {listener.kind for listener in found} == kinds_of(2) - {WEIGHTS}


def test_a_store_is_told_by_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = serve_store("localhost", wait_for_workers=False)
    assert is_store("127.0.0.1", store.port) and not is_store("127.0.0.1", free_port())
    monkeypatch.setattr("benchmarks.parts.store_protocol.ANSWER_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert not is_store("127.0.0.1", other.getsockname()[1])


@pytest.mark.parametrize("name", ["noise", "reset-storm", "long-frames", "store-commands"])
def test_connections_that_came_about_are_counted(name: str) -> None:
    behaviour = BEHAVIOURS[name]
    assert isinstance(behaviour, SocketBehaviour)

    async def meet() -> tuple[int, int]:
        met = 0

        def taken(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal met
            met += 1
            writer.close()

        server = await asyncio.start_server(taken, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            made = await behaviour.visit(Listener("127.0.0.1", port, ""), random.Random(0))
            return made, met

    made, met = asyncio.run(meet())
    assert made >= met > 0
