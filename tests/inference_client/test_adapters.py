"""Adapters at an endpoint: what is sent, what is refused by name, and a name that is gone."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from easyrl.config import SamplingConfig
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.adapters import (
    AdapterLimits,
    adapter_limits,
    load_adapter,
    send_adapter,
    unload_adapter,
)
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import (
    EndpointUnavailable,
    MalformedResponse,
    NoSuchModel,
    PromptRejected,
    RequestRejected,
)
from easyrl.inference_client.fetching.fetcher_pool import FetcherPool
from easyrl.inference_client.fetching.fetcher_process import local_fetch
from easyrl.inference_client.lora_ranks import least_max_rank
from easyrl.inference_client.pool.canary_prompt import CanaryPrompt
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.fleet import Fleet
from easyrl.schema import Completion
from tests.inference_client.fake_endpoint import FakeEndpoint, status
from tests.inference_client.pool_cases import ask, pool_of, repairer, servers

PROMPT = np.array([5, 6, 7], dtype=np.int32)
SAMPLING = SamplingConfig(max_tokens=3)
LIMITS = AdapterLimits(16, ["q_proj", "down_proj"], None)


class Workers:
    """A server whose workers answer as ``answers`` says; notes what it was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, dict[str, Any]]] = []
        self.answers: list[Any] = []
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        self.sent.append((request.path, await request.json()))
        return web.json_response({"results": self.answers}, status=self.status)


@pytest.fixture
async def workers() -> AsyncIterator[tuple[Workers, EndpointClient]]:
    server, app = Workers(), web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield server, EndpointClient(url, session)
    await runner.cleanup()


@pytest.mark.parametrize(
    "rank, targets, said",
    [
        (16, ["q_proj", "layers.1.mlp.down_proj"], None),
        (17, ["q_proj"], "up to rank 16, model.lora.rank is 17: start it with --max-lora-rank 32"),
        (8, ["q_proj", "v_proj"], "no adapter on v_proj, only on q_proj, down_proj"),
    ],
)
def test_what_an_endpoint_cannot_serve_is_told_with_the_remedy(
    rank: int, targets: list[str], said: str | None
) -> None:
    refusal = LIMITS.refusal(rank, targets)
    assert refusal is None if said is None else said in str(refusal)


def test_a_rank_is_rounded_up_to_one_that_vllm_knows() -> None:
    assert [least_max_rank(r) for r in (1, 2, 8, 9, 300, 512, 513)] == [1, 8, 8, 16, 320, 512, 512]


async def test_the_limits_of_all_workers_hold(workers: tuple[Workers, EndpointClient]) -> None:
    server, client = workers
    server.answers = [
        {"max_rank": 16, "modules": ["q_proj"], "problem": None},
        {"max_rank": 8, "modules": ["q_proj", "o_proj"], "problem": "was started without"},
    ]
    limits = await adapter_limits(client)
    assert limits == AdapterLimits(8, ["q_proj", "o_proj"], "was started without")
    assert "takes no adapters: it was started without" in str(limits.refusal(1, []))
    for wrong in ([], [{"max_rank": "8", "modules": [], "problem": None}], [None] * 2):
        server.answers = wrong
        with pytest.raises(MalformedResponse, match="collective_rpc"):
            await adapter_limits(client)
    server.status = 500  # no such method
    with pytest.raises(EndpointUnavailable):
        await adapter_limits(client)


