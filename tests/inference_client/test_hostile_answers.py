"""Whatever an endpoint sends, on any route, ends as an endpoint fault that names the route."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from easyrl.completion_check import CompletionLimits, Vocabulary, limits_of
from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError, EndpointUnavailable, MalformedResponse
from easyrl.inference_client.fetching.fetcher_process import local_fetch
from easyrl.inference_client.responses import parse_generate_response
from tests.inference_client.fake_endpoint import FakeEndpoint
from tests.inference_client.pool_cases import V1, ask, pool_of
from tests.inference_client.raw_server import RawServer, http

RECORDED = Path(__file__).with_name("vllm_generate_response.json").read_bytes()
PROMPT = np.array([5, 6, 7, 8], dtype=np.int32)
SAMPLING = SamplingConfig(max_tokens=4)
NONCE, TENSORS = bytes(32), {"w": ("F32", [2])}

Call = Callable[[EndpointClient], Awaitable[object]]
DECODED: dict[str, Call] = {  # routes whose answer is used
    "GET /v1/models": lambda c: c.served_model(),
    "GET /weight_info": lambda c: c.weight_version(),
    "POST /reset_prefix_cache": lambda c: c.reset_prefix_cache(),
    "POST /update_weight_version": lambda c: c.set_weight_version("r:0:1"),
    "POST /collective_rpc": lambda c: c.prove_weights(NONCE, TENSORS),
    "POST /inference/v1/generate": lambda c: local_fetch(c._session)(c.url, PROMPT, SAMPLING, 0),
}
IGNORED: dict[str, Call] = {  # ... of which only the status is
    "GET /health": lambda c: c.health(),
    "POST /pause": lambda c: c.pause("wait"),
    "POST /resume": lambda c: c.resume(),
    "POST /init_weight_transfer_engine": lambda c: c.init_weight_transfer({"a": 1}),
    "POST /start_weight_update": lambda c: c.start_weight_update(),
    "POST /update_weights": lambda c: c.update_weights({"a": 1}),
    "POST /finish_weight_update": lambda c: c.finish_weight_update("r:0:1"),
    "POST /abort_requests": lambda c: c.abort_requests(),
}
ROUTES = DECODED | IGNORED


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer() as opened:
        yield opened


@pytest.fixture
async def client(server) -> AsyncIterator[EndpointClient]:
    async with aiohttp.ClientSession() as session:
        yield EndpointClient(server.url, session, timeout_s=20)


async def fault(call: Call, client: EndpointClient, route: str) -> EndpointError:
    with pytest.raises(EndpointError, match=re.escape(route)) as caught:
        await call(client)
    assert caught.value.url == client.url
    assert len(str(caught.value)) < 2000  # goes into logs, and into the certificate
    str(caught.value).encode()  # ... both of which are UTF-8
    return caught.value


# ---- JSON ----------------------------------------------------------------------------------------

DEEP = 200_000
BAD_JSON = {
    "empty": b"",
    "an HTML page": b"<html><body>502 Bad Gateway</body></html>",
    "null": b"null",
    "a number": b"3",
    "a list": b"[]",
    "no field": b"{}",
    "invalid UTF-8": b'{"weight_version": "\xff\xfe", "success": "\xff", "data": [{"id": "\xff"}]}',
    "invalid UTF-8 in a key": b'{"\xff\xfe": 1}',
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep lists in an unknown field": b'{"x": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "open objects": b'{"a":' * DEEP,
    "NaN": b'{"weight_version": NaN, "success": NaN, "results": NaN, "data": NaN}',
    "Infinity": b'{"weight_version": 1e999, "success": 1e999, "data": [{"id": 1e999}]}',
    "huge numbers": b'{"weight_version": %d, "success": %d}' % ((10**4000,) * 2),
    "other types": b'{"weight_version": [], "success": "yes", "results": {}, "data": {}}',
    "null fields": b'{"weight_version": null, "success": null, "results": null, "data": null}',
    "empty lists": b'{"results": [], "data": [], "choices": []}',
    "null items": b'{"results": [null], "data": [null], "choices": [null]}',
    "truncated": b'{"weight_version": "r:0:1", "success": true, "data": [{"id": "m"}], "res',
    "UTF-16": '{"weight_version": "r:0:1", "success": true}'.encode("utf-16"),
    "an endless version": b'{"weight_version": "%s"}' % (b"r" * 20_000),
}


@pytest.mark.parametrize("name", BAD_JSON)
async def test_bad_json_on_a_route_that_is_decoded_is_malformed(server, client, name):
    server.answer = http(BAD_JSON[name], "200 OK", "Content-Type: application/json")
    for route, call in DECODED.items():
        assert type(await fault(call, client, route)) is MalformedResponse, route
    for call in IGNORED.values():
        await call(client)


@pytest.mark.parametrize(
    "route, body, field",
    [
        ("GET /weight_info", b'{"weight_version": 3}', "weight_version"),
        ("GET /v1/models", b'{"data": [{"id": 3}]}', "data[0].id"),
        ("GET /v1/models", b'{"data": [{"id": "m", "max_model_len": "9"}]}', "max_model_len"),
        ("GET /v1/models", b'{"data": [{"id": "m", "max_model_len": 9.5}]}', "max_model_len"),
        ("GET /v1/models", b'{"data": [{"id": "m", "arithmetic": 1}]}', "arithmetic"),
        ("POST /reset_prefix_cache", b'{"success": 1}', "success"),
        ("POST /collective_rpc", b'{"results": [{"slices": {"w": 1}}]}', "results[0].slices"),
    ],
)
async def test_the_fault_names_the_field(server, client, route, body, field):
    server.answer = http(body)
    assert field in str(await fault(DECODED[route], client, route))


@pytest.mark.parametrize("value", [b"abc", b"nan", b"inf", b"-1e999", b"1" * 5000, b"\xff"])
async def test_a_counter_that_is_no_number_tells_nothing(server, client, value):
    server.answer = http(b"vllm:generation_tokens_total " + value + b"\n")
    assert await client.num_tokens_made(timeout_s=20) is None


# ---- content of a response -----------------------------------------------------------------------

LIMITS = CompletionLimits(vocab_size=121, max_tokens=4)
TOKENS = [108, 25, 94, 120]  # recorded


def generated(token_ids: list = TOKENS, logprobs: list | None = None, **fields: object) -> bytes:
    """The recorded response's first choice, changed."""
    answer = json.loads(RECORDED)
    logprobs = [-0.5] * len(token_ids) if logprobs is None else logprobs
    pairs = zip(token_ids, logprobs, strict=False)
    span = {"version": "r:0:4", "start": 0, "end": len(token_ids)}
    made = {
        "token_ids": token_ids,
        "logprobs": {"content": [{"token_id": t, "logprob": value} for t, value in pairs]},
        "weight_versions": [span],
    }
    answer["choices"] = [answer["choices"][0] | made | fields]
    return json.dumps(answer).encode()


