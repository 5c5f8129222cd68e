"""One inference endpoint: the routes for rollouts and weights (vLLM 0.32, ``easyrl serve``).

The server needs ``--enable-scale-out`` for ``/inference/v1/generate`` and
``VLLM_SERVER_DEV_MODE=1`` for the routes that touch weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import aiohttp
import msgspec
import numpy as np
import orjson

from easyrl.completion_check import CompletionLimits
from easyrl.config import SamplingConfig
from easyrl.inference_client.answers import (
    ANSWER_BYTES,
    BYTES_PER_TENSOR,
    BYTES_PER_TOKEN,
    MAX_WORKERS,
    RESPONSE_BYTES,
    Word,
    body_parts,
    decode,
    read_body,
    shorten,
)
from easyrl.inference_client.api_keys import KeyErasure
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    JointRequestRejected,
    MalformedResponse,
    NoSuchModel,
    NotAnswered,
    PromptRejected,
    RequestRejected,
    StreamsRefused,
)
from easyrl.inference_client.responses import GENERATE
from easyrl.inference_client.sample_stream import (
    ROUTE,
    SAMPLES,
    Ended,
    Refused,
    SampleReader,
    SamplesAsked,
)
from easyrl.inference_client.vllm_plugin.easyrl_vllm.slices import ServedSlice
from easyrl.schema import Completion

T = TypeVar("T")

# url, prompt int32 [P], sampling, seed → one response; raises ``EndpointError``
Fetch = Callable[[str, np.ndarray, SamplingConfig, int], Awaitable[Completion]]
Body = Mapping[str, Any] | None  # of a request, JSON-able
TensorShapes = Mapping[str, tuple[str, Sequence[int]]]  # by name: safetensors' dtype, shape

PROVE_WEIGHTS = "easyrl_prove_weights"  # a method of each worker, there by --worker-extension-cls
PROVE_ADAPTER = "easyrl_prove_adapter"
ACCEPT_PROOF = "easyrl_accept_proof"
COMPARE_SHAPES = "easyrl_compare_shapes"
MOST_DEVICES = 4096  # of a server; more is no number of devices
HEALTH_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 2.0  # below vLLM's 5 s, so that no request is sent into a connection being closed
TOKENIZE = "/tokenize"
ABORT = "/inference/v1/abort_requests"
NO_ROUTE = (404, 405)
PROMPT_AT_FAULT = (400, 413, 422)  # of a generate request: another prompt may be answered
# vLLM breaks a connection off after some errors; the next control request must not meet that. The
# embedded server does not.
CLOSE = {"Connection": "close"}
IDENTITY = {"Accept-Encoding": "identity"}  # see ``answers.read_body``
OVERLOADED = (408, 429)  # 4xx that say "later", not "never"
PROBE_IDS = [1]  # a prompt that every model takes
# 401, 403
KEY_HINT = "; set inference.api_key_env, or that of its entry, to the variable that holds its key"
# vLLM's names, which the embedded server uses too; a line per engine
TOKEN_COUNTERS = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? (\S+)", re.M)
PROXY_HINT = "; a proxy before the server has to pass it on"
ROUTE_HINT = "; start vLLM with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What ``/v1/models`` says of the first model."""

    name: str
    max_model_len: int | None  # prompt and response tokens together
    is_embedded: bool = False  # easyrl serve
    batch_invariant: bool = False  # nothing else asked of it changes a bit of a response; vLLM
    # does not tell
    arithmetic: str | None = None  # where two say the same, their bits are the same (embedded)
    # It has ``/inference/v1/samples``. Another one is sent a request per sample: vLLM gives sample
    # i of n the seed of the request + i, and ours are unrelated.
    streams_samples: bool = False
    max_num_seqs: int | None = None  # sequences that it decodes at a time; vLLM does not tell
    # False: it says that it has no tokenizer to find them with; vLLM does not tell
    applies_stop_strings: bool = True


@dataclass(frozen=True, slots=True)
class WorkerProof:
    """What one worker of a server says of the weights it serves, read back through its model."""

    slices: Mapping[str, Sequence[ServedSlice]]  # by tensor: what it serves of it
    problems: Mapping[str, str]  # by tensor: why it cannot be shown
    transport: str  # how its weights came: "file" or "http"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back, without our key wherever it was repeated."""

    status: int
    reason: str  # of the status line
    location: str | None
    content: bytes


