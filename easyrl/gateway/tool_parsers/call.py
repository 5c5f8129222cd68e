"""A tool call, and what the parsers have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

END_OF_REASONING, REASONING = "</think>", "<think>"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model asks for."""

    name: str
    arguments: str  # JSON, an object


Parsed: TypeAlias = tuple[str, list[ToolCall]]
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]  # by name, the JSON schema of its parameters


def call_of(name: Any, arguments: Any) -> ToolCall | None:
    """None: it is no call."""
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        call = ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))
        (call.name + call.arguments).encode()
    except (ValueError, RecursionError):  # 1e999, half a surrogate pair, nested too deeply
        return None
    return call


def call_of_json(value: Any) -> ToolCall | None:
    """Of an object with ``name`` and ``arguments``, or ``parameters``."""
    if not isinstance(value, dict):
        return None
    return call_of(value.get("name"), value.get("arguments", value.get("parameters", {})))


def all_calls(calls: list[ToolCall | None]) -> list[ToolCall]:
    """Empty where one is none."""
    whole = [call for call in calls if call is not None]
    return whole if len(whole) == len(calls) else []


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


_JSON = json.JSONDecoder(parse_constant=_refuse)  # NaN and the infinities


def json_at(text: str, at: int) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, and where it ends. Raises ``ValueError``."""
    try:
        return _JSON.raw_decode(text, at)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def json_in(text: str) -> Any:
    """The JSON value that ``text`` is; None: it is none."""
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None


def split_reasoning(text: str) -> tuple[str, str]:
    """Up to the end of reasoning, and behind it: what is said before is no call."""
    reasoning, end, said = text.rpartition(END_OF_REASONING)
    if not end and REASONING in text:
        return text, ""  # it has not ended
    return reasoning + end, said


def split_tagged(text: str, opens: str, closes: str) -> tuple[list[str], str]:
    """What stands in tags, and all else. One pass: a model may repeat a tag without an end."""
    tagged, rest, at = list[str](), list[str](), 0
    while (opened := text.find(opens, at)) >= 0:
        begins = opened + len(opens)
        closed = text.find(closes, begins)
        if closed < 0:
            break
        tagged.append(text[begins:closed])
        rest.append(text[at:opened])
        at = closed + len(closes)
    return tagged, "".join([*rest, text[at:]])
