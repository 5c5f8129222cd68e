"""Fetchers and endpoints that stream samples: what is joined, what fails, what is cancelled."""

from __future__ import annotations

import asyncio
import functools
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
from aiohttp import web

from easyrl.completion_check import ANY_INT32
from easyrl.config import SamplingConfig
from easyrl.inference_client.adapter_names import AdapterNames
from easyrl.inference_client.api_keys import ApiKeys
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    MalformedResponse,
    PromptRejected,
    RequestRejected,
)
from easyrl.inference_client.fetching import fetcher_process, streamed_requests
from easyrl.inference_client.fetching.fetcher_pool import FetcherPool
from easyrl.inference_client.fetching.fetcher_process import _replies, local_fetch
from easyrl.inference_client.fetching.messages import Send
from easyrl.inference_client.fetching.single_requests import SingleRequests
from easyrl.inference_client.fetching.streamed_requests import StreamedRequests
from easyrl.inference_client.sample_stream import SAMPLES, Ended, Refused, Sampled, frame_of
from easyrl.schema import Completion
from tests.inference_client.fake_endpoint import FakeEndpoint, error_response, status
from tests.inference_client.pool_cases import V1, ask, pool_of, until

PROMPT = np.array([5, 6, 7], dtype=np.int32)
SAMPLING = SamplingConfig(max_tokens=9)

Answer = Callable[["StreamingEndpoint", "Stream"], Awaitable[None]]


class Stream:
    """One request for samples, and what has been sent of its answer."""

    def __init__(self, body: dict[str, Any], response: web.StreamResponse) -> None:
        self.body, self.response = body, response
        self.seeds = [seed for prompt in body["prompts"] for seed in prompt["seeds"]]
        prompts = body["prompts"]
        self.prompt_lengths = [len(p["token_ids"]) for p in prompts for _ in p["seeds"]]

    def sample(self, index: int, **changes: Any) -> Sampled:
        """Its tokens are its seed and the next."""
        ids = np.array([self.seeds[index], self.seeds[index] + 1], dtype=np.int32)
        fields = {
            "finish_reason": "stop",
            "token_ids": ids.tobytes(),
            "logprobs": np.array([-0.5, -0.25], dtype=np.float32).tobytes(),
            "version_spans": ((V1, 0, 2),),
            "num_prompt_tokens": self.prompt_lengths[index],
        }
        return Sampled(index, **(fields | changes))

    async def send(self, *ended: Ended) -> None:
        await self.response.write(frame_of(ended))


class StreamingEndpoint(FakeEndpoint):
    """... with the route that streams samples; ``answer`` sends them, by default all at once."""

    def __init__(self, answer: Answer | None = None, **settings: Any) -> None:
        super().__init__(version=V1, card={"streams_samples": True}, **settings)
        self.answer = answer or send_all
        self.streams: list[Stream] = []
        self.transports: list[asyncio.Transport | None] = []  # of each
        self.aborted: list[str] = []
        self.num_hung_up = 0
        self.num_refused = 0
        self.num_aborts, self.abort_status = 0, 200
        self.may_abort: asyncio.Event | None = None  # waited for by each message
        self.refusal: web.Response | None = None  # of all
        self.refuse: Callable[[list[int]], web.Response | None] = lambda seeds: self.refusal
        self.before_answer: Callable[[], Awaitable[None]] | None = None
        self.refuses_text_of: list[int] = []

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if "output_mode" in body and body["token_ids"] == self.refuses_text_of:
            return error_response(400, "this prompt")
        return await super()._generate(request)

    async def _control(self, request: web.Request) -> web.StreamResponse:
        if request.path != SAMPLES:
            if request.path == "/inference/v1/abort_requests":
                self.num_aborts += 1
                self.aborted += orjson.loads(await request.read())["request_ids"]
                await self._notify()
                if self.may_abort is not None:
                    await self.may_abort.wait()
                return web.json_response({"status": "aborted"}, status=self.abort_status)
            return await super()._control(request)
        response = web.StreamResponse()
        stream = Stream(orjson.loads(await request.read()), response)
        if self.before_answer is not None:
            await self.before_answer()
        if (refusal := self.refuse(stream.seeds)) is not None:
            self.num_refused += 1
            return refusal
        self.streams.append(stream)
        self.transports.append(request.transport)
        await response.prepare(request)
        await self._notify()
        try:
            await self.answer(self, stream)
        except asyncio.CancelledError:
            self.num_hung_up += 1
            await asyncio.shield(self._notify())
            raise
        return response


