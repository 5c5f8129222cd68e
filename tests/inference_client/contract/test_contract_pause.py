"""Pause and resume with requests in flight: finished, frozen or aborted, as the mode says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import MalformedResponse
from tests.inference_client.contract.calls import (
    GENERATED_TOKENS,
    LOGPROB_TOLERANCE,
    PROMPT,
    gauge,
    in_flight,
    logprob_error,
    long_response,
    sample,
)
from tests.inference_client.contract.conftest import Server

LENGTH = 1800  # long enough to be in flight when the pause comes


@pytest.fixture(autouse=True)
async def resumed(client: EndpointClient) -> AsyncIterator[None]:
    """Whatever a test leaves behind, the next one finds a server at work."""
    yield
    await client.resume()


async def test_wait_finishes_what_is_in_flight(
    client: EndpointClient, http: aiohttp.ClientSession
) -> None:
    tasks = await in_flight(client, http, 4, LENGTH)
    await client.pause("wait")
    async with asyncio.timeout(5):  # they are finished, their answers may be on the way
        responses = await asyncio.gather(*tasks)
    assert all(len(completion.token_ids) == LENGTH for (completion,) in responses)


async def test_keep_freezes_what_is_in_flight(
    server: Server, client: EndpointClient, http: aiohttp.ClientSession
) -> None:
    for _ in range(5):
        tasks = await in_flight(client, http, 2, LENGTH)
        await client.pause("keep")
        frozen = await gauge(http, server.url, GENERATED_TOKENS)
        await asyncio.sleep(0.4)
        assert await gauge(http, server.url, GENERATED_TOKENS) == frozen
        held = not any(task.done() for task in tasks)
        await client.resume()
        if held:
            break
        await asyncio.gather(*tasks)  # finished before the pause was heard: once more
    assert held
    (first,), _ = await asyncio.gather(*tasks)
    # Not the tokens of a response that was alone: decoded together, rounding may choose another.
    assert len(first.token_ids) == LENGTH
    assert logprob_error(server.model, PROMPT, first) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("by", ["pause", "abort_requests"])
async def test_abort_ends_what_is_in_flight_as_unusable(
    client: EndpointClient, http: aiohttp.ClientSession, by: str
) -> None:
    for _ in range(4):
        tasks = await in_flight(client, http, 4, LENGTH)
        await (client.pause("abort") if by == "pause" else client.abort_requests())
        async with asyncio.timeout(10):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        await client.resume()
        if not any(isinstance(result, list) for result in results):
            break
        # else a busy machine has finished them before it heard of the abort: once more
    for result in results:
        assert isinstance(result, MalformedResponse) and "'abort'" in result.reason
    (completion,) = await sample(client, **long_response(8))
    assert len(completion.token_ids) == 8


@pytest.mark.parametrize("mode", ["wait", "keep", "abort"])
async def test_what_comes_during_a_pause_waits_for_its_end(
    client: EndpointClient, mode: Any
) -> None:
    await client.pause(mode)
    waiting = asyncio.create_task(sample(client, seed=4, **long_response(8)))
    done, _ = await asyncio.wait([waiting], timeout=0.3)
    assert not done
    await client.resume()
    async with asyncio.timeout(10):
        (completion,) = await waiting
    assert len(completion.token_ids) == 8


async def test_pausing_and_resuming_twice_does_nothing_more(client: EndpointClient) -> None:
    for _ in range(2):
        await client.pause("wait")
    for _ in range(2):
        await client.resume()
    (completion,) = await sample(client, **long_response(8))
    assert len(completion.token_ids) == 8


async def test_an_idle_server_resets_its_prefix_cache(client: EndpointClient) -> None:
    await sample(client, **long_response(40))
    assert await client.reset_prefix_cache()