def test_what_lies_just_within_the_limits_is_kept():
    (made,) = parse_generate_response(generated(), "http://a", 4, LIMITS, n=1)
    assert made.token_ids.tolist() == TOKENS  # with the vocabulary's last, as many as max_tokens
    edge = [0.0, 1e-5, -9998.0, -0.0]  # rounding of a float32 log-softmax
    (made,) = parse_generate_response(generated(logprobs=edge), "http://a", 4, LIMITS, n=1)
    np.testing.assert_allclose(made.logprobs, edge)


@pytest.mark.parametrize(
    "body, said",
    [
        (generated([108, 25, 94, 121]), r"choices\[0\].token_ids\[3\] is 121, .* ids 0 to 120"),
        (generated([108, -1, 94, 3]), r"token_ids\[1\]`"),
        (generated([108, 2**31, 94, 3]), r"token_ids\[1\]`"),
        (generated([108, 2**70, 94, 3]), r"token_ids\[1\]`|out of range"),
        (generated([108, 2.5, 94, 3]), r"token_ids\[1\]`"),
        (generated([*TOKENS, 3]), r"choices\[0\].token_ids: 5 tokens, max_tokens is 4"),
        (generated(logprobs=[-0.5, 0.01, -0.5, -0.5]), r"logprobs\[1\] is 0.0\d+, above 0"),
        (generated(logprobs=[-0.5, -0.5, 1e308, -0.5]), r"logprobs\[2\] is inf, above 0"),
        (generated(logprobs=[-0.5, -0.5, -1e308, -0.5]), r"logprobs\[2\] is -inf: missing"),
        (generated(logprobs=[-0.5, -0.5, -0.5, -9999.0]), r"logprobs\[3\] is -9999.0: missing"),
        (generated(logprobs=[-0.5, float("nan"), -0.5, -0.5]), "not JSON"),
        (generated(logprobs=[-0.5]), "4 tokens but 1 log-probabilities"),
        (generated(finish_reason="x" * 9000), "finish_reason is 'xxx"),
        (generated(weight_versions=[{"version": "r", "start": 0, "end": -4}]), r"\[0\].end`"),
        (RECORDED, "2 choices, asked for 1"),
    ],
)
def test_what_could_not_be_trained_is_malformed(body, said):
    with pytest.raises(MalformedResponse, match=f"POST /inference/v1/generate.*{said}") as caught:
        parse_generate_response(body, "http://a", 4, LIMITS, n=1)
    assert len(str(caught.value)) < 2000


