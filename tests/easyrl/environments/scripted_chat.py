"""A server with the gateway's routes whose answers the test scripts."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

# of a chat request's body: the message, or a whole error
Script = Callable[[dict[str, Any]], dict[str, Any] | web.Response]


def says(content: str, *, finish_reason: str = "stop") -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": content}, "finish_reason": finish_reason}


def calls(*calls: tuple[str, str]) -> dict[str, Any]:
    """A message that calls tools: names and arguments as they were written."""
    made = [
        {"id": f"call-{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "tool_calls": made}
    return {"message": message, "finish_reason": "tool_calls"}


def refuses(status: int, message: str, code: str | None = None) -> web.Response:
    return web.json_response({"error": {"message": message, "code": code}}, status=status)


@dataclass
class ScriptedChat:
    """Use as an asynchronous context manager. Any session is there, and ``key`` opens it."""

    script: Script = lambda body: says(f"echo {body['messages'][-1]['content']}")
    key: str = "key"
    delay_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)  # of the requests, in order
    url: str = ""

    def __post_init__(self) -> None:
        self._open: dict[str, int] = defaultdict(int)
        self._last_s: dict[str, float] = {}

    def session(self, name: str) -> str:
        return f"{self.url}/sessions/{name}/v1"

    def seconds_since_request(self, name: str) -> float:
        if self._open[name]:
            return 0.0
        return time.monotonic() - self._last_s.get(name, float("-inf"))

    async def __aenter__(self) -> ScriptedChat:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/sessions/{name}/v1/chat/completions", self._chat)
        app.router.add_post("/sessions/{name}/inference/v1/generate", self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _asked(self, request: web.Request) -> dict[str, Any]:
        if request.headers.get("Authorization") != f"Bearer {self.key}":
            raise web.HTTPUnauthorized
        body = await request.json()
        name = request.match_info["name"]
        self.bodies.append(body)
        self.sessions.append(name)
        self._open[name] += 1
        try:
            await asyncio.sleep(self.delay_s)
        finally:
            self._open[name] -= 1
            self._last_s[name] = time.monotonic()
        return body

    async def _chat(self, request: web.Request) -> web.Response:
        body = await self._asked(request)
        choice = self.script(body)
        if isinstance(choice, web.Response):
            return choice
        return web.json_response(
            {
                "id": f"chatcmpl-{len(self.bodies)}",
                "object": "chat.completion",
                "created": 0,
                "model": body["model"],
                "choices": [{"index": 0, "logprobs": None, **choice}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
            }
        )

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self._asked(request)
        ids = [token + 1 for token in body["token_ids"]]
        logprobs = [{"token_id": token, "logprob": -0.5} for token in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop"}
        return web.json_response({"choices": [choice | {"logprobs": {"content": logprobs}}]})
