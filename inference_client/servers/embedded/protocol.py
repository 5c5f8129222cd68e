"""Requests and responses of the embedded server: vLLM's JSON in, engine requests out, and back.

What vLLM knows and this server does not do is refused by name, never ignored; keys that vLLM does
not know either are ignored, as there.
"""

from __future__ import annotations

import time
import uuid
from itertools import accumulate, chain
from typing import Annotated, Any, ClassVar, Literal, Self, cast

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, Json, RootModel, model_validator

from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.requests import (
    BadRequestError,
    GenerationRequest,
    Sequence,
)
from easyrl.inference_client.servers.embedded.sampling import SamplingParams
from easyrl.inference_client.servers.embedded.text import decode
from easyrl.inference_client.vllm_plugin.easyrl_vllm.keyed_digests import parse_nonce

LOWEST_LOGPROB = -9999.0  # JSON has no infinity

TokenId = Annotated[int, Field(ge=0)]


class GenerateBody(BaseModel):
    """``POST /inference/v1/generate``: token ids in, token ids out."""

    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SamplingParams
    model: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"

    @model_validator(mode="before")
    @classmethod
    def _known_here(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for key in ("stream", "features", "content_parts", "priority", "kv_transfer_params"):
                if data.get(key):
                    raise ValueError(f"{key} is not supported by the embedded server")
        return data

    def request(self, engine: EmbeddedEngine) -> GenerationRequest:
        """Raises ``BadRequestError`` if the model has no tokenizer for what is asked."""
        if self.output_mode == "text" and engine.tokenizer is None:
            raise BadRequestError("output_mode", "text needs a tokenizer, the model has none")
        params, room = self.sampling_params, max(1, engine.max_model_len - len(self.token_ids))
        params.max_tokens = params.max_tokens or room
        return GenerationRequest(np.array(self.token_ids, dtype=np.int64), params, self.request_id)


class SampledPrompt(BaseModel):
    token_ids: list[TokenId] = Field(min_length=1)
    seeds: list[Annotated[int, Field(ge=0, lt=2**31)]] = Field(min_length=1)  # a sample each


class SamplesBody(BaseModel):
    """``POST /inference/v1/samples``: a sample per seed of each prompt, streamed."""

    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    prompts: list[SampledPrompt] = Field(min_length=1)
    sampling_params: SamplingParams

    @model_validator(mode="after")
    def _seeds_say_all(self) -> Self:
        params = self.sampling_params
        if params.n != 1 or params.seed is not None:
            raise ValueError("sampling_params.n and .seed have no place here, prompts have seeds")
        if params.max_tokens == 0 or params.logprobs:
            raise ValueError("sampling_params.max_tokens is needed, .logprobs is at most 0")
        return self

    def requests(self) -> list[GenerationRequest]:
        """One per sample, numbered prompt by prompt."""
        asked = [
            (token_ids, seed)
            for prompt in self.prompts
            for token_ids in (np.array(prompt.token_ids, dtype=np.int64),)
            for seed in prompt.seeds
        ]
        return [
            GenerationRequest(token_ids, self.sampling_params, f"{self.request_id}-{i}", seed=seed)
            for i, (token_ids, seed) in enumerate(asked)
        ]


class CompletionBody(SamplingParams):
    """``POST /v1/completions``: OpenAI's text completions with vLLM's extensions."""

    unsupported: ClassVar[tuple[str, ...]] = (
        *SamplingParams.unsupported,
        "echo",
        "priority",
        "prompt_embeds",
        "response_format",
        "suffix",
        "truncate_prompt_tokens",
        "use_beam_search",
    )

    model: str | None = None
    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int = Field(16, ge=1)
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    add_special_tokens: bool = True
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @model_validator(mode="after")
    def _has_prompt(self) -> Self:
        if not self.prompt or (isinstance(self.prompt, list) and "" in self.prompt):
            raise ValueError("prompt must not be empty")
        if self.stream_options and not self.stream:
            raise ValueError("stream_options need stream: true")
        return self

    def requests(self, engine: EmbeddedEngine) -> list[GenerationRequest]:
        """One per prompt. Raises ``BadRequestError`` for text without a tokenizer."""
        is_one = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        prompts = cast(list[str] | list[list[int]], [self.prompt] if is_one else self.prompt)
        return [
            GenerationRequest(self._token_ids(prompt, engine), self, self.request_id)
            for prompt in prompts
        ]

    def _token_ids(self, prompt: str | list[int], engine: EmbeddedEngine) -> np.ndarray:
        if isinstance(prompt, str):
            if engine.tokenizer is None:
                problem = "text needs a tokenizer, the model has none; send ids"
                raise BadRequestError("prompt", problem)
            prompt = engine.tokenizer.encode(prompt, add_special_tokens=self.add_special_tokens)
        return np.array(prompt, dtype=np.int64)


class TokenizeBody(BaseModel):
    """``POST /tokenize``: a text, or a chat behind the tokenizer's own template."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true for a text, false for a chat
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either prompt or messages")
        return self

    def token_ids(self, engine: EmbeddedEngine) -> list[int]:
        """Raises ``BadRequestError`` without a tokenizer, or without its template."""
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise BadRequestError("prompt", "text needs a tokenizer, the model has none")
        if self.prompt is not None:
            special = self.add_special_tokens is not False
            return list(tokenizer.encode(self.prompt, add_special_tokens=special))
        try:
            text = tokenizer.apply_chat_template(
                self.messages or [],
                add_generation_prompt=self.add_generation_prompt,
                tokenize=False,
                **(self.chat_template_kwargs or {}),
            )
        except Exception as error:  # jinja's, or transformers' where there is no template
            said = " ".join(str(error).split())
            raise BadRequestError("messages", f"the template cannot be used: {said:.200}") from None
        special = bool(self.add_special_tokens)  # the template writes its own
        return list(tokenizer.encode(str(text), add_special_tokens=special))


class PauseQuery(BaseModel):
    mode: Annotated[str, Field(pattern="^(abort|wait|keep)$")] = "abort"


class AbortBody(BaseModel):
    request_ids: list[str] | None = None


class InitBody(BaseModel):
    init_info: dict[str, Any] = {}


class UpdateInfo(BaseModel):
    """Chunks of an artifact (``Chunk.describe``), or ``abandon`` alone."""

    artifact: str = ""
    chunks: list[dict[str, Any]] = []
    abandon: bool = False

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if not self.abandon and not (self.artifact and self.chunks):
            raise ValueError("needs artifact and chunks, or abandon: true")
        return self


class UpdateBody(BaseModel):
    update_info: UpdateInfo


class ShapesArguments(BaseModel):
    tensors: Json[dict[str, tuple[str, list[int]]]]  # by name: safetensors' dtype, shape


Nonce = Annotated[bytes, BeforeValidator(parse_nonce)]  # 32, from hex digits


class ProofArguments(ShapesArguments):
    nonce: Nonce


class ProofBody(BaseModel):
    method: Literal["easyrl_prove_weights"]
    kwargs: ProofArguments


class ShapesBody(BaseModel):
    method: Literal["easyrl_compare_shapes"]
    kwargs: ShapesArguments


class AcceptArguments(BaseModel):
    nonce: Nonce


class AcceptBody(BaseModel):
    method: Literal["easyrl_accept_proof"]
    kwargs: AcceptArguments


class RpcBody(
    RootModel[Annotated[ProofBody | AcceptBody | ShapesBody, Field(discriminator="method")]]
):
    """The methods that the vLLM plugin adds to vLLM's workers."""


class FinishBody(BaseModel):
    weight_version: str | None = None


class VersionBody(BaseModel):
    new_version: str


class CheckerBody(BaseModel):
    action: Annotated[str, Field(pattern="^(checksum|compare)$")]
    baseline: dict[str, str] | None = None

    @model_validator(mode="after")
    def _has_baseline(self) -> Self:
        if self.action == "compare" and self.baseline is None:
            raise ValueError("action 'compare' requires a baseline object")
        return self


def generate_response(
    body: GenerateBody, samples: list[Sequence], engine: EmbeddedEngine, model: str
) -> dict[str, Any]:
    """vLLM's ``GenerateTokensResponse``; with ``output_mode: text`` each choice has its text."""
    wants_logprobs = body.sampling_params.logprobs is not None
    wants_text = body.output_mode == "text"
    return {
        "request_id": f"generate-tokens-{body.request_id}",
        "model": model,
        "created": int(time.time()),
        "usage": _usage([samples]),
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "output_mode": body.output_mode,
        "choices": [
            {
                **({"text": _text(sample, engine)} if wants_text else {}),
                "index": index,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
                "token_ids": sample.token_ids,
                "logprobs": {"content": _token_logprobs(sample)} if wants_logprobs else None,
                "weight_versions": [span._asdict() for span in sample.version_spans],
            }
            for index, sample in enumerate(samples)
        ],
    }


def completion_response(
    body: CompletionBody, results: list[list[Sequence]], engine: EmbeddedEngine, model: str
) -> dict[str, Any]:
    """OpenAI's ``text_completion`` with vLLM's ``token_ids``; choices in the order of prompts."""
    choices = []
    for index, sample in enumerate(chain.from_iterable(results)):
        choice: dict[str, Any] = {
            "index": index,
            "text": _text(sample, engine),
            "logprobs": None if body.logprobs is None else _text_logprobs(sample, body, engine),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
        }
        if body.return_token_ids:
            choice["token_ids"] = sample.token_ids
            choice["prompt_token_ids"] = sample.prompt.tolist()
        choices.append(choice)
    return {
        "id": f"cmpl-{body.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": _usage(results),
    }


def _text(sample: Sequence, engine: EmbeddedEngine) -> str:
    if sample.stop_strings is not None and isinstance(sample.stop_reason, str):
        return sample.stop_strings.text  # up to the stop string that ended it
    if engine.tokenizer is None:
        return ""
    token_ids, params = sample.token_ids, sample.params
    if sample.finish_reason == "stop" and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]  # the stop token is no part of the text
    return decode(engine.tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens)