async def test_a_request_is_held_to_its_own_max_tokens_and_the_vocabulary(server, client):
    server.answer = http(generated(finish_reason="stop"))
    fetch = local_fetch(client._session, Vocabulary(121))
    assert len((await fetch(client.url, PROMPT, SAMPLING, 0)).token_ids) == 4
    with pytest.raises(MalformedResponse, match="4 tokens, max_tokens is 3"):
        await fetch(client.url, PROMPT, SamplingConfig(max_tokens=3), 0)
    with pytest.raises(MalformedResponse, match="120, the policy's vocabulary has ids 0 to 119"):
        await local_fetch(client._session, Vocabulary(120))(client.url, PROMPT, SAMPLING, 0)


# ---- where a response ends -----------------------------------------------------------------------

ENDS = Vocabulary(121, frozenset({0, 7}))  # a generation_config.json may have several
CUT = {  # last token, finish_reason, what was asked for besides max_tokens=4; what is said
    "stop at a token like any other": ([1, 2, 3], "stop", {}, r"'stop' after token 3, .* \[0, 7\]"),
    "stop at max_tokens": ([1, 2, 3, 4], "stop", {}, "'stop' after token 4"),
    "stop behind an end": ([1, 0, 3], "stop", {}, "'stop' after token 3"),
    "stop at an end that is ignored": ([1, 0], "stop", {"ignore_eos": True}, "after token 0"),
    "stop at another's stop token": ([1, 5], "stop", {"stop_token_ids": [6]}, r"\[0, 6, 7\]"),
    "stop before min_tokens": ([1, 0], "stop", {"min_tokens": 3}, "2 tokens, min_tokens is 3"),
    "a stop string before min_tokens": ([1], "stop", {"stop": ["x"], "min_tokens": 2}, "1 tokens"),
    "length before max_tokens": ([1, 2, 3], "length", {}, "'length' after 3 tokens, .* is 4"),
    "length, with stop strings": ([1, 2], "length", {"stop": ["x"]}, "'length' after 2 tokens"),
    "length, its end ignored": ([1, 0], "length", {"ignore_eos": True}, "'length' after 2 tokens"),
}
WHOLE = {
    "the end": ([1, 2, 0], "stop", {}),
    "another end": ([7], "stop", {}),
    "the end at max_tokens": ([1, 2, 3, 0], "stop", {}),
    "a stop token": ([1, 5], "stop", {"stop_token_ids": [6, 5]}),
    "a stop token, the end ignored": ([0, 5], "stop", {"stop_token_ids": [5], "ignore_eos": True}),
    "a stop string": ([1, 2], "stop", {"stop": ["x"]}),
    "the end, stop strings wanted": ([1, 0], "stop", {"stop": ["x"]}),
    "as many as there may be": ([1, 2, 3, 4], "length", {}),
    "the end at min_tokens": ([1, 2, 0], "stop", {"min_tokens": 2}),
}


@pytest.mark.parametrize("name", CUT)
async def test_a_response_that_was_cut_short_is_a_fault(server, client, name):
    token_ids, finish_reason, asked, said = CUT[name]
    server.answer = http(generated(token_ids, finish_reason=finish_reason))
    with pytest.raises(MalformedResponse, match=rf"choices\[0\]\..*{said}"):
        sampling = SamplingConfig(max_tokens=4, **asked)
        await local_fetch(client._session, ENDS)(client.url, PROMPT, sampling, 0)


@pytest.mark.parametrize("name", WHOLE)
async def test_a_response_that_ends_where_it_may_is_kept(server, client, name):
    token_ids, finish_reason, asked = WHOLE[name]
    server.answer = http(generated(token_ids, finish_reason=finish_reason))
    sampling = SamplingConfig(max_tokens=4, **asked)
    made = await local_fetch(client._session, ENDS)(client.url, PROMPT, sampling, 0)
    assert made.token_ids.tolist() == token_ids and made.finish_reason == finish_reason


