"""An OpenEnv server: reset and step over a WebSocket, a session for each rollout; else over HTTP.

The model is shown the observation and its text is the action. Its reward is the sum of the steps'.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp

from easyrl.environments.client import Client, Connections, RequestFailed

FULL = "CAPACITY_REACHED"  # its code for a session too many
REFUSAL_S = 0.5  # in which it says so, unasked
NOT_UP = (502, 503, 504)  # HTTP: what a proxy says of a server that is not up
MOST_BYTES = 100 * 2**20  # of a message: observations may hold pictures


class OpenEnvError(RuntimeError):
    """The server's answer is an error, or none of OpenEnv's."""


class ServerUnreachable(OpenEnvError, ConnectionError):
    """The server is not there, or serves as many sessions as it will: later it may."""


class OpenEnv:
    """A server of environments at ``openenv``."""

    num_hung_threads = 0  # beside those of the event loop

    def __init__(self, settings: dict[str, Any]) -> None:
        self._url = _http(settings["openenv"])
        self._action, self._observation = settings["action"], settings["observation"]
        self._max_turns = settings["max_turns"]
        self._num_hosts = settings["num_hosts"]
        self._connections = Connections()
        self._alone = asyncio.Lock()  # plain HTTP has no sessions: one rollout at a time
        self._has_sessions: bool | None = None
        self.max_rollouts: int | None = None  # open at a time; None: the server does not say

    async def start(self) -> None:
        async with self._environment() as one:
            if self._has_sessions:
                async with self._environment() as other:
                    said = await asyncio.gather(one.most_sessions(), other.most_sessions())
                    self.max_rollouts = next((most for most in said if most is not None), None)
            else:
                self.max_rollouts = 1
        if not self._has_sessions and self._num_hosts > 1:
            raise OpenEnvError(
                f"{self._url} has no WebSocket, so that all rollouts share one environment; set "
                "num_hosts to 1"
            )

    async def rollout(self, session: Any, prompt: Any) -> dict[str, Any]:
        client = self._connections.client(session.base_url, session.api_key, session.model)
        async with self._environment() as environment:
            try:
                return await self._episode(client, prompt, environment)
            except aiohttp.ServerDisconnectedError as error:
                raise ServerUnreachable(f"{self._url} has closed the connection") from error

    async def _episode(self, client: Client, prompt: Any, environment: _Calls) -> dict[str, Any]:
        result = await environment.call("reset", {"seed": prompt.seed})
        messages = list(prompt.messages) + [self._shown(result)]
        turn_rewards: list[float] = []
        while not result.get("done") and len(turn_rewards) < self._max_turns:
            try:
                reply = await client.chat(messages)
            except RequestFailed as error:
                if not error.is_context_end:
                    raise
                break
            messages.append(reply.message)
            result = await environment.call("step", {self._action: reply.text})
            messages.append(self._shown(result))
            turn_rewards.append(float(result.get("reward") or 0.0))
            if reply.finish_reason == "length":
                break
        return {
            "reward": sum(turn_rewards),
            "turn_rewards": turn_rewards,
            "components": {"turns": len(turn_rewards), "done": bool(result.get("done"))},
        }

    def _shown(self, result: dict[str, Any]) -> dict[str, str]:
        observation = result.get("observation")
        if self._observation is not None:
            if not isinstance(observation, dict) or self._observation not in observation:
                raise OpenEnvError(
                    f"an observation has no field {self._observation!r}, which observation names: "
                    f"{observation!r:.300}"
                )
            observation = observation[self._observation]
        text = observation if isinstance(observation, str) else json.dumps(observation)
        return {"role": "user", "content": text}

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[_Calls]:
        http = self._connections.http()
        if self._has_sessions is not False:
            try:
                async with http.ws_connect(
                    self._url.replace("http", "ws", 1) + "/ws", max_msg_size=MOST_BYTES
                ) as socket:
                    self._has_sessions = True
                    yield _Session(socket)
                    with suppress(ConnectionError):  # the server has closed it
                        await socket.send_json({"type": "close"})
                    return
            except aiohttp.WSServerHandshakeError as error:
                if error.status in NOT_UP:
                    raise ServerUnreachable(f"{self._url}/ws answers {error.status}") from error
                if error.status not in (404, 405):
                    raise OpenEnvError(f"{self._url}/ws answers {error.status}") from error
                self._has_sessions = False
        async with self._alone:
            yield _Plain(self._url, http)


class _Calls:
    """What a rollout asks of its environment."""

    async def most_sessions(self) -> int | None:
        """How many the server serves at a time, if it says that this one is too many."""
        return None

    async def call(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError


class _Session(_Calls):
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket

    async def most_sessions(self) -> int | None:
        try:
            answer = await self._socket.receive(timeout=REFUSAL_S)
        except TimeoutError:
            return None
        if answer.type is not aiohttp.WSMsgType.TEXT:
            return 1  # closed at once: an earlier version's way to say it
        said = json.loads(answer.data).get("data") or {}
        return max(1, int(said.get("max_sessions") or 1)) if said.get("code") == FULL else None

    async def call(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_json({"type": kind, "data": data})
        answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ServerUnreachable(f"the server closed the session during {kind}")
        message = json.loads(answer.data)
        if message.get("type") == "error":
            error = message.get("data") or {}
            said = f"{kind}: {error.get('code', '')} {error.get('message', error)}"
            if error.get("code") == FULL:
                raise ServerUnreachable(said)
            raise OpenEnvError(said)
        result: dict[str, Any] = message.get("data") or {}
        return result


class _Plain(_Calls):
    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url, self._http = url, http

    async def call(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        body = {"action": data} if kind == "step" else data
        async with self._http.post(f"{self._url}/{kind}", json=body) as response:
            if response.status != 200:
                said = f"{self._url}/{kind} answers {response.status}"
                if response.status in NOT_UP:
                    raise ServerUnreachable(said)
                raise OpenEnvError(f"{said}: {(await response.text())[:300]}")
            result: dict[str, Any] = await response.json()
            return result


def load(settings: dict[str, Any]) -> OpenEnv:
    return OpenEnv(settings)


def _http(url: str) -> str:
    for ours, theirs in (("ws://", "http://"), ("wss://", "https://")):
        url = theirs + url.removeprefix(ours) if url.startswith(ours) else url
    return url.rstrip("/")
