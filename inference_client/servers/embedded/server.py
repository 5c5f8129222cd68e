"""``easyrl serve MODEL``: vLLM's rollout and weight-update routes over the embedded engine.

Routes, methods and JSON follow vLLM 0.32, so that a trainer cannot tell the two apart. Unlike
there, a bearer token guards every route but ``/health``. ``stream: true`` on ``/v1/completions``
answers with server-sent events, one per finished choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import torch
import typer
from aiohttp import web

from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.http import (
    authentication,
    done,
    errors,
    json_response,
    parse,
)
from easyrl.inference_client.servers.embedded.loading import DTYPES
from easyrl.inference_client.servers.embedded.protocol import (
    AbortBody,
    CompletionBody,
    GenerateBody,
    PauseQuery,
    completion_response,
    generate_response,
)
from easyrl.inference_client.servers.embedded.requests import (
    GeneratedSample,
    GenerationRequest,
    UnavailableError,
)
from easyrl.inference_client.servers.embedded.sampling import LogprobsMode
from easyrl.inference_client.servers.embedded.weight_routes import WeightRoutes

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 2**20


class EmbeddedServer:
    """The routes of one engine."""

    def __init__(self, engine: EmbeddedEngine, served_model_name: str) -> None:
        self._engine = engine
        self._model = served_model_name
        self._started = int(time.time())

    def app(self, api_key: str | None = None) -> web.Application:
        """The application; with ``api_key`` every route but ``/health`` asks for it."""
        middlewares: list[Any] = [authentication(api_key)] if api_key else []
        middlewares.append(errors)
        app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort_requests),
                web.post("/v1/completions", self._completions),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/abort_requests", self._abort_requests),
                *WeightRoutes(self._engine).all(),
                web.get("/get_world_size", self._get_world_size),
            ]
        )
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        body = await parse(http, GenerateBody)
        self._check_model(body.model)
        request = body.request(self._engine)
        (samples,) = await self._run([request])
        return json_response(generate_response(body, request, samples, self._engine, self._model))

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await parse(http, CompletionBody)
        self._check_model(body.model)
        requests = body.requests(self._engine)
        if body.stream:
            return await self._stream_completions(http, body, requests)
        results = await self._run(requests)
        return json_response(
            completion_response(body, requests, results, self._engine, self._model)
        )

    async def _stream_completions(
        self, http: web.Request, body: CompletionBody, requests: list[GenerationRequest]
    ) -> web.StreamResponse:
        """All choices, each as one event; errors come before the stream begins, as plain JSON."""
        results = await self._run(requests)
        whole = completion_response(body, requests, results, self._engine, self._model)
        choices, usage = whole.pop("choices"), whole.pop("usage")
        events: list[dict[str, Any]] = [{**whole, "choices": [choice]} for choice in choices]
        if (body.stream_options or {}).get("include_usage"):
            events.append({**whole, "choices": [], "usage": usage})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        for event in events:
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _run(self, requests: list[GenerationRequest]) -> list[list[GeneratedSample]]:
        """All requests' samples; a client that has gone or an error aborts what is left."""
        submitted: list[GenerationRequest] = []
        try:
            for request in requests:
                self._engine.submit(request)
                submitted.append(request)
            return [await asyncio.wrap_future(request.future) for request in requests]
        except BaseException:
            with contextlib.suppress(UnavailableError):  # the engine ends them itself
                for request in submitted:
                    self._engine.abort(request)
            raise

    def _check_model(self, model: str | None) -> None:
        if model not in (None, "", self._model):
            message = f"The model `{model}` does not exist, this server has `{self._model}`."
            raise web.HTTPNotFound(text=message)

    async def _models(self, http: web.Request) -> web.Response:
        card = {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "easyrl",
            "root": self._model,
            "parent": None,
            "max_model_len": self._engine.max_model_len,
            "batch_invariant": self._engine.batch_invariant,
            "arithmetic": self._engine.arithmetic,
        }
        return json_response({"object": "list", "data": [card]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.is_alive else 503)

    async def _version(self, http: web.Request) -> web.Response:
        return json_response({"version": "easyrl"})

    async def _metrics(self, http: web.Request) -> web.Response:
        engine, stats = self._engine, self._engine.stats
        gauges = {
            "vllm:num_requests_running": engine.num_running,
            "vllm:num_requests_waiting": engine.num_waiting,
            "vllm:generation_tokens_total": stats.generated_tokens,
            "vllm:prompt_tokens_total": stats.prefilled_tokens,
            "easyrl:finished_requests_total": stats.finished_requests,
            "easyrl:decode_steps_total": stats.decode_steps,
            "easyrl:busy_seconds_total": stats.busy_s,
        }
        return web.Response(text="".join(f"{name} {value}\n" for name, value in gauges.items()))

    async def _pause(self, http: web.Request) -> web.Response:
        query = PauseQuery.model_validate(dict(http.query))
        await done(self._engine.pause(query.mode))  # type: ignore[arg-type]
        return json_response({"status": "paused"})

    async def _resume(self, http: web.Request) -> web.Response:
        await done(self._engine.resume())
        return json_response({"status": "resumed"})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return json_response({"is_paused": await done(self._engine.is_paused())})

    async def _abort_requests(self, http: web.Request) -> web.Response:
        body = await parse(http, AbortBody)
        count = await done(self._engine.abort_ids(body.request_ids or []))
        return json_response({"status": "aborted", "aborted": count})

    async def _get_world_size(self, http: web.Request) -> web.Response:
        return json_response({"world_size": 1})


async def start_site(
    app: web.Application, host: str, port: int
) -> tuple[web.AppRunner, str]:  # runner, URL
    """Listens; port 0 takes a free one. ``runner.cleanup()`` stops."""
    # a client that hangs up cancels its handler, and with it its request
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=5)
    await runner.setup()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    await web.SockSite(runner, listener).start()
    shown = f"[{host}]" if ":" in host else host
    return runner, f"http://{shown}:{listener.getsockname()[1]}"


