"""Bodies of requests: what they may say, and what they may not because training decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from easyrl.config import SamplingConfig
from easyrl.gateway.errors import BadRequest
from easyrl.gateway.fields import check_fields, check_stream_options, shown

T = TypeVar("T")

RESERVED_KWARGS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "documents",
    "messages",
    "tokenize",
    "tools",
}
MAX_MESSAGES = 10_000  # of a chat: so many short ones take seconds
MAX_STOPS, MAX_STOP_CHARACTERS = 64, 1000

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much shorter than training's a turn is to be."""

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """``POST /v1/chat/completions``, checked."""

    messages: list[dict[str, Any]]  # as they came
    limits: Limits
    tools: list[dict[str, Any]] | None = None
    parses_calls: bool = False  # there are tools, and the model may call them
    max_calls: int | None = None  # of tools, in one answer
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    tokens_as_ids: bool = False  # a token's text in ``logprobs`` is its id
    template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """``POST /inference/v1/generate``, checked."""

    token_ids: np.ndarray  # int32 [P]
    limits: Limits
    logprobs: bool = False
    return_token_ids: bool = False
    wants_text: bool = False


class _Message(msgspec.Struct):
    role: str


class _Function(msgspec.Struct):
    name: str


class _Tool(msgspec.Struct):
    function: _Function
    type: str = "function"


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Stops(msgspec.Struct):
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], msgspec.Meta(max_length=MAX_STOPS)] | None = None
    max_tokens: Count | None = None


class _Chat(_Stops, kw_only=True):
    messages: Annotated[list[_Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Params(_Stops):
    logprobs: int | None = None


class _Generate(msgspec.Struct):
    token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)]
    sampling_params: _Params = msgspec.field(default_factory=_Params)
    stream: bool | None = None
    return_token_ids: bool | None = None
    output_mode: str | None = None


def chat_request(body: bytes, sampling: SamplingConfig) -> ChatRequest:
    """Raises ``BadRequest``; ``sampling`` is training's."""
    data = _json(body)
    messages = data.get("messages")
    if isinstance(messages, list) and len(messages) > MAX_MESSAGES:
        raise BadRequest("messages", f"are {len(messages)}, at most {MAX_MESSAGES}")
    asked = _converted(data, _Chat)
    check_fields(data, _Chat.__struct_fields__, sampling)
    check_stream_options(data.get("stream_options") or {}, _StreamOptions.__struct_fields__)
    if asked.top_logprobs:
        raise BadRequest(
            "top_logprobs",
            f"is {asked.top_logprobs}: the sampled token's log-probability alone is recorded; "
            "leave it out",
        )
    choice = asked.tool_choice
    if choice not in (None, "auto", "none"):
        raise BadRequest(
            "tool_choice",
            f"{shown(choice)} would force what is sampled, and training forces nothing; "
            'use "auto" or "none"',
        )
    if asked.stream_options is not None and not asked.stream:
        raise BadRequest("stream_options", "needs stream: true")
    kwargs = asked.chat_template_kwargs or {}
    if clash := sorted(RESERVED_KWARGS & kwargs.keys()):
        raise BadRequest("chat_template_kwargs", f"{clash} are set by the gateway; leave them out")
    limit = [n for n in (asked.max_tokens, asked.max_completion_tokens) if n is not None]
    return ChatRequest(
        data["messages"],
        _limits(asked, min(limit, default=None)),
        tools=data.get("tools") or None,
        parses_calls=bool(asked.tools) and choice != "none",
        max_calls=1 if asked.parallel_tool_calls is False else None,
        logprobs=bool(asked.logprobs),
        stream=bool(asked.stream),
        include_usage=asked.stream_options is not None and bool(asked.stream_options.include_usage),
        return_token_ids=bool(asked.return_token_ids),
        tokens_as_ids=bool(asked.return_tokens_as_token_ids),
        template_kwargs=kwargs,
    )


def generate_request(body: bytes, sampling: SamplingConfig) -> GenerateRequest:
    """Raises ``BadRequest``; ``sampling`` is training's."""
    data = _json(body)
    asked = _converted(data, _Generate)
    params = data.get("sampling_params") or {}
    check_fields(params, _Params.__struct_fields__, sampling, "sampling_params.")
    check_fields(data, _Generate.__struct_fields__, sampling, trainings=())
    if asked.stream:
        raise BadRequest("stream", "is not supported on this route; leave it out")
    if asked.sampling_params.logprobs:
        raise BadRequest(
            "sampling_params.logprobs",
            f"is {asked.sampling_params.logprobs}: the sampled token's log-probability alone is "
            "recorded; use 0",
        )
    if asked.output_mode not in (None, "tokens", "text"):
        raise BadRequest(
            "output_mode", f'{shown(asked.output_mode)} is neither "tokens" nor "text"'
        )
    return GenerateRequest(
        np.array(asked.token_ids, dtype=np.int32),
        _limits(asked.sampling_params, asked.sampling_params.max_tokens, "sampling_params."),
        logprobs=asked.sampling_params.logprobs is not None,
        return_token_ids=bool(asked.return_token_ids),
        wants_text=asked.output_mode == "text",
    )


def _json(body: bytes) -> dict[str, Any]:
    try:
        data = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest("body", f"is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BadRequest("body", "is no JSON object")
    return data


def _converted(data: dict[str, Any], form: type[T]) -> T:
    try:
        return msgspec.convert(data, form)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        raise BadRequest(path.removesuffix("`") or "body", problem) from None


def _limits(asked: _Stops, max_tokens: int | None, where: str = "") -> Limits:
    stop: Sequence[str] = [asked.stop] if isinstance(asked.stop, str) else asked.stop or ()
    if len(stop) > MAX_STOPS or any(not 0 < len(s) <= MAX_STOP_CHARACTERS for s in stop):
        raise BadRequest(
            where + "stop",
            f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters each",
        )
    return Limits(max_tokens, tuple(stop), tuple(asked.stop_token_ids or ()))
