"""Waiting for a condition that another thread or process brings about; pools that are closed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from easyrl.runtime.workers.worker_pool import WorkerPool


def eventually(condition: Callable[[], object], limit_s: float = 15.0) -> bool:
    """Whether ``condition`` becomes true within ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            return False
        time.sleep(0.01)
    return True


def wait_until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    assert eventually(condition, limit_s), f"the condition was not met within {limit_s:g} s"


async def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    """``wait_until`` in a loop that goes on meanwhile."""
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def started(pool: WorkerPool) -> AsyncIterator[WorkerPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()