async def test_where_the_ends_are_not_known_only_lengths_are_judged(server, client):
    server.answer = http(generated([1, 2, 3], finish_reason="stop"))
    await local_fetch(client._session)(client.url, PROMPT, SAMPLING, 0)
    server.answer = http(generated([1, 2, 3], finish_reason="length"))
    with pytest.raises(MalformedResponse, match=r"'length' after 3 tokens, .*max_model_len"):
        await local_fetch(client._session)(client.url, PROMPT, SAMPLING, 0)


def test_a_journalled_response_may_have_ended_with_the_context_of_its_day():
    """What a request was allowed in the end is not in the journal; its settings are the run's."""
    sampling = SamplingConfig(max_tokens=4, min_tokens=2)
    body = generated([1, 2, 3], finish_reason="length")
    asked, journalled = (limits_of(sampling, ENDS, told_length=told) for told in (True, False))
    assert len(parse_generate_response(body, "http://a", 4, journalled, n=1)) == 1
    with pytest.raises(MalformedResponse, match="'length' after 3 tokens"):
        parse_generate_response(body, "http://a", 4, asked, n=1)
    for token_ids, said in (([1, 2, 3], "'stop' after token 3"), ([0], "min_tokens is 2")):
        stopped = generated(token_ids, finish_reason="stop")
        with pytest.raises(MalformedResponse, match=said):
            parse_generate_response(stopped, "http://a", 4, journalled, n=1)


# ---- HTTP ----------------------------------------------------------------------------------------

BAD_HTTP = {
    "nothing": b"",
    "no HTTP": b"220 mail.example.com ESMTP\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "status not a number": b"HTTP/1.1 abc OK\r\n\r\n",
    "a huge status": b"HTTP/1.1 99999 OK\r\n\r\n",
    "bytes in the reason": http(b"", "500 \xff\xfe\x1b[31m"),
    "bytes in a refusal's reason": http(b"", "404 \xff\xfe\x1b[31m"),
    "a bad length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    "a length that is no number": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    "bad chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "a cut chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n{}",
    "a long header": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "a long reason": http(b"", "500 " + "a" * 7_000),
    "created": http(b"{}", "201 Created"),
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\n\r\n",
    "other protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "a refusal with nested lists": http(
        b'{"detail": ' + b"[" * 1000 + b"]" * 1000 + b"}", "404 Not Found"
    ),
    "a refusal with bad UTF-8": http(b'{"detail": "\xff"}', "404 Not Found"),
    "a refusal with half a character": http(b'{"detail": "\\ud800"}', "404 Not Found"),
}


@pytest.mark.parametrize("name", BAD_HTTP)
async def test_bad_http_is_a_fault_on_every_route(server, client, name):
    server.answer = BAD_HTTP[name]
    for route, call in ROUTES.items():
        await fault(call, client, route)


@pytest.mark.parametrize("status", ["201 Created", "204 No Content", "206 Partial Content"])
async def test_a_status_that_says_neither_yes_nor_no_is_no_refusal(server, client, status):
    server.answer = http(b"", status)  # a refusal of the prompt, or one that ends the run
    for route, call in ROUTES.items():
        assert type(await fault(call, client, route)) is MalformedResponse


async def test_endless_headers_end(server, client):
    async def drone(writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await server.send_on(writer, b"X-More: " + b"a" * 1000 + b"\r\n", 2**26)

    server.answer = drone
    error = await fault(ROUTES["GET /health"], client, "GET /health")
    assert type(error) is EndpointUnavailable and server.num_sent < 2**24


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_redirect_is_followed(server, client, status):
    """A key, or the weights' address, would go where an endpoint points."""
    async with RawServer() as elsewhere:
        elsewhere.answer = http(b"{}")
        location = f"Location: {elsewhere.url}/there"
        server.answer = http(b"", f"{status} Moved", location)
        for route, call in ROUTES.items():
            error = await fault(call, client, route)
            assert type(error) is MalformedResponse and f"{elsewhere.url}/there" in error.reason
        assert not elsewhere.requests


# ---- size ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ROUTES)
async def test_an_endless_body_is_cut_off(server, client, route):
    async def drone(writer) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await server.send_on(writer, b"10000\r\n" + b" " * 2**16 + b"\r\n", 2**28)

    server.answer = drone
    error = await fault(ROUTES[route], client, route)
    assert type(error) is MalformedResponse and "bytes" in error.reason
    assert server.num_sent < 2**26  # with what the sockets hold
    if "generate" in route:  # many are under way at once
        assert f"more than {2**16 + 512 * SAMPLING.max_tokens} bytes" in error.reason


@pytest.mark.parametrize("status", ["404 Not Found", "500 Internal Server Error"])
async def test_of_an_error_the_beginning_is_read(server, client, status):
    async def drone(writer) -> None:
        head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head.encode() + b"9\r\nno such: \r\n")
        await server.send_on(writer, b"10000\r\n" + b"a" * 2**16 + b"\r\n", 2**28)

    server.answer = drone
    for route, call in ROUTES.items():
        error = await fault(call, client, route)
        assert f"answered {status}: no such: aaa" in error.reason
        assert server.num_sent < 2**26


