"""Wrong input, too much of it, and clients that hang up: an answer each time, and a live server."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import aiohttp
import pytest

from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import (
    EndpointUnavailable,
    MalformedResponse,
    RequestRejected,
)
from tests.inference_client.contract.calls import (
    GENERATE,
    LOGPROB_TOLERANCE,
    PROMPT,
    gauge,
    in_flight,
    logprob_error,
    long_response,
    sample,
)
from tests.inference_client.contract.conftest import MAX_NUM_SEQS, Server
from tests.inference_client.contract.served_models import MAX_MODEL_LEN
from tests.tiny_models import VOCAB_SIZE

JSON = {"Content-Type": "application/json"}


def body(**change: Any) -> bytes:
    """A request for one token, with ``change``; None leaves a key out."""
    request = {"token_ids": list(PROMPT), "sampling_params": {"max_tokens": 1, "logprobs": 0}}
    request |= change
    return json.dumps({key: value for key, value in request.items() if value is not None}).encode()


def sampling(**params: Any) -> bytes:
    return body(sampling_params={"max_tokens": 1, "logprobs": 0} | params)


async def assert_alive(server: Server, client: EndpointClient) -> None:
    """Healthy, and right in what it answers."""
    await client.health()
    (completion,) = await sample(client, **long_response(8))
    assert logprob_error(server.model, PROMPT, completion) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(body(token_ids=[]), id="empty-prompt"),
        pytest.param(body(token_ids=None), id="no-prompt"),
        pytest.param(body(token_ids="abc"), id="text-for-ids"),
        pytest.param(body(token_ids=[1.5, 2]), id="fractional-id"),
        pytest.param(body(token_ids=[1, -1]), id="negative-id"),
        pytest.param(body(token_ids=[1, VOCAB_SIZE]), id="id-beyond-vocabulary"),
        pytest.param(body(token_ids=[1, 2**40]), id="id-beyond-int32"),
        pytest.param(body(token_ids=[1] * MAX_MODEL_LEN), id="prompt-fills-the-context"),
        pytest.param(body(token_ids=[1] * (MAX_MODEL_LEN + 1)), id="prompt-too-long"),
        pytest.param(sampling(max_tokens=-1), id="negative-max_tokens"),
        pytest.param(sampling(max_tokens=0), id="no-tokens"),
        pytest.param(sampling(max_tokens="many"), id="max_tokens-in-words"),
        pytest.param(sampling(temperature=-1), id="negative-temperature"),
        pytest.param(sampling(top_p=0), id="top_p-0"),
        pytest.param(sampling(n=0), id="no-samples"),
        pytest.param(sampling(n=100 * MAX_NUM_SEQS), id="too-many-samples"),
        pytest.param(sampling(min_tokens=5), id="min_tokens-above-max_tokens"),
        pytest.param(body(model="another"), id="unknown-model"),
        pytest.param(b"{not json", id="not-json"),
        pytest.param(b"[1, 2]", id="not-an-object"),
        pytest.param(b"", id="empty-body"),
        pytest.param(body()[:-20], id="cut-off"),
    ],
)
async def test_wrong_requests_are_refused_as_the_caller_s_fault(
    server: Server, client: EndpointClient, http: aiohttp.ClientSession, content: bytes
) -> None:
    async with http.post(server.url + GENERATE, data=content, headers=JSON) as answer:
        text = await answer.text()
    assert 400 <= answer.status < 500, text
    assert json.loads(text)  # an explanation
    await assert_alive(server, client)


async def test_our_client_tells_a_wrong_request_from_a_sick_server(client: EndpointClient) -> None:
    with pytest.raises(RequestRejected, match="(?i)length|long"):
        await sample(client, [1] * (MAX_MODEL_LEN + 1), max_tokens=1)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/no/such/route", 404), ("POST", "/v1/unknown", 404), ("GET", GENERATE, 405)],
)
async def test_unknown_routes_and_methods(
    server: Server, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, server.url + path) as answer:
        assert answer.status == status


async def test_an_unknown_pause_mode_is_refused(
    server: Server, client: EndpointClient, http: aiohttp.ClientSession
) -> None:
    async with http.post(f"{server.url}/pause?mode=nap") as answer:
        assert 400 <= answer.status < 500
    await assert_alive(server, client)


async def test_overload_is_answered_or_put_off(
    server: Server, client: EndpointClient, http: aiohttp.ClientSession
) -> None:
    """Ten times as many requests as fit: each is complete, or told to come later."""

    async def fate(seed: int) -> str:
        try:
            (completion,) = await sample(client, seed=seed, **long_response(16))
        except EndpointUnavailable as error:
            return "later" if " 503 " in error.reason or " 429 " in error.reason else error.reason
        return "complete" if len(completion.token_ids) == 16 else "incomplete"

    fates = Counter(await asyncio.gather(*(fate(seed) for seed in range(10 * MAX_NUM_SEQS))))
    assert fates.keys() <= {"complete", "later"}, fates
    assert fates["complete"] >= MAX_NUM_SEQS
    await assert_alive(server, client)
    (completion,) = await sample(client, seed=7, **long_response(16))
    assert len(completion.token_ids) == 16


async def hung_up(
    server: Server, client: EndpointClient, http: aiohttp.ClientSession, length: int
) -> float:
    """Tokens generated after ``MAX_NUM_SEQS`` clients of ``length`` tokens each hung up."""
    gone = await in_flight(client, http, MAX_NUM_SEQS, length)
    before = await gauge(http, server.url, "vllm:generation_tokens_total")
    for task in gone:
        task.cancel()
    results = await asyncio.gather(*gone, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results)
    async with asyncio.timeout(60):
        while await gauge(http, server.url, "vllm:num_requests_running") > 1:
            # figures are renewed when something is generated
            await sample(client, **long_response(4))
    return await gauge(http, server.url, "vllm:generation_tokens_total") - before


async def test_a_client_that_hangs_up_frees_its_place(
    server: Server, client: EndpointClient, http: aiohttp.ClientSession
) -> None:
    length = MAX_MODEL_LEN - 100
    generated = []
    for _ in range(8):  # on a busy machine a server can hear of it late
        generated.append(await hung_up(server, client, http, length))
        if generated[-1] < MAX_NUM_SEQS * length / 2:
            break
    else:
        raise AssertionError(f"they were generated to their end: {generated}")
    await assert_alive(server, client)


async def test_an_answer_that_is_cut_off_is_not_taken_for_one(client: EndpointClient) -> None:
    """What the contract's helper would make of half a body, as a proxy that dies leaves it."""
    from easyrl.config import SamplingConfig
    from easyrl.inference_client.responses import parse_generate_response

    whole = await client.generate(PROMPT, SamplingConfig(max_tokens=8), 1)
    for cut in (1, len(whole) // 2, len(whole) - 1):
        with pytest.raises(MalformedResponse):
            parse_generate_response(whole[:cut], client.url, len(PROMPT))