def serve(
    model: Annotated[Path, typer.Argument(help="directory of a Hugging Face causal LM")],
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0: a free one, see the ready line")] = 8000,
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "auto",
    device: Annotated[str, typer.Option(help="as torch names it, such as cuda:0")] = "cpu",
    max_num_seqs: Annotated[int, typer.Option(help="sequences in the batch")] = 256,
    max_model_len: Annotated[
        int | None, typer.Option(help="prompt and response; default: model's")
    ] = None,
    max_queue: Annotated[int, typer.Option(help="waiting samples before 503")] = 4096,
    logprobs_mode: LogprobsMode = "processed_logprobs",
    api_key: Annotated[
        str | None, typer.Option(envvar="EASYRL_API_KEY", help="bearer token")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="default: the path")] = None,
    num_threads: Annotated[
        int | None, typer.Option(help="of torch; default: torch's, 1 with --batch-invariant")
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="decode each response by itself, so that no other request can change a bit of it",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="for requests without one")] = 0,
) -> None:
    """Serve MODEL with vLLM's rollout and weight-update routes until SIGINT or SIGTERM.

    Prints one line with the URL when it is ready. Flags are vLLM's where vLLM has them.
    """
    if batch_invariant:
        torch.use_deterministic_algorithms(True)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        num_threads = num_threads or 1  # their number decides the order of sums
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    engine = EmbeddedEngine(
        model,
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_queue=max_queue,
        logprobs_mode=logprobs_mode,
        seed=seed,
        batch_invariant=batch_invariant,
    )
    app = EmbeddedServer(engine, served_model_name or str(model)).app(api_key)
    try:
        asyncio.run(_serve_until_signal(app, engine, host, port, f"easyrl serve: {model}"))
    finally:
        engine.close()


async def _serve_until_signal(
    app: web.Application, engine: EmbeddedEngine, host: str, port: int, what: str
) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    runner, url = await start_site(app, host, port)
    gc.collect()
    gc.freeze()  # what imports left behind; walking it held every request up for 0.2 s
    print(f"{what} ready at {url}", flush=True)
    await stopped.wait()
    with contextlib.suppress(UnavailableError):  # then there is nothing to abort
        await asyncio.wrap_future(engine.pause("abort"))
    await runner.cleanup()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(serve)
    try:
        app(argv, prog_name="easyrl serve")
    except SystemExit as end:
        return int(end.code or 0)
    except (ValueError, OSError) as error:  # a model or setting that cannot be served, a taken port
        print(f"easyrl serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
