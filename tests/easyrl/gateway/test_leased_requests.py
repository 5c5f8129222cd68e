"""Turns for which the gateway asks an endpoint itself, because their session was lent a place."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from easyrl.completion_check import ANY_INT32
from easyrl.config import SamplingConfig
from easyrl.gateway.messages import Close, Drop, Failed, Lease, Lend, Open, Refused
from easyrl.gateway.turn_sampling import TurnSeeds
from tests.easyrl.gateway.gateway_parts import KEY, SESSION, Served, answer_of, served, until
from tests.inference_client.fake_endpoint import FakeEndpoint, status

PROMPT = [5, 6, 7]
GENERATE = "/inference/v1/generate"
OWN = SamplingConfig(max_tokens=8, min_tokens=2, temperature=0.7, stop_token_ids=[3])
SEED, MAX_TURNS = 77, 20


@asynccontextmanager
async def leased(
    folder: Path, endpoint: FakeEndpoint, max_turns: int = MAX_TURNS, **lease: Any
) -> AsyncIterator[Served]:
    said = OWN.model_dump_json().encode()
    opened = Open(SESSION, KEY, said, max_turns=max_turns, seed=SEED)
    async with endpoint, served(folder, open_as=opened, vocabulary=ANY_INT32) as gateway:
        gateway.trainer.send(lend(endpoint, **lease))
        yield gateway


def lend(endpoint: FakeEndpoint, context: int = 100, **more: Any) -> Lend:
    return Lend(SESSION, Lease(endpoint.url, context, **more))


async def sampled(gateway: Served, prompt: list[int] = PROMPT, **sampling: Any) -> Any:
    body = {"token_ids": prompt, "sampling_params": sampling}
    answered, answer = await gateway.post(body, GENERATE)
    return answer["choices"][0]["token_ids"] if answered == 200 else (answered, answer)


async def test_the_endpoint_is_asked_as_training_says_and_the_trainer_told(tmp_path: Path):
    endpoint = FakeEndpoint(api_key="secret key")
    async with leased(tmp_path, endpoint, api_key="secret key", model="adapter-7") as gateway:
        first = await sampled(gateway)
        second = await sampled(gateway, max_tokens=2, stop_token_ids=[9])
        seeds = TurnSeeds(SEED)
        prompt = np.array(PROMPT, np.int32)
        expected = [seeds.next(prompt), seeds.next(prompt)]
        whole, shorter = endpoint.requests
        assert [whole["token_ids"], whole["model"]] == [PROMPT, "adapter-7"]
        told = [each["sampling_params"] for each in (whole, shorter)]
        assert [each["seed"] for each in told] == expected
        assert [each["max_tokens"] for each in told] == [8, 2]
        assert [sorted(each["stop_token_ids"]) for each in told] == [[3], [3, 9]]
        assert {each["temperature"] for each in told} == {0.7}
        assert first == [expected[0] + t for t in range(3)]
        assert second == [expected[1] + t for t in range(2)]
        asked = gateway.trainer.asked
        assert [(a.ahead.url, a.ahead.seed, a.ahead.max_tokens) for a in asked if a.ahead] == [
            (endpoint.url, expected[0], 8),
            (endpoint.url, expected[1], 2),
        ]
        assert not gateway.trainer.answered  # it had nothing to sample


async def test_nobody_sees_a_response_before_it_is_recorded(tmp_path: Path):
    async with leased(tmp_path, endpoint := FakeEndpoint()) as gateway:
        gateway.trainer.may_answer.clear()
        waiting = asyncio.ensure_future(sampled(gateway))
        await until(lambda: gateway.trainer.came)
        await asyncio.sleep(0.1)
        assert not waiting.done() and len(endpoint.requests) == 1
        gateway.trainer.may_answer.set()
        assert len(await waiting) == 3


@pytest.mark.parametrize("why", ["stop", "context", "taken back", "turns", "no tokens", "busy"])
async def test_the_trainer_is_asked_where_the_gateway_may_not(tmp_path: Path, why: str):
    endpoint = FakeEndpoint(gated=why == "busy")
    turns = 1 if why == "turns" else MAX_TURNS
    async with leased(tmp_path, endpoint, turns, context=12) as gateway:
        gateway.trainer.says = [[1, 2], [1, 2]]
        before = 0
        if why == "turns":
            await sampled(gateway)
            before = 1
        if why == "taken back":
            gateway.trainer.send(Lend(SESSION, None))
        if why == "busy":
            waits = asyncio.ensure_future(sampled(gateway))
            await endpoint.until(lambda: len(endpoint.requests) == 1)
            before = 1
        prompt = {"context": [*PROMPT, 8, 9], "no tokens": []}.get(why, PROMPT)
        more = {"stop": ["x"]} if why == "stop" else {}
        made = await sampled(gateway, prompt, **more)
        if why != "no tokens":  # the gateway refuses that itself
            assert made == [1, 2]
            assert [asked.ahead is None for asked in gateway.trainer.asked] == [False] * before + [
                True
            ]
        assert len(endpoint.requests) == before
        if why == "busy":
            endpoint.gates[0].set()
            assert len(await waits) == 3


async def test_seeds_count_all_turns_whoever_asks_for_them(tmp_path: Path):
    async with leased(tmp_path, endpoint := FakeEndpoint()) as gateway:
        gateway.trainer.send(Lend(SESSION, None))
        await sampled(gateway)
        gateway.trainer.send(lend(endpoint))
        await sampled(gateway)
        seeds = TurnSeeds(SEED)
        seeds.next(np.array(PROMPT, np.int32))
        (request,) = endpoint.requests
        assert request["sampling_params"]["seed"] == seeds.next(np.array(PROMPT, np.int32))


async def test_a_failure_is_the_trainers_to_mend(tmp_path: Path):
    endpoint = FakeEndpoint()
    endpoint.faults.append(status(500, "broken"))
    async with leased(tmp_path, endpoint) as gateway:
        gateway.trainer.says = [[4, 2]]  # of another endpoint
        assert await sampled(gateway) == [4, 2]
        (failed,) = gateway.trainer.came
        assert isinstance(failed, Failed)
        assert len(await sampled(gateway)) == 3  # it may ask again


async def test_what_is_dropped_is_aborted_and_another_answer_waited_for(tmp_path: Path):
    async with leased(tmp_path, endpoint := FakeEndpoint(gated=True)) as gateway:
        waiting = asyncio.ensure_future(sampled(gateway))
        await until(lambda: gateway.trainer.asked and endpoint.num_open)
        (asked,) = gateway.trainer.asked
        gateway.trainer.send(Drop(asked.number))
        await endpoint.until(lambda: endpoint.num_disconnected == 1)
        assert not waiting.done() and not gateway.trainer.came
        gateway.trainer.send(answer_of(asked.number, [8, 9]))
        assert await waiting == [8, 9]
        endpoint.gated = False
        assert len(await sampled(gateway)) == 3


async def test_a_client_that_hangs_up_leaves_a_whole_turn(tmp_path: Path):
    async with leased(tmp_path, endpoint := FakeEndpoint(gated=True)) as gateway:
        waiting = asyncio.ensure_future(sampled(gateway))
        await endpoint.until(lambda: endpoint.num_open == 1)
        waiting.cancel()
        await asyncio.sleep(0.05)
        endpoint.gates[0].set()
        await until(lambda: gateway.trainer.came)
        assert endpoint.num_disconnected == 0


async def test_a_request_that_is_read_while_its_session_ends_asks_no_endpoint(tmp_path: Path):
    async with leased(tmp_path, endpoint := FakeEndpoint()) as gateway:
        gateway.trainer.says = [Refused(0, 410, "the episode has ended")]

        async def body() -> AsyncIterator[bytes]:
            yield b'{"token_ids": [5,'
            await asyncio.sleep(0.1)
            gateway.trainer.send(Close(SESSION))
            await asyncio.sleep(0.1)
            yield b"6]}"

        headers = {"Authorization": f"Bearer {KEY}"}
        async with gateway.http.post(
            gateway.url + GENERATE, data=body(), headers=headers
        ) as response:
            assert response.status == 410
        assert not endpoint.requests and gateway.trainer.closed == [SESSION]
