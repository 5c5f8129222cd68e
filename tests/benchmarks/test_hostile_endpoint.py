"""The hostile endpoint: it forwards what it does not spoil, and what it spoils cannot be used."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import aiohttp
import numpy as np
import pytest

from benchmarks.parts.hostile import weights
from benchmarks.parts.hostile.behaviour import EndpointBehaviour
from benchmarks.parts.hostile.catalogue import BEHAVIOURS
from benchmarks.parts.hostile.endpoint import HostileEndpoint, Stranger
from benchmarks.parts.random_model import write_random_model
from easyrl.completion_check import Vocabulary, limits_of
from easyrl.config import SamplingConfig
from easyrl.inference_client.client import EndpointClient
from easyrl.inference_client.errors import EndpointError
from easyrl.inference_client.fetching.fetcher_process import local_fetch
from easyrl.inference_client.sample_stream import SAMPLES, SamplesAsked
from easyrl.schema import Completion

PROMPTS = np.array([range(2, 14), range(13, 1, -1)], dtype=np.int32)  # 12 tokens
SAMPLING = SamplingConfig(max_tokens=6, ignore_eos=True)
VERSION = "run:0:3"
OF_A_RESPONSE = [
    behaviour
    for behaviour in BEHAVIOURS.values()
    if isinstance(behaviour, EndpointBehaviour)
    and behaviour.kind in ("body", "status", "stamp", "content")
    and "/inference/v1/generate" in (behaviour.routes or ("/inference/v1/generate",))
]
OF_A_STREAM = [
    behaviour
    for behaviour in BEHAVIOURS.values()
    if isinstance(behaviour, EndpointBehaviour)
    and behaviour.kind in ("body", "protocol", "status", "stamp", "content", "stream")
    and SAMPLES in (behaviour.routes or (SAMPLES,))
]
# what is wrong with these is beside the samples, which all come
BESIDE = {"length-too-big", "many-cookies", "second-answer-behind", "stream-never-ends"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    sizes = {"hidden_size": 32, "num_layers": 1, "weight_std": 0.3}
    return [write_random_model(folder / f"{seed}", **sizes, seed=seed) for seed in (0, 1)]


class Opened:
    def __init__(self, endpoint: HostileEndpoint, client: EndpointClient, vocab_size: int) -> None:
        self.endpoint, self.client = endpoint, client
        self._vocabulary = Vocabulary(vocab_size, frozenset())
        self._fetch = local_fetch(client._session, self._vocabulary)

    async def ask(self, prompt: int = 0, seed: int = 0) -> Completion:
        return await self._fetch(self.endpoint.url, PROMPTS[prompt], SAMPLING, seed)

    async def stream(self, prompts: np.ndarray, seed: int = 0) -> list[Completion | Exception]:
        """Two samples of each prompt; ``TimeoutError`` for those that do not come."""
        asked = SamplesAsked("r", [(prompt, [seed, seed + 1]) for prompt in prompts], SAMPLING)
        limits = limits_of(SAMPLING, self._vocabulary, told_length=True)
        made: dict[int, Completion | Exception] = {}
        async with aiohttp.ClientSession() as session:  # not the broken ones of those before
            client = EndpointClient(self.endpoint.url, session)
            try:
                async with asyncio.timeout(0.5):
                    async for part in client.samples(asked, limits):
                        made |= part
            except Exception as error:
                made = dict.fromkeys(range(asked.num_samples), error) | made
        return [made[index] for index in range(asked.num_samples)]

    def behave(self, name: str, *, streams: bool = False) -> None:
        behaviour = BEHAVIOURS[name]
        assert isinstance(behaviour, EndpointBehaviour)
        self.endpoint.set_behaviour(behaviour, random.Random(0), may_act=True)
        self.endpoint.share = 1.0
        self.endpoint.streams = streams


@pytest.fixture
async def opened(models) -> AsyncIterator[Opened]:
    endpoint = HostileEndpoint(models[0], models[1], max_model_len=32)
    await endpoint.open()
    try:
        async with aiohttp.ClientSession() as session:
            client = EndpointClient(endpoint.url, session, timeout_s=5)
            assert endpoint.engine is not None
            yield Opened(endpoint, client, endpoint.engine.vocab_size)
    finally:
        await endpoint.close()


def differs(made: Completion, true: Completion) -> bool:
    return made.version_spans != true.version_spans or not (
        np.array_equal(made.token_ids, true.token_ids) and np.allclose(made.logprobs, true.logprobs)
    )


async def test_what_it_does_not_spoil_is_forwarded(opened):
    await opened.client.set_weight_version(VERSION)
    assert await opened.client.weight_version() == VERSION
    made = [await opened.ask(seed=seed) for seed in (0, 1)]  # over one connection
    assert all(len(c.token_ids) == 6 and c.version_spans[0].version == VERSION for c in made)
    assert opened.endpoint.happened == 0


async def test_a_behaviour_waits_until_it_may_act(opened):
    opened.behave("html")
    opened.endpoint.may_act = False
    await opened.ask()
    opened.endpoint.may_act = True
    with pytest.raises(EndpointError, match="not JSON"):
        await opened.ask()
    assert opened.endpoint.happened == 1


async def test_no_response_that_a_behaviour_touches_is_as_it_was(opened):
    """Refused with an error that names the endpoint, or another one than the model's."""
    client, endpoint = opened.client, opened.endpoint
    for behaviour in OF_A_RESPONSE:
        opened.behave(behaviour.name)
        endpoint.may_act = False
        await client.set_weight_version("run:0:2")
        await opened.ask(0, seed=9)  # of another version
        await client.set_weight_version(VERSION)
        honest = await asyncio.gather(opened.ask(0), opened.ask(1))
        endpoint.may_act = True
        asked = asyncio.gather(opened.ask(0), opened.ask(1), return_exceptions=True)
        for made, true in zip(await asked, honest, strict=True):
            if isinstance(made, Exception):
                assert isinstance(made, EndpointError), (behaviour.name, made)
                continue
            assert differs(made, true), behaviour.name
        assert endpoint.happened >= 1 and endpoint.problem is None, behaviour.name
        endpoint.may_act = False


