"""``<function=NAME><parameter=KEY>value</parameter>…</function>`` in ``<tool_call>`` (Qwen3-Coder).

Values are texts as they stand, without the line's ends around them; what they are is said by the
tool's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from easyrl.gateway.tool_parsers.call import (
    Parsed,
    ToolCall,
    Tools,
    all_calls,
    call_of,
    json_in,
    split_reasoning,
    split_tagged,
)
from easyrl.gateway.tool_parsers.hermes import CLOSED, OPENED

_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"


def qwen3_coder_calls(text: str, tools: Tools) -> Parsed:
    """What is said before the end of reasoning is no call."""
    reasoning, said = split_reasoning(text)
    tagged, rest = split_tagged(said, OPENED, CLOSED)
    calls = all_calls([_call(found, tools) for found in tagged])
    if not calls or OPENED in rest:
        return text, []
    return (reasoning + rest).rstrip(), calls


def _call(text: str, tools: Tools) -> ToolCall | None:
    functions, around = split_tagged(text, _FUNCTION, _END_OF_FUNCTION)
    if len(functions) != 1 or around.strip():
        return None
    name, closed, inside = functions[0].partition(">")
    parameters, between = split_tagged(inside, _PARAMETER, _END_OF_PARAMETER)
    if not closed or between.strip():
        return None
    properties = tools[name].get("properties") if name in tools else None
    schemas = properties if isinstance(properties, Mapping) else {}
    arguments = {}
    for parameter in parameters:
        key, closed, value = parameter.partition(">")
        if not closed or key in arguments:
            return None
        arguments[key] = _value(value.removeprefix("\n").removesuffix("\n"), schemas.get(key))
    return call_of(name, arguments)


def _value(text: str, schema: Any) -> Any:
    """A text where the schema has one; else JSON, where it is."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    value = json_in(text)
    return text if value is None and text.strip() != "null" else value
