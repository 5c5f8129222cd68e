"""Requests of one sample that asks several times: they keep to an endpoint while it lives."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np

from easyrl.build.episodes import EpisodeTurns
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.inference_client.pool.group_assignment import GroupAssignment
from easyrl.schema import Completion
from tests.inference_client.pool_cases import PROMPT, SAMPLING, V1, ask, pool_of, servers, until

LONGER = np.array([5, 6, 7, 8, 9], dtype=np.int32)


async def opened(pool: EndpointPool, stack: contextlib.AsyncExitStack) -> GroupAssignment:
    return await stack.enter_async_context(pool.group(len(PROMPT), 4.0, V1, num_samples=1))


def turn(
    pool: EndpointPool, session: GroupAssignment, seed: int, prompt: np.ndarray = PROMPT
) -> asyncio.Task[Completion]:
    return asyncio.ensure_future(pool.generate(prompt, SAMPLING, seed, session))


async def test_turns_go_to_the_endpoint_of_the_first():
    group = servers(3)
    async with pool_of(*group) as pool, contextlib.AsyncExitStack() as stack:
        session = (await opened(pool, stack)).session()
        made = [await turn(pool, session, seed, LONGER) for seed in range(9)]
        assert len({each.endpoint for each in made}) == 1
        assert sorted(len(server.requests) for server in group) == [0, 0, 9]


async def test_it_waits_for_its_endpoint_while_another_is_free():
    first, second = group = servers(2, gated=True)
    async with pool_of(*group, max_inflight=1) as pool, contextlib.AsyncExitStack() as stack:
        session = (await opened(pool, stack)).session()
        held = turn(pool, session, 1)
        await asyncio.wait_for(_until_asked(group, 1), 20)
        home = first if first.requests else second
        waits = turn(pool, session, 2)
        await asyncio.sleep(0.1)
        assert len(first.requests) + len(second.requests) == 1  # the other is free, and not asked
        elsewhere = ask(pool, 3)  # of another group: it takes that
        await asyncio.wait_for(_until_asked(group, 2), 20)
        for server in group:
            server.gated = False
            for gate in server.gates:
                gate.set()
        made = await asyncio.wait_for(asyncio.gather(held, waits, elsewhere), 20)
        assert made[0].endpoint == made[1].endpoint == home.url != made[2].endpoint


async def test_where_its_endpoint_dies_another_of_the_version_goes_on():
    group = servers(2)
    async with pool_of(*group, max_retries=3) as pool, contextlib.AsyncExitStack() as stack:
        session = (await opened(pool, stack)).session()
        first = await turn(pool, session, 1)
        home, other = sorted(group, key=lambda server: server.url != first.endpoint)
        await home.stop()
        made = [await turn(pool, session, seed, LONGER) for seed in (2, 3)]
        assert {each.endpoint for each in made} == {other.url}
        assert all(span.version == V1 for each in made for span in each.version_spans)


async def test_each_session_takes_a_place_that_its_group_holds():
    (server,) = group = servers(1)
    async with pool_of(*group, max_inflight=4) as pool, contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(pool.group(3, 4.0, V1, num_samples=2))
        held = await stack.enter_async_context(pool.group(3, 4.0, V1, num_samples=2))
        endpoint = pool.endpoints[0]
        before = endpoint.num_reserved
        sessions = [each.session() for each in (first, first, held, held)]
        assert before == 4 == endpoint.num_reserved
        assert [each.num_reserved for each in (first, held, *sessions)] == [0, 0, 1, 1, 1, 1]
        made = await asyncio.gather(*(turn(pool, each, seed) for seed, each in enumerate(sessions)))
        assert len(made) == len(server.requests) == 4
    assert endpoint.num_reserved == endpoint.num_inflight == endpoint.outstanding_tokens == 0


async def test_a_sample_that_comes_later_gives_the_place_that_is_held_for_it_back():
    (server,) = group = servers(1)
    async with pool_of(*group, max_inflight=2) as pool, contextlib.AsyncExitStack() as stack:
        held = await stack.enter_async_context(pool.group(3, 4.0, V1, num_samples=2))
        other = asyncio.ensure_future(opened(pool, stack))
        await asyncio.sleep(0.05)
        assert not other.done()  # all places are held
        first, second = EpisodeTurns(pool, held), EpisodeTurns(pool, held)
        for _ in range(2):
            first.put_off()  # once for all
        place = await asyncio.wait_for(other, 10)
        assert pool.endpoints[0].num_reserved == 2  # of the second, and of the other group
        await asyncio.gather(
            *(each(PROMPT, SAMPLING, 1) for each in (first, second)),
            pool.generate(PROMPT, SAMPLING, 2, place),
        )
        assert len(server.requests) == 3
        endpoint = pool.endpoints[0]
    assert endpoint.num_reserved == endpoint.num_inflight == endpoint.outstanding_tokens == 0


async def test_sessions_are_samples_of_their_group_for_the_choice_of_a_limit():
    """Two of a group, each of three turns: one group of two lengths, and not six groups of one."""
    group = servers(1)
    async with pool_of(*group) as pool, contextlib.AsyncExitStack() as stack:
        await until(lambda: pool.endpoints[0].served is not None)
        place = await stack.enter_async_context(pool.group(3, 4.0, V1, num_samples=2))
        alone = await stack.enter_async_context(pool.group(3, 4.0, V1, num_samples=2))
        told = _told_of(pool)
        sessions = [place.session(), place.session()]
        made = [await turn(pool, each, seed) for seed in range(3) for each in sessions]
        for seed in (3, 4):
            await pool.generate(PROMPT, SAMPLING, seed, alone)
    assert told[:6] == [(place, len(m.token_ids), sessions[n % 2]) for n, m in enumerate(made)]
    assert [(of, session) for of, _, session in told[6:]] == [(alone, None)] * 2


def _told_of(pool: EndpointPool) -> list[tuple[GroupAssignment, int, GroupAssignment | None]]:
    """What the endpoint's limit is told from now on: group, tokens, session."""
    told = []
    (limit,) = pool.limits._adaptive.values()
    limit.saw = lambda of, response, session=None: told.append((of, response.num_tokens, session))
    return told


async def _until_asked(group, number: int) -> None:
    while sum(len(server.requests) for server in group) < number:
        await asyncio.sleep(0.005)