SECRET = 'sk-MARKED/0+"x='
IN_JSON = "".join(f"\\u{ord(c):04X}" for c in SECRET)
IN_A_URL = "".join(f"%{ord(c):02x}" if c in '/+"=' else c for c in SECRET)


@pytest.mark.parametrize(
    "answer",
    [
        http(b"", f"401 no {SECRET}"),
        http(b"", f"500 {'x' * 90}{SECRET}"),  # at the border of what is quoted
        http(b"", "302 Found", f"Location: https://login/{SECRET}"),
        http(b"", "302 Found", f"Location: https://login/?given={IN_A_URL}"),
        http(b"", "200 OK", f"Content-Encoding: {SECRET}"),
        http(b"", "200 OK", f"Content-Encoding: {'x' * 45}{SECRET}"),
        http(b"", f"200 {SECRET}", f"X {SECRET}"),  # no header
        f"HTTP/1.1 abc {SECRET}\r\n\r\n".encode(),
        http(json.dumps({"error": f"Bearer {SECRET}"}).encode(), "503 Unavailable"),
        http(f'{{"error": "Bearer {IN_JSON}"}}'.encode(), "400 Bad Request"),
        http(f'{{"error": {{"message": "{IN_JSON.lower()}"}}}}'.encode(), "400 Bad Request"),
        http(f'{{"detail": "{IN_JSON}"}}'.encode(), "403 Forbidden"),
        http(f'{{"weight_version": 7, "x": "{IN_JSON}"}}'.encode()),
        http(f"{SECRET} is no JSON".encode()),
    ],
    ids=range(14),
)
async def test_a_key_that_is_repeated_comes_into_no_message(server, client, answer):
    keyed = EndpointClient(server.url, client._session, api_key=SECRET)
    server.answer = answer
    with pytest.raises(EndpointError) as caught:
        await keyed.weight_version()
    texts = [str(caught.value)]
    with contextlib.suppress(EndpointError):
        texts.append((await keyed.generate(PROMPT, SAMPLING, 0)).decode())
    for text in texts:
        assert "sk-" not in text and "MAR" not in text and IN_JSON.lower() not in text.lower()


async def test_a_key_that_is_repeated_comes_into_no_record(server, client):
    client = EndpointClient(server.url, client._session, api_key=SECRET)
    server.answer = http(f'{{"weight_version": "r:{IN_JSON}"}}'.encode())
    assert await client.weight_version() == "r:[key]"
    server.answer = http(f'{{"data": [{{"id": {json.dumps(SECRET)}}}]}}'.encode())
    assert (await client.served_model()).name == "[key]"


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
async def test_a_compressed_answer_is_not_decompressed(server, client, encoding):
    """1.8 MB of gzip can be 419 MB of spaces."""
    body = b'{"weight_version": "r:0:1"}' + b" " * 2**24
    packed = zlib.compress(body) if encoding == "deflate" else gzip.compress(body)
    server.answer = http(packed, "200 OK", f"Content-Encoding: {encoding}")
    for route, call in ROUTES.items():
        error = await fault(call, client, route)
        assert type(error) is MalformedResponse and encoding in error.reason
    assert all(b"accept-encoding: identity" in head.lower() for head in server.requests)