async def send_all(endpoint: StreamingEndpoint, stream: Stream) -> None:
    await stream.send(*(stream.sample(i) for i in range(len(stream.seeds))))


@pytest.fixture
async def endpoint() -> AsyncIterator[StreamingEndpoint]:
    async with StreamingEndpoint() as server:
        yield server


class LocalStreams:
    """What a fetcher process does with orders that are streamed, in this one."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        client = functools.cache(lambda url: EndpointClient(url, session))
        single = SingleRequests(local_fetch(session), ApiKeys(), AdapterNames(), self._answered)
        self._streams = StreamedRequests(
            lambda order: client(order.url), ANY_INT32, self._answered, single.add
        )
        self._cancels = self._streams.cancel, single.cancel
        self._futures: dict[int, asyncio.Future[Completion]] = {}

    def _answered(
        self, orders: Sequence[Send], result: Completion | Exception, start_s: float
    ) -> None:
        for order in orders:
            future = self._futures[order.number]
            assert not future.done()  # neither told twice nor after it was cancelled
            if isinstance(result, Completion):
                future.set_result(result)
            else:
                future.set_exception(result)

    async def streamed(
        self, url: str, prompt_token_ids: np.ndarray, sampling: SamplingConfig, seed: int
    ) -> Completion:
        number = len(self._futures)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        encoded = sampling.model_dump_json().encode()
        self._streams.add(Send(number, url, prompt_token_ids.tobytes(), encoded, seed))
        try:
            return await future
        finally:
            if future.cancelled():
                for cancel in self._cancels:
                    cancel(number)


@pytest.fixture
async def fetchers() -> AsyncIterator[LocalStreams]:
    async with aiohttp.ClientSession() as session:
        yield LocalStreams(session)


@pytest.fixture
async def process() -> AsyncIterator[FetcherPool]:
    pool = FetcherPool(1)
    await pool.start()
    yield pool
    await pool.close()


def asked(
    fetchers: LocalStreams | FetcherPool, endpoint: StreamingEndpoint, *seeds: int, **changes: Any
) -> list[asyncio.Task[Completion]]:
    arguments = {"prompt_token_ids": PROMPT, "sampling": SAMPLING} | changes
    return [
        asyncio.ensure_future(fetchers.streamed(endpoint.url, seed=seed, **arguments))
        for seed in seeds
    ]


async def outcomes(tasks: list[asyncio.Task[Completion]]) -> list[int | str]:
    """First token, or the error's class, of each."""
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
    return [
        int(result.token_ids[0]) if isinstance(result, Completion) else type(result).__name__
        for result in results
    ]


async def test_what_is_asked_at_a_time_is_one_request_with_each_ones_seed(endpoint, fetchers):
    other = PROMPT + 1
    tasks = asked(fetchers, endpoint, 11, 12) + asked(
        fetchers, endpoint, 21, prompt_token_ids=other
    )
    tasks += asked(fetchers, endpoint, 13)
    assert await outcomes(tasks) == [11, 12, 21, 13]
    (stream,) = endpoint.streams
    assert stream.body["prompts"] == [
        {"token_ids": [5, 6, 7], "seeds": [11, 12, 13]},
        {"token_ids": [6, 7, 8], "seeds": [21]},
    ]
    assert stream.body["sampling_params"]["max_tokens"] == 9
    assert "seed" not in stream.body["sampling_params"]
    made = tasks[0].result()
    assert made.logprobs.tolist() == [-0.5, -0.25] and made.version_spans[0].version == V1


async def test_other_sampling_is_another_request(endpoint, fetchers):
    tasks = asked(fetchers, endpoint, 1)
    tasks += asked(fetchers, endpoint, 2, sampling=SamplingConfig(max_tokens=3))
    assert await outcomes(tasks) == [1, 2]
    assert sorted(s.body["sampling_params"]["max_tokens"] for s in endpoint.streams) == [3, 9]


def test_a_request_is_bounded(monkeypatch):
    monkeypatch.setattr(streamed_requests, "MOST_SAMPLES", 4)
    monkeypatch.setattr(streamed_requests, "MOST_PROMPT_TOKENS", 7)
    short = Send(0, "", bytes(4), b"", 0)
    long = Send(0, "", bytes(4 * 6), b"", 0)
    sizes = [len(part) for part in streamed_requests._parts([short] * 9)]
    assert sizes == [4, 4, 1]
    assert [len(part) for part in streamed_requests._parts([long] * 5)] == [2, 2, 1]


