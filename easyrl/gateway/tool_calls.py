"""Tool calls in a sampled text: a small parser for each way in which models write them.

A parser takes a text and gives what is left of it and the calls. A text that is not wholly well
formed is left as it is, with no calls: what a client is told was then nothing but said.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

END_OF_REASONING, REASONING = "</think>", "<think>"
_OPENED, _CLOSED = "<tool_call>", "</tool_call>"
_BETWEEN_CALLS = "; \n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks for."""

    name: str
    arguments: str  # JSON, an object


Parsed: TypeAlias = tuple[str, list[ToolCall]]
Parser: TypeAlias = Callable[[str, Collection[str]], Parsed]  # text, names of the tools


def tagged_calls(text: str, names: Collection[str]) -> Parsed:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number (Hermes, Qwen).

    What is said before the end of reasoning is no call.
    """
    reasoning, said = _split_reasoning(text)
    tagged, rest = _split_tagged(said)
    calls = [_call(_json(found)) for found in tagged]
    if not calls or None in calls or _OPENED in rest:
        return text, []
    return (reasoning + rest).rstrip(), [call for call in calls if call is not None]


def json_calls(text: str, names: Collection[str]) -> Parsed:
    """``{"name": …, "parameters": {…}}`` and nothing else, several apart by ``;`` (Llama).

    A name that is no tool's makes it a text: a model may answer in JSON.
    """
    calls, at, said = list[ToolCall](), 0, text.strip()
    while at < len(said):
        try:
            value, at = _JSON.raw_decode(said, at)
        except (ValueError, RecursionError):
            return text, []
        call = _call(value)
        if call is None or call.name not in names:
            return text, []
        calls.append(call)
        while at < len(said) and said[at] in _BETWEEN_CALLS:
            at += 1
    return ("", calls) if calls else (text, [])


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)  # NaN and the infinities
PARSERS: Mapping[str, Parser] = {"hermes": tagged_calls, "llama": json_calls}


def parser_named(name: str, chat_template: str) -> Parser:
    """The parser ``name``; ``auto``: that of the way which the template shows the model.

    Raises ``ValueError`` if there is none of that name.
    """
    if name == "auto":
        shows_json = "<|python_tag|>" in chat_template or "ipython" in chat_template
        name = "llama" if shows_json and _OPENED not in chat_template else "hermes"
    if name not in PARSERS:
        raise ValueError(f"no tool parser {name!r}; there are auto, {', '.join(PARSERS)}")
    return PARSERS[name]


def _split_reasoning(text: str) -> tuple[str, str]:
    """Up to the end of reasoning, and behind it."""
    reasoning, end, said = text.rpartition(END_OF_REASONING)
    if not end and REASONING in text:
        return text, ""  # it has not ended
    return reasoning + end, said


def _split_tagged(text: str) -> tuple[list[str], str]:
    """What stands in tags, and all else. One pass: a model may repeat a tag without an end."""
    tagged, rest, at = list[str](), list[str](), 0
    while (opened := text.find(_OPENED, at)) >= 0:
        begins = opened + len(_OPENED)
        closed = text.find(_CLOSED, begins)
        if closed < 0:
            break
        tagged.append(text[begins:closed])
        rest.append(text[at:opened])
        at = closed + len(_CLOSED)
    return tagged, "".join([*rest, text[at:]])


def _json(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any) -> ToolCall | None:
    """None: it is no call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    call = ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))
    try:
        (call.name + call.arguments).encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return None
    return call
