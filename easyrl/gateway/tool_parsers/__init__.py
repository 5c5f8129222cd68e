"""Tool calls in a sampled text: a file for each way in which models write them, as vLLM names it.

A parser takes a text and gives what is left of it and the calls. A text that is not wholly well
formed is left as it is, with no calls: what a client is told was then nothing but said.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from easyrl.gateway.tool_parsers.call import Parsed, ToolCall, Tools
from easyrl.gateway.tool_parsers.hermes import hermes_calls
from easyrl.gateway.tool_parsers.llama3_json import llama3_json_calls
from easyrl.gateway.tool_parsers.mistral import mistral_calls
from easyrl.gateway.tool_parsers.pythonic import pythonic_calls
from easyrl.gateway.tool_parsers.qwen3_coder import qwen3_coder_calls

__all__ = ["PARSERS", "ToolCall", "ToolParser", "Tools", "chosen_parser", "unread_calls"]

Parse: TypeAlias = Callable[[str, Tools], Parsed]
AUTO, DEFAULT = "auto", "hermes"  # the default: where a template says nothing of tools


@dataclass(frozen=True, slots=True)
class ToolParser:
    """One way to write calls."""

    name: str
    parse: Parse
    shown_by: re.Pattern[str]  # found in the chat templates that show the model this way
    reads_special: bool = False  # its text has the special tokens, which are part of the way


# In the order in which a template is asked: a later one's mark may stand in an earlier one's.
_ALL = (
    ToolParser("qwen3_coder", qwen3_coder_calls, re.compile(r"<parameter=")),
    ToolParser("hermes", hermes_calls, re.compile(r"<tool_call>")),
    ToolParser("mistral", mistral_calls, re.compile(r"\[TOOL_CALLS\]"), reads_special=True),
    ToolParser("pythonic", pythonic_calls, re.compile(r"\[func(?:tion)?_?(?:name)?_?\d?\(")),
    ToolParser("llama3_json", llama3_json_calls, re.compile(r"<\|python_tag\|>|ipython")),
)
PARSERS: Mapping[str, ToolParser] = {parser.name: parser for parser in _ALL}


def unread_calls() -> str:
    """What to say where a template shows tools and none of the parsers' ways."""
    return (
        "the chat template shows none of the ways to call them that are read; set data.tool_parser "
        f"to the one that the model writes: {', '.join(sorted(PARSERS))}"
    )


def chosen_parser(name: str, chat_template: str) -> ToolParser | None:
    """The parser ``name``; ``auto``: that of the way which the template shows the model.

    None: the template has tools, in a way that none reads. Raises ``ValueError`` if there is none
    of that name.
    """
    if name == AUTO:
        for parser in _ALL:
            if parser.shown_by.search(chat_template):
                return parser
        return None if re.search(r"\btools\b", chat_template) else PARSERS[DEFAULT]
    if name not in PARSERS:
        raise ValueError(f"no tool parser {name!r}; there are {AUTO}, {', '.join(sorted(PARSERS))}")
    return PARSERS[name]
