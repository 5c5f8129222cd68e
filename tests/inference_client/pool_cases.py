"""What the tests of the pool share: servers with a pool over them, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np

from easyrl.config import InferenceConfig, SamplingConfig
from easyrl.inference_client.fetching.fetcher_process import local_fetch
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.schema import Completion
from tests.inference_client.fake_endpoint import FakeEndpoint
from tests.waiting import until as until

PROMPT = np.array([5, 6, 7], dtype=np.int32)
SAMPLING = SamplingConfig(max_tokens=8)
V1, V2 = "run:0:1", "run:0:2"
POOL_ARGUMENTS = ("fetch", "streamed", "num_shares", "update_timeout_s")


@contextlib.asynccontextmanager
async def pool_of(
    *servers: FakeEndpoint, confirmed: bool = True, repair: Any = None, **settings: Any
) -> AsyncIterator[EndpointPool]:
    """Servers and a pool over them; each endpoint has confirmed what its server serves.

    Health probes come every 50 ms, with 0.3 s for the answer, unless ``settings`` say otherwise.
    """
    times = {"back_off_s": 0.01, "probe_timeout_s": 0.3}
    times |= {key: settings.pop(key) for key in times if key in settings}
    arguments = {key: settings.pop(key) for key in POOL_ARGUMENTS if key in settings}
    settings = {"health_interval_s": 0.05} | settings
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        config = InferenceConfig(endpoints=[server.url for server in servers], **settings)
        fetch = arguments.pop("fetch", None) or local_fetch(session)
        pool = EndpointPool(config, fetch, **arguments)
        pool.back_off_s, pool.probe_timeout_s = times.values()
        if repair is not None:
            pool.set_repair(repair)
        await pool.start()
        stack.push_async_callback(pool.close)
        if confirmed:
            for endpoint, server in zip(pool.endpoints, servers, strict=True):
                pool.confirm(endpoint, server.version)
        yield pool


def ask(pool: EndpointPool, seed: int, version: str | None = V1) -> asyncio.Task[Completion]:
    """A group of one sample."""
    return asyncio.ensure_future(sample(pool, PROMPT, SAMPLING, seed, version))


async def sample(
    pool: EndpointPool,
    prompt: np.ndarray,
    sampling: SamplingConfig,
    seed: int,
    version: str | None = V1,
) -> Completion:
    async with pool.group(len(prompt), sampling.max_tokens / 2, version, num_samples=1) as group:
        return await pool.generate(prompt, sampling, seed, group)


def seeds(server: FakeEndpoint) -> list[int]:
    return [request["sampling_params"]["seed"] for request in server.requests]


def servers(count: int, **settings: Any) -> list[FakeEndpoint]:
    return [FakeEndpoint(version=V1, **settings) for _ in range(count)]


def repairer(pool: EndpointPool, version: str = V1) -> Any:
    """A repair that works; the list of the URLs that it was called for is its ``repaired``."""

    async def repair(endpoint: Endpoint) -> None:
        repair.repaired.append(endpoint.url)  # type: ignore[attr-defined]
        await endpoint.client.finish_weight_update(version)
        pool.confirm(endpoint, version)

    repair.repaired = []  # type: ignore[attr-defined]
    return repair


async def open_all(tasks: list[asyncio.Task], *group: FakeEndpoint) -> None:
    """Lets everything through until the tasks are done."""
    for server in group:
        server.gated = False
        for gate in server.gates:
            gate.set()
    await asyncio.wait_for(asyncio.gather(*tasks), 20)
