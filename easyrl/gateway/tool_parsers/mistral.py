"""``[TOOL_CALLS]``, a special token, and behind it the calls (Mistral).

``[{"name": …, "arguments": {…}}, …]`` of its earlier tokenizers; of later ones ``name[ARGS]{…}``,
with ``[CALL_ID]…`` before the arguments or without ``[ARGS]`` in some, each behind a token of its
own.
"""

from __future__ import annotations

from typing import Any

from easyrl.gateway.tool_parsers.call import (
    Parsed,
    ToolCall,
    Tools,
    all_calls,
    call_of,
    call_of_json,
    json_in,
)

MARK, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def mistral_calls(text: str, tools: Tools) -> Parsed:
    """``text`` has its special tokens."""
    content, mark, said = text.partition(MARK)
    if not mark:
        return text, []
    calls = _of_list(said) or all_calls([_named(part) for part in said.split(MARK)])
    return (content.rstrip(), calls) if calls else (text, [])


def _of_list(said: str) -> list[ToolCall]:
    values: Any = json_in(said.strip())
    return all_calls([call_of_json(value) for value in values]) if isinstance(values, list) else []


def _named(said: str) -> ToolCall | None:
    name, mark, arguments = said.partition(ARGUMENTS)
    if not mark:
        name, mark, rest = said.partition("{")
        arguments = mark + rest
    return call_of(name.partition(CALL_ID)[0].strip(), json_in(arguments.strip()))
