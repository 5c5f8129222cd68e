"""Values of a configuration that come from environment variables, ``${oc.env:NAME}``.

They are written as they were given, so that what a variable holds stays in the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from easyrl.config.secrets import KeyPath, leaves

# innermost first; a decoded variable is one expression
_EXPRESSION = re.compile(r"(?<!\\)\$\{\s*oc\.(?:env\s*:[^{}]*|decode\s*:\s*\ufdd0\d+\ufdd1\s*)\}")
_MARK = re.compile("\ufdd0(\\d+)\ufdd1")  # stands for the expression of that number
_NAME = re.compile(r"(?<!\\)\$\{\s*oc\.env\s*:\s*([^,}]*?)\s*([,}])")


def expressions(tree: Any) -> dict[KeyPath, str]:
    """What to write for each value of ``tree`` that depends on a variable, also through another."""
    raw = OmegaConf.to_container(tree, resolve=False)
    found: list[str] = []

    def mark(text: str) -> str:
        before = None
        while text != before:
            before, text = text, _EXPRESSION.sub(lambda match: _number(found, match[0]), text)
        return text

    marked = _with_texts(raw, mark)
    written = {path: text for path, text in leaves(marked) if _asks_environment(text)}
    written = {path: text for path, text in leaves(raw) if path in written}  # as it stands there
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(marked), resolve=True)
    except OmegaConfBaseException:  # a function that takes no mark
        return {path: text for path, text in leaves(raw) if _asks_environment(text)}
    for path, text in leaves(resolved):
        if isinstance(text, str) and _MARK.search(text):
            written.setdefault(path, _unmarked(escaped(text), found))
    return written


def with_variables_as_they_are(tree: Any) -> Any:
    """``tree`` with the expression itself, as text, for each variable that is not set."""

    def keep(match: re.Match[str]) -> str:
        name, end = match.groups()
        return match[0] if end == "," or name in os.environ else "\\" + match[0]

    raw = OmegaConf.to_container(tree, resolve=False)
    return OmegaConf.create(_with_texts(raw, lambda text: _NAME.sub(keep, text)))


def escaped(text: str) -> str:
    """So that OmegaConf reads it back as it is, a literal ``${`` included."""
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)


def without_defaults(expression: str) -> str:
    """A secret's: what stands in for a variable that is not set is a secret too."""
    return re.sub(r"(\$\{\s*oc\.env\s*:[^,{}]*),[^{}]*\}", r"\1}", expression)


def _with_texts(values: Any, change: Callable[[str], str]) -> Any:
    """A tree as loaded, with ``change`` of each of its texts."""
    if isinstance(values, dict):
        return {key: _with_texts(item, change) for key, item in values.items()}
    if isinstance(values, list):
        return [_with_texts(item, change) for item in values]
    return change(values) if isinstance(values, str) else values


def _number(found: list[str], expression: str) -> str:
    found.append(expression)
    return f"\ufdd0{len(found) - 1}\ufdd1"


def _unmarked(text: str, found: list[str]) -> str:
    while _MARK.search(text):
        text = _MARK.sub(lambda match: found[int(match[1])], text)
    return text


def _asks_environment(text: Any) -> bool:
    return isinstance(text, str) and "oc.env" in text
