"""A run whose endpoints are not up yet says within seconds what it waits for, at default settings.

Nobody who listens is known at once, but may be a server that still loads its model.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator

import pytest

from benchmarks.bad_input import MOST_SECONDS
from benchmarks.parts.bad_input.rule import Outcome, unclear
from easyrl.config import InferenceConfig
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.pool import fleet
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from tests.inference_client.fake_endpoint import FakeEndpoint


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@contextlib.asynccontextmanager
async def pool_at(url: str) -> AsyncIterator[EndpointPool]:
    """With the default configuration."""

    async def fetch(*_: object) -> object:
        raise AssertionError("nothing is generated")

    config = InferenceConfig(endpoints=[url])
    pool = EndpointPool(config, fetch, api_keys=ApiKeys.read(config))
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


async def what_is_said(pool: EndpointPool, caplog: pytest.LogCaptureFixture) -> str:
    """The first warning, while the pool goes on waiting."""
    waiting = asyncio.ensure_future(pool.wait_until_healthy())
    try:
        async with asyncio.timeout(MOST_SECONDS):
            while not (said := [r for r in caplog.records if r.levelno >= logging.WARNING]):
                await asyncio.sleep(0.02)
        assert not waiting.done()
        return said[0].getMessage()
    finally:
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_nobody_listens(caplog) -> None:
    url = closed_port()
    async with pool_at(url) as pool:
        said = await what_is_said(pool, caplog)
    assert unclear(Outcome(2, said, 0.0), ["inference.endpoints", url], 2, "no folder") == []
    assert "Cannot connect" in said and "300 s (inference.startup_timeout_s)" in said


async def test_a_server_that_still_loads(caplog) -> None:
    async with FakeEndpoint(healthy=False) as server, pool_at(server.url) as pool:
        said = await what_is_said(pool, caplog)
        assert (
            unclear(Outcome(2, said, 0.0), ["inference.endpoints", server.url], 2, "no folder")
            == []
        )
        assert "503" in said


async def test_of_the_runs_own_servers_nothing_is_said(caplog, monkeypatch) -> None:
    monkeypatch.setattr(fleet, "SAY_AFTER_S", 0.0)
    url = closed_port()
    async with pool_at(url) as pool:
        waiting = asyncio.ensure_future(pool.wait_until_healthy(own=[url]))
        while "Cannot connect" not in str(pool.endpoints[0].down):
            await asyncio.sleep(0.01)
        assert not caplog.records and not waiting.done()
        waiting.cancel()
        await asyncio.wait([waiting])
