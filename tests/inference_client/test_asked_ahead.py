"""Places that sessions are lent, and requests that somebody else has sent with them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from easyrl.config import SamplingConfig
from easyrl.inference_client.errors import EndpointUnavailable, PromptRejected
from easyrl.inference_client.pool.asked_ahead import AskedAhead
from easyrl.inference_client.pool.endpoint import Endpoint
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.schema import Completion, VersionSpan
from tests.inference_client.pool_cases import (
    PROMPT,
    SAMPLING,
    V1,
    V2,
    ask,
    open_all,
    pool_of,
    seeds,
    servers,
    until,
)

SEED = 11


def nothing() -> None:
    """Of a recall that the test does not look at."""


@contextlib.asynccontextmanager
async def session_of(pool: EndpointPool) -> AsyncIterator[GroupAssignment]:
    async with pool.group(len(PROMPT), 4.0, V1, num_samples=1) as group:
        session = group.session()
        try:
            yield session
        finally:
            pool.leave(session)


async def lent_at(pool: EndpointPool, session: GroupAssignment) -> Endpoint:
    """Where its first turn was: one of several is chosen then."""
    first = await pool.generate(PROMPT, SAMPLING, 1, session)
    home = pool.lend(session, nothing)
    assert home is not None and home.url == first.endpoint
    return home


def made_by(url: str, version: str = V1) -> Completion:
    return Completion(
        token_ids=np.array([1, 2], np.int32),
        logprobs=np.array([-0.5, -0.5], np.float32),
        finish_reason="stop",
        version_spans=(VersionSpan(version, 0, 2),),
        endpoint=url,
        loss_mask=np.ones(2, bool),
    )


def ahead_of(
    url: str,
    forget: Callable[[], object] = nothing,
    seed: int = SEED,
    sampling: SamplingConfig = SAMPLING,
) -> AskedAhead:
    return AskedAhead(url, seed, sampling.max_tokens, time.monotonic(), forget)


def assert_idle(*endpoints: Endpoint) -> None:
    for endpoint in endpoints:
        held = endpoint.num_reserved, endpoint.num_inflight, endpoint.outstanding_tokens
        assert held == (0, 0, 0)


# ---- lending -------------------------------------------------------------------------------------


async def test_a_session_is_lent_the_place_that_its_group_held_and_then_a_free_one():
    group = servers(1)
    async with pool_of(*group, max_inflight=2) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        assert pool.lend(session, nothing) is endpoint and endpoint.num_reserved == 1
        await pool.generate(PROMPT, SAMPLING, 1, session)
        assert endpoint.num_reserved == 0
        assert pool.lend(session, nothing) is endpoint and endpoint.num_reserved == 1
        assert pool.lend(session, nothing) is endpoint and endpoint.num_reserved == 1  # no second
    assert_idle(endpoint)


async def test_who_waits_gets_the_places_that_are_lent():
    (server,) = group = servers(1)
    async with pool_of(*group, max_inflight=1) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        await pool.generate(PROMPT, SAMPLING, 1, session)
        recalled: list[int] = []
        assert pool.lend(session, lambda: recalled.append(1)) is endpoint
        await asyncio.wait_for(ask(pool, 2), 10)  # a group, which would wait for it for ever
        assert recalled == [1] and seeds(server) == [1, 2]
        assert pool.lend(session, lambda: recalled.append(2)) is endpoint
        async with pool.group(3, 4.0, V1, num_samples=1) as other:
            second = other.session()
            assert recalled == [1, 2]
            assert pool.lend(session, nothing) is None  # the place is held for the other's sample
            await pool.generate(PROMPT, SAMPLING, 3, second)
    assert_idle(endpoint)


async def test_the_first_place_of_a_session_is_not_taken_back():
    group = servers(1)
    async with pool_of(*group, max_inflight=1) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        assert pool.lend(session, lambda: pytest.fail("it was taken back")) is endpoint
        waits = ask(pool, 2)
        await asyncio.sleep(0.05)
        assert not waits.done()
        await pool.generate(PROMPT, SAMPLING, 1, session)
        await asyncio.wait_for(waits, 10)


async def test_nothing_is_lent_at_an_endpoint_that_cannot_be_used():
    group = servers(1)
    async with pool_of(*group) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        pool.set_aside(endpoint, EndpointUnavailable(endpoint.url, "test"))
        assert pool.lend(session, nothing) is None


async def test_places_that_are_lent_count_for_sessions_too():
    """One that has none takes the place of one that holds it idle, which is told."""
    group = servers(1)
    async with pool_of(*group, max_inflight=1) as pool, session_of(pool) as first:
        (endpoint,) = pool.endpoints
        await pool.generate(PROMPT, SAMPLING, 1, first)
        async with session_of(pool) as second:
            await pool.generate(PROMPT, SAMPLING, 2, second)
            recalled: list[int] = []
            assert pool.lend(second, lambda: recalled.append(1)) is endpoint
            waiting = asyncio.ensure_future(pool.generate(PROMPT, SAMPLING, 3, first))
            await until(lambda: endpoint.num_inflight or waiting.done())
            assert recalled == [1] and second.num_reserved == 0
            await waiting
    assert_idle(endpoint)


async def test_whoever_lends_last_hears_of_the_recall():
    """Another start of an episode, with the place of the one before."""
    group = servers(1)
    async with pool_of(*group, max_inflight=1) as pool, session_of(pool) as session:
        await pool.generate(PROMPT, SAMPLING, 1, session)
        recalled: list[str] = []
        for name in ("first", "second"):
            assert pool.lend(session, lambda name=name: recalled.append(name)) is not None
        await asyncio.wait_for(ask(pool, 2), 10)
        assert recalled == ["second"]


async def test_one_that_waits_takes_no_more_places_than_it_needs():
    group = servers(1)
    async with pool_of(*group, max_inflight=2) as pool:
        async with session_of(pool) as first, session_of(pool) as second:
            recalled: list[int] = []
            for number, session in enumerate((first, second)):
                await pool.generate(PROMPT, SAMPLING, number, session)
                assert pool.lend(session, lambda number=number: recalled.append(number))
            await asyncio.wait_for(ask(pool, 2), 10)
            assert recalled == [0]  # which was lent first


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_place_at_an_endpoint_that_goes_is_taken_back(is_first: bool):
    group = servers(1)
    async with pool_of(*group) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        if not is_first:
            await pool.generate(PROMPT, SAMPLING, 1, session)
        recalled: list[int] = []
        assert pool.lend(session, lambda: recalled.append(1)) is endpoint
        pool.set_aside(endpoint, EndpointUnavailable(endpoint.url, "test"))
        assert recalled == [1] and endpoint.num_reserved == 0


# ---- requests that have been sent ----------------------------------------------------------------


async def test_a_request_that_was_sent_stands_for_its_own():
    (server,) = group = servers(1)
    async with pool_of(*group) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        endpoint.proof = 5
        ahead = ahead_of(endpoint.url, lambda: pytest.fail("it was dropped"))
        waiting = asyncio.ensure_future(pool.generate(PROMPT, SAMPLING, SEED, session, ahead))
        await until(lambda: endpoint.num_inflight == 1)
        said = made_by(endpoint.url)
        ahead.answered(said)
        made = await waiting
        assert made.token_ids is said.token_ids and made.proof == 5 and ahead.is_answer(made)
        assert not server.requests and endpoint.num_completed == 1
    assert_idle(endpoint)


@pytest.mark.parametrize("other", ["seed", "url", "max_tokens", "cut"])
async def test_another_request_than_its_own_is_dropped_and_its_own_sent(other: str):
    group = servers(1, max_model_len=10) if other == "cut" else servers(1)
    async with pool_of(*group) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        await until(lambda: endpoint.served is not None)
        dropped: list[int] = []
        ahead = ahead_of(
            "http://elsewhere" if other == "url" else endpoint.url,
            lambda: dropped.append(1),
            SEED + (other == "seed"),
            SAMPLING.model_copy(update={"max_tokens": 5}) if other == "max_tokens" else SAMPLING,
        )
        made = await pool.generate(PROMPT, SAMPLING, SEED, session, ahead)
        assert made.token_ids.tolist() == [SEED, SEED + 1, SEED + 2]
        assert dropped == [1] and not ahead.is_answer(made)
        ahead.drop()
        assert dropped == [1]


async def test_one_that_fails_is_an_attempt_and_goes_elsewhere_with_its_seed():
    first, second = group = servers(2)
    async with pool_of(*group, max_retries=1) as pool, session_of(pool) as session:
        home = await lent_at(pool, session)
        ahead = ahead_of(home.url)
        ahead.answered(EndpointUnavailable(home.url, "it broke off"))
        made = await pool.generate(PROMPT, SAMPLING, SEED, session, ahead)
        assert made.endpoint != home.url and seeds(first) + seeds(second) in ([1, SEED], [SEED, 1])
        assert home.down is not None
    assert_idle(*pool.endpoints)


async def test_one_of_another_version_is_not_used():
    group = servers(2)
    async with pool_of(*group, max_retries=1) as pool, session_of(pool) as session:
        home = await lent_at(pool, session)
        ahead = ahead_of(home.url)
        ahead.answered(made_by(home.url, V2))
        made = await pool.generate(PROMPT, SAMPLING, SEED, session, ahead)
        assert made.endpoint != home.url and not ahead.is_answer(made)
        assert home.confirmed_version is None


async def test_a_prompt_that_was_refused_ahead_is_served_by_another():
    group = servers(2)
    async with pool_of(*group, max_retries=1) as pool, session_of(pool) as session:
        home = await lent_at(pool, session)
        ahead = ahead_of(home.url)
        ahead.answered(PromptRejected(home.url, "odd"))
        made = await asyncio.wait_for(pool.generate(PROMPT, SAMPLING, SEED, session, ahead), 10)
        assert made.endpoint != home.url


async def test_an_endpoint_that_is_given_up_aborts_it():
    group = servers(2)
    async with pool_of(*group) as pool, session_of(pool) as session:
        home = await lent_at(pool, session)
        dropped: list[int] = []
        ahead = ahead_of(home.url, lambda: dropped.append(1))
        waiting = asyncio.ensure_future(pool.generate(PROMPT, SAMPLING, SEED, session, ahead))
        await until(lambda: home.num_inflight == 1)
        pool.exclude(home, "test")
        made = await asyncio.wait_for(waiting, 10)
        ahead.answered(made_by(home.url))  # it crossed that
        assert dropped == [1] and made.endpoint != home.url and not ahead.is_answer(made)


async def test_what_was_sent_before_the_endpoint_confirmed_its_weights_again_is_sent_anew():
    (server,) = group = servers(1)
    async with pool_of(*group) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        ahead = ahead_of(server.url)
        pool.quarantine(endpoint, "test")  # nobody knew yet of what is in flight
        pool.confirm(endpoint, V1)
        ahead.answered(made_by(server.url))
        made = await pool.generate(PROMPT, SAMPLING, SEED, session, ahead)
        assert not ahead.is_answer(made) and seeds(server) == [SEED]


async def test_where_nobody_will_say_it_is_sent_again():
    (server,) = group = servers(1)
    async with pool_of(*group) as pool, session_of(pool) as session:
        ahead = ahead_of(server.url)
        waiting = asyncio.ensure_future(pool.generate(PROMPT, SAMPLING, SEED, session, ahead))
        await until(lambda: pool.endpoints[0].num_inflight == 1)
        ahead.answered(None)
        made = await asyncio.wait_for(waiting, 10)
        assert made.endpoint == server.url and seeds(server) == [SEED]


async def test_one_for_which_there_is_no_place_is_dropped_and_sent_when_there_is():
    """Its lease was taken back while it was told of: what it says later counts for nothing."""
    (server,) = group = servers(1, gated=True)
    async with pool_of(*group, max_inflight=1) as pool, session_of(pool) as session:
        (endpoint,) = pool.endpoints
        pool.give_back(session)
        other = ask(pool, 2)
        await until(lambda: len(server.requests) == 1)
        dropped: list[int] = []
        ahead = ahead_of(server.url, lambda: dropped.append(1))
        waiting = asyncio.ensure_future(pool.generate(PROMPT, SAMPLING, SEED, session, ahead))
        await until(lambda: dropped)
        ahead.answered(made_by(server.url))  # by weights that are in question, it turns out
        pool.quarantine(endpoint, "test")
        await asyncio.sleep(0.05)
        assert not waiting.done()
        pool.confirm(endpoint, V1)
        await open_all([other, waiting], server)
        assert not ahead.is_answer(waiting.result()) and SEED in seeds(server)