def _token_logprobs(sample: Sequence) -> list[dict[str, Any]]:
    content = []
    for position in range(len(sample.token_ids)):
        ranked = _ranked(sample, position)
        asked = len(sample.top_logprobs[position].token_ids) if sample.top_logprobs else 1
        content.append({**ranked[0], "top_logprobs": ranked[:asked]})
    return content


def _ranked(sample: Sequence, position: int) -> list[dict[str, Any]]:
    """The sampled token, then the best others in order, as vLLM lists them."""
    sampled = sample.token_ids[position]
    logprob = max(sample.logprobs[position], LOWEST_LOGPROB)
    if not sample.top_logprobs:
        return [{"token_id": sampled, "logprob": logprob, "rank": None}]
    top = sample.top_logprobs[position]
    entries = [{"token_id": sampled, "logprob": logprob, "rank": top.sampled_rank}]
    for rank, (token_id, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1):
        if token_id != sampled:
            value = max(value, LOWEST_LOGPROB)
            entries.append({"token_id": token_id, "logprob": value, "rank": rank})
    return entries


def _text_logprobs(
    sample: Sequence, body: CompletionBody, engine: EmbeddedEngine
) -> dict[str, Any]:
    def text_of(token_id: int) -> str:
        if body.return_tokens_as_token_ids or engine.tokenizer is None:
            return f"token_id:{token_id}"
        return decode(engine.tokenizer, [token_id], skip_special_tokens=False)

    tokens = [text_of(token_id) for token_id in sample.token_ids]
    ranked = [_ranked(sample, position) for position in range(len(tokens))]
    return {
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=0)) if tokens else [],
        "token_logprobs": [entries[0]["logprob"] for entries in ranked],
        "tokens": tokens,
        "top_logprobs": [
            {text_of(entry["token_id"]): entry["logprob"] for entry in entries}
            for entries in ranked
        ],
    }


def _usage(results: list[list[Sequence]]) -> dict[str, int]:
    prompt = sum(len(samples[0].prompt) for samples in results)
    generated = sum(len(sample.token_ids) for samples in results for sample in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
