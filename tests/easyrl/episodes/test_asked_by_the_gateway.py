"""Turns for which the gateway's process asks endpoints itself: the same turns, and what goes
wrong on the way."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from easyrl.build.episodes import EpisodeTurns
from easyrl.config import SamplingConfig
from easyrl.episodes.gateway_child import GatewayChild
from easyrl.episodes.session import Session, SessionLost, lend_none
from easyrl.gateway.messages import Settings
from easyrl.inference_client.pool.endpoint_pool import EndpointPool
from easyrl.schema import Prompt
from tests.easyrl.episodes.parts import IDS
from tests.easyrl.gateway.gateway_parts import chat_tokenizer
from tests.inference_client.fake_endpoint import FakeEndpoint, answer, status
from tests.inference_client.pool_cases import V1, V2, pool_of, seeds, servers, until

SAMPLING = SamplingConfig(max_tokens=8)
LEASES = [True, False]


@dataclass
class Running:
    """A gateway's process over a pool, and a client."""

    gateway: GatewayChild
    pool: EndpointPool
    http: aiohttp.ClientSession
    fetched: list[int] = field(default_factory=list)  # seeds of what the trainer's process sent

    @asynccontextmanager
    async def episode(
        self, is_lent: bool = True, **settings: Any
    ) -> AsyncIterator[tuple[Session, str]]:
        async with self.pool.group(3, 4.0, V1, num_samples=1) as group:
            turns = EpisodeTurns(self.pool, group)
            lend_place = turns.lend_place if is_lent else lend_none
            prompt = Prompt(0, IDS, "q", None)
            session = Session(prompt, SAMPLING, 7, turns, lend_place=lend_place, **settings)
            try:
                async with self.gateway.serves(session) as url:
                    yield session, url
                await session.close()
            finally:
                turns.close()

    async def ask(self, at: tuple[Session, str], prompt: list[int] | None = None) -> Any:
        """The token ids that the client is told, or its error's status and message."""
        session, url = at
        headers = {"Authorization": f"Bearer {session.key}"}
        body = {"token_ids": IDS.tolist() if prompt is None else prompt}
        async with self.http.post(
            f"{url}/inference/v1/generate", json=body, headers=headers
        ) as response:
            said = await response.json()
            if response.status != 200:
                return response.status, said["error"]["message"]
            return said["choices"][0]["token_ids"]


@asynccontextmanager
async def running(
    folder: Path, *endpoints: FakeEndpoint, **settings: Any
) -> AsyncIterator[Running]:
    chat_tokenizer().save_pretrained(folder)
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(pool_of(*endpoints, **settings))
        gateway = GatewayChild(Settings(str(folder)))
        stack.push_async_callback(gateway.close)
        await gateway.start()
        await until(lambda: all(each.served is not None for each in pool.endpoints))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        made = Running(gateway, pool, http)
        fetch = pool._fetch

        async def counted(url: str, prompt: Any, sampling: SamplingConfig, seed: int) -> Any:
            made.fetched.append(seed)
            return await fetch(url, prompt, sampling, seed)

        pool._fetch = pool._streamed = counted
        yield made


def records(session: Session) -> list[list[int]]:
    return [record.token_ids.tolist() for record in session.records]


async def test_the_same_is_sampled_and_recorded_whoever_asks(tmp_path: Path):
    """Requests, records and answers of four turns, one of which is asked twice."""
    (server,) = group = servers(1)
    told: dict[bool, Any] = {}
    async with running(tmp_path, *group) as run:
        for is_lent in LEASES:
            server.requests.clear()
            run.fetched.clear()
            async with run.episode(is_lent) as at:
                answers = [await run.ask(at)]
                longer = [*IDS.tolist(), *answers[0], 9]
                answers += [await run.ask(at, prompt) for prompt in (longer, longer, [1, 2])]
                parents = [record.parent for record in at[0].records]
                assert answers == records(at[0])
            told[is_lent] = server.requests[:], answers, parents
            assert len(run.fetched) == (0 if is_lent else 4)
        assert told[True] == told[False] and told[True][2] == [None, 0, 0, None]
        (endpoint,) = run.pool.endpoints
        held = endpoint.num_inflight, endpoint.num_reserved, endpoint.outstanding_tokens
        assert held == (0, 0, 0)


async def test_turns_side_by_side_are_all_recorded(tmp_path: Path):
    group = servers(1)
    async with running(tmp_path, *group) as run, run.episode(max_turns=6) as at:
        made = await asyncio.gather(*(run.ask(at, [n, n]) for n in range(8)))
        told = [each for each in made if isinstance(each, list)]
        assert sorted(told) == sorted(records(at[0])) and len(told) == 6
        refused = [each for each in made if isinstance(each, tuple)]
        assert [code for code, _ in refused] == [400, 400]
        assert all("max_turns_exceeded" in said for _, said in refused)
        assert 0 < len(run.fetched) < 6  # the first alone had a place


