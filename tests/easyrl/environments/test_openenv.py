"""OpenEnv's protocol, with sessions over WebSockets and without, against a server written here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from easyrl.config import EnvironmentConfig
from easyrl.environments.failures import EnvironmentFailed, EnvironmentUnreachable
from easyrl.environments.hosts import EnvironmentHosts
from tests.easyrl.environments.environment_cases import prompt, rollout, running
from tests.easyrl.environments.scripted_chat import ScriptedChat, refuses, says


class Countdown:
    """Says a number; each "down" takes one, and zero ends it with a reward of 1."""

    def __init__(self) -> None:
        self.number = 0

    def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        reward = None
        if kind == "reset":
            self.number = data["seed"]
        elif data["message"] == "down":
            self.number -= 1
            reward = 1.0 if self.number == 0 else 0.25
        return {
            "observation": {"text": f"at {self.number}", "metadata": {}},
            "reward": reward,
            "done": self.number == 0,
        }


@asynccontextmanager
async def server(*, has_sessions: bool, most: int = 100) -> AsyncIterator[str]:
    shared, num_open = Countdown(), 0

    async def session(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        own = Countdown()
        nonlocal num_open
        if num_open >= most:
            full = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": most}
            await socket.send_json({"type": "error", "data": full})
            return socket
        num_open += 1
        try:
            return await answered(socket, own)
        finally:
            num_open -= 1

    async def answered(socket: web.WebSocketResponse, own: Countdown) -> web.StreamResponse:
        async for message in socket:
            if message.type is not WSMsgType.TEXT or message.json()["type"] == "close":
                break
            asked = message.json()
            if asked["data"].get("message") == "break":
                fault = {"message": "it broke", "code": "EXECUTION_ERROR"}
                await socket.send_json({"type": "error", "data": fault})
                continue
            data = own.answer(asked["type"], asked["data"])
            await socket.send_json({"type": "observation", "data": data})
        return socket

    async def plain(request: web.Request) -> web.Response:
        body = await request.json()
        kind = request.match_info["kind"]
        return web.json_response(shared.answer(kind, body["action"] if kind == "step" else body))

    app = web.Application()
    if has_sessions:
        app.router.add_get("/ws", session)
    else:
        app.router.add_post("/{kind:reset|step}", plain)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("has_sessions", [True, False])
async def test_rollouts_at_the_same_time_have_environments_of_their_own(has_sessions: bool) -> None:
    async with server(has_sessions=has_sessions) as url, ScriptedChat(lambda _: says("down")) as c:
        environment = EnvironmentConfig(name="count", openenv=url, observation="text")
        async with running(environment) as hosts:
            outcomes = await asyncio.gather(
                *(rollout(hosts, c, session=str(n), seed=n) for n in (1, 2, 3))
            )
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.25, 1.5]
    assert outcomes[2].turn_rewards == (0.25, 0.25, 1.0)
    assert outcomes[2].components == {"turns": 3.0, "done": 1.0}
    last = max((body["messages"] for body in c.bodies), key=len)
    assert [message["content"] for message in last] == [
        "hello",
        "at 3",
        "down",
        "at 2",
        "down",
        "at 1",
    ]


async def test_the_turns_and_the_context_end_it() -> None:
    answers = iter([says("up"), says("up"), says("up"), refuses(400, "maximum context length")])
    async with server(has_sessions=True) as url, ScriptedChat(lambda _: next(answers)) as chat:
        environment = EnvironmentConfig(name="count", openenv=url, max_turns=2)
        async with running(environment) as hosts:
            assert (await rollout(hosts, chat)).components == {"turns": 2.0, "done": 0.0}
            assert (await rollout(hosts, chat)).components == {"turns": 1.0, "done": 0.0}
    assert chat.bodies[0]["messages"][-1]["content"] == '{"text": "at 7", "metadata": {}}'


async def test_what_the_server_says_of_an_error() -> None:
    async with server(has_sessions=True) as url, ScriptedChat(lambda _: says("break")) as chat:
        environment = EnvironmentConfig(name="count", openenv=url)
        async with running(environment) as hosts:
            with pytest.raises(EnvironmentFailed, match="step: EXECUTION_ERROR it broke"):
                await rollout(hosts, chat, prompt())
        environment = EnvironmentConfig(name="count", openenv=url, observation="words")
        async with running(environment) as hosts:
            with pytest.raises(EnvironmentFailed, match="has no field 'words'"):
                await rollout(hosts, chat, prompt())


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "several hosts"])
async def test_a_server_that_cannot_be_used_is_said_at_the_start(url: str) -> None:
    async with server(has_sessions=False) as plain:
        is_missing = url.startswith("http")
        environment = EnvironmentConfig(
            name="count", openenv=url if is_missing else plain, num_hosts=2
        )
        hosts = EnvironmentHosts(environment)
        try:
            says_so = "ClientConnectorError" if is_missing else "set num_hosts to 1"
            with pytest.raises(EnvironmentFailed, match=says_so):
                await hosts.start()
        finally:
            await hosts.close()


@pytest.mark.parametrize("most", [1, 2, 100, None])
async def test_how_many_rollouts_may_be_open_is_asked_for(most: int | None) -> None:
    """A server refuses a session too many, and says then how many it serves; plain HTTP has one."""
    async with server(has_sessions=most is not None, most=most or 1) as url:
        environment = EnvironmentConfig(name="count", openenv=url)
        async with running(environment) as hosts:
            assert hosts.max_rollouts == {1: 1, 2: None, 100: None, None: 1}[most]
        environment = EnvironmentConfig(name="count", openenv=url, max_rollouts=7)
        async with running(environment) as hosts:
            assert hosts.max_rollouts == 7


async def test_a_full_server_is_no_failure_of_the_rollout() -> None:
    async with (
        server(has_sessions=True, most=2) as url,
        ScriptedChat(lambda _: says("down"), delay_s=0.3) as chat,
        running(EnvironmentConfig(name="count", openenv=url)) as hosts,
    ):
        runs = [asyncio.ensure_future(rollout(hosts, chat, session=str(n))) for n in range(3)]
        made = await asyncio.gather(*runs, return_exceptions=True)
        (refused,) = [each for each in made if isinstance(each, Exception)]
        assert isinstance(refused, EnvironmentUnreachable) and "CAPACITY_REACHED" in str(refused)


async def test_a_server_that_ends_is_unreachable() -> None:
    async with AsyncExitStack() as opened:
        url = await opened.enter_async_context(server(has_sessions=True))
        chat = await opened.enter_async_context(ScriptedChat(lambda _: says("down")))
        environment = EnvironmentConfig(name="count", openenv=url)
        hosts = await opened.enter_async_context(running(environment))
        other = AsyncExitStack()
        gone = await other.enter_async_context(server(has_sessions=True))
        await other.aclose()
        assert (await rollout(hosts, chat, seed=1)).reward == 1.0
    async with ScriptedChat() as chat:
        hosts = EnvironmentHosts(EnvironmentConfig(name="count", openenv=gone))
        try:
            with pytest.raises(EnvironmentUnreachable):
                await hosts.start()
        finally:
            await hosts.close()
