"""A small client of a rollout's session: chats with tools, and token ids in and out.

What ``openai`` does for a rollout, with aiohttp alone, and the token route besides.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

read_json: Callable[[bytes], Any]
try:  # answers with log-probabilities are long, and it takes half of the time
    from orjson import loads as read_json
except ImportError:  # an environment's own Python need not have it
    read_json = json.loads

CONNECT_TIMEOUT_S = 30.0
MOST_RETRIES = 3  # of a connection that failed before anything was answered
RETRY_AFTER_S = 0.5
CONTEXT_CODES = ("context_length_exceeded",)


class RequestFailed(RuntimeError):
    """The gateway's answer is an error: its ``status``, ``code`` and message."""

    def __init__(self, status: int, code: str | None, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status, self.code, self.message = status, code, message

    @property
    def is_context_end(self) -> bool:
        """Whether the conversation has become longer than the model's context."""
        text = self.message.lower()
        return self.code in CONTEXT_CODES or (
            self.status in (400, 413)
            and ("context length" in text or "context window" in text or "max_model_len" in text)
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model has asked for; ``arguments`` as it wrote them, JSON or not."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """The model's message."""

    message: dict[str, Any]  # to be appended to the messages as it is
    finish_reason: str  # "stop", "length" or "tool_calls"
    turn_id: str = ""  # a key of turn_rewards

    @property
    def text(self) -> str:
        return self.message.get("content") or ""

    @property
    def tool_calls(self) -> list[ToolCall]:
        return [
            ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in self.message.get("tool_calls") or ()
        ]


@dataclass(frozen=True, slots=True)
class Generated:
    """What the model sampled."""

    token_ids: list[int]
    logprobs: list[float]  # of these, nats
    finish_reason: str
    turn_id: str = ""  # a key of turn_rewards


class Client:
    """One rollout's access to the model. Raises ``RequestFailed``, or what aiohttp raises."""

    def __init__(
        self, connections: Connections, base_url: str, api_key: str, model: str = "policy"
    ) -> None:
        self._connections = connections
        self.base_url, self.api_key = base_url.rstrip("/"), api_key
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self.model = model

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> Reply:
        """The model's message behind ``messages``; ``more`` is of the request, as max_tokens."""
        body = {"model": self.model, "messages": list(messages), **more}
        if tools:
            body["tools"] = list(tools)
        answer = await self._post(f"{self.base_url}/chat/completions", body)
        choice = answer["choices"][0]
        message = {name: value for name, value in choice["message"].items() if value is not None}
        message.setdefault("content", "")
        return Reply(message, choice["finish_reason"], str(answer.get("id", "")))

    async def generate(self, token_ids: Sequence[int], **sampling: Any) -> Generated:
        """What the model samples behind ``token_ids``; ``sampling`` as max_tokens and stop."""
        body = {"token_ids": [int(token) for token in token_ids], "sampling_params": sampling}
        url = self.base_url.removesuffix("/v1") + "/inference/v1/generate"
        answer = await self._post(url, body)
        choice = answer["choices"][0]
        tokens = (choice.get("logprobs") or {}).get("content") or []
        logprobs = [float(token["logprob"]) for token in tokens]
        turn_id = str(answer.get("request_id", ""))
        return Generated(choice["token_ids"], logprobs, choice["finish_reason"], turn_id)

    async def _post(self, url: str, body: Mapping[str, Any]) -> dict[str, Any]:
        # half of a surrogate pair, as in a file name that a tool found, is no text: "?" is sent
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        headers = {**self._headers, "Content-Type": "application/json"}
        for retry in range(MOST_RETRIES + 1):
            try:
                async with self._connections.http().post(
                    url, data=data, headers=headers
                ) as response:
                    return _checked(response.status, await response.read())
            except aiohttp.ClientConnectorError:
                if retry == MOST_RETRIES:
                    raise
                await asyncio.sleep(RETRY_AFTER_S)
        raise AssertionError("unreachable")


class Connections:
    """What the clients of a process share: connections to the gateway."""

    def __init__(self) -> None:
        self._http: aiohttp.ClientSession | None = None

    def http(self) -> aiohttp.ClientSession:
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                # an answer takes as long as it takes: the run bounds it
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._http

    def client(self, base_url: str, api_key: str, model: str = "policy") -> Client:
        return Client(self, base_url, api_key, model)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


def _checked(status: int, data: bytes) -> dict[str, Any]:
    try:
        answer = read_json(data)
    except ValueError:
        answer = None
    if status == 200 and isinstance(answer, dict):
        return answer
    error = answer.get("error") if isinstance(answer, dict) else None
    if isinstance(error, dict):
        code = error.get("code")
        raise RequestFailed(status, None if code is None else str(code), str(error.get("message")))
    raise RequestFailed(status, None, data[:500].decode(errors="replace"))