async def test_a_response_of_other_weights_never_goes_out(tmp_path: Path):
    (server,) = group = servers(1)
    async with running(tmp_path, *group, max_retries=1) as run, run.episode() as at:
        first = await run.ask(at)
        server.version = V2
        waiting = asyncio.ensure_future(run.ask(at, [1, 2]))
        await until(lambda: run.pool.endpoints[0].confirmed_version is None)
        await asyncio.sleep(0.1)
        assert not waiting.done() and len(at[0].records) == 1
        server.version = V1
        run.pool.confirm(run.pool.endpoints[0], V1)
        assert [first, await waiting] == records(at[0])
        assert all(
            span.version == V1
            for record in at[0].records
            for span in record.completion.version_spans
        )


@pytest.mark.parametrize("fault", [status(500, "broken"), answer(token_ids=[1])])
async def test_what_fails_is_sent_to_another_with_the_same_seed(tmp_path: Path, fault: Any):
    first, second = group = servers(2)
    async with running(tmp_path, *group, max_retries=1) as run, run.episode() as at:
        one = await run.ask(at)
        home, other = (first, second) if first.requests else (second, first)
        home.faults.append(fault)
        two = await run.ask(at, [1, 2])
        assert [one, two] == records(at[0])
        assert seeds(home)[1:] == seeds(other) == run.fetched[-1:]
        assert at[0].records[1].completion.endpoint == other.url


async def test_an_endpoint_that_is_given_up_is_left_at_once(tmp_path: Path):
    first, second = group = servers(2)
    async with running(tmp_path, *group, max_retries=1) as run, run.episode() as at:
        await run.ask(at)
        home, other = (first, second) if first.requests else (second, first)
        home.gated = True
        waiting = asyncio.ensure_future(run.ask(at, [1, 2]))
        await home.until(lambda: home.num_open == 1)
        endpoint = next(each for each in run.pool.endpoints if each.url == home.url)
        await until(lambda: endpoint.num_inflight == 1)
        run.pool.exclude(endpoint, "test")
        assert await waiting == records(at[0])[1]
        await home.until(lambda: home.num_disconnected == 1)
        assert seeds(home)[1:] == seeds(other)


async def test_a_process_that_dies_is_lost_with_its_turns_and_the_next_asks_for_none(
    tmp_path: Path,
):
    """What it was sent may have killed it; fetchers find out whose answer that was."""
    (server,) = group = servers(1, gated=True)
    async with running(tmp_path, *group) as run:
        async with run.episode() as at:
            waiting = asyncio.ensure_future(run.ask(at))
            await server.until(lambda: server.num_open == 1)
            await until(lambda: run.pool.endpoints[0].num_inflight == 1)
            assert run.gateway.child is not None
            os.kill(run.gateway.child.process.pid, signal.SIGKILL)
            with pytest.raises(SessionLost):
                await at[0].failed
            with pytest.raises(aiohttp.ClientError):
                await waiting
            await server.until(lambda: len(server.requests) == 2)  # begun turns are finished
            server.gated = False
            for gate in server.gates:
                gate.set()
        assert len(at[0].records) == 1
        async with run.episode() as again:
            assert [await run.ask(again)] == records(again[0]) == records(at[0])
        assert len(run.fetched) == 2


async def test_a_turn_that_was_begun_is_recorded_before_the_session_is_closed(tmp_path: Path):
    (server,) = group = servers(1, gated=True)
    async with running(tmp_path, *group) as run:
        async with run.episode() as at:
            waiting = asyncio.ensure_future(run.ask(at))
            await until(lambda: run.pool.endpoints[0].num_inflight == 1)
            asyncio.get_running_loop().call_later(0.1, server.gates[0].set)
        assert len(records(at[0])) == 1 and not run.fetched
        assert (await waiting)[0] == 410


@pytest.mark.parametrize("is_lent", LEASES)
async def test_so_is_one_of_which_nobody_has_been_told(tmp_path: Path, is_lent: bool):
    """The environment ends as soon as it has asked, and does not wait for the answer."""
    (server,) = group = servers(1, gated=True)
    async with running(tmp_path, *group) as run:
        async with run.episode(is_lent) as at:
            waiting = asyncio.ensure_future(run.ask(at))
            await server.until(lambda: server.num_open == 1)
            asyncio.get_running_loop().call_later(0.1, server.gates[0].set)
        assert len(records(at[0])) == 1 and len(server.requests) == 1
        await waiting


