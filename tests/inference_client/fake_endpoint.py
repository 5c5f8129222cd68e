"""A small server with vLLM's routes whose timing and faults the test scripts.

Nothing here sleeps: a response comes at once, or when the test opens a gate. Faults are queued and
used up by the next requests to ``/inference/v1/generate``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

Fault = Callable[["FakeEndpoint", web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


@dataclass
class FakeEndpoint:
    """Use as an asynchronous context manager. Token ``t`` of a response is ``seed + t``."""

    version: str = "default"
    model: str = "fake"
    num_tokens: int = 3
    api_key: str | None = None
    keys: set[str | None] = field(default_factory=set)  # Authorization headers that were sent
    has_tokenizer: bool = True
    healthy: bool = True
    max_model_len: int = 512
    card: dict[str, Any] = field(default_factory=dict)  # what /v1/models says besides
    generated_tokens: int | None = None  # what /metrics says, None: there is no such route
    world_size: Any = ...  # what /get_world_size says, ...: there is no such route
    gated: bool = False  # each generate request waits for its gate
    faults: deque[Fault] = field(default_factory=deque)
    always: Fault | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)  # bodies of generate, in order
    calls: list[tuple[str, Any]] = field(
        default_factory=list
    )  # other routes: path with query, body
    gates: list[asyncio.Event] = field(default_factory=list)  # of the gated requests, in order
    num_open: int = 0
    max_open: int = 0
    num_disconnected: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    running: asyncio.Event = field(default_factory=asyncio.Event)  # cleared: as after SIGSTOP

    def __post_init__(self) -> None:
        self.running.set()

    async def __aenter__(self) -> FakeEndpoint:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def listen(self, port: int = 0) -> None:
        app = web.Application(middlewares=[self._answer_while_running, self._authorize])
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_route("*", "/{path:.*}", self._control)
        # On a closed connection the handler is cancelled, as vLLM aborts the request.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Closes all connections; requests in flight fail at the client."""
        for gate in self.gates:
            gate.set()
        await self._runner.cleanup()

    async def restart(self, version: str = "default") -> None:
        """As a server that was killed and started again: its weights are not those it had."""
        await self.stop()
        self.version = version
        self.running.set()
        await self.listen(self.port)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for a state of this endpoint; the test's time-out says when it never comes."""
        async with self.changed:
            await asyncio.wait_for(self.changed.wait_for(condition), 20)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    @web.middleware
    async def _answer_while_running(self, request: web.Request, handler: Any) -> Any:
        """A stopped process still accepts connections, and answers nothing on any of them."""
        await self.running.wait()
        response = await handler(request)
        await self.running.wait()
        return response

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.keys.add(request.headers.get("Authorization"))
        guarded = request.path.startswith(("/v1", "/inference"))
        if self.api_key is not None and guarded:
            if request.headers.get("Authorization") != f"Bearer {self.api_key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if body.get("output_mode") == "text":
            if not self.has_tokenizer:
                return error_response(400, "output_mode='text' requires a tokenizer")
            return web.json_response({"choices": []})
        self.requests.append(body)
        self.num_open += 1
        self.max_open = max(self.max_open, self.num_open)
        gate = asyncio.Event()
        self.gates.append(gate)
        await self._notify()
        try:
            fault = self.faults.popleft() if self.faults else self.always
            if self.gated:
                await gate.wait()
            if fault is not None:
                return await fault(self, request, body)
            return web.Response(body=self.response(body), content_type="application/json")
        except asyncio.CancelledError:
            self.num_disconnected += 1
            raise
        finally:
            self.num_open -= 1
            await self._notify()

    def response(self, body: dict[str, Any], **changes: Any) -> bytes:
        """The body of a good answer; ``changes`` replace fields of every choice."""
        seed = body["sampling_params"]["seed"]
        num_tokens = min(self.num_tokens, body["sampling_params"].get("max_tokens", 16))
        choices = []
        for index in range(body["sampling_params"]["n"]):
            token_ids = [seed + index + t for t in range(num_tokens)]
            choice = {
                "index": index,
                "finish_reason": "stop",
                "token_ids": token_ids,
                "weight_versions": [{"version": self.version, "start": 0, "end": num_tokens}],
                "logprobs": {
                    "content": [{"token_id": token, "logprob": -0.5} for token in token_ids]
                },
            }
            choices.append(choice | changes)
        usage = {"prompt_tokens": len(body["token_ids"])}
        return orjson.dumps({"choices": choices, "usage": usage})

    async def _control(self, request: web.Request) -> web.StreamResponse:
        content = await request.read()
        body = orjson.loads(content) if content else None
        self.calls.append((request.path_qs, body))
        await self._notify()
        if request.path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if request.path == "/finish_weight_update":
            self.version = body["weight_version"]
        if request.path == "/update_weight_version":
            self.version = body["new_version"]
        if request.path == "/metrics" and self.generated_tokens is not None:
            count = self.generated_tokens
            return web.Response(text=f'vllm:generation_tokens_total{{engine="0"}} {count}.0\n')
        answers: dict[str, Any] = {
            "/v1/models": {
                "data": [{"id": self.model, "max_model_len": self.max_model_len, **self.card}]
            },
            "/weight_info": {"weight_version": self.version},
            "/reset_prefix_cache": {"success": True},
            "/update_weight_version": {"success": True},
        }
        if self.world_size is not ...:
            answers["/get_world_size"] = {"world_size": self.world_size}
        known = ("/pause", "/resume", "/abort_requests", "/init_weight_transfer_engine")
        known += ("/start_weight_update", "/update_weights", "/finish_weight_update")
        if request.path not in answers and request.path not in known:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(answers.get(request.path, {"message": "done"}))


def error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def status(code: int, message: str) -> Fault:
    """Answers an error."""

    async def fault(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
        return error_response(code, message)

    return fault


def answer(**changes: Any) -> Fault:
    """A response in which fields of every choice are replaced."""

    async def fault(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
        return web.Response(body=endpoint.response(body, **changes))

    return fault


async def hang(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def truncate(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
    """Half of the JSON, as if it were all."""
    content = endpoint.response(body)
    return web.Response(body=content[: len(content) // 2])


async def break_off(endpoint: FakeEndpoint, request: web.Request, body: dict) -> web.StreamResponse:
    """Announces a whole response, sends a part and closes the connection."""
    content = endpoint.response(body)
    response = web.StreamResponse(headers={"Content-Length": str(len(content))})
    await response.prepare(request)
    await response.write(content[:10])
    assert request.transport is not None
    request.transport.close()
    return response
