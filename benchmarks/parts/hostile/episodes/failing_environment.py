"""Environments of the runs that nothing can be made of, and of one that opens a thousand rollouts.

Loaded by path in a host process; what a run's rollouts do stands in each record.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from easyrl.environments.client import Client

IDS = [5, 6, 7]
num_open = 0


async def rollout(client: Client, prompt: Any) -> float:
    """Does what its record says."""
    does = prompt.metadata["does"]
    if does == "fail":
        await client.generate(IDS, max_tokens=2)
        raise KeyError("board")
    if does == "need a server":
        await asyncio.open_connection("127.0.0.1", 1)
    if does == "end the endpoints":
        for pid in prompt.metadata["pids"]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(0.2)
    if does == "be many":
        return await _one_of_many(client, prompt)
    made = await client.generate(IDS, max_tokens=2)
    return float(made.token_ids[0] % 3)


async def _one_of_many(client: Client, prompt: Any) -> float:
    """Says how many are open in this process."""
    global num_open
    num_open += 1
    try:
        with (Path(prompt.metadata["folder"]) / "open").open("a") as file:
            file.write(f"{num_open}\n")
        await asyncio.sleep(0.02)
        made = await client.generate([*IDS, prompt.seed % 9 + 8], max_tokens=2)
        return float(made.token_ids[0] % 3)
    finally:
        num_open -= 1