async def test_an_episode_that_ends_behind_the_gateway_waits_for_no_word_of_it(tmp_path: Path):
    """As at the end of a run, whose last episodes are cancelled then; with a turn under way."""
    (server,) = group = servers(1, gated=True)
    async with running(tmp_path, *group) as run:

        async def play() -> None:
            async with run.episode() as at:
                waiting = asyncio.ensure_future(run.ask(at))
                await until(lambda: run.pool.endpoints[0].num_inflight == 1)
                await run.gateway.close()
                waiting.cancel()
                server.gated = False
                for gate in server.gates:
                    gate.set()

        await asyncio.wait_for(play(), 10)
        assert not run.gateway._sessions and not run.gateway._ahead


async def test_a_place_that_others_wait_for_is_taken_back(tmp_path: Path):
    (server,) = group = servers(1)
    async with running(tmp_path, *group, max_inflight=1) as run:
        async with run.episode() as first:
            await run.ask(first)
            await asyncio.sleep(0.1)
            assert run.pool.endpoints[0].num_reserved == 1
            async with run.episode() as second:  # would not begin
                assert [await run.ask(second)] == records(second[0])
                made = [await run.ask(first, [n, 1]) for n in range(3)]
                assert made == records(first[0])[1:]
        assert server.max_open == 1


async def test_an_endpoint_that_was_removed_is_asked_no_more(tmp_path: Path):
    first, second = group = servers(2)
    async with running(tmp_path, *group) as run, run.episode() as at:
        await run.ask(at)
        home, other = (first, second) if first.requests else (second, first)
        run.pool.remove(home.url)
        await asyncio.sleep(0.1)
        await run.ask(at, [1, 2])
        assert (len(home.requests), len(other.requests)) == (1, 1)


async def test_one_that_returns_is_not_blamed_for_what_was_before(tmp_path: Path):
    (server,) = group = servers(1)
    async with running(tmp_path, *group, max_retries=0) as run, run.episode() as at:
        (endpoint,) = run.pool.endpoints
        await run.ask(at)
        await server.stop()
        await until(lambda: endpoint.down is not None)
        waiting = asyncio.ensure_future(run.ask(at, [1, 2]))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await server.restart(V1)
        assert await asyncio.wait_for(waiting, 20) == records(at[0])[1]


@pytest.mark.parametrize("seed", [0, 1])
async def test_whatever_happens_all_that_was_told_is_recorded_and_no_place_is_lost(
    tmp_path: Path, seed: int
):
    """Sessions with turns side by side and clients that hang up, at two slow endpoints that fail
    now and then and are quarantined."""
    rng = random.Random(seed)
    group = servers(2)

    async def slow(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
        await asyncio.sleep(rng.choice([0, 0.01, 0.05, 0.15]))
        if rng.random() < 0.05:
            return await status(500, "broken")(endpoint, request, body)
        return web.Response(body=endpoint.response(body))

    async def play(run: Running, number: int) -> None:
        told: list[Any] = []
        prompt = [number + 1]
        async with run.episode(max_turns=8) as at:
            for _ in range(6):
                if rng.random() < 0.3:
                    told += await asyncio.gather(*(run.ask(at, [*prompt, k]) for k in range(2)))
                elif rng.random() < 0.15:
                    waiting = asyncio.ensure_future(run.ask(at, prompt))
                    await asyncio.sleep(rng.random() * 0.1)
                    waiting.cancel()
                else:
                    told.append(await run.ask(at, prompt))
                prompt = [*prompt, *next((t for t in told[-1:] if isinstance(t, list)), [])][-20:]
                await asyncio.sleep(rng.choice([0, 0, 0.02, 0.1]))
        kept = records(at[0])
        assert all(each in kept for each in told if isinstance(each, list))
        assert all(each[0] == 400 for each in told if isinstance(each, tuple))  # out of turns

    async def quarantines(pool: EndpointPool) -> None:
        while True:
            await asyncio.sleep(0.3)
            endpoint = rng.choice(pool.endpoints)
            pool.quarantine(endpoint, "test")
            pool.confirm(endpoint, V1)

    for server in group:
        server.always = slow
    problems: list[Any] = []
    async with running(tmp_path, *group, max_inflight=2, max_retries=50) as run:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: problems.append(what))
        disturbing = asyncio.ensure_future(quarantines(run.pool))
        await asyncio.wait_for(asyncio.gather(*(play(run, n) for n in range(10))), 60)
        disturbing.cancel()
        for endpoint in run.pool.endpoints:
            held = endpoint.num_inflight, endpoint.num_reserved, endpoint.outstanding_tokens
            assert held == (0, 0, 0)
        assert not run.gateway._ahead and not run.gateway._leases
        assert len(run.fetched) < sum(len(server.requests) for server in group)
        await until(lambda: all(server.num_open == 0 for server in group))
        assert not problems
