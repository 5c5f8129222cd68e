"""One endpoint: what is sent, what is understood, and what each failure is called."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web

from easyrl.config import RolloutConfig, SamplingConfig
from easyrl.inference_client.client import (
    GENERATE,
    EndpointClient,
    ServedModel,
    WorkerProof,
)
from easyrl.inference_client.errors import (
    AttemptsFailed,
    EndpointUnavailable,
    MalformedResponse,
    PromptRejected,
    RequestRejected,
)
from easyrl.inference_client.responses import parse_generate_response
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice, Slice
from easyrl.schema import VersionSpan
from tests.inference_client.fake_endpoint import FakeEndpoint, break_off, hang, status

REAL_RESPONSE = Path(__file__).with_name("vllm_generate_response.json").read_bytes()
PROMPT = np.array([5, 6, 7], dtype=np.int32)


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with FakeEndpoint() as server:
        yield server


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


@pytest.fixture
def client(endpoint, session) -> EndpointClient:
    return EndpointClient(endpoint.url, session)


# -- decoding ----------------------------------------------------------------------------


def test_a_real_response_of_vllm_is_understood():
    first, second = parse_generate_response(REAL_RESPONSE, "http://a", prompt_length=4)
    assert first.token_ids.tolist() == [108, 25, 94, 120] and first.token_ids.dtype == np.int32
    # As written in the file, to float32's 7 digits.
    expected = [-4.91378116607666, -4.915523052215576, -4.811619758605957, -4.464376926422119]
    np.testing.assert_allclose(first.logprobs, expected, rtol=1e-7)
    assert first.logprobs.dtype == np.float32
    assert first.finish_reason == "length" and first.truncated
    assert first.version_spans == (VersionSpan("r:0:4", 0, 4),)
    assert first.loss_mask.all() and first.loss_mask.shape == (4,) and first.endpoint == "http://a"
    assert second.token_ids.tolist() == [15] and second.finish_reason == "stop"


def changed(**fields) -> bytes:
    """The real response with fields of its first choice replaced."""
    response = orjson.loads(REAL_RESPONSE)
    response["choices"][0] |= fields
    return orjson.dumps(response)


def spans(*ranges: tuple[int, int]) -> list[dict]:
    return [{"version": "r:0:4", "start": start, "end": end} for start, end in ranges]


def logprobs(*values: float | None) -> dict:
    tokens = [108, 25, 94, 120]
    pairs = zip(tokens, values, strict=False)
    return {"content": [{"token_id": token, "logprob": value} for token, value in pairs]}


def test_choices_are_sorted_and_mixed_versions_are_kept_apart():
    response = orjson.loads(changed(weight_versions=spans((0, 1), (1, 4))))
    response["choices"].reverse()
    first, second = parse_generate_response(orjson.dumps(response), "http://a", 4)
    assert [len(first.token_ids), len(second.token_ids)] == [4, 1]
    assert first.version_spans == (VersionSpan("r:0:4", 0, 1), VersionSpan("r:0:4", 1, 4))


@pytest.mark.parametrize(
    "body, reason",
    [
        (b"", "not JSON"),
        (REAL_RESPONSE[:-40], "truncated"),
        (b"[1, 2]", "unexpected shape"),
        (b'{"usage": {"prompt_tokens": 4}, "choices": []}', "choices"),
        (b'{"usage": {"prompt_tokens": 3}, "choices": []}', "3 prompt tokens of 4"),
        (changed(index=1), "choices"),
        (changed(token_ids=[]), "no tokens"),
        (changed(token_ids=None), "no tokens|unexpected shape"),
        (changed(token_ids=[2**40, 1, 2, 3]), "unexpected shape"),
        (changed(token_ids=[108, 25, 94]), "3 tokens but 4"),
        (changed(token_ids=[108, 25, 94, 121]), "other tokens"),
        (changed(logprobs=None), "unexpected shape"),
        (changed(logprobs=logprobs(-1.0, -1.0, -1.0)), "4 tokens but 3"),
        (changed(logprobs=logprobs(-1.0, -9999.0, -1.0, -1.0)), "missing or not a number"),
        (changed(logprobs=logprobs(-1.0, None, -1.0, -1.0)), "not a number|unexpected shape"),
        (changed(weight_versions=None), "does not stamp"),
        (changed(weight_versions=[]), "do not cover"),
        (changed(weight_versions=spans((0, 3))), "do not cover"),
        (changed(weight_versions=spans((1, 4))), "do not cover"),
        (changed(weight_versions=spans((0, 2), (3, 4))), "do not cover"),
        (changed(weight_versions=spans((0, 4), (4, 4))), "do not cover"),
        (changed(weight_versions=spans((0, 4), (0, 4))), "do not cover"),
        (changed(finish_reason="abort"), "'abort'"),
        (changed(finish_reason=None), "None"),
    ],
)
def test_what_cannot_be_used_is_malformed(body, reason):
    with pytest.raises(MalformedResponse, match=reason) as caught:
        parse_generate_response(body, "http://a", prompt_length=4)
    assert caught.value.url == "http://a"


def test_errors_survive_the_way_from_a_worker():
    inner = MalformedResponse("http://a", "why")
    for error in (inner, AttemptsFailed([inner])):
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and copy.url == "http://a"


# -- requests ----------------------------------------------------------------------------


async def test_generate_sends_every_sampling_parameter(endpoint, client):
    sampling = RolloutConfig(
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
        min_tokens=2,
        stop=["END"],
        stop_token_ids=[3],
        ignore_eos=True,
        num_generations=4,
    )
    body = await client.generate(PROMPT, sampling, seed=11, n=2)
    (request,) = endpoint.requests
    expected = {name: getattr(sampling, name) for name in SamplingConfig.model_fields}
    assert request == {
        "token_ids": [5, 6, 7],
        "sampling_params": expected | {"seed": 11, "n": 2, "logprobs": 0},
    }
    completions = parse_generate_response(body, endpoint.url, len(PROMPT))
    assert [c.token_ids.tolist() for c in completions] == [[11, 12, 13], [12, 13, 14]]


async def test_stop_strings_need_a_server_that_decodes(endpoint, client):
    endpoint.has_tokenizer = False
    with pytest.raises(PromptRejected, match=r"rollout\.stop .* stop_token_ids") as caught:
        await client.generate(PROMPT, SamplingConfig(stop=["END"]), seed=0)
    assert "requires a tokenizer" in str(caught.value) and not endpoint.requests
    await client.generate(PROMPT, SamplingConfig(stop_token_ids=[1]), seed=0)


async def test_a_version_may_be_set_without_new_weights(endpoint, client):
    await client.set_weight_version("r:0:3")
    assert await client.weight_version() == "r:0:3"
    assert ("/update_weight_version", {"new_version": "r:0:3"}) in endpoint.calls


async def test_control_routes_send_what_vllm_expects(endpoint, client):
    await client.health()
    assert await client.served_model() == ServedModel("fake", 512)
    await client.pause("keep")
    await client.init_weight_transfer({"rank": 0})
    await client.start_weight_update()
    await client.update_weights({"path": "x"})
    await client.finish_weight_update("r:0:2")
    assert await client.reset_prefix_cache() is True
    await client.resume()
    assert await client.weight_version() == "r:0:2"
    await client.abort_requests()
    assert endpoint.calls == [
        ("/health", None),
        ("/v1/models", None),
        ("/pause?mode=keep", None),
        ("/init_weight_transfer_engine", {"init_info": {"rank": 0}}),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": "x"}}),
        ("/finish_weight_update", {"weight_version": "r:0:2"}),
        ("/reset_prefix_cache?reset_external=true", None),  # a KV connector's cache, too
        ("/resume", None),
        ("/weight_info", None),
        ("/abort_requests", {}),
    ]


TENSORS = {"w": ("F32", (2, 3))}
NONCE = bytes(range(32))
SLICE = {"starts": [0, 0], "sizes": [2, 3], "dtype": "F32", "flushed": False}


@pytest.fixture
async def one_route() -> AsyncIterator[OneRoute]:
    async with OneRoute() as server:
        yield server


class OneRoute:
    """A server that answers every POST the same and keeps what it was sent."""

    status = 200
    body = b""

    async def __aenter__(self) -> OneRoute:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._respond)
        self.received: list[tuple[str, object]] = []
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _respond(self, request: web.Request) -> web.Response:
        self.received.append((request.path, orjson.loads(await request.read())))
        return web.Response(body=self.body, status=self.status)


async def test_every_worker_proves_its_weights(one_route, session):
    one_route.body = orjson.dumps(
        {
            "results": [
                {
                    "slices": {"w": [{"slice": SLICE, "digest": "ab", "copy": ""}]},
                    "problems": {},
                    "transport": "file",
                },
                {"slices": {}, "problems": {"w": "other bits"}, "transport": "http", "more": 1},
            ]
        }
    )
    proofs = await EndpointClient(one_route.url, session).prove_weights(NONCE, TENSORS)
    assert proofs == [
        WorkerProof({"w": [ServedSlice(Slice((0, 0), (2, 3), "F32"), "ab")]}, {}, "file"),
        WorkerProof({}, {"w": "other bits"}, "http"),
    ]
    ((path, body),) = one_route.received
    assert path == "/collective_rpc" and body["method"] == "easyrl_prove_weights"
    assert body["kwargs"]["nonce"] == NONCE.hex()
    # vLLM passes on strings only
    assert orjson.loads(body["kwargs"]["tensors"]) == {"w": ["F32", [2, 3]]}


@pytest.mark.parametrize(
    "body, reason",
    [
        (b'{"results": []}', r"length >= 1 - at `\$\.results`"),
        (b'{"results": [null]}', r"POST /collective_rpc: .* at `\$\.results\[0\]`"),
        (
            b'{"results": [{"slices": {"w": 1}, "problems": {}, "transport": "file"}]}',
            r"at `\$\.results\[0\]\.slices",
        ),
        (b'{"message": "done"}', "missing required field `results`"),
        (b"", "empty body"),
    ],
)
async def test_an_answer_without_proofs_is_no_proof(one_route, session, body, reason):
    one_route.body = body
    with pytest.raises(MalformedResponse, match=reason):
        await EndpointClient(one_route.url, session).prove_weights(NONCE, TENSORS)


async def test_a_server_without_the_proof_says_so(endpoint, client):
    with pytest.raises(RequestRejected, match="404"):
        await client.prove_weights(NONCE, TENSORS)


@pytest.mark.parametrize("status_code", [200, 400, 500])
async def test_any_answer_to_giving_up_an_update_will_do(one_route, session, status_code):
    one_route.status = status_code
    client = EndpointClient(one_route.url, session)
    await client.abandon_weight_update()
    assert one_route.received == [("/update_weights", {"update_info": {"abandon": True}})]


async def test_giving_up_an_update_needs_an_answer(endpoint, client):
    await endpoint.stop()
    with pytest.raises(EndpointUnavailable, match="/update_weights failed"):
        await client.abandon_weight_update()


async def test_the_key_is_sent(endpoint, session):
    endpoint.api_key = "secret"
    client = EndpointClient(endpoint.url, session, api_key="secret")
    await client.generate(PROMPT, SamplingConfig(), seed=0)
    assert len(endpoint.requests) == 1
    with pytest.raises(RequestRejected, match="401.*Unauthorized.*inference.api_key_env"):
        await EndpointClient(endpoint.url, session).served_model()


@pytest.mark.parametrize("key", ["1", "token", "12345678"])
async def test_a_key_that_good_answers_contain_does_not_damage_them(endpoint, session, key):
    client = EndpointClient(endpoint.url, session, api_key=key)
    body = await client.generate(PROMPT, SamplingConfig(), seed=12345678)
    (made,) = parse_generate_response(body, endpoint.url, len(PROMPT))
    assert made.token_ids.tolist() == [12345678, 12345679, 12345680]


async def test_an_endpoint_that_repeats_the_key_does_not_bring_it_into_messages(session):
    answers = {400: RequestRejected, 503: EndpointUnavailable, 200: MalformedResponse}
    for code, kind in answers.items():

        async def echo(request, code=code):
            said = f"not allowed: {dict(request.headers)}"
            return web.json_response({"error": said, "weight_version": 7}, status=code)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", echo)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        client = EndpointClient(url, session, api_key="MARKED-key")
        with pytest.raises(kind) as caught:
            await client.weight_version()
        assert "Bearer [key]" in str(caught.value) and "MARKED" not in str(caught.value)
        await runner.cleanup()


@pytest.mark.parametrize(
    "fault, kind, said",
    [
        (status(400, "Token id 5000 is out of vocabulary"), RequestRejected, "400 .*out of vocab"),
        (status(404, "The model `zz` does not exist"), RequestRejected, "404 .*does not exist"),
        (status(429, "slow down"), EndpointUnavailable, "429 .*slow down"),
        (status(500, "EngineCore encountered an issue"), EndpointUnavailable, "500 .*EngineCore"),
        (status(503, "overloaded"), EndpointUnavailable, "503 .*overloaded"),
        (break_off, EndpointUnavailable, "failed: ClientPayloadError"),
        (hang, EndpointUnavailable, "not answered within 0.1 s"),
    ],
)
async def test_failures_name_the_route_and_what_the_server_said(
    endpoint, client, fault, kind, said
):
    endpoint.faults.append(fault)
    with pytest.raises(kind, match=f"{endpoint.url}: POST /inference/v1/generate .*{said}"):
        body = {"token_ids": PROMPT, "sampling_params": {"seed": 0, "n": 1}}
        await client._request("POST", GENERATE, body, timeout_s=0.1)


@asynccontextmanager
async def saying(
    answer: Callable[[web.Request], Awaitable[web.Response]], port: int = 0
) -> AsyncIterator[str]:
    """A server that gives ``answer`` on every route; its URL."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("owner, num_connections", [("easyrl", 1), ("vllm", 4), (None, 4)])
