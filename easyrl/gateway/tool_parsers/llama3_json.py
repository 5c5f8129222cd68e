"""``{"name": …, "parameters": {…}}`` and nothing else, several apart by ``;`` (Llama 3)."""

from __future__ import annotations

from easyrl.gateway.tool_parsers.call import Parsed, ToolCall, Tools, call_of_json, json_at

BEFORE = "<|python_tag|>"  # that some begin a call with, where it is no special token
_BETWEEN = "; \n"


def llama3_json_calls(text: str, tools: Tools) -> Parsed:
    """A name that is no tool's makes it a text: a model may answer in JSON."""
    said = text.strip().removeprefix(BEFORE).lstrip()
    calls, at = list[ToolCall](), 0
    while at < len(said):
        try:
            value, at = json_at(said, at)
        except ValueError:
            return text, []
        call = call_of_json(value)
        if call is None or call.name not in tools:
            return text, []
        calls.append(call)
        while at < len(said) and said[at] in _BETWEEN:
            at += 1
    return ("", calls) if calls else (text, [])