class EndpointClient:
    """The routes of one endpoint. Every method raises ``EndpointError``; see its subclasses.

    Args:
        url: without a trailing slash.
        timeout_s: for every route but ``generate`` and ``samples``, which have none, ``health`` and
            ``abort_samples``.
    """

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url
        self._session = session
        self._timeout_s = timeout_s
        self._without_key = KeyErasure(api_key)
        self._headers = {"Content-Type": "application/json"} | IDENTITY
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._is_embedded = False  # as far as is known
        self._applies_stop_strings = False

    async def generate(
        self,
        token_ids: np.ndarray | Sequence[int],
        sampling: SamplingConfig,
        seed: int,
        n: int = 1,
        *,
        model: str | None = None,
    ) -> bytes:
        """The raw body of ``n`` responses to one prompt, for ``parse_generate_response``.

        ``model``: an adapter that was loaded under this name, ``NoSuchModel`` if none is; None: the
        model itself.

        Cancelling closes the connection, upon which the server aborts the request. Stop strings
        need a server that decodes; one that does not (``--tokens-only``, ``--skip-tokenizer-init``)
        is not asked, since the latter would ignore them silently: it has refused the request.
        """
        if sampling.stop and not self._applies_stop_strings:
            await self._require_stop_strings()
            self._applies_stop_strings = True
        params = sampling.model_dump(include=set(SamplingConfig.model_fields))
        params |= {"n": n, "seed": seed, "logprobs": 0}
        body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": params}
        if model is not None:
            body["model"] = model
        max_bytes = RESPONSE_BYTES + n * sampling.max_tokens * BYTES_PER_TOKEN
        try:
            return await self._request("POST", GENERATE, body, max_bytes=max_bytes)
        except NoSuchModel as error:
            if model is None:  # it was asked for none
                raise RequestRejected(self.url, error.reason) from None
            raise

    async def samples(
        self, asked: SamplesAsked, limits: CompletionLimits
    ) -> AsyncGenerator[list[tuple[int, Completion | EndpointError]]]:
        """All samples with their numbers, as they finish; those together that came together.

        First an empty list, when the server has taken the request: from then on ``abort_samples``
        finds it. A sample that is refused, or nothing to train on, comes as the error that is its
        own. Closing the iterator closes the connection, upon which the server aborts what is left.
        Stop strings as in ``generate``. Raises ``MalformedResponse`` as ``SampleReader`` does,
        ``JointRequestRejected`` and ``StreamsRefused``.
        """
        if asked.sampling.stop and not self._applies_stop_strings:
            await self._require_stop_strings()
            self._applies_stop_strings = True
        reader = SampleReader(self.url, asked, self._without_key)
        try:
            async with self._opened("POST", SAMPLES, asked.body(), None) as response:
                if response.status != 200:
                    answer = await self._read(response, ROUTE, asked.max_bytes)
                    raise self._joint_refusal(answer)
                yield []
                encoding = self._encoding(response)
                async for part in body_parts(response, encoding, self.url, ROUTE, asked.max_bytes):
                    for ended in reader.feed(part):
                        yield [self._sample(one, asked, limits) for one in ended]
                reader.end()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise self._unavailable("POST", SAMPLES, error, None) from None

    def _joint_refusal(self, answer: _Answer) -> EndpointError:
        error = self._refusal("POST", SAMPLES, answer)
        if answer.status in NO_ROUTE:
            return StreamsRefused(self.url, error.reason)
        if answer.status in PROMPT_AT_FAULT:
            return JointRequestRejected(self.url, error.reason)
        return error

    def _sample(
        self, ended: Ended, asked: SamplesAsked, limits: CompletionLimits
    ) -> tuple[int, Completion | EndpointError]:
        if isinstance(ended, Refused):
            reason = f"{ROUTE} answered {ended.status}: {shorten(ended.message)}"
            return ended.index, self._error(SAMPLES, ended.status, reason)
        try:
            num_prompt_tokens = asked.prompt_lengths[ended.index]
            return ended.index, ended.completion(self.url, num_prompt_tokens, limits)
        except MalformedResponse as error:
            return ended.index, error

    async def abort_samples(self, request_ids: Sequence[str]) -> None:
        """Of a request to ``samples``: they come as aborted, if they have not come."""
        body = {"request_ids": request_ids}
        await self._request("POST", ABORT, body, timeout_s=HEALTH_TIMEOUT_S)

    async def health(self) -> None:
        await self._request("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)

    async def served_model(self) -> ServedModel:
        card = (await self._decoded(_MODELS, "GET", "/v1/models")).data[0]
        self._is_embedded = card.owned_by == "easyrl"
        return ServedModel(
            card.id,
            card.max_model_len,
            is_embedded=self._is_embedded,
            batch_invariant=card.batch_invariant,
            arithmetic=card.arithmetic,
            streams_samples=card.streams_samples,
            max_num_seqs=card.max_num_seqs,
            applies_stop_strings=card.applies_stop_strings,
        )

    async def weight_version(self, timeout_s: float | None = None) -> str:
        """The version of the weights it serves; ``"default"`` after a (re)start."""
        answer = await self._decoded(_WEIGHT_INFO, "GET", "/weight_info", None, timeout_s)
        return answer.weight_version

    async def num_workers(self) -> int | None:
        """Devices that the model is split or copied over; None if it does not tell."""
        try:
            return (await self.get(_WORLD_SIZE, "/get_world_size")).world_size
        except EndpointError:
            return None

    async def num_tokens_made(self, timeout_s: float) -> float | None:
        """Prompt and response tokens since its start; None if it does not tell."""
        try:
            content = await self._request("GET", "/metrics", timeout_s=timeout_s)
        except EndpointError:
            return None
        try:
            counts = [float(text) for text in TOKEN_COUNTERS.findall(content)]
        except ValueError:
            return None
        return sum(counts) if counts and math.isfinite(sum(counts)) else None

    async def pause(self, mode: Literal["wait", "abort", "keep"]) -> None:
        """Stops generation; requests in flight are finished, aborted or frozen until ``resume``."""
        await self._request("POST", f"/pause?mode={mode}")

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def reset_prefix_cache(self) -> bool:
        """Also the cache of a KV connector, outside the engine, where the server has one.

        False if blocks are still in use, so that not all was reset.
        """
        route = "/reset_prefix_cache?reset_external=true"
        return (await self._decoded(_SUCCESS, "POST", route)).success

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        await self._request("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    async def start_weight_update(self) -> None:
        await self._request("POST", "/start_weight_update")

    async def update_weights(self, update_info: Mapping[str, Any]) -> None:
        await self._request("POST", "/update_weights", {"update_info": update_info})

    async def finish_weight_update(self, version: str) -> None:
        """From here on the server stamps ``version`` on its tokens."""
        await self._request("POST", "/finish_weight_update", {"weight_version": version})

    async def set_weight_version(self, version: str, timeout_s: float | None = None) -> None:
        """Stamps ``version`` on the tokens from here on, of the weights that it has."""
        body = {"new_version": version}
        await self._decoded(_SUCCESS, "POST", "/update_weight_version", body, timeout_s)

    async def abandon_weight_update(self) -> None:
        """Gives up an update that was started, so that the next one can start.

        The server answers with an error whether or not one was open. Raises ``EndpointUnavailable``
        if it does not answer at all.
        """
        body = {"update_info": {"abandon": True}}
        await self._answer("POST", "/update_weights", body, self._timeout_s)

    async def prove_weights(
        self, nonce: bytes, tensors: TensorShapes, adapter: str | None = None
    ) -> list[WorkerProof]:
        """What each worker serves of ``tensors``: digests keyed with ``nonce``, 32 bytes.

        Of the model's, or of those of the ``adapter`` that was loaded under this name. Whether they
        are right is the caller's to say (``challenge.py``).
        """
        asked = {"nonce": nonce.hex(), "tensors": orjson.dumps(tensors).decode()}
        method = PROVE_WEIGHTS if adapter is None else PROVE_ADAPTER
        if adapter is not None:
            asked["adapter"] = adapter
        of_a_worker = sum(len(name.encode()) + BYTES_PER_TENSOR for name in tensors)
        max_bytes = ANSWER_BYTES + MAX_WORKERS * of_a_worker
        return (await self.call_workers(_PROOFS, method, asked, max_bytes)).results

    async def accept_proof(self, nonce: bytes) -> None:
        """What it has answered to ``nonce`` was right: it may generate with what it was given."""
        body = {"method": ACCEPT_PROOF, "kwargs": {"nonce": nonce.hex()}}
        await self._request("POST", "/collective_rpc", body)

    async def compare_shapes(self, tensors: TensorShapes) -> dict[str, str]:
        """By name, why its workers could not load a tensor, or which they serve beside ``tensors``.

        Changes nothing there.
        """
        asked = {"tensors": orjson.dumps(tensors).decode()}
        max_bytes = ANSWER_BYTES + MAX_WORKERS * len(tensors) * BYTES_PER_TENSOR
        answer = await self.call_workers(_SHAPES, COMPARE_SHAPES, asked, max_bytes)
        return {name: said for worker in answer.results for name, said in worker.problems.items()}

    async def call_workers(
        self,
        decoder: msgspec.json.Decoder[T],
        method: str,
        kwargs: Mapping[str, str],
        max_bytes: int = ANSWER_BYTES,
    ) -> T:
        """What all workers answer to a ``method`` of theirs; vLLM passes text on, nothing else."""
        body = {"method": method, "kwargs": kwargs}
        return await self._decoded(decoder, "POST", "/collective_rpc", body, max_bytes=max_bytes)

    async def tokenize(self, asked: Mapping[str, Any]) -> list[int] | None:
        """Token ids by its own tokenizer; None if it has no route that tells.

        ``asked``: ``{"prompt": text, "add_special_tokens": bool}``, or ``messages`` with
        ``add_generation_prompt`` and ``chat_template_kwargs``, as vLLM's ``/tokenize`` has them.
        """
        answer = await self._answer("POST", TOKENIZE, asked, self._timeout_s)
        if answer.status in NO_ROUTE:
            return None
        if answer.status != 200:
            raise self._refusal("POST", TOKENIZE, answer)
        return decode(_TOKENS, answer.content, self.url, f"POST {TOKENIZE}").tokens

    async def get(self, decoder: msgspec.json.Decoder[T], path: str) -> T:
        """What a route answers, as a record. Raises ``EndpointError``."""
        return await self._decoded(decoder, "GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> None:
        """For a route whose answer tells nothing but that it has succeeded."""
        await self._request("POST", path, body)

    async def abort_requests(self) -> None:
        await self._request("POST", "/abort_requests", {})

    async def _require_stop_strings(self) -> None:
        # Asking for text is the one request that a server without a tokenizer refuses: of a prompt
        # of its own, that nothing else be refused.
        params = {"max_tokens": 1}
        body = {"token_ids": PROBE_IDS, "sampling_params": params, "output_mode": "text"}
        try:
            await self._request("POST", GENERATE, body)
        except RequestRejected as error:
            raise type(error)(
                self.url,
                "rollout.stop (or evaluation.sampling.stop): it cannot apply stop strings, "
                f"use stop_token_ids, or start it with a tokenizer. It answered: {error.reason}",
            ) from None

    async def _decoded(
        self,
        decoder: msgspec.json.Decoder[T],
        method: str,
        path: str,
        body: Body = None,
        timeout_s: float | None = None,
        max_bytes: int = ANSWER_BYTES,
    ) -> T:
        content = await self._request(method, path, body, timeout_s, max_bytes)
        return decode(decoder, content, self.url, f"{method} {path}")

    async def _request(
        self,
        method: str,
        path: str,
        body: Body = None,
        timeout_s: float | None = None,
        max_bytes: int = ANSWER_BYTES,
    ) -> bytes:
        limit_s = timeout_s if timeout_s is not None or path == GENERATE else self._timeout_s
        answer = await self._answer(method, path, body, limit_s, max_bytes)
        if answer.status == 200:
            return answer.content
        raise self._refusal(method, path, answer)

    def _refusal(self, method: str, path: str, answer: _Answer) -> EndpointError:
        """What an answer that is not 200 says."""
        message = _server_message(answer.content)
        said = f"{answer.status} {shorten(answer.reason, 100)}"
        reason = f"{method} {path} answered {said}: {message}"
        if answer.status < 400 and answer.location is not None:
            reason = f"{method} {path} answered {said}: points to {shorten(answer.location)}"
        if answer.status == 404 and message == "Not Found":
            reason += PROXY_HINT if path == SAMPLES else ROUTE_HINT
        elif answer.status == 404 and path == GENERATE:
            return NoSuchModel(self.url, reason)
        return self._error(path, answer.status, reason)

    def _error(self, path: str, status: int, reason: str) -> EndpointError:
        if status < 400:  # neither a yes nor a no
            return MalformedResponse(self.url, reason)
        if status >= 500 or status in OVERLOADED:
            return EndpointUnavailable(self.url, reason)
        if path in (GENERATE, SAMPLES) and status in PROMPT_AT_FAULT:
            return PromptRejected(self.url, reason)
        return RequestRejected(self.url, reason + (KEY_HINT if status in (401, 403) else ""))

    async def _answer(
        self,
        method: str,
        path: str,
        body: Body,
        limit_s: float | None,
        max_bytes: int = ANSWER_BYTES,
    ) -> _Answer:
        try:
            async with self._opened(method, path, body, limit_s) as response:
                return await self._read(response, f"{method} {path}", max_bytes)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            self._is_embedded = False  # another server may come up there
            raise self._unavailable(method, path, error, limit_s) from None

    def _opened(
        self, method: str, path: str, body: Body, limit_s: float | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        keeps_connection = self._is_embedded or path in (GENERATE, SAMPLES)
        return self._session.request(
            method,
            self.url + path,
            data=data,
            headers=self._headers if keeps_connection else self._headers | CLOSE,
            timeout=aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_TIMEOUT_S),
            allow_redirects=False,  # key and weights go where the configuration says
            auto_decompress=False,
        )

    async def _read(self, response: aiohttp.ClientResponse, route: str, max_bytes: int) -> _Answer:
        clean, location = self._without_key, response.headers.get("Location")
        content = await read_body(response, self._encoding(response), self.url, route, max_bytes)
        return _Answer(
            response.status,
            clean.of(response.reason or ""),
            None if location is None else clean.of(location),
            clean.of_bytes(content),
        )

    def _encoding(self, response: aiohttp.ClientResponse) -> str:
        return self._without_key.of(response.headers.get("Content-Encoding", "identity"))

    def _unavailable(
        self, method: str, path: str, error: Exception, limit_s: float | None
    ) -> EndpointUnavailable:
        """What ended a request in the middle."""
        if isinstance(error, TimeoutError):
            if limit_s is None or isinstance(error, aiohttp.ConnectionTimeoutError):
                reason = f"{method} {path} could not connect within {CONNECT_TIMEOUT_S} s"
                return EndpointUnavailable(self.url, reason)
            return NotAnswered(
                self.url, f"{method} {path} was not answered within {limit_s} s", limit_s
            )
        said = shorten(self._without_key.of(str(error)))
        reason = f"{method} {path} failed: {type(error).__name__}: {said}"
        return EndpointUnavailable(self.url, reason)


class _ModelCard(msgspec.Struct):
    id: Word
    max_model_len: int | None = None  # a claim: ``fleet`` judges it
    owned_by: Word | None = None
    batch_invariant: bool = False
    arithmetic: Word | None = None
    streams_samples: bool = False
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1)] | None = None
    applies_stop_strings: bool = True


class _Models(msgspec.Struct):
    data: Annotated[list[_ModelCard], msgspec.Meta(min_length=1)]


class _WorldSize(msgspec.Struct):
    world_size: Annotated[int, msgspec.Meta(ge=1, le=MOST_DEVICES)]


class _WeightInfo(msgspec.Struct):
    weight_version: Word


class _Success(msgspec.Struct):
    success: bool


class _Proofs(msgspec.Struct):
    """A result per worker."""

    results: Annotated[list[WorkerProof], msgspec.Meta(min_length=1)]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _ShapeProblems(msgspec.Struct):
    problems: dict[str, str]


class _Shapes(msgspec.Struct):
    """A result per worker."""

    results: Annotated[list[_ShapeProblems], msgspec.Meta(min_length=1)]


_MODELS = msgspec.json.Decoder(_Models)
_WORLD_SIZE = msgspec.json.Decoder(_WorldSize)
_WEIGHT_INFO = msgspec.json.Decoder(_WeightInfo)
_SUCCESS = msgspec.json.Decoder(_Success)
_PROOFS = msgspec.json.Decoder(_Proofs)
_SHAPES = msgspec.json.Decoder(_Shapes)
_TOKENS = msgspec.json.Decoder(_Tokens)


def _server_message(content: bytes) -> str:
    """The text in ``{"error": {"message": …}}``, ``{"error": …}`` or ``{"detail": …}``."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        answer = None
    message = answer.get("error", answer.get("detail")) if isinstance(answer, dict) else None
    if isinstance(message, dict):
        message = message.get("message")
    return shorten(message if isinstance(message, str) else content)
