"""OpenAI's chat completions: turns sampled for a chat, and how they are told."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from easyrl.gateway.questions import SampledTurn
from easyrl.gateway.rendering import Renderer
from easyrl.gateway.requests import ChatRequest
from easyrl.gateway.sampled_text import SampledText, Stops, sampled_text
from easyrl.gateway.tool_parsers import ToolCall, ToolParser, Tools

ID_CHARACTERS = 9  # of a tool call: Mistral's templates take no other number


@dataclass(frozen=True, slots=True, eq=False)
class ChatTurn:
    """A sampled turn, as the client is told of it."""

    sampled: SampledTurn
    message: dict[str, Any]  # the assistant's
    finish_reason: str
    said: str  # all that was sampled, without the end of the turn


def chat_turn(
    renderer: Renderer,
    parser: ToolParser | None,
    request: ChatRequest,
    sampled: SampledTurn,
    stops: Stops,
) -> ChatTurn:
    """``parser``: None where no request may have calls."""
    text = sampled_text(renderer, sampled, stops)
    content, calls = text.told, list[ToolCall]()
    if request.parses_calls and parser is not None:
        content, calls = _calls(parser, text, _tools(request))
        calls = calls[: request.max_calls]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content or None if calls else content,
    }
    finish_reason = sampled.finish_reason
    if calls:
        message["tool_calls"] = [_told(call, n, sampled) for n, call in enumerate(calls)]
        if finish_reason == "stop":
            finish_reason = "tool_calls"
    return ChatTurn(sampled, message, finish_reason, text.said)


def _calls(parser: ToolParser, text: SampledText, tools: Tools) -> tuple[str, list[ToolCall]]:
    """What is left of what a client is told, and the calls.

    Where there are none, what ended the turn may have been their own end: ``</tool_call>``.
    """
    texts = [text.told_special if parser.reads_special else text.told]
    whole = text.said if parser.reads_special else text.whole
    for each in [*texts, whole] if whole != texts[0] else texts:
        content, calls = parser.parse(each, tools)
        if calls:
            return content, calls
    return text.told, []


def _tools(request: ChatRequest) -> dict[str, dict[str, Any]]:
    found = {}
    for tool in request.tools or ():
        schema = tool["function"].get("parameters")
        found[tool["function"]["name"]] = schema if isinstance(schema, dict) else {}
    return found


def _told(call: ToolCall, number: int, sampled: SampledTurn) -> dict[str, Any]:
    """Its id is the same when the episode is played again: templates may show it to the model."""
    content = b"%d:%b:%b" % (number, sampled.prompt_ids.tobytes(), sampled.token_ids.tobytes())
    name = hashlib.blake2b(content, digest_size=16).hexdigest()[:ID_CHARACTERS]
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": name, "type": "function", "function": function}


def completion(
    turn: ChatTurn, request: ChatRequest, renderer: Renderer, model: str
) -> dict[str, Any]:
    """``chat.completion``, with vLLM's token ids where they are asked for, and stamps."""
    sampled = turn.sampled
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"refusal": None, **turn.message},
        "finish_reason": turn.finish_reason,
        "stop_reason": None,
        "logprobs": _logprobs(turn, request, renderer),
        "weight_versions": [span._asdict() for span in sampled.version_spans],
    }
    whole: dict[str, Any] = {
        **_head(turn, model, "chat.completion"),
        "choices": [choice],
        "usage": usage(sampled),
    }
    if request.return_token_ids:
        choice["token_ids"] = sampled.token_ids.tolist()
        whole["prompt_token_ids"] = sampled.prompt_ids.tolist()
    return whole


def chunks(
    turn: ChatTurn, request: ChatRequest, renderer: Renderer, model: str
) -> list[dict[str, Any]]:
    """The same as ``chat.completion.chunk``: role, content, tool calls, how it ended, usage."""
    sampled, message = turn.sampled, turn.message
    head = _head(turn, model, "chat.completion.chunk")

    def chunk(delta: dict[str, Any], finish_reason: str | None = None, **more: Any) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **more}
        told.append({**head, "choices": [choice]})

    told: list[dict[str, Any]] = []
    chunk({"role": "assistant", "content": ""}, logprobs=None)
    if request.return_token_ids:
        told[0]["prompt_token_ids"] = sampled.prompt_ids.tolist()
    ids = {"token_ids": sampled.token_ids.tolist()} if request.return_token_ids else {}
    logprobs = _logprobs(turn, request, renderer)
    if message["content"] or logprobs is not None or ids:
        chunk({"content": message["content"] or ""}, logprobs=logprobs, **ids)
    for index, call in enumerate(message.get("tool_calls", ())):
        chunk({"tool_calls": [{"index": index, **call}]}, logprobs=None)
    stamps = [span._asdict() for span in sampled.version_spans]
    chunk({}, turn.finish_reason, logprobs=None, stop_reason=None, weight_versions=stamps)
    if request.include_usage:
        told.append({**head, "choices": [], "usage": usage(sampled)})
    return told


def usage(sampled: SampledTurn) -> dict[str, int]:
    prompt, made = len(sampled.prompt_ids), len(sampled.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": made,
        "total_tokens": prompt + made,
    }


def _head(turn: ChatTurn, model: str, kind: str) -> dict[str, Any]:
    sampled = turn.sampled
    return {
        "id": sampled.id,
        "object": kind,
        "created": sampled.created,
        "model": model,
    }


def _logprobs(turn: ChatTurn, request: ChatRequest, renderer: Renderer) -> dict[str, Any] | None:
    """Of every sampled token, the end of the turn among them."""
    if not request.logprobs:
        return None
    sampled = turn.sampled
    content = renderer.logprobs.of(
        sampled.token_ids, sampled.logprobs, tokens_as_ids=request.tokens_as_ids
    )
    return {"content": content, "refusal": None}
