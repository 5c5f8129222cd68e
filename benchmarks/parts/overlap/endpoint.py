"""An inference endpoint that sleeps instead of computing: vLLM's routes, random tokens.

It stands in for servers on devices of their own. A request's seed says how many tokens its response
has; one that ignores the end token has all. Weights are taken and thrown away: a run against it has
to switch the proofs off (``weight_sync.prove`` and ``probe``, and ``canary``, or take any answer
for it with ``weight_sync.canary_tolerance``).
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Self

import numpy as np
import orjson
from aiohttp import web

from easyrl.inference_client.client import GENERATE
from easyrl.inference_client.servers.managed.server_process import HOST
from easyrl.runtime.loop_thread import LoopThread

ANSWERS = {
    "/v1/models": {"data": [{"id": "sleeping", "max_model_len": None}]},
    "/reset_prefix_cache": {"success": True},
    "/update_weight_version": {"success": True},
}
EMPTY = ("/health", "/pause", "/resume", "/init_weight_transfer_engine", "/start_weight_update")
EMPTY += ("/update_weights", "/finish_weight_update")


class SleepingEndpoint:
    """A context manager; serves from a thread of this process.

    Args:
        vocab_size: V; tokens are uniform, and their log-probability is that of a model that knows
            nothing.
        end_id: the last token of each response.

    Attributes:
        url: once entered.
        seconds_per_token: how long a response takes, by its length. May be changed between runs.
    """

    def __init__(self, vocab_size: int, end_id: int) -> None:
        self._vocab_size, self._end_id = vocab_size, end_id
        self.seconds_per_token = 0.0
        self._version = "default"

    def __enter__(self) -> Self:
        self._thread = LoopThread("endpoint")
        self._thread.run(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._runner.cleanup())
        self._thread.close()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=2**30)
        app.router.add_post(GENERATE, self._generate)
        app.router.add_route("*", "/{path:.*}", self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        version, sampling = self._version, body["sampling_params"]
        rng = np.random.default_rng(sampling["seed"])
        ends = not sampling.get("ignore_eos")  # a canary does not
        least = sampling["min_tokens"] if ends else sampling["max_tokens"]
        num_tokens = int(rng.integers(max(least, 1), sampling["max_tokens"] + 1))
        token_ids = rng.integers(0, self._vocab_size, num_tokens).tolist()
        if ends:
            token_ids[-1] = self._end_id
        await asyncio.sleep(num_tokens * self.seconds_per_token)
        logprob = -math.log(self._vocab_size)
        choice = {
            "index": 0,
            "finish_reason": "stop" if ends else "length",
            "token_ids": token_ids,
            "weight_versions": [{"version": version, "start": 0, "end": num_tokens}],
            "logprobs": {"content": [{"token_id": t, "logprob": logprob} for t in token_ids]},
        }
        usage = {"prompt_tokens": len(body["token_ids"])}
        content = orjson.dumps({"choices": [choice], "usage": usage})
        return web.Response(body=content, content_type="application/json")

    async def _control(self, request: web.Request) -> web.Response:
        content = await request.read()
        body: dict[str, Any] = orjson.loads(content) if content else {}
        self._version = body.get("weight_version") or body.get("new_version") or self._version
        if request.path == "/weight_info":
            return web.json_response({"weight_version": self._version})
        if request.path in ANSWERS:
            return web.json_response(ANSWERS[request.path])
        return web.json_response({}, status=200 if request.path in EMPTY else 404)