async def test_no_stream_that_a_behaviour_touches_is_as_it_was(opened):
    """Samples are refused, do not come, or are others; what spoils each, leaves none as it was."""
    client, endpoint = opened.client, opened.endpoint
    for behaviour in OF_A_STREAM:
        opened.behave(behaviour.name, streams=True)
        endpoint.may_act = False
        await client.set_weight_version("run:0:2")
        await opened.stream(PROMPTS, seed=9)  # of another version
        await client.set_weight_version(VERSION)
        await opened.stream(PROMPTS[::-1], seed=5)  # of another prompt at this place
        honest = await opened.stream(PROMPTS)
        endpoint.may_act = True
        made = await opened.stream(PROMPTS)
        assert endpoint.happened == endpoint.streamed == 1, behaviour.name
        assert endpoint.problem is None, behaviour.name
        same = []
        for one, true in zip(made, honest, strict=True):
            assert isinstance(true, Completion)
            if isinstance(one, Exception):
                assert isinstance(one, EndpointError | TimeoutError), (behaviour.name, one)
            same.append(isinstance(one, Completion) and not differs(one, true))
        assert all(same) is (behaviour.name in BESIDE), behaviour.name
        if behaviour.kind in ("body", "stamp", "content", "status"):
            assert not any(same), behaviour.name


async def test_swapped_samples_are_those_of_the_other_prompt(opened):
    honest = await opened.stream(PROMPTS)
    opened.behave("samples-swapped", streams=True)
    made = await opened.stream(PROMPTS)
    for one, other in zip(made, honest[2:] + honest[:2], strict=True):
        assert not differs(one, other)
    await opened.stream(PROMPTS[:1])  # of one prompt there is none to swap with
    assert opened.endpoint.happened == 1


@pytest.mark.parametrize("name, shown", [("sample-twice", True), ("nan-logprob", False)])
async def test_a_behaviour_of_one_route_is_asked_by_it(opened, name, shown):
    opened.endpoint.set_behaviour(BEHAVIOURS[name], random.Random(0))
    assert (await opened.client.served_model()).streams_samples is shown


