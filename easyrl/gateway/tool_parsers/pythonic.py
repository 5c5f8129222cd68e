"""``[name(key=value, …), …]`` with Python's literals and nothing else (Llama 3.2 and 4, ToolACE).

Read by hand: Python's own parser can end the process at a text that nests deeply.
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from easyrl.gateway.tool_parsers.call import Parsed, ToolCall, Tools, call_of

MOST_DEPTH = 64  # of nested lists and objects
_TOKEN = re.compile(
    r"""\s*(?:
    (?P<name>[A-Za-z_][\w.]*)
    |(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
    |(?P<text>'(?:[^'\\\n]|\\.)*'|"(?:[^"\\\n]|\\.)*")
    |(?P<mark>[][(){},:=])
    )""",
    re.VERBOSE,
)
_CONSTANTS = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}


def pythonic_calls(text: str, tools: Tools) -> Parsed:
    """A name that is no tool's makes it a text: a model may answer with a list."""
    said = text.strip()
    if not said.startswith("["):
        return text, []
    try:
        calls = _Reader(said).calls()
    except ValueError:
        return text, []
    if not calls or any(call.name not in tools for call in calls):
        return text, []
    return "", calls


class _Reader:
    """Reads one list of calls from its beginning to its end. Raises ``ValueError``."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._kind, self._token = "", ""
        self._next()

    def calls(self) -> list[ToolCall]:
        calls = []
        self._take("[")
        while not self._is("]"):
            calls.append(self._call())
            self._separator("]")
        if self._at != len(self._text):
            raise ValueError("something follows the list")
        return calls

    def _call(self) -> ToolCall:
        name, arguments = self._name(), dict[str, Any]()
        self._take("(")
        while not self._is(")"):
            key = self._name()
            self._take("=")
            if key in arguments:
                raise ValueError(f"{key} is given twice")
            arguments[key] = self._value(MOST_DEPTH)
            self._separator(")")
        self._take(")")
        call = call_of(name, arguments)
        if call is None:
            raise ValueError("no call")
        return call

    def _value(self, depth: int) -> Any:
        kind, token = self._kind, self._token
        if kind in ("text", "number"):
            self._next()
            return _literal(token)
        if kind == "name" and token in _CONSTANTS:
            self._next()
            return _CONSTANTS[token]
        if depth and token == "[":
            return self._list(depth - 1)
        if depth and token == "{":
            return self._object(depth - 1)
        raise ValueError(f"{token!r:.20} is no literal")

    def _list(self, depth: int) -> list[Any]:
        values = []
        self._take("[")
        while not self._is("]"):
            values.append(self._value(depth))
            self._separator("]")
        self._take("]")
        return values

    def _object(self, depth: int) -> dict[str, Any]:
        values = {}
        self._take("{")
        while not self._is("}"):
            key = self._value(0)
            if not isinstance(key, str):
                raise ValueError("a key is no text")
            self._take(":")
            values[key] = self._value(depth)
            self._separator("}")
        self._take("}")
        return values

    def _separator(self, closing: str) -> None:
        if not self._is(closing):
            self._take(",")

    def _name(self) -> str:
        if self._kind != "name":
            raise ValueError(f"{self._token!r:.20} is no name")
        name = self._token
        self._next()
        return name

    def _is(self, mark: str) -> bool:
        return self._kind == "mark" and self._token == mark

    def _take(self, mark: str) -> None:
        if not self._is(mark):
            raise ValueError(f"{self._token!r:.20} in the place of {mark}")
        self._next()

    def _next(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            self._kind, self._token = "", ""
            return
        self._kind, self._at = str(found.lastgroup), found.end()
        self._token = found[self._kind]


def _literal(token: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an unknown escape stays as it is
        try:
            return ast.literal_eval(token)
        except SyntaxError as error:  # 007, a broken escape, too many digits
            raise ValueError(str(error)) from None
