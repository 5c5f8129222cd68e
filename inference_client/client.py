"""One inference endpoint: the routes for rollouts and weights (vLLM 0.32, ``easyrl serve``).

The server needs ``--enable-scale-out`` for ``/inference/v1/generate`` and
``VLLM_SERVER_DEV_MODE=1`` for the routes that touch weights.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec
import numpy as np
import orjson

from easyrl.config import SamplingConfig
from easyrl.inference_client.errors import (
    EndpointError,
    EndpointUnavailable,
    MalformedResponse,
    PromptRejected,
    RequestRejected,
)
from easyrl.schema import Completion

# url, prompt int32 [P], sampling, seed → one response; raises ``EndpointError``
Fetch = Callable[[str, np.ndarray, SamplingConfig, int], Awaitable[Completion]]
Body = Mapping[str, Any] | None  # of a request, JSON-able

GENERATE = "/inference/v1/generate"
PROVE_WEIGHTS = "easyrl_prove_weights"  # a method of each worker, there by --worker-extension-cls
HEALTH_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 2.0  # below vLLM's 5 s, so that no request is sent into a connection being closed
PROMPT_AT_FAULT = (400, 413, 422)  # of a generate request: another prompt may be answered
# vLLM breaks a connection off after some errors; the next control request must not meet that
CLOSE = {"Connection": "close"}
OVERLOADED = (408, 429)  # 4xx that say "later", not "never"
# 401, 403
KEY_HINT = "; set inference.api_key_env, or that of its entry, to the variable that holds its key"
# vLLM's names, which the embedded server uses too; a line per engine
TOKEN_COUNTERS = re.compile(rb"^vllm:(?:generation|prompt)_tokens_total(?:\{[^}]*\})? (\S+)", re.M)
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


@dataclass(frozen=True, slots=True)
class WorkerProof:
    """What one worker of a server says of the weights it serves, read back through its model."""

    checksums: Mapping[str, str]  # by tensor; the artefact's only if the served bits equal it
    problems: Mapping[str, str]  # by tensor: what is wrong with it
    transport: str  # how its weights came: "file" or "http"


class EndpointClient:
    """The routes of one endpoint. Every method raises ``EndpointError``; see its subclasses.

    Args:
        url: without a trailing slash.
        timeout_s: for every route but ``generate``, which has none, and ``health``.
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
        self._api_key = api_key
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._applies_stop_strings = False

    async def generate(
        self, token_ids: np.ndarray | Sequence[int], sampling: SamplingConfig, seed: int, n: int = 1
    ) -> bytes:
        """The raw body of ``n`` responses to one prompt, for ``parse_generate_response``.

        Cancelling closes the connection, upon which the server aborts the request. Stop strings
        need a server that decodes: ``ValueError`` if this one does not (``--tokens-only``,
        ``--skip-tokenizer-init``), since the latter would ignore them silently.
        """
        if sampling.stop and not self._applies_stop_strings:
            await self._require_stop_strings(token_ids)
            self._applies_stop_strings = True
        params = sampling.model_dump(include=set(SamplingConfig.model_fields))
        params |= {"n": n, "seed": seed, "logprobs": 0}
        body = {"token_ids": token_ids, "sampling_params": params}
        return await self._request("POST", GENERATE, body)

    async def health(self) -> None:
        await self._request("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)

    async def served_model(self) -> ServedModel:
        answer = await self._json("GET", "/v1/models")
        try:
            card = answer["data"][0]
            return ServedModel(
                card["id"],
                card.get("max_model_len"),
                is_embedded=card.get("owned_by") == "easyrl",
                batch_invariant=card.get("batch_invariant") is True,
                arithmetic=card.get("arithmetic"),
            )
        except (KeyError, IndexError, TypeError, AttributeError):
            raise MalformedResponse(self.url, f"GET /v1/models names no model: {answer}") from None

    async def weight_version(self, timeout_s: float | None = None) -> str:
        """The version of the weights it serves; ``"default"`` after a (re)start."""
        return await self._field("weight_version", str, "GET", "/weight_info", None, timeout_s)

    async def num_tokens_made(self, timeout_s: float) -> float | None:
        """Prompt and response tokens since its start; None if it does not tell."""
        try:
            content = await self._request("GET", "/metrics", timeout_s=timeout_s)
        except EndpointError:
            return None
        counts = [float(text) for text in TOKEN_COUNTERS.findall(content)]
        return sum(counts) if counts else None

    async def pause(self, mode: Literal["wait", "abort", "keep"]) -> None:
        """Stops generation; requests in flight are finished, aborted or frozen until ``resume``."""
        await self._request("POST", f"/pause?mode={mode}")

    async def resume(self) -> None:
        await self._request("POST", "/resume")

    async def reset_prefix_cache(self) -> bool:
        """False if blocks are still in use, so that nothing was reset."""
        return await self._field("success", bool, "POST", "/reset_prefix_cache")

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
        await self._field("success", bool, "POST", "/update_weight_version", body, timeout_s)

    async def abandon_weight_update(self) -> None:
        """Gives up an update that was started, so that the next one can start.

        The server answers with an error whether or not one was open. Raises ``EndpointUnavailable``
        if it does not answer at all.
        """
        body = {"update_info": {"abandon": True}}
        await self._answer("POST", "/update_weights", body, self._timeout_s)

    async def prove_weights(
        self, artifact: str, chunks: Sequence[Mapping[str, Any]]
    ) -> list[WorkerProof]:
        """What each worker serves, compared bit by bit with the artefact of that name.

        ``chunks`` as in ``update_weights``, all of the artefact. ``problems`` raise nothing here.
        """
        kwargs = {"artifact": artifact, "chunks": orjson.dumps(chunks).decode()}
        body = {"method": PROVE_WEIGHTS, "kwargs": kwargs}
        content = await self._request("POST", "/collective_rpc", body)
        try:
            proofs = msgspec.json.decode(content, type=_Proofs).results
        except msgspec.MsgspecError as error:
            reason = f"POST /collective_rpc proves no weights: {error}: {_shorten(content)}"
            raise MalformedResponse(self.url, reason) from None
        if not proofs:
            raise MalformedResponse(self.url, "POST /collective_rpc: no worker proved its weights")
        return proofs

    async def abort_requests(self) -> None:
        await self._request("POST", "/abort_requests", {})

    async def _require_stop_strings(self, token_ids: np.ndarray | Sequence[int]) -> None:
        # Asking for text is the one request that a server without a tokenizer refuses.
        params = {"max_tokens": 1}
        body = {"token_ids": token_ids, "sampling_params": params, "output_mode": "text"}
        try:
            await self._request("POST", GENERATE, body)
        except RequestRejected as error:
            raise ValueError(
                "rollout.stop (or evaluation.sampling.stop): it cannot apply stop strings, "
                f"use stop_token_ids, or start it with a tokenizer. It answered: {error}"
            ) from None

    async def _field(self, name: str, kind: type, method: str, path: str, *asked: Any) -> Any:
        answer = await self._json(method, path, *asked)
        value = answer.get(name)
        if not isinstance(value, kind):
            raise MalformedResponse(self.url, f"{method} {path} answered without {name}: {answer}")
        return value

    async def _json(
        self, method: str, path: str, body: Body = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        content = await self._request(method, path, body, timeout_s)
        try:
            answer = orjson.loads(content)
        except orjson.JSONDecodeError:
            answer = None
        if not isinstance(answer, dict):
            reason = f"{method} {path} did not answer JSON: {_shorten(content)}"
            raise MalformedResponse(self.url, reason)
        return answer

    async def _request(
        self, method: str, path: str, body: Body = None, timeout_s: float | None = None
    ) -> bytes:
        limit_s = timeout_s if timeout_s is not None or path == GENERATE else self._timeout_s
        answer, content = await self._answer(method, path, body, limit_s)
        if answer.status == 200:
            return content
        message = _server_message(content)
        reason = f"{method} {path} answered {answer.status} {answer.reason or ''}: {message}"
        if answer.status >= 500 or answer.status in OVERLOADED:
            raise EndpointUnavailable(self.url, reason)
        hint = KEY_HINT if answer.status in (401, 403) else ""
        if answer.status == 404 and message == "Not Found":
            hint = ROUTE_HINT
        if path == GENERATE and answer.status in PROMPT_AT_FAULT:
            raise PromptRejected(self.url, reason)
        raise RequestRejected(self.url, reason + hint)

    async def _answer(
        self, method: str, path: str, body: Body, limit_s: float | None
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        data = None if body is None else orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=data,
                headers=self._headers if path == GENERATE else self._headers | CLOSE,
                timeout=aiohttp.ClientTimeout(total=limit_s, sock_connect=CONNECT_TIMEOUT_S),
            ) as response:
                return response, self._without_key(await response.read())
        except TimeoutError as error:
            connecting = limit_s is None or isinstance(error, aiohttp.ConnectionTimeoutError)
            what = "could not connect" if connecting else "was not answered"
            reason = (
                f"{method} {path} {what} within {CONNECT_TIMEOUT_S if connecting else limit_s} s"
            )
            raise EndpointUnavailable(self.url, reason) from None
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{method} {path} failed: {type(error).__name__}: {error}"
            raise EndpointUnavailable(self.url, reason) from None

    def _without_key(self, content: bytes) -> bytes:
        """An answer that repeats our key: what it says may come into logs and files."""
        return content if not self._api_key else content.replace(self._api_key.encode(), b"[key]")


class _Proofs(msgspec.Struct):
    """What ``/collective_rpc`` answers: a result per worker."""

    results: list[WorkerProof]


def _server_message(content: bytes) -> str:
    """The text in ``{"error": {"message": …}}``, ``{"error": …}`` or ``{"detail": …}``."""
    try:
        answer = orjson.loads(content)
    except orjson.JSONDecodeError:
        return _shorten(content)
    if not isinstance(answer, dict):
        return _shorten(content)
    message = answer.get("error", answer.get("detail", content))
    if isinstance(message, dict):
        message = message.get("message", content)
    return _shorten(message if isinstance(message, bytes) else str(message))


def _shorten(text: str | bytes, limit: int = 500) -> str:
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    text = text.strip() or "(empty body)"
    return text if len(text) <= limit else text[:limit] + " ..."
