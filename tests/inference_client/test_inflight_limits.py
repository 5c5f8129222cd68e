"""``inference.max_inflight: auto`` at the pool: what holds when, and what each endpoint takes."""

from __future__ import annotations

import asyncio
import logging
import random

import pytest
from pydantic import ValidationError

from easyrl.config import InferenceConfig
from easyrl.inference_client.pool import adaptive_limit
from easyrl.inference_client.pool.adaptive_limit import NUM_TRIED, NUM_WITH_ALL, Choice
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.inference_client.pool.inflight_limits import MOST, InflightLimits
from tests.inference_client.batch_simulation import simulate
from tests.inference_client.fake_endpoint import FakeEndpoint
from tests.inference_client.pool_cases import (
    PROMPT,
    SAMPLING,
    V1,
    ask,
    open_all,
    pool_of,
    seeds,
    servers,
    until,
)

NUM_PROMPTS = 64


async def batch(pool: EndpointPool, *group: FakeEndpoint, limit: int) -> None:
    """A batch of ``NUM_PROMPTS``, of which each endpoint has ``limit`` at a time, and its end."""
    await until(lambda: all(endpoint.served is not None for endpoint in pool.endpoints))
    for server in group:
        server.gated, server.max_open = True, 0
        server.requests.clear()
    tasks = [ask(pool, seed) for seed in range(NUM_PROMPTS)]
    for server in group:
        await server.until(lambda server=server: server.num_open == limit)
    await open_all(tasks, *group)
    assert [server.max_open for server in group] == [limit] * len(group)
    pool.withdraw_confirmations()
    for endpoint in pool.endpoints:
        pool.confirm(endpoint, V1)


@pytest.mark.parametrize(
    "said, num_shares, most",
    [({}, 1, MOST), ({"max_num_seqs": 40}, 1, 40), ({"max_num_seqs": 999}, 2, MOST // 2),
     ({"max_num_seqs": 1}, 4, 1)],
)  # fmt: skip
async def test_it_begins_with_all_that_the_endpoint_takes(said, num_shares, most):
    (server,) = servers(1, card=said)
    async with pool_of(server, num_shares=num_shares) as pool:
        await until(lambda: pool.endpoints[0].served is not None)
        assert pool.endpoints[0].max_inflight == most
        assert pool.capacity(in_batch=True) == pool.capacity(in_batch=False) == most


@pytest.mark.parametrize(
    "said, given, num_shares, most",
    [({}, 8, 1, 8), ({"max_num_seqs": 5}, 8, 1, 5), ({"max_num_seqs": 40}, 8, 1, 8),
     ({}, 512, 1, MOST), ({}, 8, 2, 4)],
)  # fmt: skip
async def test_a_launched_server_is_given_no_more_than_its_command_line_says(
    said, given, num_shares, most
):
    """vLLM does not tell, and would queue what is beyond."""
    launched, _ = group = servers(2, card=said)
    limits = InflightLimits("auto", num_shares)
    async with pool_of(*group) as pool:
        limits.launched_with = {launched.url: given}
        await until(lambda: all(endpoint.served is not None for endpoint in pool.endpoints))
        for endpoint in pool.endpoints:
            limits.look(endpoint)
        own, others = (limits.of(endpoint, in_batch=True) for endpoint in pool.endpoints)
        assert [own, limits.of(pool.endpoints[0], in_batch=False)] == [most, most]
        assert others == min(said.get("max_num_seqs", MOST), MOST) // num_shares
    assert InflightLimits(24, 1).of(pool.endpoints[0], in_batch=True) == 24


async def test_an_endpoint_that_says_nonsense_is_not_used():
    (server,) = servers(1, card={"max_num_seqs": -3})
    async with pool_of(server, confirmed=False) as pool:
        await until(lambda: pool.endpoints[0].refused is not None)
        assert not pool.endpoints[0].is_up


async def test_each_endpoint_tries_and_then_says_what_it_chose(caplog, monkeypatch):
    monkeypatch.setattr(adaptive_limit, "MIN_GAIN", 0.0)  # the fakes' seconds are not to be known
    group = servers(2, card={"max_num_seqs": 32})
    chosen = []
    async with pool_of(*group) as pool:
        pool.limits.on_choice = lambda endpoint, choice: chosen.append(
            (endpoint.url, choice.max_inflight)
        )
        pool.limits.trained(0.64, num_groups=64)
        with caplog.at_level(logging.INFO, "easyrl"):
            for limit in (32, 32, 16, 32):  # fewer than 16 are not worth trying
                await batch(pool, *group, limit=limit)
            assert chosen == [] and not caplog.text
            await batch(pool, *group, limit=16)
    assert (NUM_WITH_ALL, NUM_TRIED) == (2, 5)
    assert [url for url, _ in chosen] == [server.url for server in group]
    for server in group:
        assert f"inference.max_inflight: {server.url}: " in caplog.text


async def test_what_is_no_batch_has_all_places_behind_one(monkeypatch):
    monkeypatch.setattr(adaptive_limit, "MIN_GAIN", 0.0)
    (server,) = servers(1, card={"max_num_seqs": 64})
    async with pool_of(server) as pool:
        (endpoint,) = pool.endpoints
        for _ in range(NUM_WITH_ALL):
            pool.limits.trained(6.4, num_groups=64)
            await batch(pool, server, limit=64)
        assert endpoint.max_inflight == 64, "until a group of the next batch is asked for"
        assert (pool.capacity(in_batch=True), pool.capacity(in_batch=False)) == (16, 64)
        server.gated = True
        training = [ask(pool, seed) for seed in range(20)]
        await server.until(lambda: server.num_open == 16)
        assert endpoint.max_inflight == 16

        async def evaluate(seed: int) -> None:
            async with pool.group(3, 4.0, V1, num_samples=1, is_of_batch=False) as group:
                await pool.generate(PROMPT, SAMPLING, seed, group)

        beside = [asyncio.ensure_future(evaluate(seed)) for seed in range(100, 140)]
        await open_all(training, server)
        server.gated = True
        pool.limits.lift()  # the batch has all it needs
        assert endpoint.max_inflight == 64
        behind = [asyncio.ensure_future(evaluate(seed)) for seed in range(200, 300)]
        await server.until(lambda: server.num_open == 64)
        assert endpoint.num_inflight == 64
        await open_all([*beside, *behind], server)


class Server:
    """An endpoint as far as limits look at it."""

    url, served, max_inflight = "http://a:1", None, MOST


def answers(
    limits: InflightLimits, server: Server, groups: list[list[int]], limit: int | None = None
) -> None:
    """Responses of so many tokens, all of which training follows."""
    batch = simulate(lambda num: 2.7e-3 + 3.5e-5 * num, groups, limit or server.max_inflight, 0.016)
    for responses in batch.responses:
        group = GroupAssignment((0, 0.0, 0), V1, 24, len(responses))
        for response in responses:
            limits.answered(server, group, response)  # type: ignore[arg-type]
    limits.trained(0.016 * len(groups), len(groups))
    limits.clock = lambda: batch.trained_s


def even_groups(num_groups: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(15, 24) for _ in range(8)] for _ in range(num_groups)]


