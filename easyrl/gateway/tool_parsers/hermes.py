"""``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number (Hermes, Qwen)."""

from __future__ import annotations

from easyrl.gateway.tool_parsers.call import (
    Parsed,
    Tools,
    all_calls,
    call_of_json,
    json_in,
    split_reasoning,
    split_tagged,
)

OPENED, CLOSED = "<tool_call>", "</tool_call>"


def hermes_calls(text: str, tools: Tools) -> Parsed:
    """What is said before the end of reasoning is no call."""
    reasoning, said = split_reasoning(text)
    tagged, rest = split_tagged(said, OPENED, CLOSED)
    calls = all_calls([call_of_json(json_in(found)) for found in tagged])
    if not calls or OPENED in rest:
        return text, []
    return (reasoning + rest).rstrip(), calls