async def test_an_adapter_is_sent_loaded_proved_and_unloaded_by_name(
    workers: tuple[Workers, EndpointClient],
) -> None:
    server, client = workers
    server.answers = [{"transport": "file"}]
    chunk = {"file": "chunk-00000.safetensors", "num_bytes": 4, "checksums": {}}
    await send_adapter(client, "run-0-1", 4, "run-0-1", [chunk], begins=True)
    await load_adapter(client, "run-0-1")
    server.answers = [{"slices": {}, "problems": {"a": "b"}, "transport": "file"}]
    (proof,) = await client.prove_weights(bytes(32), {"a": ("F32", [1])}, "run-0-1")
    await unload_adapter(client, "run-0-1")
    assert proof.problems == {"a": "b"}
    (_, update), (load, loaded), (_, asked), (unload, unloaded) = server.sent
    assert update["method"] == "easyrl_receive_adapter"
    assert json.loads(update["kwargs"]["update"]) == {
        "adapter": "run-0-1",
        "rank": 4,
        "begins": True,
        "artifact": "run-0-1",
        "chunks": [chunk],
    }
    assert load == "/v1/load_lora_adapter"
    assert loaded == {"lora_name": "run-0-1", "lora_path": "easyrl:run-0-1"}
    assert asked["method"] == "easyrl_prove_adapter" and asked["kwargs"]["adapter"] == "run-0-1"
    assert all(isinstance(value, str) for value in asked["kwargs"].values())
    assert (unload, unloaded) == ("/v1/unload_lora_adapter", {"lora_name": "run-0-1"})


async def test_requests_name_the_adapter_and_a_missing_one_is_told() -> None:
    missing = status(404, "The model `a` does not exist")
    async with FakeEndpoint() as endpoint, aiohttp.ClientSession() as session:
        client = EndpointClient(endpoint.url, session)
        await client.generate(PROMPT, SAMPLING, 1)
        await client.generate(PROMPT, SAMPLING, 1, model="a")
        assert [request.get("model") for request in endpoint.requests] == [None, "a"]
        endpoint.faults += [missing, missing]
        with pytest.raises(NoSuchModel, match="does not exist"):
            await client.generate(PROMPT, SAMPLING, 1, model="a")
        with pytest.raises(RequestRejected) as found:  # of one that was asked for none
            await client.generate(PROMPT, SAMPLING, 1)
        assert not isinstance(found.value, NoSuchModel)


async def test_a_prompt_is_not_to_blame_where_the_adapter_is_gone() -> None:
    """It has restarted between the refusal and the canary prompt."""
    url = "http://one"

    async def fetch(*_: object) -> Completion:
        raise NoSuchModel(url, "The model `a` does not exist")

    canary = CanaryPrompt(fetch, 5.0)
    one = Mock(spec=Endpoint, url=url, context=None, owes_canary=None)
    endpoint = cast(Endpoint, one)
    pool = cast(EndpointPool, SimpleNamespace(canary=canary))
    refusal = PromptRejected(url, "too odd")
    problem = await EndpointPool._look_into(pool, endpoint, refusal, SAMPLING)
    assert isinstance(problem, EndpointUnavailable) and "has lost its adapter" in problem.reason
    assert one.owes_canary is None
    one.owes_canary = SAMPLING  # it is healthy for who brings it the adapter, and owes it still
    await Fleet._pay_canary(cast(Fleet, SimpleNamespace(canary=canary)), endpoint)
    assert one.owes_canary is SAMPLING


async def test_fetchers_name_the_adapter_of_each_endpoint() -> None:
    names = AdapterNames()
    async with FakeEndpoint() as one, FakeEndpoint() as other:
        fetch = FetcherPool(1, adapters=names)
        await fetch.start()
        try:
            for name in ("v1", "v2", None):
                names.learn(one.url, name)
                await fetch(one.url, PROMPT, SAMPLING, 1)
                await fetch(other.url, PROMPT, SAMPLING, 1)
        finally:
            await fetch.close()
        assert [request.get("model") for request in one.requests] == ["v1", "v2", None]
        assert [request.get("model") for request in other.requests] == [None] * 3


async def test_an_endpoint_that_has_lost_its_adapter_has_to_prove_itself_again() -> None:
    """It is no refused prompt: its weights are gone, and it is repaired."""
    (endpoint,) = servers(1)
    names = AdapterNames()
    async with aiohttp.ClientSession() as session:
        fetch = local_fetch(session, adapters=names)
        async with pool_of(endpoint, fetch=fetch) as pool:
            pool.set_repair(repair := repairer(pool))
            names.learn(endpoint.url, "v1")
            endpoint.faults.append(status(404, "The model `v1` does not exist"))
            completion = await ask(pool, 1)
            assert repair.repaired == [completion.endpoint] == [endpoint.url]
            assert pool.endpoints[0].down is None and pool.endpoints[0].num_failures == 1