@pytest.mark.parametrize("streams", [True, False])
async def test_one_route_of_both_is_left_alone(opened, streams):
    opened.behave("negative-token", streams=streams)
    single = opened.ask()
    if streams:
        await single
    else:
        with pytest.raises(EndpointError):
            await single
    made = await opened.stream(PROMPTS)
    assert all(isinstance(one, EndpointError) is streams for one in made)
    assert opened.endpoint.has_met == 1 and opened.endpoint.streamed == streams


async def test_a_stream_is_spared_as_rarely_as_all_its_samples(opened):
    opened.behave("negative-token", streams=True)
    opened.endpoint.share = 0.5
    for _ in range(60):
        await opened.stream(PROMPTS)  # of four samples
    assert 60 * 0.8 < opened.endpoint.happened < 60


async def test_a_behaviour_of_both_routes_is_asked_by_either(opened):
    shown = set()
    for seed in range(8):
        behaviour = BEHAVIOURS["negative-token"]
        opened.endpoint.set_behaviour(behaviour, random.Random(seed))
        shown.add((await opened.client.served_model()).streams_samples)
    assert shown == {True, False}


@pytest.mark.parametrize("name", ["cut-and-called-whole", "cut-and-called-long"])
async def test_a_response_cut_short_is_refused(opened, name):
    opened.behave(name)
    with pytest.raises(EndpointError, match=r"finish_reason is '(stop|length)' after"):
        await opened.ask()
    assert opened.endpoint.happened == 1


async def test_swapped_answers_are_each_others(opened):
    honest = await asyncio.gather(opened.ask(0), opened.ask(1))
    opened.behave("answers-swapped")
    swapped = await asyncio.gather(opened.ask(0), opened.ask(1))
    for made, other in zip(swapped, reversed(honest), strict=True):
        assert np.array_equal(made.token_ids, other.token_ids)


async def test_a_client_that_hangs_up_ends_what_it_asked_for(opened):
    engine = opened.endpoint.engine
    await opened.client.pause("keep")
    asked = asyncio.ensure_future(opened.ask())
    async with asyncio.timeout(10):
        while not engine.num_waiting + engine.num_running:
            await asyncio.sleep(0.01)
        asked.cancel()
        await opened.client.resume()
        while engine.num_waiting + engine.num_running:
            await asyncio.sleep(0.01)


async def test_a_restart_brings_other_weights_and_no_version(opened):
    await opened.client.set_weight_version(VERSION)
    before = await opened.ask()
    opened.behave("restart-with-other-weights")
    with pytest.raises(EndpointError):
        await opened.ask()
    after = await opened.ask()
    assert after.version_spans[0].version == "default"
    assert not np.allclose(after.logprobs, before.logprobs)


async def test_one_that_restarts_for_seconds_is_away_and_comes_back_without_a_version(
    opened, monkeypatch
):
    monkeypatch.setattr(weights, "AWAY_S", 0.5)
    await opened.client.set_weight_version(VERSION)
    opened.behave("restarts-for-seconds")
    await opened.client.health()  # only a generate request begins it
    for work in (opened.ask(), opened.client.health()):
        with pytest.raises(EndpointError):
            await work
    async with asyncio.timeout(10):
        while time.monotonic() < opened.endpoint.back_s:
            await asyncio.sleep(0.01)
    assert (await opened.ask()).version_spans[0].version == "default"


async def test_counters_grow_where_nothing_is_answered(opened):
    opened.behave("tokens-counted-never-answered")
    asked = asyncio.ensure_future(opened.ask())
    counts = [await opened.client.num_tokens_made(5)]
    await asyncio.sleep(0.01)
    counts.append(await opened.client.num_tokens_made(5))
    assert counts[0] < counts[1] and not asked.done()
    asked.cancel()


async def test_a_mistake_of_a_behaviour_is_not_taken_for_hostility(opened):
    async def act(exchange):
        raise KeyError("a bug")

    wrong = EndpointBehaviour("wrong", "body", "", frozenset(), act)
    opened.endpoint.set_behaviour(wrong, random.Random(0), may_act=True)
    with pytest.raises(EndpointError):
        await opened.ask()
    assert isinstance(opened.endpoint.problem, KeyError)


async def test_a_stranger_counts_who_comes():
    stranger = Stranger()
    await stranger.open()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.get(stranger.url)
    await stranger.close()
    assert stranger.num_requests >= 1  # aiohttp tries again