async def test_a_sample_comes_before_the_others_have_finished(endpoint, fetchers):
    go_on = asyncio.Event()

    async def second_later(_: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(stream.sample(1))
        await go_on.wait()
        await stream.send(stream.sample(0))

    endpoint.answer = second_later
    first, second = asked(fetchers, endpoint, 1, 2)
    assert (await asyncio.wait_for(second, 30)).token_ids[0] == 2
    assert not first.done()
    go_on.set()
    assert await outcomes([first]) == [1]


async def test_a_stream_that_breaks_off_fails_what_has_not_come(endpoint, fetchers):
    async def break_off(_: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(stream.sample(2), stream.sample(0))
        stream.response._req.transport.close()  # type: ignore[union-attr]

    endpoint.answer = break_off
    tasks = asked(fetchers, endpoint, 1, 2, 3, 4)
    assert await outcomes(tasks) == [1, "EndpointUnavailable", 3, "EndpointUnavailable"]


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "ended without 3 of 4 samples"),
        (b"\xff\xff\xff\xff", "a frame of"),
        (b"\x03\x00\x00\x00abc", "not MessagePack|unexpected shape"),
        (b"\x03\x00\x00\x00ab", "ended with 6 bytes"),
        (frame_of([Refused(9, 400, "")]), "not asked for"),
        (frame_of([Refused(1, 400, "")]), "came twice"),
    ],
)
async def test_garbage_in_a_stream_fails_what_has_not_come(endpoint, fetchers, content, said):
    async def garble(_: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(stream.sample(1))
        await stream.response.write(content)

    endpoint.answer = garble
    tasks = asked(fetchers, endpoint, 1, 2, 3, 4)
    bad = "MalformedResponse"
    assert await outcomes(tasks) == [bad, 2, bad, bad]
    with pytest.raises(MalformedResponse, match=said):
        tasks[0].result()


async def test_an_endless_stream_is_cut(endpoint, fetchers):
    async def for_ever(_: StreamingEndpoint, stream: Stream) -> None:
        while True:
            await stream.response.write(frame_of([]) * 2**16)

    endpoint.answer = for_ever
    tasks = asked(fetchers, endpoint, 1, 2)
    with pytest.raises(MalformedResponse, match="more than .* bytes"):
        await asyncio.wait_for(tasks[0], 30)
    assert await outcomes(tasks) == ["MalformedResponse"] * 2


async def test_one_that_is_refused_or_bad_leaves_the_others(endpoint, fetchers):
    async def mixed(_: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(
            Refused(0, 400, "out of vocabulary"),
            Refused(1, 503, "full"),
            Refused(2, 401, "who"),
            Refused(3, 200, "fine"),
            stream.sample(4, finish_reason="abort"),
            stream.sample(5),
        )

    endpoint.answer = mixed
    tasks = asked(fetchers, endpoint, *range(6))
    kinds = [PromptRejected, EndpointUnavailable, RequestRejected, MalformedResponse]
    names = [kind.__name__ for kind in (*kinds, MalformedResponse)]
    assert await outcomes(tasks) == [*names, 5]
    with pytest.raises(PromptRejected, match=f"{SAMPLES} answered 400: out of vocabulary"):
        tasks[0].result()


@pytest.mark.parametrize("code, kind", [(401, RequestRejected), (503, EndpointUnavailable)])
async def test_a_request_that_is_refused_for_no_prompts_sake_says_so_to_all(
    endpoint, fetchers, code, kind
):
    endpoint.refusal = error_response(code, "not so")
    for task in asked(fetchers, endpoint, 1, 2):
        with pytest.raises(EndpointError, match=f"{SAMPLES} answered {code}.*not so") as caught:
            await asyncio.wait_for(task, 30)
        assert type(caught.value) is kind


@pytest.mark.parametrize("code", [400, 413, 422])
async def test_a_request_for_many_that_is_refused_is_asked_for_in_parts(endpoint, fetchers, code):
    """As a proxy does whose bodies have a limit: no prompt is at fault."""
    endpoint.refuse = lambda seeds: error_response(code, "large") if len(seeds) > 2 else None
    assert await outcomes(asked(fetchers, endpoint, *range(8))) == list(range(8))
    assert [stream.seeds for stream in endpoint.streams] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert endpoint.num_refused == 3 and not endpoint.requests


@pytest.mark.parametrize("number", [1, 5])
async def test_what_cannot_be_streamed_is_asked_for_singly_at_last(endpoint, fetchers, number):
    endpoint.refuse = lambda seeds: error_response(400, "not so")
    endpoint.faults.append(status(400, "this one"))
    made = await outcomes(asked(fetchers, endpoint, *range(number)))
    assert made == ["PromptRejected", *range(1, number)]
    assert len(endpoint.requests) == number and endpoint.num_refused == max(1, number - 1)


async def test_what_is_cancelled_is_no_part_of_a_request_in_parts(endpoint, fetchers):
    refused, refuse = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        refused.set()
        await refuse.wait()

    endpoint.before_answer = hold
    endpoint.refuse = lambda seeds: error_response(413, "large") if len(seeds) > 2 else None
    tasks = asked(fetchers, endpoint, *range(5))
    await asyncio.wait_for(refused.wait(), 30)
    tasks[0].cancel()
    await asyncio.sleep(0)
    refuse.set()
    assert await outcomes(tasks) == ["CancelledError", 1, 2, 3, 4]
    assert [stream.seeds for stream in endpoint.streams] == [[1, 2], [3, 4]]


async def test_a_single_request_can_be_cancelled_when_it_was_refused_with_others(
    endpoint, fetchers
):
    endpoint.refuse = lambda seeds: error_response(413, "large")
    endpoint.gated = True
    tasks = asked(fetchers, endpoint, 1, 2)
    await endpoint.until(lambda: len(endpoint.requests) == 2)
    tasks[0].cancel()
    await endpoint.until(lambda: endpoint.num_disconnected == 1)
    for gate in endpoint.gates:
        gate.set()
    assert await outcomes(tasks) == ["CancelledError", 2]


async def test_a_prompt_is_not_excluded_for_a_proxy_that_limits_bodies(process):
    endpoint = StreamingEndpoint()
    endpoint.refuse = lambda seeds: error_response(413, "large") if len(seeds) > 3 else None
    async with pool_of(endpoint, fetch=process, streamed=process.streamed) as pool:
        await until(lambda: pool.endpoints[0].served is not None)
        made = await asyncio.wait_for(asyncio.gather(*(ask(pool, s) for s in range(12))), 30)
        assert [m.token_ids[0] for m in made] == list(range(12))
        assert pool.num_retries == pool.endpoints[0].num_failures == 0


async def test_prompts_outside_of_batches_are_asked_for_together(process):
    """As the weight sync's canary asks; not of an endpoint that does not stream."""
    streaming, plain = StreamingEndpoint(), FakeEndpoint()
    async with pool_of(streaming, plain, fetch=process, streamed=process.streamed) as pool:
        await until(lambda: all(e.served is not None for e in pool.endpoints))
        for endpoint in pool.endpoints:
            asked_for = (
                pool.ask(endpoint, np.array([3 + i, 1], np.int32), SAMPLING, i) for i in range(6)
            )
            made = await asyncio.wait_for(asyncio.gather(*asked_for), 30)
            assert {m.endpoint for m in made} == {endpoint.url}
    assert [stream.seeds for stream in streaming.streams] == [list(range(6))]
    assert not streaming.requests and len(plain.requests) == 6


async def never(_: StreamingEndpoint, stream: Stream) -> None:
    await asyncio.Event().wait()


async def test_cancelling_some_aborts_those(endpoint, fetchers):
    go_on = asyncio.Event()

    async def wait_and_send(server: StreamingEndpoint, stream: Stream) -> None:
        await go_on.wait()
        await send_all(server, stream)

    endpoint.answer = wait_and_send
    tasks = asked(fetchers, endpoint, 1, 2, 3, 4)
    await endpoint.until(lambda: len(endpoint.streams) == 1)
    tasks[1].cancel()
    tasks[3].cancel()
    await endpoint.until(lambda: len(endpoint.aborted) == 2)
    request_id = endpoint.streams[0].body["request_id"]
    assert sorted(endpoint.aborted) == [f"{request_id}-1", f"{request_id}-3"]
    assert endpoint.num_hung_up == 0
    go_on.set()  # the two come all the same: nobody waits for them
    assert await outcomes(tasks) == [1, "CancelledError", 3, "CancelledError"]
    endpoint.answer = send_all
    assert await outcomes(asked(fetchers, endpoint, 5)) == [5]


async def test_cancelling_all_that_have_not_come_closes_the_connection(endpoint, fetchers):
    async def one_then_never(server: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(stream.sample(0))
        await never(server, stream)

    endpoint.answer = one_then_never
    first, *others = asked(fetchers, endpoint, 1, 2, 3)
    await asyncio.wait_for(first, 30)
    for task in others:
        task.cancel()
    await endpoint.until(lambda: endpoint.num_hung_up == 1)
    assert await outcomes(others) == ["CancelledError"] * 2


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(streamed_requests, "END_S", 0.05)


async def test_a_stream_that_does_not_end_when_all_have_come_is_closed(endpoint, fetchers, soon):
    async def all_then_silence(server: StreamingEndpoint, stream: Stream) -> None:
        await send_all(server, stream)
        await never(server, stream)

    endpoint.answer = all_then_silence
    assert await outcomes(asked(fetchers, endpoint, 1, 2)) == [1, 2]
    await asyncio.wait_for(endpoint.until(lambda: endpoint.num_hung_up == 1), 30)


async def test_a_stream_that_ends_leaves_its_connection_for_the_next(endpoint, fetchers, soon):
    for seed in (1, 2):
        assert await outcomes(asked(fetchers, endpoint, seed)) == [seed]
        await asyncio.sleep(0.1)  # beyond what it has to end
    first, second = endpoint.transports
    assert first is second and endpoint.num_hung_up == 0


async def test_a_server_that_ignores_aborts_keeps_no_connection(endpoint, fetchers, soon):
    go_on = asyncio.Event()

    async def one_then_never(server: StreamingEndpoint, stream: Stream) -> None:
        await go_on.wait()
        await stream.send(stream.sample(0))
        await never(server, stream)

    endpoint.answer = one_then_never
    first, second = asked(fetchers, endpoint, 1, 2)
    await endpoint.until(lambda: len(endpoint.streams) == 1)
    second.cancel()
    await endpoint.until(lambda: len(endpoint.aborted) == 1)
    go_on.set()
    assert await outcomes([first, second]) == [1, "CancelledError"]
    await asyncio.wait_for(endpoint.until(lambda: endpoint.num_hung_up == 1), 30)


async def test_when_all_that_still_wait_are_cancelled_the_connection_is_closed(endpoint, fetchers):
    """Else what was cancelled would go on: its abort was lost."""
    go_on = asyncio.Event()

    async def one_then_never(server: StreamingEndpoint, stream: Stream) -> None:
        await go_on.wait()
        await stream.send(stream.sample(0))
        await never(server, stream)

    endpoint.answer, endpoint.abort_status = one_then_never, 500
    first, second = asked(fetchers, endpoint, 1, 2)
    await endpoint.until(lambda: len(endpoint.streams) == 1)
    second.cancel()
    await endpoint.until(lambda: endpoint.num_aborts == 1)
    go_on.set()  # without the fixture ``soon``: no time has to pass
    assert await outcomes([first, second]) == [1, "CancelledError"]
    async with asyncio.timeout(streamed_requests.END_S / 2):
        await endpoint.until(lambda: endpoint.num_hung_up == 1)


async def test_an_abort_is_not_sent_before_the_server_has_the_request(endpoint, fetchers):
    """It goes over another connection: one that overtook the request would be lost."""
    has_come, may_begin, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        has_come.set()
        await may_begin.wait()

    async def wait_and_send(server: StreamingEndpoint, stream: Stream) -> None:
        await may_end.wait()
        await send_all(server, stream)

    endpoint.before_answer, endpoint.answer = hold, wait_and_send
    first, second = asked(fetchers, endpoint, 1, 2)
    await asyncio.wait_for(has_come.wait(), 30)
    second.cancel()
    with pytest.raises(aiohttp.ClientError):  # a turn of loop and server: an abort would be there
        async with aiohttp.ClientSession(raise_for_status=True) as session:
            await session.get(f"{endpoint.url}/turn")
    assert endpoint.num_aborts == 0
    may_begin.set()
    await endpoint.until(lambda: endpoint.num_aborts == 1)
    assert endpoint.aborted == [f"{endpoint.streams[0].body['request_id']}-1"]
    may_end.set()
    assert await outcomes([first, second]) == [1, "CancelledError"]


async def test_stop_strings_are_asked_about_with_a_prompt_of_the_clients_own(endpoint, fetchers):
    """A prompt that is refused is not the others' fault."""
    endpoint.refuses_text_of = [5, 6, 7]
    sampling = SamplingConfig(max_tokens=9, stop=["END"])
    tasks = asked(fetchers, endpoint, 1, sampling=sampling)
    tasks += asked(fetchers, endpoint, 2, sampling=sampling, prompt_token_ids=PROMPT + 1)
    assert await outcomes(tasks) == [1, 2]
    assert await outcomes([asyncio.ensure_future(fetchers_single(endpoint, sampling))]) == [3]


async def fetchers_single(endpoint: StreamingEndpoint, sampling: SamplingConfig) -> Completion:
    async with aiohttp.ClientSession() as session:
        return await local_fetch(session)(endpoint.url, PROMPT, sampling, 3)


async def test_cancels_one_after_another_are_one_message_at_a_time(endpoint, fetchers):
    endpoint.answer, endpoint.may_abort = never, asyncio.Event()
    tasks = asked(fetchers, endpoint, *range(6))
    await endpoint.until(lambda: len(endpoint.streams) == 1)
    for task in tasks[:5]:
        task.cancel()
        await asyncio.sleep(0.02)  # each in a turn of its own
    endpoint.may_abort.set()
    await asyncio.wait_for(endpoint.until(lambda: len(endpoint.aborted) == 5), 30)
    assert endpoint.num_aborts == 2  # the first, and all that came while it was under way
    tasks[5].cancel()


async def test_a_server_that_refuses_aborts_gives_the_others_all_the_same(endpoint, fetchers):
    go_on = asyncio.Event()

    async def wait_and_send(server: StreamingEndpoint, stream: Stream) -> None:
        await go_on.wait()
        await send_all(server, stream)

    endpoint.answer, endpoint.abort_status = wait_and_send, 500
    tasks = asked(fetchers, endpoint, 1, 2, 3, 4)
    await endpoint.until(lambda: len(endpoint.streams) == 1)
    for number, task in enumerate(tasks[:2], 1):
        task.cancel()
        await endpoint.until(lambda n=number: endpoint.num_aborts == n)
    go_on.set()
    assert await outcomes(tasks) == ["CancelledError", "CancelledError", 3, 4]


async def test_what_is_cancelled_before_it_is_sent_is_not_asked_for(endpoint, fetchers):
    tasks = asked(fetchers, endpoint, 1, 2)
    await asyncio.sleep(0)  # both have been ordered, nothing has left
    fetchers._streams.cancel(0)
    tasks[0].cancel()
    assert await outcomes(tasks) == ["CancelledError", 2]
    assert [stream.seeds for stream in endpoint.streams] == [[2]]


async def test_the_pool_streams_from_those_that_say_they_can(process):
    streaming, plain = StreamingEndpoint(), FakeEndpoint(version=V1)
    async with pool_of(streaming, plain, fetch=process, streamed=process.streamed) as pool:
        await until(lambda: all(e.served is not None for e in pool.endpoints))
        assert [e.served.streams_samples for e in pool.endpoints] == [True, False]
        made = await asyncio.gather(*(ask(pool, seed) for seed in range(8)))
        assert [m.token_ids[0] for m in made] == list(range(8))
        made[0].token_ids[0] = 0  # torch warns about arrays that it could not write to
    of = {
        server.url: {m.token_ids[0] for m in made if m.endpoint == server.url}
        for server in (streaming, plain)
    }
    assert {seed for stream in streaming.streams for seed in stream.seeds} == of[streaming.url]
    assert {body["sampling_params"]["seed"] for body in plain.requests} == of[plain.url]
    assert all(of.values()) and not streaming.requests
    assert SAMPLES not in {path for path, _ in plain.calls}


async def test_a_broken_stream_is_asked_for_elsewhere_with_the_same_seeds(process):
    async def break_off(_: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(*(stream.sample(i) for i in range(0, len(stream.seeds), 2)))
        stream.response._req.transport.close()  # type: ignore[union-attr]

    broken, good = StreamingEndpoint(break_off), StreamingEndpoint()
    async with pool_of(broken, good, fetch=process, streamed=process.streamed) as pool:
        await until(lambda: all(e.served is not None for e in pool.endpoints))
        made = await asyncio.wait_for(asyncio.gather(*(ask(pool, s) for s in range(12))), 30)
        assert [m.token_ids[0] for m in made] == list(range(12))
        assert pool.num_retries > 0 and pool.endpoints[1].num_failures == 0


async def test_a_sample_is_part_of_a_stream_once(process):
    """Whatever one sample does to its stream, each of the others loses one attempt."""

    async def damage(_: StreamingEndpoint, stream: Stream) -> None:
        await stream.response.write(b"\xff\xff\xff\xff")

    bad = [StreamingEndpoint(damage), StreamingEndpoint(damage)]
    async with pool_of(*bad, fetch=process, streamed=process.streamed, max_retries=1) as pool:
        await until(lambda: all(e.served is not None for e in pool.endpoints))
        made = await asyncio.wait_for(asyncio.gather(*(ask(pool, s) for s in range(12))), 30)
        assert [m.token_ids[0] for m in made] == list(range(12))
        assert pool.num_retries == 12


@pytest.mark.parametrize("code", [404, 405])
async def test_an_endpoint_that_claims_the_route_and_has_it_not_is_used_without(
    process, code, caplog
):
    """A proxy before it, say, that passes vLLM's routes only; it is asked once."""
    endpoint = StreamingEndpoint()
    endpoint.refusal = error_response(code, "Not Found")
    async with pool_of(endpoint, fetch=process, streamed=process.streamed, max_retries=1) as pool:
        await until(lambda: pool.endpoints[0].served is not None)
        for seeds in (range(4), range(4, 8)):
            made = await asyncio.wait_for(asyncio.gather(*(ask(pool, s) for s in seeds)), 30)
            assert [m.token_ids[0] for m in made] == list(seeds)
        assert endpoint.num_refused == 1 and len(endpoint.requests) == 8
        assert pool.endpoints[0].num_failures == pool.num_retries == 0
    (said,) = [r.getMessage() for r in caplog.records if "one by one" in r.getMessage()]
    assert endpoint.url in said and str(code) in said


def test_an_error_that_ends_many_orders_is_formed_once(monkeypatch):
    formed = []
    form = fetcher_process.Failure.of
    monkeypatch.setattr(fetcher_process.Failure, "of", lambda e: formed.append(e) or form(e))
    error = MalformedResponse("http://a", "a frame of")
    orders = [Send(number, "http://a", b"", b"", 0) for number in range(9)]
    replies = list(_replies(orders, error))
    assert [reply.number for reply in replies] == list(range(9)) and formed == [error]
    told = {reply.failure for reply in replies}
    assert len(told) == 1 and "a frame of" in str(pickle.loads(told.pop()).exception())


async def test_a_broken_stream_is_one_error_for_all_that_had_not_come(endpoint, fetchers):
    async def garble(_: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(stream.sample(1))
        await stream.response.write(b"\xff\xff\xff\xff")

    endpoint.answer = garble
    calls, answered = [], fetchers._streams._answered
    fetchers._streams._answered = lambda *told: calls.append(len(told[0])) or answered(*told)
    await outcomes(asked(fetchers, endpoint, *range(64)))
    assert calls == [1, 63]


async def test_a_stream_that_goes_silent_is_given_up_as_a_single_request_is(process):
    async def one_then_never(server: StreamingEndpoint, stream: Stream) -> None:
        await stream.send(stream.sample(0))
        await never(server, stream)

    silent, good = StreamingEndpoint(one_then_never), StreamingEndpoint()
    settings = {
        "fetch": process,
        "streamed": process.streamed,
        "progress_timeout_s": 1.0,
        "back_off_s": 30,
    }
    async with pool_of(silent, good, **settings) as pool:
        await until(lambda: all(e.served is not None for e in pool.endpoints))
        assert await outcomes(asked(process, good, 99)) == [99]  # the fetcher is up
        made = await asyncio.wait_for(asyncio.gather(*(ask(pool, s) for s in range(12))), 30)
        assert [m.token_ids[0] for m in made] == list(range(12))
        await asyncio.wait_for(silent.until(lambda: silent.num_hung_up == len(silent.streams)), 30)
        num_withheld = sum(len(stream.seeds) - 1 for stream in silent.streams)
        assert pool.endpoints[0].num_failures == 1 and pool.num_retries == num_withheld > 0