async def test_the_bounds_leave_room_for_the_longest_answers(server, client):
    """As vLLM writes them, with every number at its longest."""
    token = {"token_id": 2**31 - 1, "logprob": -1.2345678901234567e-05, "rank": 2**31 - 1}
    content = [token | {"top_logprobs": [token]}] * 4096
    span = {"version": "v" * 2000, "start": 0, "end": 4096}
    answer = json.loads(RECORDED)
    answer["choices"] = answer["choices"][:1]
    answer["choices"][0] |= {
        "token_ids": [2**31 - 1] * 4096,
        "logprobs": {"content": content},
        "weight_versions": [span],
    }
    server.answer = http(json.dumps(answer).encode())
    sampling = SamplingConfig(max_tokens=4096)
    made = await local_fetch(client._session)(client.url, PROMPT, sampling, 0)
    assert len(made.token_ids) == 4096

    names = [f"model.layers.{i}.mlp.experts.{i}.down_proj.weight" for i in range(2000)]
    box = {"starts": [123_456, 123_456], "sizes": [123_456, 123_456], "dtype": "BF16"}
    served = {"slice": box | {"flushed": False}, "digest": "ab" * 32, "copy": "linear 1"}
    proof = {"slices": dict.fromkeys(names, [served] * 3), "problems": {}, "transport": "file"}
    server.answer = http(json.dumps({"results": [proof] * 32}).encode())
    assert len(await client.prove_weights(NONCE, dict.fromkeys(names, ("BF16", [1, 1])))) == 32


async def test_a_drip_is_no_progress():
    """A byte now and then, for ever; the endpoint is given up, and the sample goes elsewhere."""

    async def drip(endpoint, request, body):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.05)

    slow, good = FakeEndpoint(version=V1, always=drip), FakeEndpoint(version=V1)
    async with pool_of(slow, good, progress_timeout_s=0.4) as pool:
        made = await asyncio.wait_for(asyncio.gather(*(ask(pool, seed) for seed in range(4))), 20)
        assert {completion.endpoint for completion in made} == {good.url}
        assert pool.endpoints[0].num_failures == 1 and pool.endpoints[1].num_failures == 0


# ---- seeded mutations of a recorded answer -------------------------------------------------------

NASTY = [
    None, True, -1, 0, 1, 2**31, 2**63, 2**64, 10**400, -(2**31), 0.5, 1e-400, 1e308, -1e308,
    float("nan"), float("inf"), float("-inf"), "", "stop", "\ud800", "\x00", "a" * 5000, [], {},
    [[]], {"": {}}, [None], [-1], [1e308], ["a"], [[[[[]]]]],
]  # fmt: skip

INSERTED = [b"\xff", b"[" * 2000, b'{"a":' * 2000, b"NaN", b"1e999", b"9"]


def places(tree: object, path: tuple = ()) -> list[tuple]:
    """Paths of all values below ``tree``."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if tree else ()
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
    return found


def mutated(rng: random.Random) -> bytes:
    """The recorded answer with a few values, or a few bytes, changed."""
    tree = json.loads(RECORDED)
    for _ in range(rng.choice([0, 1, 1, 2, 4])):
        *way, last = rng.choice(places(tree))
        parent = tree
        for key in way:
            parent = parent[key]
        action = rng.randrange(4)
        if action == 0:
            del parent[last]
        elif action == 1 and isinstance(parent, list):
            parent.append(parent[last])
        else:
            parent[last] = rng.choice(NASTY)
    body = bytearray(json.dumps(tree).encode())
    for _ in range(rng.choice([0, 0, 0, 1, 3])):
        at = rng.randrange(len(body))
        action = rng.randrange(4)
        if action == 0:
            body[at] = rng.randrange(256)
        elif action == 1:
            del body[at : at + rng.randrange(1, 40)]
        elif action == 2:
            body[at:at] = rng.choice(INSERTED)
        else:
            del body[at:]
        if not body:
            break
    return bytes(body)


def test_a_mutated_answer_is_usable_or_malformed():
    rng = random.Random(11)
    num_usable = 0
    for _ in range(4000):
        body = mutated(rng)
        try:
            completions = parse_generate_response(body, "http://a", 4)
        except MalformedResponse as error:
            assert "POST /inference/v1/generate" in error.reason
            str(error).encode()
            assert len(str(error)) < 2000
            continue
        num_usable += 1
        for made in completions:
            assert made.token_ids.dtype == np.int32 and made.token_ids.min() >= 0
            assert made.logprobs.dtype == np.float32 and np.isfinite(made.logprobs).all()
            assert made.logprobs.max() <= 1e-4 and made.logprobs.min() > -9999
            assert len(made.token_ids) == len(made.logprobs) == made.version_spans[-1].end > 0
            for span in made.version_spans:
                span.version.encode()
    assert 200 < num_usable < 3800  # both happen
