"""Requests and responses of the embedded server: vLLM's JSON in, engine requests out, and back.

What vLLM knows and this server does not do is refused by name, never ignored; keys that vLLM does
not know either are ignored, as there.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, Json, model_validator

from easyrl.inference_client.servers.embedded.engine import EmbeddedEngine
from easyrl.inference_client.servers.embedded.requests import (
    BadRequestError,
    GeneratedSample,
    GenerationRequest,
)
from easyrl.inference_client.servers.embedded.sampling import SamplingParams
from easyrl.inference_client.servers.embedded.text import decode

LOWEST_LOGPROB = -9999.0  # JSON has no infinity
INT64 = 2**63

TokenId = Annotated[int, Field(ge=0)]
StopList = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v or [])]
IdList = Annotated[list[int], BeforeValidator(lambda v: v or [])]


class SamplingBody(BaseModel):
    """vLLM's sampling parameters with its limits; null means the default."""

    unsupported: ClassVar[tuple[str, ...]] = (
        "allowed_token_ids",
        "bad_words",
        "logit_bias",
        "logprob_token_ids",
        "prompt_logprob_token_ids",
        "prompt_logprobs",
        "repetition_detection",
        "structured_outputs",
        "thinking_token_budget",
        "trace_decode_token_ids",
    )

    n: int = Field(1, ge=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64)
    stop: StopList = []
    stop_token_ids: IdList = []
    ignore_eos: bool = False
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    logprobs: int | None = Field(None, ge=-1)
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @model_validator(mode="before")
    @classmethod
    def _known_here(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in cls.unsupported:
            value = data.get(key)
            is_unset = value in (None, "", [], {}) or value is False
            if not is_unset and (key, value) != ("priority", 0):
                raise ValueError(f"{key} is not supported by the embedded server")
        return {key: value for key, value in data.items() if value is not None}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must not exceed max_tokens={self.max_tokens}")
        if "" in self.stop:
            raise ValueError("stop cannot contain an empty string")
        if self.temperature == 0 and self.n > 1:
            raise ValueError(f"n must be 1 with greedy sampling (temperature 0), is {self.n}")
        return self

    def params(self, default_max_tokens: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens or default_max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            stop=tuple(self.stop),
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            seed=self.seed,
            num_top_logprobs=self.logprobs or 0,
        )


class GenerateBody(BaseModel):
    """``POST /inference/v1/generate``: token ids in, token ids out."""

    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    token_ids: list[TokenId] = Field(min_length=1)
    sampling_params: SamplingBody
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
        room = max(1, engine.max_model_len - len(self.token_ids))
        return GenerationRequest(
            prompt=np.array(self.token_ids, dtype=np.int64),
            params=self.sampling_params.params(default_max_tokens=room),
            num_samples=self.sampling_params.n,
            request_id=self.request_id,
        )


class CompletionBody(SamplingBody):
    """``POST /v1/completions``: OpenAI's text completions with vLLM's extensions."""

    unsupported: ClassVar[tuple[str, ...]] = (
        *SamplingBody.unsupported,
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
    max_tokens: int | None = Field(16, ge=1)
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
        """One per prompt."""
        return [
            GenerationRequest(
                prompt=np.array(self._token_ids(prompt, engine), dtype=np.int64),
                params=self.params(default_max_tokens=16),
                num_samples=self.n,
                request_id=self.request_id,
            )
            for prompt in self._prompts()
        ]

    def _prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]

    def _token_ids(self, prompt: str | list[int], engine: EmbeddedEngine) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        if engine.tokenizer is None:
            raise BadRequestError("prompt", "text needs a tokenizer, the model has none; send ids")
        return engine.tokenizer.encode(prompt, add_special_tokens=self.add_special_tokens)


class PauseQuery(BaseModel):
    mode: Annotated[str, Field(pattern="^(abort|wait|keep)$")] = "abort"


class AbortBody(BaseModel):
    request_ids: list[str] | None = None


class InitBody(BaseModel):
    init_info: dict[str, Any] = {}


class UpdateInfo(BaseModel):
    """Chunks of an artifact (``WeightArtifact.update_info``), or ``abandon`` alone."""

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


class ProofChunk(BaseModel):
    checksums: dict[str, str]


class ProofArguments(BaseModel):
    artifact: str
    chunks: Json[list[ProofChunk]]

    @property
    def checksums(self) -> dict[str, str]:
        """The artifact's hashes by tensor."""
        return {name: value for chunk in self.chunks for name, value in chunk.checksums.items()}


class RpcBody(BaseModel):
    method: Literal["easyrl_prove_weights"]
    kwargs: ProofArguments


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
    body: GenerateBody,
    request: GenerationRequest,
    samples: list[GeneratedSample],
    engine: EmbeddedEngine,
    model: str,
) -> dict[str, Any]:
    """vLLM's ``GenerateTokensResponse``; with ``output_mode: text`` each choice has its text."""
    wants_logprobs = body.sampling_params.logprobs is not None
    wants_text = body.output_mode == "text"
    return {
        "request_id": f"generate-tokens-{body.request_id}",
        "model": model,
        "created": int(time.time()),
        "usage": _usage([request], samples),
        "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        "output_mode": body.output_mode,
        "choices": [
            {
                **({"text": _text(sample, request.params, engine)} if wants_text else {}),
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
    body: CompletionBody,
    requests: list[GenerationRequest],
    results: list[list[GeneratedSample]],
    engine: EmbeddedEngine,
    model: str,
) -> dict[str, Any]:
    """OpenAI's ``text_completion`` with vLLM's ``token_ids``; choices in the order of prompts."""
    pairs = [
        (request, sample)
        for request, samples in zip(requests, results, strict=True)
        for sample in samples
    ]
    return {
        "id": f"cmpl-{body.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [
            _completion_choice(index, body, request, sample, engine)
            for index, (request, sample) in enumerate(pairs)
        ],
        "usage": _usage(requests, [sample for _, sample in pairs]),
    }


def _completion_choice(
    index: int,
    body: CompletionBody,
    request: GenerationRequest,
    sample: GeneratedSample,
    engine: EmbeddedEngine,
) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": index,
        "text": _text(sample, request.params, engine),
        "logprobs": None if body.logprobs is None else _text_logprobs(sample, body, engine),
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if body.return_token_ids:
        choice["token_ids"] = sample.token_ids
        choice["prompt_token_ids"] = request.prompt.tolist()
    return choice


def _text(sample: GeneratedSample, params: SamplingParams, engine: EmbeddedEngine) -> str:
    if sample.text is not None:
        return sample.text
    if engine.tokenizer is None:
        return ""
    token_ids = sample.token_ids
    if sample.finish_reason == "stop" and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]  # the stop token is no part of the text
    return decode(engine.tokenizer, token_ids, skip_special_tokens=params.skip_special_tokens)


