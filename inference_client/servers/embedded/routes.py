"""vLLM's rollout and weight-update routes over the embedded engine.

Routes, methods and JSON follow vLLM 0.32, so that a client of vLLM's cannot tell the two apart; one
more streams samples (``sample_stream.py``), and ``/v1/models`` says so. Unlike there, a bearer
token guards every route but ``/health`` and ``/metrics``. ``stream: true`` on ``/v1/completions``
answers with server-sent events, one per finished choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any, TypeVar

import orjson
from aiohttp import web

from easyrl.inference_client.sample_stream import SAMPLES
from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.http_parts import (
    guarded_application,
    json_response,
    parse,
)
from easyrl.inference_client.servers.embedded.protocol import (
    AbortBody,
    AcceptBody,
    CheckerBody,
    CompletionBody,
    FinishBody,
    GenerateBody,
    InitBody,
    PauseQuery,
    RpcBody,
    SamplesBody,
    ShapesBody,
    TokenizeBody,
    UpdateBody,
    VersionBody,
    completion_response,
    generate_response,
)
from easyrl.inference_client.servers.embedded.requests import (
    GenerationRequest,
    Sequence,
    UnavailableError,
)
from easyrl.inference_client.servers.embedded.streaming import SampleStream

T = TypeVar("T")


class EmbeddedServer:
    """The routes of one engine."""

    def __init__(self, engine: EmbeddedEngine, served_model_name: str) -> None:
        self._engine = engine
        self._weights = engine.weights
        self._model = served_model_name
        self._started = int(time.time())

    def app(self, api_key: str | None = None) -> web.Application:
        """The application; with ``api_key`` every route but the open ones asks for it."""
        app = guarded_application(api_key)
        app.add_routes(
            [
                web.post("/inference/v1/generate", self._generate),
                web.post("/inference/v1/abort_requests", self._abort_requests),
                web.post(SAMPLES, self._samples),
                web.post("/v1/completions", self._completions),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.post("/pause", self._pause),
                web.post("/resume", self._resume),
                web.get("/is_paused", self._is_paused),
                web.post("/abort_requests", self._abort_requests),
                web.post("/init_weight_transfer_engine", self._init_weight_transfer),
                web.post("/start_weight_update", self._start_weight_update),
                web.post("/update_weights", self._update_weights),
                web.post("/finish_weight_update", self._finish_weight_update),
                web.post("/collective_rpc", self._collective_rpc),
                web.post("/update_weight_version", self._update_weight_version),
                web.get("/weight_info", self._weight_info),
                web.post("/weight_checker", self._weight_checker),
                web.post("/reset_prefix_cache", self._reset_prefix_cache),
                web.get("/get_world_size", self._get_world_size),
            ]
        )
        return app

    # --- generation ---

    async def _generate(self, http: web.Request) -> web.Response:
        body = await parse(http, GenerateBody)
        self._check_model(body.model)
        (samples,) = await self._run([body.request(self._engine)])
        return json_response(generate_response(body, samples, self._engine, self._model))

    async def _samples(self, http: web.Request) -> web.StreamResponse:
        """Our own: what a trainer asks for at once, streamed sample by sample, as arrays."""
        # no name holds what was asked for: a sample's part of it goes when that has been sent
        stream = SampleStream(self._engine, (await parse(http, SamplesBody)).requests())
        return await stream.send(http)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        body = await parse(http, CompletionBody)
        self._check_model(body.model)
        results = await self._run(body.requests(self._engine))
        whole = completion_response(body, results, self._engine, self._model)
        return await self._stream(http, body, whole) if body.stream else json_response(whole)

    async def _stream(
        self, http: web.Request, body: CompletionBody, whole: dict[str, Any]
    ) -> web.StreamResponse:
        """All choices, each as one event; errors came before as plain JSON."""
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

    async def _tokenize(self, http: web.Request) -> web.Response:
        ids = (await parse(http, TokenizeBody)).token_ids(self._engine)
        limit = self._engine.max_model_len
        return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids})

    async def _run(self, requests: list[GenerationRequest]) -> list[list[Sequence]]:
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

    async def _abort_requests(self, http: web.Request) -> web.Response:
        body = await parse(http, AbortBody)
        count = await _done(self._engine.abort_ids(body.request_ids or []))
        return json_response({"status": "aborted", "aborted": count})

    async def _pause(self, http: web.Request) -> web.Response:
        query = PauseQuery.model_validate(dict(http.query))
        await _done(self._engine.pause(query.mode))  # type: ignore[arg-type]
        return json_response({"status": "paused"})

    async def _resume(self, http: web.Request) -> web.Response:
        await _done(self._engine.resume())
        return json_response({"status": "resumed"})

    async def _is_paused(self, http: web.Request) -> web.Response:
        return json_response({"is_paused": await _done(self._engine.is_paused())})

    async def _reset_prefix_cache(self, http: web.Request) -> web.Response:
        await _done(self._engine.reset_prefix_cache())
        return json_response({"success": True})

    # --- what the server is ---

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
            "streams_samples": True,
            "max_num_seqs": self._engine.max_num_seqs,
            "applies_stop_strings": self._engine.tokenizer is not None,
        }
        return json_response({"object": "list", "data": [card]})

    async def _health(self, http: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.is_alive else 503)

    async def _version(self, http: web.Request) -> web.Response:
        return json_response({"version": "easyrl"})

    async def _get_world_size(self, http: web.Request) -> web.Response:
        return json_response({"world_size": 1})

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

    # --- weights ---

    async def _init_weight_transfer(self, http: web.Request) -> web.Response:
        body = await parse(http, InitBody)
        await _done(self._weights.announce(body.init_info))
        return json_response({"message": "Weight transfer initialized"})

    async def _start_weight_update(self, http: web.Request) -> web.Response:
        await _done(self._weights.start())
        return json_response({"message": "Weight update started"})

    async def _update_weights(self, http: web.Request) -> web.Response:
        info = (await parse(http, UpdateBody)).update_info
        if info.abandon:
            await _done(self._weights.abandon())
            raise web.HTTPBadRequest(text="the weight update was abandoned, as asked for")
        await _done(self._weights.load(info.artifact, info.chunks))
        return json_response({"message": "Weights updated"})

    async def _finish_weight_update(self, http: web.Request) -> web.Response:
        body = await parse(http, FinishBody)
        await _done(self._weights.finish(body.weight_version))
        return json_response({"message": "Weight update finished"})

    async def _collective_rpc(self, http: web.Request) -> web.Response:
        """What the vLLM plugin adds to vLLM's workers, but for adapters."""
        body = (await parse(http, RpcBody)).root
        if isinstance(body, ShapesBody):
            problems = await _done(self._weights.compare_shapes(body.kwargs.tensors))
            return json_response({"results": [{"problems": problems}]})
        if isinstance(body, AcceptBody):
            await _done(self._weights.accept_proof(body.kwargs.nonce))
            return json_response({"results": [{}]})
        asked = body.kwargs
        proof = await _done(self._weights.prove(asked.nonce, asked.tensors.keys()))
        return json_response({"results": [asdict(proof)]})

    async def _update_weight_version(self, http: web.Request) -> web.Response:
        body = await parse(http, VersionBody)
        await _done(self._engine.set_weight_version(body.new_version))
        return json_response({"success": True, "new_version": body.new_version})

    async def _weight_info(self, http: web.Request) -> web.Response:
        return json_response({"weight_version": await _done(self._engine.weight_version())})

    async def _weight_checker(self, http: web.Request) -> web.Response:
        body = await parse(http, CheckerBody)
        served = await _done(self._weights.checksums())
        if body.action == "checksum":
            return json_response({"checksums": served})
        differing = served.items() ^ (body.baseline or {}).items()
        mismatches = sorted({name for name, _ in differing})
        return json_response({"match": not mismatches, "mismatches": mismatches})


async def _done(future: Future[T]) -> T:
    """The result of a command; its ``ValueError`` is the caller's mistake."""
    try:
        return await asyncio.wrap_future(future)
    except ValueError as error:
        raise web.HTTPBadRequest(text=str(error)) from None