async def test_control_requests_keep_their_connection_to_an_embedded_server_alone(
    session, owner, num_connections
):
    """vLLM ends one after some errors, which the next request would meet."""
    connections = []

    async def answer(request: web.Request) -> web.Response:
        if request.transport not in connections:
            connections.append(request.transport)
        models = {"data": [{"id": "m", "max_model_len": None, "owned_by": owner}]}
        wrong = request.path == "/resume"
        return web.json_response(models, status=500 if wrong else 200)

    async with saying(answer) as url:
        client = EndpointClient(url, session)
        assert (await client.served_model()).is_embedded == (owner == "easyrl")
        connections.clear()  # the first request's: nobody knew the server
        await client.pause("wait")
        with pytest.raises(EndpointUnavailable):
            await client.resume()
        await client.abort_requests()
        await client.health()
        assert len(connections) == num_connections


async def test_what_comes_up_where_an_embedded_server_was_may_be_another(session):
    told = []

    async def answer(request: web.Request) -> web.Response:
        told.append(request.headers.get("Connection"))
        return web.json_response({"data": [{"id": "m", "owned_by": "easyrl"}]})

    async with saying(answer) as url:
        client = EndpointClient(url, session)
        await client.served_model()
        await client.pause("wait")
    with pytest.raises(EndpointUnavailable):
        await client.pause("wait")
    async with saying(answer, int(url.rpartition(":")[2])):
        await client.pause("wait")
    assert told == ["close", None, "close"]


async def test_no_server_is_unavailable_and_no_route_is_explained(endpoint, client):
    with pytest.raises(RequestRejected, match="404.*VLLM_SERVER_DEV_MODE=1"):
        await client._request("POST", "/not_there")
    await endpoint.stop()
    with pytest.raises(EndpointUnavailable, match="GET /health failed: ClientConnectorError"):
        await client.health()