def _token_logprobs(sample: GeneratedSample) -> list[dict[str, Any]]:
    if not sample.top_logprobs:
        return [
            {
                "token_id": token_id,
                "logprob": (value := max(logprob, LOWEST_LOGPROB)),
                "rank": None,
                "top_logprobs": [{"token_id": token_id, "logprob": value, "rank": None}],
            }
            for token_id, logprob in zip(sample.token_ids, sample.logprobs, strict=True)
        ]
    content = []
    for position, token_id in enumerate(sample.token_ids):
        entries = _ranked(sample, position)
        first = entries[0]
        asked = max(1, len(sample.top_logprobs[position].token_ids))
        content.append({**first, "token_id": token_id, "top_logprobs": entries[:asked]})
    return content


def _ranked(sample: GeneratedSample, position: int) -> list[dict[str, Any]]:
    """The sampled token, then the best others in order, as vLLM lists them."""
    top = sample.top_logprobs[position]
    sampled = sample.token_ids[position]
    logprob = max(sample.logprobs[position], LOWEST_LOGPROB)
    entries = [{"token_id": sampled, "logprob": logprob, "rank": top.sampled_rank}]
    for rank, (token_id, value) in enumerate(zip(top.token_ids, top.logprobs, strict=True), 1):
        if token_id != sampled:
            value = max(value, LOWEST_LOGPROB)
            entries.append({"token_id": token_id, "logprob": value, "rank": rank})
    return entries


def _text_logprobs(
    sample: GeneratedSample, body: CompletionBody, engine: EmbeddedEngine
) -> dict[str, Any]:
    def text_of(token_id: int) -> str:
        if body.return_tokens_as_token_ids or engine.tokenizer is None:
            return f"token_id:{token_id}"
        return decode(engine.tokenizer, [token_id], skip_special_tokens=False)

    tokens = [text_of(token_id) for token_id in sample.token_ids]
    logprobs = [max(value, LOWEST_LOGPROB) for value in sample.logprobs]
    top: list[dict[str, float]] = [{t: v} for t, v in zip(tokens, logprobs, strict=True)]
    for position in range(len(sample.top_logprobs)):
        ranked = _ranked(sample, position)
        top[position] = {text_of(entry["token_id"]): entry["logprob"] for entry in ranked}
    offsets = np.cumsum([0, *(len(token) for token in tokens[:-1])]).tolist() if tokens else []
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": top,
    }


def _usage(requests: list[GenerationRequest], samples: list[GeneratedSample]) -> Mapping[str, int]:
    prompt = sum(len(request.prompt) for request in requests)
    generated = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