def run_of(parts: list[str]) -> tuple[list[int], list[Choice]]:
    """The limit of each batch and what was chosen: of "whole" ones, ones of which most is there
    when they begin, and ones that begin again behind a half."""
    limits, server, chosen = InflightLimits("auto", 1), Server(), []
    limits.on_choice = lambda endpoint, choice: chosen.append(choice)
    limits.look(server)  # type: ignore[arg-type]
    had, num_whole = [], 0
    for part in parts:
        limits.begin_batch(num_recovered=26 if part == "resumed" else 0)
        limits.hold()
        had.append(server.max_inflight)
        if part == "resumed":
            answers(limits, server, [[200] * 8] * 6)
        elif part == "withdrawn":
            answers(limits, server, [[200] * 8] * 16)
            limits.begin_batch(num_recovered=0)
            answers(limits, server, [[200] * 8] * 32)
        else:
            answers(limits, server, even_groups(32, num_whole))
            num_whole += 1
        limits.end_batch()
    return had, chosen


@pytest.mark.parametrize("part", ["resumed", "withdrawn"])
@pytest.mark.parametrize("place", range(6))
def test_parts_of_batches_are_not_learnt_from(part, place):
    """Whatever they look like: the others are tried, and chosen by, as if they had not been."""
    had, (choice,) = run_of(["whole"] * 8)
    assert len(set(had)) > 1, "there is something to choose"
    disturbed, (other,) = run_of([*["whole"] * place, part, part, *["whole"] * (8 - place)])
    assert other == choice
    assert [*disturbed[:place], *disturbed[place + 2 :]] == had


async def test_requests_are_the_same_whatever_the_limit():
    sent = []
    for settings in ({"max_inflight": 3}, {"max_inflight": "auto"}):
        (server,) = servers(1, card={"max_num_seqs": 32})
        async with pool_of(server, **settings) as pool:
            for _ in range(2):
                await asyncio.gather(*[ask(pool, seed) for seed in range(NUM_PROMPTS)])
                pool.withdraw_confirmations()
                pool.confirm(pool.endpoints[0], V1)
            sent.append((sorted(seeds(server)), server.requests[0]["sampling_params"].keys()))
    assert sent[0] == sent[1]


async def test_a_number_stays_what_it_is():
    (server,) = servers(1, card={"max_num_seqs": 4})
    async with pool_of(server, max_inflight=24) as pool:
        for _ in range(4):
            await batch(pool, server, limit=24)


async def test_a_server_that_comes_back_with_fewer_places_is_sent_fewer():
    (server,) = servers(1, card={"max_num_seqs": 64})
    async with pool_of(server) as pool:
        (endpoint,) = pool.endpoints
        await until(lambda: endpoint.max_inflight == 64)
        await server.stop()
        await until(lambda: not endpoint.is_up)
        server.card = {"max_num_seqs": 20}
        await server.restart(V1)
        await until(lambda: endpoint.is_up)
        assert endpoint.max_inflight == 20


@pytest.mark.parametrize("value", [0, -1, "all", 1.5, None])
def test_other_values_are_refused(value):
    with pytest.raises(ValidationError, match="max_inflight"):
        InferenceConfig(endpoints=["http://a:1"], max_inflight=value)
